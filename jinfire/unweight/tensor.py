"""The leaf of a compressed weight: what devices hold in place of its values."""

import dataclasses
import statistics
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jinfire.unweight.policy import VARIANTS, Choice
from pallas_kernels import (
    UnweightMatrix,
    unweight_decompress,
    unweight_exponents,
    unweight_rows,
    unweight_transcode,
)

MESH_AXES = 3
"""Leading axes of the global arrays: pipeline, expert, tensor."""

# What the reconstructive product takes, from the form that is resident.
PREPARED: dict[str, Callable[[UnweightMatrix], UnweightMatrix]] = {
    "exponent": unweight_exponents,
    "transcode": unweight_transcode,
    "direct": lambda matrix: matrix,
    "compact": lambda matrix: matrix,
}

# Arrays whose length depends on the values, and the axis that has it.
RAGGED = {"verbatim_row": -1, "verbatim": -2, "stream": -1, "escapes": -1}
LENGTHS = (("verbatim_row", "verbatim"), ("stream",), ("escapes",))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class UnweightTensor:
    """A weight in a compressed form, with the variant of its product for every number of rows.

    Shapes: `matrix` holds arrays of one device's part [F, D], or of E experts' with a leading axis
    E. Outside of programs all arrays have the leading axes [pipeline, expert, tensor], so that
    each device holds the encoding of its own part, whichever axis of the weight is split.
    """

    matrix: UnweightMatrix
    choice: Choice = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the weight that this device has a part of; inside programs only."""
        return (*self.matrix.leading, *self.matrix.shape)

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(jnp.bfloat16)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return self.matrix.nbytes

    def local(self) -> "UnweightTensor":
        """One device's tensor, without the axes of the mesh."""
        return jax.tree.map(lambda leaf: leaf.reshape(leaf.shape[MESH_AXES:]), self)

    def dense(self) -> jax.Array:
        """All values, on one device."""
        return unweight_decompress(self.matrix)

    def rows(self, ids: jax.Array) -> jax.Array:
        """Rows of the weight, bfloat16 [..., D]."""
        return unweight_rows(self.matrix, ids)

    def operand(self, x: jax.Array) -> tuple[jax.Array, jax.Array | UnweightMatrix]:
        """Rows, and what they are multiplied with: values, or a matrix to be reconstructed."""
        variant = self.choice.variant(x.shape[0])
        if VARIANTS[variant].decompressed:
            return self.beside(x)
        x, matrix = _in_loop(x, self.matrix)
        return x, PREPARED[variant](matrix)

    def beside(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """`x`, and the values, decompressed where it is computed."""
        x, matrix = _in_loop(x, self.matrix)
        return x, unweight_decompress(matrix)


def _in_loop(x: jax.Array, matrix: UnweightMatrix) -> tuple[jax.Array, UnweightMatrix]:
    """The same values, which the compiler takes to depend on each other.

    A loop over tokens would else decompress its weights once, ahead of the loop, and hold them all.
    """
    return jax.lax.optimization_barrier((x, matrix))


def filled(field: str, array: np.ndarray, length: int, matrix: UnweightMatrix) -> np.ndarray:
    """A ragged array of the matrix at another length."""
    widths = [(0, 0)] * array.ndim
    widths[RAGGED[field]] = (0, length - array.shape[RAGGED[field]])
    # Verbatim rows end with numbers past the last row, so that they stay ascending.
    value = matrix.sign_mantissa.shape[-2] if field == "verbatim_row" else 0
    return np.pad(array, widths, constant_values=value)


def common_length(lengths: Sequence[int], spare: int) -> int:
    """The length that weights of one kind share: of the longest that is no outlier.

    Of one shape they are traced, and their kernels compiled, once for all. `spare` is what the
    median may be filled up by.
    """
    most = statistics.median(lengths) + spare
    return max(length for length in lengths if length <= most)
