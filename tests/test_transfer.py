"""Blocks between meshes of unequal layouts: every bit arrives, nothing waits, inputs live on."""

import dataclasses
import itertools
import threading

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from sharding import (
    MeshSpec,
    Side,
    TransferPlan,
    make_mesh,
    replicate,
    split_devices,
    spread_layers,
)

LAYOUTS = ((1, 1), (1, 2), (2, 1), (2, 2), (1, 4), (4, 1))
TOKENS, WIDTH, HEADS_DIM = 3, 2, 3


def make_plan(layers, kv_heads, source, target):
    """Layouts are (pipeline, tensor) or (pipeline, tensor, expert)."""
    specs = [
        MeshSpec(pipeline=p, tensor=t, expert=next(iter(e), 1)) for p, t, *e in (source, target)
    ]
    placed = [spread_layers(layers, spec.pipeline) for spec in specs]
    return plan_of(specs, kv_heads, placed)


def plan_of(specs, kv_heads, placed):
    meshes = [make_mesh(*each) for each in zip(specs, split_devices(specs), strict=True)]
    return TransferPlan.make(
        *(Side(mesh, kv_heads, layers) for mesh, layers in zip(meshes, placed, strict=True))
    )


def physical(side, logical_LTKH, cuts, fill):
    """Blocks of a side by the layout rule, in NumPy; `fill` where a stage has no such layer."""
    _, _, kv_heads, _ = logical_LTKH.shape
    size = kv_heads if side.whole else max(kv_heads, side.shards)
    heads = [p * kv_heads // size for p in range(size)]
    blocks = []
    for start, stop in cuts:
        block = np.full(
            (side.stages, stop - start, TOKENS, size, WIDTH), fill, dtype=logical_LTKH.dtype
        )
        for stage, slot in itertools.product(range(side.stages), range(stop - start)):
            layer = side.layers[stage][start + slot]
            if layer is not None:
                block[stage, slot] = logical_LTKH[layer][:, heads]
        blocks.append(block)
    return blocks


def bits(array):
    return np.asarray(array).view(np.uint16)


def random_cache(layers, kv_heads, seed):
    # All bit patterns, NaN payloads among them.
    shape = (layers, TOKENS, kv_heads, WIDTH)
    return np.random.default_rng(seed).integers(0, 2**16, shape, dtype=np.uint16)


def put_blocks(plan, caches):
    poison = 0xFFFF
    sharding = plan.source.block_sharding(HEADS_DIM)
    columns = {
        name: physical(plan.source, cache, plan.source_cuts, poison)
        for name, cache in caches.items()
    }
    return [
        {
            name: jax.device_put(column[cut].view(ml_dtypes.bfloat16), sharding)
            for name, column in columns.items()
        }
        for cut in range(len(plan.source_cuts))
    ]


@pytest.mark.parametrize("source", LAYOUTS, ids=lambda s: f"from{s[0]}x{s[1]}")
@pytest.mark.parametrize("target", LAYOUTS, ids=lambda s: f"to{s[0]}x{s[1]}")
def test_every_bit_arrives(source, target):
    for layers, kv_heads in itertools.product((5, 7), (1, 2, 4)):
        check_transfer(make_plan(layers, kv_heads, source, target), layers, kv_heads)


def check_transfer(plan, layers, kv_heads):
    caches = {
        name: random_cache(layers, kv_heads, seed) for seed, name in enumerate(("key", "value"))
    }
    blocks = put_blocks(plan, caches)
    before = jax.tree.map(bits, blocks)
    flight = plan.send(blocks, HEADS_DIM)
    received = flight.receive()

    moved = sum(layer is not None for stage in plan.source.layers for layer in stage)
    assert flight.bytes == moved * TOKENS * kv_heads * WIDTH * 2 * len(caches)
    assert len(received) == len(plan.target_cuts)
    for name, cache in caches.items():
        expected = physical(plan.target, cache, plan.target_cuts, 0)
        for block, want in zip(received, expected, strict=True):
            assert block[name].dtype == jnp.bfloat16
            assert block[name].sharding == plan.target.block_sharding(HEADS_DIM)
            np.testing.assert_array_equal(bits(block[name]), want)
    jax.block_until_ready(received)  # also copies that were not looked at
    assert flight.is_ready()
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(bits, blocks), before)


# What the slots of one KV group look like on stages of mixed layers: every other layer, and stages
# that leave different slots empty.
MIXED = {
    1: ((0, 1, 2, 4, 5, 6),),
    2: ((0, 1, None, 2), (None, 4, 5, 6)),
    3: ((0, 1, None), (2, None, 4), (None, 5, 6)),
}


@pytest.mark.parametrize("source", [(1, 1), (2, 2), (3, 1), (1, 2, 2)], ids=str)
@pytest.mark.parametrize("target", [(1, 1), (2, 2), (3, 1), (2, 1, 2)], ids=str)
def test_every_bit_arrives_past_empty_slots(source, target):
    for kv_heads in (1, 2):
        specs = [
            MeshSpec(pipeline=p, tensor=t, expert=next(iter(e), 1)) for p, t, *e in (source, target)
        ]
        plan = plan_of(specs, kv_heads, [MIXED[spec.pipeline] for spec in specs])
        check_transfer(plan, 7, kv_heads)


@pytest.mark.parametrize("source", [(1, 1, 2), (2, 1, 2), (1, 2, 2)], ids=str)
@pytest.mark.parametrize("target", [(1, 2), (1, 1, 4), (2, 1, 2), (2, 2)], ids=str)
def test_heads_over_expert_and_tensor_axis(source, target):
    for kv_heads in (1, 2, 4):
        check_transfer(make_plan(5, kv_heads, source, target), 5, kv_heads)


@pytest.mark.parametrize("whole", ["source", "target", "both"])
@pytest.mark.parametrize("source", [(1, 1), (2, 2), (1, 4), (2, 1, 2)], ids=str)
@pytest.mark.parametrize("target", [(1, 2), (3, 1), (1, 4), (2, 2)], ids=str)
def test_blocks_that_are_whole_on_a_side(source, target, whole):
    """Every device of a stage has all of a block; the other side's devices have parts."""
    plan = make_plan(5, 4, source, target)
    sides = {name: getattr(plan, name) for name in ("source", "target")}
    for name in sides if whole == "both" else (whole,):
        sides[name] = dataclasses.replace(sides[name], whole=True)
    check_transfer(TransferPlan.make(**sides), 5, 4)


def test_every_device_with_all_of_a_block_sends_a_part_of_it():
    plan = make_plan(4, 4, (1, 4), (1, 4))
    source = dataclasses.replace(plan.source, whole=True)
    plan = TransferPlan.make(source, plan.target)
    plan.send(put_blocks(plan, {"key": random_cache(4, 4, 0)}), HEADS_DIM)
    (route,) = plan._routes.values()
    assert sorted(position for _, position in route._picks) == [0, 1, 2, 3]


@pytest.mark.parametrize(("source", "target"), [((1, 2), (1, 3)), ((1, 3), (2, 2))])
def test_heads_that_share_no_divisor(source, target):
    plan = make_plan(4, 6, source, target)
    cache = random_cache(4, 6, 0)
    received = plan.send(put_blocks(plan, {"key": cache}), HEADS_DIM).receive()
    expected = physical(plan.target, cache, plan.target_cuts, 0)
    for block, want in zip(received, expected, strict=True):
        np.testing.assert_array_equal(bits(block["key"]), want)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ((1, 1), (1, 1)),
        ((1, 1), (1, 2)),
        ((1, 2), (2, 1)),
        ((2, 1), (1, 2)),
        ((2, 2), (1, 4)),
        ((1, 1, 2), (1, 2)),
    ],
)
@pytest.mark.parametrize("whole", [False, True])
def test_send_does_not_wait_for_the_program_that_makes_the_blocks(source, target, whole):
    plan = make_plan(4, 4, source, target)
    plan = TransferPlan.make(dataclasses.replace(plan.source, whole=whole), plan.target)
    blocks = put_blocks(plan, {"key": random_cache(4, 4, 0)})
    plan.send(blocks, HEADS_DIM).receive()  # compiled, so that only the copies are under test
    gate = threading.Event()

    def wait(value):
        assert gate.wait(timeout=30)
        return value

    def local(one):
        return jax.pure_callback(wait, jax.ShapeDtypeStruct((), jnp.float32), one)

    # The CPU client runs a callback on a single device inside the dispatch, and callbacks on all
    # devices keep all its threads: so on two devices, of which one is among the source's.
    first, *others = plan.source.mesh.devices.flat
    pair = make_mesh(MeshSpec(tensor=2), [first, jax.devices()[7]])
    spec = PartitionSpec()
    gated = jax.jit(jax.shard_map(local, mesh=pair, in_specs=spec, out_specs=spec, check_vma=False))
    multiply = jax.jit(lambda blocks, one: jax.tree.map(lambda x: x * one.astype(x.dtype), blocks))
    try:
        shards = [gated(replicate(np.float32(1), pair)).addressable_shards[0].data]
        shards += [jax.device_put(np.float32(1), device) for device in others]
        late = jax.make_array_from_single_device_arrays(
            (), NamedSharding(plan.source.mesh, spec), shards
        )
        made = multiply(blocks, late)
        assert not made[0]["key"].is_ready()
        flight = plan.send(made, HEADS_DIM)
        assert not flight.is_ready()
    finally:
        gate.set()
    jax.block_until_ready(flight.receive())
    assert flight.is_ready()


def test_a_program_on_the_target_takes_the_blocks_as_they_are():
    plan = make_plan(5, 4, (2, 2), (1, 4))
    blocks = put_blocks(plan, {"key": random_cache(5, 4, 0)})
    received = plan.send(blocks, HEADS_DIM).receive()
    sharding = plan.target.block_sharding(HEADS_DIM)
    program = jax.jit(lambda blocks: blocks, in_shardings=sharding, out_shardings=sharding)
    compiled = program.lower(received).compile()
    compiled(received)  # a compiled program refuses arguments of another sharding
    assert "collective-permute" not in compiled.as_text()


def test_nothing_compiles_at_the_second_send():
    compiles = []

    def listener(event, duration, **kwargs):
        if event == "/jax/core/compile/backend_compile_duration":
            compiles.append(event)

    plan = make_plan(5, 4, (1, 4), (2, 2))
    blocks = put_blocks(plan, {"key": random_cache(5, 4, 0)})
    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        jax.block_until_ready(plan.send(blocks, HEADS_DIM).receive())
        assert compiles
        del compiles[:]
        jax.block_until_ready(plan.send(blocks, HEADS_DIM).receive())
        assert not compiles
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)


def test_sides_refuse():
    devices = jax.devices()
    one = spread_layers(4, 1)
    with pytest.raises(ValueError, match="of which data has size 1"):
        Side(make_mesh(MeshSpec(data=2), devices[:2]), 2, one)
    for spec in (MeshSpec(tensor=2), MeshSpec(expert=2)):
        with pytest.raises(ValueError, match="3 kv heads cannot be split over the 2 devices"):
            Side(make_mesh(spec, devices[:2]), 3, one)
    for layers in (one, ((0, 1), (2,))):
        with pytest.raises(ValueError, match="layers of 2 stages, in as many slots on each"):
            Side(make_mesh(MeshSpec(pipeline=2), devices[:2]), 2, layers)
    sides = [Side(make_mesh(MeshSpec(), devices[:1]), kv_heads, one) for kv_heads in (2, 4)]
    with pytest.raises(ValueError, match="as many kv heads on both sides, got 2 and 4"):
        TransferPlan.make(*sides)


def test_send_refuses_blocks_that_were_not_planned():
    plan = make_plan(4, 4, (1, 2), (2, 1))
    blocks = put_blocks(plan, {"key": random_cache(4, 4, 0)})
    assert plan.source_cuts == ((0, 2), (2, 4))
    with pytest.raises(ValueError, match="expected 2 blocks of one structure"):
        plan.send(blocks[:1], HEADS_DIM)
    with pytest.raises(ValueError, match="expected 2 blocks of one structure"):
        plan.send([blocks[0], blocks[1]["key"]], HEADS_DIM)
    with pytest.raises(ValueError, match="2 slots and 4 heads in dimension 2"):
        plan.send(blocks, 2)
    with pytest.raises(ValueError, match="all else like"):
        plan.send([blocks[0], {"key": blocks[1]["key"][..., :1]}], HEADS_DIM)
    elsewhere = jax.device_put(blocks, jax.devices()[0])
    with pytest.raises(ValueError, match="expected blocks with NamedSharding"):
        plan.send(elsewhere, HEADS_DIM)
