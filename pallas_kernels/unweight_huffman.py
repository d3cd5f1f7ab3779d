"""Length-limited canonical Huffman codes, and streams of independent chunks in NumPy.

The stream of a chunk holds its symbols' codes one after the other, least significant bit first, and
ends with zero bits up to a whole byte. Codes lie bit-reversed, so that a decoder that looks at the
next bits as a number sees the code in the lowest ones, as in deflate.

Source: Larmore and Hirschberg 1990 (package-merge); RFC 1951, section 3.2.2 (canonical codes).
"""

from collections.abc import Sequence

import numpy as np


def code_lengths(counts: Sequence[int], max_bits: int) -> list[int]:
    """Bits of each symbol in an optimal code of at most `max_bits`, 0 where the count is 0.

    One symbol alone takes one bit, so that every symbol is at least one bit of a stream. Of equally
    good codes it is the one in which packages come after symbols and later symbols after earlier
    ones of the same count; any other is as valid in a file.
    """
    used = [symbol for symbol, count in enumerate(counts) if count]
    lengths = [0] * len(counts)
    if len(used) == 1:
        lengths[used[0]] = 1
        return lengths
    if len(used) > 1 << max_bits:
        raise ValueError(f"max_bits: expected codes for {len(used)} symbols, got {max_bits} bits")
    symbols: list[tuple[int, tuple[int, ...]]] = [(int(counts[s]), (s,)) for s in used]
    symbols.sort()
    items = symbols
    for _ in range(max_bits - 1):
        pairs = zip(items[0::2], items[1::2], strict=False)
        packages = [(a + b, inside_a + inside_b) for (a, inside_a), (b, inside_b) in pairs]
        items = sorted(symbols + packages, key=lambda item: item[0])
    for _, inside in items[: 2 * len(used) - 2]:
        for symbol in inside:
            lengths[symbol] += 1
    return lengths


def is_complete(lengths: Sequence[int]) -> bool:
    """Whether every sequence of bits decodes: a full code, one symbol of one bit, or no symbol."""
    used = [length for length in lengths if length]
    return not used or used == [1] or sum(2.0**-length for length in used) == 1.0


def canonical_codes(lengths: Sequence[int]) -> list[int]:
    """Bit-reversed codes: shorter ones first, symbols of one length in their own order."""
    codes = [0] * len(lengths)
    code = previous = 0
    for length, symbol in sorted((n, s) for s, n in enumerate(lengths) if n):
        code <<= length - previous
        codes[symbol] = int(f"{code:0{length}b}"[::-1], 2)
        code, previous = code + 1, length
    return codes


def decode_table(lengths: Sequence[int], bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Symbol and length of the first code in every number of `bits` bits.

    Shapes: [2**bits] uint8 each. The other half of the only symbol's code decodes as that symbol.
    """
    symbol_I, length_I = np.zeros((2, 1 << bits), np.uint8)
    only = sum(length > 0 for length in lengths) == 1
    for symbol, (length, code) in enumerate(zip(lengths, canonical_codes(lengths), strict=True)):
        if length:
            places = slice(None) if only else slice(code, None, 1 << length)
            symbol_I[places] = symbol
            length_I[places] = length
    return symbol_I, length_I


def encode_chunks(
    symbols_I: np.ndarray, chunk_I: np.ndarray, num_chunks: int, lengths: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Stream [W] uint8 and the bytes of every chunk [C].

    Shapes: symbols [I], and [I] ascending, the chunk that each belongs to; a chunk may have none.
    """
    code_I = np.array(canonical_codes(lengths), np.uint32)[symbols_I]
    length_I = np.array(lengths, np.int64)[symbols_I]
    bits_C = np.bincount(chunk_I, weights=length_I, minlength=num_chunks).astype(np.int64)
    bytes_C = -(-bits_C // 8)
    end_I = np.cumsum(length_I)
    # A symbol starts where the chunks before end, behind the symbols of its own chunk.
    padding_C = np.cumsum(8 * bytes_C) - 8 * bytes_C - (np.cumsum(bits_C) - bits_C)
    start_I = end_I - length_I + padding_C[chunk_I]
    bits = np.zeros(8 * int(bytes_C.sum()), np.uint8)
    for bit in range(max(lengths, default=0)):
        has = length_I > bit
        bits[start_I[has] + bit] = (code_I[has] >> np.uint32(bit)) & np.uint32(1)
    return np.packbits(bits, bitorder="little"), bytes_C


def decode_chunks(
    stream_W: np.ndarray, bytes_C: np.ndarray, symbols_C: np.ndarray, lengths: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Symbols [I] uint8 of all chunks in order, and whether each chunk's bytes were used up [C].

    Shapes: bytes and number of symbols of every chunk [C]. Reads nothing behind the stream.
    """
    bits = max(lengths, default=0)
    symbol_table, length_table = decode_table(lengths, bits)
    padded = np.concatenate([stream_W, np.zeros(4, np.uint8)]).astype(np.uint32)
    last = padded.size - 4
    start_C = np.cumsum(bytes_C) - bytes_C
    position_C = 8 * start_C
    steps = int(symbols_C.max(initial=0))
    out_CS = np.zeros((len(bytes_C), steps), np.uint8)
    for step in range(steps):
        byte_C = np.minimum(position_C >> 3, last)
        window_C = padded[byte_C] | padded[byte_C + 1] << 8 | padded[byte_C + 2] << 16
        index_C = window_C >> (position_C & 7).astype(np.uint32) & np.uint32((1 << bits) - 1)
        out_CS[:, step] = symbol_table[index_C]
        position_C = position_C + np.where(step < symbols_C, length_table[index_C], 0)
    used_C = -(-position_C // 8) - start_C
    return out_CS[np.arange(steps) < symbols_C[:, None]], used_C == bytes_C
