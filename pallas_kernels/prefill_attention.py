"""Paged attention of prefill chunks: many query tokens a row over pages that hold their prefix."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.kernel import (
    ArgSpec,
    Kernel,
    attention_reference,
    build_paged,
    row_tokens,
)
from pallas_kernels.paged_attention import MASKED, gather_pages

# Queries and keys in a tile of the XLA form: a tile's scores stay in cache.
QUERY_TILE = 128
KEY_TILE = 128


def prefill_attention_xla(
    query_RCNH: jax.Array,
    key_pages: jax.Array,
    value_pages: jax.Array,
    page_table_RW: jax.Array,
    starts_R: jax.Array,
    lengths_R: jax.Array,
    *,
    scale: float,
) -> jax.Array:
    """Prefill attention with an online softmax, over the tiles that the causal mask leaves.

    Trip counts follow the valid tokens: empty rows, padded queries and keys in the future of a
    whole tile cost nothing.
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
        end = starts_R[row] + lengths_R[row]

        def one_block(block, state):
            acc_KMH, total_KM, top_KM = state
            ids = jax.lax.dynamic_slice(table_RW, (row, block * pages), (1, pages))[0]
            keys_TKH = gather_pages(key_pages, ids).reshape(T, K, H)
            values_TKH = gather_pages(value_pages, ids).reshape(T, K, H)
            key_position_T = block * T + offsets_T
            # Unwritten slots may hold NaN, and 0 x NaN is NaN: mask the values too.
            values_TKH = jnp.where((key_position_T < end)[:, None, None], values_TKH, 0)
            seen_QT = key_position_T[None, :] <= jnp.minimum(position_Q, end - 1)[:, None]
            scores = jnp.einsum(
                "KMH,TKH->KMT", query_KMH, keys_TKH, preferred_element_type=jnp.float32
            )
            scores = scores.reshape(K, G, Q, T)
            scores = jnp.where(seen_QT[None, None], scores * scale, MASKED).reshape(K, G * Q, T)
            new_top_KM = jnp.maximum(top_KM, jnp.max(scores, axis=-1))
            # Every valid query sees position 0, so after the first block the top is a real score
            # and masked ones weigh exactly zero.
            weights_KMT = jnp.exp(scores - new_top_KM[:, :, None])
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
            acc_KMH, total_KM, _ = jax.lax.fori_loop(0, num_blocks, one_block, state)
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


def prefill_attention_reference(
    query: np.ndarray,
    key_pages: np.ndarray,
    value_pages: np.ndarray,
    page_table: np.ndarray,
    starts: np.ndarray,
    lengths: np.ndarray,
    *,
    scale: float,
) -> np.ndarray:
    """Prefill attention in float64, a query at a time."""
    out_RCNH = np.zeros(query.shape, np.float64)
    for row, length in enumerate(lengths):
        for c in range(length):
            seen = starts[row] + c + 1
            out_RCNH[row, c] = attention_reference(
                query[row, c],
                row_tokens(key_pages, page_table[row], seen),
                row_tokens(value_pages, page_table[row], seen),
                scale,
            )
    return out_RCNH


def _flops(query, key_pages, value_pages, page_table, starts, lengths, *, scale) -> int:
    N, H = query.shape[2:]
    starts, lengths = np.asarray(starts, np.int64), np.asarray(lengths, np.int64)
    return int(4 * N * H * np.sum(lengths * starts + lengths * (lengths + 1) // 2))


def _bytes(query, key_pages, value_pages, page_table, starts, lengths, *, scale) -> int:
    """Each live key and value once, the valid queries and their outputs."""
    N, H = query.shape[2:]
    K = key_pages.shape[2]
    seen = np.sum(np.where(lengths > 0, starts + lengths, 0))
    return int((2 * K * H * seen + 2 * N * H * np.sum(lengths)) * query.dtype.itemsize)


def _build(
    rng: np.random.Generator,
    dtype: np.dtype,
    starts: tuple[int, ...],
    lengths: tuple[int, ...],
    chunk: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    page_size: int,
    width: int,
) -> dict[str, np.ndarray]:
    tokens = np.asarray(starts) + np.asarray(lengths)
    paged = build_paged(rng, dtype, tokens, kv_heads, head_dim, page_size, width)
    query = rng.normal(size=(len(lengths), chunk, heads, head_dim)).astype(dtype)
    return {
        "query": query,
        **paged,
        "starts": np.asarray(starts, np.int32),
        "lengths": np.asarray(lengths, np.int32),
    }


def _spec(
    name: str, starts: tuple[int, ...], lengths: tuple[int, ...], head_dim: int = 64, **shape: int
) -> ArgSpec:
    build = partial(_build, starts=starts, lengths=lengths, head_dim=head_dim, **shape)
    return ArgSpec(name, build, {"scale": 1 / math.sqrt(head_dim)})


_SMOL = {"heads": 9, "kv_heads": 3, "page_size": 16}
_MANY = {"heads": 32, "kv_heads": 8, "page_size": 16}
ARG_SPECS = (
    _spec("one short chunk", (0,), (5,), chunk=8, width=2, **_SMOL),
    _spec("page borders", (0, 1, 15, 16, 17, 33), (16, 0, 1, 15, 9, 2), chunk=16, width=4, **_SMOL),
    _spec("tiles", (0, 0, 7), (300, 129, 0), chunk=300, width=20, **_SMOL),
    _spec("prefix in pages", (256, 131, 0), (64, 20, 1), chunk=64, width=24, **_SMOL),
    _spec("many heads", (17, 0), (33, 40), chunk=40, width=8, **_MANY),
    _spec(
        "one head each", (40, 0), (20, 32), 32, chunk=32, width=8, heads=4, kv_heads=4, page_size=32
    ),
    _spec(
        "one kv head", (200, 3), (9, 16), 32, chunk=16, width=14, heads=4, kv_heads=1, page_size=16
    ),
    _spec(
        "page of three", (10, 200), (7, 1), 32, chunk=8, width=70, heads=4, kv_heads=2, page_size=3
    ),
)

PREFILL_ATTENTION = Kernel(
    name="prefill_attention",
    reference=prefill_attention_reference,
    implementations={"xla": prefill_attention_xla},
    arg_specs=ARG_SPECS,
    tolerance={"float32": 1e-5, "bfloat16": 2e-2},
    flops=_flops,
    bytes=_bytes,
)


def prefill_attention(
    query_RCNH: jax.Array,
    key_pages: jax.Array,
    value_pages: jax.Array,
    page_table_RW: jax.Array,
    starts_R: jax.Array,
    lengths_R: jax.Array,
    *,
    scale: float,
    implementation: str | None = None,
) -> jax.Array:
    """Causal attention of a chunk of new tokens per row over the row's pages.

    Query c of row r sits at position starts[r] + c and sees positions up to its own, its chunk's
    keys and values being in the pages already. Queries from lengths[r] on give zeros.

    Shapes: query [R, C, N, H] with query head n on kv head n // (N / K), pages [P, Z, K, H], page
    table [R, W] int32, starts and lengths [R] int32; the result is [R, C, N, H].
    """
    return PREFILL_ATTENTION(
        query_RCNH,
        key_pages,
        value_pages,
        page_table_RW,
        starts_R,
        lengths_R,
        scale=scale,
        implementation=implementation,
    )
