"""Coded matrices of any size for measurement, made on the device without coding anything.

Any bits are a stream of Huffman codes where the lengths leave none over, and any others are 3-bit
codes. Symbols come as often as those of trained weights do.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.unweight_matrix import (
    CHUNK_ROWS,
    PALETTE,
    PLANES,
    ROW,
    TILE_ROWS,
    MatrixTiling,
)

Arrays = dict[str, jax.Array]

# 2.5 bits a symbol where each comes as often as its length says.
LENGTHS = (2, 2, 2, 3, 4, 5, 6, 7, 8, 9, 11, 11, 12, 12, 12, 12)
CHUNK_BYTES = 320  # of 1024 symbols, about

# One row of so many is verbatim.
VERBATIM_EVERY = 100


def _bits(key: jax.Array, *shape: int, dtype: type = jnp.uint8) -> jax.Array:
    return jax.random.bits(key, shape, dtype)


def _verbatim(key: jax.Array, tiling: MatrixTiling) -> Arrays:
    """Every hundredth row, from the middle of the first hundred on."""
    count = tiling.rows // VERBATIM_EVERY
    borders = jnp.arange(tiling.tiles + 1, dtype=jnp.int32) * TILE_ROWS
    before = (borders + VERBATIM_EVERY // 2 - 1) // VERBATIM_EVERY
    rows = jnp.arange(count, dtype=jnp.int32) * VERBATIM_EVERY + VERBATIM_EVERY // 2
    return {
        "palette": 120 - jnp.arange(PALETTE, dtype=jnp.uint8),
        "verbatim_row": rows,
        "verbatim": _bits(key, count, ROW),
        "verbatim_first": jnp.minimum(before, count),
    }


def palette_arrays(key: jax.Array, F: int, D: int) -> Arrays:
    """Form `palette`."""
    tiling, keys = MatrixTiling(F, D), jax.random.split(key, 3)
    return {
        "sign_mantissa": _bits(keys[0], tiling.rows, ROW),
        "codes": _bits(keys[1], tiling.rows, ROW // 2),
        **_verbatim(keys[2], tiling),
    }


def exponent_arrays(key: jax.Array, F: int, D: int) -> Arrays:
    """Form `exponent`."""
    rows, keys = MatrixTiling(F, D).rows, jax.random.split(key)
    return {
        "sign_mantissa": _bits(keys[0], rows, ROW),
        "exponents": _bits(keys[1], rows, ROW),
    }


def compact_arrays(key: jax.Array, F: int, D: int) -> Arrays:
    """Form `compact`; one weight of 32 is an escape."""
    tiling, keys = MatrixTiling(F, D), jax.random.split(key, 4)
    planes = [_bits(keys[1], tiling.rows, 5, PLANES // 3, dtype=jnp.uint32)[:, i] for i in range(5)]
    codes = jnp.stack([planes[0] & planes[1], planes[2] & planes[3], planes[4]], axis=1)
    escaped = jax.lax.population_count(codes[:, 0] & codes[:, 1] & codes[:, 2]).sum(axis=-1)
    before = jnp.cumsum(escaped, dtype=jnp.uint32) - escaped
    # Rows of a pair share an entry, and those of a tile count from its first.
    tile_first = before[::TILE_ROWS]
    pair_first = (before.reshape(-1, TILE_ROWS)[:, ::2] - tile_first[:, None]).reshape(-1)
    return {
        "sign_mantissa": _bits(keys[0], tiling.rows, ROW),
        "codes": codes.reshape(tiling.rows, PLANES),
        "palette": 120 - jnp.arange(PALETTE, dtype=jnp.uint8),
        "tile_first": jnp.append(tile_first, escaped.sum(dtype=jnp.uint32)),
        "pair_first": pair_first.astype(jnp.uint16),
        "escapes": _bits(keys[2], F * D // 28),
    }


def exponents_arrays(key: jax.Array, F: int, D: int) -> Arrays:
    """Form `huffman` without the other bytes."""
    tiling, keys = MatrixTiling(F, D), jax.random.split(key)
    verbatim = _verbatim(keys[0], tiling)
    rows = verbatim["verbatim_row"]
    # No chunk has two of them.
    missing = jnp.zeros(tiling.chunks, jnp.uint16)
    missing = missing.at[rows // CHUNK_ROWS].set(
        jnp.uint16(1) << (rows % CHUNK_ROWS).astype(jnp.uint16)
    )
    # The last chunks may be longer than the others.
    words = (tiling.chunks + 4) * CHUNK_BYTES // 4
    return {
        "stream": _bits(keys[1], words, dtype=jnp.uint32),
        "chunk_first": jnp.arange(tiling.chunks, dtype=jnp.uint32) * CHUNK_BYTES,
        "coded": jnp.uint16(0xFFFF) - missing,
        "lengths": jnp.array(LENGTHS, jnp.uint8),
        **verbatim,
    }


def huffman_arrays(key: jax.Array, F: int, D: int) -> Arrays:
    """Form `huffman`."""
    keys = jax.random.split(key)
    others = _bits(keys[0], MatrixTiling(F, D).rows, ROW)
    return {"sign_mantissa": others, **exponents_arrays(keys[1], F, D)}


def transcode_arrays(key: jax.Array, F: int, D: int) -> Arrays:
    """Form `huffman`, no more than its codes."""
    arrays = exponents_arrays(key, F, D)
    return {name: arrays[name] for name in ("stream", "chunk_first", "coded", "lengths")}


ARRAYS_OF = {
    "unweight_palette": palette_arrays,
    "unweight_exponent": exponent_arrays,
    "unweight_compact": compact_arrays,
    "unweight_huffman": huffman_arrays,
    "unweight_exponents": exponents_arrays,
    "unweight_transcode": transcode_arrays,
}


def product_arrays(form: str, key: jax.Array, F: int, D: int) -> Arrays:
    """Arrays of a form to multiply with: no exponent is so large that a product is none."""
    arrays = ARRAYS_OF[f"unweight_{form}"](key, F, D)
    for name in {"exponents", "verbatim", "escapes"} & arrays.keys():
        arrays[name] = jnp.uint8(104) + arrays[name] % 16
    return arrays


def grouped_arrays(form: str, key: jax.Array, experts: int, F: int, D: int) -> Arrays:
    """The same for experts, which are all alike."""
    arrays = product_arrays(form, key, F, D)
    return {name: jnp.repeat(x[None], experts, axis=0) for name, x in arrays.items()}
