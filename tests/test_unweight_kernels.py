"""Coded matrices on the device: tile order, tables, rows, and what a GPU would execute."""

import re
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from simt import Machine

from pallas_kernels import (
    KERNELS,
    MatrixTiling,
    UnweightMatrix,
    canonical_codes,
    code_lengths,
    unweight_decompress,
    unweight_exponents,
    unweight_rows,
    unweight_transcode,
)
from pallas_kernels.threads import GpuThread, NumpyThreads
from pallas_kernels.toolchain import ToolchainMissing, run_python
from pallas_kernels.unweight_decompress_xla import decode_table
from pallas_kernels.unweight_matrix import ARRAYS, FORMS, MAX_BITS
from pallas_kernels.unweight_reference import pack

BF16 = ml_dtypes.bfloat16

# What the compiler makes of each program, for the sets of arguments that are cheap to execute.
EXECUTED = (
    ("unweight_palette", "experts"),
    ("unweight_palette", "any words"),
    ("unweight_exponent", "rare exponents"),
    ("unweight_compact", "experts"),
    ("unweight_compact", "any words"),
    ("unweight_huffman", "experts"),
    ("unweight_huffman", "long codes"),
    ("unweight_exponents", "experts"),
    ("unweight_transcode", "experts"),
)


def words(F: int, D: int, seed: int = 0, rare: float = 5e-3) -> np.ndarray:
    """Words with exponents of trained weights, and rare ones: NaN, infinities, zeros."""
    rng = np.random.default_rng(seed)
    exponents = np.maximum(120 - rng.geometric(0.45, size=(F, D)), 106)
    exponents = np.where(rng.random((F, D)) < rare, rng.choice([0, 1, 254, 255], (F, D)), exponents)
    others = rng.integers(0, 256, size=(F, D))
    return (others << 8 & 0x8000 | exponents << 7 | others & 0x7F).astype(np.uint16)


def on_device(matrix: UnweightMatrix) -> UnweightMatrix:
    return jax.tree.map(jnp.asarray, matrix)


def bits(x: jax.Array) -> np.ndarray:
    assert x.dtype == jnp.bfloat16
    return np.asarray(x).view(np.uint16)


# -- tile order


@pytest.mark.parametrize(
    ("F", "D"), [(1, 64), (3, 64), (64, 64), (70, 192), (130, 128), (128, 256)]
)
def test_order_is_bands_then_tiles_then_rows(F: int, D: int) -> None:
    tiling = MatrixTiling(F, D)
    matrix = np.arange(F * D, dtype=np.uint32).reshape(F, D)
    rows = tiling.to_rows(matrix)
    want, tiles, inside = [], [], []
    for band in range(0, F, 64):
        for column in range(0, D, 64):
            block = matrix[band : band + 64, column : column + 64]
            tiles += [tiles[-1] + 1 if tiles else 0] * len(block)
            inside += range(len(block))
            want.append(block)
    np.testing.assert_array_equal(rows, np.concatenate(want))
    np.testing.assert_array_equal(tiling.to_matrix(rows), matrix)
    np.testing.assert_array_equal(jax.jit(tiling.to_matrix)(rows), matrix)
    np.testing.assert_array_equal(rows[tiling.row_ids(np.arange(F))].reshape(F, D), matrix)
    flat = np.arange(tiling.rows)
    np.testing.assert_array_equal(tiling.tile_ids(flat), tiles)
    np.testing.assert_array_equal(tiling.tile_rows(flat), inside)
    chunks = tiling.parts(flat, 16)
    np.testing.assert_array_equal(np.diff(tiling.chunk_rows()), np.bincount(chunks))
    assert (tiling.tiles, tiling.chunks) == (tiles[-1] + 1, chunks[-1] + 1)
    assert tiling.pairs == tiling.parts(flat, 2)[-1] + 1


def test_width_of_no_whole_rows_is_refused() -> None:
    with pytest.raises(ValueError, match=r"multiple of 64, received \(3, 65\): pad its rows"):
        MatrixTiling(3, 65)


# -- the matrix


@pytest.mark.parametrize("form", FORMS)
def test_matrix_is_a_pytree_of_its_arrays(form: str) -> None:
    matrix = pack(words(64, 128), form)
    leaves, tree = jax.tree.flatten(matrix)
    assert len(leaves) == len(ARRAYS[form])
    assert jax.tree.unflatten(tree, leaves).check().shape == (64, 128)
    assert matrix.nbytes == sum(x.nbytes for x in leaves)


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("codes", lambda x: x[:-1], "codes of a palette matrix"),
        ("codes", lambda x: x.astype(np.int32), "expected uint8"),
        ("palette", lambda x: None, "palette: expected an array"),
        ("stream", lambda x: np.zeros(4, np.uint32), "stream: expected none"),
        ("verbatim", lambda x: x[:-1], "verbatim: expected"),
    ],
)
def test_wrong_arrays_are_named(name: str, change: Callable, said: str) -> None:
    matrix = pack(words(64, 128), "palette")
    assert len(matrix.verbatim_row) > 1
    changed = UnweightMatrix(
        matrix.form, matrix.shape, **{**matrix.arrays(), name: change(getattr(matrix, name))}
    )
    with pytest.raises(ValueError, match=said):
        changed.check()


# -- the table


@pytest.mark.parametrize(
    "counts",
    [[1], [0, 5], [7, 7, 7], [2**i for i in range(13)], [1] * 16, [1000] + [1] * 15],
    ids=str,
)
def test_table_says_what_the_bits_are(counts: list[int]) -> None:
    lengths = code_lengths(counts + [0] * (16 - len(counts)), MAX_BITS)
    # As texts, the first bit of the stream first.
    texts = (f"{c:0{n}b}"[::-1] for n, c in zip(lengths, canonical_codes(lengths), strict=True))
    codes = {text: s for s, text in enumerate(texts) if lengths[s]}
    assert sum(2.0 ** -len(code) for code in codes) <= 1
    assert max(map(len, codes)) <= MAX_BITS
    table = np.asarray(decode_table(jnp.asarray(lengths, jnp.uint8)))

    def first(text: str) -> str | None:
        return next((text[:n] for n in range(1, len(text) + 1) if text[:n] in codes), None)

    for index in np.random.default_rng(0).integers(0, 4096, 300):
        text = f"{index:012b}"[::-1]
        entry = int(table[index])
        one = first(text)
        if one is None:
            continue
        assert entry >> 8 & 255 == len(one)
        assert entry >> 24 & 15 == codes[one]
        # Behind the twelve bits a table sees zeros, and a code of one symbol is all zeros.
        two = first(text[len(one) :])
        if two is not None:
            assert entry & 255 == len(one) + len(two)
            assert entry >> 28 == codes[two]
            assert not entry >> 16 & 255
        elif len(codes) > 1:
            assert entry & 255 == len(one)
            assert entry >> 16 & 255 == 255


# -- operations on matrices


@pytest.mark.parametrize("form", FORMS)
def test_every_bit_pattern_survives(form: str) -> None:
    every = np.arange(1 << 16, dtype=np.uint16)
    matrix = np.random.default_rng(0).permutation(every).reshape(256, 256)
    got = jax.jit(unweight_decompress)(on_device(pack(matrix, form)))
    np.testing.assert_array_equal(bits(got), matrix)


@pytest.mark.parametrize("shape", [(64, 128), (83, 64)])
def test_from_huffman_to_other_forms(shape: tuple[int, int]) -> None:
    matrix = words(*shape)
    huffman = on_device(pack(matrix, "huffman"))
    palette, exponent = jax.jit(lambda m: (unweight_transcode(m), unweight_exponents(m)))(huffman)
    assert (palette.form, exponent.form) == ("palette", "exponent")
    want = pack(matrix, "palette")
    for name, array in palette.check().arrays().items():
        np.testing.assert_array_equal(array, want.arrays()[name], err_msg=name)
    want = pack(matrix, "exponent")
    np.testing.assert_array_equal(exponent.check().exponents, want.exponents)
    with pytest.raises(ValueError, match="form huffman, received palette"):
        unweight_transcode(palette)


@pytest.mark.parametrize("form", FORMS)
def test_rows_of_an_embedding(form: str) -> None:
    """Rows of all bands, one twice, verbatim ones and the second of pairs among them."""
    table = words(150, 192, rare=2e-2)
    ids = np.random.default_rng(1).integers(0, 150, (5, 7)).astype(np.int32)
    ids[0, :4] = 0, 149, 149, 64
    got = jax.jit(unweight_rows)(on_device(pack(table, form)), jnp.asarray(ids))
    np.testing.assert_array_equal(bits(got), table[ids])


@pytest.mark.parametrize("form", FORMS)
def test_lower_last_band_takes_the_xla_form(form: str) -> None:
    matrix = pack(words(83, 64), form)
    kernel = KERNELS[f"unweight_{form}"]
    reason = kernel.refusal(*matrix.arrays().values(), shape=matrix.shape)
    assert reason == "the matrix has 83 rows, which is no multiple of 64"
    got = unweight_decompress(on_device(matrix))
    np.testing.assert_array_equal(bits(got), words(83, 64))


def test_too_many_weights_are_named() -> None:
    shapes = [jax.ShapeDtypeStruct((1 << 20, 64), np.uint8)] * 2
    kernel = KERNELS["unweight_exponent"]
    assert kernel.refusal(*shapes, shape=(1 << 14, 1 << 12)) is None
    experts = [jax.ShapeDtypeStruct((32, *x.shape), x.dtype) for x in shapes]
    assert "offsets have 32 bits" in str(kernel.refusal(*experts, shape=(1 << 14, 1 << 12)))


def test_cut_stream_ends_and_changes_later_weights_only() -> None:
    """A decoder follows no length but its own: whatever the stream is, it ends."""
    matrix = words(64, 128, rare=0)
    whole = pack(matrix, "huffman")
    half = len(whole.stream) // 2
    cut = UnweightMatrix(
        "huffman", whole.shape, **{**whole.arrays(), "stream": whole.stream[:half]}
    )
    got = bits(jax.jit(unweight_decompress)(on_device(cut)))
    before = np.flatnonzero(whole.chunk_first < 4 * half)[-1]
    tiling = MatrixTiling(64, 128)
    rows = tiling.to_rows(got)[: 16 * before], tiling.to_rows(matrix)[: 16 * before]
    np.testing.assert_array_equal(*rows)
    assert (got != matrix).any()


# -- what the compiler made of the programs


@cache
def compiled() -> list[tuple[str, int]]:
    """PTX and number of blocks of every kernel to be executed."""
    arguments = [text for pair in EXECUTED for text in pair]
    try:
        text = run_python(str(Path(__file__).parent / "gpu_unweight.py"), *arguments)
    except ToolchainMissing as missing:
        if sys.platform == "linux":
            raise
        pytest.skip(str(missing))
    parts = re.split(r"// blocks (\d+)\n?", text)
    return [(code, int(blocks)) for code, blocks in zip(parts[::2], parts[1::2], strict=False)]


@pytest.mark.parametrize(("name", "chosen"), EXECUTED)
def test_executed_instructions_give_the_same_bits(name: str, chosen: str) -> None:
    code, blocks = compiled()[EXECUTED.index((name, chosen))]
    kernel = KERNELS[name]
    spec = next(spec for spec in kernel.arg_specs if spec.name == chosen)
    # Lengths of arrays depend on what is in them: those that were compiled for.
    arrays = spec.make(0)
    want = kernel.reference(**arrays, **spec.static)
    memory = [x for n, x in arrays.items() if n != "lengths"]
    if "lengths" in arrays:
        memory.append(np.asarray(decode_table(jnp.asarray(arrays["lengths"]))))
    # There are no empty buffers.
    memory = [x if x.size else np.zeros(1, x.dtype) for x in memory]
    machine = Machine(code, [*memory, np.zeros(want.shape, want.dtype)], blocks)
    machine.run()
    got = machine.array(len(memory), want.dtype, want.shape)
    assert kernel.error(got, want) == 0


def test_both_machines_have_the_same_operations() -> None:
    """Except for what only one of them needs."""
    both = [
        {n for n in vars(machine) if not n.startswith("_")} for machine in (GpuThread, NumpyThreads)
    ]
    assert both[0] == both[1]


def test_error_of_an_exact_kernel_counts_values_with_other_bits() -> None:
    kernel = KERNELS["unweight_exponent"]
    want = np.array([0x7FC1, 0, 0x3F80, 0x8000], np.uint16).view(BF16)
    assert kernel.error(want.copy(), want) == 0
    other = np.array([0x7FC2, 0, 0x3F80, 0x0000], np.uint16).view(BF16)
    assert kernel.error(other, want) == 0.5
    assert kernel.error(want.astype(np.float32), want) == np.inf
    assert partial(KERNELS["int4_matmul"].error, np.full(2, 1e-9))(np.array([0.0, 1.0])) == np.inf
