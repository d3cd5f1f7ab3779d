"""Paged attention of decode rows: one query token per row, or the few of a speculation step."""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import numpy as np

from pallas_kernels.kernel import (
    ArgSpec,
    Kernel,
    attention_reference,
    build_paged,
    first_seen_reference,
    row_tokens,
)
from pallas_kernels.paged_attention_mosaic import paged_attention_mosaic
from pallas_kernels.paged_attention_plan import SPACE, PagedBlocks, unsupported
from pallas_kernels.paged_attention_xla import paged_attention_xla, write_pages

__all__ = ["PAGED_ATTENTION", "paged_attention", "write_pages"]


def paged_attention_reference(
    query: np.ndarray,
    key_pages: np.ndarray,
    value_pages: np.ndarray,
    page_table: np.ndarray,
    lengths: np.ndarray,
    *,
    scale: float,
    window: int | None = None,
    attention_chunk: int | None = None,
) -> np.ndarray:
    """Decode attention in float64, a query token at a time."""
    query_BTNH = query[:, None] if query.ndim == 3 else query
    out_BTNH = np.zeros(query_BTNH.shape, np.float64)
    for row, token, first, end in _spans(
        query, page_table, key_pages, lengths, window, attention_chunk
    ):
        out_BTNH[row, token] = attention_reference(
            query_BTNH[row, token],
            row_tokens(key_pages, page_table[row], end)[first:],
            row_tokens(value_pages, page_table[row], end)[first:],
            scale,
        )
    return out_BTNH.reshape(query.shape)


def _spans(query, page_table, key_pages, lengths, window, attention_chunk):
    """Row, token, and the first and last + 1 position it sees, of every token that sees any."""
    tokens = 1 if query.ndim == 3 else query.shape[1]
    for row, length in enumerate(np.asarray(lengths).tolist()):
        for token in range(tokens):
            position = length - tokens + token
            first = first_seen_reference(position, window, attention_chunk)
            end = min(position + 1, page_table.shape[1] * key_pages.shape[1])
            if position >= 0 and first < end:
                yield row, token, first, end


def _flops(
    query, key_pages, value_pages, page_table, lengths, *, scale, window=None, attention_chunk=None
) -> int:
    N, H = query.shape[-2:]
    spans = _spans(query, page_table, key_pages, lengths, window, attention_chunk)
    return 4 * N * H * sum(end - first for _, _, first, end in spans)


def _bytes(
    query, key_pages, value_pages, page_table, lengths, *, scale, window=None, attention_chunk=None
) -> int:
    """Each key and value that some token of its row sees once, the queries and the outputs."""
    _, _, K, H = key_pages.shape
    rows: dict[int, tuple[int, int]] = {}
    for row, _, first, end in _spans(
        query, page_table, key_pages, lengths, window, attention_chunk
    ):
        low, high = rows.get(row, (first, end))
        rows[row] = min(low, first), max(high, end)
    seen = sum(high - low for low, high in rows.values())
    return int((2 * K * H * seen + 2 * query.size) * query.dtype.itemsize)


def _build(
    rng: np.random.Generator,
    dtype: np.dtype,
    *,
    lengths: tuple[int, ...],
    heads: int,
    kv_heads: int,
    head_dim: int,
    page_size: int,
    width: int,
    tokens: int | None,
    static: Mapping[str, Any],
) -> dict[str, np.ndarray]:
    paged = build_paged(rng, dtype, np.asarray(lengths), kv_heads, head_dim, page_size, width)
    shape = (heads, head_dim) if tokens is None else (tokens, heads, head_dim)
    query = rng.normal(size=(len(lengths), *shape)).astype(dtype)
    lengths_B = np.asarray(lengths, np.int32)
    for name in ("key_pages", "value_pages"):
        _poison_unseen(paged[name], paged["page_table"], lengths_B - (tokens or 1), static)
    return {"query": query, **paged, "lengths": lengths_B}


def _poison_unseen(
    pages_PZKH: np.ndarray,
    page_table_BW: np.ndarray,
    positions_B: np.ndarray,
    static: Mapping[str, Any],
) -> None:
    """Writes NaN to what lies before the first position that a row's first token sees."""
    Z = pages_PZKH.shape[1]
    for row, position in enumerate(positions_B.tolist()):
        first = first_seen_reference(
            max(position, 0), static.get("window"), static.get("attention_chunk")
        )
        for page in page_table_BW[row, : first // Z]:
            pages_PZKH[page] = np.nan
        pages_PZKH[page_table_BW[row, first // Z], : first % Z] = np.nan


def _build_shapes(
    rng: np.random.Generator,
    dtype: np.dtype,
    *,
    rows: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    page_size: int,
    width: int,
    tokens: int | None,
) -> dict[str, jax.ShapeDtypeStruct]:
    """A decode step of a real model: every row may be as long as the table is wide."""
    shape = (heads, head_dim) if tokens is None else (tokens, heads, head_dim)
    pool = jax.ShapeDtypeStruct((rows * width + 1, page_size, kv_heads, head_dim), dtype)
    return {
        "query": jax.ShapeDtypeStruct((rows, *shape), dtype),
        "key_pages": pool,
        "value_pages": pool,
        "page_table": jax.ShapeDtypeStruct((rows, width), np.int32),
        "lengths": jax.ShapeDtypeStruct((rows,), np.int32),
    }


def _spec(
    name: str,
    lengths: tuple[int, ...],
    heads: int,
    kv_heads: int,
    head_dim: int,
    page_size: int,
    width: int,
    tokens: int | None = None,
    **static: int,
) -> ArgSpec:
    build = partial(
        _build,
        lengths=lengths,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        width=width,
        tokens=tokens,
        static=static,
    )
    return ArgSpec(name, build, {"scale": 1 / math.sqrt(head_dim), **static})


def _model(
    name: str,
    rows: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    page_size: int,
    width: int,
    tokens: int | None = None,
    **static: int,
) -> ArgSpec:
    build = partial(
        _build_shapes,
        rows=rows,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        width=width,
        tokens=tokens,
    )
    static_ = {"scale": 1 / math.sqrt(head_dim), **static}
    return ArgSpec(name, build, static_, compile_only=True)


ARG_SPECS = (
    _spec("one row", (70,), 9, 3, 64, 16, 8),
    _spec("page borders", (0, 1, 15, 16, 17, 33), 9, 3, 64, 16, 4),
    _spec("block borders", (127, 128, 129, 0, 256, 257), 3, 1, 64, 16, 20),
    _spec("ragged batch", (1000, 3, 0, 511, 64, 200, 1, 900), 3, 1, 64, 64, 16),
    _spec("many heads", (100, 17), 32, 8, 64, 16, 8),
    _spec("one head each", (40, 0, 200), 4, 4, 128, 32, 8),
    _spec("one kv head", (40, 0, 200), 4, 1, 32, 16, 16),
    _spec("page larger than a block", (300, 5), 4, 2, 32, 256, 2),
    _spec("page of three", (10, 200), 4, 2, 32, 3, 70),
    _spec("page of 24", (50, 1, 300), 5, 1, 128, 24, 13),
    _spec("page of 128", (128, 0, 257), 16, 1, 128, 128, 3),
    _spec("window", (500, 30, 0, 101), 6, 2, 64, 16, 34, window=70),
    _spec("attention chunk", (400, 96, 97, 5), 5, 1, 128, 32, 16, attention_chunk=96),
    _spec("four tokens", (0, 2, 4, 200, 65), 8, 2, 64, 16, 13, tokens=4),
    _spec("tokens and window", (290, 66, 3), 3, 1, 128, 16, 20, tokens=3, window=64),
    _spec(
        "tokens over a chunk border", (98, 200, 2), 10, 2, 64, 16, 13, tokens=4, attention_chunk=96
    ),
    _model("SmolLM2 135M", 32, 9, 3, 64, 16, 128),
    _model("Llama 3.2 1B", 64, 32, 8, 64, 16, 512),
    _model("Llama 3.1 8B", 64, 32, 8, 128, 16, 512),
    _model("Llama 3.1 8B, one long row", 1, 32, 8, 128, 64, 2048),
    _model("Llama 3.1 70B on 8 devices, 5 tokens", 32, 8, 1, 128, 16, 512, 5),
    _model("Llama 4 Scout, global", 32, 40, 8, 128, 32, 1024),
    _model("Llama 4 Scout, chunked", 32, 40, 8, 128, 32, 1024, attention_chunk=8192),
    _model("128 query heads, 16 a kv head", 16, 128, 8, 128, 128, 64),
)

PAGED_ATTENTION = Kernel(
    name="paged_attention",
    reference=paged_attention_reference,
    implementations={"xla": paged_attention_xla, "mosaic": paged_attention_mosaic},
    arg_specs=ARG_SPECS,
    tolerance={"float32": 1e-5, "bfloat16": 2e-2},
    flops=_flops,
    bytes=_bytes,
    unsupported=unsupported,
    blocks=PagedBlocks,
    space=SPACE,
)


def paged_attention(
    query: jax.Array,
    key_pages: jax.Array,
    value_pages: jax.Array,
    page_table_BW: jax.Array,
    lengths_B: jax.Array,
    *,
    scale: float,
    window: int | None = None,
    attention_chunk: int | None = None,
    implementation: str | None = None,
    blocks: PagedBlocks | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Attention of the last token or tokens of every row over the row's pages.

    Of T query tokens, token t sits at position lengths - T + t and sees the positions up to its
    own: all of them, or the last `window`, its own included, or those of its attention chunk, from
    position // attention_chunk * attention_chunk on. A token that sees nothing gives zeros. Softmax
    is float32; weights are rounded to the data's dtype before they meet the values.

    Shapes: query [B, N, H] or [B, T, N, H] with query head n on kv head n // (N / K), pages
    [P, Z, K, H], page table [B, W] int32, lengths [B] int32, which count the query tokens; the
    result has the query's shape.
    Layout: heads may be a shard of the model's, query heads with their kv heads.
    Raises: ValueError for a window or an attention chunk that is not positive.
    """
    if any(size is not None and size < 1 for size in (window, attention_chunk)):
        raise ValueError(
            "expected a positive window and attention chunk, or None, received "
            f"window={window} and attention_chunk={attention_chunk}"
        )
    return PAGED_ATTENTION(
        query,
        key_pages,
        value_pages,
        page_table_BW,
        lengths_B,
        scale=scale,
        window=window,
        attention_chunk=attention_chunk,
        implementation=implementation,
        blocks=blocks,
        interpret=interpret,
    )
