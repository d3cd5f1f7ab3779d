"""Rows exchanged over the expert axis, against the plain function of every row and its experts."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from sharding import (
    EXPERT,
    MeshSpec,
    check_experts,
    exchange,
    gather_tokens,
    make_mesh,
    own_tokens,
)

WIDTH = 4
EXPERTS = 8

# How 24 tokens choose two of 8 experts; 8 is no expert.
LOADS = {
    "even": np.stack([np.arange(24) % 8, (np.arange(24) + 3) % 8], axis=1),
    "random": np.random.default_rng(0).integers(0, 8, (24, 2)),
    "all to one device": np.tile([[6, 7]], (24, 1)),
    "all to one expert and none": np.tile([[3, 8]], (24, 1)),
    "nowhere": np.full((24, 2), 8),
}


def on_mesh(devices: int, body, *args):
    """`body` on every device of an expert axis, with whole arguments and results."""
    mesh = make_mesh(MeshSpec(expert=devices), jax.devices()[:devices])
    whole = PartitionSpec()
    mapped = jax.shard_map(body, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)
    return jax.jit(mapped)(*args)


def apply_experts(rows_MD: jax.Array, local_M: jax.Array, local_experts: int) -> jax.Array:
    """Expert e multiplies by e + 1; a row that holds nothing becomes NaN, for nobody to see."""
    expert_M = jax.lax.axis_index(EXPERT) * local_experts + local_M
    made = rows_MD * (expert_M + 1).astype(rows_MD.dtype)[:, None]
    return jnp.where((local_M == local_experts)[:, None], jnp.nan, made)


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize(("devices", "capacity"), [(1, 48), (2, 5), (4, 2), (4, 24), (8, 1)])
def test_every_row_meets_its_experts(devices, capacity, load):
    rows = np.random.default_rng(1).standard_normal((24, WIDTH), np.float32)
    ids = LOADS[load].astype(np.int32)
    local = EXPERTS // devices

    def body(rows_TD: jax.Array, ids_TX: jax.Array) -> jax.Array:
        own_TD, _ = own_tokens(rows_TD, EXPERT)
        own_ids, _ = own_tokens(ids_TX, EXPERT)
        apply = functools.partial(apply_experts, local_experts=local)
        out = exchange(own_TD, own_ids, local, apply, capacity, EXPERT)
        return gather_tokens(out.reshape(own_TD.shape[0], -1), 24, EXPERT)

    got = np.asarray(on_mesh(devices, body, rows, ids)).reshape(24, 2, WIDTH)
    factors = np.where(ids < EXPERTS, ids + 1, 0).astype(np.float32)
    np.testing.assert_array_equal(got, rows[:, None] * factors[..., None])


@pytest.mark.parametrize("tokens", [1, 5, 8, 9])
@pytest.mark.parametrize("devices", [1, 2, 4])
def test_parts_of_tokens_make_the_whole(devices, tokens):
    rows = np.arange(1, tokens * WIDTH + 1, dtype=np.float32).reshape(tokens, WIDTH)

    def body(rows_TD: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        own_TD, real_T = own_tokens(rows_TD, EXPERT)
        number_real = jax.lax.psum(jnp.sum(real_T, dtype=jnp.int32), EXPERT)
        filled_T = jnp.all(own_TD != 0, axis=1)
        agree = jax.lax.pmin(jnp.all(filled_T == real_T).astype(jnp.int32), EXPERT)
        return gather_tokens(own_TD, tokens, EXPERT), number_real, agree

    got, number_real, agree = on_mesh(devices, body, rows)
    np.testing.assert_array_equal(got, rows)
    assert int(number_real) == tokens
    assert agree == 1


@pytest.mark.parametrize(
    ("count", "expert", "width", "tensor"), [(8, 1, 32, 1), (8, 8, 32, 4), (3, 3, 5, 5)]
)
def test_experts_that_can_be_split(count, expert, width, tensor):
    check_experts(count, expert, width, tensor)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((3, 2, 32, 1), "3 experts cannot be split over expert=2; valid sizes: 1, 3"),
        ((8, 3, 32, 1), "8 experts cannot be split over expert=3; valid sizes: 1, 2, 4, 8"),
        ((8, 2, 6, 4), "width 6 cannot be split over tensor=4; valid sizes: 1, 2, 3, 6"),
        ((8, 2, 64, 4, 32), "width 64 in units of 32 cannot .* tensor=4; valid sizes: 1, 2$"),
        ((8, 2, 48, 1, 32), "expected a multiple of 32, got 48"),
    ],
)
def test_experts_that_cannot_be_split(sizes, message):
    with pytest.raises(ValueError, match=message):
        check_experts(*sizes)
