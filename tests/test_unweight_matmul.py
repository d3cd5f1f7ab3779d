"""Products with coded weights: bits of the operands, dense products to the bit, counts."""

import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from gpu_unweight_operand import ESCAPES, VERBATIM, shapes
from simt import Machine

from pallas_kernels import unweight_reference
from pallas_kernels.toolchain import ToolchainMissing, run_python
from pallas_kernels.unweight_matmul import (
    DECODERS,
    FORMS,
    GROUPED_MATMULS,
    MATMULS,
    grouped_unweight_matmul,
    unweight_matmul,
)
from pallas_kernels.unweight_matmul_mosaic import UnweightBlocks
from pallas_kernels.unweight_matrix import UnweightMatrix
from pallas_kernels.unweight_operand import AHEAD, WINDOW, operand_order

BF16 = ml_dtypes.bfloat16
F, D = 128, 192


def words(rare: float, shape: tuple[int, int] = (F, D), seed: int = 0) -> np.ndarray:
    """Words as trained weights have them, a share of any others, and many others in one tile."""
    rng = np.random.default_rng(seed)
    exponents = np.maximum(120 - rng.geometric(0.45, size=shape), 110)
    others = rng.integers(0, 256, size=shape)
    exponents = np.where(rng.random(shape) < rare, others, exponents)
    exponents[10:60, 64:128:3] = rng.integers(60, 104, size=exponents[10:60, 64:128:3].shape)
    rest = rng.integers(0, 256, size=shape)
    return (rest << 8 & 0x8000 | exponents << 7 | rest & 0x7F).astype(np.uint16)


def coded(form: str, rare: float = 3e-4, shape: tuple[int, int] = (F, D)) -> UnweightMatrix:
    return unweight_reference.pack(words(rare, shape), form)


def decoded(matrix: UnweightMatrix) -> np.ndarray:
    return DECODERS[matrix.form](*matrix.arrays().values(), shape=matrix.shape)


def padded(array: np.ndarray, length: int, value: int) -> np.ndarray:
    assert len(array) <= length
    return np.pad(
        array, ((0, length - len(array)), *[(0, 0)] * (array.ndim - 1)), constant_values=value
    )


@pytest.mark.parametrize("form", FORMS)
def test_registers_hold_the_weights_that_a_gpu_wants(form: str) -> None:
    """What the compiler made of the programs, executed: every bit of every operand."""
    script = Path(__file__).parent / "gpu_unweight_operand.py"
    try:
        code = run_python(str(script), form)
    except ToolchainMissing as missing:
        if sys.platform == "linux":
            raise
        pytest.skip(str(missing))
    matrix = coded(form)
    arrays = dict(matrix.arrays())
    tiles = matrix.tiling.tiles
    if form == "palette":
        first = arrays["verbatim_first"]
        counts = np.diff(first)
        assert counts.max() > AHEAD
        assert counts.min() < AHEAD
        arrays["verbatim_row"] = padded(arrays["verbatim_row"], VERBATIM, matrix.tiling.rows)
        arrays["verbatim"] = padded(arrays["verbatim"], VERBATIM, 0xFF)
        ahead = np.minimum(first[:-1], VERBATIM - AHEAD)[:, None] + np.arange(AHEAD)
        arrays["row_ahead"] = arrays["verbatim_row"][ahead]
        arrays["ahead"] = arrays["verbatim"][ahead]
    if form == "compact":
        counts = np.diff(arrays["tile_first"])
        assert counts.max() > WINDOW
        assert counts.min() < WINDOW
        arrays["escapes"] = padded(arrays["escapes"], ESCAPES, 0xFF)
        first = np.minimum(arrays["tile_first"][:-1].astype(int), ESCAPES - WINDOW)
        arrays["ahead"] = arrays["escapes"][first[:, None] + np.arange(WINDOW)]
    arrays["out"] = np.zeros((tiles, 64, 64), BF16)
    arrays = {name: arrays[name].reshape(x.shape) for name, x in shapes(form).items()}
    assert all(arrays[name].dtype == x.dtype for name, x in shapes(form).items())
    machine = Machine(code, list(arrays.values()), tiles)
    machine.run()
    got = machine.array(list(arrays).index("out"), np.dtype(np.uint16), (tiles, 64, 64))
    weights = matrix.tiling.to_rows(decoded(matrix).view(np.uint16)).reshape(-1, 64)
    want = np.asarray(operand_order(jnp.asarray(weights))).reshape(got.shape)
    np.testing.assert_array_equal(got, want)
    # In PTX; the assembler joins many of them.
    assert machine.issued / weights.size < {"exponent": 5, "palette": 14, "compact": 18}[form]


def test_operand_order_is_a_permutation_within_tiles() -> None:
    columns = np.asarray(operand_order(jnp.arange(128)[None]))[0]
    assert sorted(columns[:64]) == list(range(64))
    np.testing.assert_array_equal(columns[64:], columns[:64] + 64)
    # Register i of lane q has operand columns 8i + 2q and 8i + 2q + 1.
    assert [columns[8 * i + 2 * 1] for i in range(8)] == [16 + 2 * i for i in range(8)]


@pytest.mark.parametrize("out_dtype", [None, jnp.float32])
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("form", FORMS)
def test_xla_form_is_the_dense_product_to_the_bit(form: str, rows: int, out_dtype) -> None:
    matrix = coded(form, shape=(72, D))
    matrix.sign_mantissa[:] &= 0x7F
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.normal(size=(rows, D)), jnp.bfloat16)
    dense = jnp.asarray(decoded(matrix))
    twice = jnp.concatenate([x, x]) if rows == 1 else x

    @jax.jit
    def product(x: jax.Array, weights: jax.Array) -> jax.Array:
        return jnp.einsum("mk,nk->mn", x, weights, preferred_element_type=out_dtype or x.dtype)

    want = np.asarray(product(twice, dense)[:rows])
    got = np.asarray(jax.jit(partial(unweight_matmul, out_dtype=out_dtype))(x, matrix))
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(got.view(np.uint8), want.view(np.uint8))


def mosaic(x: np.ndarray, matrix: UnweightMatrix, **options) -> np.ndarray:
    kernel = MATMULS[matrix.form]
    call = partial(kernel, implementation="mosaic", interpret=True, **options)
    return np.asarray(jax.jit(call)(x, *matrix.arrays().values()))


def tame(form: str, shape: tuple[int, int]) -> UnweightMatrix:
    """A matrix without infinities."""
    bits = words(3e-3, shape)
    return unweight_reference.pack(bits & 0xBFFF, form)


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("form", FORMS)
def test_kernel_sums_are_those_of_the_weights_in_float32(form: str, splits: int) -> None:
    matrix = tame(form, (192, 256))
    x = np.random.default_rng(1).normal(size=(5, 256)).astype(BF16)
    got = mosaic(x, matrix, out_dtype=jnp.float32, blocks=UnweightBlocks(splits=splits, slots=2))
    want = x.astype(np.float64) @ decoded(matrix).astype(np.float64).T
    assert got.dtype == np.float32
    assert np.abs(got - want).max() <= 1e-5 * np.abs(want).max()


def test_more_warpgroups_and_less_depth_give_the_same_bits() -> None:
    x = np.random.default_rng(1).normal(size=(7, 128)).astype(BF16)
    matrix = tame("palette", (256, 128))
    two = mosaic(x, matrix, blocks=UnweightBlocks(slots=2, splits=1, depth=128))
    four = mosaic(x, matrix, blocks=UnweightBlocks(slots=2, splits=1, warpgroups=4))
    np.testing.assert_array_equal(four, two)
    assert two.any(axis=1).all()


@pytest.mark.parametrize("implementation", ["xla", "mosaic"])
def test_row_ignores_its_batch_mates(implementation: str) -> None:
    """Bit-exact: another place in the batch, and NaN in all other rows."""
    x = np.random.default_rng(2).normal(size=(12, 128)).astype(BF16)
    matrix = tame("palette", (64, 128))
    interpret = {"interpret": True} if implementation == "mosaic" else {}
    call = jax.jit(partial(MATMULS["palette"], implementation=implementation, **interpret))
    whole = np.asarray(call(x, *matrix.arrays().values()))
    alone = np.full_like(x, np.nan)
    alone[9] = x[2]
    got = np.asarray(call(alone, *matrix.arrays().values()))
    np.testing.assert_array_equal(got[9], whole[2])


def test_splits_divide_the_steps() -> None:
    """Behind a matrix's last column lies the next band, not zeros."""
    for columns in (64, 192, 576, 4096, 7168):
        for rows in (8, 32, 128):
            sizes = UnweightBlocks(splits=7, depth=128)
            blocks = sizes.resolved_for("palette", rows, 1, 512, columns, 2)
            assert columns % (blocks.depth * blocks.splits) == 0


@pytest.mark.parametrize("rows", [8, 16, 32, 64, 128, 256])
@pytest.mark.parametrize("form", FORMS)
def test_default_blocks_fit_an_sm(form: str, rows: int) -> None:
    blocks = UnweightBlocks().resolved_for(form, rows, 9, F=2048, D=7168, out_bytes=2)
    assert blocks.slots >= 3
    assert blocks.features == 64 * blocks.warpgroups


def test_a_decode_step_reads_little_more_than_its_codes() -> None:
    """Of bfloat16's bytes, by the shapes of what is compiled."""
    shares = {}
    for form, kernel in MATMULS.items():
        (spec,) = (s for s in kernel.arg_specs if s.name == "Llama 3.1 8B gate, one row")
        arrays = spec.shapes(BF16)
        rows = (14336 + 4096) * 2
        shares[form] = (kernel.bytes(**arrays) - rows) / (14336 * 4096 * 2)
    assert shares["compact"] <= 0.72
    assert shares["palette"] <= 0.76
    assert 1 <= shares["exponent"] < 1.001


def test_counts_of_groups() -> None:
    kernel = GROUPED_MATMULS["exponent"]
    x = np.zeros((3, 64), BF16)
    one = np.zeros((2, 64, 64), np.uint8)
    arrays = {"x": x, "sign_mantissa": one, "exponents": one, "group_sizes": np.asarray([0, 2])}
    assert kernel.flops(**arrays) == 2 * 2 * 64 * 64
    assert kernel.bytes(**arrays) == 2 * 64 * 64 + (2 * 64 + 3 * 64) * 2


def test_what_the_kernel_refuses() -> None:
    x = np.zeros((2, 64), BF16)
    matrix = coded("palette", shape=(64, 64))
    arrays = list(matrix.arrays().values())
    refusal = MATMULS["palette"].refusal
    assert refusal(x, *arrays) is None
    assert refusal(x.astype(np.float32), *arrays) == "x is float32, not bfloat16"
    low = list(coded("palette", shape=(72, 64)).arrays().values())
    assert refusal(x, *low) == "72 features are no multiple of 64"
    reason = refusal(x, *arrays, out_dtype=jnp.float16)
    assert reason == "the output is float16, neither bfloat16 nor float32"


def test_what_the_operations_refuse() -> None:
    x = jnp.zeros((2, 64), jnp.bfloat16)
    huffman = coded("huffman", shape=(64, 64))
    with pytest.raises(ValueError, match=r"expected one of .*palette.*received 'huffman'"):
        unweight_matmul(x, huffman)
    matrix = coded("palette", shape=(64, 64))
    with pytest.raises(ValueError, match="expected rows"):
        unweight_matmul(x[:, :32], matrix)
    with pytest.raises(ValueError, match="with 1 leading axes"):
        grouped_unweight_matmul(x, matrix, jnp.zeros(1, jnp.int32))
