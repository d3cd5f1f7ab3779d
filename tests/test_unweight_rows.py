"""Rows of a coded matrix, decoded on their own, are those of the matrix."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jinfire.unweight.device import device_form
from jinfire.unweight.tensor import RAGGED, filled
from pallas_kernels import unweight_rows

SHAPE = (200, 192)  # a band of 8 rows behind three whole ones


def trained(rng: np.random.Generator) -> np.ndarray:
    """Normal weights, of which a few have exponents far from the others'."""
    values = rng.standard_normal(SHAPE, np.float32)
    values[rng.random(SHAPE) < 1e-3] *= np.float32(1e-30)
    return values.astype(ml_dtypes.bfloat16).view(np.uint16)


CONTENTS = {
    "trained": trained,
    "any bits": lambda rng: rng.integers(0, 1 << 16, SHAPE).astype(np.uint16),
}


@pytest.mark.parametrize("form", ["huffman", "palette", "compact"])
@pytest.mark.parametrize("content", CONTENTS)
def test_rows_are_those_of_the_matrix(form, content):
    """Of arrays that are filled up, as those of devices with few verbatim rows or escapes are."""
    rng = np.random.default_rng(0)
    words = CONTENTS[content](rng)
    matrix = device_form(words, form)
    longer = {
        field: filled(field, array, array.shape[RAGGED[field]] + 9, matrix)
        for field, array in matrix.arrays().items()
        if field in RAGGED
    }
    matrix = jax.tree.map(jnp.asarray, dataclasses.replace(matrix, **longer).check())
    ids = rng.integers(0, SHAPE[0], (2, 5)).astype(np.int32)
    ids[0, 0], ids[1, 4] = 0, SHAPE[0] - 1
    found = jax.jit(unweight_rows)(matrix, ids)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(found).view(np.uint16), words[ids])
