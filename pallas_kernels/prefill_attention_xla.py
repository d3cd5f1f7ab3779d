"""Paged attention of prefill chunks for any device, over the tiles that the mask leaves."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.paged_attention_xla import MASKED, gather_pages

# Queries and keys in a tile of the XLA form: a tile's scores stay in cache.
QUERY_TILE = 128
KEY_TILE = 128


def first_seen(
    position: jax.Array, window: int | None, attention_chunk: int | None
) -> jax.Array | None:
    """First position that a query at `position` sees, perhaps below 0; None where it sees all."""
    bounds = []
    if window is not None:
        bounds.append(position - (window - 1))
    if attention_chunk is not None:
        bounds.append(position - lax.rem(position, jnp.int32(attention_chunk)))
    if not bounds:
        return None
    return bounds[0] if len(bounds) == 1 else jnp.maximum(*bounds)


def prefill_attention_xla(
    query_RCNH: jax.Array,
    key_pages: jax.Array,
    value_pages: jax.Array,
    page_table_RW: jax.Array,
    starts_R: jax.Array,
    lengths_R: jax.Array,
    *,
    scale: float,
    window: int | None = None,
    attention_chunk: int | None = None,
) -> jax.Array:
    """Prefill attention with an online softmax, over the tiles that the mask leaves.

    Trip counts follow the valid tokens: empty rows, padded queries, and keys that a whole tile does
    not see cost nothing.
    """
    R, C, N, H = query_RCNH.shape
    _, Z, K, _ = key_pages.shape
    G = N // K
    dtype = query_RCNH.dtype
    Q = min(QUERY_TILE, C)
    tiles = -(-C // Q)
    W = page_table_RW.shape[1]
    pages = min(max(1, KEY_TILE // Z), W)
    T = pages * Z
    table_RW = jnp.pad(page_table_RW, ((0, 0), (0, -W % pages)))
    lengths_R = jnp.clip(jnp.minimum(lengths_R, W * Z - starts_R), 0, C)
    query = jnp.pad(query_RCNH, ((0, 0), (0, tiles * Q - C), (0, 0), (0, 0)))
    query = query.reshape(R, tiles, Q, K, G, H).transpose(0, 1, 3, 4, 2, 5)
    query = query.reshape(R, tiles, K, G * Q, H)

    # The list of tiles that hold a valid query: item i is tile i - start_r of row r.
    count_R = -(-lengths_R // Q)
    end_R = jnp.cumsum(count_R)
    offsets_Q = jnp.arange(Q)
    offsets_T = jnp.arange(T)

    def attend_tile(row, tile, num_blocks):
        """Attention of one tile of one row's queries: [K, G * Q, H]."""
        query_KMH = query[row, tile]
        position_Q = starts_R[row] + tile * Q + offsets_Q
        first_Q = first_seen(position_Q, window, attention_chunk)
        end = starts_R[row] + lengths_R[row]

        def one_block(block, state):
            acc_KMH, total_KM, top_KM = state
            ids = jax.lax.dynamic_slice(table_RW, (row, block * pages), (1, pages))[0]
            keys_TKH = gather_pages(key_pages, ids).reshape(T, K, H)
            values_TKH = gather_pages(value_pages, ids).reshape(T, K, H)
            key_position_T = block * T + offsets_T
            # Unwritten slots may hold NaN, and 0 x NaN is NaN: mask the values too.
            live_T = key_position_T < end
            if first_Q is not None:
                live_T &= key_position_T >= first_Q[0]
            values_TKH = jnp.where(live_T[:, None, None], values_TKH, 0)
            seen_QT = key_position_T[None, :] <= jnp.minimum(position_Q, end - 1)[:, None]
            if first_Q is not None:
                seen_QT &= key_position_T[None, :] >= first_Q[:, None]
            scores = jnp.einsum(
                "KMH,TKH->KMT", query_KMH, keys_TKH, preferred_element_type=jnp.float32
            )
            scores = scores.reshape(K, G, Q, T)
            scores = jnp.where(seen_QT[None, None], scores * scale, MASKED).reshape(K, G * Q, T)
            new_top_KM = jnp.maximum(top_KM, jnp.max(scores, axis=-1))
            # Without a lower bound every valid query sees position 0, so after the first block the
            # top is a real score and masked ones weigh exactly zero. With one, a query may see
            # nothing of the tile's first blocks.
            weights_KMT = jnp.exp(scores - new_top_KM[:, :, None])
            if first_Q is not None:
                weights_KMT = jnp.where(scores == MASKED, 0.0, weights_KMT)
            keep_KM = jnp.exp(top_KM - new_top_KM)
            part_KMH = jnp.einsum(
                "KMT,TKH->KMH",
                weights_KMT.astype(dtype),
                values_TKH,
                preferred_element_type=jnp.float32,
            )
            return (
                acc_KMH * keep_KM[:, :, None] + part_KMH,
                total_KM * keep_KM + jnp.sum(weights_KMT, axis=-1),
                new_top_KM,
            )

        state = (
            jnp.zeros((K, G * Q, H), jnp.float32),
            jnp.zeros((K, G * Q), jnp.float32),
            jnp.full((K, G * Q), MASKED, jnp.float32),
        )
        if num_blocks is None:
            acc_KMH, total_KM, _ = one_block(0, state)
        else:
            begin = 0 if first_Q is None else jnp.maximum(first_Q[0], 0) // T
            acc_KMH, total_KM, _ = jax.lax.fori_loop(begin, num_blocks, one_block, state)
        return (acc_KMH / total_KM[:, :, None]).astype(dtype)

    def one_item(item, out):
        row = jnp.minimum(jnp.sum(item >= end_R), R - 1)
        tile = item - (end_R[row] - count_R[row])
        reach = starts_R[row] + jnp.minimum(lengths_R[row], (tile + 1) * Q)
        result = attend_tile(row, tile, -(-reach // T))
        return jax.lax.dynamic_update_slice(out, result[None, None], (row, tile, 0, 0, 0))

    if tiles == 1 and pages == W:
        # Small chunks with a short context: all rows in one go.
        out = jax.vmap(lambda row: attend_tile(row, 0, None))(jnp.arange(R))
    else:
        out = jnp.zeros((R, tiles, K, G * Q, H), dtype)
        out = jax.lax.fori_loop(0, end_R[-1], one_item, out)
    out = out.reshape(R, tiles, K, G, Q, H).transpose(0, 1, 4, 2, 3, 5)
    out = out.reshape(R, tiles * Q, N, H)[:, :C]
    valid_RC = jnp.arange(C)[None, :] < lengths_R[:, None]
    return jnp.where(valid_RC[:, :, None, None], out, 0)
