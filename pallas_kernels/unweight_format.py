"""The Unweight format: lossless compression of weights, in NumPy, the oracle of faster forms.

A bfloat16 weight is a byte of sign and mantissa, stored as it is, and an exponent, coded.
Exponents that are among the 16 most frequent of the tensor, its palette, have a code; a row of 64
weights with any other is stored verbatim. docs/unweight.md specifies every byte.

Weights are ordered by tiles of 64 x 64, so that the part of a matrix whose borders are multiples
of 64 is whole tiles. Axes: R rows of 64 weights in that order, X weights of a row, C chunks of up
to 16 rows of a tile, I symbols one after the other.

Source: Unweight (Cloudflare, Cf-TR-2026.04): the split, the palette of 16, rows of 64 that fall
back whole, Huffman and 4-bit forms. Tiles, chunks, the compact form and all bytes are our own.
"""

import dataclasses
from collections.abc import Buffer

import numpy as np
import xxhash

from pallas_kernels.unweight_blob import (
    COMPACT_PALETTE,
    DTYPES,
    ESCAPE,
    HASH_AT,
    HEADER_BYTES,
    NIBBLES,
    PALETTE,
    TILE_ROWS,
    Corrupt,
    TileOrder,
    UnweightHeader,
    check_blob,
    check_words,
    hash_blob,
)
from pallas_kernels.unweight_huffman import code_lengths, decode_chunks, encode_chunks


@dataclasses.dataclass(frozen=True)
class UnweightOptions:
    """What an ablation may vary; files have the defaults."""

    row: int = 64  # weights that are stored verbatim together
    palette: int = PALETTE  # of the Huffman and palette forms
    chunk_rows: int = 16
    max_code_bits: int = 12

    def __post_init__(self) -> None:
        allowed = {
            "row": (8, 16, 32, 64, 128),
            "palette": range(1, PALETTE + 1),
            "chunk_rows": (1, 2, 4, 8, 16, 32, 64),
            "max_code_bits": range(4, 16),
        }
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                raise ValueError(
                    f"UnweightOptions.{name}: expected one of {list(values)}, "
                    f"got {getattr(self, name)!r}"
                )


def split_exponents(words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Exponents and bytes of sign and mantissa, uint8 each, of bfloat16 words."""
    exponents = (words >> np.uint16(7)).astype(np.uint8)
    sign = words >> np.uint16(8) & np.uint16(0x80)
    return exponents, (sign | words & np.uint16(0x7F)).astype(np.uint8)


def join_exponents(exponents: np.ndarray, sign_mantissa: np.ndarray) -> np.ndarray:
    """The inverse of `split_exponents`."""
    wide = sign_mantissa.astype(np.uint16)
    sign, mantissa = (wide & np.uint16(0x80)) << np.uint16(8), wide & np.uint16(0x7F)
    return sign | exponents.astype(np.uint16) << np.uint16(7) | mantissa


def choose_palette(counts: np.ndarray, form: str, entries: int = PALETTE) -> tuple[int, ...]:
    """The most frequent values first, smaller ones first of equally frequent ones."""
    entries = COMPACT_PALETTE if form == "compact" else entries
    order = np.argsort(-counts.astype(np.int64), kind="stable")[:entries]
    return tuple(int(value) for value in order if counts[value])


def unweight_encode(
    words: np.ndarray, form: str = "huffman", options: UnweightOptions | None = None
) -> np.ndarray:
    """Blob [bytes] uint8 of a tensor of words, in raw form where another is not smaller.

    Raises: ValueError where the form or the data type of the words is none of the format.
    """
    dtype = check_words(words, form)
    options = options or UnweightOptions()
    order = TileOrder.of(words.shape, dtype, options.row, options.chunk_rows)
    words = np.ascontiguousarray(words, words.dtype.newbyteorder("<")).reshape(-1)
    raw = words.view(np.uint8)
    header = UnweightHeader(
        *("raw", dtype, order.num_weights, order.tiled, xxhash.xxh3_64(raw).intdigest()),
        row=options.row,
        chunk_rows=options.chunk_rows,
    )
    blob = np.concatenate([np.zeros(HEADER_BYTES, np.uint8), raw])
    if form != "raw" and words.size:
        own, sections = _coded(words, header, form, order, options)
        size = HEADER_BYTES + sum(section.nbytes for section in sections.values())
        if size < blob.size:
            places = own.sections(order, size)
            header, blob = own, np.zeros(size, np.uint8)
            for name, section in sections.items():
                little = section.astype(section.dtype.newbyteorder("<"), copy=False)
                blob[places[name]] = np.ascontiguousarray(little).reshape(-1).view(np.uint8)
    blob[:HEADER_BYTES] = np.frombuffer(header.pack(), np.uint8)
    blob[HASH_AT:HEADER_BYTES] = np.array([hash_blob(blob)], "<u8").view(np.uint8)
    return blob


def _coded(
    words_N: np.ndarray,
    header: UnweightHeader,
    form: str,
    order: TileOrder,
    options: UnweightOptions,
) -> tuple[UnweightHeader, dict[str, np.ndarray]]:
    """Header and sections in one of the coded forms."""
    own: dict[str, np.ndarray] = {}
    if header.dtype == "I32":
        shifts = np.arange(0, 32, 4, dtype=np.uint32)
        symbols_N = (words_N.view("<u4")[:, None] >> shifts & np.uint32(15)).astype(np.uint8)
        symbols_N = symbols_N.reshape(-1)
    else:
        if header.dtype == "F32":
            own["low"] = words_N.view("<u2")[0::2]
            words_N = words_N.view("<u2")[1::2]
        rows_RX = order.to_rows(words_N)
        sign_mantissa_RX = split_exponents(rows_RX)[1]
        own["sign_mantissa"] = sign_mantissa_RX.reshape(-1)[: order.num_weights]
        symbols_N = split_exponents(words_N)[0]
    symbols_RX = order.to_rows(symbols_N)
    counts = np.bincount(symbols_RX.reshape(-1), minlength=256)
    palette = choose_palette(counts, form, options.palette)
    absent = ESCAPE if form == "compact" else PALETTE
    rank = np.full(256, absent, np.uint8)
    rank[list(palette)] = np.arange(len(palette), dtype=np.uint8)
    rank_RX = rank[symbols_RX]
    header = dataclasses.replace(header, form=form, palette=palette)
    if form == "compact":
        escaped_RX = rank_RX == ESCAPE
        escapes_R = escaped_RX.sum(1)
        own["tile_first"] = _exclusive(escapes_R, order.parts(TILE_ROWS)).astype(np.uint32)
        pairs = _exclusive(escapes_R, order.parts(2))
        of_tile = np.repeat(own["tile_first"], -(-order.parts(TILE_ROWS) // 2))
        own["pair_first"] = (pairs - of_tile).astype(np.uint16)
        planes = [np.packbits(rank_RX >> bit & 1, 1, bitorder="little") for bit in range(3)]
        own["codes"] = np.stack(planes, axis=1)
        own["escapes"] = symbols_RX[escaped_RX]
        return header, own
    verbatim_R = (rank_RX == absent).any(axis=1)
    header = dataclasses.replace(header, verbatim_rows=int(verbatim_R.sum()))
    if verbatim_R.any():
        own["bitmask"] = np.packbits(verbatim_R, bitorder="little")
        own["verbatim"] = symbols_RX[verbatim_R]
    if form == "palette":
        rank_RX[verbatim_R] = 0
        own["codes"] = rank_RX[:, 0::2] | rank_RX[:, 1::2] << 4
        return header, own
    coded_I = rank_RX[~verbatim_R].reshape(-1)
    counts = np.bincount(coded_I, minlength=len(palette)).tolist()
    lengths = code_lengths(counts, options.max_code_bits)
    chunk_R = np.repeat(np.arange(order.chunks), order.parts(order.chunk_rows))
    chunk_I = np.repeat(chunk_R[~verbatim_R], order.row)
    own["stream"], bytes_C = encode_chunks(coded_I, chunk_I, order.chunks, lengths)
    own["chunk_bytes"] = bytes_C.astype(np.uint16)
    return dataclasses.replace(header, lengths=tuple(lengths)), own


def _exclusive(counts_R: np.ndarray, parts: np.ndarray) -> np.ndarray:
    """What is counted before each part of consecutive rows."""
    before = np.concatenate([[0], np.cumsum(counts_R)])
    return before[np.cumsum(parts) - parts]


def unweight_decode(blob: Buffer, shape: tuple[int, ...]) -> np.ndarray:
    """Tensor of words of a blob, to the bit what was encoded.

    Raises: Corrupt where a byte is not as it was written, or the shape is another.
    """
    data = np.frombuffer(blob, np.uint8)
    header = check_blob(data)
    order = header.order(shape)
    places = header.sections(order, data.size)
    sections = {name: data[place] for name, place in places.items()}
    word = np.dtype(dict(DTYPES)[header.dtype]).newbyteorder("<")
    N = order.num_weights
    if header.form == "raw":
        words = sections["words"].view(word)
    elif header.dtype == "I32":
        nibbles = order.from_rows(_symbols(header, order, sections)).reshape(-1, NIBBLES)
        packed = nibbles[:, 0::2] | nibbles[:, 1::2] << 4
        words = packed.reshape(-1).view(word)
    else:
        sign_mantissa = np.zeros(order.rows * order.row, np.uint8)
        sign_mantissa[:N] = sections["sign_mantissa"]
        symbols_RX = _symbols(header, order, sections)
        words = order.from_rows(join_exponents(symbols_RX, sign_mantissa.reshape(symbols_RX.shape)))
        if header.dtype == "F32":
            both = np.stack([sections["low"].view("<u2"), words], axis=1)
            words = both.astype("<u2").reshape(-1).view(word)
    words = np.ascontiguousarray(words.astype(word, copy=False))
    found = xxhash.xxh3_64(words.view(np.uint8)).intdigest()
    if found != header.source_hash:
        raise Corrupt(f"hash of the weights: expected {header.source_hash:016x}, got {found:016x}")
    return words.astype(word.newbyteorder("="), copy=False).reshape(shape)


def _symbols(
    header: UnweightHeader, order: TileOrder, sections: dict[str, np.ndarray]
) -> np.ndarray:
    """Exponents, or 4-bit values, [R, X] uint8 from the sections of a coded form."""
    shape = order.rows, order.row
    values = np.zeros(256, np.uint8)
    values[: len(header.palette)] = header.palette
    if header.form == "compact":
        planes = np.unpackbits(
            sections["codes"].reshape(order.rows, 3, -1), axis=2, bitorder="little"
        )
        code_RX = planes[:, 0] | planes[:, 1] << 1 | planes[:, 2] << 2
        escaped_RX = code_RX == ESCAPE
        if escaped_RX.sum() != sections["escapes"].size:
            raise Corrupt(
                f"escapes: expected {escaped_RX.sum()} bytes, got {sections['escapes'].size}"
            )
        symbols_RX = values[code_RX]
        symbols_RX[escaped_RX] = sections["escapes"]
        return symbols_RX
    verbatim_R = np.zeros(order.rows, bool)
    if header.verbatim_rows:
        bits = np.unpackbits(sections["bitmask"], count=order.rows, bitorder="little")
        verbatim_R = bits.astype(bool)
        if verbatim_R.sum() != header.verbatim_rows:
            raise Corrupt(f"bitmask: expected {header.verbatim_rows} rows, got {verbatim_R.sum()}")
    symbols_RX = np.zeros(shape, np.uint8)
    if header.form == "palette":
        codes = sections["codes"].reshape(order.rows, -1)
        symbols_RX[:, 0::2], symbols_RX[:, 1::2] = values[codes & 15], values[codes >> 4]
    else:
        bytes_C = sections["chunk_bytes"].view("<u2").astype(np.int64)
        if bytes_C.sum() != sections["stream"].size:
            raise Corrupt(f"stream: expected {bytes_C.sum()} bytes, got {sections['stream'].size}")
        chunk_R = np.repeat(np.arange(order.chunks), order.parts(order.chunk_rows))
        rows_C = np.bincount(chunk_R[~verbatim_R], minlength=order.chunks)
        ranks, used_up_C = decode_chunks(
            sections["stream"], bytes_C, rows_C * order.row, header.lengths
        )
        if not used_up_C.all():
            raise Corrupt(f"stream: chunk {int(used_up_C.argmin())} has codes of other bytes")
        symbols_RX[~verbatim_R] = values[ranks].reshape(-1, order.row)
    if header.verbatim_rows:
        symbols_RX[verbatim_R] = sections["verbatim"].reshape(-1, order.row)
    return symbols_RX
