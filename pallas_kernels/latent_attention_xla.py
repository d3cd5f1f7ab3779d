"""XLA form of latent attention: for every device, every dtype and every size of page."""

from typing import Any

import jax
import jax.numpy as jnp

MASKED = -1e30

# Tokens in a block: a chunk's copy of its latents stays in cache.
BLOCK_TOKENS = 256
# Rows that one chunk works on.
CHUNK_ROWS = 8


def latent_attention_xla(
    query: jax.Array,
    latent_pages: jax.Array,
    page_table_BW: jax.Array,
    lengths_B: jax.Array,
    *,
    scale: float,
    rank: int,
    with_lse: bool = False,
) -> Any:
    """Latent attention a block of tokens at a time, with an online softmax.

    Rows are sorted by length and worked through in chunks, each of which ends with its longest row:
    a batch of unequal rows, or with empty ones, wastes little. No copy of the latents is larger
    than the blocks of one chunk. A block behind a row's end changes nothing of that row, bit for
    bit, so a row's result depends on neither the other rows nor the table's width.
    """
    B, W = page_table_BW.shape
    _, Z, _, D = latent_pages.shape
    tokens, heads = (1, query.shape[1]) if query.ndim == 3 else query.shape[1:3]
    lengths_B = jnp.minimum(lengths_B, W * Z)

    chunk = min(CHUNK_ROWS, B)
    chunks = -(-B // chunk)
    order_B = jnp.argsort(-lengths_B)
    # The last chunk is filled with rows of length 0; where their results land, nobody looks.
    order_Y = jnp.pad(order_B, (0, chunks * chunk - B))
    lengths_Y = jnp.pad(lengths_B[order_B], (0, chunks * chunk - B))

    def attend(rows_X: jax.Array, lengths_X: jax.Array) -> tuple[jax.Array, ...]:
        results = _attend_rows(
            query.reshape(B, tokens * heads, D)[rows_X],
            latent_pages,
            page_table_BW[rows_X],
            lengths_X,
            _row_limits(lengths_X, tokens, heads),
            scale,
            rank,
        )
        return results if with_lse else results[:1]

    if chunks == 1:
        results = attend(order_Y, lengths_Y)
    else:
        results = jax.lax.map(
            lambda each: attend(*each),
            (order_Y.reshape(chunks, chunk), lengths_Y.reshape(chunks, chunk)),
        )
        results = [x.reshape(chunks * chunk, *x.shape[2:]) for x in results]
    in_order = [
        jnp.zeros((B, *x.shape[1:]), x.dtype)
        .at[order_B]
        .set(x[:B])
        .reshape(*query.shape[:-1], *x.shape[2:])
        for x in results
    ]
    return tuple(in_order) if with_lse else in_order[0]


def _row_limits(lengths_X: jax.Array, tokens: int, heads: int) -> jax.Array:
    """How many of the row's tokens each query sees: [X, T * N], token by token."""
    limits_XT = lengths_X[:, None] - tokens + 1 + jnp.arange(tokens)[None, :]
    return jnp.repeat(limits_XT, heads, axis=1)


def _attend_rows(
    query_XMD: jax.Array,
    latent_pages: jax.Array,
    table_XW: jax.Array,
    lengths_X: jax.Array,
    limits_XM: jax.Array,
    scale: float,
    rank: int,
) -> tuple[jax.Array, jax.Array]:
    """Attention of a chunk's rows, as far as its longest row goes.

    Shapes: out [X, M, C], and the logarithm of the sum of weights [X, M], -inf for none.
    """
    X, M, D = query_XMD.shape
    P, Z, _, _ = latent_pages.shape
    W = table_XW.shape[1]
    pages = min(max(1, BLOCK_TOKENS // Z), W)
    block = pages * Z
    columns = -(-W // pages) * pages
    table_XW = jnp.pad(table_XW, ((0, 0), (0, columns - W)))
    # Flat rows in the pool's own order: the fastest gather there is.
    pool = latent_pages.reshape(P, Z * D)

    def attend_block(i, state):
        out_XMC, total_XM, top_XM = state
        ids_XP = jax.lax.dynamic_slice_in_dim(table_XW, i * pages, pages, axis=1)
        latents_XSD = pool.at[ids_XP].get(mode="clip").reshape(X, block, D)
        positions_S = i * block + jnp.arange(block)
        # Slots behind a row's end may hold NaN, and 0 x NaN is NaN.
        filled_XS = positions_S[None, :] < lengths_X[:, None]
        latents_XSD = jnp.where(filled_XS[:, :, None], latents_XSD, 0)
        scores = jnp.einsum(
            "XMD,XSD->XMS", query_XMD, latents_XSD, preferred_element_type=jnp.float32
        )
        seen = positions_S[None, None, :] < limits_XM[:, :, None]
        scores = jnp.where(seen, scores * scale, MASKED)
        new_top_XM = jnp.maximum(top_XM, jnp.max(scores, axis=-1))
        shrink_XM = jnp.exp(top_XM - new_top_XM)
        weights = jnp.where(seen, jnp.exp(scores - new_top_XM[:, :, None]), 0.0)
        part_XMC = jnp.einsum(
            "XMS,XSC->XMC",
            weights.astype(latents_XSD.dtype),
            latents_XSD[:, :, :rank],
            preferred_element_type=jnp.float32,
        )
        out_XMC = out_XMC * shrink_XM[:, :, None] + part_XMC
        return out_XMC, total_XM * shrink_XM + jnp.sum(weights, axis=-1), new_top_XM

    state = (
        jnp.zeros((X, M, rank), jnp.float32),
        jnp.zeros((X, M), jnp.float32),
        jnp.full((X, M), MASKED, jnp.float32),
    )
    out_XMC, total_XM, top_XM = jax.lax.fori_loop(
        0, -(-jnp.max(lengths_X) // block), attend_block, state
    )
    seen_XM = total_XM > 0
    total_XM = jnp.where(seen_XM, total_XM, 1.0)
    lse_XM = jnp.where(seen_XM, top_XM + jnp.log(total_XM), -jnp.inf)
    return (out_XMC / total_XM[:, :, None]).astype(query_XMD.dtype), lse_XM
