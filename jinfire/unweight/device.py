"""Coded matrices as devices hold them, made from weights with the coder of the files."""

import math

import numpy as np

from jinfire.unweight.coding import OPTIONS, ROW, Coding, fill, plan
from jinfire.unweight.tiles import on_threads
from pallas_kernels import TileOrder, UnweightMatrix

DEVICE_FORMS = ("huffman", "palette", "compact")
ROW_CODES = {"palette": (np.uint8, 32), "compact": (np.uint32, 6)}
# A decoder looks at the bits behind a chunk, and compiled programs take no empty array.
STREAM_PADDING_BYTES = 8


def device_form(words: np.ndarray, form: str, jobs: int | None = None) -> UnweightMatrix:
    """A matrix of bfloat16 words in a form for the device, its arrays those of NumPy.

    Shapes: uint16 [F, D] with D % 64 == 0, or [E, F, D] for E matrices with padding in common.
    `jobs` threads, as many as there are processors where it is None.

    Raises: ValueError where words or form are none that devices have.
    """
    if words.dtype != np.uint16 or words.ndim not in (2, 3) or words.shape[-1] % ROW:
        raise ValueError(
            f"words: expected uint16 [F, D] or [E, F, D] with D a multiple of {ROW}, "
            f"got {words.dtype} {words.shape}"
        )
    if form not in DEVICE_FORMS:
        raise ValueError(f"form: expected one of {DEVICE_FORMS}, got {form!r}")
    if not words.size:
        raise ValueError(f"words: expected weights, got none in {words.shape}")
    *experts, F, D = words.shape
    order = TileOrder.of((F, D))
    matrices = np.ascontiguousarray(words, "<u2").reshape(-1, F * D)
    # One thread for each matrix of many, all of them for one matrix after the other of few.
    inner = 1 if len(matrices) > 1 and F * D < 1 << 24 else jobs
    outer = jobs if inner == 1 else 1
    one_by_one = [(e, e + 1) for e in range(len(matrices))]

    def planned(e: int, _: int) -> Coding:
        return plan(matrices[e], order, form, nibbles=False, jobs=inner)

    codings = on_threads(planned, one_by_one, outer)
    arrays = _arrays(order, form, len(matrices), max(c.verbatim_rows for c in codings))

    def filled(e: int, _: int) -> list[np.ndarray]:
        return _fill(codings[e], {name: array[e] for name, array in arrays.items()}, inner)

    pieces = on_threads(filled, one_by_one, outer)
    ragged = {"huffman": "stream", "compact": "escapes"}.get(form)
    if ragged:
        arrays[ragged] = _stacked(pieces, STREAM_PADDING_BYTES if form == "huffman" else 1)
    if form == "huffman":
        arrays["stream"] = arrays["stream"].view(np.uint32)
        first_C = np.cumsum(arrays.pop("chunk_bytes"), axis=1)
        if first_C.max() >= 1 << 32:
            raise ValueError(
                f"stream: expected less than 4 GiB a matrix, got {first_C.max()} bytes"
            )
        arrays["chunk_first"] = np.zeros(first_C.shape, np.uint32)
        arrays["chunk_first"][:, 1:] = first_C[:, :-1]
    shaped = {name: array.reshape(*experts, *array.shape[1:]) for name, array in arrays.items()}
    return UnweightMatrix(form, (F, D), **shaped)


def _arrays(order: TileOrder, form: str, E: int, verbatim_rows: int) -> dict[str, np.ndarray]:
    """Arrays of a stack of E matrices, those that have what is left when all are coded excepted."""
    R = order.rows
    arrays = {
        "sign_mantissa": np.empty((E, R, ROW), np.uint8),
        "palette": np.zeros((E, OPTIONS.palette), np.uint8),
    }
    if form == "compact":
        arrays["tile_first"] = np.empty((E, order.tiles + 1), np.uint32)
        arrays["pair_first"] = np.empty((E, order.num_parts(2)), np.uint16)
    else:
        V = max(1, verbatim_rows)
        arrays["verbatim_row"] = np.full((E, V), R, np.int32)
        arrays["verbatim"] = np.zeros((E, V, ROW), np.uint8)
        arrays["verbatim_first"] = np.zeros((E, order.tiles + 1), np.int32)
    if form == "huffman":
        arrays["lengths"] = np.zeros((E, OPTIONS.palette), np.uint8)
        arrays["coded"] = np.empty((E, order.chunks), np.uint16)
        arrays["chunk_bytes"] = np.empty((E, order.chunks), np.int64)
    else:
        kind, width = ROW_CODES[form]
        arrays["codes"] = np.empty((E, R, width), kind)
    return arrays


def _fill(coding: Coding, arrays: dict[str, np.ndarray], jobs: int | None) -> list[np.ndarray]:
    """Writes the arrays of one matrix, and gives stream or escapes in pieces."""
    order, flags_R = coding.order, coding.flags_R
    sections = {"sign_mantissa": arrays["sign_mantissa"].reshape(-1)}
    if "codes" in arrays:
        sections["codes"] = arrays["codes"].reshape(-1).view(np.uint8)
    if "chunk_bytes" in arrays:
        sections["chunk_bytes"] = arrays["chunk_bytes"]
    arrays["palette"][: len(coding.palette)] = coding.palette
    if coding.form == "compact":
        sections |= {name: arrays[name] for name in ("tile_first", "pair_first")}
        pieces = fill(coding, sections, jobs)
        arrays["tile_first"][-1] = coding.escapes
        return pieces
    sections["verbatim"] = arrays["verbatim"].reshape(-1)
    rows = np.flatnonzero(flags_R)
    arrays["verbatim_row"][: rows.size] = rows
    heights = order.parts(64)
    first_row = np.cumsum(heights) - heights
    arrays["verbatim_first"][1:] = np.cumsum(np.add.reduceat(flags_R, first_row, dtype=np.int32))
    if coding.form == "huffman":
        arrays["lengths"][: len(coding.lengths)] = coding.lengths
        arrays["coded"][:] = _coded_rows(flags_R, order)
    return fill(coding, sections, jobs)


def _coded_rows(flags_R: np.ndarray, order: TileOrder) -> np.ndarray:
    """Bit i of a chunk's number says that its row i is in the stream: uint16 [C]."""
    rows_C = order.parts(order.chunk_rows)
    coded = np.zeros((order.chunks, order.chunk_rows), np.uint8)
    if rows_C.min() == order.chunk_rows:
        coded.reshape(-1)[:] = 1 - flags_R
    else:
        chunk_R = np.repeat(np.arange(order.chunks), rows_C)
        inside_R = np.arange(order.rows) - np.repeat(np.cumsum(rows_C) - rows_C, rows_C)
        coded[chunk_R, inside_R] = 1 - flags_R
    return np.packbits(coded, axis=1, bitorder="little").view("<u2")[:, 0]


def _stacked(pieces: list[list[np.ndarray]], padding: int) -> np.ndarray:
    """Bytes of each matrix behind each other, zeros behind them up to whole words in common."""
    sizes = [sum(piece.size for piece in own) for own in pieces]
    out = np.zeros((len(pieces), math.ceil((max(sizes) + padding) / 4) * 4), np.uint8)
    for row, own, size in zip(out, pieces, sizes, strict=True):
        np.concatenate([*own, np.empty(0, np.uint8)], out=row[:size])
    return out
