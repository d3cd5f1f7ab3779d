"""The one decoder stack that every model is a pattern of."""

import jax
import jax.numpy as jnp
from flax import nnx

from jinfire.config import LayerSpec, ModelConfig
from jinfire.layers.attention import Attention, LayerKV
from jinfire.layers.linear import Embedding, head_logits, param
from jinfire.layers.mlp import GatedMLP
from jinfire.layers.norm import RMSNorm
from jinfire.layers.rope import rope_tables

ATTENTION = {"causal": Attention}
MLP = {"dense": lambda config, dtype: GatedMLP(config.width, config.mlp_width, dtype)}


class DecoderLayer(nnx.Module):
    """Pre-norm residual layer: attention, then MLP."""

    def __init__(self, config: ModelConfig, spec: LayerSpec, dtype: jnp.dtype):
        self.attention_norm = RMSNorm(config.width, config.norm_eps, dtype)
        self.attention = ATTENTION[spec.attention](config, dtype)
        self.mlp_norm = RMSNorm(config.width, config.norm_eps, dtype)
        self.mlp = MLP[spec.mlp](config, dtype)

    def __call__[KV: LayerKV](
        self, hidden_BTD: jax.Array, rope: tuple[jax.Array, jax.Array], kv: KV
    ) -> tuple[jax.Array, KV]:
        with jax.named_scope("attention"):
            mixed, kv = self.attention(self.attention_norm(hidden_BTD), rope, kv)
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

    def rope(self, positions_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Rotation tables shared by all layers."""
        return rope_tables(positions_BT, self.config.rope, self.config.head_dim)

    def logits(self, normed: jax.Array) -> jax.Array:
        """Next-token logits of final-norm outputs: [..., D] -> float32 [..., V]."""
        with jax.named_scope("head"):
            owner = self.embed if self.head is None else self.head
            return head_logits(normed, owner.weight.get_value(), self.config.vocab_size)
