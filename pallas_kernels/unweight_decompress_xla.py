"""XLA forms of decompression, for any device, and the table that Huffman codes are looked up in."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.unweight_matrix import (
    CHUNK_ROWS,
    COMPACT,
    MAX_BITS,
    PALETTE,
    ROW,
    MatrixTiling,
    UnweightMatrix,
)

TABLE = 1 << MAX_BITS
WORDS = ROW // 8  # words of a row's palette codes


def decode_table(lengths: jax.Array) -> jax.Array:
    """What the next 12 bits of a stream say, of code lengths [..., 16]: uint32 [..., 4096].

    The lowest byte is the length of two symbols together, the next that of the first alone, the
    highest has the symbols, the first in the low half. Where a second does not fit into the bits,
    the third byte is 255, and the others are of the first symbol.

    Codes are canonical: shorter ones first, then lower symbols; they begin with their highest bit,
    which is the lowest of the stream. Bits that are no code stand for symbol 0 with one bit.
    """
    lengths_S = lengths.astype(jnp.uint32)[..., None, :]
    symbols_S = jnp.arange(PALETTE, dtype=jnp.uint32)
    key_S = lengths_S * PALETTE + _like(symbols_S, lengths_S)
    # How many of the 12-bit numbers, highest bit first, begin with each code.
    share_S = jnp.where(lengths_S > 0, TABLE >> lengths_S, 0)
    before_SS = jnp.swapaxes(key_S, -1, -2) > key_S
    start_S = jnp.where(before_SS, share_S, 0).sum(axis=-1, dtype=jnp.uint32)[..., None, :]
    index_I = jnp.arange(TABLE, dtype=jnp.uint32)[:, None]
    turned_I = jnp.zeros_like(index_I)
    for i in range(MAX_BITS):
        turned_I |= (index_I >> i & 1) << (MAX_BITS - 1 - i)
    turned_I = _like(turned_I, start_S)
    own_IS = (turned_I >= start_S) & (turned_I < start_S + share_S)
    symbol_I = jnp.where(own_IS, _like(symbols_S, start_S), 0).sum(axis=-1, dtype=jnp.uint32)
    length_I = jnp.where(own_IS, lengths_S, 0).sum(axis=-1, dtype=jnp.uint32)
    length_I = jnp.maximum(length_I, 1)
    behind_I = _like(index_I[:, 0], length_I) >> length_I
    second_I = jnp.take_along_axis(symbol_I, behind_I.astype(jnp.int32), axis=-1)
    both_I = length_I + jnp.take_along_axis(length_I, behind_I.astype(jnp.int32), axis=-1)
    pair_I = both_I | length_I << 8 | (symbol_I | second_I << 4) << 24
    single_I = length_I | length_I << 8 | 0xFF << 16 | symbol_I << 24
    return jnp.where(both_I <= MAX_BITS, pair_I, single_I)


def _like(array: jax.Array, other: jax.Array) -> jax.Array:
    """The array with as many axes as the other."""
    return array.reshape((1,) * (other.ndim - array.ndim) + array.shape)


# -- parts


def words_of(exponents: jax.Array, sign_mantissa: jax.Array) -> jax.Array:
    """Words of weights, uint16, of both of their bytes."""
    exponent, other = exponents.astype(jnp.uint16), sign_mantissa.astype(jnp.uint16)
    return (other & 0x80) << 8 | exponent << 7 | other & 0x7F


def palette_exponents(codes: jax.Array, palette: jax.Array) -> jax.Array:
    """Exponents [..., 64] of the codes of rows [..., 32]; both nibbles are looked up at once."""
    low = jnp.tile(palette, PALETTE).astype(jnp.uint16)
    high = jnp.repeat(palette, PALETTE).astype(jnp.uint16)
    pairs = (low | high << 8)[codes.astype(jnp.int32)]
    return jax.lax.bitcast_convert_type(pairs, jnp.uint8).reshape(*codes.shape[:-1], ROW)


def decode_chunks(
    stream: jax.Array, first: jax.Array, rows: jax.Array | int, table: jax.Array
) -> jax.Array:
    """Palette codes of the first rows in chunks that begin at bytes `first` [n]: [n, 16, 8] words.

    All chunks at a time, two symbols of each after another; codes behind `rows` rows are 0.
    """
    last = stream.shape[0] - 1
    start = (first // 4).astype(jnp.int32)

    def symbol(bit: jax.Array, window: jax.Array) -> tuple[jax.Array, jax.Array]:
        entry = table[(window & (TABLE - 1)).astype(jnp.int32)]
        return bit + (entry >> 8 & 0xF), entry >> 24 & 0xF

    def eight(i: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        bit, codes = state
        word = jnp.zeros_like(bit)
        for j in range(4):
            place = start + (bit // 32).astype(jnp.int32)
            low = stream[jnp.minimum(place, last)]
            high = stream[jnp.minimum(place + 1, last)]
            # A shift by 32 bits is none.
            window = low >> bit % 32 | (high << 1) << 31 - bit % 32
            before = bit
            bit, one = symbol(bit, window)
            bit, other = symbol(bit, window >> bit - before)
            word |= (one | other << 4) << 8 * j
        return bit, jax.lax.dynamic_update_index_in_dim(codes, word, i, 0)

    codes = jnp.zeros((CHUNK_ROWS * WORDS, first.shape[0]), jnp.uint32)
    if not first.shape[0] or last < 0:
        return codes.T.reshape(-1, CHUNK_ROWS, WORDS)
    state = (first % 4 * 8, codes)
    _, codes = jax.lax.fori_loop(0, rows * WORDS, eight, state)
    return codes.T.reshape(-1, CHUNK_ROWS, WORDS)


def _nibbles(words: jax.Array) -> jax.Array:
    """Codes as bytes [..., 32] of words [..., 8]."""
    return jax.lax.bitcast_convert_type(words, jnp.uint8).reshape(*words.shape[:-1], ROW // 2)


def _place(coded: jax.Array, inside: jax.Array) -> tuple[jax.Array, jax.Array]:
    """How many rows of a chunk are in the stream before row `inside`, and whether it is itself."""
    wide, inside = coded.astype(jnp.uint32), inside.astype(jnp.uint32)
    before = jax.lax.population_count(wide & (jnp.uint32(1) << inside) - 1)
    return before.astype(jnp.int32), (wide >> inside & 1) != 0


# -- whole matrices


def _matrix(words_R: jax.Array, shape: tuple[int, int]) -> jax.Array:
    return jax.lax.bitcast_convert_type(MatrixTiling(*shape).to_matrix(words_R), jnp.bfloat16)


def _each(function: Callable[..., jax.Array], first: jax.Array, axes: int) -> Callable[..., Any]:
    """The function over all axes before those of one matrix."""
    for _ in range(first.ndim - axes):
        function = jax.vmap(function)
    return function


def _transcode(
    stream: jax.Array,
    chunk_first: jax.Array,
    coded: jax.Array,
    lengths: jax.Array,
    shape: tuple[int, int],
) -> jax.Array:
    tiling = MatrixTiling(*shape)
    most = jax.lax.population_count(coded).max().astype(jnp.int32)
    chunks = decode_chunks(stream, chunk_first, most, decode_table(lengths))
    rows = jnp.arange(tiling.rows, dtype=jnp.int32)
    chunk, inside = tiling.parts(rows, CHUNK_ROWS), tiling.tile_rows(rows) % CHUNK_ROWS
    before, here = _place(coded[chunk], inside)
    return _nibbles(jnp.where(here[:, None], chunks[chunk, before], 0))


def _exponents(
    codes: jax.Array, palette: jax.Array, verbatim_row: jax.Array, verbatim: jax.Array
) -> jax.Array:
    """Exponents of all rows. What pads `verbatim_row` is behind the last of them."""
    return palette_exponents(codes, palette).at[verbatim_row].set(verbatim, mode="drop")


def unweight_palette_xla(
    sign_mantissa: jax.Array,
    codes: jax.Array,
    palette: jax.Array,
    verbatim_row: jax.Array,
    verbatim: jax.Array,
    verbatim_first: jax.Array,
    *,
    shape: tuple[int, int],
) -> jax.Array:
    """Matrix of the form `palette`."""

    def one(sign_mantissa: jax.Array, *coded: jax.Array) -> jax.Array:
        return _matrix(words_of(_exponents(*coded), sign_mantissa), shape)

    run = _each(one, sign_mantissa, 2)
    return run(sign_mantissa, codes, palette, verbatim_row, verbatim)


def unweight_exponent_xla(
    sign_mantissa: jax.Array, exponents: jax.Array, *, shape: tuple[int, int]
) -> jax.Array:
    """Matrix of the form `exponent`."""
    return _matrix(words_of(exponents, sign_mantissa), shape)


def unweight_compact_xla(
    sign_mantissa: jax.Array,
    codes: jax.Array,
    palette: jax.Array,
    tile_first: jax.Array,
    pair_first: jax.Array,
    escapes: jax.Array,
    *,
    shape: tuple[int, int],
) -> jax.Array:
    """Matrix of the form `compact`."""
    tiling = MatrixTiling(*shape)

    def one(sign_mantissa: jax.Array, codes: jax.Array, *index: jax.Array) -> jax.Array:
        rows = jnp.arange(tiling.rows, dtype=jnp.int32)
        above = jnp.concatenate([codes[:1], codes[:-1]])
        exponents = _compact_exponents(tiling, rows, codes, above, *index)
        return _matrix(words_of(exponents, sign_mantissa), shape)

    run = _each(one, sign_mantissa, 2)
    return run(sign_mantissa, codes, palette, tile_first, pair_first, escapes)


def _compact_exponents(
    tiling: MatrixTiling,
    rows: jax.Array,
    codes: jax.Array,
    above: jax.Array,
    palette: jax.Array,
    tile_first: jax.Array,
    pair_first: jax.Array,
    escapes: jax.Array,
) -> jax.Array:
    """Exponents [n, 64] of flat rows [n], of their codes and those of the rows above them."""
    planes, above = (x.reshape(-1, 3, ROW // 32) for x in (codes, above))
    places = jnp.arange(32, dtype=jnp.uint32)
    bits = planes[..., None] >> _like(places, planes[..., None]) & 1
    index = bits[:, 0] | bits[:, 1] << 1 | bits[:, 2] << 2
    exponents = palette[index.astype(jnp.int32)]
    if not escapes.shape[0]:
        return exponents.reshape(-1, ROW)
    own_N2, above_N2 = (x[:, 0] & x[:, 1] & x[:, 2] for x in (planes, above))
    counts_N2 = jax.lax.population_count(own_N2)
    # Both rows of a pair share an entry of the index: the second has those of the first before it.
    odd = tiling.tile_rows(rows) % 2 == 1
    before = jax.lax.population_count(above_N2).sum(axis=1, dtype=jnp.uint32)
    first = tile_first[tiling.tile_ids(rows)] + pair_first[tiling.parts(rows, 2)].astype(jnp.uint32)
    first += jnp.where(odd, before, 0)
    halves = jnp.stack([first, first + counts_N2[:, 0]], axis=1)
    below = (jnp.uint32(1) << places) - 1
    ranks = jax.lax.population_count(own_N2[..., None] & _like(below, bits[:, 0]))
    place = jnp.minimum(halves[..., None] + ranks, escapes.shape[0] - 1)
    exponents = jnp.where(index == COMPACT, escapes[place.astype(jnp.int32)], exponents)
    return exponents.reshape(-1, ROW)


def unweight_huffman_xla(
    sign_mantissa: jax.Array,
    stream: jax.Array,
    chunk_first: jax.Array,
    coded: jax.Array,
    lengths: jax.Array,
    palette: jax.Array,
    verbatim_row: jax.Array,
    verbatim: jax.Array,
    verbatim_first: jax.Array,
    *,
    shape: tuple[int, int],
) -> jax.Array:
    """Matrix of the form `huffman`."""
    codes = unweight_transcode_xla(stream, chunk_first, coded, lengths, shape=shape)
    return unweight_palette_xla(
        sign_mantissa, codes, palette, verbatim_row, verbatim, verbatim_first, shape=shape
    )


def unweight_exponents_xla(
    stream: jax.Array,
    chunk_first: jax.Array,
    coded: jax.Array,
    lengths: jax.Array,
    palette: jax.Array,
    verbatim_row: jax.Array,
    verbatim: jax.Array,
    verbatim_first: jax.Array,
    *,
    shape: tuple[int, int],
) -> jax.Array:
    """Exponents of the form `exponent`, of the form `huffman`."""
    codes = unweight_transcode_xla(stream, chunk_first, coded, lengths, shape=shape)
    return _each(_exponents, codes, 2)(codes, palette, verbatim_row, verbatim)


def unweight_transcode_xla(
    stream: jax.Array,
    chunk_first: jax.Array,
    coded: jax.Array,
    lengths: jax.Array,
    *,
    shape: tuple[int, int],
) -> jax.Array:
    """Codes of the form `palette`, of the form `huffman`."""
    run = _each(partial(_transcode, shape=shape), coded, 1)
    return run(stream, chunk_first, coded, lengths)


# -- single rows


def unweight_rows(matrix: UnweightMatrix, matrix_rows: jax.Array) -> jax.Array:
    """Rows of a matrix, an embedding say, without the others: bfloat16 [..., D] of rows [...].

    Of Huffman codes the chunks are decoded that the rows are in.
    """
    if matrix.leading:
        raise ValueError(f"expected one matrix, received {matrix.leading} of them")
    tiling = matrix.tiling
    ids = tiling.row_ids(matrix_rows.astype(jnp.int32))
    rows = ids.reshape(-1)
    if matrix.form == "exponent":
        exponents = matrix.exponents[rows]
    elif matrix.form == "compact":
        index = (matrix.palette, matrix.tile_first, matrix.pair_first, matrix.escapes)
        above = matrix.codes[jnp.maximum(rows - 1, 0)]
        exponents = _compact_exponents(tiling, rows, matrix.codes[rows], above, *index)
    else:
        codes = matrix.codes[rows] if matrix.form == "palette" else _codes_of_rows(matrix, rows)
        exponents = palette_exponents(codes, matrix.palette)
        if matrix.verbatim_row.shape[0]:
            place = jnp.searchsorted(matrix.verbatim_row, rows)
            place = jnp.minimum(place, matrix.verbatim_row.shape[0] - 1)
            there = matrix.verbatim_row[place] == rows
            exponents = jnp.where(there[:, None], matrix.verbatim[place], exponents)
    words = words_of(exponents, matrix.sign_mantissa[rows])
    shape = (*matrix_rows.shape, tiling.D)
    return jax.lax.bitcast_convert_type(words.reshape(shape), jnp.bfloat16)


def _codes_of_rows(matrix: UnweightMatrix, rows: jax.Array) -> jax.Array:
    """Palette codes of flat rows in the form `huffman`."""
    tiling = matrix.tiling
    chunk = tiling.parts(rows, CHUNK_ROWS)
    before, here = _place(matrix.coded[chunk], tiling.tile_rows(rows) % CHUNK_ROWS)
    table = decode_table(matrix.lengths)
    chunks = decode_chunks(matrix.stream, matrix.chunk_first[chunk], before.max() + 1, table)
    own = chunks[jnp.arange(rows.shape[0]), before]
    return _nibbles(jnp.where(here[:, None], own, np.uint32(0)))
