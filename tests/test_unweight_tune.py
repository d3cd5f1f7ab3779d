"""The search of variants: it goes down to the best, in the time it is given."""

import json

import pytest

import jinfire as jf
from experiments.unweight_tune import Workload, main, moves, tune

LIMITS = (32, None)
# Products per second that a variant would reach, few rows and many; the best differ in form.
SPEED = {
    "full": (1, 9),
    "exponent": (2, 6),
    "transcode": (3, 7),
    "direct": (6, 4),
    "full_palette": (1, 8),
    "compact": (5, 3),
    "full_compact": (1, 5),
}


def tokens_per_s(policy: jf.UnweightPolicy) -> float:
    return sum(
        SPEED[variant][place]
        for _, choice in policy.projections
        for place, (_, variant) in enumerate(choice.buckets)
    )


@pytest.mark.parametrize("start", jf.VARIANTS)
def test_the_descent_ends_at_a_policy_that_no_move_improves(start):
    policy, trials = tune(tokens_per_s, ["mlp.gate", "head"], LIMITS, start, 600)
    found = tokens_per_s(policy)
    for name, choice in policy.projections:
        for bucket in range(len(LIMITS)):
            for other in moves(choice, bucket):
                moved = tuple((n, other if n == name else c) for n, c in policy.projections)
                assert tokens_per_s(jf.UnweightPolicy(policy.default, moved)) <= found
    assert trials[0].move == f"all {start}"
    kept = [trial.tokens_per_s for trial in trials if trial.kept]
    assert kept == sorted(kept)
    assert kept[-1] == found


def test_the_descent_finds_the_best_and_is_the_same_each_time():
    policy, trials = tune(tokens_per_s, ["mlp.gate"], LIMITS, "compact", 600)
    assert policy.choice("mlp.gate") == jf.Choice(((32, "direct"), (None, "full_palette")))
    assert policy.choice("mlp.up").is_dense
    assert tune(tokens_per_s, ["mlp.gate"], LIMITS, "compact", 600) == (policy, trials)


def test_a_gain_within_the_noise_is_no_move():
    policy, trials = tune(
        lambda policy: 100 + tokens_per_s(policy) / 100, ["head"], LIMITS, "full_compact", 600
    )
    assert not any(trial.kept for trial in trials[1:])
    assert str(policy.choice("head")) == "full_compact to 32 rows, full_compact"


def test_moves_stay_in_one_form():
    choice = jf.Choice(((32, "transcode"), (None, "full")))
    found = {str(other) for other in moves(choice, 0)}
    assert len(found) == len(jf.VARIANTS) - 1
    assert "direct to 32 rows, full_palette" in found
    assert "exponent to 32 rows, full" in found


@pytest.mark.long
def test_real_engines_are_measured(golden, tmp_path, capsys):
    path = tmp_path / "policy.json"
    sizes = {"requests": 2, "prompt-tokens": 8, "new-tokens": 4, "repetitions": 1}
    assert {name.replace("-", "_") for name in sizes} < set(Workload.__dataclass_fields__)
    flags = [text for name, size in sizes.items() for text in (f"--{name}", str(size))]
    model = golden("llama32_tied_sharded_bf16")
    main(["--model", str(model), "--out", str(path), "--seconds", "0", *flags])
    trial = json.loads(capsys.readouterr().out)
    assert trial["tokens_per_s"] > 0
    policy = jf.read_policies(path).decode
    assert policy is not None
    assert str(policy.choice("mlp.gate")) == "compact to 32 rows, compact"
    assert policy.choice("embed") == policy.choice("attention.query")
