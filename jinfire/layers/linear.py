"""Matrix layers and the vocabulary-sharded embedding and head.

Inside `shard_map` every weight is the local shard, so sizes are read from the weights.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from jinfire.weights import Weight, contract, take_rows
from sharding import EXPERT, PIPELINE, TENSOR

# What everything but the experts is split over: the devices of a stage, whatever the experts do.
MODEL_AXES = (EXPERT, TENSOR)
VOCAB_AXES = (PIPELINE, *MODEL_AXES)


def param(
    shape: tuple[int, ...],
    axes: tuple[str | None, ...],
    init: str,
    dtype: jnp.dtype,
    fixed_dtype: str | None = None,
) -> nnx.Param:
    """A parameter with its logical axes; only ever built under `nnx.eval_shape`.

    `fixed_dtype` is for tensors that keep their type in a model of any other.
    """
    own = jnp.dtype(fixed_dtype) if fixed_dtype else dtype
    return nnx.Param(jnp.zeros(shape, own), axes=axes, init=init, dtype=fixed_dtype)


class Linear(nnx.Module):
    """Product with an (out, in) weight whose out axis may be sharded over the model axes."""

    def __init__(self, out: int, into: int, axes: tuple[str | None, str | None], dtype: jnp.dtype):
        self.weight = param((out, into), axes, "normal", dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        return contract(x, self.weight.get_value())


class RowParallelLinear(Linear):
    """Product with a weight whose in axis is sharded over the model axes, summed over them."""

    def __call__(self, x: jax.Array) -> jax.Array:
        return jax.lax.psum(self.partial(x), MODEL_AXES)

    def partial(self, x: jax.Array) -> jax.Array:
        """This device's term of the sum."""
        return super().__call__(x)


class Embedding(nnx.Module):
    """Token embedding, vocabulary sharded over all devices.

    Every device owns a slice of rows, so no stage carries the whole table; the sum over devices
    has one non-zero term and is exact.
    """

    def __init__(self, vocab: int, width: int, dtype: jnp.dtype):
        self.weight = param((vocab, width), ("vocab", "embed"), "normal", dtype)

    def __call__(self, token_ids: jax.Array) -> jax.Array:
        weight_VD = self.weight.get_value()
        local = token_ids - jax.lax.axis_index(VOCAB_AXES) * weight_VD.shape[0]
        owned = (local >= 0) & (local < weight_VD.shape[0])
        rows = take_rows(weight_VD, jnp.where(owned, local, 0))
        rows = jnp.where(owned[..., None], rows, jnp.zeros((), rows.dtype))
        return jax.lax.psum(rows, VOCAB_AXES)


def head_logits(x: jax.Array, weight_VD: Weight, vocab_size: int) -> jax.Array:
    """Logits over the whole vocabulary from its local slice.

    Shapes: x [..., D], weight_VD [V/devices, D] -> float32 [..., V]. Rows that only pad the
    vocabulary to a multiple of the devices are cut off, so nothing downstream depends on them.
    """
    local = contract(x, weight_VD, jnp.dtype(jnp.float32))
    logits = jax.lax.all_gather(local, VOCAB_AXES, axis=local.ndim - 1, tiled=True)
    return logits[..., :vocab_size]
