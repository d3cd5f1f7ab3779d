"""The one decoder stack that every model is a pattern of."""

import jax
import jax.numpy as jnp
from flax import nnx

from jinfire.config import LayerSpec, ModelConfig
from jinfire.layers.attention import Attention, LayerKV
from jinfire.layers.linear import Embedding, head_logits, param
from jinfire.layers.mla import LatentAttention
from jinfire.layers.mlp import GatedMLP
from jinfire.layers.moe import MoE
from jinfire.layers.norm import RMSNorm
from jinfire.layers.rope import PositionTables, query_temperature, rope_tables

ATTENTION = {
    "causal": Attention,
    "chunked": lambda config, dtype: Attention(config, dtype, chunk=config.attention_chunk),
    "unrotated": lambda config, dtype: Attention(config, dtype, rotated=False),
    "latent": LatentAttention,
}
MLP = {
    "dense": lambda config, dtype: GatedMLP(config.width, config.mlp_width, dtype),
    "experts": MoE,
}


class DecoderLayer(nnx.Module):
    """Pre-norm residual layer: attention, then MLP."""

    def __init__(self, config: ModelConfig, spec: LayerSpec, dtype: jnp.dtype):
        self.attention_norm = RMSNorm(config.width, config.norm_eps, dtype)
        self.attention = ATTENTION[spec.attention](config, dtype)
        self.mlp_norm = RMSNorm(config.width, config.norm_eps, dtype)
        self.mlp = MLP[spec.mlp](config, dtype)

    def __call__[KV: LayerKV](
        self, hidden_BTD: jax.Array, tables: PositionTables, kv: KV
    ) -> tuple[jax.Array, KV]:
        with jax.named_scope("attention"):
            mixed, kv = self.attention(self.attention_norm(hidden_BTD), tables, kv)
        hidden_BTD = hidden_BTD + mixed
        with jax.named_scope("mlp"):
            return hidden_BTD + self.mlp(self.mlp_norm(hidden_BTD)), kv


class Head(nnx.Module):
    """Untied output projection."""

    def __init__(self, vocab: int, width: int, dtype: jnp.dtype):
        self.weight = param((vocab, width), ("vocab", "embed"), "normal", dtype)


class Transformer(nnx.Module):
    """Embedding, decoder layers, final norm and head.

    `layers` are those of one pipeline stage when the module runs inside a program, and the whole
    model's in the abstract tree. A layer whose weights are all zero is the identity, which is how
    stages with fewer layers than others are padded.
    """

    def __init__(
        self, config: ModelConfig, layers: tuple[LayerSpec, ...], dtype: jnp.dtype
    ) -> None:
        self.config = config
        self.embed = Embedding(config.vocab_size, config.width, dtype)
        self.layers = nnx.List([DecoderLayer(config, spec, dtype) for spec in layers])
        self.final_norm = RMSNorm(config.width, config.norm_eps, dtype)
        tied = config.tie_embeddings
        self.head = None if tied else Head(config.vocab_size, config.width, dtype)

    def tables(self, positions_BT: jax.Array) -> PositionTables:
        """What all layers need of positions."""
        config = self.config
        rotary = config.head_dim if config.latent is None else config.latent.rope_dim
        growth = config.temperature and query_temperature(positions_BT, config.temperature)
        return PositionTables(rope_tables(positions_BT, config.rope, rotary), growth)

    def logits(self, normed: jax.Array) -> jax.Array:
        """Next-token logits of final-norm outputs: [..., D] -> float32 [..., V]."""
        with jax.named_scope("head"):
            owner = self.embed if self.head is None else self.head
            return head_logits(normed, owner.weight.get_value(), self.config.vocab_size)
