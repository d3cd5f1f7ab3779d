"""Tiles of coded weights as operands of WGMMA, put together in the registers of a warpgroup.

Lane 4g + q of warp w has the rows 16w + g and 16w + g + 8 of a tile, and the columns 8i + 2q and
8i + 2q + 1 of each, i = 0..7, in pairs. Which columns of the weights go by these numbers is free,
if x has the same ones there: here they are 16q + 2i and 16q + 2i + 1, so that a lane's bytes of a
row lie together (`operand_order` puts x so). What a warp reads of shared memory is consecutive, and
no two of its reads meet in a bank.

The programs work on a machine of `pallas_kernels/warpgroup.py`. An exponent *turned* is its byte
rotated right by one bit: then one choice of bits makes each byte of a weight's word.

Instructions for a weight, counted in the PTX: exponents 4, palette 9, 3-bit codes 16. At the full
bandwidth of an H200 (4.8 TB/s, 132 SMs at 1.7 GHz) an SM has time for 7 instructions of each of its
four schedulers for four weights of one byte and a half: the assembler joins logic operations by
threes, and that is about what is left of the 3-bit codes, and half of it of the palette.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from pallas_kernels.threads import WARP, Words
from pallas_kernels.unweight_matrix import PLANES, ROW, TILE_ROWS
from pallas_kernels.warpgroup import PAIRS

# Verbatim rows of a step that are copied ahead. One row in a hundred is verbatim: more than four of
# 64 are rare, and are fetched when they are needed.
AHEAD = 4

# Bytes of escapes of a step that are copied ahead, of 64 x 64 weights: one in sixteen. Of trained
# ones one in 25 to 30 is an escape; the escapes of a tile with more are read where they are stored.
WINDOW = 256


def operand_order(x_MD: jax.Array) -> jax.Array:
    """The columns of x where the operand has those of the weights."""
    M, D = x_MD.shape
    return x_MD.reshape(M, D // ROW, 4, PAIRS, 2).swapaxes(2, 3).reshape(M, D)


# -- exponents and words


def _rows(t: Any) -> tuple[Any, Any]:
    """The two rows of the thread in a tile."""
    first = t.thread // WARP * 16 + t.thread % WARP // 4
    return first, first + 8


def _quarter(t: Any) -> Any:
    """Which 16 columns the thread has."""
    return t.thread % 4


def _choose(mask: int, ones: Any, zeros: Any) -> Any:
    """Bits of one word where the mask has ones, of the other where it has zeros."""
    return ones & np.uint32(mask) | zeros & np.uint32(~mask & 0xFFFFFFFF)


def turned(word: Any) -> Any:
    """Four exponents, each rotated right by one bit."""
    return _choose(0x80808080, word << 7, word >> 1)


def _pairs(t: Any, exponents: Words, sign_mantissa: Words, is_turned: bool) -> Words:
    """Weights in pairs: eight words from four of exponents and four of sign and mantissa."""
    words = []
    for exponent, other in zip(exponents, sign_mantissa, strict=True):
        high = _choose(0x80808080, other, exponent if is_turned else exponent >> 1)
        low = _choose(0x80808080, exponent if is_turned else exponent << 7, other)
        words += [t.permute(low, high, 0x5140), t.permute(low, high, 0x7362)]
    return words


def _sign_mantissa(t: Any) -> list[Words]:
    return [t.load("sign_mantissa", row * ROW + _quarter(t) * 16, 4) for row in _rows(t)]


# -- exponents as they are


def exponent_program(t: Any) -> Words:
    exponents = [t.load("exponents", row * ROW + _quarter(t) * 16, 4) for row in _rows(t)]
    halves = zip(exponents, _sign_mantissa(t), strict=True)
    return [word for e, s in halves for word in _pairs(t, e, s, is_turned=False)]


# -- palette codes and verbatim rows


def palette_program(
    t: Any,
    *,
    tile: Any,
    first_row: Any,
    offset: Any,
    palette: Words,
    has_verbatim: bool,
) -> Words:
    """A tile of palette codes, whose rows begin at the matrix's flat row `first_row`.

    `tile` is its place in `verbatim_first`, `offset` that of the matrix's first verbatim row.
    """
    palette = [turned(word) for word in palette]
    codes = [t.load("codes", row * (ROW // 2) + _quarter(t) * 8, 2) for row in _rows(t)]
    others = _sign_mantissa(t)
    exponents = [word for own in codes for word in _of_palette(t, own, palette)]
    if has_verbatim:
        exponents = _verbatim(t, exponents, tile, first_row, offset)
    halves = zip((exponents[:4], exponents[4:]), others, strict=True)
    return [word for e, s in halves for word in _pairs(t, e, s, is_turned=True)]


def _of_palette(t: Any, codes: Words, palette: Words) -> Words:
    """Exponents of 16 codes."""
    exponents = []
    for code in codes:
        index = code & 0x77777777
        # A byte of its own place, of the upper half of the palette where bit 3 of the code is set.
        half = code >> 1 & 0x44444444 | 0x32103210
        for shift in (0, 16):
            low = t.permute(palette[0], palette[1], index >> shift & 0xFFFF)
            high = t.permute(palette[2], palette[3], index >> shift & 0xFFFF)
            exponents.append(t.permute(low, high, half >> shift & 0xFFFF))
    return exponents


def _verbatim(t: Any, exponents: Words, tile: Any, first_row: Any, offset: Any) -> Words:
    """The exponents, but those of verbatim rows as they are stored.

    The first verbatim rows of the step lie in shared memory. A warp asks with an id for each lane
    whether one is among its 16 rows, and most have none.
    """
    (own,) = t.load("row_ahead", t.thread % AHEAD * 4)
    first = first_row + t.thread // WARP * 16

    def look_up() -> Words:
        ids = t.load("row_ahead", t.word(0), AHEAD)
        found = []
        for half, row in enumerate(_rows(t)):
            entry = t.word(AHEAD)
            for k, other in enumerate(ids):
                entry = t.where(other == first_row + row, t.word(k), entry)
            old = exponents[4 * half : 4 * half + 4]
            found += _replaced(t, entry < AHEAD, "ahead", entry, old)
        return found

    exponents = t.when(t.any(own - first < 16), look_up, exponents)
    # Rows are in order. Where the last one that is there is of this tile, or of one before it, the
    # tile may have more.
    (last,) = t.load("row_ahead", t.word(4 * (AHEAD - 1)))
    more = last < first_row + TILE_ROWS
    return t.when(more, lambda: _search(t, exponents, tile, first_row, offset), exponents)


def _search(t: Any, exponents: Words, tile: Any, first_row: Any, offset: Any) -> Words:
    """The exponents with all verbatim rows of the tile, read where they are stored."""
    (first,) = t.load("verbatim_first", tile * 4)
    (end,) = t.load("verbatim_first", tile * 4 + 4)

    def replace(i: Any, state: Words) -> Words:
        place = offset + first + i
        (row,) = t.load("verbatim_row", place * 4)
        after = []
        for half, own in enumerate(_rows(t)):
            old = state[4 * half : 4 * half + 4]
            after += _replaced(t, row == first_row + own, "verbatim", place, old)
        return after

    return t.loop(end - first, exponents, replace)


def _replaced(t: Any, flag: Any, name: str, entry: Any, old: Words) -> Words:
    """The thread's exponents of a verbatim row, turned, where the flag is set."""

    def stored() -> Words:
        return [turned(word) for word in t.load(name, entry * ROW + _quarter(t) * 16, 4)]

    return t.when(flag, stored, old)


# -- 3-bit codes and escapes


def compact_program(
    t: Any, *, step_tile: Any, tile: Any, offset: Any, palette: Words, count: int, matrices: int
) -> Words:
    """A tile of 3-bit codes.

    `step_tile` and `tile` are the places of the step's first tile and of this one in `tile_first`,
    `offset` that of the matrix's first escape; each of the matrices has room for `count`. Escapes
    of the step are in `ahead`, from its first on, but not over the end of the matrix.
    """
    others = _sign_mantissa(t)
    (first,) = t.load("tile_first", tile * 4)
    (end,) = t.load("tile_first", tile * 4 + 4)
    (start,) = t.load("tile_first", step_tile * 4)
    start = t.minimum(start, t.word(count - WINDOW))
    rows = [_planes(t, row) for row in _rows(t)]

    def exponents(place: Any, four_bytes: Callable[..., Any]) -> Words:
        return [
            word
            for planes, before in rows
            for word in _of_planes(t, planes, place + before, palette, four_bytes)
        ]

    def ahead(place: Any) -> Any:
        word = place & 0xFFFC
        return t.funnel(*t.load("ahead", word), *t.load("ahead", word + 4), place % 4 * 8)

    def stored(place: Any) -> Any:
        last = t.word((count * matrices - 1) // 4)
        word = place // 4
        places = [t.minimum(at, last) for at in (word, word + 1)]
        return t.funnel(*(t.load("escapes", at * 4)[0] for at in places), place % 4 * 8)

    # The word behind the last escape is read with it.
    room = t.word(WINDOW - 5)
    fits, none = room >= end - start, [t.word(0)] * 8
    found = t.when(fits, lambda: exponents(first - start, ahead), none)
    found = t.when(room < end - start, lambda: exponents(first + offset, stored), found)
    halves = zip((found[:4], found[4:]), others, strict=True)
    return [word for e, s in halves for word in _pairs(t, e, s, is_turned=False)]


def _planes(t: Any, row: Any) -> tuple[list[Words], Any]:
    """The planes of a row, and how many escapes of its tile are before the thread's columns."""
    quarter, zero = _quarter(t), t.word(0)
    planes = [t.load("codes", row * (4 * PLANES) + 8 * i, 2) for i in range(3)]
    low, middle, high = planes
    escaped = [low[i] & middle[i] & high[i] for i in range(2)]
    count = t.popcount(escaped[0]) + t.popcount(escaped[1])
    # Of the row before, where that is the first of the pair.
    above = t.where(row % 2 == 1, t.shuffle_up(count, 4, 8), zero)
    before = t.load_half("pair_first", row // 2 * 2) + above
    # The columns of the row before the thread's own, in both words of a plane.
    half, whole = t.word(0xFFFF), t.word(0xFFFFFFFF)
    masks = (
        t.where(quarter == 0, zero, t.where(quarter == 1, half, whole)),
        t.where(quarter == 3, half, zero),
    )
    for word, mask in zip(escaped, masks, strict=True):
        before = before + t.popcount(word & mask)
    return planes, before


def _of_planes(
    t: Any, planes: list[Words], place: Any, palette: Words, four_bytes: Callable[..., Any]
) -> Words:
    """Exponents of the thread's 16 codes of a row, whose escapes begin at a place."""
    # The thread's two bytes of each plane, in bytes 0 and 2; what is in the others is masked away.
    selectors = _quarter(t) * 0x202 + 0x100
    low, middle, high = (t.permute(*plane, selectors) for plane in planes)
    # Codes of eight weights as two squares of four bits by three planes: those of the low and of
    # the high halves of both bytes.
    codes = [
        _transposed(low & 0x000F000F | middle << 4 & 0x00F000F0 | high << 8 & 0x0F000F00),
        _transposed(low >> 4 & 0x000F000F | middle & 0x00F000F0 | high << 4 & 0x0F000F00),
    ]
    # One more than 7 sets the fourth bit.
    escaped = [code + 0x11111111 >> 3 & 0x11111111 for code in codes]
    exponents = []
    for shift in (0, 16):
        for code, escape in zip(codes, escaped, strict=True):
            # Four weights; what is above their nibbles does not matter.
            code, own = code >> shift, escape >> shift
            # A nibble counts the escapes before it in its four, or names the byte of its place.
            chosen = (own * 0x1110 ^ 0x7654) & own * 15 ^ 0x7654
            known = t.permute(*palette, code)
            exponents.append(t.permute(four_bytes(place), known, chosen))
            place = place + t.popcount(own << 16)
    return exponents


def _transposed(word: Any) -> Any:
    """Bit 4i + j of each half of a word as bit 4j + i."""
    swapped = (word ^ word >> 3) & 0x0A0A0A0A
    word = word ^ swapped ^ swapped << 3
    swapped = (word ^ word >> 6) & 0x00CC00CC
    return word ^ swapped ^ swapped << 6
