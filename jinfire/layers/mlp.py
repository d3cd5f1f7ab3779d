"""Gated feed-forward layers."""

import jax
import jax.numpy as jnp
from flax import nnx

from jinfire.layers.linear import Linear, RowParallelLinear


class GatedMLP(nnx.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, width: int, mlp_width: int, dtype: jnp.dtype):
        self.gate = Linear(mlp_width, width, ("mlp", "embed"), dtype)
        self.up = Linear(mlp_width, width, ("mlp", "embed"), dtype)
        self.down = RowParallelLinear(width, mlp_width, ("embed", "mlp"), dtype)

    def __call__(self, hidden_BTD: jax.Array) -> jax.Array:
        return self.down(self._inner(hidden_BTD))

    def partial(self, hidden_BTD: jax.Array) -> jax.Array:
        """This device's term of the sum over the model axes, for a caller that adds its own."""
        return self.down.partial(self._inner(hidden_BTD))

    def _inner(self, hidden_BTD: jax.Array) -> jax.Array:
        return jax.nn.silu(self.gate(hidden_BTD)) * self.up(hidden_BTD)
