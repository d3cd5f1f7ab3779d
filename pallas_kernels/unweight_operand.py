"""Tiles of coded weights as operands of WGMMA, put together in the registers of a warpgroup.

Lane 4g + q of warp w has the rows 16w + g and 16w + g + 8 of a tile, and the columns 8i + 2q and
8i + 2q + 1 of each, i = 0..7, in pairs. Which columns of the weights go by these numbers is free,
if x has the same ones there: here they are 16q + 2i and 16q + 2i + 1, so that a lane's bytes of a
row lie together (`operand_order` puts x so). What a warp reads of shared memory is consecutive, and
no two of its reads meet in a bank.

The programs work on a machine of `pallas_kernels/threads.py`. An exponent *turned* is its byte
rotated right by one bit: then one choice of bits makes each byte of a weight's word.

Instructions for a weight, counted in the PTX: see `docs/unweight.md`.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import vector

from pallas_kernels.threads import (
    THREADS,
    WARP,
    GpuThread,
    JaxThreads,
    Word,
    Words,
    _to_words,
    _value,
)
from pallas_kernels.unweight_matrix import PLANES, ROW, TILE_ROWS

# Verbatim rows of a step that are copied ahead. One row in a hundred is verbatim: more than four of
# 64 are rare, and are fetched when they are needed.
AHEAD = 4

PAIRS = 8  # pairs of columns that a lane has of a row

Program = Callable[..., Words]


# -- machines


class WarpgroupThread(GpuThread):
    """A thread of one warpgroup among several."""

    def __init__(self, memory: Mapping[str, ir.Value], written: tuple[str, ...]) -> None:
        super().__init__(memory, written)
        self.thread = self.thread % THREADS

    def any(self, flag: Word) -> Word:
        """Whether the flag of any thread of the warp is set."""
        return Word(
            mgpu_utils.inline_ptx(
                "vote.sync.any.pred $0, $1, 0xffffffff;",
                flag.value,
                result_types=ir.IntegerType.get_signless(1),
                convergent=True,
            )
        )


class JaxWarpgroup(JaxThreads):
    """All threads of a warpgroup, in interpret mode."""

    def __init__(self, memory: Mapping[str, jax.Array]) -> None:
        super().__init__({n: _to_words(x) for n, x in memory.items()}, jnp.uint32(0))

    def any(self, flag: jax.Array) -> jax.Array:
        return jnp.repeat(flag.reshape(-1, WARP).any(axis=1), WARP)


def operand(
    program: Program,
    refs: Mapping[str, Any],
    shared: tuple[str, ...],
    scalars: Mapping[str, Any],
    interpret: Any,
) -> jax.Array:
    """WGMMA operand [64, 64] whose registers a program gives: pairs of the lane's rows in order.

    The program gets a machine, on which the arrays `refs` have their names, and the scalars (a
    tuple of them too) as words. What lies in the arrays named in `shared` changes between calls.
    """
    if interpret:
        threads = JaxWarpgroup({name: ref[...] for name, ref in refs.items()})
        spread = lambda x: jnp.broadcast_to(x.astype(jnp.uint32), (THREADS,))  # noqa: E731
        return _logical(program(threads, **jax.tree.map(spread, dict(scalars))))
    values, tree = jax.tree.flatten(dict(scalars))
    splat = plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(
        arg_types=(*[plgpu.RefType()] * len(refs), *[splat] * len(values)),
        return_type=plgpu.ShapeDtypeStruct(
            (TILE_ROWS, ROW), jnp.bfloat16, layout=plgpu.Layout.WGMMA
        ),
    )
    def put_together(_: Any, *arguments: Any) -> Any:
        memory = dict(zip(refs, arguments, strict=False))
        own = [Word(x.registers.flat[0]) for x in arguments[len(refs) :]]
        words = program(WarpgroupThread(memory, shared), **jax.tree.unflatten(tree, own))
        pair = ir.VectorType.get((2,), ir.BF16Type.get())
        registers = np.empty((1, PAIRS, 1, 1, 2, 1, 1, 1, 1), dtype=object)
        for number, word in enumerate(words):
            half, i = divmod(number, PAIRS)
            one = vector.broadcast(ir.VectorType.get((1,), _value(0).type), word.value)
            registers[0, i, 0, 0, half, 0, 0, 0, 0] = vector.bitcast(pair, one)
        return mgpu.FragmentedArray(
            _registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None
        )

    return put_together(*refs.values(), *values)


def load_palette(ref: Any, matrix: Any, count: int, interpret: Any) -> Words:
    """The first words of a matrix's palette uint8 [E, 16], as scalars."""
    if interpret:
        return list(_to_words(ref[matrix])[:count])
    splat = plgpu.Layout.WG_SPLAT(())
    scalar = plgpu.ShapeDtypeStruct((), jnp.int32, layout=splat)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), splat), return_type=[scalar] * count)
    def load(_: Any, palette: ir.Value, matrix: Any) -> list[Any]:
        thread = WarpgroupThread({"palette": palette}, ())
        words = thread.load("palette", Word(matrix.registers.flat[0]) * 16, 4)
        return [mgpu.FragmentedArray.splat(w.value, (), is_signed=True) for w in words[:count]]

    return load(ref, jnp.asarray(matrix, jnp.int32))


def _logical(words: Words) -> jax.Array:
    """The operand [64, 64] whose registers the words of 128 threads are."""
    pairs = jax.lax.bitcast_convert_type(jnp.stack(words, axis=1), jnp.bfloat16)
    # Warp, g, q, half, i, e -> row 16w + 8 half + g, column 8i + 2q + e.
    axes = pairs.reshape(4, 8, 4, 2, PAIRS, 2)
    return axes.transpose(0, 3, 1, 4, 2, 5).reshape(TILE_ROWS, ROW)


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


def compact_program(t: Any, *, tile: Any, offset: Any, palette: Words, end: int) -> Words:
    """A tile of 3-bit codes. `tile` is its place in `tile_first`, `offset` that of the matrix's
    first escape, of `end` in all matrices."""
    others = _sign_mantissa(t)
    (first,) = t.load("tile_first", tile * 4)
    quarter = _quarter(t)
    # The columns of a row before the thread's own, in the two words of a plane.
    zero, half, whole = t.word(0), t.word(0xFFFF), t.word(0xFFFFFFFF)
    before = (
        t.where(quarter == 0, zero, t.where(quarter == 1, half, whole)),
        t.where(quarter == 3, half, zero),
    )
    words = []
    for row, other in zip(_rows(t), others, strict=True):
        planes = [t.load("codes", row * (4 * PLANES) + 8 * i, 2) for i in range(3)]
        low, middle, high = planes
        escaped = [low[i] & middle[i] & high[i] for i in range(2)]
        count = t.popcount(escaped[0]) + t.popcount(escaped[1])
        # Of the row before, where that is the first of the pair.
        above = t.where(row % 2 == 1, t.shuffle_up(count, 4, 8), zero)
        place = offset + first + t.load_half("pair_first", row // 2 * 2) + above
        for word, mask in zip(escaped, before, strict=True):
            place = place + t.popcount(word & mask)
        own = [t.where(quarter < 2, *plane) >> quarter % 2 * 16 for plane in planes]
        words += _pairs(t, _of_planes(t, own, place, palette, end), other, is_turned=False)
    return words


def _of_planes(t: Any, planes: Words, place: Any, palette: Words, end: int) -> Words:
    """Exponents of 16 codes, whose escapes begin at a place."""
    exponents = []
    for byte in range(2):
        low, middle, high = (_spread(plane >> 8 * byte & 0xFF) for plane in planes)
        index = low | middle << 1 | high << 2
        escaped = low & middle & high
        for shift in (0, 16):
            own = escaped >> shift & 0xFFFF
            # A nibble counts the escapes before it in its four, or names the byte of its place.
            all_ones = own * 15
            selectors = own * 0x1110 & all_ones | (t.word(0xFFFF) - all_ones) & 0x7654
            known = t.permute(*palette, index >> shift & 0xFFFF)
            exponents.append(t.permute(_four_bytes(t, place, end), known, selectors))
            place = place + t.popcount(own)
    return exponents


def _four_bytes(t: Any, place: Any, end: int) -> Any:
    """Four escapes from a place on; behind the last word anything."""
    word, last = place // 4, (end - 1) // 4
    places = [t.where(at < last, at, t.word(last)) for at in (word, word + 1)]
    low, high = (t.load("escapes", at * 4)[0] for at in places)
    return t.funnel(low, high, place % 4 * 8)


def _spread(byte: Any) -> Any:
    """Bit j of a byte as bit 4j of a word."""
    word = (byte | byte << 12) & 0x000F000F
    word = (word | word << 6) & 0x03030303
    return (word | word << 3) & 0x11111111
