"""Latent attention of prefill chunks: keys and values of all heads, expanded a block at a time."""

import jax
import jax.numpy as jnp

MASKED = -1e30

# Tokens whose keys and values are there at once.
BLOCK_TOKENS = 256


def expanded_latent_attention(
    query_RTNH: jax.Array,
    latent_pages: jax.Array,
    up_NUC: jax.Array,
    page_table_RW: jax.Array,
    starts_R: jax.Array,
    lengths_R: jax.Array,
    *,
    scale: float,
) -> jax.Array:
    """Causal multi-head latent attention of a chunk of new tokens per row over the row's pages.

    Query t of row r sits at position starts[r] + t and sees positions up to its own, its chunk's
    latents being in the pages already. Queries from lengths[r] on give zeros. For many queries a
    row, expanding the latents costs less than `latent_attention` over them, whose keys and values
    are as wide as the latents.

    Rows are worked through one after the other, and each up to its end, so a row's result depends
    on neither the other rows nor the table's width, and no more than `BLOCK_TOKENS` of one row are
    expanded at any time. Softmax is float32; keys, values and weights are rounded to the data's
    dtype.

    Shapes: query [R, T, N, nope + A], pages [P, Z, 1, C + A] of normed latents and rotated keys,
    up [N, nope + value, C], page table [R, W] int32, starts and lengths [R] int32; the result is
    [R, T, N, value].
    """
    W, Z = page_table_RW.shape[1], latent_pages.shape[1]
    ends_R = jnp.minimum(starts_R + lengths_R, W * Z)
    rows = (query_RTNH, page_table_RW, starts_R, jnp.where(lengths_R > 0, ends_R, 0))
    return jax.lax.map(lambda row: _attend_row(*row, latent_pages, up_NUC, scale), rows)


def _attend_row(
    query_TNH: jax.Array,
    table_W: jax.Array,
    start: jax.Array,
    end: jax.Array,
    latent_pages: jax.Array,
    up_NUC: jax.Array,
    scale: float,
) -> jax.Array:
    """Attention of one row's queries to its tokens before `end`: [T, N, value]."""
    T, N, H = query_TNH.shape
    P, Z, _, D = latent_pages.shape
    C = up_NUC.shape[-1]
    plain_dim = H - (D - C)
    dtype = query_TNH.dtype
    W = table_W.shape[0]
    pages = min(max(1, BLOCK_TOKENS // Z), W)
    block = pages * Z
    table_W = jnp.pad(table_W, (0, -W % pages))
    # Flat rows in the pool's own order: the fastest gather there is.
    pool = latent_pages.reshape(P, Z * D)
    plain_NTU, rotary_NTA = jnp.split(query_TNH.transpose(1, 0, 2), [plain_dim], axis=-1)
    position_T = start + jnp.arange(T)

    def attend_block(i, state):
        out_NTV, total_NT, top_NT = state
        ids = jax.lax.dynamic_slice_in_dim(table_W, i * pages, pages)
        latents_SD = pool.at[ids].get(mode="clip").reshape(block, D)
        position_S = i * block + jnp.arange(block)
        filled_S = position_S < end
        # Slots behind the row's end may hold NaN, and 0 x NaN is NaN.
        latents_SD = jnp.where(filled_S[:, None], latents_SD, 0)
        expanded_NSU = jnp.einsum(
            "NUC,SC->NSU", up_NUC, latents_SD[:, :C], preferred_element_type=dtype
        )
        key_NSU, value_NSV = jnp.split(expanded_NSU, [plain_dim], axis=-1)
        scores = jnp.einsum(
            "NTU,NSU->NTS", plain_NTU, key_NSU, preferred_element_type=jnp.float32
        ) + jnp.einsum(
            "NTA,SA->NTS", rotary_NTA, latents_SD[:, C:], preferred_element_type=jnp.float32
        )
        seen_TS = filled_S[None, :] & (position_S[None, :] <= position_T[:, None])
        scores = jnp.where(seen_TS[None], scores * scale, MASKED)
        # Every query sees position 0: from the first block on the top is a real score, and what
        # is masked weighs exactly nothing.
        new_top_NT = jnp.maximum(top_NT, jnp.max(scores, axis=-1))
        shrink_NT = jnp.exp(top_NT - new_top_NT)
        weights_NTS = jnp.exp(scores - new_top_NT[:, :, None])
        part_NTV = jnp.einsum(
            "NTS,NSV->NTV",
            weights_NTS.astype(dtype),
            value_NSV,
            preferred_element_type=jnp.float32,
        )
        return (
            out_NTV * shrink_NT[:, :, None] + part_NTV,
            total_NT * shrink_NT + jnp.sum(weights_NTS, axis=-1),
            new_top_NT,
        )

    state = (
        jnp.zeros((N, T, up_NUC.shape[1] - plain_dim), jnp.float32),
        jnp.zeros((N, T), jnp.float32),
        jnp.full((N, T), MASKED, jnp.float32),
    )
    out_NTV, total_NT, _ = jax.lax.fori_loop(0, -(-end // block), attend_block, state)
    # A query that is not there may be anything.
    valid_T = position_T < end
    out_NTV = jnp.where(valid_T[None, :, None], out_NTV / total_NT[:, :, None], 0)
    return out_NTV.astype(dtype).transpose(1, 0, 2)
