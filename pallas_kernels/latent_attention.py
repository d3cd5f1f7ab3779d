"""Latent attention: absorbed decode of multi-head latent attention over paged latents.

A token's whole cache entry is one latent of rank C and one rotary key of width A, shared by all
heads. With the key projection absorbed into the query and the value projection behind the output,
all heads attend to the same [S, C + A] latents: the keys are whole entries, the values their first
C columns.

Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1; the kernel's split of the output between two
warpgroups is FlashMLA's.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.kernel import ArgSpec, Kernel, build_paged, row_tokens
from pallas_kernels.latent_attention_mosaic import latent_attention_mosaic
from pallas_kernels.latent_attention_plan import BLOCK, SPACE, LatentBlocks
from pallas_kernels.latent_attention_xla import latent_attention_xla

# The scale of DeepSeek's heads, of 128 columns and 64 rotary ones.
SCALE = 1 / math.sqrt(128 + 64)


def latent_attention_reference(
    query: np.ndarray,
    latent_pages: np.ndarray,
    page_table: np.ndarray,
    lengths: np.ndarray,
    *,
    scale: float,
    rank: int,
    with_lse: bool = False,
) -> Any:
    """Latent attention in float64, a query token at a time."""
    query_BTND = query[:, None] if query.ndim == 3 else query
    B, T, N, _ = query_BTND.shape
    out_BTNC = np.zeros((B, T, N, rank), np.float64)
    lse_BTN = np.full((B, T, N), -np.inf)
    for row, length in enumerate(lengths):
        latents_SD = row_tokens(latent_pages, page_table[row], length)[:, 0].astype(np.float64)
        for token in range(T):
            seen_SD = latents_SD[: max(0, length - T + 1 + token)]
            if not len(seen_SD):
                continue
            scores_NS = query_BTND[row, token].astype(np.float64) @ seen_SD.T * scale
            top_N = scores_NS.max(axis=1)
            weights_NS = np.exp(scores_NS - top_N[:, None])
            total_N = weights_NS.sum(axis=1)
            out_BTNC[row, token] = weights_NS / total_N[:, None] @ seen_SD[:, :rank]
            lse_BTN[row, token] = top_N + np.log(total_N)
    out = out_BTNC.reshape(*query.shape[:-1], rank)
    return (out, lse_BTN.reshape(query.shape[:-1])) if with_lse else out


def _unsupported(
    query: Any,
    latent_pages: Any,
    page_table: Any,
    lengths: Any,
    *,
    scale: float,
    rank: int,
    with_lse: bool = False,
) -> str | None:
    """Why the Mosaic form does not take these arguments; None where it does."""
    _, Z, _, D = latent_pages.shape
    if query.dtype != jnp.bfloat16 or latent_pages.dtype != jnp.bfloat16:
        return f"expected bfloat16, received {query.dtype} and {latent_pages.dtype}"
    if rank % 128 or not 128 <= rank <= 512 or (D - rank) % 64 or not 0 <= D - rank <= 64:
        return f"expected rank 128, 256, 384 or 512 and at most 64 more, received {rank} of {D}"
    if Z % 8 or (BLOCK % Z and Z % BLOCK):
        return f"expected pages of 8, 16, 32 or a multiple of 64 tokens, received {Z}"
    return None


def _flops(query, latent_pages, page_table, lengths, *, scale, rank, with_lse=False) -> int:
    """Two products with each latent that a query sees."""
    tokens, heads = (1, query.shape[1]) if query.ndim == 3 else query.shape[1:3]
    seen_BT = np.asarray(lengths)[:, None] - tokens + 1 + np.arange(tokens)[None, :]
    return int(2 * heads * (query.shape[-1] + rank) * np.sum(np.maximum(seen_BT, 0)))


def _bytes(query, latent_pages, page_table, lengths, *, scale, rank, with_lse=False) -> int:
    """Each live latent once, the queries and the outputs, float32 sums where they are asked for."""
    width = query.shape[-1]
    queries = query.size // width
    values = width * np.sum(lengths) + query.size + queries * rank
    return int(values * query.dtype.itemsize + (4 * queries if with_lse else 0))


def _build(
    rng: np.random.Generator,
    dtype: np.dtype,
    lengths: tuple[int, ...],
    heads: tuple[int, ...],
    page_size: int,
    columns: int,
    width: int,
) -> dict[str, np.ndarray]:
    paged = build_paged(rng, dtype, np.asarray(lengths), 1, width, page_size, columns)
    return {
        "query": rng.normal(size=(len(lengths), *heads, width)).astype(dtype),
        "latent_pages": paged["key_pages"],
        "page_table": paged["page_table"],
        "lengths": np.asarray(lengths, np.int32),
    }


def _spec(
    name: str,
    lengths: tuple[int, ...],
    heads: tuple[int, ...],
    page_size: int,
    columns: int,
    rank: int = 512,
    rotary: int = 64,
    **options: bool,
) -> ArgSpec:
    build = partial(
        _build,
        lengths=lengths,
        heads=heads,
        page_size=page_size,
        columns=columns,
        width=rank + rotary,
    )
    return ArgSpec(name, build, {"scale": SCALE, "rank": rank, **options})


def _model_shapes(
    rng: np.random.Generator,
    dtype: np.dtype,
    batch: int,
    heads: tuple[int, ...],
    page_size: int,
    columns: int,
) -> dict[str, jax.ShapeDtypeStruct]:
    return {
        "query": jax.ShapeDtypeStruct((batch, *heads, 576), dtype),
        "latent_pages": jax.ShapeDtypeStruct((8192, page_size, 1, 576), dtype),
        "page_table": jax.ShapeDtypeStruct((batch, columns), jnp.int32),
        "lengths": jax.ShapeDtypeStruct((batch,), jnp.int32),
    }


def _model(
    name: str, batch: int, heads: tuple[int, ...], page_size: int, columns: int, **options: bool
) -> ArgSpec:
    build = partial(_model_shapes, batch=batch, heads=heads, page_size=page_size, columns=columns)
    static = {"scale": SCALE, "rank": 512, **options}
    return ArgSpec(name, build, static, compile_only=True)


# The lengths of a row's splits come from its table's width: 512 tokens and more make several.
ARG_SPECS = (
    _spec("page borders", (0, 1, 15, 16, 17, 33), (16,), 16, 4),
    _spec("splits", (300, 0, 256, 70), (8,), 64, 8),
    _spec("tokens", (2, 65, 130), (3, 8), 32, 5),
    _spec("two tiles", (80, 3), (128,), 128, 1),
    _spec("rows padded", (20, 64), (9,), 8, 8),
    _spec("narrow", (100, 1), (2, 40), 16, 8, 128, 0),
    _spec("page of 24", (50, 7), (8,), 24, 3),
    _spec("part, page borders", (0, 1, 7, 8, 9, 17), (16,), 8, 4, with_lse=True),
    _spec("part, splits", (300, 0, 256, 70), (8,), 16, 32, with_lse=True),
    _spec("part, tokens in two tiles", (2, 80, 130), (3, 40), 32, 5, with_lse=True),
    _spec("part, page of 3", (7, 1, 0), (4,), 3, 3, with_lse=True),
    _model("Kimi K2", 64, (64,), 64, 2048),
    _model("Kimi K2, tensor 8", 128, (8,), 64, 128),
    _model("Kimi K2, tensor 8, four tokens", 64, (4, 8), 16, 512),
    _model("Kimi K2, tensor 4, one row", 1, (16,), 64, 2048),
    _model("DeepSeek-V3", 128, (128,), 64, 512),
    _model("DeepSeek-V3, one row", 1, (128,), 128, 1024),
    _model("DeepSeek-V3, tensor 4, two tokens", 32, (2, 32), 32, 64),
    # All heads to the slots that one of so many devices holds.
    _model("Kimi K2, latents over 8", 64, (64,), 8, 2048, with_lse=True),
    _model("Kimi K2, latents over 8, one row", 1, (64,), 16, 4096, with_lse=True),
    _model("DeepSeek-V3, latents over 4", 128, (128,), 16, 512, with_lse=True),
)

LATENT_ATTENTION = Kernel(
    name="latent_attention",
    reference=latent_attention_reference,
    implementations={"xla": latent_attention_xla, "mosaic": latent_attention_mosaic},
    arg_specs=ARG_SPECS,
    tolerance={"float32": 1e-5, "bfloat16": 2e-2},
    flops=_flops,
    bytes=_bytes,
    unsupported=_unsupported,
    blocks=LatentBlocks,
    space=SPACE,
)


def latent_attention(
    query: jax.Array,
    latent_pages: jax.Array,
    page_table_BW: jax.Array,
    lengths_B: jax.Array,
    *,
    scale: float,
    rank: int,
    implementation: str | None = None,
) -> jax.Array:
    """Attention of each row's last token, or tokens, over the row's latents.

    The absorbed form: queries are [q_nope @ W_uk, q_rope], outputs still want W_uv. Of T tokens,
    token t is at position lengths - T + t and sees what is not behind it; where that is nothing,
    its output is zero, as for rows of length 0. Softmax is float32; weights are rounded to the
    data's dtype before they meet the values.

    Shapes: query [B, N, C + A] or [B, T, N, C + A], pages [P, Z, 1, C + A] (a pool with one kv
    head, so that page writes and handoff treat it as any other), page table [B, W] int32, lengths
    [B] int32; `rank` is C. The result is [B, N, C] or [B, T, N, C].
    Layout: heads may be a shard of the model's; every shard holds all latents.
    """
    return LATENT_ATTENTION(
        query,
        latent_pages,
        page_table_BW,
        lengths_B,
        scale=scale,
        rank=rank,
        implementation=implementation,
    )


def latent_attention_part(
    query: jax.Array,
    latent_pages: jax.Array,
    page_table_BW: jax.Array,
    lengths_B: jax.Array,
    *,
    scale: float,
    rank: int,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`latent_attention` to a part of each row's latents, and what `join_parts` needs of it.

    Shapes: those of `latent_attention`; the second result is float32 [B, N] or [B, T, N], the
    natural logarithm of the sum of the exponentials of a query's scores, -inf where there are none.
    """
    return LATENT_ATTENTION(
        query,
        latent_pages,
        page_table_BW,
        lengths_B,
        scale=scale,
        rank=rank,
        with_lse=True,
        implementation=implementation,
    )


def join_parts(out_XBNC: jax.Array, lse_XBN: jax.Array) -> jax.Array:
    """Attention to all latents from X parts of them that `latent_attention_part` attended to.

    Parts weigh by their sums, in float32. A part without latents may hold anything; where all are
    without, the result is zero.
    Shapes: out [X, B, N, C], lse [X, B, N]; the result is [B, N, C].
    """
    top_BN = jnp.max(lse_XBN, axis=0)
    weight_XBN = jnp.exp(lse_XBN - jnp.where(top_BN > -jnp.inf, top_BN, 0.0)[None])
    total_BN = jnp.sum(weight_XBN, axis=0)
    weight_XBN = weight_XBN / jnp.where(total_BN > 0, total_BN, 1.0)[None]
    parts = jnp.where(weight_XBN[..., None] > 0, out_XBNC.astype(jnp.float32), 0.0)
    return jnp.sum(parts * weight_XBN[..., None], axis=0).astype(out_XBNC.dtype)
