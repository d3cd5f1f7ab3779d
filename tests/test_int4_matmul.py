"""4-bit weights: their format, and their products against dequantise-then-multiply."""

import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from ptx import execute

from pallas_kernels.grouped_matmul_xla import whole_tiles
from pallas_kernels.int4_format import (
    dequantise,
    dequantise_reference,
    pack_for_device,
    unpack_from_device,
)
from pallas_kernels.int4_matmul import (
    GROUPED_INT4_MATMUL,
    INT4_MATMUL,
    Int4Blocks,
    multiply_int4_tiles,
)
from pallas_kernels.kernel import ArgSpec, Kernel
from pallas_kernels.toolchain import ToolchainMissing, run_python

BF16 = ml_dtypes.bfloat16
INTERPRET = plgpu.InterpretGPUParams()
DTYPES = {"float32": np.float32, "bfloat16": BF16}
CASES = [
    pytest.param(kernel, spec, id=f"{kernel.name}-{spec.name}".replace(" ", "_"))
    for kernel in (INT4_MATMUL, GROUPED_INT4_MATMUL)
    for spec in kernel.arg_specs
    if not spec.compile_only
]


def checkpoint_weights(*shape: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Values -8..7 [..., F, D], their words as a checkpoint packs them, and scales."""
    rng = np.random.default_rng(sum(shape))
    values = rng.integers(-8, 8, size=shape)
    stored = (values + 8).reshape(*shape[:-1], -1, 8)
    words = sum(stored[..., i] << (4 * i) for i in range(8))
    scales = rng.uniform(0.01, 0.1, size=(*shape[:-1], shape[-1] // 32)).astype(BF16)
    return values, words.astype(np.uint32).view(np.int32), scales


def device_weights(*shape: int) -> tuple[np.ndarray, np.ndarray]:
    _, words, scales = checkpoint_weights(*shape)
    packed, turned = pack_for_device(words, scales)
    return np.asarray(packed), np.asarray(turned)


@pytest.mark.parametrize("shape", [(8, 32), (16, 128), (3, 8, 64)])
def test_packing_loses_nothing(shape: tuple[int, ...]) -> None:
    _, words, scales = checkpoint_weights(*shape)
    packed, turned = jax.jit(pack_for_device)(words, scales)
    assert packed.dtype == jnp.int32
    assert packed.nbytes + turned.nbytes == words.nbytes + scales.nbytes
    back_words, back_scales = jax.jit(unpack_from_device)(packed, turned)
    np.testing.assert_array_equal(back_words, words)
    np.testing.assert_array_equal(back_scales, scales)


def test_device_order_of_a_group() -> None:
    """Word t has columns 2t and 2t + 1 of every eight, 16 bits apart."""
    stored = np.arange(32) % 16
    words = (stored.reshape(4, 8) << (4 * np.arange(8))).sum(axis=1).astype(np.uint32)
    packed, _ = pack_for_device(words.view(np.int32)[None], np.ones((1, 1), BF16))
    columns = [[8 * i + 2 * t + e for e in range(2) for i in range(4)] for t in range(4)]
    for word, own in zip(np.asarray(packed)[0].view(np.uint32), columns, strict=True):
        assert [int(word) >> (4 * n) & 15 for n in range(8)] == [c % 16 for c in own]


def test_weights_are_rounded_to_bfloat16_once() -> None:
    values, words, scales = checkpoint_weights(16, 128)
    exact = values.reshape(16, 4, 32) * scales[:, :, None].astype(np.float64)
    # Products of 4 and 8 bits are exact in float32, so this rounds once.
    want = exact.astype(np.float32).astype(BF16).reshape(16, 128)
    assert (want.astype(np.float64).reshape(exact.shape) != exact).any()
    packed, turned = map(np.asarray, pack_for_device(words, scales))
    np.testing.assert_array_equal(dequantise_reference(packed, turned), want)
    np.testing.assert_array_equal(jax.jit(dequantise)(packed, turned), want)
    widened = jax.jit(lambda w, s: dequantise(w, s).astype(jnp.float32))(packed, turned)
    np.testing.assert_array_equal(widened, want.astype(np.float32))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kernel", "spec"), CASES)
def test_xla_form_matches_float64(kernel: Kernel, spec: ArgSpec, dtype: str) -> None:
    arrays = spec.make(3, DTYPES[dtype])
    want = kernel.reference(**arrays)
    got = jax.jit(partial(kernel, implementation="xla"))(*arrays.values())
    assert got.dtype == DTYPES[dtype]
    error = np.abs(np.asarray(got).astype(np.float64) - want).max()
    assert error <= kernel.tolerance[dtype] * np.abs(want).max()
    assert not np.asarray(got)[want == 0].any()


def test_registers_hold_the_weights_that_a_gpu_wants() -> None:
    """What the compiler made of the one function that interpret mode leaves out, executed."""
    try:
        code = run_python(str(Path(__file__).parent / "gpu_int4.py"))
    except ToolchainMissing as missing:
        if sys.platform == "linux":
            raise
        pytest.skip(str(missing))
    weights, scales = device_weights(128, 64)
    out = np.zeros((2, 128, 32), BF16)
    *_, stored = execute(code, [weights, scales, out])
    got = np.frombuffer(stored, BF16).reshape(out.shape)
    want = dequantise_reference(weights, scales).reshape(128, 2, 32).swapaxes(0, 1)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("splits", [1, 3])
def test_kernel_sums_equal_dequantise_then_multiply_in_float32(splits: int) -> None:
    rows, F, D = 5, 128, 384
    x = np.random.default_rng(1).normal(size=(rows, D)).astype(BF16)
    weights, scales = device_weights(F, D)
    blocks = Int4Blocks(splits=splits, slots=2).resolved(8, 1, F, D)
    got = multiply_int4_tiles(
        jnp.asarray(x),
        jnp.asarray(weights)[None],
        jnp.asarray(scales)[None],
        whole_tiles(rows, blocks.rows),
        blocks,
        interpret=INTERPRET,
        name="int4_matmul",
        out_dtype=jnp.float32,
    )
    weights_FD = dequantise_reference(weights, scales).astype(np.float32)
    want = x.astype(np.float32) @ weights_FD.T
    assert np.abs(np.asarray(got) - want).max() <= 1e-5 * np.abs(want).max()


def test_more_warpgroups_give_the_same_bits() -> None:
    x = jnp.asarray(np.random.default_rng(1).normal(size=(7, 128)), jnp.bfloat16)
    weights, scales = map(jnp.asarray, device_weights(1, 256, 128))

    def product(**sizes: int) -> np.ndarray:
        blocks = Int4Blocks(slots=2, **sizes).resolved(8, 1, 256, 128)
        tiles = whole_tiles(7, 8)
        return np.asarray(
            multiply_int4_tiles(x, weights, scales, tiles, blocks, INTERPRET, "int4_matmul")
        )

    two = product(features=128, warpgroups=2)
    np.testing.assert_array_equal(product(features=256, warpgroups=4), two)
    assert two.any(axis=1).all()


@pytest.mark.parametrize("implementation", ["xla", "mosaic"])
def test_row_ignores_its_batch_mates(implementation: str) -> None:
    """Bit-exact: another place in the batch, and NaN in all other rows."""
    x = np.random.default_rng(2).normal(size=(12, 128)).astype(BF16)
    weights, scales = device_weights(64, 128)
    interpret = {"interpret": True} if implementation == "mosaic" else {}
    call = jax.jit(partial(INT4_MATMUL, implementation=implementation, **interpret))
    whole = np.asarray(call(x, weights, scales))
    alone = np.full_like(x, np.nan)
    alone[9] = x[2]
    np.testing.assert_array_equal(np.asarray(call(alone, weights, scales))[9], whole[2])


def test_default_blocks_fit_an_sm() -> None:
    for rows in (8, 16, 32, 64, 128):
        blocks = Int4Blocks().resolved(rows, row_tiles=9, F=2048, D=7168)
        assert blocks.slots >= 3
        slot = blocks.depth * (2 * rows + blocks.features * 9 // 16)
        used = rows * blocks.features * 4 + blocks.slots * slot
        assert used + 1024 <= 227 * 1024 // (1 if rows >= 64 else 2)


def test_counts_are_of_four_and_a_half_bits() -> None:
    x = np.zeros((2, 64), BF16)
    weights = np.zeros((3, 8, 8), np.int32)
    scales = np.zeros((3, 2, 8), BF16)
    bits = 8 * 64 * 4.5
    assert INT4_MATMUL.flops(x, weights[0], scales[0]) == 2 * 2 * 8 * 64
    assert INT4_MATMUL.bytes(x, weights[0], scales[0]) == bits / 8 + 2 * (64 + 8) * 2
    sizes = np.asarray([0, 1, 0])
    assert GROUPED_INT4_MATMUL.flops(x, weights, scales, sizes) == 2 * 8 * 64
    assert GROUPED_INT4_MATMUL.bytes(x, weights, scales, sizes) == bits / 8 + (64 + 2 * 8) * 2


def test_what_the_kernel_refuses() -> None:
    x = np.zeros((2, 64), BF16)
    weights, scales = device_weights(8, 64)
    refusal = INT4_MATMUL.refusal
    assert refusal(x.astype(np.float32), weights, scales) == "x is float32, not bfloat16"
    assert refusal(x, weights, scales) == "64 columns are no multiple of 128"
    wide = scales.astype(np.float32)
    assert refusal(x, weights, wide) == "scales are float32, not bfloat16"
