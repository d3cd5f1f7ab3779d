"""Mosaic GPU forms of decompression, bound by memory.

All of them are programs of one thread (`pallas_kernels/threads.py`). Eight weights are a thread's
unit, a *segment*: 8 bytes of sign and mantissa in, 16 bytes of words out, so that what a warp reads
and writes is consecutive. A row is 8 segments, a tile 512, of which each of 128 threads has 4 (and
has all its loads on the way before it uses one). Nothing is kept in shared memory, and 10 or more
blocks on an SM hide what a load takes.

Instructions for a weight, counted as the PTX of the kernels is executed: exponents 5, palette 8,
3-bit codes 13. At the copy bandwidth of an H200 (4.2 of 4.8 TB/s, 132 SMs at 1.7 GHz, 3.5 bytes in
and out) a weight has time for 24, so memory is the bound.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.threads import THREADS, Words, launch
from pallas_kernels.unweight_matrix import PLANES, ROW, TILE_ROWS, MatrixTiling

SEGMENT = 8
SEGMENTS = ROW // SEGMENT  # of a row
SWEEPS = TILE_ROWS * SEGMENTS // THREADS  # segments of a thread, of a tile
SWEEP_ROWS = THREADS // SEGMENTS

MAX_WEIGHTS = 1 << 31  # offsets of bytes are 32 bits


# -- segments


def rebuild(t: Any, exponents: Words, sign_mantissa: Words) -> Words:
    """Four words, pairs of weights, from eight exponents and eight bytes of sign and mantissa."""
    words = []
    zero, others = t.word(0), t.word(0x807F807F)
    for exponent, other in zip(exponents, sign_mantissa, strict=True):
        for pair in range(2):
            first, second = 2 * pair, 2 * pair + 1
            # Exponents in the low bytes of two halves; the other byte in both bytes of its half.
            spread = t.permute(exponent, zero, 0x4040 | second << 8 | first)
            twice = t.permute(other, zero, second * 0x1100 | first * 0x11)
            words.append(spread << 7 | twice & others)
    return words


def exponents_of_codes(t: Any, codes: Any, palette: Words) -> Words:
    """Exponents of eight palette codes, as two words of bytes."""
    index = codes & 0x77777777
    # A nibble names the byte of its own place, of the upper half of the palette where bit 3 is set.
    half = codes >> 1 & 0x44444444 | 0x32103210
    exponents = []
    for shift in (0, 16):
        low = t.permute(palette[0], palette[1], index >> shift)
        high = t.permute(palette[2], palette[3], index >> shift)
        exponents.append(t.permute(low, high, half >> shift))
    return exponents


def store_words(
    t: Any, tiling: MatrixTiling, tile: Any, row: Any, segment: Any, words: Words
) -> None:
    """Writes a segment of a tile's row into the matrix."""
    band, column = tile // tiling.columns, tile % tiling.columns
    place = (band * TILE_ROWS + row) * tiling.columns + column
    t.store("out", place * (2 * ROW) + segment * (2 * SEGMENT), words)


def write_verbatim(
    t: Any, tiling: MatrixTiling, matrix: Any, first_tile: Any, tiles: Any, length: int, words: bool
) -> None:
    """Rows of a block's tiles whose exponents are not in the palette, over what is there.

    They are one in a hundred, so that writing them twice costs less than asking each time.
    """
    t.barrier()
    # Every matrix has one entry more than tiles.
    (first,) = t.load("verbatim_first", (first_tile + matrix) * 4)
    (end,) = t.load("verbatim_first", (first_tile + tiles + matrix) * 4)

    def write(i: Any, _: Words) -> Words:
        entry = first + i * SWEEP_ROWS + t.thread // SEGMENTS
        segment = t.thread % SEGMENTS

        def row() -> Words:
            place = matrix * length + entry
            (own,) = t.load("verbatim_row", place * 4)
            exponents = t.load("verbatim", place * ROW + segment * SEGMENT, 2)
            flat = matrix * tiling.rows + own
            if not words:
                t.store("out", flat * ROW + segment * SEGMENT, exponents)
                return []
            others = t.load("sign_mantissa", flat * ROW + segment * SEGMENT, 2)
            tile, inside = flat // TILE_ROWS, flat % TILE_ROWS
            store_words(t, tiling, tile, inside, segment, rebuild(t, exponents, others))
            return []

        t.when(entry < end, row, [])
        return []

    t.loop((end - first + (SWEEP_ROWS - 1)) // SWEEP_ROWS, [], write)


# -- a tile for each block


def _sweeps(t: Any) -> list[tuple[Any, Any]]:
    """Row and segment of the four segments that a thread has of a tile."""
    return [(t.thread // SEGMENTS + i * SWEEP_ROWS, t.thread % SEGMENTS) for i in range(SWEEPS)]


def _load_tile(t: Any, name: str, segment_bytes: int) -> list[Words]:
    """What a thread's segments of the block's tile have in an array."""
    places = [t.thread + i * THREADS + t.block * (THREADS * SWEEPS) for i in range(SWEEPS)]
    return [t.load(name, place * segment_bytes, segment_bytes // 4) for place in places]


def _palette_program(t: Any, *, tiling: MatrixTiling, length: int) -> None:
    matrix = t.block // tiling.tiles
    codes = _load_tile(t, "codes", SEGMENT // 2)
    others = _load_tile(t, "sign_mantissa", SEGMENT)
    palette = t.load("palette", matrix * 16, 4)
    for (row, segment), (code,), other in zip(_sweeps(t), codes, others, strict=True):
        words = rebuild(t, exponents_of_codes(t, code, palette), other)
        store_words(t, tiling, t.block, row, segment, words)
    write_verbatim(t, tiling, matrix, t.block, 1, length, words=True)


def _exponent_program(t: Any, *, tiling: MatrixTiling) -> None:
    exponents = _load_tile(t, "exponents", SEGMENT)
    others = _load_tile(t, "sign_mantissa", SEGMENT)
    for (row, segment), exponent, other in zip(_sweeps(t), exponents, others, strict=True):
        store_words(t, tiling, t.block, row, segment, rebuild(t, exponent, other))


def _spread_bits(byte: Any) -> Any:
    """Bit j of a byte as bit 4j of a word."""
    word = (byte | byte << 12) & 0x000F000F
    word = (word | word << 6) & 0x03030303
    return (word | word << 3) & 0x11111111


def _compact_program(t: Any, *, tiling: MatrixTiling, length: int) -> None:
    matrix = t.block // tiling.tiles
    others = _load_tile(t, "sign_mantissa", SEGMENT)
    rows = [t.block * TILE_ROWS + row for row, _ in _sweeps(t)]
    planes = [
        [t.load_byte("codes", row * (4 * PLANES) + t.thread % SEGMENTS + 8 * i) for i in range(3)]
        for row in rows
    ]
    # Two rows of 8 segments share a count of escapes, and 16 neighbours of a warp have them.
    before = [t.load_half("pair_first", row // 2 * 2) for row in rows]
    (first,) = t.load("tile_first", (t.block + matrix) * 4)
    palette = t.load("palette", matrix * 16, 2)
    # The entry of the escape is zero, so that an exponent can be put there.
    palette[1] = palette[1] & 0x00FFFFFF
    start = matrix * length + first
    for sweep, (row, segment) in enumerate(_sweeps(t)):
        low, middle, high = planes[sweep]
        index = _spread_bits(low) | _spread_bits(middle) << 1 | _spread_bits(high) << 2
        exponents = [t.permute(*palette, index >> shift) for shift in (0, 16)]
        escaped = low & middle & high
        own = t.popcount(escaped)
        total = own
        for distance in (1, 2, 4, 8):
            below = t.shuffle_up(total, distance, 2 * SEGMENTS)
            total = t.where(t.thread % (2 * SEGMENTS) >= distance, total + below, total)
        place = start + before[sweep] + total - own

        def put(state: Words) -> Words:
            left, place, *words = state
            bit = t.lowest_bit(left)
            exponent = t.load_byte("escapes", place) << bit % 4 * 8
            words = [
                t.where(bit < 4, words[0] | exponent, words[0]),
                t.where(bit < 4, words[1], words[1] | exponent),
            ]
            return [left & (left - 1), place + 1, *words]

        state = t.repeat([escaped, place, *exponents], lambda state: state[0] != 0, put)
        words = rebuild(t, state[2:], others[sweep])
        store_words(t, tiling, t.block, row, segment, words)


# -- operations


def unweight_palette_mosaic(
    sign_mantissa: jax.Array,
    codes: jax.Array,
    palette: jax.Array,
    verbatim_row: jax.Array,
    verbatim: jax.Array,
    verbatim_first: jax.Array,
    *,
    shape: tuple[int, int],
    interpret: Any = False,
) -> jax.Array:
    """Matrix of the form `palette`."""
    tiling = MatrixTiling(*shape)
    leading = sign_mantissa.shape[:-2]
    return launch(
        partial(_palette_program, tiling=tiling, length=verbatim_row.shape[-1]),
        {
            "sign_mantissa": sign_mantissa,
            "codes": codes,
            "palette": palette,
            "verbatim_row": verbatim_row,
            "verbatim": verbatim,
            "verbatim_first": verbatim_first,
        },
        jax.ShapeDtypeStruct((*leading, *shape), jnp.bfloat16),
        blocks=math.prod(leading) * tiling.tiles,
        name="unweight_palette",
        interpret=interpret,
    )


def unweight_exponent_mosaic(
    sign_mantissa: jax.Array,
    exponents: jax.Array,
    *,
    shape: tuple[int, int],
    interpret: Any = False,
) -> jax.Array:
    """Matrix of the form `exponent`."""
    tiling = MatrixTiling(*shape)
    leading = sign_mantissa.shape[:-2]
    return launch(
        partial(_exponent_program, tiling=tiling),
        {"sign_mantissa": sign_mantissa, "exponents": exponents},
        jax.ShapeDtypeStruct((*leading, *shape), jnp.bfloat16),
        blocks=math.prod(leading) * tiling.tiles,
        name="unweight_exponent",
        interpret=interpret,
    )


def unweight_compact_mosaic(
    sign_mantissa: jax.Array,
    codes: jax.Array,
    palette: jax.Array,
    tile_first: jax.Array,
    pair_first: jax.Array,
    escapes: jax.Array,
    *,
    shape: tuple[int, int],
    interpret: Any = False,
) -> jax.Array:
    """Matrix of the form `compact`."""
    tiling = MatrixTiling(*shape)
    leading = sign_mantissa.shape[:-2]
    return launch(
        partial(_compact_program, tiling=tiling, length=escapes.shape[-1]),
        {
            "sign_mantissa": sign_mantissa,
            "codes": codes,
            "palette": palette,
            "tile_first": tile_first,
            "pair_first": pair_first,
            "escapes": escapes,
        },
        jax.ShapeDtypeStruct((*leading, *shape), jnp.bfloat16),
        blocks=math.prod(leading) * tiling.tiles,
        name="unweight_compact",
        interpret=interpret,
    )
