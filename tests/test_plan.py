"""The planner against numbers worked out by hand, and what it says of real models."""

import dataclasses
import json
import sys
from typing import Any

import pytest
from helpers import tiny_config

import jinfire as jf
from jinfire.config import ExpertsConfig, LatentConfig, LayerSpec
from jinfire.layout import StageLayout
from jinfire.loading import RandomSource, load_params
from jinfire.models import parse_config
from jinfire.models.presets import preset
from jinfire.planner.footprint import KINDS, Footprint, Workload, weight_kind
from jinfire.planner.gpus import GIB, GPUS, parse_gpus
from jinfire.planner.layouts import Compiled, Fitting, Refused, mesh_specs, plan_model
from jinfire.planner.roofline import decode_time, prefill_time
from jinfire.weights import parse_dtype
from pallas_kernels import TARGET_NAMES, ToolchainMissing
from sharding import MeshSpec, make_mesh, split_devices

SMALL_LOAD = Workload(rows=8, context=48, chunk=16, steps=4, page_size=8)

TINY_MOE = dataclasses.replace(
    tiny_config(),
    width=64,
    num_kv_heads=8,
    head_dim=12,
    layers=(
        LayerSpec("latent", "dense"),
        LayerSpec("latent", "experts"),
        LayerSpec("latent", "experts"),
    ),
    latent=LatentConfig(query_rank=16, rank=24, nope_dim=8, rope_dim=4, value_dim=8),
    experts=ExpertsConfig(8, 2, 64, router="sigmoid", shared_width=32, int4=True),
)

# Three layers that keep 16 tokens to one that keeps all.
TINY_LOCAL = dataclasses.replace(
    tiny_config(),
    layers=(LayerSpec("chunked", kv_group="local"),) * 3 + (LayerSpec("unrotated"),),
    attention_chunk=16,
)

TIED = tiny_config(3, tie_embeddings=True)


def footprint(config, *layout: int, dtype: str = "bfloat16") -> Footprint:
    pipeline, tensor, expert = (*layout, 1) if len(layout) == 2 else layout
    spec = MeshSpec(pipeline=pipeline, tensor=tensor, expert=expert)
    return Footprint(StageLayout(config, spec), dtype)


# Bytes.


def test_dense_weights_by_hand() -> None:
    found = footprint(tiny_config(5), 2, 4)
    zero = {"router": 0, "routed_experts": 0, "shared_experts": 0}
    assert (
        found.parameters
        == {
            "embedding": 2 * 61 * 32,
            "attention": 5 * (64 * 32 + 2 * 16 * 32 + 32 * 64),
            "dense_mlp": 5 * 3 * 48 * 32,
            "norms": 5 * 2 * 32 + 32,
        }
        | zero
    )
    # Stages of 3 and 2 layers have 3 slots; 61 tokens are padded to 64, 2 kv heads copied to 4.
    assert (
        found.weights
        == {
            "embedding": 2 * (2 * 64 // 8 * 32),
            "attention": 2 * 3 * (64 * 32 // 4 + 2 * 32 * 32 // 4 + 32 * 64 // 4),
            "dense_mlp": 2 * 3 * (3 * 48 * 32 // 4),
            "norms": 2 * (3 * 2 * 32 + 32),
        }
        | zero
    )


def test_experts_and_latents_by_hand() -> None:
    found = footprint(TINY_MOE, 1, 2, 4)
    values, scales = 3 * 64 * 64, 3 * 64 * 64 // 32
    assert found.parameters["routed_experts"] == 2 * 8 * values
    assert found.model_bytes["routed_experts"] == 2 * 8 * (values // 2 + scales * 2)
    # 2 experts a device, the width of each cut in two.
    assert found.weights["routed_experts"] == 2 * 2 * (values // 2 + scales * 2) // 2
    # The choice among experts is everybody's; its bias is float32.
    assert found.weights["router"] == 2 * (8 * 64 * 2 + 8 * 4)
    assert found.weights["shared_experts"] == 2 * 2 * (3 * 32 * 64) // 8
    # Products to the latents are whole on every device, those from them split by heads.
    whole, split = 16 * 64 + 28 * 64, 96 * 16 + 8 * 16 * 24 + 64 * 64
    assert found.weights["attention"] == 2 * 3 * (whole + split // 8)
    assert found.kv_bytes_per_token == {"full": 3 * (24 + 4) * 2}


@pytest.mark.parametrize(
    ("config", "layout"),
    [
        (tiny_config(5), (2, 4)),
        (TIED, (1, 2)),
        (TINY_MOE, (1, 2, 4)),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_are_those_that_are_loaded(config, layout, dtype) -> None:
    found = footprint(config, *layout, dtype=dtype)
    spec = found.layout.mesh_spec
    mesh = make_mesh(spec, split_devices([spec])[0])
    params = load_params(RandomSource(config), found.layout, mesh, parse_dtype(dtype))
    on_first = sum(
        shard.data.nbytes
        for array in params.values()
        for shard in array.addressable_shards
        if shard.device == mesh.devices.flat[0]
    )
    assert sum(found.weights.values()) == on_first


@pytest.mark.parametrize("config", [tiny_config(5), TINY_MOE, TINY_LOCAL])
def test_devices_hold_no_less_than_the_model(config) -> None:
    for spec in mesh_specs(8):
        try:
            found = Footprint(StageLayout(config, spec))
        except ValueError:
            continue
        for kind in KINDS:
            assert found.weights[kind] * spec.size >= found.model_bytes[kind]


def test_every_tensor_has_a_kind() -> None:
    found = footprint(parse_config(preset("kimi-k2.5")), 1, 8)
    kinds = {tensor.name: tensor.kind for tensor in found.tensors}
    assert set(kinds.values()) == set(KINDS)
    assert kinds["mlp.experts.down.scale"] == "routed_experts"
    assert kinds["attention.latent_norm.scale"] == kinds["final_norm.scale"] == "norms"
    assert weight_kind("layers.3.mlp.gate.weight") == "dense_mlp"


# Keys and values.


def test_pools_by_hand() -> None:
    found = footprint(tiny_config(5), 2, 4)
    assert found.kv_bytes_per_token == {"full": 3 * 1 * 2 * 8 * 2}  # slots, head, k and v, values
    pages = 8 * 6 + 1
    assert found.kv_bytes(SMALL_LOAD) == pages * 8 * 96
    assert found.kv_tokens(pages * 8 * 96, SMALL_LOAD) == 8 * 48
    assert found.kv_tokens(pages * 8 * 96 - 1, SMALL_LOAD) == 8 * 48 - 8
    assert found.kv_tokens(-1, SMALL_LOAD) == 0


def test_local_layers_cost_a_ring_for_every_row() -> None:
    found = footprint(TINY_LOCAL, 1, 1)
    load = dataclasses.replace(SMALL_LOAD, context=400)
    layer = 2 * 2 * 8 * 2 * 8  # k and v of 2 heads of 8, bfloat16, in a page of 8 tokens
    ring = (16 + 16) // 8 + 1
    local = (8 * ring + 1) * 3 * layer
    full = (8 * 50 + 1) * layer
    assert found.kv_bytes(load) == local + full
    assert found.kv_tokens(local + full, load) == 8 * 400
    # A longer context changes nothing for them.
    longer = dataclasses.replace(load, context=40_000)
    assert found.kv_tokens(local + full, longer) == 8 * 400
    more_rows = dataclasses.replace(load, rows=16)
    assert found.kv_tokens(local + full, more_rows) == 8 * 400 - 8 * 8 * ring * 3


# Times.


def test_decode_reads_weights_and_keys_once() -> None:
    config, gpu, load = tiny_config(5), GPUS["H100"], SMALL_LOAD
    found = footprint(config, 1, 1)
    time = decode_time(found, gpu, load)
    assert time.tick.weight_bytes == sum(found.weights.values()) - 61 * 32 * 2  # not the embedding
    assert time.tick.kv_bytes == 8 * 48 * 5 * 2 * 16 * 2
    matrices = 5 * (64 * 32 * 2 + 2 * 16 * 32 + 3 * 48 * 32) + 61 * 32
    assert time.tick.flops == 8 * (2 * matrices + 4 * 5 * 8 * 8 * 48)
    assert time.tick.link_bytes == 0
    assert time.bubble_s == 0
    memory_s = (time.tick.weight_bytes + time.tick.kv_bytes) / gpu.bandwidth_bytes_per_s
    assert time.total_s == pytest.approx(memory_s)
    assert time.bound == "kv"


def test_a_batch_reads_the_experts_that_it_takes() -> None:
    found = footprint(TINY_MOE, 1, 1)
    one, many = (
        decode_time(found, GPUS["H100"], dataclasses.replace(SMALL_LOAD, rows=rows)).tick
        for rows in (1, 64)
    )
    experts = found.weights["routed_experts"]
    assert many.weight_bytes - one.weight_bytes == pytest.approx(
        experts * (1 - 0.75**64) - experts * 2 / 8
    )


def test_collectives_by_hand() -> None:
    found = footprint(tiny_config(4), 2, 4)
    load = dataclasses.replace(SMALL_LOAD, rows=2)
    hidden, logits = 1 * 32 * 2, 1 * 61 * 4  # one row a microbatch
    expected = (
        2 * 2 * hidden * 2 * 3 / 4  # two sums in each of two layers, over 4 devices
        + hidden * 2 * 7 / 8  # the embedding
        + hidden  # to the next stage
        + hidden * 2 * 1 / 2  # the last stage's result to all
        + logits * 7 / 8
    )
    time = decode_time(found, GPUS["H100"], load)
    assert time.tick.link_bytes == pytest.approx(expected)
    assert time.microbatches == 2
    # 4 steps of 2 microbatches over 2 stages: 9 ticks, 8 of them at work.
    assert time.bubble_fraction == pytest.approx(1 / 9)
    assert time.bubble_s == pytest.approx(time.total_s / 9)


def test_prefill_counts_the_tokens_of_all_stages() -> None:
    for layout, tokens in (((1, 8), 2 * 16), ((2, 4), 2 * 2 * 16), ((4, 2), 4 * 2 * 16)):
        load = dataclasses.replace(SMALL_LOAD, prefill_rows=2)
        time = prefill_time(footprint(tiny_config(5), *layout), GPUS["H100"], load)
        assert time.tokens == tokens
        assert time.tokens_per_s == pytest.approx(tokens / time.total_s)
        assert time.microbatches == layout[0]
    assert decode_time(footprint(tiny_config(5), 2, 4), GPUS["H100"], SMALL_LOAD).tokens == 8


def test_prefill_expands_latents_and_decode_does_not() -> None:
    config = dataclasses.replace(tiny_config((LayerSpec("latent"),) * 2), latent=TINY_MOE.latent)
    found = footprint(config, 1, 2)
    load = dataclasses.replace(SMALL_LOAD, prefill_rows=3)
    heads, keys, tokens = 8 // 2, (48 + 16) // 2, 3 * 16
    # Queries through their own rank, the latents, the output, the MLP.
    matrices = 16 * 32 + heads * 12 * 16 + 28 * 32 + heads * 8 * 32 + 3 * 24 * 32
    pairs = heads * keys * (8 + 4 + 8)
    expansion = heads * keys * (8 + 8) * 24
    prefill = prefill_time(found, GPUS["H100"], load).tick
    assert prefill.flops == 2 * 2 * (tokens * (matrices + pairs) + 3 * expansion)
    absorbed = heads * (8 + 8) * 24 + heads * 48 * (24 + 24 + 4)
    head = 62 // 2 * 32  # 61 tokens, padded
    decode = decode_time(found, GPUS["H100"], load).tick
    assert decode.flops == 2 * 8 * (2 * (matrices + absorbed) + head)


def test_terms_add_up() -> None:
    for spec in mesh_specs(8):
        try:
            found = Footprint(StageLayout(TINY_MOE, spec))
        except ValueError:
            continue
        for phase in (prefill_time, decode_time):
            time = phase(found, GPUS["H200"], SMALL_LOAD)
            work = max(time.weights_s + time.kv_s, time.flops_s) + time.link_s
            assert time.total_s == pytest.approx(work + time.bubble_s)


# Search.


def test_least_gpus_grow_with_the_work() -> None:
    config = parse_config(preset("llama-3.1-8b"))
    counts = [
        plan_model(config, "L40S", load=Workload(rows=rows, context=131_072)).min_gpus
        for rows in (1, 4, 16, 64)
    ]
    assert None not in counts
    assert counts == sorted(counts)
    assert counts[0] < counts[-1]
    assert plan_model(config, "L40S", load=Workload(rows=10_000, context=131_072)).min_gpus is None


def test_refused_layouts_say_why() -> None:
    found = plan_model(parse_config(preset("kimi-k2.5")), "7xH100")
    refusals = {candidate.shape: candidate.refusal for candidate in found.candidates}
    assert refusals.keys() == {(1, 7, 1), (1, 1, 7), (7, 1, 1)}
    assert "cannot be split over tensor=7; valid sizes: 1, 2, 4" in str(refusals[1, 7, 1])
    assert "expert=7" in str(refusals[1, 1, 7])
    assert "GiB a device" in str(refusals[7, 1, 1])
    assert "H100 has 78.1" in str(refusals[7, 1, 1])
    assert not found.fits
    assert found.chosen is not None
    assert found.chosen.shape == (7, 1, 1)
    assert found.min_gpus == 8


def test_chosen_is_the_fastest_that_fits() -> None:
    found = plan_model(parse_config(preset("llama-3.1-8b")), "4xL40S")
    fitting = [c for c in found.candidates if isinstance(c, Fitting) and c.fits]
    assert found.chosen in fitting
    assert len(fitting) > 1
    assert found.chosen.decode.total_s == min(each.decode.total_s for each in fitting)


def test_layout_that_cannot_be() -> None:
    found = plan_model(tiny_config(5), "8xH100", layout=(8, 1))
    assert found.chosen is None
    (refused,) = found.candidates
    assert isinstance(refused, Refused)
    assert "valid sizes: 1 to 5" in refused.refusal
    with pytest.raises(ValueError, match="expected one of 8 devices, got 4"):
        plan_model(tiny_config(5), "8xH100", layout=(2, 2))


def test_context_is_one_that_the_model_has() -> None:
    longest = plan_model(tiny_config(5), "H100", load=Workload(context=256))
    assert longest.fits
    with pytest.raises(ValueError, match=r"at most the model's 256 positions, got 257"):
        plan_model(tiny_config(5), "H100", load=Workload(context=257))
    # Not given, it is no more than the model has.
    assert jf.plan(tiny_config(5), "H100").load.context == 256
    assert jf.plan("llama-3.1-8b", "H100").load.context == 8192


def test_workload_of_other_types() -> None:
    for name, value in (("rows", "3"), ("rows", 2.0), ("chunk", True), ("steps", 0)):
        fields: dict[str, Any] = {name: value}
        with pytest.raises(ValueError, match=f"{name}: expected an integer >= 1, got {value!r}"):
            jf.plan(tiny_config(5), "H100", **fields)
    with pytest.raises(TypeError, match="bogus"):
        jf.plan(tiny_config(5), "H100", bogus=3)


def measured(found: Fitting, temp_bytes: int) -> Fitting:
    """The layout as if a compiler had said so."""
    figures = Compiled(found.weights_bytes, temp_bytes, temp_bytes, 1.0, 1.0, GIB, {}, (), ())
    return dataclasses.replace(found, compiled=figures)


def test_next_layout_is_verified_where_the_first_does_not_fit() -> None:
    found = plan_model(parse_config(preset("llama-3.1-8b")), "4xL40S")
    fitting = [c for c in found.candidates if isinstance(c, Fitting) and c.fits]
    order = sorted(fitting, key=lambda each: each.decode.total_s)
    assert len(order) > 2

    for wrong in range(len(order) + 1):
        asked: list[Fitting] = []

        def verify(each: Fitting, asked=asked, wrong=wrong) -> Fitting:
            asked.append(each)
            return measured(each, found.gpu.memory_bytes if len(asked) <= wrong else 0)

        plan = found.verified(verify)
        assert asked == order[: wrong + 1]
        assert plan.chosen in plan.candidates
        assert plan.chosen is not None
        assert plan.chosen.source == "compiled"
        assert plan.fits == (wrong < len(order))
        assert not plan.fits or plan.chosen.shape == order[wrong].shape
        assert plan.min_gpus == found.min_gpus


# Models.


def test_fp8_weights_are_counted_in_dtype(tmp_path) -> None:
    document = preset("deepseek-v3")
    assert document["quantization_config"]["quant_method"] == "fp8"
    (tmp_path / "config.json").write_text(json.dumps(document), encoding="utf-8")
    found = jf.plan(tmp_path, "16xH200", layout=(2, 8)).chosen
    assert found is not None
    parameters = sum(found.footprint.parameters.values())
    assert parameters == pytest.approx(671e9, rel=0.01)
    # The bias of the routers is float32.
    assert sum(found.footprint.model_bytes.values()) == pytest.approx(2 * parameters, rel=1e-6)


# Published claims, from shapes.


def test_kimi_fits_on_8_h100() -> None:
    found = plan_model(parse_config(preset("kimi-k2.5")), "8xH100")
    assert found.min_gpus == 8
    assert sum(found.chosen.footprint.parameters.values()) == pytest.approx(1026.4e9, rel=1e-4)
    left = {c.shape: c.kv_bytes_left for c in found.candidates if isinstance(c, Fitting) and c.fits}
    for shape in ((1, 8, 1), (2, 4, 1), (1, 1, 8)):
        assert left[shape] > 30 * GIB


def test_scout_keeps_a_million_tokens_on_2_h200() -> None:
    found = plan_model(parse_config(preset("llama-4-scout")), "2xH200")
    assert found.min_gpus == 2
    assert found.chosen.kv_bytes_left > 56 * GIB
    assert found.chosen.kv_tokens_left > 1.2e6


def test_gpus() -> None:
    assert parse_gpus("8xh100") == (GPUS["H100"], 8)
    assert parse_gpus("H100 NVL") == (GPUS["H100-NVL"], 1)
    for text in ("0xH100", "H1000", "8x", ""):
        with pytest.raises(ValueError, match="expected COUNTxKIND of A100"):
            parse_gpus(text)
    assert parse_gpus("4096xH100") == (GPUS["H100"], 4096)
    for count in ("4097", "9" * 5000):
        with pytest.raises(ValueError, match="expected at most 4096"):
            parse_gpus(f"{count}xH100")
    for gpu in GPUS.values():
        assert gpu.source
        assert gpu.target is None or gpu.target in TARGET_NAMES
        assert 0.9 * gpu.memory_bytes < gpu.usable_bytes < gpu.memory_bytes


# Compiled.


def test_compiled_steps_hold_what_was_counted() -> None:
    """Two layers with the kernels inside, for GPUs that are not there."""
    config = dataclasses.replace(
        parse_config(preset("llama-3.1-8b")),
        layers=(LayerSpec(),) * 2,
        vocab_size=4096,
        bos_id=None,
        eos_ids=frozenset(),
    )
    try:
        found = jf.plan(config, "2xH100", layout=(1, 2), verify=True).chosen
    except ToolchainMissing as missing:
        if sys.platform == "linux":
            raise
        pytest.skip(str(missing))
    assert found is not None
    assert found.source == "compiled"
    assert found.compiled is not None
    counted = sum(found.footprint.weights.values())
    assert counted <= found.weights_bytes <= counted + 2**20  # tables and row state
    assert found.compiled.kernels == {
        "prefill_attention": 2,
        "paged_attention": 2,
        "paged_attention_combine": 2,
    }
    estimated = dataclasses.replace(found, compiled=None)
    for name in ("prefill_temp_bytes", "decode_temp_bytes"):
        assert getattr(found, name) == pytest.approx(
            getattr(estimated, name), rel=0.5, abs=8 * 2**20
        )


@pytest.mark.long
@pytest.mark.parametrize("layout", [(1, 8), (2, 4), (1, 1, 8)])
def test_kimi_compiled_at_full_size(layout) -> None:
    found = jf.plan("kimi-k2.5", "8xH100", layout=layout, verify=True).chosen
    assert found is not None
    assert found.compiled is not None
    assert found.fits
    assert found.kv_bytes_left > 30 * GIB
    assert found.decode_temp_bytes <= 2 * GIB
    assert found.compiled.host_bytes <= 4 * GIB


@pytest.mark.long
def test_scout_compiled_at_full_size() -> None:
    found = jf.plan("llama-4-scout", "2xH200", layout=(1, 2), verify=True).chosen
    assert found is not None
    assert found.compiled is not None
    assert found.kv_bytes_left > 56 * GIB
    assert found.kv_tokens_left > 1.2e6
