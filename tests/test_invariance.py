"""docs/invariance.md, line by line: what gives the same bits, and what the same tokens."""

import numpy as np
import pytest
from engines import (
    BUCKETED,
    MODEL,
    ODD,
    PLACEMENTS,
    alone,
    collect,
    drain,
    engine_config,
    forget_prefixes,
    greedy,
    idle_after,
    poison,
    pools,
    prompts_of,
    same,
    seeded,
    tiny_engine,
)
from helpers import tiny_config

from jinfire import Engine
from jinfire.loading import RandomSource

# Same programs, same bits: placements and dtypes.
EXACT = [
    ("colocated", "float32"),
    ("colocated", "bfloat16"),
    ("disaggregated", "float32"),
    ("disaggregated", "bfloat16"),
    ("colocated 2x2", "float32"),
]
PROMPT = prompts_of([37], seed=41)[0]
PARAMS = seeded(3, 12, logprobs=5)
LOGPROB_TOLERANCE = 1e-4


@pytest.fixture(params=EXACT, ids=" ".join)
def engine(request):
    with idle_after(tiny_engine(*request.param)) as engine:
        forget_prefixes(engine)
        yield engine


def bits(output):
    """Tokens and all their log-probabilities, to the last bit."""
    steps = [(step.token_id, step.logprob, step.top) for step in output.logprobs]
    assert all(np.isfinite(logprob) for _, logprob, _ in steps)
    return output.token_ids, steps


def company(count, seed):
    """Requests of other lengths, parameters and durations."""
    rng = np.random.default_rng(seed)
    prompts = prompts_of(rng.integers(1, 40, count).tolist(), seed)
    kinds = [greedy(20), seeded(1, 3, top_p=0.5), seeded(2, 9, temperature=3.0, logprobs=20)]
    return [(prompt, kinds[i % 3]) for i, prompt in enumerate(prompts)]


# The same bits.


def test_same_bits_again(engine):
    want = bits(alone(engine, PROMPT, PARAMS))
    forget_prefixes(engine)
    assert bits(alone(engine, PROMPT, PARAMS)) == want


def test_same_bits_in_any_company_and_row(engine):
    want = bits(alone(engine, PROMPT, PARAMS))
    rows = set()
    for seed, place in enumerate([0, 1, 2, 3, 5, 7]):
        forget_prefixes(engine)
        others = company(8, seed)
        for case in others[:place]:
            engine.submit(*case)
        name = engine.submit(PROMPT, PARAMS)
        for case in others[place:]:
            engine.submit(*case)
        events = []
        while engine.has_work:
            events += engine.step()
            sequence = engine.scheduler.get(name)
            rows.add(sequence.row if sequence else None)
        assert bits(collect(engine, events)[name]) == want
    assert len(rows - {None}) >= 3


def test_same_bits_when_others_are_aborted(engine):
    want = bits(alone(engine, PROMPT, PARAMS))
    for moment in (2, 5, 8):
        forget_prefixes(engine)
        others = [engine.submit(*case) for case in company(3, moment)]
        name = engine.submit(PROMPT, PARAMS)
        events = [event for _ in range(moment) for event in engine.step()]
        for other in others:
            engine.abort(other)
        assert bits(collect(engine, events + drain(engine))[name]) == want


def test_same_bits_on_any_pages(engine):
    want = bits(alone(engine, PROMPT, PARAMS))
    for held in (1, 7, 20):
        forget_prefixes(engine)
        taken = [(pool, pool.allocate(held)) for pool in pools(engine)]
        assert bits(alone(engine, PROMPT, PARAMS)) == want
        for pool, pages in taken:
            pool.release(pages)


def test_same_bits_over_poisoned_memory(engine):
    want = bits(alone(engine, PROMPT, PARAMS))
    forget_prefixes(engine)
    poison(engine)
    names = [engine.submit(*case) for case in company(3, 9)]
    names.append(engine.submit(PROMPT, PARAMS))
    events = []
    while engine.has_work:
        events += engine.step()
        poison(engine)
    assert bits(collect(engine, events)[names[-1]]) == want


@pytest.mark.parametrize("cached", [4, 8, 12, 16, 20, 32, 36])
def test_same_bits_after_a_prefix_hit(engine, cached):
    """And so for any cut of the prompt into chunks of one program."""
    want = bits(alone(engine, PROMPT, PARAMS))
    forget_prefixes(engine)
    alone(engine, [*PROMPT[:cached], 1], greedy(1))
    output = alone(engine, PROMPT, PARAMS)
    assert output.metrics.cached_tokens == cached
    assert bits(output) == want


# The same tokens.


def same_tokens(one, other):
    """Equal text and tokens, log-probabilities up to the rounding of float32."""
    same(one, other)
    for here, there in zip(one.logprobs, other.logprobs, strict=True):
        assert here.logprob == pytest.approx(there.logprob, abs=LOGPROB_TOLERANCE)


@pytest.fixture(scope="module")
def reference():
    """Tokens of single requests on one device."""

    def run(prompts, params):
        engine = tiny_engine("colocated")
        outputs = []
        for prompt, one in zip(prompts, params, strict=True):
            forget_prefixes(engine)
            outputs.append(alone(engine, prompt, one))
        return outputs

    return run


SHORT = prompts_of([1, 5, 8, 13, 16], seed=43)
SAMPLED = [
    greedy(4, logprobs=1),
    seeded(11, 4, logprobs=1),
    seeded(12, 4, top_k=9, top_p=0.9, logprobs=1),
    seeded(13, 4, min_p=0.05, temperature=1.7, logprobs=1),
    seeded(14, 4, logprobs=1),
]


@pytest.mark.parametrize("name", ODD)
def test_same_tokens_in_any_programs(reference, name):
    """Page sizes, J, rows, chunks, microbatches."""
    placement, changes = ODD[name]
    with idle_after(tiny_engine(placement, **changes)) as engine:
        for got, want in zip(
            engine.generate(SHORT, SAMPLED), reference(SHORT, SAMPLED), strict=True
        ):
            same_tokens(got, want)


@pytest.mark.parametrize("placement", BUCKETED)
def test_same_tokens_in_any_bucket(reference, placement):
    """Which program computes a token depends on what else is there."""
    with idle_after(tiny_engine(placement, **BUCKETED[placement])) as engine:
        wanted = reference(SHORT, SAMPLED)
        for prompt, params, want in zip(SHORT, SAMPLED, wanted, strict=True):
            same_tokens(alone(engine, prompt, params), want)
        forget_prefixes(engine)
        for got, want in zip(engine.generate(SHORT, SAMPLED), wanted, strict=True):
            same_tokens(got, want)


@pytest.mark.parametrize("placement", sorted(PLACEMENTS))
def test_same_tokens_on_any_placement(reference, placement):
    prompts, params = [PROMPT, *SHORT], [PARAMS, *SAMPLED]
    with idle_after(tiny_engine(placement)) as engine:
        forget_prefixes(engine)
        for got, want in zip(
            engine.generate(prompts, params), reference(prompts, params), strict=True
        ):
            same_tokens(got, want)


@pytest.mark.parametrize("placement", ["colocated", "disaggregated"])
def test_same_tokens_after_preemption(reference, placement):
    """The keys and values of answers are computed again, by another program."""
    prompts = prompts_of([9, 5, 13, 8], seed=2)
    params = [seeded(i, 24, logprobs=1) for i in range(4)]
    with idle_after(tiny_engine(placement, num_pages=13)) as engine:
        forget_prefixes(engine)
        outputs = engine.generate(prompts, params)
        assert any(output.metrics.preemptions for output in outputs)
        for got, want in zip(outputs, reference(prompts, params), strict=True):
            same_tokens(got, want)


def test_same_tokens_after_a_hit_on_an_answer(reference):
    """A colocated pool keeps answers, which the decode program computed."""
    with idle_after(tiny_engine("colocated")) as engine:
        forget_prefixes(engine)
        first = alone(engine, PROMPT[:9], seeded(1, 15))
        turn = [*PROMPT[:9], *first.token_ids, 5]
        output = alone(engine, turn, PARAMS)
        assert output.metrics.cached_tokens > 12
        same_tokens(output, *reference([turn], [PARAMS]))


# What is not promised, and by how much it may differ.


def test_bfloat16_rounds_differently_in_other_programs():
    """The first token's log-probabilities, whose context is the same."""
    want = alone(tiny_engine("colocated", "bfloat16"), PROMPT, greedy(1, logprobs=20))
    for placement in ("disaggregated", "colocated 2x2"):
        got = alone(tiny_engine(placement, "bfloat16"), PROMPT, greedy(1, logprobs=20))
        there = dict(got.logprobs[0].top)
        close = [abs(v - there[t]) for t, v in want.logprobs[0].top if t in there]
        assert len(close) >= 15
        assert max(close) < 0.1


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_same_bits_at_the_width_of_a_real_model(dtype):
    """Products of 576 and 1,536 terms are blocked otherwise than those of 32."""
    config = tiny_config(
        layers=3,
        vocab_size=1024,
        width=576,
        mlp_width=1536,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        rope=MODEL.rope,
    )
    engine = Engine(
        RandomSource(config),
        placement=PLACEMENTS["colocated"],
        config=engine_config(max_rows=8, prefill_shapes=((2, 32),)),
        dtype=dtype,
    )
    with idle_after(engine):
        want = bits(alone(engine, PROMPT, PARAMS))
        assert bits(alone(engine, PROMPT, PARAMS)) == want  # a prefix hit
        for seed in range(8):
            forget_prefixes(engine)
            others = company(8, seed)
            cases = [*others[:seed], (PROMPT, PARAMS), *others[seed:]]
            outputs = engine.generate([p for p, _ in cases], [params for _, params in cases])
            assert bits(outputs[seed]) == want
