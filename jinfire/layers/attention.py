"""Grouped-query attention over whatever holds the keys and values."""

from typing import Protocol, Self

import jax
import jax.numpy as jnp
from flax import nnx

from jinfire.config import ModelConfig
from jinfire.layers.linear import Linear, RowParallelLinear
from jinfire.layers.norm import RMSNorm, rms_normed
from jinfire.layers.rope import PositionTables, apply_rope


class LayerKV(Protocol):
    """Keys and values of one layer, old and new.

    `attend` stores the new keys and values and returns the attention output of the queries over
    everything they may see, with the updated store. Data moves by argument and return value only.
    """

    def attend(
        self,
        query_BTNH: jax.Array,
        key_BTKH: jax.Array,
        value_BTKH: jax.Array,
        scale: float,
        attention_chunk: int | None = None,
    ) -> tuple[jax.Array, Self]:
        """Causal attention, or causal within the attention chunk that a query is in."""
        ...

    def attend_latent(
        self, query_BTNH: jax.Array, latent_BTC: jax.Array, up_NUC: jax.Array, scale: float
    ) -> tuple[jax.Array, Self]:
        """Causal multi-head latent attention.

        Shapes: query [B, T, N, nope + rope], latent [B, T, rank + rope] with normed latents and
        rotated keys, up [N, nope + value, rank]; the result is [B, T, N, value].
        """
        ...


class Attention(nnx.Module):
    """Causal grouped-query attention, rotated by position or not, with or without q/k norms.

    `chunk`: a query sees the attention chunk of this many tokens that it is in, None all tokens.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: jnp.dtype,
        rotated: bool = True,
        chunk: int | None = None,
    ):
        width, head_dim = config.width, config.head_dim
        query_rows, kv_rows = config.num_heads * head_dim, config.num_kv_heads * head_dim
        self.head_dim = head_dim
        self.rotated, self.interleaved = rotated, config.rope.interleaved
        self.chunk = chunk
        self.eps_after_rope = config.norm_eps if config.qk_norm_after_rope and rotated else None
        self.query = Linear(query_rows, width, ("heads", "embed"), dtype)
        self.key = Linear(kv_rows, width, ("kv_heads", "embed"), dtype)
        self.value = Linear(kv_rows, width, ("kv_heads", "embed"), dtype)
        self.output = RowParallelLinear(width, query_rows, ("embed", "heads"), dtype)
        self.query_norm = RMSNorm(head_dim, config.norm_eps, dtype) if config.qk_norm else None
        self.key_norm = RMSNorm(head_dim, config.norm_eps, dtype) if config.qk_norm else None

    def __call__[KV: LayerKV](
        self, hidden_BTD: jax.Array, tables: PositionTables, kv: KV
    ) -> tuple[jax.Array, KV]:
        query_BTNH = self._heads(self.query(hidden_BTD))
        key_BTKH = self._heads(self.key(hidden_BTD))
        value_BTKH = self._heads(self.value(hidden_BTD))
        if self.query_norm is not None and self.key_norm is not None:
            query_BTNH, key_BTKH = self.query_norm(query_BTNH), self.key_norm(key_BTKH)
        if self.rotated:
            with jax.named_scope("rope"):
                query_BTNH = apply_rope(query_BTNH, tables.rotation, self.interleaved)
                key_BTKH = apply_rope(key_BTKH, tables.rotation, self.interleaved)
        elif tables.temperature is not None:
            wide = query_BTNH.astype(jnp.float32) * tables.temperature
            query_BTNH = wide.astype(query_BTNH.dtype)
        if self.eps_after_rope is not None:
            query_BTNH = rms_normed(query_BTNH, self.eps_after_rope)
            key_BTKH = rms_normed(key_BTKH, self.eps_after_rope)
        with jax.named_scope("attend"):
            scale = self.head_dim**-0.5
            mixed_BTNH, kv = kv.attend(query_BTNH, key_BTKH, value_BTKH, scale, self.chunk)
        return self.output(mixed_BTNH.reshape(*hidden_BTD.shape[:2], -1)), kv

    def _heads(self, x_BTM: jax.Array) -> jax.Array:
        return x_BTM.reshape(*x_BTM.shape[:2], -1, self.head_dim)
