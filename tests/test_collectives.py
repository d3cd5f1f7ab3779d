"""Collectives of compiled programs against what the programs were written to do."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from sharding import (
    EXPERT,
    PIPELINE,
    TENSOR,
    Collective,
    MeshSpec,
    collectives,
    make_mesh,
    sent_bytes,
    split_devices,
)

SPEC = MeshSpec(pipeline=2, expert=2, tensor=2)
ROWS, WIDTH = 8, 16


def compiled(body, x=None) -> tuple[Collective, ...]:
    """What `body`, on local [ROWS, WIDTH] float32 shards of all devices, compiles to."""
    mesh = make_mesh(SPEC, split_devices([SPEC])[0])
    axes = PartitionSpec((PIPELINE, EXPERT, TENSOR))
    mapped = jax.shard_map(body, mesh=mesh, in_specs=axes, out_specs=axes, check_vma=False)
    x = jax.ShapeDtypeStruct((ROWS * SPEC.size, WIDTH), jnp.float32)
    text = jax.jit(mapped).lower(x).compile().as_text()
    assert text is not None
    return collectives(text)


SHARD = ROWS * WIDTH * 4


def test_a_sum_over_an_axis() -> None:
    found = compiled(lambda x: jax.lax.psum(x, TENSOR))
    assert found == (Collective("all-reduce", 2, 1, SHARD, SHARD),)  # 2 x 1 / 2


def test_a_sum_over_a_stage_in_a_loop() -> None:
    def body(x):
        def step(carry, _):
            return jax.lax.psum(jnp.sin(carry), (EXPERT, TENSOR)), None

        return jax.lax.scan(step, x, None, length=5)[0]

    (found,) = compiled(body)
    assert (found.kind, found.devices, found.count) == ("all-reduce", 4, 5)
    assert found.result_bytes == 5 * SHARD
    assert found.sent_bytes == 5 * SHARD * 2 * 3 / 4


def test_loops_within_loops() -> None:
    def body(x):
        def inner(carry, _):
            return jax.lax.ppermute(jnp.cos(carry), PIPELINE, [(0, 1), (1, 0)]), None

        def outer(carry, _):
            return jax.lax.scan(inner, carry, None, length=3)[0], None

        return jax.lax.scan(outer, x, None, length=4)[0]

    assert compiled(body) == (Collective("collective-permute", 2, 12, 12 * SHARD, 12 * SHARD),)


def test_gather_scatter_and_exchange() -> None:
    def body(x):
        x = jax.lax.all_gather(x, TENSOR, tiled=True)  # [2 ROWS, WIDTH]
        x = jax.lax.all_to_all(x, EXPERT, 0, 1, tiled=True)  # [ROWS, 2 WIDTH]
        return jax.lax.psum_scatter(x, EXPERT, scatter_dimension=1, tiled=True)

    found = {each.kind: each for each in compiled(body)}
    assert found["all-gather"].result_bytes == 2 * SHARD
    assert found["all-gather"].sent_bytes == SHARD
    assert found["all-to-all"].sent_bytes == SHARD
    assert found["reduce-scatter"].result_bytes == SHARD
    assert found["reduce-scatter"].sent_bytes == SHARD
    assert sent_bytes(tuple(found.values())) == 3 * SHARD


def test_nothing_where_there_is_nothing() -> None:
    assert compiled(jnp.sin) == ()


def test_the_larger_branch_of_a_condition() -> None:
    def body(x):
        return jax.lax.cond(
            jnp.sum(jax.lax.axis_index(PIPELINE)) > 0,
            lambda x: jax.lax.psum(jax.lax.psum(x, TENSOR) * 2, TENSOR),
            lambda x: jax.lax.psum(x, TENSOR),
            x,
        )

    (found,) = compiled(body)
    assert (found.kind, found.count) == ("all-reduce", 2)


def test_a_loop_of_unknown_length_is_refused() -> None:
    def body(x):
        return jax.lax.while_loop(
            lambda x: jnp.any(x < 1), lambda x: jax.lax.psum(jnp.sin(x), TENSOR), x
        )

    with pytest.raises(ValueError, match="trip count"):
        compiled(body)


GPU_TEXT = """\
HloModule jit_step, is_scheduled=true

%wrapped (p: bf16[4,8]) -> bf16[4,8] {
  %p = bf16[4,8]{1,0} parameter(0)
  ROOT %exchanged = bf16[4,8]{1,0} all-to-all(%p), replica_groups=[2,4]<=[8]
}

%body (arg: (s32[], bf16[4,8])) -> (s32[], bf16[4,8]) {
  %arg = (s32[], bf16[4,8]{1,0}) parameter(0)
  %x = bf16[4,8]{1,0} get-tuple-element(%arg), index=1
  %begun = (bf16[4,8]{1,0}, bf16[16,8]{1,0}) all-gather-start(%x), replica_groups={{0,1,2,3}}
  %gathered = bf16[16,8]{1,0} all-gather-done(%begun)
  %started = ((bf16[4,8]{1,0}), bf16[4,8]{1,0}, u32[]) async-start(%x), calls=%wrapped
  %ended = bf16[4,8]{1,0} async-done(%started)
  ROOT %out = (s32[], bf16[4,8]{1,0}) tuple(%i, %ended)
}

%condition (arg.1: (s32[], bf16[4,8])) -> pred[] {
  ROOT %less = pred[] compare(%i, %n), direction=LT
}

ENTRY %main (x: bf16[4,8]) -> (s32[], bf16[4,8]) {
  %x.1 = bf16[4,8]{1,0} parameter(0)
  ROOT %loop = (s32[], bf16[4,8]{1,0}) while(%x.1), body=%body, TRIPS
}
""".replace("TRIPS", 'backend_config={"known_trip_count":{"n":"6"}}')


def test_asynchronous_collectives_count_once() -> None:
    """The form in which a GPU's compiler prints what runs beside other work."""
    gather, exchange = collectives(GPU_TEXT)
    assert gather == Collective("all-gather", 4, 6, 6 * 16 * 8 * 2, 6 * 16 * 8 * 2 * 3 / 4)
    assert exchange == Collective("all-to-all", 4, 6, 6 * 4 * 8 * 2, 6 * 4 * 8 * 2 * 3 / 4)


def test_groups_by_the_names_of_mesh_axes() -> None:
    named = "mesh['pipeline'=2,'data'=1,'expert'=2,'tensor'=3] {'expert','tensor'}"
    gather, exchange = collectives(GPU_TEXT.replace("[2,4]<=[8]", named))
    assert (gather.devices, exchange.devices) == (4, 6)
