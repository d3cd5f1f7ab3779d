"""Rows exchanged between the devices that hold tokens and those that hold experts.

The functions run inside `shard_map`. Devices of the expert axis own consecutive experts, equally
many each.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp


def own_tokens(x_TD: jax.Array, axis: str) -> tuple[jax.Array, jax.Array]:
    """This device's equal part of tokens that every device of an axis has, and which are real.

    The last parts are filled up with rows of zeros.
    Shapes: x [T, D]; [ceil(T / devices), D] and bool [ceil(T / devices)].
    """
    devices = jax.lax.axis_size(axis)
    num_tokens = x_TD.shape[0]
    share = -(-num_tokens // devices)
    start = jax.lax.axis_index(axis) * share
    padded = jnp.pad(x_TD, ((0, share * devices - num_tokens), (0, 0)))
    own_TD = jax.lax.dynamic_slice_in_dim(padded, start, share)
    return own_TD, start + jnp.arange(share, dtype=jnp.int32) < num_tokens


def gather_tokens(own_TD: jax.Array, num_tokens: int, axis: str) -> jax.Array:
    """All tokens on every device of an axis, from the parts that `own_tokens` makes."""
    return jax.lax.all_gather(own_TD, axis, axis=0, tiled=True)[:num_tokens]


def exchange(
    rows_TD: jax.Array,
    ids_TX: jax.Array,
    local_experts: int,
    apply: Callable[[jax.Array, jax.Array], jax.Array],
    capacity: int,
    axis: str,
) -> jax.Array:
    """What the chosen experts make of this device's rows, wherever on the axis the experts are.

    A round sends at most `capacity` rows from each device to each, and there are as many rounds
    as the fullest pair of devices needs: buffers do not grow with an uneven load, no row is
    dropped, and a row's result does not depend on the round that it is in. An id past the last
    expert is of no expert; its result is zero.

    `apply(rows [M, D], local ids [M])` gives [M, D] for rows of this device's experts; the id
    `local_experts` marks a row that holds nothing, whose result is not used.
    Shapes: rows [T, D], ids int32 [T, X]; the result is [T, X, D].
    """
    num_tokens, num_chosen = ids_TX.shape
    width = rows_TD.shape[1]
    devices = jax.lax.axis_size(axis)
    ids_M = ids_TX.reshape(-1)
    assignments = ids_M.shape[0]

    # Assignments in the order of their device, those of no expert last, and the place of each
    # among those of its device.
    device_M = jnp.minimum(ids_M // local_experts, devices)
    order_M = jnp.argsort(device_M, stable=True).astype(jnp.int32)
    counts = jnp.sum(
        device_M[:, None] == jnp.arange(devices, dtype=jnp.int32)[None], axis=0, dtype=jnp.int32
    )
    starts = jnp.cumulative_sum(counts, include_initial=True)
    position_M = (
        jnp.zeros_like(order_M)
        .at[order_M]
        .set(jnp.arange(assignments, dtype=jnp.int32), unique_indices=True)
    )
    place_M = position_M - starts[device_M]
    slots = jnp.arange(capacity, dtype=jnp.int32)[None]
    rounds = jax.lax.pmax(jnp.max(-(-counts // capacity)), axis)

    def one_round(number: jax.Array, out_MD: jax.Array) -> jax.Array:
        first = number * capacity
        filled = first + slots < counts[:, None]
        index = order_M[jnp.minimum(starts[:-1, None] + first + slots, assignments - 1)]
        local = jnp.where(filled, ids_M[index] % local_experts, local_experts)
        received = _swap(rows_TD[index // num_chosen], axis)
        made = apply(received.reshape(-1, width), _swap(local, axis).reshape(-1))
        returned = _swap(made.reshape(received.shape), axis)
        mine = (place_M >= first) & (place_M < first + capacity) & (device_M < devices)
        new_MD = returned[
            jnp.minimum(device_M, devices - 1), jnp.clip(place_M - first, 0, capacity - 1)
        ]
        return jnp.where(mine[:, None], new_MD, out_MD)

    out_MD = jnp.zeros((assignments, width), rows_TD.dtype)
    out_MD = jax.lax.fori_loop(0, rounds, one_round, out_MD)
    return out_MD.reshape(num_tokens, num_chosen, width)


def _swap(parts: jax.Array, axis: str) -> jax.Array:
    """Part i of every device of an axis goes to device i."""
    return jax.lax.all_to_all(parts, axis, split_axis=0, concat_axis=0, tiled=True)
