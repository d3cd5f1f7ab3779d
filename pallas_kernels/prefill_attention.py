"""Paged attention of prefill chunks: many query tokens a row over pages that hold their prefix."""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.kernel import (
    ArgSpec,
    Kernel,
    attention_reference,
    build_paged,
    first_seen_reference,
    row_tokens,
)
from pallas_kernels.prefill_attention_mosaic import prefill_attention_mosaic
from pallas_kernels.prefill_attention_tiles import SPACE, PrefillBlocks
from pallas_kernels.prefill_attention_xla import prefill_attention_xla


def prefill_attention_reference(
    query: np.ndarray,
    key_pages: np.ndarray,
    value_pages: np.ndarray,
    page_table: np.ndarray,
    starts: np.ndarray,
    lengths: np.ndarray,
    *,
    scale: float,
    window: int | None = None,
    attention_chunk: int | None = None,
) -> np.ndarray:
    """Prefill attention in float64, a query at a time."""
    out_RCNH = np.zeros(query.shape, np.float64)
    for row, length in enumerate(lengths):
        for c in range(length):
            position = starts[row] + c
            first = first_seen_reference(position, window, attention_chunk)
            out_RCNH[row, c] = attention_reference(
                query[row, c],
                row_tokens(key_pages, page_table[row], position + 1)[first:],
                row_tokens(value_pages, page_table[row], position + 1)[first:],
                scale,
            )
    return out_RCNH


def _unsupported(
    query: Any,
    key_pages: Any,
    value_pages: Any,
    page_table: Any,
    starts: Any,
    lengths: Any,
    *,
    scale: float,
    window: int | None = None,
    attention_chunk: int | None = None,
) -> str | None:
    """Why the Mosaic form does not take these arguments; None where it does."""
    P, Z, _, H = key_pages.shape
    if P < 2:
        # TMA drops a dimension of one, and with it the page id that means "read nothing".
        return "expected a pool of more than the null page"
    if any(x.dtype != jnp.bfloat16 for x in (query, key_pages, value_pages)):
        return f"expected bfloat16, received {query.dtype} queries over {key_pages.dtype} pages"
    if H not in (64, 128):
        return f"expected a head dimension of 64 or 128, received {H}"
    if Z not in (8, 16, 32, 64, 128):
        return f"expected a page size that is a power of two from 8 to 128, received {Z}"
    if scale <= 0:
        return f"expected a positive scale, received {scale}"
    return None


def _seen(starts, lengths, window, attention_chunk) -> tuple[int, int]:
    """Pairs of a valid query and a key that it sees, and keys that any query of their row sees."""
    pairs = keys = 0
    for start, length in zip(starts, lengths, strict=True):
        position = np.arange(start, start + length, dtype=np.int64)
        first = first_seen_reference(position, window, attention_chunk)
        pairs += np.sum(position + 1 - first)
        keys += start + length - first[0] if length else 0
    return int(pairs), int(keys)


def _flops(
    query,
    key_pages,
    value_pages,
    page_table,
    starts,
    lengths,
    *,
    scale,
    window=None,
    attention_chunk=None,
) -> int:
    N, H = query.shape[2:]
    return 4 * N * H * _seen(starts, lengths, window, attention_chunk)[0]


def _bytes(
    query,
    key_pages,
    value_pages,
    page_table,
    starts,
    lengths,
    *,
    scale,
    window=None,
    attention_chunk=None,
) -> int:
    """Each key and value that is seen once, the valid queries and their outputs."""
    N, H = query.shape[2:]
    K = key_pages.shape[2]
    keys = _seen(starts, lengths, window, attention_chunk)[1]
    return int((2 * K * H * keys + 2 * N * H * np.sum(lengths)) * query.dtype.itemsize)


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
    window: int | None,
    attention_chunk: int | None,
) -> dict[str, np.ndarray]:
    tokens = np.asarray(starts) + np.asarray(lengths)
    paged = build_paged(rng, dtype, tokens, kv_heads, head_dim, page_size, width)
    # Pages before all that a row sees were given back.
    for row, first in enumerate(first_seen_reference(np.asarray(starts), window, attention_chunk)):
        lost = paged["page_table"][row, : first // page_size]
        paged["key_pages"][lost] = paged["value_pages"][lost] = np.nan
    query = rng.normal(size=(len(lengths), chunk, heads, head_dim)).astype(dtype)
    query[np.arange(chunk) >= np.asarray(lengths)[:, None]] = np.nan
    return {
        "query": query,
        **paged,
        "starts": np.asarray(starts, np.int32),
        "lengths": np.asarray(lengths, np.int32),
    }


def _spec(
    name: str,
    starts: tuple[int, ...],
    lengths: tuple[int, ...],
    head_dim: int = 64,
    window: int | None = None,
    attention_chunk: int | None = None,
    **shape: int,
) -> ArgSpec:
    limits = {"window": window, "attention_chunk": attention_chunk}
    build = partial(_build, starts=starts, lengths=lengths, head_dim=head_dim, **limits, **shape)
    return ArgSpec(name, build, {"scale": 1 / math.sqrt(head_dim), **limits})


def _shapes(
    rng: np.random.Generator,
    dtype: np.dtype,
    rows: int,
    chunk: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    page_size: int,
    context: int,
) -> dict[str, jax.ShapeDtypeStruct]:
    width = context // page_size
    pool = jax.ShapeDtypeStruct((rows * width + 1, page_size, kv_heads, head_dim), dtype)
    return {
        "query": jax.ShapeDtypeStruct((rows, chunk, heads, head_dim), dtype),
        "key_pages": pool,
        "value_pages": pool,
        "page_table": jax.ShapeDtypeStruct((rows, width), jnp.int32),
        "starts": jax.ShapeDtypeStruct((rows,), jnp.int32),
        "lengths": jax.ShapeDtypeStruct((rows,), jnp.int32),
    }


def _model(
    name: str,
    heads: int,
    kv_heads: int,
    head_dim: int = 128,
    window: int | None = None,
    attention_chunk: int | None = None,
    **shape: int,
) -> ArgSpec:
    """The heads that one device has of a real model."""
    build = partial(_shapes, heads=heads, kv_heads=kv_heads, head_dim=head_dim, **shape)
    limits = {"window": window, "attention_chunk": attention_chunk}
    static = {"scale": 1 / math.sqrt(head_dim), **limits}
    return ArgSpec(name, build, static, compile_only=True)


_SMOL = {"heads": 9, "kv_heads": 3, "page_size": 16}
_MANY = {"heads": 8, "kv_heads": 2, "page_size": 16}
_ONE_KV = {"kv_heads": 1, "page_size": 16}
_LONG = {"rows": 1, "chunk": 8192, "context": 32768, "page_size": 16}
ARG_SPECS = (
    _spec("one short chunk", (0,), (5,), chunk=8, width=2, **_SMOL),
    _spec("page borders", (0, 1, 15, 16, 17, 33), (16, 0, 1, 15, 9, 2), chunk=16, width=4, **_SMOL),
    _spec("tiles", (0, 0, 7), (300, 129, 0), chunk=300, width=20, heads=3, **_ONE_KV),
    _spec("prefix in pages", (256, 131, 0), (64, 20, 1), chunk=64, width=24, **_SMOL),
    _spec("many heads", (17, 0), (33, 40), chunk=40, width=8, **_MANY),
    _spec(
        "one head each",
        (40, 0),
        (20, 32),
        128,
        chunk=32,
        width=8,
        heads=4,
        kv_heads=4,
        page_size=32,
    ),
    _spec("one kv head", (200, 3), (9, 16), 32, chunk=16, width=14, heads=4, **_ONE_KV),
    _spec(
        "sixteen heads of one kv head", (100,), (23,), 128, chunk=24, width=8, heads=16, **_ONE_KV
    ),
    _spec(
        "page of three", (10, 200), (7, 1), 32, chunk=8, width=70, heads=4, kv_heads=2, page_size=3
    ),
    _spec(
        "page of a block",
        (250, 0),
        (40, 21),
        128,
        chunk=40,
        width=3,
        heads=10,
        kv_heads=2,
        page_size=128,
    ),
    _spec("window", (290, 0, 30), (40, 64, 1), window=50, chunk=64, width=24, heads=4, **_ONE_KV),
    _spec(
        "attention chunk",
        (300, 0, 95),
        (60, 64, 2),
        128,
        attention_chunk=96,
        chunk=64,
        width=6,
        heads=5,
        kv_heads=1,
        page_size=64,
    ),
    _spec(
        "window in an attention chunk",
        (270,),
        (60,),
        window=40,
        attention_chunk=64,
        chunk=64,
        width=12,
        heads=2,
        kv_heads=2,
        page_size=32,
    ),
    _model("SmolLM2 135M", 9, 3, 64, rows=4, chunk=512, context=2048, page_size=16),
    _model("Llama 3 8B", 32, 8, **_LONG),
    _model("Llama 3 70B on 8", 8, 1, rows=4, chunk=2048, context=32768, page_size=64),
    _model("Llama 2 7B", 32, 32, rows=2, chunk=1024, context=4096, page_size=32),
    _model("Llama 4 Scout, local layers", 40, 8, attention_chunk=8192, **_LONG),
    _model("Mistral 7B", 32, 8, window=4096, rows=1, chunk=8192, context=8192, page_size=128),
    _model("Qwen3 4B, short chunks", 32, 8, rows=32, chunk=16, context=32768, page_size=16),
)

PREFILL_ATTENTION = Kernel(
    name="prefill_attention",
    reference=prefill_attention_reference,
    implementations={"xla": prefill_attention_xla, "mosaic": prefill_attention_mosaic},
    arg_specs=ARG_SPECS,
    tolerance={"float32": 1e-5, "bfloat16": 2e-2},
    flops=_flops,
    bytes=_bytes,
    unsupported=_unsupported,
    blocks=PrefillBlocks,
    space=SPACE,
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
    window: int | None = None,
    attention_chunk: int | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Causal attention of a chunk of new tokens per row over the row's pages.

    Query c of row r sits at position p = starts[r] + c and sees positions up to its own, its
    chunk's keys and values being in the pages already: all of them, the last `window`, or those
    from p // attention_chunk * attention_chunk on. Queries from lengths[r] on give zeros. Pages
    before all that a row sees are not read.

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
        window=window,
        attention_chunk=attention_chunk,
        implementation=implementation,
    )
