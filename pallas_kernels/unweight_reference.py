"""Coded matrices in plain NumPy: coding for argument sets, and decompression to compare with.

Slow and short on purpose. Codes and streams are those of `pallas_kernels/unweight_huffman.py`.
"""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from pallas_kernels.unweight_format import join_exponents, split_exponents
from pallas_kernels.unweight_huffman import code_lengths, decode_chunks, encode_chunks
from pallas_kernels.unweight_matrix import (
    CHUNK_ROWS,
    COMPACT,
    MAX_BITS,
    PALETTE,
    ROW,
    MatrixTiling,
    UnweightMatrix,
)

# -- coding


def pack(words_FD: np.ndarray, form: str) -> UnweightMatrix:
    """Coded matrix of words [F, D] uint16."""
    F, D = words_FD.shape
    tiling = MatrixTiling(F, D)
    words = tiling.to_rows(words_FD)
    exponents, sign_mantissa = split_exponents(words)
    if form == "exponent":
        arrays = {"exponents": exponents}
    elif form == "compact":
        arrays = _pack_compact(tiling, exponents)
    else:
        arrays = _pack_palette(tiling, exponents, form)
    return UnweightMatrix(form, (F, D), sign_mantissa, **arrays).check()


def _by_frequency(exponents: np.ndarray) -> np.ndarray:
    """Exponents that occur, most frequent first, the smaller first of those alike."""
    counts = np.bincount(exponents.reshape(-1), minlength=256)
    order = np.argsort(-counts, kind="stable")
    return order[counts[order] > 0]


def _palette(exponents: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """The palette of 16 and the index of every exponent in it; `size` where it has none."""
    frequent = _by_frequency(exponents)[:size]
    palette = np.zeros(PALETTE, np.uint8)
    palette[: len(frequent)] = frequent
    index = np.full(256, size)
    index[frequent] = np.arange(len(frequent))
    return palette, index[exponents]


def _pack_palette(tiling: MatrixTiling, exponents: np.ndarray, form: str) -> dict[str, np.ndarray]:
    palette, index = _palette(exponents, PALETTE)
    verbatim = (index == PALETTE).any(axis=1)
    (rows,) = np.nonzero(verbatim)
    index[rows] = 0
    tiles = np.bincount(tiling.tile_ids(rows), minlength=tiling.tiles)
    arrays = {
        "palette": palette,
        "verbatim_row": rows.astype(np.int32),
        "verbatim": exponents[rows],
        "verbatim_first": np.append(0, np.cumsum(tiles)).astype(np.int32),
    }
    if form == "palette":
        arrays["codes"] = (index[:, 0::2] | index[:, 1::2] << 4).astype(np.uint8)
        return arrays
    symbols = index[~verbatim].reshape(-1)
    lengths = code_lengths(np.bincount(symbols, minlength=PALETTE).tolist(), MAX_BITS)
    borders = tiling.chunk_rows()
    chunks = np.repeat(np.arange(tiling.chunks), np.diff(borders))
    stream, sizes = encode_chunks(
        symbols, np.repeat(chunks[~verbatim], ROW), tiling.chunks, lengths
    )
    here = ~verbatim << np.arange(tiling.rows) - borders[chunks]
    return arrays | {
        "stream": np.pad(stream, (0, -len(stream) % 4)).view("<u4").astype(np.uint32),
        "chunk_first": (np.cumsum(sizes) - sizes).astype(np.uint32),
        "coded": np.bincount(chunks, here, tiling.chunks).astype(np.uint16),
        "lengths": np.asarray(lengths, np.uint8),
    }


def _pack_compact(tiling: MatrixTiling, exponents: np.ndarray) -> dict[str, np.ndarray]:
    palette, index = _palette(exponents, COMPACT)
    escaped = index == COMPACT
    weights = np.uint64(1) << np.arange(ROW, dtype=np.uint64)
    planes = [((index >> i & 1).astype(np.uint64) * weights).sum(axis=1) for i in range(3)]
    rows = np.arange(tiling.rows)
    counts = escaped.sum(axis=1)
    tiles = np.bincount(tiling.tile_ids(rows), counts, minlength=tiling.tiles).astype(np.int64)
    tile_first = np.append(0, np.cumsum(tiles))
    starts = rows[tiling.tile_rows(rows) % 2 == 0]
    before = np.append(0, np.cumsum(counts))[starts]
    return {
        "palette": palette,
        "codes": np.stack(planes, axis=1).astype("<u8").view(np.uint32),
        "tile_first": tile_first.astype(np.uint32),
        "pair_first": (before - tile_first[tiling.tile_ids(starts)]).astype(np.uint16),
        "escapes": exponents[escaped],
    }


# -- decompression


def _matrices(function: Callable[..., np.ndarray], axes: int, arrays: tuple, **options: Any) -> Any:
    """The function of every matrix, where there is an axis of them; `axes` of the first array."""
    if arrays[0].ndim == axes:
        return function(*arrays, **options)
    each = [
        _matrices(function, axes, tuple(x[i] for x in arrays), **options)
        for i in range(len(arrays[0]))
    ]
    return np.stack(each)


def _matrix(sign_mantissa: np.ndarray, exponents: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    words = join_exponents(exponents, sign_mantissa)
    return MatrixTiling(*shape).to_matrix(words).view(ml_dtypes.bfloat16)


def _palette_exponents(
    codes: np.ndarray, palette: np.ndarray, verbatim_row: np.ndarray, verbatim: np.ndarray
) -> np.ndarray:
    exponents = palette[np.stack([codes & 15, codes >> 4], axis=-1).reshape(-1, ROW)]
    there = verbatim_row < len(codes)
    exponents[verbatim_row[there]] = verbatim[there]
    return exponents


def _palette_one(
    sign_mantissa: np.ndarray, *coded: np.ndarray, shape: tuple[int, int]
) -> np.ndarray:
    return _matrix(sign_mantissa, _palette_exponents(*coded), shape)


def palette_reference(
    sign_mantissa: np.ndarray,
    codes: np.ndarray,
    palette: np.ndarray,
    verbatim_row: np.ndarray,
    verbatim: np.ndarray,
    verbatim_first: np.ndarray,
    shape: tuple[int, int],
) -> np.ndarray:
    """Matrix of the form `palette`, row by row of the coded ones."""
    arrays = (sign_mantissa, codes, palette, verbatim_row, verbatim)
    return _matrices(_palette_one, 2, arrays, shape=shape)


def exponent_reference(
    sign_mantissa: np.ndarray, exponents: np.ndarray, shape: tuple[int, int]
) -> np.ndarray:
    """Matrix of the form `exponent`."""
    return _matrices(_matrix, 2, (sign_mantissa, exponents), shape=shape)


def _compact_one(
    sign_mantissa: np.ndarray,
    codes: np.ndarray,
    palette: np.ndarray,
    escapes: np.ndarray,
    shape: tuple[int, int],
) -> np.ndarray:
    planes = np.ascontiguousarray(codes).view("<u8")
    places = np.arange(ROW, dtype=np.uint64)
    bits = planes[:, :, None] >> places & np.uint64(1)
    index = (bits[:, 0] | bits[:, 1] << np.uint64(1) | bits[:, 2] << np.uint64(2)).astype(int)
    exponents = palette[index]
    escaped = index == COMPACT
    exponents[escaped] = escapes[: escaped.sum()]
    return _matrix(sign_mantissa, exponents, shape)


def compact_reference(
    sign_mantissa: np.ndarray,
    codes: np.ndarray,
    palette: np.ndarray,
    tile_first: np.ndarray,
    pair_first: np.ndarray,
    escapes: np.ndarray,
    shape: tuple[int, int],
) -> np.ndarray:
    """Matrix of the form `compact`. It needs no index: escapes follow each other."""
    return _matrices(_compact_one, 2, (sign_mantissa, codes, palette, escapes), shape=shape)


def _transcode_one(
    coded: np.ndarray,
    stream: np.ndarray,
    chunk_first: np.ndarray,
    lengths: np.ndarray,
    shape: tuple[int, int],
) -> np.ndarray:
    tiling = MatrixTiling(*shape)
    data = stream.astype("<u4").view(np.uint8)
    sizes = np.diff(np.append(chunk_first, len(data)).astype(np.int64))
    counts = ROW * np.bitwise_count(coded).astype(np.int64)
    symbols, _ = decode_chunks(data, sizes, counts, lengths.tolist())
    rows = np.arange(tiling.rows)
    here = coded[tiling.parts(rows, CHUNK_ROWS)] >> tiling.tile_rows(rows) % CHUNK_ROWS & 1
    index = np.zeros((tiling.rows, ROW), np.uint8)
    index[here != 0] = symbols.reshape(-1, ROW)
    return index[:, 0::2] | index[:, 1::2] << 4


def transcode_reference(
    stream: np.ndarray,
    chunk_first: np.ndarray,
    coded: np.ndarray,
    lengths: np.ndarray,
    shape: tuple[int, int],
) -> np.ndarray:
    """Codes of the form `palette`, of the form `huffman`."""
    return _matrices(_transcode_one, 1, (coded, stream, chunk_first, lengths), shape=shape)


def exponents_reference(
    stream: np.ndarray,
    chunk_first: np.ndarray,
    coded: np.ndarray,
    lengths: np.ndarray,
    palette: np.ndarray,
    verbatim_row: np.ndarray,
    verbatim: np.ndarray,
    verbatim_first: np.ndarray,
    shape: tuple[int, int],
) -> np.ndarray:
    """Exponents of the form `exponent`, of the form `huffman`."""
    codes = transcode_reference(stream, chunk_first, coded, lengths, shape)
    return _matrices(_palette_exponents, 2, (codes, palette, verbatim_row, verbatim))


def huffman_reference(
    sign_mantissa: np.ndarray,
    stream: np.ndarray,
    chunk_first: np.ndarray,
    coded: np.ndarray,
    lengths: np.ndarray,
    palette: np.ndarray,
    verbatim_row: np.ndarray,
    verbatim: np.ndarray,
    verbatim_first: np.ndarray,
    shape: tuple[int, int],
) -> np.ndarray:
    """Matrix of the form `huffman`."""
    codes = transcode_reference(stream, chunk_first, coded, lengths, shape)
    arrays = (sign_mantissa, codes, palette, verbatim_row, verbatim)
    return _matrices(_palette_one, 2, arrays, shape=shape)
