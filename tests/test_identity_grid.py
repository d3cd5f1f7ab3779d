"""Tokens do not depend on the placement: disaggregated = colocated = single device, in float32.

Every placement runs the same requests, several times over with pages used again, and is compared
with one device; one device is compared with a float64 forward in NumPy.
"""

import itertools

import jax
import numpy as np
import pytest
from engines import LOGPROB_TOLERANCE, assert_same_output
from helpers import (
    Oracle,
    logical_pages,
    margins,
    random_prompts,
    small_engine_config,
    tiny_config,
    tiny_source,
)

from jinfire import Engine, Placement, RequestOutput, SamplingParams

# 5 layers: uneven over 2 and over 4 stages. 8 query and 2 kv heads: tensor 4 replicates kv heads.
MODEL = tiny_config(layers=5)
SEED = 1
CONFIG = small_engine_config()
PAGE, CHUNK = CONFIG.page_size, CONFIG.prefill_shapes[0][1]

# Borders of a page and of a prefill chunk (16 = 2 pages), and a prompt of three chunks.
LENGTHS = sorted({1, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE + 1, CHUNK, CHUNK + 1, 2 * CHUNK + 1})
PROMPTS = dict(zip(LENGTHS, random_prompts(LENGTHS, 61), strict=True))
MAX_TOKENS = (1, 2, 8, 14)  # the last one outgrows the pages that are reserved at first

SAFE_MARGIN = 1e-3  # far above the float32 difference of two layouts, which is about 1e-6

SIZES = ((1, 1), (1, 2), (2, 1), (2, 2), (1, 4), (4, 1))
SHORT = {
    ((2, 2), (1, 4)),  # heads split into replicated ones, two stages merged
    ((1, 4), (2, 2)),  # the way back
    ((4, 1), (1, 2)),  # uneven stages to one, heads split
    ((1, 1), (4, 1)),  # one stage to uneven stages
    ((2, 1), (4, 1)),  # uneven to uneven: 3 + 2 layers to 2 + 1 + 1 + 1
    ((1, 2), (2, 1)),  # heads merged, layers split
    ((2, 2), None),  # colocated on many devices
}
GRID = [*itertools.product(SIZES, SIZES), *((size, None) for size in SIZES)]


def placement(prefill: tuple[int, int], decode: tuple[int, int] | None) -> Placement:
    if decode is None:
        return Placement.colocated(prefill)
    return Placement.disaggregated(prefill, decode)


def name(prefill: tuple[int, int], decode: tuple[int, int] | None) -> str:
    """For -k: "2x2_to_1x4" or "colocated_2x2", pipeline first."""
    sizes = ["x".join(map(str, size)) for size in (prefill, decode) if size]
    return "_to_".join(sizes) if decode else f"colocated_{sizes[0]}"


def greedy(max_tokens: int, **changes) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0, **changes)


Requests = list[tuple[list[int], SamplingParams]]


@pytest.fixture(scope="module")
def requests() -> Requests:
    """All lengths x max_tokens greedily with log-probabilities, drawn ones, and early ends."""
    oracle = Oracle(tiny_source(MODEL, SEED))
    made: Requests = []
    for length, prompt in PROMPTS.items():
        (first, *_), _ = oracle.greedy(prompt, 1)
        made += [(prompt, greedy(count, logprobs=3)) for count in MAX_TOKENS]
        made.append((prompt, greedy(8, stop_token_ids=(first,), logprobs=3)))
        made.append((prompt, SamplingParams(max_tokens=8, seed=length, top_p=0.9)))
    order = np.random.default_rng(0).permutation(len(made))
    return [made[i] for i in order]


def run(engine: Engine, requests: Requests) -> list[RequestOutput]:
    prompts, params = zip(*requests, strict=True)
    return engine.generate(prompts, params)


@pytest.fixture(scope="module")
def single_device(requests) -> list[RequestOutput]:
    engine = Engine(tiny_source(MODEL, SEED), config=CONFIG)
    return run(engine, requests)


def test_single_device_is_right(requests, single_device):
    oracle = Oracle(tiny_source(MODEL, SEED))
    for (prompt, params), output in zip(requests, single_device, strict=True):
        if not params.is_greedy:
            continue
        expected, margin = oracle.greedy(prompt, params.max_tokens)
        if params.stop_token_ids:
            assert output.finish_reason == "stop"
            expected = expected[:1]
        else:
            assert output.finish_reason == "length"
        assert output.token_ids == expected
        assert min(margin, *margins(output)) > SAFE_MARGIN
        logits = oracle.logits(prompt + expected)[len(prompt) - 1 : -1]
        wanted = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        for step, values in zip(output.logprobs, wanted, strict=True):
            assert [token for token, _ in step.top] == list(np.argsort(-values)[:3])
            assert abs(step.logprob - values[step.token_id]) < LOGPROB_TOLERANCE


@pytest.mark.parametrize(
    "pair",
    [
        pytest.param(
            pair,
            id=name(*pair),
            marks=() if pair in SHORT else pytest.mark.long,
        )
        for pair in GRID
    ],
)
def test_tokens_are_those_of_a_single_device(pair, requests, single_device):
    engine = Engine(tiny_source(MODEL, SEED), placement=placement(*pair), config=CONFIG)
    free = engine.stats()["free_pages"]
    # About 90 pages of prompts a round go through pools of 48; the second round finds prefixes.
    for _ in range(2):
        outputs = run(engine, requests)
        for output, expected in zip(outputs, single_device, strict=True):
            assert_same_output(output, expected)
        assert engine.stats()["free_pages"] == free

    page_bytes = PAGE * engine.stats()["kv_bytes_per_token"]
    assert page_bytes == PAGE * 5 * 2 * 2 * 8 * 4  # layers, key and value, heads, head, float32
    for (prompt, params), output in zip(requests, outputs, strict=True):
        pages = 0 if pair[1] is None or params.max_tokens == 1 else -(-len(prompt) // PAGE)
        assert np.nan_to_num(output.metrics.kv_bytes) == pages * page_bytes
        assert output.metrics.output_tokens == len(output.token_ids)


@pytest.mark.parametrize(
    "pair",
    [
        ((2, 2), (1, 4)),
        pytest.param(((4, 1), (2, 2)), marks=pytest.mark.long),
        pytest.param(((1, 4), (4, 1)), marks=pytest.mark.long),
    ],
    ids=lambda pair: name(*pair),
)
def test_bfloat16_pages_arrive_bit_for_bit(pair, monkeypatch):
    engine = Engine(
        tiny_source(MODEL, SEED), placement=placement(*pair), config=CONFIG, dtype="bfloat16"
    )
    runner = engine._runner
    sent: dict[str, list[int]] = {}
    received: dict[str, list[int]] = {}
    send, install = runner.send, runner.install

    def recording_send(sequence, sampled):
        sent[sequence.request_id] = list(sequence.prefill_pages.by_group["full"])
        return send(sequence, sampled)

    def recording_install(sequence, transit, source):
        received[sequence.request_id] = list(sequence.decode_pages.by_group["full"])
        return install(sequence, transit, source)

    monkeypatch.setattr(runner, "send", recording_send)
    monkeypatch.setattr(runner, "install", recording_install)
    prompts = [PROMPTS[length] for length in (1, PAGE, 2 * PAGE + 1, 2 * CHUNK + 1)]
    outputs = engine.generate(prompts, greedy(4))

    source = logical_pages(runner.prefill_model.layout, runner._pools[0])
    target = logical_pages(runner.decode_model.layout, runner._pools[1])
    assert source.dtype == jax.numpy.bfloat16
    assert source.shape == target.shape
    for prompt, output in zip(prompts, outputs, strict=True):
        count = -(-len(prompt) // PAGE)
        tokens = [
            pages[:, :, table[output.request_id][:count]]
            .reshape(MODEL.num_layers, 2, count * PAGE, -1)[:, :, : len(prompt)]
            .view(np.uint16)
            for pages, table in ((source, sent), (target, received))
        ]
        assert np.count_nonzero(tokens[0]) > 0.99 * tokens[0].size
        np.testing.assert_array_equal(*tokens)


def check_against_oracle(engine: Engine, source, lengths=(1, 9, 33), max_tokens=6) -> None:
    """Greedy tokens and log-probabilities of an engine against the NumPy forward."""
    oracle = Oracle(source)
    prompts = random_prompts(lengths, source.config.vocab_size, seed=5)
    outputs = engine.generate(prompts, greedy(max_tokens, logprobs=2))
    for prompt, output in zip(prompts, outputs, strict=True):
        expected, margin = oracle.greedy(prompt, max_tokens)
        assert margin > SAFE_MARGIN
        assert output.token_ids == expected
        logits = oracle.logits(prompt + expected)[len(prompt) - 1 : -1]
        wanted = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        got = [step.logprob for step in output.logprobs]
        chosen = wanted[np.arange(max_tokens), expected]
        np.testing.assert_allclose(got, chosen, rtol=0, atol=LOGPROB_TOLERANCE)


@pytest.mark.parametrize(
    ("layers", "layouts", "counts"),
    [
        (61, placement((8, 1), None), [(8, 8, 8, 8, 8, 7, 7, 7)]),
        (30, placement((4, 1), (3, 1)), [(8, 8, 7, 7), (10, 10, 10)]),
    ],
    ids=["61 over 8", "30 over 4 and 3"],
)
def test_deep_models_over_uneven_stages(layers, layouts, counts):
    model = tiny_config(layers, width=16, mlp_width=16, num_heads=2, num_kv_heads=1)
    source = tiny_source(model, SEED)
    engine = Engine(source, placement=layouts, config=CONFIG)
    runner = engine._runner
    models = {id(m): m for m in (runner.prefill_model, runner.decode_model)}
    assert [m.layout.counts for m in models.values()] == counts
    check_against_oracle(engine, source)


@pytest.mark.parametrize(
    ("pipeline", "microbatches", "rows"),
    [(4, 1, 8), (2, 3, 6)],
    ids=["fewer microbatches than stages", "more, and no multiple"],
)
def test_microbatches_need_not_match_stages(pipeline, microbatches, rows):
    config = small_engine_config(microbatches=microbatches, max_rows=rows)
    source = tiny_source(MODEL, SEED)
    engine = Engine(source, placement=Placement.colocated((pipeline, 1)), config=config)
    check_against_oracle(engine, source, lengths=(1, 9, 17, 33, 8, 2, 20, 5))

    steps, stages, each = config.decode_steps, pipeline, microbatches
    ticks = (steps - 1) * max(stages, each) + each + stages - 1
    assert engine.stats()["bubble_fraction"] == {
        "prefill": pytest.approx(1 - each / (each + stages - 1)),
        "decode": pytest.approx(1 - each * steps / ticks),
    }


def test_qwen3_style_model_on_two_meshes():
    """Per-head norms of queries and keys, and heads whose sizes do not add up to the width."""
    model = tiny_config(family="qwen3", num_heads=4, head_dim=12, qk_norm=True, tie_embeddings=True)
    assert model.num_heads * model.head_dim != model.width
    source = tiny_source(model, SEED)
    engine = Engine(source, placement=Placement.disaggregated((2, 2), (1, 4)), config=CONFIG)
    check_against_oracle(engine, source)
