"""The full forward pass without a cache: every position's logits, for parity and perplexity."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from jinfire.programs.runtime import REPLICATED, MeshModel, Params, Program


@dataclasses.dataclass(frozen=True)
class InBatchKV:
    """Causal attention among the tokens of the batch; nothing is stored."""

    def attend(
        self,
        query_BTNH: jax.Array,
        key_BTKH: jax.Array,
        value_BTKH: jax.Array,
        scale: float,
        attention_chunk: int | None = None,
    ) -> tuple[jax.Array, "InBatchKV"]:
        num_rows, length, _, head_dim = query_BTNH.shape
        num_kv_heads = key_BTKH.shape[2]
        query = query_BTNH.reshape(num_rows, length, num_kv_heads, -1, head_dim)
        scores = jnp.einsum(
            "BTKGH,BSKH->BKGTS", query, key_BTKH, preferred_element_type=jnp.float32
        )
        seen = seen_in_batch(length, attention_chunk)[None, None, None]
        probabilities = jax.nn.softmax(jnp.where(seen, scores * scale, -jnp.inf), axis=-1)
        mixed = jnp.einsum(
            "BKGTS,BSKH->BTKGH",
            probabilities.astype(value_BTKH.dtype),
            value_BTKH,
            preferred_element_type=jnp.float32,
        )
        return mixed.astype(query_BTNH.dtype).reshape(query_BTNH.shape), self

    def attend_latent(
        self, query_BTNH: jax.Array, latent_BTC: jax.Array, up_NUC: jax.Array, scale: float
    ) -> tuple[jax.Array, "InBatchKV"]:
        """The expanded form: keys and values of every head, as the architecture defines them."""
        length, rank = latent_BTC.shape[1], up_NUC.shape[-1]
        rotary = latent_BTC.shape[-1] - rank
        expanded = jnp.einsum(
            "BSC,NUC->BSNU",
            latent_BTC[..., :rank],
            up_NUC,
            preferred_element_type=query_BTNH.dtype,
        )
        key, value = jnp.split(expanded, [query_BTNH.shape[-1] - rotary], axis=-1)
        shared = jnp.broadcast_to(latent_BTC[:, :, None, rank:], (*key.shape[:3], rotary))
        key = jnp.concatenate([key, shared], axis=-1)
        scores = jnp.einsum("BTNH,BSNH->BNTS", query_BTNH, key, preferred_element_type=jnp.float32)
        seen = seen_in_batch(length, None)[None, None]
        probabilities = jax.nn.softmax(jnp.where(seen, scores * scale, -jnp.inf), axis=-1)
        mixed = jnp.einsum(
            "BNTS,BSNV->BTNV",
            probabilities.astype(value.dtype),
            value,
            preferred_element_type=jnp.float32,
        )
        return mixed.astype(query_BTNH.dtype), self


def seen_in_batch(length: int, attention_chunk: int | None) -> jax.Array:
    """Which tokens each token sees, bool [T, S]: those before it, of its attention chunk."""
    index = jnp.arange(length, dtype=jnp.int32)
    seen_TS = index[None] <= index[:, None]
    if attention_chunk is not None:
        chunk = index // attention_chunk
        seen_TS &= chunk[None] == chunk[:, None]
    return seen_TS


def forward_program(model: MeshModel, hidden_states: bool) -> Program:
    """The jitted forward of a single-stage mesh.

    (params, ids [B, T]) -> (logits float32 [B, T, V], hidden). `hidden` is () or the L + 1
    residual streams (embeddings first) and the final norm's output, [B, T, D] each.
    """
    if model.stages != 1:
        raise ValueError(f"forward: expected a mesh of one pipeline stage, got {model.stages}")
    return model.program(
        "forward",
        functools.partial(_forward, model, hidden_states),
        in_specs=(model.param_specs(), REPLICATED),
        out_specs=REPLICATED,
    )


def _forward(
    mesh_model: MeshModel, hidden_states: bool, params: Params, ids_BT: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    model = mesh_model.bind(params)
    positions_T = jnp.arange(ids_BT.shape[1], dtype=jnp.int32)
    positions_BT = jnp.broadcast_to(positions_T[None], ids_BT.shape)
    tables = model.tables(positions_BT)
    streams = [model.embed(ids_BT)]
    for layer in model.layers:
        streams.append(layer(streams[-1], tables, InBatchKV())[0])
    normed = model.final_norm(streams[-1])
    return model.logits(normed), (*streams, normed) if hidden_states else ()
