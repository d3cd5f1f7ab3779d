"""Paged attention of decode rows for any device, and the write of new keys and values."""

import jax
import jax.numpy as jnp
from jax import lax

MASKED = -1e30

# Tokens in a block and blocks in an iteration of the XLA form: one iteration's keys and values stay
# in cache, and a block is small enough that a ragged batch wastes little.
BLOCK_TOKENS = 128
BLOCKS_AT_ONCE = 16

# Up to this many query heads, one dot a block over all heads (zeros where a query meets another kv
# head) beats one tiny dot for each kv head; beyond it, the wasted products cost more.
DENSE_HEADS = 16


def write_pages(
    pages_PZKH: jax.Array,
    new_BTKH: jax.Array,
    page_table_BW: jax.Array,
    positions_BT: jax.Array,
    valid_BT: jax.Array,
) -> jax.Array:
    """Pool with new keys (or values) stored at their tokens' positions.

    Tokens that are not valid, or whose position lies outside the page table, go to the null page.
    A page id outside the pool is dropped: clipping it would write into another request's page.

    Donates: `pages_PZKH` is updated in place where the caller's jit donates it.
    """
    P, Z, _, _ = pages_PZKH.shape
    W = page_table_BW.shape[1]
    column_BT = positions_BT // Z
    valid_BT = valid_BT & (column_BT >= 0) & (column_BT < W)
    page_BT = jnp.take_along_axis(page_table_BW, jnp.clip(column_BT, 0, W - 1), axis=1)
    # A negative index would count from the end of the pool.
    page_BT = jnp.where(page_BT < 0, P, page_BT)
    page_BT = jnp.where(valid_BT, page_BT, 0)
    slot_BT = jnp.where(valid_BT, positions_BT % Z, 0)
    return pages_PZKH.at[page_BT, slot_BT].set(new_BTKH.astype(pages_PZKH.dtype), mode="drop")


def gather_pages(pages_PZKH: jax.Array, page_ids: jax.Array) -> jax.Array:
    """Copies of pages, each a flat row in the pool's own order: the fastest gather there is."""
    P = pages_PZKH.shape[0]
    return pages_PZKH.reshape(P, -1).at[page_ids].get(mode="clip")


def _across_heads(query_INH: jax.Array, K: int) -> jax.Array:
    """Queries over the concatenated kv heads, zero outside their own: [I, N, K*H]."""
    items, N, H = query_INH.shape
    own_KK = jnp.eye(K, dtype=query_INH.dtype)[None, :, None, :, None]
    return (query_INH.reshape(items, K, N // K, 1, H) * own_KK).reshape(items, N, K * H)


def _own_head(out_IND: jax.Array, K: int) -> jax.Array:
    """The part of each query head's output that belongs to its own kv head: [I, N, H]."""
    items, N, D = out_IND.shape
    out = out_IND.reshape(items, K, N // K, K, D // K)
    return jnp.stack([out[:, k, :, k] for k in range(K)], axis=1).reshape(items, N, D // K)


def _attend(
    query_INH: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    live_IT: jax.Array,
    seen_INT: jax.Array | None,
    K: int,
    scale: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Attention of each query to its own block: unnormalised output, sum of weights, largest score.

    Live tokens are those that some query of the item sees; `seen_INT` says which query does, where
    they differ.
    A block without a live token gives a sum of zero.
    """
    items, N, H = query_INH.shape
    T = live_IT.shape[1]
    G = N // K
    # Unwritten slots may hold NaN, and 0 x NaN is NaN: mask the values too, not only the scores.
    values_ITD = jnp.where(live_IT[:, :, None], values.reshape(items, T, K * H), 0)
    keys_ITD = keys.reshape(items, T, K * H)
    dense = N <= DENSE_HEADS
    if dense:
        scores = jnp.einsum(
            "IND,ITD->INT",
            _across_heads(query_INH, K),
            keys_ITD,
            preferred_element_type=jnp.float32,
        )
    else:
        scores = jnp.einsum(
            "IKGH,ITKH->IKGT",
            query_INH.reshape(items, K, G, H),
            keys_ITD.reshape(items, T, K, H),
            preferred_element_type=jnp.float32,
        ).reshape(items, N, T)
    live = live_IT[:, None, :] if seen_INT is None else seen_INT
    scores = jnp.where(live, scores * scale, MASKED)
    top_IN = jnp.max(scores, axis=-1)
    weights = jnp.where(live, jnp.exp(scores - top_IN[:, :, None]), 0.0)
    total_IN = jnp.sum(weights, axis=-1)
    weights = weights.astype(values_ITD.dtype)
    if dense:
        out = jnp.einsum("INT,ITD->IND", weights, values_ITD, preferred_element_type=jnp.float32)
        return _own_head(out, K), total_IN, top_IN
    out = jnp.einsum(
        "IKGT,ITKH->IKGH",
        weights.reshape(items, K, G, T),
        values_ITD.reshape(items, T, K, H),
        preferred_element_type=jnp.float32,
    )
    return out.reshape(items, N, H), total_IN, top_IN


def first_seen(position: jax.Array, window: int | None, attention_chunk: int | None) -> jax.Array:
    """The first position that the token at `position` sees."""
    position = jnp.maximum(position, 0)
    first = position * 0
    if window is not None:
        first = jnp.maximum(position - (window - 1), 0)
    if attention_chunk is not None:
        chunk = jnp.full_like(position, attention_chunk)
        first = jnp.maximum(first, lax.div(position, chunk) * attention_chunk)
    return first


def paged_attention_xla(
    query: jax.Array,
    key_pages: jax.Array,
    value_pages: jax.Array,
    page_table_BW: jax.Array,
    lengths_B: jax.Array,
    *,
    scale: float,
    window: int | None = None,
    attention_chunk: int | None = None,
) -> jax.Array:
    """Decode attention over a list of the live blocks only.

    Rows are cut into blocks of tokens, the live blocks of all rows are listed, and a loop works
    through the list a few blocks at a time: its trip count follows the tokens present, not the
    page table's width or the longest row. A row's blocks are combined in order, so a row's result
    depends on neither the other rows nor the width.

    Several query tokens of a row are more query heads of it, kv head by kv head.
    """
    if query.ndim == 3:
        return _attend_rows(
            query,
            key_pages,
            value_pages,
            page_table_BW,
            lengths_B,
            1,
            scale,
            window,
            attention_chunk,
        )
    B, T, N, H = query.shape
    K = key_pages.shape[2]
    query_BNH = query.reshape(B, T, K, N // K, H).transpose(0, 2, 1, 3, 4).reshape(B, T * N, H)
    out_BNH = _attend_rows(
        query_BNH,
        key_pages,
        value_pages,
        page_table_BW,
        lengths_B,
        T,
        scale,
        window,
        attention_chunk,
    )
    out = out_BNH.reshape(B, K, T, N // K, H).transpose(0, 2, 1, 3, 4)
    return out.reshape(query.shape)


def _attend_rows(
    query_BNH: jax.Array,
    key_pages: jax.Array,
    value_pages: jax.Array,
    page_table_BW: jax.Array,
    lengths_B: jax.Array,
    tokens: int,
    scale: float,
    window: int | None,
    attention_chunk: int | None,
) -> jax.Array:
    """Decode attention of query heads [B, K * T * G, H], each at its token's position."""
    B, N, H = query_BNH.shape
    _, Z, K, _ = key_pages.shape
    dtype = query_BNH.dtype
    pages = max(1, BLOCK_TOKENS // Z)
    W = page_table_BW.shape[1]
    blocks = -(-W // pages)
    T = pages * Z
    plain = tokens == 1 and window is None and attention_chunk is None
    # Q counts the query tokens of a row.
    own_BQ = lengths_B[:, None] - tokens + jnp.arange(tokens)[None, :]
    first_BQ = first_seen(own_BQ, window, attention_chunk)
    table = jnp.pad(page_table_BW, ((0, 0), (0, blocks * pages - W)))
    lengths_B = jnp.minimum(lengths_B, W * Z)
    offsets_T = jnp.arange(T)

    def masks(rows_X, start_X, tokens_X):
        """Which tokens of a block some query sees, and which query does, where they differ."""
        live_XT = offsets_T[None, :] < tokens_X[:, None]
        if plain:
            return live_XT, None
        position_XQT = (start_X[:, None] + offsets_T[None, :])[:, None, :]
        seen_XQT = live_XT[:, None, :] & (position_XQT <= own_BQ[rows_X][:, :, None])
        seen_XQT &= position_XQT >= first_BQ[rows_X][:, :, None]
        seen = jnp.broadcast_to(
            seen_XQT[:, None, :, None, :], (len(rows_X), K, tokens, N // K // tokens, T)
        )
        return jnp.any(seen_XQT, axis=1), seen.reshape(-1, N, T)

    if blocks == 1:
        out, total_BN, _ = _attend(
            query_BNH,
            gather_pages(key_pages, table),
            gather_pages(value_pages, table),
            *masks(jnp.arange(B), jnp.zeros_like(lengths_B), lengths_B),
            K,
            scale,
        )
        out = out / jnp.where(total_BN > 0, total_BN, 1.0)[:, :, None]
        return out.astype(dtype)

    at_once = min(BLOCKS_AT_ONCE, B * blocks)
    iterations = -(-B * blocks // at_once)
    # I counts the items of the list, X those of one iteration.
    items = jnp.arange(iterations * at_once)
    count_B = -(-lengths_B // T)
    if window is not None or attention_chunk is not None:
        skip_B = jnp.minimum(first_BQ[:, 0] // T, count_B)
        count_B = count_B - skip_B
    end_B = jnp.cumsum(count_B)
    row_I = jnp.sum(items[:, None] >= end_B[None, :], axis=1)
    row_I = jnp.minimum(row_I, B - 1)
    block_I = items - (end_B - count_B)[row_I]
    if window is not None or attention_chunk is not None:
        block_I = block_I + skip_B[row_I]
    tokens_I = jnp.where(items < end_B[-1], lengths_B[row_I] - block_I * T, 0)
    ids_IP = table.reshape(B, blocks, pages).at[row_I, block_I].get(mode="clip")

    def attend_items(i, state):
        rows_X, ids_XP, tokens_X, block_X = (
            jax.lax.dynamic_slice_in_dim(x, i * at_once, at_once)
            for x in (row_I, ids_IP, tokens_I, block_I)
        )
        part = _attend(
            query_BNH[rows_X],
            gather_pages(key_pages, ids_XP),
            gather_pages(value_pages, ids_XP),
            *masks(rows_X, block_X * T, tokens_X),
            K,
            scale,
        )
        return tuple(
            jax.lax.dynamic_update_slice_in_dim(old, new, i * at_once, 0)
            for old, new in zip(state, part, strict=True)
        )

    state = (
        jnp.zeros((iterations * at_once, N, H), jnp.float32),
        jnp.zeros((iterations * at_once, N), jnp.float32),
        jnp.full((iterations * at_once, N), MASKED, jnp.float32),
    )
    if iterations == 1:
        outs, totals, tops = attend_items(0, state)
    else:
        trips = -(-end_B[-1] // at_once)
        outs, totals, tops = jax.lax.fori_loop(0, trips, attend_items, state)

    # Combine: block j of row b is item start_b + j; one that is not there weighs nothing.
    item_BX = (end_B - count_B)[:, None] + jnp.arange(blocks)[None, :]
    there_BX = jnp.arange(blocks)[None, :] < count_B[:, None]
    item_BX = jnp.where(there_BX, item_BX, 0)
    top_BXN = jnp.where(there_BX[:, :, None], tops[item_BX], MASKED)
    weight_BXN = jnp.exp(top_BXN - jnp.max(top_BXN, axis=1, keepdims=True))
    weight_BXN = jnp.where(there_BX[:, :, None], weight_BXN, 0.0)
    total_BN = sum(weight_BXN[:, j] * totals[item_BX[:, j]] for j in range(blocks))
    out_BNH = sum(weight_BXN[:, j, :, None] * outs[item_BX[:, j]] for j in range(blocks))
    out_BNH = out_BNH / jnp.where(total_BN > 0, total_BN, 1.0)[:, :, None]
    return out_BNH.astype(dtype)
