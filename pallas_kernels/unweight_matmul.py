"""Reconstructive products: weights that stay coded in memory and become bfloat16 on their way into
the tensor cores, for one matrix and for experts. A record for every form of `UnweightMatrix`."""

import dataclasses
import inspect
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import unweight_reference
from pallas_kernels.grouped_matmul import build_rows, grouped_matmul_reference
from pallas_kernels.grouped_matmul_mosaic import unaligned
from pallas_kernels.grouped_matmul_xla import loop_over_tiles
from pallas_kernels.kernel import ArgSpec, Kernel
from pallas_kernels.unweight_decompress import abstract_matrix, unweight_decompress
from pallas_kernels.unweight_matmul_mosaic import (
    SPACE,
    UnweightBlocks,
    grouped_unweight_matmul_mosaic,
    unweight_matmul_mosaic,
)
from pallas_kernels.unweight_matrix import ARRAYS, ROW, TILE_ROWS, UnweightMatrix

FORMS = ("palette", "exponent", "compact")
MAX_ELEMENTS = 1 << 31  # of an array: offsets have 32 bits

DECODERS: Mapping[str, Callable[..., np.ndarray]] = {
    "palette": unweight_reference.palette_reference,
    "exponent": unweight_reference.exponent_reference,
    "compact": unweight_reference.compact_reference,
}


@dataclasses.dataclass(frozen=True)
class _Arguments:
    """What a record of some form is called with: rows, a matrix or those of groups, their sizes."""

    x: Any
    matrix: UnweightMatrix
    group_sizes: Any = None

    @classmethod
    def names(cls, form: str, grouped: bool) -> tuple[str, ...]:
        return ("x", *ARRAYS[form], *(("group_sizes",) if grouped else ()))

    @classmethod
    def of(cls, form: str, arrays: Mapping[str, Any]) -> "_Arguments":
        """x says how wide the matrix is, and that how high."""
        x, coded = arrays["x"], {name: arrays[name] for name in ARRAYS[form]}
        D = x.shape[-1]
        F = coded["sign_mantissa"].shape[-2] * ROW // D
        return cls(x, UnweightMatrix(form, (F, D), **coded), arrays.get("group_sizes"))


# -- operations on any device


def _xla(given: _Arguments, out_dtype: Any = None) -> jax.Array:
    """Decompression, then the product that a dense matrix has: the same bits."""
    x_MD, M = given.x, given.x.shape[0]
    weights_FD = unweight_decompress(given.matrix).astype(x_MD.dtype)
    if M == 1 and x_MD.dtype == jnp.bfloat16:
        # XLA's product of one row is slow on a CPU, and a dense matrix does not get it.
        x_MD = jnp.concatenate([x_MD, x_MD])
    out_MF = jnp.einsum(
        "mk,nk->mn", x_MD, weights_FD, preferred_element_type=out_dtype or x_MD.dtype
    )
    return out_MF[:M]


def _grouped_xla(given: _Arguments) -> jax.Array:
    """Grouped product that decompresses the matrix of one group at a time."""

    def weights_of(group: jax.Array) -> jax.Array:
        return unweight_decompress(jax.tree.map(lambda x: x[group], given.matrix))

    return loop_over_tiles(given.x, given.matrix.shape[0], given.group_sizes, weights_of)


def _mosaic(given: _Arguments, **options: Any) -> jax.Array:
    return unweight_matmul_mosaic(given.x, given.matrix, **options)


def _grouped_mosaic(given: _Arguments, **options: Any) -> jax.Array:
    return grouped_unweight_matmul_mosaic(given.x, given.matrix, given.group_sizes, **options)


def _reference(given: _Arguments) -> np.ndarray:
    """Rows times the weights of the plain decoder, in float64."""
    decode, matrix = DECODERS[given.matrix.form], given.matrix
    weights = decode(*matrix.arrays().values(), shape=matrix.shape)
    if given.group_sizes is not None:
        return grouped_matmul_reference(given.x, weights, given.group_sizes)
    return given.x.astype(np.float64) @ weights.astype(np.float64).T


# -- counts


def _flops(given: _Arguments) -> int:
    rows = given.x.shape[0] if given.group_sizes is None else np.sum(given.group_sizes)
    return int(2 * rows * math.prod(given.matrix.shape))


def _bytes(given: _Arguments) -> int:
    """The matrix, or those of groups with rows, once, the rows of x that count, and the output."""
    (M, D), matrix, sizes = given.x.shape, given.matrix, given.group_sizes
    used, rows = (1, M) if sizes is None else (np.count_nonzero(sizes), np.sum(sizes))
    coded = used * (matrix.nbytes // math.prod(matrix.leading))
    return int(coded + (rows * D + M * matrix.shape[0]) * given.x.dtype.itemsize)


def _unsupported(given: _Arguments, out_dtype: Any = None) -> str | None:
    F = given.matrix.shape[0]
    arrays = given.matrix.arrays().values()
    if F % TILE_ROWS:
        return f"{F} features are no multiple of {TILE_ROWS}"
    if out_dtype is not None and jnp.dtype(out_dtype) not in (jnp.bfloat16, jnp.float32):
        return f"the output is {jnp.dtype(out_dtype)}, neither bfloat16 nor float32"
    largest = max(math.prod(x.shape) for x in arrays)
    if largest >= MAX_ELEMENTS:
        return f"an array has {largest} elements, and offsets have 32 bits"
    return unaligned(given.x, F, ROW)


# -- sets of arguments


def _words(rng: np.random.Generator, F: int, D: int, rare: float) -> np.ndarray:
    """Words of weights as trained ones are: 16 exponents, and a share of others."""
    exponents = np.maximum(120 - rng.geometric(0.45, size=(F, D)), 105)
    others = rng.integers(90, 124, size=(F, D))
    exponents = np.where(rng.random((F, D)) < rare, others, exponents)
    bytes_FD = rng.integers(0, 256, size=(F, D))
    return (bytes_FD << 8 & 0x8000 | exponents << 7 | bytes_FD & 0x7F).astype(np.uint16)


def _stack(matrices: list[UnweightMatrix], spare: int) -> dict[str, np.ndarray]:
    """Arrays of several matrices, with at least so many spare entries, which make NaN."""
    stacked = {}
    for name in ARRAYS[matrices[0].form]:
        arrays = [matrix.arrays()[name] for matrix in matrices]
        ragged = name in ("verbatim_row", "verbatim", "escapes")
        length = max(map(len, arrays)) + (spare if ragged else 0)
        fill = matrices[0].tiling.rows if name == "verbatim_row" else 0xFF
        stacked[name] = np.stack(
            [
                np.concatenate([x, np.full((length - len(x), *x.shape[1:]), fill, x.dtype)])
                for x in arrays
            ]
        )
    return stacked


def _build(
    rng: np.random.Generator,
    dtype: np.dtype,
    form: str,
    num_rows: int,
    F: int,
    D: int,
    rare: float,
    spare: int = 0,
) -> dict[str, np.ndarray]:
    x = build_rows(rng, dtype, num_rows, D, (num_rows,))["x"]
    coded = _stack([unweight_reference.pack(_words(rng, F, D, rare), form)], spare)
    return {"x": x, **{name: array[0] for name, array in coded.items()}}


def _build_grouped(
    rng: np.random.Generator,
    dtype: np.dtype,
    form: str,
    num_rows: int,
    sizes: tuple[int, ...],
    F: int,
    D: int,
) -> dict[str, np.ndarray]:
    """Matrices with more and more verbatim rows and escapes; those without rows are all NaN."""
    rows = build_rows(rng, dtype, num_rows, D, sizes)
    words = [
        _words(rng, F, D, 2e-3 * e) if size else np.full((F, D), 0x7FC0, np.uint16)
        for e, size in enumerate(sizes)
    ]
    coded = _stack([unweight_reference.pack(w, form) for w in words], spare=3)
    return {"x": rows["x"], **coded, "group_sizes": rows["group_sizes"]}


def _model_spec(form: str, name: str, num_rows: int, F: int, D: int, experts: int = 0) -> ArgSpec:
    def build(rng: np.random.Generator, dtype: np.dtype) -> dict[str, Any]:
        leading = (experts,) if experts else ()
        arrays = {
            "x": jax.ShapeDtypeStruct((num_rows, D), dtype),
            **abstract_matrix(form, F, D, leading).arrays(),
        }
        if experts:
            arrays["group_sizes"] = jax.ShapeDtypeStruct((experts,), np.int32)
        return arrays

    return ArgSpec(name, build, {}, compile_only=True)


def _specs(form: str) -> tuple[ArgSpec, ...]:
    def small(name: str, num_rows: int, F: int, D: int, rare: float, spare: int = 0) -> ArgSpec:
        sizes = {"num_rows": num_rows, "F": F, "D": D, "rare": rare, "spare": spare}
        return ArgSpec(name, partial(_build, form=form, **sizes), {})

    return (
        small("one row", 1, 128, 256, 1e-3, spare=5),
        small("no rare exponents", 8, 128, 128, 0.0),
        small("parts of the sum, an odd band", 17, 64, 1024, 1e-4),
        small("rare exponents in all rows", 32, 64, 192, 5e-2),
        small("64 rows", 64, 192, 128, 2e-3),
        small("several tiles of rows", 200, 128, 64, 2e-3),
        _model_spec(form, "Llama 3.1 8B gate, one row", 1, 14336, 4096),
        _model_spec(form, "Llama 3.1 8B down, 16 rows", 16, 4096, 14336),
        _model_spec(form, "Llama 3.1 8B output, 32 rows", 32, 4096, 4096),
        _model_spec(form, "Llama 3.1 70B gate on 8 devices, 64 rows", 64, 3584, 8192),
        _model_spec(form, "Llama 3.1 8B gate, prefill", 4096, 14336, 4096),
    )


def _grouped_specs(form: str) -> tuple[ArgSpec, ...]:
    def small(name: str, num_rows: int, sizes: tuple[int, ...], F: int, D: int) -> ArgSpec:
        given = {"num_rows": num_rows, "sizes": sizes, "F": F, "D": D}
        return ArgSpec(name, partial(_build_grouped, form=form, **given), {})

    return (
        small("ragged with a tail", 30, (3, 0, 17, 1, 4), 128, 128),
        small("no rows", 9, (0, 0), 64, 64),
        small("groups of several tiles", 150, (130, 3), 64, 128),
        _model_spec(form, "Qwen3 30B-A3B up, one row", 8, 768, 2048, 128),
        _model_spec(form, "Qwen3 30B-A3B down, decode", 512, 2048, 768, 128),
        _model_spec(form, "Mixtral 8x7B up, decode", 64, 14336, 4096, 8),
        _model_spec(form, "Mixtral 8x7B down, prefill", 8192, 4096, 14336, 8),
    )


# -- records


def _record(form: str, grouped: bool) -> Kernel:
    """A record that is called with the arrays of a matrix, in the order of `ARRAYS`."""
    names = _Arguments.names(form, grouped)

    def with_arrays(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arrays: Any, **named: Any) -> Any:
            given = dict(zip(names, arrays, strict=False))
            given |= {name: named.pop(name) for name in names if name in named}
            return function(_Arguments.of(form, given), **named)

        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        signature = inspect.Signature([inspect.Parameter(name, kind) for name in names])
        call.__signature__ = signature  # type: ignore[attr-defined] - what inspect reads
        return call

    xla, mosaic = (_grouped_xla, _grouped_mosaic) if grouped else (_xla, _mosaic)
    return Kernel(
        name=f"{'grouped_' if grouped else ''}unweight_{form}_matmul",
        reference=with_arrays(_reference),
        implementations={"xla": with_arrays(xla), "mosaic": with_arrays(mosaic)},
        arg_specs=_grouped_specs(form) if grouped else _specs(form),
        tolerance={"float32": 1e-5, "bfloat16": 2e-2},
        flops=with_arrays(_flops),
        bytes=with_arrays(_bytes),
        unsupported=with_arrays(_unsupported),
        blocks=UnweightBlocks,
        space=SPACE,
    )


MATMULS = {form: _record(form, grouped=False) for form in FORMS}
GROUPED_MATMULS = {form: _record(form, grouped=True) for form in FORMS}


# -- operations


def unweight_matmul(
    x_MD: jax.Array,
    matrix: UnweightMatrix,
    out_dtype: Any = None,
    *,
    implementation: str | None = None,
) -> jax.Array:
    """Rows times coded weights, rebuilt bit for bit.

    Sums are float32, in the order of the form that runs: `xla` is a dense product of the
    decompressed matrix, to the bit. A row's result depends on its own values, the weights and the
    shapes.

    Shapes: x [M, D], a matrix [F, D] of one of `FORMS`; the result is [M, F] in `out_dtype`, which
    defaults to x's.
    Layout: the matrix may be a shard, whose borders are multiples of 64.
    Raises: ValueError for a matrix of another form, with leading axes, or of another width.
    """
    kernel = _record_of(MATMULS, x_MD, matrix, 0)
    options = {} if out_dtype is None else {"out_dtype": out_dtype}
    return kernel(x_MD, *matrix.arrays().values(), implementation=implementation, **options)


def grouped_unweight_matmul(
    x_MD: jax.Array,
    matrices: UnweightMatrix,
    group_sizes_E: jax.Array,
    *,
    implementation: str | None = None,
) -> jax.Array:
    """Each row times the coded weights of its group; rows behind the last group give zeros.

    Shapes: x [M, D] sorted by group, matrices [F, D] of one of `FORMS` whose arrays have a leading
    axis [E], group sizes [E] int32 with a sum of at most M; the result is [M, F].
    Raises: ValueError for matrices of another form, without that axis, or of another width.
    """
    kernel = _record_of(GROUPED_MATMULS, x_MD, matrices, 1)
    arrays = matrices.arrays().values()
    return kernel(x_MD, *arrays, group_sizes_E, implementation=implementation)


def _record_of(
    records: Mapping[str, Kernel], x_MD: jax.Array, matrix: UnweightMatrix, axes: int
) -> Kernel:
    if matrix.form not in records:
        raise ValueError(
            f"form: expected one of {FORMS}, received {matrix.form!r}: decompress the matrix, or "
            "change its form with unweight_exponents or unweight_transcode"
        )
    if len(matrix.check().leading) != axes or matrix.shape[1] != x_MD.shape[-1]:
        raise ValueError(
            f"expected rows [M, D] and a matrix [F, D] with {axes} leading axes, received rows "
            f"{tuple(x_MD.shape)} and {matrix.leading} matrices {matrix.shape}"
        )
    return records[matrix.form]
