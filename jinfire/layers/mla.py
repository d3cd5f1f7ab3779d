"""Multi-head latent attention (MLA): one latent and one rotary key a token, shared by all heads."""

import jax
import jax.numpy as jnp
from flax import nnx

from jinfire.config import ModelConfig
from jinfire.layers.attention import LayerKV
from jinfire.layers.linear import Linear, RowParallelLinear
from jinfire.layers.norm import RMSNorm
from jinfire.layers.rope import PositionTables, apply_rope, latent_softmax_scale
from jinfire.weights import whole


class LatentAttention(nnx.Module):
    """Causal multi-head latent attention.

    Layout: heads are split over the model axes; every device computes, and keeps, all latents.
    Source: DeepSeek-V2 (arXiv 2405.04434) section 2.1.
    """

    def __init__(self, config: ModelConfig, dtype: jnp.dtype):
        sizes, width, num_heads = config.latent, config.width, config.num_heads
        assert sizes is not None  # a config with latent layers has their sizes
        query_rows = num_heads * (sizes.nope_dim + sizes.rope_dim)
        up_rows = num_heads * (sizes.nope_dim + sizes.value_dim)
        self.sizes = sizes
        self.interleaved = config.rope.interleaved
        self.scale = latent_softmax_scale(config.rope, sizes.nope_dim + sizes.rope_dim)
        if sizes.query_rank is None:
            self.query = Linear(query_rows, width, ("heads", "embed"), dtype)
        else:
            self.query_down = Linear(sizes.query_rank, width, (None, "embed"), dtype)
            self.query_norm = RMSNorm(sizes.query_rank, sizes.norm_eps, dtype)
            self.query_up = Linear(query_rows, sizes.query_rank, ("heads", None), dtype)
        self.latent_down = Linear(sizes.rank + sizes.rope_dim, width, (None, "embed"), dtype)
        self.latent_norm = RMSNorm(sizes.rank, sizes.norm_eps, dtype)
        self.latent_up = Linear(up_rows, sizes.rank, ("heads", None), dtype)
        self.output = RowParallelLinear(
            width, num_heads * sizes.value_dim, ("embed", "heads"), dtype
        )

    def __call__[KV: LayerKV](
        self, hidden_BTD: jax.Array, tables: PositionTables, kv: KV
    ) -> tuple[jax.Array, KV]:
        sizes, lead = self.sizes, hidden_BTD.shape[:2]
        query_BTNH = self._queries(hidden_BTD)
        plain, rotary = jnp.split(query_BTNH, [sizes.nope_dim], axis=-1)
        latent_BTC, key_BTA = jnp.split(self.latent_down(hidden_BTD), [sizes.rank], axis=-1)
        with jax.named_scope("rope"):
            rotary = apply_rope(rotary, tables.rotation, self.interleaved)
            key_BTA = apply_rope(key_BTA[:, :, None], tables.rotation, self.interleaved)[:, :, 0]
        query_BTNH = jnp.concatenate([plain, rotary], axis=-1)
        latent_BTC = jnp.concatenate([self.latent_norm(latent_BTC), key_BTA], axis=-1)
        # The products with this weight lie inside attention, where the form of the cache decides
        # on which side of it they are.
        latent_BTC, up = whole(latent_BTC, self.latent_up.weight.get_value())
        up_NUC = up.reshape(-1, sizes.nope_dim + sizes.value_dim, sizes.rank)
        with jax.named_scope("attend"):
            mixed_BTNV, kv = kv.attend_latent(query_BTNH, latent_BTC, up_NUC, self.scale)
        return self.output(mixed_BTNV.reshape(*lead, -1)), kv

    def _queries(self, hidden_BTD: jax.Array) -> jax.Array:
        if self.sizes.query_rank is None:
            rows = self.query(hidden_BTD)
        else:
            rows = self.query_up(self.query_norm(self.query_down(hidden_BTD)))
        head_dim = self.sizes.nope_dim + self.sizes.rope_dim
        return rows.reshape(*hidden_BTD.shape[:2], -1, head_dim)
