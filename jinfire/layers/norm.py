"""Root-mean-square normalisation."""

import jax
import jax.numpy as jnp
from flax import nnx

from jinfire.layers.linear import param


class RMSNorm(nnx.Module):
    """RMS norm over the last axis: statistics in float32, the scale applied in the data's dtype.

    Source: transformers `LlamaRMSNorm`.
    """

    def __init__(self, size: int, eps: float, dtype: jnp.dtype):
        self.scale = param((size,), ("norm",), "ones", dtype)
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        scale = self.scale.get_value()
        return rms_normed(x, self.eps) * scale.reshape((1,) * (x.ndim - 1) + scale.shape)


def rms_normed(x: jax.Array, eps: float) -> jax.Array:
    """Values of root-mean-square one over the last axis, in the data's dtype."""
    wide = x.astype(jnp.float32)
    mean_square = jnp.mean(wide * wide, axis=-1, keepdims=True)
    return (wide * jax.lax.rsqrt(mean_square + eps)).astype(x.dtype)
