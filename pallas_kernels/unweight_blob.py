"""The bytes of an Unweight blob: header, order of rows, where the sections lie, hash.

docs/unweight.md specifies them. Axes: R rows of 64 weights in tile order, X weights of a row, C
chunks of up to 16 rows of a tile.
"""

import dataclasses
import math
import struct
from collections.abc import Buffer

import numpy as np
import xxhash

from pallas_kernels.unweight_huffman import is_complete

MAGIC = b"UNWT"
VERSION = 1
HEADER_BYTES = 64
HASH_AT = 56  # of the blob itself, in its header
_HEADER = struct.Struct("<4s4BQ16s8sI4BQQ")
FORMS = ("raw", "huffman", "palette", "compact")
# Name of a data type and the words that hold it; the index is its code in a file.
DTYPES = (("BF16", np.uint16), ("F32", np.uint32), ("I32", np.int32))
TILE_ROWS = 64
PALETTE = 16
COMPACT_PALETTE = 7  # 3-bit codes; the eighth is
ESCAPE = 7
NIBBLES = 8  # 4-bit values of an I32 word
# The section whose length follows from that of the blob.
FITTED = {"huffman": "stream", "compact": "escapes"}


class Corrupt(ValueError):
    """A blob that is no intact tensor of the expected shape."""


@dataclasses.dataclass(frozen=True)
class TileOrder:
    """The order of rows in a matrix [F, D]: bands of 64, in them tiles from left to right.

    A tensor that is no matrix of whole rows is one of as many rows as it needs, zeros behind it.
    """

    num_weights: int
    F: int
    D: int
    tiled: bool
    row: int = 64
    chunk_rows: int = 16

    @classmethod
    def of(
        cls, shape: tuple[int, ...], dtype: str = "BF16", row: int = 64, chunk_rows: int = 16
    ) -> "TileOrder":
        """TileOrder of a tensor of words; the weights of I32 words are their nibbles."""
        if dtype == "I32":
            shape = (*shape[:-1], (shape[-1] if shape else 1) * NIBBLES)
        N = math.prod(shape)
        if len(shape) >= 2 and N and shape[-1] % row == 0:
            return cls(N, N // shape[-1], shape[-1], True, row, chunk_rows)
        return cls(N, -(-N // row), row, False, row, chunk_rows)

    @property
    def across(self) -> int:
        """Tiles of a band."""
        return self.D // self.row

    @property
    def rows(self) -> int:
        """R, rows of weights in all."""
        return self.F * self.across

    @property
    def tiles(self) -> int:
        return -(-self.F // TILE_ROWS) * self.across

    def num_parts(self, rows: int) -> int:
        """Parts of up to `rows` rows of every tile: chunks, pairs."""
        full, last = divmod(self.F, TILE_ROWS)
        return (full * (TILE_ROWS // rows) + -(-last // rows)) * self.across

    @property
    def chunks(self) -> int:
        return self.num_parts(self.chunk_rows)

    def parts(self, rows: int) -> np.ndarray:
        """The number of rows in every such part, in order; with 64, in every tile."""
        full, last = divmod(self.F, TILE_ROWS)
        whole = np.full(full * self.across * (TILE_ROWS // rows), rows)
        ends = [min(rows, last - first) for first in range(0, last, rows)]
        return np.concatenate([whole, np.tile(np.array(ends, int), self.across)])

    def to_rows(self, values_N: np.ndarray) -> np.ndarray:
        """Values in the tensor's order as [R, X] in tile order."""
        padded = np.zeros(self.F * self.D, values_N.dtype)
        padded[: self.num_weights] = values_N
        matrix_FTX = padded.reshape(self.F, self.across, self.row)
        bands = [matrix_FTX[f : f + TILE_ROWS] for f in range(0, self.F, TILE_ROWS)]
        rows = [band.swapaxes(0, 1).reshape(-1, self.row) for band in bands]
        return np.concatenate(rows) if rows else padded.reshape(0, self.row)

    def from_rows(self, rows_RX: np.ndarray) -> np.ndarray:
        """The inverse of `to_rows`, without the padding."""
        matrix_FTX = np.zeros((self.F, self.across, self.row), rows_RX.dtype)
        for f in range(0, self.F, TILE_ROWS):
            h = min(TILE_ROWS, self.F - f)
            band = rows_RX[f * self.across : (f + h) * self.across]
            matrix_FTX[f : f + h] = band.reshape(self.across, h, self.row).swapaxes(0, 1)
        return matrix_FTX.reshape(-1)[: self.num_weights]


@dataclasses.dataclass(frozen=True)
class UnweightHeader:
    """The first 64 bytes of a blob."""

    form: str
    dtype: str
    num_weights: int
    tiled: bool
    source_hash: int
    palette: tuple[int, ...] = ()
    lengths: tuple[int, ...] = ()  # bits of the code of each palette entry
    verbatim_rows: int = 0
    row: int = 64
    chunk_rows: int = 16
    blob_hash: int = 0

    def pack(self) -> bytes:
        lengths = (*self.lengths, *[0] * (16 - len(self.lengths)))
        return _HEADER.pack(
            MAGIC,
            *(VERSION, FORMS.index(self.form), self.chunk_rows, len(self.palette)),
            self.num_weights,
            bytes(self.palette),
            bytes(low | high << 4 for low, high in zip(lengths[::2], lengths[1::2], strict=True)),
            self.verbatim_rows,
            *(_dtype_code(self.dtype), self.row, TILE_ROWS.bit_length() - 1, self.tiled),
            *(self.source_hash, self.blob_hash),
        )

    @classmethod
    def parse(cls, blob: Buffer) -> "UnweightHeader":
        """Header of a blob, every field checked against what this version writes.

        Raises: Corrupt naming the field.
        """
        data = memoryview(blob).cast("B")[:HEADER_BYTES]
        if data.nbytes < HEADER_BYTES:
            raise Corrupt(f"expected a header of {HEADER_BYTES} bytes, got {data.nbytes} bytes")
        (magic, version, form, chunk_rows, entries, N, palette, packed, verbatim_rows, *rest) = (
            _HEADER.unpack(data)
        )
        dtype, row, log2_tile, tiled, source_hash, blob_hash = rest
        lengths = [nibble for byte in packed for nibble in (byte & 15, byte >> 4)]
        most = {"raw": 0, "compact": COMPACT_PALETTE}

        def check(name: str, ok: bool, expected: object, got: object) -> None:
            if not ok:
                raise Corrupt(f"{name}: expected {expected}, got {got}")

        check("magic", magic == MAGIC, MAGIC, magic)
        check("version", version == VERSION, VERSION, version)
        check("form", form < len(FORMS), f"below {len(FORMS)}", form)
        check("dtype", dtype < len(DTYPES), f"below {len(DTYPES)}", dtype)
        name, of = FORMS[form], DTYPES[dtype][0]
        check("form of I32", of != "I32" or name in ("raw", "huffman"), "raw or huffman", name)
        check("row size", row in (8, 16, 32, 64, 128), "8 to 128, a power of two", row)
        chunk_ok = chunk_rows in (1, 2, 4, 8, 16, 32, 64)
        check("rows of a chunk", chunk_ok, "1 to 64, a power of two", chunk_rows)
        check("tile rows", log2_tile == TILE_ROWS.bit_length() - 1, "2**6", f"2**{log2_tile}")
        check("tiled", tiled < 2, "0 or 1", tiled)
        allowed = most.get(name, PALETTE)
        check("palette", entries <= allowed, f"at most {allowed} entries", entries)
        distinct = len(set(palette[:entries])) == entries and not any(palette[entries:])
        check("palette", distinct, "distinct entries, zeros behind", palette.hex())
        coded = name == "huffman" and not any(lengths[entries:]) and is_complete(lengths)
        check("code lengths", coded or not any(lengths), "a complete code", lengths)
        few = verbatim_rows == 0 or name in ("huffman", "palette")
        check("verbatim rows", few, f"none in form {name}", verbatim_rows)
        return cls(
            *(name, of, N, bool(tiled), source_hash),
            *(tuple(palette[:entries]), tuple(lengths[:entries]) if name == "huffman" else ()),
            *(verbatim_rows, row, chunk_rows, blob_hash),
        )

    def order(self, shape: tuple[int, ...]) -> TileOrder:
        """TileOrder of the tensor of words that this is the header of.

        Raises: Corrupt where it is not one of that shape.
        """
        order = TileOrder.of(shape, self.dtype, self.row, self.chunk_rows)
        if order.num_weights != self.num_weights:
            raise Corrupt(
                f"shape {shape} of {self.dtype} has {order.num_weights} weights, "
                f"the header says {self.num_weights}"
            )
        if order.tiled != self.tiled:
            raise Corrupt(f"tiled: expected {order.tiled} of shape {shape}, got {self.tiled}")
        return order

    def section_bytes(self, order: TileOrder) -> dict[str, int]:
        """Bytes of the sections, in their order; the one that has what is left is the 0."""
        N, R = order.num_weights, order.rows
        if self.form == "raw":
            return {"words": raw_bytes(N, self.dtype)}
        given: dict[str, int] = {}
        if self.verbatim_rows:
            given["bitmask"] = -(-R // 8)
        if self.form == "huffman":
            given["chunk_bytes"] = 2 * order.chunks
        if self.verbatim_rows:
            given["verbatim"] = self.verbatim_rows * order.row
        if self.form == "compact":
            given |= {"tile_first": 4 * order.tiles, "pair_first": 2 * order.num_parts(2)}
        if self.dtype != "I32":
            given["sign_mantissa"] = N
        code_bits = {"palette": 4, "compact": 3}.get(self.form)
        if code_bits:
            given["codes"] = R * order.row * code_bits // 8
        if self.form in FITTED:
            given[FITTED[self.form]] = 0
        if self.dtype == "F32":
            given["low"] = 2 * N
        return given

    def sections(self, order: TileOrder, blob_bytes: int) -> dict[str, slice]:
        """Where the sections lie; those that the form lacks are left out.

        Raises: Corrupt where the blob is longer or shorter than they are.
        """
        if self.verbatim_rows > order.rows:
            raise Corrupt(f"verbatim rows: expected at most {order.rows}, got {self.verbatim_rows}")
        given, fitted = self.section_bytes(order), FITTED.get(self.form)
        excess = blob_bytes - HEADER_BYTES - sum(given.values())
        if excess < 0 or (excess and not fitted):
            least = "at least " if fitted else ""
            raise Corrupt(f"expected {least}{blob_bytes - excess} bytes, got {blob_bytes}")
        if fitted:
            given[fitted] = excess
        # No code is shorter than a bit: what follows may allocate a byte for every weight.
        coded = (order.rows - self.verbatim_rows) * order.row
        if fitted == "stream" and coded and not any(self.lengths):
            raise Corrupt(f"code lengths: expected a code for {coded} weights, got none")
        if fitted == "stream" and coded > 8 * excess:
            raise Corrupt(f"stream: expected a bit for each of {coded} weights, got {excess} bytes")
        places, start = {}, HEADER_BYTES
        for name, size in given.items():
            places[name] = slice(start, start + size)
            start += size
        return places


def raw_bytes(num_weights: int, dtype: str) -> int:
    """Bytes of the words themselves."""
    return {"BF16": 2 * num_weights, "F32": 4 * num_weights, "I32": num_weights // 2}[dtype]


def hash_blob(blob: Buffer) -> int:
    """Hash of a whole blob with the field that holds it zero."""
    data = memoryview(blob).cast("B")
    digest = xxhash.xxh3_64(bytes(data[:HASH_AT]) + bytes(HEADER_BYTES - HASH_AT))
    digest.update(data[HEADER_BYTES:])
    return digest.intdigest()


def check_blob(blob: Buffer) -> UnweightHeader:
    """Header of a blob that is as it was written.

    Raises: Corrupt.
    """
    header = UnweightHeader.parse(blob)
    found = hash_blob(blob)
    if found != header.blob_hash:
        raise Corrupt(f"hash: expected {header.blob_hash:016x}, got {found:016x}: damaged bytes")
    return header


def check_words(words: np.ndarray, form: str) -> str:
    """Data type of a tensor of words that is to be coded.

    Raises: ValueError where it or the form is none of the format.
    """
    names = [name for name, word in DTYPES if words.dtype.newbyteorder("=") == word]
    if not names:
        raise ValueError(
            "words: expected uint16 (bfloat16), uint32 (float32) or int32 (eight 4-bit values), "
            f"got {words.dtype}"
        )
    if form not in FORMS:
        raise ValueError(f"form: expected one of {FORMS}, got {form!r}")
    if names[0] == "I32" and form not in ("raw", "huffman"):
        raise ValueError(f"form: 4-bit values have raw and huffman, got {form!r}")
    return names[0]


def _dtype_code(dtype: str) -> int:
    return [name for name, _ in DTYPES].index(dtype)
