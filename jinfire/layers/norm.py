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
        wide = x.astype(jnp.float32)
        mean_square = jnp.mean(wide * wide, axis=-1, keepdims=True)
        normed = (wide * jax.lax.rsqrt(mean_square + self.eps)).astype(x.dtype)
        scale = self.scale.get_value()
        return normed * scale.reshape((1,) * (x.ndim - 1) + scale.shape)
