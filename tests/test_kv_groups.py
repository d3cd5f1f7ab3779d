"""Models that keep their keys and values in other ways, on engines of every placement.

Tokens are compared with the forward pass without a cache. Pages that nobody may read hold NaN.
"""

import dataclasses
import functools
import itertools

import jax
import numpy as np
import pytest
from engines import check_idle, fill_nan, greedy, page_sets, pools, unowned_pages
from helpers import margins, random_prompts, tiny_config, tiny_source

from jinfire import Engine, EngineConfig, Model, Placement
from jinfire.config import ExpertsConfig, LatentConfig, LayerSpec, RopeConfig
from jinfire.kvcache.page_set import FULL, LOCAL, ring_pages
from jinfire.kvcache.page_table import pages_for
from jinfire.sequence import Sequence, SequenceState

CHUNK, PAGE, SPAN = 12, 4, 8
RING = ring_pages(CHUNK, SPAN, PAGE)
LOCAL_LAYER = LayerSpec("chunked", "dense", LOCAL)
FULL_LAYER = LayerSpec("unrotated", "dense", FULL)
# On two stages the second one has no layer for the first local slot.
CHUNKED = dataclasses.replace(
    tiny_config(),
    layers=(LOCAL_LAYER, FULL_LAYER, LOCAL_LAYER, FULL_LAYER, LOCAL_LAYER),
    attention_chunk=CHUNK,
    rope=RopeConfig(),
)
LATENT = dataclasses.replace(
    tiny_config(),
    layers=(LayerSpec("latent"),) * 3,
    head_dim=12,
    num_kv_heads=8,
    latent=LatentConfig(query_rank=None, rank=16, nope_dim=8, rope_dim=4, value_dim=8),
    rope=RopeConfig(interleaved=True),
)
PLACEMENTS = {
    "one device": Placement.colocated((1, 1)),
    "colocated 2x2": Placement.colocated((2, 2)),
    "2x1 to 1x2": Placement.disaggregated((2, 1), (1, 2)),
    "1x4 to 2x2": Placement.disaggregated((1, 4), (2, 2)),
    "2x2 to 2x2": Placement.disaggregated((2, 2), (2, 2)),
    "coded": Placement.disaggregated((2, 1), (1, 2), kv_codec="unweight"),
}
SOME_PLACEMENTS = [
    pytest.param(name, marks=[] if name in ("one device", "2x1 to 1x2") else [pytest.mark.long])
    for name in PLACEMENTS
]
# Borders of the attention chunk, of a page of it, and of the ring.
LENGTHS = (1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, RING * PAGE - 1, RING * PAGE + 1, 2 * CHUNK)
SAFE_MARGIN = 1e-3
LOGPROB_TOLERANCE = 1e-4


def config(**changes) -> EngineConfig:
    defaults = {
        "page_size": PAGE,
        "max_rows": 4,
        "max_context": 64,
        "prefill_shapes": ((2, SPAN),),
        "row_buckets": (),
        "context_buckets": (),
        "decode_steps": 3,
    }
    return EngineConfig(**(defaults | changes))


@functools.cache
def forward(model) -> Model:
    return Model(tiny_source(model, seed=1))


@functools.cache
def expected(model, prompt: tuple[int, ...], count: int) -> tuple[list[int], np.ndarray]:
    """The greedy continuation, and its log-probabilities by step."""
    ids, steps = list(prompt), []
    for _ in range(count):
        padded = np.zeros((1, 64), np.int32)  # one program
        padded[0, : len(ids)] = ids
        logits = forward(model).logits(padded, [len(ids)])[0, len(ids) - 1].astype(np.float64)
        steps.append(logits - np.log(np.exp(logits).sum()))
        ids.append(int(logits.argmax()))
    return ids[len(prompt) :], np.stack(steps)


def check(model, prompts, outputs, count) -> None:
    for prompt, output in zip(prompts, outputs, strict=True):
        tokens, steps = expected(model, tuple(prompt), count)
        assert min(margins(output)) > SAFE_MARGIN
        assert output.token_ids == tokens
        got = [step.logprob for step in output.logprobs]
        np.testing.assert_allclose(got, steps.max(axis=1), rtol=0, atol=LOGPROB_TOLERANCE)


def in_sight(sequence: Sequence) -> range:
    """Columns of a sequence's tables whose local pages a later program may read."""
    state = sequence.state
    if state is SequenceState.PREFILLING:
        query, written = sequence.computed, sequence.computed
    elif state is SequenceState.RUNNING:
        query, written = len(sequence.tokens) - 1, sequence.kv_bound
    else:  # nothing of it is in the decode pool yet
        return range(0)
    return range(query // CHUNK * CHUNK // PAGE, pages_for(written, PAGE))


def poison(engine: Engine) -> int:
    """NaN in all that nobody may read: unowned pages, and those in rings that are out of sight.

    Returns how many of the latter there are.
    """
    runner, scheduler = engine._runner, engine.scheduler
    hidden: list[set[int]] = [set() for _ in page_sets(engine)]
    for sequence in scheduler._sequences.values():
        running = sequence.state in (SequenceState.RUNNING, SequenceState.HANDOFF)
        held = sequence.decode_pages if running else sequence.prefill_pages
        ring = held.by_group.get(LOCAL, [])
        seen = {column % RING for column in in_sight(sequence)}
        hidden[-1 if running else 0] |= {p for i, p in enumerate(ring) if i not in seen}
    for index, (arrays, pages) in enumerate(zip(runner._pools, page_sets(engine), strict=True)):
        runner._pools[index] = {
            group: fill_nan(
                slots,
                unowned_pages(pages.pools[group]) + sorted(hidden[index] if group == LOCAL else ()),
            )
            for group, slots in arrays.items()
        }
    return sum(map(len, hidden))


@pytest.mark.parametrize("placement", SOME_PLACEMENTS)
def test_rings_of_chunked_layers(placement):
    engine = Engine(tiny_source(CHUNKED, 1), placement=PLACEMENTS[placement], config=config())
    assert [pool.total for pool in pools(engine)[:2]] == [4 * RING, 4 * 16]
    free = engine.stats()["free_pages"]
    count = 14
    prompts = random_prompts(LENGTHS, CHUNKED.vocab_size, seed=2)
    names = [engine.submit(prompt, greedy(count, logprobs=2)) for prompt in prompts]
    hidden = poison(engine)
    while engine.has_work:
        engine.step()
        hidden += poison(engine)
    assert hidden > 50
    check(CHUNKED, prompts, [engine.pop_output(name) for name in names], count)
    assert engine.stats()["free_pages"] == free
    check_idle(engine)


@pytest.mark.long
def test_a_ring_as_wide_as_the_table():
    """Then local layers keep everything, like the others."""
    wide = config(prefill_shapes=((1, 64),))
    engine = Engine(tiny_source(CHUNKED, 1), config=wide)
    assert [pool.total for pool in pools(engine)] == [4 * 16, 4 * 16]
    prompts = random_prompts(LENGTHS, CHUNKED.vocab_size, seed=2)
    check(CHUNKED, prompts, engine.generate(prompts, greedy(14, logprobs=2)), 14)


@pytest.mark.parametrize(
    "placement", [pytest.param("one device", marks=pytest.mark.long), "2x1 to 1x2"]
)
def test_prefix_hits_and_preemption_with_rings(placement):
    """A hit ends where an attention chunk begins, so local layers need nothing from before."""
    engine = Engine(
        tiny_source(CHUNKED, 1), placement=PLACEMENTS[placement], config=config(num_pages=29)
    )
    (stem,) = random_prompts([27], CHUNKED.vocab_size, seed=6)
    prompts = [[*stem, i] for i in range(6)]
    count = 20
    names = [engine.submit(prompt, greedy(count, logprobs=2)) for prompt in prompts]
    while engine.has_work:
        engine.step()
        poison(engine)
    check(CHUNKED, prompts, [engine.pop_output(name) for name in names], count)
    check_idle(engine)
    stats = engine.scheduler.stats
    assert stats.preemptions > 0
    assert stats.cached_tokens > 0
    assert stats.cached_tokens % (2 * CHUNK) == 0


def test_handoff_moves_a_ring_and_not_more():
    engine = Engine(tiny_source(CHUNKED, 1), placement=PLACEMENTS["2x1 to 1x2"], config=config())
    page = PAGE * 2 * 2 * 8 * 4  # key and value, heads, head, float32: one layer
    for length in (5, RING * PAGE, RING * PAGE + 1, 50):
        (prompt,) = random_prompts([length], CHUNKED.vocab_size, seed=length)
        (output,) = engine.generate([prompt], greedy(3))
        columns = pages_for(length, PAGE)
        assert output.metrics.kv_bytes == page * (2 * columns + 3 * min(columns, RING))


@pytest.mark.parametrize("placement", SOME_PLACEMENTS)
def test_latents(placement):
    """Latents are one head, with a copy on every device of a stage."""
    engine = Engine(tiny_source(LATENT, 1), placement=PLACEMENTS[placement], config=config())
    prompts = random_prompts([1, 3, 4, 9, 21], LATENT.vocab_size, seed=4)
    names = [engine.submit(prompt, greedy(8, logprobs=2)) for prompt in prompts]
    while engine.has_work:
        poison(engine)
        engine.step()
    outputs = [engine.pop_output(name) for name in names]
    check(LATENT, prompts, outputs, 8)
    check_idle(engine)
    if not engine.placement.is_colocated:
        for prompt, output in zip(prompts, outputs, strict=True):
            pages = pages_for(len(prompt), PAGE)
            assert output.metrics.kv_bytes == pages * PAGE * 3 * (16 + 4) * 4


def test_pools_hold_a_copy_of_the_latents_on_every_device():
    engine = Engine(tiny_source(LATENT, 1), placement=PLACEMENTS["1x4 to 2x2"], config=config())
    for pools_ in engine._runner._pools:
        for leaf in jax.tree.leaves(pools_):
            assert {shard.data.shape[1:] for shard in leaf.addressable_shards} == {
                (65, PAGE, 1, 20)
            }


def test_chunked_layers_need_their_chunk():
    model = dataclasses.replace(CHUNKED, attention_chunk=None)
    with pytest.raises(ValueError, match="in a model with an attention chunk"):
        Engine(tiny_source(model, 1), config=config())


def test_same_bits_after_a_hit_and_in_company():
    """One program a phase computes every token, whatever was cached and whoever is there."""
    engine = Engine(tiny_source(CHUNKED, 1), config=config())
    prompt, *others = random_prompts([31, 45, 9, 13], CHUNKED.vocab_size, seed=7)
    params = greedy(30, logprobs=2)
    (alone,) = engine.generate([prompt], params)
    (again,) = engine.generate([prompt], params)
    company = engine.generate([*others, prompt], params)[-1]
    assert (alone.metrics.cached_tokens, again.metrics.cached_tokens) == (0, 2 * CHUNK)
    for output in (again, company):
        assert output.token_ids == alone.token_ids
        assert output.logprobs == alone.logprobs


# Llama 4 Maverick in small: chunked and unrotated layers, every other one with experts.
MAVERICK = dataclasses.replace(
    CHUNKED,
    layers=(
        LOCAL_LAYER,
        LayerSpec("chunked", "experts", LOCAL),
        LayerSpec("unrotated", "experts", FULL),
    )
    * 2,
    experts=ExpertsConfig(count=4, per_token=1, width=16, router="scaled_input", shared_width=48),
)
# DeepSeek-V3 in small: latents, a dense layer in front.
DEEPSEEK = dataclasses.replace(
    LATENT,
    layers=(LayerSpec("latent"), *(LayerSpec("latent", "experts"),) * 4),
    experts=ExpertsConfig(
        count=8,
        per_token=3,
        width=16,
        router="sigmoid",
        normalise=True,
        scaling=2.5,
        groups=4,
        groups_per_token=2,
        shared_width=48,
    ),
)


EXPERT_PLACEMENTS = {
    "colocated 1x1x2": Placement.colocated((1, 1, 2)),
    "2x1x2 to 1x2x2": Placement.disaggregated((2, 1, 2), (1, 2, 2)),
    "1x2 to 4x1": Placement.disaggregated((1, 2), (4, 1)),
}
LONG = {("maverick", "1x2 to 4x1"), ("deepseek", "colocated 1x1x2")}


@pytest.mark.parametrize(
    ("model", "placement"),
    [
        pytest.param(model, placement, marks=[pytest.mark.long] * ((model, placement) in LONG))
        for model, placement in itertools.product(("maverick", "deepseek"), EXPERT_PLACEMENTS)
    ],
)
def test_experts_over_their_own_axis(model, placement):
    """Heads, latents and dense parts over expert x tensor, and stages with empty slots."""
    model = {"maverick": MAVERICK, "deepseek": DEEPSEEK}[model]
    where = EXPERT_PLACEMENTS[placement]
    engine = Engine(tiny_source(model, 1), placement=where, config=config())
    prompts = random_prompts([1, 3, 13, 29], model.vocab_size, seed=10)
    names = [engine.submit(prompt, greedy(8, logprobs=2)) for prompt in prompts]
    while engine.has_work:
        poison(engine)
        engine.step()
    check(model, prompts, [engine.pop_output(name) for name in names], 8)
    check_idle(engine)
