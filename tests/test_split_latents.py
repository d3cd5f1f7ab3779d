"""Latents split over the devices of a stage give what replicated ones give, from a part of them.

Slots: device d of n holds the d-th n-th of every page. Pages that nobody may read hold NaN.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from commands import last_json
from commands import run as run_command
from engines import assert_same_output, check_idle, greedy, poison
from helpers import margins, random_prompts, tiny_config, tiny_source
from jax.sharding import PartitionSpec

from jinfire import Engine, EngineConfig, Placement, RequestOutput
from jinfire.cli import options, parser
from jinfire.cli.console import FlagError
from jinfire.config import ExpertsConfig, LatentConfig, LayerSpec, RopeConfig
from jinfire.kvcache.page_table import pages_for
from jinfire.layout import StageLayout
from jinfire.programs.split_latents import (
    STAGE,
    OwnSlots,
    split_expanded_attention,
    split_latent_attention,
    write_split,
)
from pallas_kernels import (
    KERNELS,
    expanded_latent_attention,
    join_parts,
    latent_attention,
    latent_attention_part,
    write_pages,
)
from pallas_kernels.kernel import build_paged
from sharding import MeshSpec, make_mesh

error = KERNELS["latent_attention"].error
SAFE_MARGIN = 1e-3
PAGE = 8
LATENT = dataclasses.replace(
    tiny_config(),
    layers=(LayerSpec("latent"),) * 3,
    head_dim=12,
    num_kv_heads=8,
    latent=LatentConfig(query_rank=None, rank=16, nope_dim=8, rope_dim=4, value_dim=8),
    rope=RopeConfig(interleaved=True),
)
# DeepSeek-V3 in small: a dense layer in front.
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


# What a device holds.


MESHES = [MeshSpec(expert=2, tensor=2), MeshSpec(tensor=8)]
meshes = pytest.mark.parametrize("spec", MESHES, ids=str)
SPLIT_POOL = PartitionSpec(None, STAGE)
BY_HEAD = PartitionSpec(None, STAGE)


def on_stage(spec: MeshSpec, function, in_specs, out_specs):
    """`function` of a device's shards, on the devices of one stage."""
    mesh = make_mesh(spec, jax.devices()[: spec.size])
    return jax.jit(
        jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    )


@meshes
def test_every_token_lies_on_one_device(spec: MeshSpec) -> None:
    devices, tokens = spec.size, 3 * PAGE + 2

    def owned(pages):
        own = OwnSlots.of(pages)
        assert own.page_size == PAGE
        places, mine = own.positions(jnp.arange(tokens)[None])
        lengths = own.lengths(jnp.arange(tokens + 1))
        return places, mine, lengths[None]

    out_specs = PartitionSpec(STAGE)
    pages = jnp.zeros((1, PAGE, 1, 1))
    found = on_stage(spec, owned, SPLIT_POOL, out_specs)(pages)
    places, mine, lengths = map(np.asarray, found)
    part = PAGE // devices
    for device in range(devices):
        own = [p for p in range(tokens) if p % PAGE // part == device]
        assert np.flatnonzero(mine[device]).tolist() == own
        # In their order, without a gap.
        assert places[device][own].tolist() == list(range(len(own)))
        assert lengths[device].tolist() == [sum(p < n for p in own) for n in range(tokens + 1)]


@meshes
def test_writes_land_where_they_would(spec: MeshSpec) -> None:
    rng = np.random.default_rng(0)
    table = rng.permutation(np.arange(1, 9)).reshape(2, 4).astype(np.int32)
    positions = np.asarray([[6, 7, 8, 9, 10], [31, 32, 33, 0, 1]], np.int32)  # 4 pages: 32 is past
    valid = np.asarray([[True] * 5, [True, True, True, False, True]])
    new = rng.standard_normal((2, 5, 1, 3)).astype(np.float32)
    pages = rng.standard_normal((9, PAGE, 1, 3)).astype(np.float32)
    whole = PartitionSpec()
    run = on_stage(spec, write_split, (SPLIT_POOL, *[whole] * 4), SPLIT_POOL)
    got = np.asarray(run(pages, new, table, positions, valid))
    want = np.asarray(write_pages(*map(jnp.asarray, (pages, new, table, positions, valid))))
    np.testing.assert_array_equal(got[1:], want[1:])
    # Nothing but first slots of the null page changes beside them.
    changed = np.flatnonzero((got[0] != pages[0]).any(axis=(1, 2)))
    assert set(changed) <= set(range(0, PAGE, PAGE // spec.size))


# Attention.


def latents(lengths, columns: int, width: int, dtype, page: int = PAGE) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    return build_paged(rng, np.dtype(dtype), np.asarray(lengths), 1, width, page, columns)


# Shorter than a device's part, its borders, those of a page.
LENGTHS = (0, 1, 2, 3, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE + 3, 4 * PAGE)


@meshes
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_decode_attends_to_the_latents_of_all(spec: MeshSpec, dtype) -> None:
    heads, rank, width = 8, 16, 20
    case = latents(LENGTHS, 4, width, dtype)
    rng = np.random.default_rng(4)
    query = rng.standard_normal((len(LENGTHS), heads, width)).astype(dtype)
    lengths = np.asarray(LENGTHS, np.int32)
    arrays = (query, case["key_pages"], case["page_table"], lengths)
    attend = functools.partial(split_latent_attention, scale=0.3, rank=rank)
    run = on_stage(spec, attend, (BY_HEAD, SPLIT_POOL, PartitionSpec(), PartitionSpec()), BY_HEAD)
    got = run(*arrays)
    assert got.dtype == dtype
    want = latent_attention(*map(jnp.asarray, arrays), scale=0.3, rank=rank)
    tolerance = 1e-6 if dtype is np.float32 else 1e-2
    assert error(got, np.asarray(want).astype(np.float64)) <= tolerance


@meshes
def test_prefill_attends_to_the_latents_of_all(spec: MeshSpec) -> None:
    heads, plain, rotary, rank, value, chunk = 8, 6, 4, 16, 5, 12
    starts, lengths = np.asarray([0, 5, 16, 0], np.int32), np.asarray([12, 11, 1, 0], np.int32)
    case = latents(starts + lengths, 4, rank + rotary, np.float32)
    rng = np.random.default_rng(5)
    query = rng.standard_normal((4, chunk, heads, plain + rotary)).astype(np.float32)
    up = rng.standard_normal((heads, plain + value, rank)).astype(np.float32)
    arrays = (query, case["key_pages"], up, case["page_table"], starts, lengths)
    by_head = PartitionSpec(None, None, STAGE)
    run = on_stage(
        spec,
        functools.partial(split_expanded_attention, scale=0.3),
        (by_head, SPLIT_POOL, PartitionSpec(STAGE), *[PartitionSpec()] * 3),
        by_head,
    )
    want = expanded_latent_attention(*map(jnp.asarray, arrays), scale=0.3)
    assert error(run(*arrays), np.asarray(want).astype(np.float64)) <= 1e-6


def test_parts_join_to_the_whole() -> None:
    """Three parts of unequal size, one of them empty and NaN, in float64."""
    rng = np.random.default_rng(6)
    scores, values = rng.normal(size=(2, 3, 20)) * 9, rng.normal(size=(2, 3, 20, 5))
    whole = np.exp(scores - scores.max(axis=2, keepdims=True))
    whole /= whole.sum(axis=2, keepdims=True)
    want = np.einsum("bns,bnsc->bnc", whole, values)
    out, lse = np.full((4, 2, 3, 5), np.nan), np.full((4, 2, 3), -np.inf)
    for part, (start, stop) in zip((0, 2, 3), ((0, 1), (1, 13), (13, 20)), strict=True):
        weights = np.exp(scores[:, :, start:stop])
        lse[part] = np.log(weights.sum(axis=2))
        weights /= weights.sum(axis=2, keepdims=True)
        out[part] = np.einsum("bns,bnsc->bnc", weights, values[:, :, start:stop])
    got = join_parts(jnp.asarray(out, jnp.float32), jnp.asarray(lse, jnp.float32))
    assert error(got, want) <= 1e-6
    nothing = join_parts(jnp.full((4, 2, 3, 5), jnp.nan), jnp.full((4, 2, 3), -jnp.inf))
    assert not np.asarray(nothing).any()


def test_a_huge_score_weighs_all() -> None:
    out = jnp.asarray([[[[1.0]]], [[[2.0]]]])
    lse = jnp.asarray([[[1e4]], [[-1e4]]])
    assert float(join_parts(out, lse)[0, 0, 0]) == 1.0


def test_a_part_says_its_sum() -> None:
    case = latents((5, 0), 1, 20, np.float32)
    query = np.zeros((2, 4, 20), np.float32)
    _, lse = latent_attention_part(
        jnp.asarray(query),
        jnp.asarray(case["key_pages"]),
        jnp.asarray(case["page_table"]),
        jnp.asarray([5, 0], jnp.int32),
        scale=1.0,
        rank=16,
    )
    np.testing.assert_allclose(lse[0], np.log(5), rtol=1e-6)
    assert np.isneginf(lse[1]).all()


# Engines.


def config(**changes) -> EngineConfig:
    defaults = {
        "page_size": PAGE,
        "max_rows": 4,
        "max_context": 64,
        "prefill_shapes": ((2, 16),),
        "row_buckets": (),
        "context_buckets": (),
        "decode_steps": 3,
    }
    return EngineConfig(**(defaults | changes))


def run(engine: Engine, prompts, params) -> list[RequestOutput]:
    """Outputs, with NaN in all that nobody owns, and behind the ends of what somebody does."""
    names = [engine.submit(prompt, params) for prompt in prompts]
    while engine.has_work:
        poison(engine)
        engine.step()
    outputs = [engine.pop_output(name) for name in names]
    check_idle(engine)
    return outputs


# A part of a page on 8 devices is one token.
PROMPT_LENGTHS = (1, 2, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE + 3, 33)


@functools.cache
def alone(model, page: int = PAGE, count: int = 10) -> list[RequestOutput]:
    """Outputs of one device."""
    prompts = random_prompts(PROMPT_LENGTHS, model.vocab_size, seed=4)
    engine = Engine(tiny_source(model, 1), config=config(page_size=page))
    outputs = engine.generate(prompts, greedy(count, logprobs=2))
    for output in outputs:
        assert min(margins(output)) > SAFE_MARGIN
    return outputs


PLACEMENTS = {
    "colocated 1x2": Placement.colocated((1, 2), latents="split"),
    "colocated 1x8": Placement.colocated((1, 8), latents="split"),
    "colocated 2x4": Placement.colocated((2, 4), latents="split"),
    "1x2 to 1x4": Placement.disaggregated((1, 2), (1, 4), latents="split"),
    "2x2 to 1x4": Placement.disaggregated((2, 2), (1, 4), latents="split"),
    "1x4 to 2x2": Placement.disaggregated((1, 4), (2, 2), latents="split"),
    "2x1 to 1x4": Placement.disaggregated((2, 1), (1, 4), latents="split"),
    "1x4 to 3x1": Placement.disaggregated((1, 4), (3, 1), latents="split"),
    "1x2 whole to 2x2": Placement.disaggregated((1, 2), (2, 2), latents=("replicated", "split")),
    "1x4 to 2x2 whole": Placement.disaggregated((1, 4), (2, 2), latents=("split", "replicated")),
}
SHORT = ("colocated 1x8",)


@pytest.mark.parametrize(
    "placement",
    [pytest.param(n, marks=[] if n in SHORT else [pytest.mark.long]) for n in PLACEMENTS],
)
def test_tokens_are_those_of_a_single_device(placement: str) -> None:
    engine = Engine(tiny_source(LATENT, 1), placement=PLACEMENTS[placement], config=config())
    free = engine.stats()["free_pages"]
    prompts = random_prompts(PROMPT_LENGTHS, LATENT.vocab_size, seed=4)
    for _ in range(2):  # the second round finds the first one's prefixes
        outputs = run(engine, prompts, greedy(10, logprobs=2))
        for output, expected in zip(outputs, alone(LATENT), strict=True):
            assert_same_output(output, expected)
        assert engine.stats()["free_pages"] == free
    assert engine.scheduler.stats.cached_tokens > 0
    if not engine.placement.is_colocated:
        for prompt, output in zip(prompts, outputs, strict=True):
            pages = pages_for(len(prompt), PAGE)
            assert output.metrics.kv_bytes == pages * PAGE * 3 * (16 + 4) * 4


EXPERT_PLACEMENTS = {
    "colocated 1x2x4": Placement.colocated((1, 2, 4), latents="split"),
    "2x1x2 to 1x2x2": Placement.disaggregated((2, 1, 2), (1, 2, 2), latents="split"),
    "1x2x2 whole to 4x1": Placement.disaggregated(
        (1, 2, 2), (4, 1), latents=("replicated", "split")
    ),
}


@pytest.mark.parametrize(
    "placement",
    [pytest.param(n, marks=pytest.mark.long) for n in EXPERT_PLACEMENTS],
)
def test_over_expert_and_tensor_axis(placement: str) -> None:
    where = EXPERT_PLACEMENTS[placement]
    engine = Engine(tiny_source(DEEPSEEK, 1), placement=where, config=config())
    prompts = random_prompts(PROMPT_LENGTHS, DEEPSEEK.vocab_size, seed=4)
    outputs = run(engine, prompts, greedy(10, logprobs=2))
    for output, expected in zip(outputs, alone(DEEPSEEK), strict=True):
        assert_same_output(output, expected)


def test_preempted_rows_go_on() -> None:
    placement = Placement.disaggregated((1, 2), (1, 4), latents="split")
    small = config(num_pages=13, max_context=48)
    engine = Engine(tiny_source(LATENT, 1), placement=placement, config=small)
    (stem,) = random_prompts([19], LATENT.vocab_size, seed=10)
    prompts = [[*stem, i] for i in range(5)]
    expected = Engine(tiny_source(LATENT, 1), config=config(max_context=48)).generate(
        prompts, greedy(20, logprobs=2)
    )
    outputs = run(engine, prompts, greedy(20, logprobs=2))
    for output, wanted in zip(outputs, expected, strict=True):
        assert min(margins(wanted)) > SAFE_MARGIN
        assert_same_output(output, wanted)
    assert engine.scheduler.stats.preemptions > 0
    assert engine.scheduler.stats.cached_tokens > 0


@pytest.mark.long
def test_a_wide_page_in_bfloat16() -> None:
    """Pages of 64 tokens, 16 a device; equal tokens are not promised, finite ones are."""
    placement = Placement.colocated((1, 4), latents="split")
    wide = config(page_size=64, max_context=192, prefill_shapes=((1, 64),))
    engine = Engine(tiny_source(LATENT, 1), placement=placement, config=wide, dtype="bfloat16")
    outputs = run(engine, random_prompts([3, 70], LATENT.vocab_size), greedy(70, logprobs=1))
    for output in outputs:
        assert np.isfinite([step.logprob for step in output.logprobs or ()]).all()
        assert len(output.token_ids) == 70


GOLDEN = {
    "deepseek_v3_f32": Placement.colocated((1, 4), latents="split"),
    "kimi_k25_f32": Placement.disaggregated((1, 2), (1, 2, 2), latents="split"),
    "kimi_k25_int4_sharded": Placement.disaggregated(
        (2, 1, 2), (1, 1, 4), latents=("replicated", "split")
    ),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.long] * ("int4" not in n)) for n in GOLDEN],
)
def test_tokens_of_reference_models(golden, name: str) -> None:
    sizes = config(max_context=56)
    params = greedy(8, logprobs=2)
    prompts = random_prompts((1, 7, 8, 9, 33), 250)
    single = Engine.from_pretrained(golden(name), config=sizes)
    split = Engine.from_pretrained(golden(name), config=sizes, placement=GOLDEN[name])
    for output, expected in zip(
        run(split, prompts, params), single.generate(prompts, params), strict=True
    ):
        assert min(margins(expected)) > SAFE_MARGIN
        assert_same_output(output, expected)


# Memory.


def test_pools_hold_an_eighth() -> None:
    whole, split = (
        Engine(
            tiny_source(LATENT, 1),
            placement=Placement.colocated((1, 8), latents=latents),
            config=config(),
        )
        for latents in ("replicated", "split")
    )
    assert whole.stats()["kv_pool_bytes"] == 8 * split.stats()["kv_pool_bytes"]
    for leaf in jax.tree.leaves(split._runner._pools):
        assert leaf.shape == (1, 33, PAGE, 1, 20)
        assert {shard.data.shape for shard in leaf.addressable_shards} == {(1, 33, 1, 1, 20)}
    assert "latents split" in split.stats()["placement"]
    assert "latents" not in whole.stats()["placement"]


# Refusals.


def test_pages_that_do_not_split() -> None:
    placement = Placement.disaggregated((1, 2), (1, 4), latents="split")
    message = "pages of 6 tokens cannot be split over the 4 devices of a stage; valid sizes: 4, 8,"
    with pytest.raises(ValueError, match=re.escape(message)):
        Engine(tiny_source(LATENT, 1), placement=placement, config=config(page_size=6))
    layout = StageLayout(LATENT, MeshSpec(tensor=8), latents="split")
    assert (layout.page_slots(64), layout.kv_heads, layout.device_kv_heads) == (8, 1, 1)


def test_models_without_latents() -> None:
    placement = Placement.colocated((1, 2), latents="split")
    message = "expected a model with latent attention, got family 'llama'"
    with pytest.raises(ValueError, match=message):
        Engine(tiny_source(tiny_config()), placement=placement, config=config())


def test_what_a_placement_takes() -> None:
    both = Placement.disaggregated((1, 2), (1, 4), latents="split")
    assert both == Placement.disaggregated((1, 2), (1, 4), latents=("split", "split"))
    mixed = Placement.disaggregated((1, 2), (1, 4), latents=("replicated", "split"))
    assert (mixed.prefill_latents, mixed.decode_latents) == ("replicated", "split")
    assert str(mixed).endswith("decode pipeline 1 x tensor 4 (latents split)")
    for latents in ("whole", ("split",), ("split", "split", "split"), 3):
        with pytest.raises(ValueError, match=r"Placement.latents: expected one of replicated, spl"):
            Placement.disaggregated((1, 2), (1, 4), latents=latents)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expected one for both phases on one mesh"):
        Placement(MeshSpec(), latents=("replicated", "split"))


# The command line.


def test_inspect_says_what_a_device_keeps(golden, capsys) -> None:
    where = ("--prefill", "1x2", "--decode", "1x4", "--latents", "replicated,split")
    assert run_command("inspect", "--model", golden("kimi_k25_f32"), *where, "--json") == 0
    prefill, decode = last_json(capsys.readouterr().out)["layouts"]
    assert (prefill["latents"], decode["latents"]) == ("replicated", "split")
    whole = 3 * (24 + 16) * 4
    assert prefill["kv_bytes_per_token_per_device"]["float32"] == whole
    assert decode["kv_bytes_per_token_per_device"]["float32"] == whole // 4
    assert decode["kv_heads_per_device"] == 1


def test_flags_become_a_placement() -> None:
    def placement(*flags: str) -> Placement:
        return options.placement(parser().parse_args(["generate", "x", *flags]))

    one = placement("--colocated", "1x2", "--latents", "split")
    assert one == Placement.colocated((1, 2), latents="split")
    two = placement("--prefill", "1x2", "--decode", "1x4", "--latents", "replicated,split")
    assert two.latents == ("replicated", "split")
    assert placement("--colocated", "1x2").latents == ("replicated", "replicated")
    with pytest.raises(FlagError, match="--latents: expected one for one mesh, got replicated,spl"):
        placement("--colocated", "1x2", "--latents", "replicated,split")
