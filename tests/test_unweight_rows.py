"""Rows of a coded matrix, decoded on their own, are those of the matrix."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jinfire.unweight.device import device_form
from jinfire.unweight.tensor import RAGGED, filled, room
from pallas_kernels import unweight_rows

SHAPES = [(1, 64), (3, 192), (64, 64), (65, 128), (127, 64), (200, 256)]


def trained(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Normal weights, of which a few have exponents far from the others'."""
    values = rng.standard_normal(shape, np.float32)
    values[rng.random(shape) < 1e-3] *= np.float32(1e-30)
    return values.astype(ml_dtypes.bfloat16).view(np.uint16)


CONTENTS = {
    "trained": trained,
    "any bits": lambda rng, shape: rng.integers(0, 1 << 16, shape).astype(np.uint16),
    "one value": lambda rng, shape: np.full(shape, 0x3F81, np.uint16),
    "zeros": lambda rng, shape: np.zeros(shape, np.uint16),
}


@pytest.mark.parametrize("form", ["palette", "compact"])
@pytest.mark.parametrize("content", CONTENTS)
def test_rows_are_those_of_the_matrix(form, content):
    for shape in SHAPES:
        rng = np.random.default_rng(shape)
        words = CONTENTS[content](rng, shape)
        matrix = device_form(words, form)
        # Alone, and filled up as devices of a mesh fill up theirs.
        ids = rng.integers(0, shape[0], (2, 5)).astype(np.int32)
        ids[0, 0], ids[1, 4] = 0, shape[0] - 1
        for case in (matrix, filled_up(matrix)):
            found = jax.jit(unweight_rows)(jax.tree.map(jnp.asarray, case), ids)
            assert found.dtype == jnp.bfloat16
            np.testing.assert_array_equal(np.asarray(found).view(np.uint16), words[ids])


def filled_up(matrix):
    arrays = matrix.arrays()
    longer = {
        field: filled(field, array, array.shape[RAGGED[field]] + 9, matrix)
        for field, array in arrays.items()
        if field in RAGGED
    }
    return type(matrix)(matrix.form, matrix.shape, **(arrays | longer)).check()


def test_a_huffman_stream_has_no_single_rows():
    matrix = device_form(trained(np.random.default_rng(0), (64, 64)), "huffman")
    with pytest.raises(ValueError, match="received 'huffman'"):
        unweight_rows(matrix, jnp.zeros(1, jnp.int32))


def test_room_is_enough_and_not_much_more():
    lengths = np.unique(np.geomspace(1, 1e8, 2000).astype(int))
    rooms = [room(int(length)) for length in lengths]
    assert room(0) == 1
    for length, given in zip(lengths, rooms, strict=True):
        assert length <= given <= max(length * (1 + 2**-5), length + 1)
    assert len(set(rooms)) < 500
