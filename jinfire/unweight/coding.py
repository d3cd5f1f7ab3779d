"""Sections of a tensor in a coded form, for files and for devices."""

import dataclasses
import itertools

import numpy as np

from jinfire.unweight import kernels
from jinfire.unweight.tiles import (
    as_input,
    on_threads,
    on_tiles,
    row_of,
    threads,
    tile_ranges,
    verbatim_before,
)
from pallas_kernels import (
    TileOrder,
    UnweightOptions,
    canonical_codes,
    choose_palette,
    code_lengths,
)

OPTIONS = UnweightOptions()
ROW = kernels.ROW
NIBBLE_WORDS = 16  # uint16 words of a row of 64 4-bit values


@dataclasses.dataclass(frozen=True)
class Coding:
    """What the values of a tensor decide before any is coded.

    Shapes: words [2 F x D] uint8, of 4-bit values [F x D / 2], padded with zeros; flags [R]
    uint8, of the rows that are verbatim.
    """

    words: np.ndarray
    order: TileOrder
    nibbles: bool
    form: str
    palette: tuple[int, ...]
    lengths: tuple[int, ...]
    flags_R: np.ndarray
    verbatim_rows: int
    escapes: int


def plan(words: np.ndarray, order: TileOrder, form: str, nibbles: bool, jobs: int | None) -> Coding:
    """Palette, verbatim rows and code of a tensor's uint16 words."""
    width = NIBBLE_WORDS if nibbles else ROW
    if words.size != order.rows * width:
        padded = np.zeros(order.rows * width, np.uint16)
        padded[: words.size] = words
        words = padded
    counts = count_symbols(words, nibbles, jobs)
    data = as_input(words)
    palette = choose_palette(counts, form)
    flags_R = np.zeros(order.rows, np.uint8)
    escapes = 0
    lengths: tuple[int, ...] = ()
    if form == "compact":
        escapes = int(counts.sum() - counts[list(palette)].sum())
    elif counts.sum() != counts[list(palette)].sum():
        values = np.array(palette, np.uint8)
        low = high = palette[0]
        while low - 1 in palette:
            low -= 1
        while high + 1 in palette:
            high += 1

        def mark(first: int, last: int) -> np.ndarray:
            removed = np.zeros(256, np.int64)
            kernels.mark_rows(
                *(data, values, low, high - low, order.across, order.F, first, last),
                *(flags_R, removed),
            )
            return removed

        counts = counts + sum(on_tiles(mark, order, jobs))
    if form == "huffman":
        coded = [int(counts[value]) for value in palette]
        lengths = tuple(code_lengths(coded, OPTIONS.max_code_bits))
    verbatim_rows = int(np.count_nonzero(flags_R))
    return Coding(data, order, nibbles, form, palette, lengths, flags_R, verbatim_rows, escapes)


def fill(coding: Coding, sections: dict[str, np.ndarray], jobs: int | None) -> list[np.ndarray]:
    """Writes the sections, given as arrays of their size, and gives stream or escapes in pieces.

    `sign_mantissa` has all R rows (with 4-bit values it is absent), `chunk_bytes` are int64 [C],
    `tile_first` and `pair_first` in their own types.
    """
    order, form = coding.order, coding.form
    words, geometry = coding.words, (order.across, order.F)
    verbatim = sections.get("verbatim", np.empty(0, np.uint8))
    sign_mantissa = sections.get("sign_mantissa", np.empty(ROW, np.uint8))

    if form == "huffman":
        pairs = _code_pairs(coding.palette, coding.lengths)

        def work(first: int, last: int) -> np.ndarray:
            bound = (row_of(last, order) - row_of(first, order)) * ROW * 3 // 2 + 8
            stream = np.empty(bound, np.uint8)
            used = kernels.encode_huffman(
                *(words, coding.nibbles, *geometry, first, last, coding.flags_R, pairs),
                *(sign_mantissa, stream, sections["chunk_bytes"], verbatim),
                verbatim_before(coding.flags_R, first, order),
            )
            return stream[:used]
    elif form == "palette":
        pairs = _rank_pairs(coding.palette)

        def work(first: int, last: int) -> np.ndarray:
            kernels.encode_palette(
                *(words, *geometry, first, last, coding.flags_R, pairs),
                *(sign_mantissa, sections["codes"], verbatim),
                verbatim_before(coding.flags_R, first, order),
            )
            return np.empty(0, np.uint8)
    else:
        palette = np.array(coding.palette, np.uint8)

        def work(first: int, last: int) -> np.ndarray:
            escapes = np.empty(coding.escapes + ROW, np.uint8)
            used = kernels.encode_compact(
                *(words, palette, *geometry, first, last, sign_mantissa, sections["codes"]),
                *(escapes, sections["tile_first"], sections["pair_first"]),
            )
            return escapes[:used]

    pieces = on_tiles(work, order, jobs)
    if form == "compact":
        before = 0
        for (first, last), piece in zip(tile_ranges(order, jobs), pieces, strict=True):
            sections["tile_first"][first:last] += np.uint32(before)
            before += piece.size
    return pieces


def count_symbols(words: np.ndarray, nibbles: bool, jobs: int | None) -> np.ndarray:
    """How often each exponent of uint16 words, or 4-bit value, occurs: [256] int64."""
    data = as_input(words)
    eights, rest = divmod(data.size, 8)
    number = threads(4 * eights, jobs)
    bounds = [8 * (eights * i // number) for i in range(number + 1)]
    last = np.zeros(8, np.uint8)
    last[:rest] = data[8 * eights :]

    def count(shift: int) -> np.ndarray:
        parts = on_threads(
            lambda first, last: kernels.count_values(data, shift, first, last),
            *(list(itertools.pairwise(bounds)), number),
        )
        return np.sum(parts, axis=0) + kernels.count_values(as_input(last), shift, 0, 8)

    if nibbles:
        bytes_HL = (count(0) + count(8)).reshape(16, 16)
        counts = np.zeros(256, np.int64)
        counts[:16] = bytes_HL.sum(axis=0) + bytes_HL.sum(axis=1)
    else:
        counts = count(7)
    counts[0] -= (8 - rest) * 2 if nibbles else (8 - rest) // 2  # zeros behind the last words
    return counts


def _code_pairs(palette: tuple[int, ...], lengths: tuple[int, ...]) -> np.ndarray:
    """Codes of two values, and their length in the highest byte: [65536] uint32."""
    values = np.array(palette, np.uint32)
    code, length = np.array([canonical_codes(lengths), lengths], np.uint32)
    table = np.zeros(1 << 16, np.uint32)
    both = code[:, None] | code[None, :] << length[:, None]
    both |= (length[:, None] + length[None, :]) << np.uint32(24)
    table[values[:, None] | values[None, :] << np.uint32(8)] = both
    return table


def _rank_pairs(palette: tuple[int, ...]) -> np.ndarray:
    """Ranks of two values in the palette as a byte: [65536] uint8."""
    values = np.array(palette, np.uint32)
    rank = np.arange(len(palette), dtype=np.uint8)
    table = np.zeros(1 << 16, np.uint8)
    table[values[:, None] | values[None, :] << np.uint32(8)] = rank[:, None] | rank[None, :] << 4
    return table
