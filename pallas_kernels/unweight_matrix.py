"""Losslessly coded bfloat16 matrices as they lie on the device, and the order of their weights.

A weight's word is one byte of sign and mantissa, stored as it is, and one byte of exponent, which
is what the forms code. All arithmetic is on unsigned integers; no value is ever a float.

A *row* is 64 weights, a *tile* up to 64 rows under each other, a *chunk* up to 16 rows of a tile.
Tile order takes bands of 64 matrix rows, of which the last may have fewer; in a band the tiles from
left to right; in a tile its rows from top to bottom. So every part of a matrix whose borders are
multiples of 64 is a set of whole tiles.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.unweight_blob import PALETTE, TILE_ROWS

ROW = 64  # weights of a row
CHUNK_ROWS = 16
COMPACT = 7  # exponents with a 3-bit code; code 7 is the escape
PLANES = 6  # uint32 words of a row of 3-bit codes
MAX_BITS = 12  # of a Huffman code

FORMS = ("huffman", "palette", "compact", "exponent")

_VERBATIM = ("palette", "verbatim_row", "verbatim", "verbatim_first")
ARRAYS: Mapping[str, tuple[str, ...]] = {
    "huffman": ("sign_mantissa", "stream", "chunk_first", "coded", "lengths", *_VERBATIM),
    "palette": ("sign_mantissa", "codes", *_VERBATIM),
    "compact": ("sign_mantissa", "codes", "palette", "tile_first", "pair_first", "escapes"),
    "exponent": ("sign_mantissa", "exponents"),
}

_DTYPES: Mapping[str, Any] = {
    "sign_mantissa": np.uint8,
    "palette": np.uint8,
    "verbatim_row": np.int32,
    "verbatim": np.uint8,
    "verbatim_first": np.int32,
    "stream": np.uint32,
    "chunk_first": np.uint32,
    "coded": np.uint16,
    "lengths": np.uint8,
    "exponents": np.uint8,
    "tile_first": np.uint32,
    "pair_first": np.uint16,
    "escapes": np.uint8,
}


@dataclasses.dataclass(frozen=True)
class MatrixTiling:
    """Tile order of a matrix [F, D]: counts of its parts, and where they are."""

    F: int
    D: int

    def __post_init__(self) -> None:
        if self.F <= 0 or self.D <= 0 or self.D % ROW:
            raise ValueError(
                f"expected a matrix [F, D] whose D is a multiple of {ROW}, "
                f"received {(self.F, self.D)}: pad its rows"
            )

    @property
    def columns(self) -> int:
        """Tiles of a band."""
        return self.D // ROW

    @property
    def bands(self) -> int:
        return -(-self.F // TILE_ROWS)

    @property
    def last(self) -> int:
        """Matrix rows of the last band."""
        return self.F - TILE_ROWS * (self.bands - 1)

    @property
    def rows(self) -> int:
        return self.F * self.columns

    @property
    def tiles(self) -> int:
        return self.bands * self.columns

    @property
    def chunks(self) -> int:
        return self._parts(CHUNK_ROWS)

    @property
    def pairs(self) -> int:
        """Pairs of rows, none of which crosses a tile."""
        return self._parts(2)

    def _parts(self, size: int) -> int:
        full = (self.bands - 1) * (TILE_ROWS // size) - (-self.last // size)
        return full * self.columns

    def row_ids(self, matrix_rows: Any) -> Any:
        """Flat row ids of matrix rows [...], int32 [..., D / 64], of a NumPy or a JAX array."""
        band = matrix_rows // TILE_ROWS
        height = self._height(band)
        first = band * (TILE_ROWS * self.columns) + matrix_rows % TILE_ROWS
        column = np.arange(self.columns, dtype=np.int32)
        return first[..., None] + column.reshape((1,) * first.ndim + (-1,)) * height[..., None]

    def _height(self, band: Any) -> Any:
        """Rows of a band's tiles."""
        space = np if isinstance(band, np.ndarray | np.generic) else jnp
        return space.where(band == self.bands - 1, self.last, TILE_ROWS).astype(band.dtype)

    def tile_ids(self, rows: Any) -> Any:
        """The tile of every flat row."""
        band = rows // (TILE_ROWS * self.columns)
        inside = rows - band * (TILE_ROWS * self.columns)
        return band * self.columns + inside // self._height(band)

    def tile_rows(self, rows: Any) -> Any:
        """The place of every flat row inside its tile."""
        band = rows // (TILE_ROWS * self.columns)
        return (rows - band * (TILE_ROWS * self.columns)) % self._height(band)

    def parts(self, rows: Any, size: int) -> Any:
        """The part of `size` rows (a chunk: 16, a pair: 2) of every flat row."""
        band = rows // (TILE_ROWS * self.columns)
        before = band * (self.columns * TILE_ROWS // size)
        inside = rows - band * (TILE_ROWS * self.columns)
        height = self._height(band)
        whole = (height + size - 1) // size
        return before + inside // height * whole + inside % height // size

    def chunk_rows(self) -> np.ndarray:
        """First flat row of every chunk, and behind the last the number of rows: int32 [C + 1]."""
        rows = np.arange(self.rows, dtype=np.int32)
        first = rows[self.tile_rows(rows) % CHUNK_ROWS == 0]
        return np.append(first, np.int32(self.rows))

    def to_matrix(self, rows: Any) -> Any:
        """Matrix [..., F, D] of its rows [..., R, 64]."""
        return self._reorder(rows, ROW, (self.columns, TILE_ROWS), (self.columns, self.last))

    def to_rows(self, matrix: Any) -> Any:
        """Rows [..., R, 64] of a matrix [..., F, D]: the inverse of `to_matrix`."""
        cut = matrix.reshape(*matrix.shape[:-2], self.rows, ROW)
        return self._reorder(
            cut, ROW, (TILE_ROWS, self.columns), (self.last, self.columns)
        ).reshape(cut.shape)

    def _reorder(self, rows: Any, width: int, full: tuple[int, int], last: tuple[int, int]) -> Any:
        """Swaps the two axes inside every band; NumPy or JAX."""
        leading = rows.shape[:-2]
        split = (self.bands - 1) * TILE_ROWS * self.columns
        space = np if isinstance(rows, np.ndarray) else jnp
        turned = []
        if self.last == TILE_ROWS:
            split = self.rows
        for part, axes in ((rows[..., :split, :], full), (rows[..., split:, :], last)):
            if part.shape[-2]:
                cut = part.reshape(*leading, -1, *axes, width)
                turned.append(space.swapaxes(cut, -3, -2).reshape(*leading, -1, self.D))
        return turned[0] if len(turned) == 1 else space.concatenate(turned, axis=-2)


@dataclasses.dataclass(frozen=True)
class UnweightMatrix:
    """Coded matrix [F, D] of bfloat16. Which arrays there are depends on the form (`ARRAYS`).

    Every array may have the same leading axes. `verbatim_row`, `verbatim`, `stream` and `escapes`
    may be longer than what is in them.

    Shapes: sign_mantissa uint8 [R, 64].
    huffman and palette: palette uint8 [16], most frequent first; the rows with other exponents:
    verbatim_row int32 [V] (ascending flat rows, padded with R), verbatim uint8 [V, 64] (their
    exponents), verbatim_first int32 [tiles + 1] (verbatim rows before a tile).
    huffman: stream uint32 [W], chunk_first uint32 [C] (first byte), coded uint16 [C] (bit i: row i
    of the chunk is in the stream), lengths uint8 [16].
    palette: codes uint8 [R, 32], the first weight in the low half.
    compact: codes uint32 [R, 6], three planes of 64 bits; palette uint8 [16], of which 7 count;
    tile_first uint32 [tiles + 1] and pair_first uint16 [pairs], escapes before them in all and in
    the tile; escapes uint8 [X].
    exponent: exponents uint8 [R, 64], of every row.
    """

    form: str
    shape: tuple[int, int]
    sign_mantissa: Any
    palette: Any = None
    verbatim_row: Any = None
    verbatim: Any = None
    verbatim_first: Any = None
    stream: Any = None
    chunk_first: Any = None
    coded: Any = None
    lengths: Any = None
    codes: Any = None
    exponents: Any = None
    tile_first: Any = None
    pair_first: Any = None
    escapes: Any = None

    @property
    def tiling(self) -> MatrixTiling:
        return MatrixTiling(*self.shape)

    @property
    def leading(self) -> tuple[int, ...]:
        """Axes before those of one matrix."""
        return tuple(self.sign_mantissa.shape[:-2])

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        arrays = self.arrays().values()
        return sum(int(np.prod(x.shape)) * np.dtype(x.dtype).itemsize for x in arrays)

    def arrays(self) -> dict[str, Any]:
        """The arrays of this form by name, in the order of `ARRAYS`."""
        return {name: getattr(self, name) for name in ARRAYS[self.form]}

    def row_ids(self, matrix_rows: Any) -> Any:
        """Flat row ids of matrix rows [...]: int32 [..., D / 64]."""
        return self.tiling.row_ids(matrix_rows)

    def check(self) -> "UnweightMatrix":
        """The matrix itself. Raises: ValueError for an array of another shape or dtype."""
        if self.form not in FORMS:
            raise ValueError(f"form: expected one of {FORMS}, received {self.form!r}")
        tiling = self.tiling
        R, tiles, C = tiling.rows, tiling.tiles, tiling.chunks
        codes = (R, PLANES) if self.form == "compact" else (R, ROW // 2)
        shapes: dict[str, tuple[int | None, ...]] = {
            "sign_mantissa": (R, ROW),
            "palette": (PALETTE,),
            "verbatim_row": (None,),
            "verbatim": (None, ROW),
            "verbatim_first": (tiles + 1,),
            "stream": (None,),
            "chunk_first": (C,),
            "coded": (C,),
            "lengths": (PALETTE,),
            "codes": codes,
            "exponents": (R, ROW),
            "tile_first": (tiles + 1,),
            "pair_first": (tiling.pairs,),
            "escapes": (None,),
        }
        dtypes = {**_DTYPES, "codes": np.uint32 if self.form == "compact" else np.uint8}
        for name in shapes:
            array = getattr(self, name)
            if name not in ARRAYS[self.form]:
                if array is not None:
                    raise ValueError(f"{name}: expected none in the form {self.form}, received one")
                continue
            if array is None:
                raise ValueError(
                    f"{name}: expected an array in the form {self.form}, received none"
                )
            want = (*self.leading, *shapes[name])
            fits = len(array.shape) == len(want) and all(
                n in (None, m) for n, m in zip(want, array.shape, strict=True)
            )
            if not fits or array.dtype != dtypes[name]:
                raise ValueError(
                    f"{name} of a {self.form} matrix {self.shape}: expected "
                    f"{np.dtype(dtypes[name])} {want}, received {array.dtype} {tuple(array.shape)}"
                )
        if self.verbatim is not None and self.verbatim.shape[-2] != self.verbatim_row.shape[-1]:
            raise ValueError(
                f"verbatim: expected {self.verbatim_row.shape[-1]} rows as verbatim_row has, "
                f"received {self.verbatim.shape[-2]}"
            )
        return self


jax.tree_util.register_dataclass(
    UnweightMatrix,
    data_fields=[
        f.name for f in dataclasses.fields(UnweightMatrix) if f.name not in ("form", "shape")
    ],
    meta_fields=["form", "shape"],
)
