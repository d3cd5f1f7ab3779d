"""Loops over rows of weights, compiled by numba: the bytes of pallas_kernels/unweight_format.py.

A kernel works on the tiles `first` to `last` of a matrix of `across` tiles a band and F rows, and
threads take ranges of tiles: nothing is shared but arrays that each writes its own part of. `words`
are the bytes of a tensor's uint16 words, 128 a row of 64 weights, or 32 a row with `nibbles`.

Decoders trust no byte: whatever the sections hold, they read and write inside the arrays that their
docstrings size, and give the tile that does not fit, or -1.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit

from jinfire.unweight.vectors import (
    ROW,
    equal_bits,
    join_nibbles,
    join_words,
    load_u64,
    lowest_bit,
    outside_bits,
    prefetch,
    select_bits,
    split_nibbles,
    split_words,
    store_u64,
)

# numba keeps what it compiled until the file of a kernel changes, whatever that file imports. So
# this is the XXH3 of vectors.py, which a test compares.
VECTORS = "b7c8b55fabcaef0c"

ROW_BYTES = 2 * ROW
NIBBLE_BYTES = ROW // 2
TILE_ROWS = 64
CHUNK_ROWS = 16
MAX_CODE_BITS = 12
# Bytes that a decoder may read from the start of a chunk, whatever its codes are.
CHUNK_READ = CHUNK_ROWS * ROW * MAX_CODE_BITS // 8 + 16
# Symbols of a chunk in a buffer whose last write may go beyond them.
SPACED = CHUNK_ROWS * ROW + 32
ESCAPE = 7
U = np.uint64
ALL = U(0xFFFFFFFFFFFFFFFF)


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, compiled when it is first called, and kept on disk for later processes."""
    try:
        return njit(nogil=True, cache=True)(function)
    except RuntimeError:  # no folder to write to, neither beside this file nor in the user's cache
        return njit(nogil=True)(function)


@compiled
def count_values(words, shift, first, last):
    """How often each byte value occurs at bit `shift` of the words: [256] int64.

    `first` and `last` are bytes, a multiple of 8 apart.
    """
    # Four tables: the increments of neighbours, which are often equal, do not wait for each other.
    counts = np.zeros(4 * 256, np.int64)
    low = U(shift)
    byte = U(255)
    for at in range(first, last, 8):
        four = load_u64(words, at) >> low
        counts[four & byte] += 1
        counts[U(256) + (four >> U(16) & byte)] += 1
        counts[U(512) + (four >> U(32) & byte)] += 1
        counts[U(768) + (four >> U(48) & byte)] += 1
    return counts.reshape(4, 256).sum(axis=0)


@compiled
def mark_rows(words, palette, low, span, across, F, first, last, flags_R, counts):
    """Flags of the rows with a value outside the palette; takes their values out of the counts.

    All of `low` to `low + span` are in the palette, which decides for most rows.
    """
    exps = np.empty(ROW, np.uint8)
    sms = np.empty(ROW, np.uint8)
    r = first_row(first, across, F)
    for tile in range(first, last):
        band = tile // across
        column = tile - band * across
        height = min(TILE_ROWS, F - band * TILE_ROWS)
        for i in range(height):
            at = ((band * TILE_ROWS + i) * across + column) * ROW_BYTES
            prefetch(words, at + ROW_BYTES)
            if outside_bits(words, at, low, span) == U(0):
                r += 1
                continue
            split_words(words, at, exps, 0, sms, 0)
            known = U(0)
            for value in palette:
                known |= equal_bits(exps, 0, value)
                if known == ALL:
                    break
            flags_R[r] = known != ALL
            if known != ALL:
                for exp in exps:
                    counts[exp] -= 1
            r += 1


@compiled
def first_row(tile, across, F):
    """Number of the first row of a tile, in tile order."""
    band = tile // across
    height = min(TILE_ROWS, F - band * TILE_ROWS)
    return band * TILE_ROWS * across + (tile - band * across) * height


@compiled
def parts_before(tile, across, F, rows):
    """Parts of up to `rows` rows in the tiles before one."""
    band = tile // across
    height = min(TILE_ROWS, F - band * TILE_ROWS)
    return (band * across) * (TILE_ROWS // rows) + (tile - band * across) * (
        (height + rows - 1) // rows
    )


@compiled
def encode_huffman(
    words, nibbles, across, F, first, last, flags_R, pairs, sm, stream, bytes_C, verbatim, v
):
    """Sections of these tiles in Huffman form; gives the bytes of the stream.

    Shapes: pairs [65536] uint32, for two values (the first in the low byte) their codes, and the
    codes' length in the highest byte; stream [12 bits a weight of these tiles, and 8 bytes];
    sm [R x 64], unused with nibbles; verbatim [rows, 64] flat, `v` rows of which come before.
    """
    exps = np.empty(ROW, np.uint8)
    two = exps.view(np.uint16)
    r = first_row(first, across, F)
    c = parts_before(first, across, F, CHUNK_ROWS)
    position = start = 0
    code_bits = U(0x00FFFFFF)
    for tile in range(first, last):
        band = tile // across
        column = tile - band * across
        height = min(TILE_ROWS, F - band * TILE_ROWS)
        bits, pending = U(0), U(0)
        for i in range(height):
            place = (band * TILE_ROWS + i) * across + column
            if nibbles:
                split_nibbles(words, place * NIBBLE_BYTES, exps, 0)
            else:
                # Tiles to the right: the rows of a tile lie too far apart for the processor to see.
                prefetch(words, (place + 1) * ROW_BYTES)
                split_words(words, place * ROW_BYTES, exps, 0, sm, r * ROW)
            if flags_R[r]:
                for j in range(0, ROW, 8):
                    store_u64(verbatim, v * ROW + j, load_u64(exps, j))
                v += 1
            else:
                for j in range(0, ROW // 2, 2):
                    a, b = U(pairs[two[j]]), U(pairs[two[j + 1]])
                    bits |= (a & code_bits) << pending
                    pending += a >> U(24)
                    bits |= (b & code_bits) << pending
                    pending += b >> U(24)
                    store_u64(stream, position, bits)
                    whole = pending >> U(3)
                    position += np.int64(whole)
                    bits >>= whole << U(3)
                    pending &= U(7)
            r += 1
            if (i + 1) % CHUNK_ROWS == 0 or i + 1 == height:
                store_u64(stream, position, bits)
                position += np.int64(pending + U(7) >> U(3))
                bits, pending = U(0), U(0)
                bytes_C[c] = position - start
                start = position
                c += 1
    return position


@compiled
def encode_palette(words, across, F, first, last, flags_R, pairs, sm, codes, verbatim, v):
    """Sections of these tiles in palette form.

    Shapes: pairs [65536] uint8, the two ranks of two values; codes [R x 32]; sm and verbatim as in
    `encode_huffman`.
    """
    exps = np.empty(ROW, np.uint8)
    two = exps.view(np.uint16)
    r = first_row(first, across, F)
    for tile in range(first, last):
        band = tile // across
        column = tile - band * across
        height = min(TILE_ROWS, F - band * TILE_ROWS)
        for i in range(height):
            place = (band * TILE_ROWS + i) * across + column
            prefetch(words, (place + 1) * ROW_BYTES)
            split_words(words, place * ROW_BYTES, exps, 0, sm, r * ROW)
            if flags_R[r]:
                for j in range(0, ROW, 8):
                    store_u64(verbatim, v * ROW + j, load_u64(exps, j))
                v += 1
                for j in range(0, ROW // 2, 8):
                    store_u64(codes, r * 32 + j, U(0))
            else:
                for j in range(ROW // 2):
                    codes[r * 32 + j] = pairs[two[j]]
            r += 1


@compiled
def encode_compact(words, palette, across, F, first, last, sm, codes, escapes, tiles, pairs):
    """Sections of these tiles in compact form; gives the number of their escapes.

    Shapes: palette [entries]; codes [R x 24]; escapes [those of these tiles]; tiles [tiles], the
    escapes of these tiles before each, and pairs [pairs].
    """
    exps = np.empty(ROW, np.uint8)
    r = first_row(first, across, F)
    pair = parts_before(first, across, F, 2)
    x = 0
    for tile in range(first, last):
        band = tile // across
        column = tile - band * across
        height = min(TILE_ROWS, F - band * TILE_ROWS)
        tiles[tile] = x
        for i in range(height):
            if i % 2 == 0:
                pairs[pair] = x - tiles[tile]
                pair += 1
            place = (band * TILE_ROWS + i) * across + column
            prefetch(words, (place + 1) * ROW_BYTES)
            split_words(words, place * ROW_BYTES, exps, 0, sm, r * ROW)
            p0 = p1 = p2 = known = U(0)
            for rank in range(palette.size):
                same = equal_bits(exps, 0, palette[rank])
                known |= same
                p0 |= same & (U(0) - U(rank & 1))
                p1 |= same & (U(0) - U(rank >> 1 & 1))
                p2 |= same & (U(0) - U(rank >> 2))
            escaped = ~known
            store_u64(codes, r * 24, p0 | escaped)
            store_u64(codes, r * 24 + 8, p1 | escaped)
            store_u64(codes, r * 24 + 16, p2 | escaped)
            while escaped:
                escapes[x] = exps[lowest_bit(escaped)]
                x += 1
                escaped &= escaped - U(1)
            r += 1
    return x


@compiled
def symbols_at_once(symbol_I, length_I):
    """For every number of 12 bits the symbols that it holds whole, up to six.

    A symbol a byte, the first in the lowest; the bits of all in byte 6, how many in byte 7.
    """
    table = np.zeros(symbol_I.size, np.uint64)
    for index in range(symbol_I.size):
        used = count = 0
        entry = U(0)
        while count < 6:
            place = index >> used
            length = np.int64(length_I[place])
            if length == 0 or used + length > MAX_CODE_BITS:
                break
            entry |= U(symbol_I[place]) << U(8 * count)
            used += length
            count += 1
        table[index] = entry | U(used) << U(48) | U(count) << U(56)
    return table


@compiled
def decode_chunk(stream, bit, table, single, out, at, end):
    """Symbols of a chunk into out[at:end]; gives the bit behind its last code."""
    window = U((1 << MAX_CODE_BITS) - 1)
    while at < end:
        index = load_u64(stream, bit >> 3) >> U(bit & 7) & window
        entry = table[index]
        count = np.int64(entry >> U(56))
        if at + count <= end:
            store_u64(out, at, entry)
            at += count
            bit += np.int64(entry >> U(48) & U(255))
        else:
            out[at] = entry & U(255)
            at += 1
            bit += np.int64(single[index])
    return bit


@compiled
def decode_pair(stream, bit_a, bit_b, table, out, a, b, num):
    """Symbols of two chunks into out[a:], out[b:] while `num` symbols each are not reached.

    Gives the bits behind and the places. Each lookup waits for the one before; two chunks at a time
    hide half of it.
    """
    window = U((1 << MAX_CODE_BITS) - 1)
    byte = U(255)
    end_a, end_b = a + num - 24, b + num - 24
    while a <= end_a and b <= end_b:
        word_a = load_u64(stream, bit_a >> 3) >> U(bit_a & 7)
        word_b = load_u64(stream, bit_b >> 3) >> U(bit_b & 7)
        for _ in range(4):
            entry_a, entry_b = table[word_a & window], table[word_b & window]
            store_u64(out, a, entry_a)
            store_u64(out, b, entry_b)
            used_a, used_b = entry_a >> U(48) & byte, entry_b >> U(48) & byte
            word_a >>= used_a
            word_b >>= used_b
            bit_a += np.int64(used_a)
            bit_b += np.int64(used_b)
            a += np.int64(entry_a >> U(56))
            b += np.int64(entry_b >> U(56))
    return bit_a, bit_b, a, b


@compiled
def decode_huffman(
    stream,
    tail,
    tail_first,
    first_C,
    nibbles,
    across,
    F,
    first,
    last,
    flags_R,
    verbatim,
    v,
    sm,
    table,
    single,
    out,
    stride,
    column0,
):
    """Words of these tiles; gives the first tile with a chunk that holds other codes, or -1.

    Shapes: stream uint8, and from its byte `tail_first` on again with `CHUNK_READ` zeros behind it,
    `tail`; first_C [C + 1] int64, ascending in it; table [4096] of `symbols_at_once`, single [4096]
    the length of the first symbol of a complete code; sm [R x 64]; verbatim rows flat, `v` of them
    before; out of the tiles from `column0` on, `stride` words a row.
    """
    exps = np.empty(4 * SPACED, np.uint8)
    bits = np.zeros(4, np.int64)
    places = np.zeros(4, np.int64)
    symbols = np.zeros(4, np.int64)
    r = first_row(first, across, F)
    c = parts_before(first, across, F, CHUNK_ROWS)
    for tile in range(first, last):
        band = tile // across
        column = tile - band * across
        height = min(TILE_ROWS, F - band * TILE_ROWS)
        chunks = (height + CHUNK_ROWS - 1) // CHUNK_ROWS
        for k in range(4):
            symbols[k] = 0
            places[k] = k * SPACED
        for i in range(height):
            symbols[i // CHUNK_ROWS] += ROW * (1 - flags_R[r + i])
        ahead = first_C[c + chunks - 1] + CHUNK_READ > stream.size
        source = tail if ahead else stream
        origin = tail_first if ahead else 0
        for k in range(chunks):
            bits[k] = 8 * (first_C[c + k] - origin)
        for k in range(0, chunks - 1, 2):
            bits[k], bits[k + 1], places[k], places[k + 1] = decode_pair(
                *(source, bits[k], bits[k + 1], table, exps, places[k], places[k + 1]),
                min(symbols[k], symbols[k + 1]),
            )
        for k in range(chunks):
            end = k * SPACED + symbols[k]
            bit = decode_chunk(source, bits[k], table, single, exps, places[k], end)
            if ((bit + 7) >> 3) + origin != first_C[c + k + 1]:
                return tile
            places[k] = k * SPACED
        c += chunks
        for i in range(height):
            at = band * TILE_ROWS + i
            k = i // CHUNK_ROWS
            if nibbles:
                join_nibbles(exps, places[k], out, at * stride + (column - column0) * 16)
                places[k] += ROW
            else:
                to = at * stride + (column - column0) * ROW
                if flags_R[r]:
                    join_words(verbatim, v * ROW, sm, r * ROW, out, to)
                    v += 1
                else:
                    join_words(exps, places[k], sm, r * ROW, out, to)
                    places[k] += ROW
            r += 1
    return -1


@compiled
def decode_palette(
    codes, values, across, F, first, last, flags_R, verbatim, v, sm, out, stride, column0
):
    """Words of these tiles; gives -1.

    Shapes: codes [R x 32]; values [256] uint16, the two exponents of a byte of codes; the rest as
    in `decode_huffman`.
    """
    exps = np.empty(ROW, np.uint8)
    two = exps.view(np.uint16)
    r = first_row(first, across, F)
    for tile in range(first, last):
        band = tile // across
        column = tile - band * across
        height = min(TILE_ROWS, F - band * TILE_ROWS)
        for i in range(height):
            to = (band * TILE_ROWS + i) * stride + (column - column0) * ROW
            if flags_R[r]:
                join_words(verbatim, v * ROW, sm, r * ROW, out, to)
                v += 1
            else:
                for j in range(ROW // 2):
                    two[j] = values[codes[r * 32 + j]]
                join_words(exps, 0, sm, r * ROW, out, to)
            r += 1
    return -1


@compiled
def decode_compact(
    codes,
    values,
    across,
    F,
    first,
    last,
    tile_first,
    pair_first,
    escapes,
    sm,
    out,
    stride,
    column0,
):
    """Words of these tiles; gives the first tile whose codes and escapes disagree, or -1.

    Shapes: codes [R x 24]; values [8]; tile_first [tiles + 1], pair_first [pairs] and escapes [X]
    of the whole tensor; the rest as in `decode_huffman`.
    """
    exps = np.empty(ROW, np.uint8)
    r = first_row(first, across, F)
    pair = parts_before(first, across, F, 2)
    for tile in range(first, last):
        band = tile // across
        column = tile - band * across
        height = min(TILE_ROWS, F - band * TILE_ROWS)
        x = np.int64(tile_first[tile])
        end = np.int64(tile_first[tile + 1])
        if end > escapes.size:
            return tile
        for i in range(height):
            if i % 2 == 0:
                if x - np.int64(tile_first[tile]) != np.int64(pair_first[pair]):
                    return tile
                pair += 1
            p0 = load_u64(codes, r * 24)
            p1 = load_u64(codes, r * 24 + 8)
            p2 = load_u64(codes, r * 24 + 16)
            select_bits(p0, p1, p2, values, 0, exps, 0)
            escaped = p0 & p1 & p2
            while escaped:
                if x >= end:
                    return tile
                exps[lowest_bit(escaped)] = escapes[x]
                x += 1
                escaped &= escaped - U(1)
            to = (band * TILE_ROWS + i) * stride + (column - column0) * ROW
            join_words(exps, 0, sm, r * ROW, out, to)
            r += 1
        if x != end:
            return tile
    return -1
