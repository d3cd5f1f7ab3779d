"""Blobs of the Unweight format, fast: byte for byte those of `pallas_kernels.unweight_encode`."""

import dataclasses
import math
from collections.abc import Buffer

import numpy as np
import xxhash

from jinfire.unweight import kernels
from jinfire.unweight.coding import NIBBLE_WORDS, OPTIONS, Coding, count_symbols, fill, plan
from jinfire.unweight.tiles import as_input, on_threads, on_tiles, threads, verbatim_before
from pallas_kernels import (
    HASH_AT,
    HEADER_BYTES,
    Corrupt,
    TileOrder,
    UnweightHeader,
    check_blob,
    check_words,
    decode_table,
    hash_blob,
    pack_nibbles,
    unpack_nibbles,
)

WORDS = {"BF16": np.dtype("<u2"), "F32": np.dtype("<u4"), "I32": np.dtype("<i4")}
ROW, TILE_ROWS = kernels.ROW, kernels.TILE_ROWS
NOTHING = np.empty(0, np.uint8)
NOTHING.flags.writeable = False
BYTES = np.arange(256)
MAX_CHUNK_BYTES = kernels.CHUNK_ROWS * ROW * kernels.MAX_CODE_BITS // 8


def encode(words: np.ndarray, form: str = "huffman", jobs: int | None = None) -> np.ndarray:
    """Blob [bytes] uint8 of a tensor of words, in raw form where another is not smaller.

    `jobs` threads, as many as there are processors where it is None.

    Raises: ValueError where the form or the data type of the words is none of the format.
    """
    dtype = check_words(words, form)
    order = TileOrder.of(words.shape, dtype)
    words = np.ascontiguousarray(words, WORDS[dtype]).reshape(-1)
    source = xxhash.xxh3_64(words.view(np.uint8)).intdigest()
    header = UnweightHeader("raw", dtype, order.num_weights, order.tiled, source)
    blob = None
    if form != "raw" and words.size:
        coding = plan(_high(words, dtype), order, form, dtype == "I32", jobs)
        blob, header = _coded_blob(coding, header, words, jobs)
    if blob is None:
        blob = np.empty(HEADER_BYTES + words.nbytes, np.uint8)
        blob[HEADER_BYTES:] = words.view(np.uint8)
    blob[:HEADER_BYTES] = np.frombuffer(header.pack(), np.uint8)
    blob[HASH_AT:HEADER_BYTES] = np.array([hash_blob(blob)], "<u8").view(np.uint8)
    return blob


def decode(blob: Buffer, shape: tuple[int, ...], jobs: int | None = None) -> np.ndarray:
    """Tensor of words of a blob, to the bit what was encoded.

    Raises: Corrupt where a byte is not as it was written, or the shape is another.
    """
    check(blob)
    columns = shape[-1] if shape else 1
    whole = slice(0, math.prod(shape[:-1])), slice(0, columns)
    return decode_part(blob, (whole[0].stop, columns), whole, jobs, tensor=shape).reshape(shape)


def check(blob: Buffer) -> UnweightHeader:
    """Header of a blob that is as it was written, in the sizes of files.

    Raises: Corrupt.
    """
    return _in_sizes_of_files(check_blob(blob))


def decode_part(
    blob: Buffer,
    shape: tuple[int, int],
    part: tuple[slice, slice],
    jobs: int | None = None,
    tensor: tuple[int, ...] | None = None,
) -> np.ndarray:
    """Words of a matrix's rows and columns from the tiles that have them.

    `shape` may have the leading axes of the tensor as one; `tensor` is its own shape where that has
    fewer than two axes. Bytes of other tiles are not read, so the hash is not checked; `check` does
    that.

    Raises: Corrupt where header, sections or the codes of these tiles do not fit together.
    """
    for name, size, chosen in zip(("rows", "columns"), shape, part, strict=True):
        if not 0 <= chosen.start <= chosen.stop <= size or chosen.step not in (None, 1):
            raise ValueError(f"part: expected {name} within 0 to {size}, got {chosen}")
    data = as_input(blob)
    header = _in_sizes_of_files(UnweightHeader.parse(data))
    order = header.order(shape if tensor is None else tensor)
    places = header.sections(order, data.size)
    sections = {name: data[place] for name, place in places.items()}
    (F, D), (rows, columns) = shape, part
    if header.form == "raw":
        words = sections["words"].view(WORDS[header.dtype]).reshape(F, D)[rows, columns]
        return np.array(words, words.dtype.newbyteorder("="))
    per_word = 8 if header.dtype == "I32" else 1
    if not order.tiled:
        first, last = rows.start * D * per_word, rows.stop * D * per_word
        band0, band1 = first // ROW // TILE_ROWS, -(-last // (ROW * TILE_ROWS))
        high = _decode_tiles(header, order, sections, (band0, band1), (0, 1), jobs)
        start = rows.start * D - band0 * TILE_ROWS * ROW // per_word
        high = high.reshape(-1).view(np.int32 if per_word == 8 else np.uint16)
        words = high[start : start + (rows.stop - rows.start) * D].reshape(-1, D)[:, columns]
    else:
        wide = ROW // per_word
        bands = rows.start // TILE_ROWS, -(-rows.stop // TILE_ROWS)
        tiles = columns.start // wide, -(-columns.stop // wide)
        high = _decode_tiles(header, order, sections, bands, tiles, jobs)
        high = high.view(np.int32 if per_word == 8 else np.uint16)
        first, column = bands[0] * TILE_ROWS, tiles[0] * wide
        words = high[
            rows.start - first : rows.stop - first, columns.start - column : columns.stop - column
        ]
    if header.dtype == "F32":
        low = sections["low"].view("<u2").reshape(F, D)[rows, columns]
        words = words.astype(np.uint32) << np.uint32(16)
        words |= low
    return words


def exponent_entropy(words: np.ndarray, jobs: int | None = None) -> float:
    """Entropy of the exponents, or of the 4-bit values of int32 words, in bits; 0 of nothing."""
    dtype = check_words(words, "huffman")
    words = np.ascontiguousarray(words, WORDS[dtype]).reshape(-1)
    counts = count_symbols(_high(words, dtype), dtype == "I32", jobs)
    share = counts[counts > 0] / max(1, counts.sum())
    return float(-(share * np.log2(share)).sum()) + 0.0


def _coded_blob(
    coding: Coding, raw: UnweightHeader, words: np.ndarray, jobs: int | None
) -> tuple[np.ndarray | None, UnweightHeader]:
    """Blob in the coding's form with room for a header, None where the raw one is no larger."""
    order, form = coding.order, coding.form
    header = dataclasses.replace(
        *(raw,),
        form=form,
        palette=coding.palette,
        lengths=coding.lengths,
        verbatim_rows=coding.verbatim_rows,
    )
    # The sections without stream and escapes, which are last but for the low halves.
    fixed = header.section_bytes(order)
    low = fixed.pop("low", 0)
    size = HEADER_BYTES + sum(fixed.values()) + low + coding.escapes
    if size >= HEADER_BYTES + words.nbytes:
        return None, raw
    # Codes that make the blob as large as a raw one need no room.
    blob = np.empty(HEADER_BYTES + words.nbytes if form == "huffman" else size, np.uint8)
    sections, at = {}, HEADER_BYTES
    for name, length in fixed.items():
        sections[name] = blob[at : at + length]
        at += length
    arrays = dict(sections)
    if form == "huffman":
        arrays["chunk_bytes"] = np.empty(order.chunks, np.int64)
    if form == "compact":
        arrays["tile_first"] = np.empty(order.tiles, np.uint32)
        arrays["pair_first"] = np.empty(order.num_parts(2), np.uint16)
    if form == "palette" and "verbatim" in arrays:
        arrays["verbatim"] = np.empty(coding.verbatim_rows * ROW, np.uint8)
    if "sign_mantissa" in arrays and order.rows * ROW != order.num_weights:
        arrays["sign_mantissa"] = np.empty(order.rows * ROW, np.uint8)
    pieces = fill(coding, arrays, jobs)
    size = at + sum(piece.size for piece in pieces) + low
    if size >= HEADER_BYTES + words.nbytes:
        return None, raw
    if form == "palette" and coding.verbatim_rows:
        # The low halves lie where the codes of these rows would.
        symbols_VX = arrays["verbatim"].reshape(-1, ROW)
        codes_R = sections["codes"].reshape(-1, ROW // 2)
        codes_R[coding.flags_R != 0] = pack_nibbles(symbols_VX & 15)
        sections["verbatim"][:] = pack_nibbles(symbols_VX >> 4).reshape(-1)
    if coding.verbatim_rows:
        sections["bitmask"][:] = np.packbits(coding.flags_R, bitorder="little")
    for name, kind in (("chunk_bytes", "<u2"), ("tile_first", "<u4"), ("pair_first", "<u2")):
        if name in sections:
            sections[name][:] = arrays[name].astype(kind).view(np.uint8)
    if "sign_mantissa" in sections and arrays["sign_mantissa"] is not sections["sign_mantissa"]:
        sections["sign_mantissa"][:] = arrays["sign_mantissa"][: order.num_weights]
    for piece in pieces:
        blob[at : at + piece.size] = piece
        at += piece.size
    if low:
        blob[at : at + low].view("<u2")[:] = words.view("<u2")[0::2]
    return blob[:size], header


def _decode_tiles(
    header: UnweightHeader,
    order: TileOrder,
    sections: dict[str, np.ndarray],
    bands: tuple[int, int],
    columns: tuple[int, int],
    jobs: int | None,
) -> np.ndarray:
    """Words of a rectangle of tiles, uint16 [rows, words of a row].

    Bands are consecutive in every section, so they are a matrix of their own. What lies before
    them is counted, not decoded.
    """
    nibbles = header.dtype == "I32"
    width = (NIBBLE_WORDS if nibbles else ROW) * (columns[1] - columns[0])
    first_F = bands[0] * TILE_ROWS
    rows_F = min(order.F, bands[1] * TILE_ROWS) - first_F
    out = np.empty((max(rows_F, 0), width), np.uint16)
    if not out.size:
        return out
    part = dataclasses.replace(order, F=rows_F)
    before = dataclasses.replace(order, F=first_F)
    rows = slice(before.rows, before.rows + part.rows)
    flags_R, verbatim = _verbatim(header, order, sections, rows)
    sign_mantissa = sections.get("sign_mantissa", NOTHING)[rows.start * ROW : rows.stop * ROW]
    if not nibbles and sign_mantissa.size != part.rows * ROW:
        padded = np.zeros(part.rows * ROW, np.uint8)
        padded[: sign_mantissa.size] = sign_mantissa
        sign_mantissa = padded
    sign_mantissa = as_input(sign_mantissa)
    geometry = part.across, part.F
    target = out.reshape(-1), width, columns[0]
    values = np.zeros(16, np.uint8)
    values[: len(header.palette)] = header.palette

    if header.form == "huffman":
        stream, first_C = _chunks(sections, before.chunks, part.chunks)
        symbol_I, length_I = decode_table(header.lengths, kernels.MAX_CODE_BITS)
        table = kernels.symbols_at_once(values[symbol_I], length_I)
        # A decoder reads ahead; behind the last tile's chunks it gets zeros.
        tail_first = max(0, stream.size - kernels.CHUNK_READ - 3 * MAX_CHUNK_BYTES)
        tail = np.concatenate([stream[tail_first:], np.zeros(kernels.CHUNK_READ, np.uint8)])
        codes = stream, as_input(tail), tail_first, first_C

        def work(first: int, last: int) -> int:
            return kernels.decode_huffman(
                *(*codes, nibbles, *geometry, first, last, flags_R, verbatim),
                *(verbatim_before(flags_R, first, part), sign_mantissa, table, length_I),
                *target,
            )
    elif header.form == "palette":
        codes_R = as_input(sections["codes"][rows.start * 32 : rows.stop * 32])
        low = unpack_nibbles(codes_R.reshape(-1, ROW // 2)[flags_R != 0])
        verbatim = as_input(low | unpack_nibbles(verbatim.reshape(-1, ROW // 2)) << 4)
        pairs = values.astype(np.uint16)[BYTES & 15] | values.astype(np.uint16)[BYTES >> 4] << 8

        def work(first: int, last: int) -> int:
            return kernels.decode_palette(
                *(codes_R, pairs, *geometry, first, last, flags_R, verbatim),
                *(verbatim_before(flags_R, first, part), sign_mantissa, *target),
            )
    else:
        codes_R = as_input(sections["codes"][rows.start * 24 : rows.stop * 24])
        escapes = as_input(sections["escapes"])
        tile_first = sections["tile_first"].view("<u4")[before.tiles :][: part.tiles + 1]
        if before.tiles + part.tiles == order.tiles:
            tile_first = np.append(tile_first, escapes.size)
        pair_first = sections["pair_first"].view("<u2")[before.num_parts(2) :][: part.num_parts(2)]
        index = tile_first.astype(np.uint32), pair_first.astype(np.uint16)

        def work(first: int, last: int) -> int:
            return kernels.decode_compact(
                *(codes_R, values, *geometry, first, last, *index, escapes),
                *(sign_mantissa, *target),
            )

    if columns == (0, order.across):
        results = on_tiles(work, part, jobs)
    else:
        starts = range(0, part.tiles, part.across)
        runs = [(start + columns[0], start + columns[1]) for start in starts]
        results = on_threads(work, runs, threads(rows_F * width, jobs))
    for tile in results:
        if tile >= 0:
            raise Corrupt(f"codes: those of tile {before.tiles + tile} are not what was written")
    return out


def _verbatim(
    header: UnweightHeader, order: TileOrder, sections: dict[str, np.ndarray], rows: slice
) -> tuple[np.ndarray, np.ndarray]:
    """Flags of some rows, from a multiple of 64 on, and what the section has of verbatim ones."""
    num_rows = rows.stop - rows.start
    if not header.verbatim_rows:
        return np.zeros(num_rows, np.uint8), NOTHING
    bitmask = sections["bitmask"]
    before = int(np.bitwise_count(bitmask[: rows.start // 8]).sum())
    flags_R = np.unpackbits(bitmask[rows.start // 8 :], count=num_rows, bitorder="little")
    end = before + int(np.count_nonzero(flags_R))
    if end > header.verbatim_rows or (rows.stop == order.rows and end < header.verbatim_rows):
        raise Corrupt(f"bitmask: expected {header.verbatim_rows} rows, got {end}")
    width = ROW // 2 if header.form == "palette" else ROW
    return flags_R, as_input(sections["verbatim"][before * width : end * width])


def _chunks(
    sections: dict[str, np.ndarray], before: int, chunks: int
) -> tuple[np.ndarray, np.ndarray]:
    """Stream of some chunks, and where each of them begins and the last ends: int64 [C + 1]."""
    all_bytes = sections["chunk_bytes"].view("<u2")
    total, most = int(all_bytes.sum(dtype=np.int64)), int(all_bytes.max())
    if total != sections["stream"].size or most > MAX_CHUNK_BYTES:
        raise Corrupt(
            f"chunks: expected {sections['stream'].size} bytes in all and at most "
            f"{MAX_CHUNK_BYTES} in one, got {total} and {most}"
        )
    start = int(all_bytes[:before].sum(dtype=np.int64))
    first_C = np.zeros(chunks + 1, np.int64)
    np.cumsum(all_bytes[before : before + chunks], out=first_C[1:])
    return as_input(sections["stream"][start : start + int(first_C[-1])]), first_C


def _high(words: np.ndarray, dtype: str) -> np.ndarray:
    """The uint16 words that are coded: of float32 the high halves."""
    return np.ascontiguousarray(words.view("<u2")[1::2]) if dtype == "F32" else words.view("<u2")


def _in_sizes_of_files(header: UnweightHeader) -> UnweightHeader:
    for name in ("row", "chunk_rows"):
        if getattr(header, name) != getattr(OPTIONS, name):
            raise Corrupt(
                f"{name}: expected {getattr(OPTIONS, name)} in a file, got {getattr(header, name)}"
            )
    if max(header.lengths, default=0) > OPTIONS.max_code_bits:
        raise Corrupt(f"code lengths: expected at most {OPTIONS.max_code_bits}, got others")
    return header
