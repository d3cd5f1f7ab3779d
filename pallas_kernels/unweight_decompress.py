"""Decompression of losslessly coded matrices, and from one form to another. Every bit is exact."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import numpy as np

from pallas_kernels import unweight_decompress_mosaic as mosaic
from pallas_kernels import unweight_decompress_xla as xla
from pallas_kernels import unweight_huffman_mosaic as huffman
from pallas_kernels import unweight_reference as reference
from pallas_kernels.kernel import ArgSpec, Kernel
from pallas_kernels.unweight_matrix import (
    ARRAYS,
    PALETTE,
    PLANES,
    ROW,
    TILE_ROWS,
    MatrixTiling,
    UnweightMatrix,
)

# -- sets of arguments


def _exponents(rng: np.random.Generator, F: int, D: int, **kind: Any) -> np.ndarray:
    """Exponents [F, D] as those of trained weights are, but for what `kind` says.

    `rare` is the share of weights whose exponent is one of 200 that hardly occur.
    """
    found = 120 - rng.geometric(0.45, size=(F, D))
    rare = rng.random((F, D)) < kind.get("rare", 0)
    return np.where(rare, rng.integers(0, 256, size=(F, D)), np.maximum(found, 105))


def _words(rng: np.random.Generator, exponents: np.ndarray) -> np.ndarray:
    others = rng.integers(0, 256, size=exponents.shape)
    return (others << 8 & 0x8000 | exponents << 7 | others & 0x7F).astype(np.uint16)


def _with_rare(rng: np.random.Generator, F: int, D: int, rare: float) -> np.ndarray:
    return _words(rng, _exponents(rng, F, D, rare=rare))


def _one_exponent(rng: np.random.Generator, F: int, D: int) -> np.ndarray:
    return _words(rng, np.full((F, D), 97))


def _any_words(rng: np.random.Generator, F: int, D: int) -> np.ndarray:
    """All exponents alike often: hardly a row has 64 of a palette."""
    return rng.integers(0, 1 << 16, size=(F, D), dtype=np.uint16)


def _long_codes(rng: np.random.Generator, F: int, D: int) -> np.ndarray:
    """Each exponent half as often as the one before: codes of 1 to 12 bits."""
    ranks = np.zeros(F * D, int)
    rare = 0
    for rank in range(12, 0, -1):
        count = max(1, F * D >> rank + 1)
        ranks[rare : rare + count] = rank
        rare += count
    return _words(rng, 100 + rng.permutation(ranks).reshape(F, D))


def _build(
    rng: np.random.Generator,
    dtype: np.dtype,
    make: Callable[..., np.ndarray],
    form: str,
    names: tuple[str, ...],
    F: int,
    D: int,
    **options: Any,
) -> dict[str, np.ndarray]:
    arrays = reference.pack(make(rng, F, D, **options), form).arrays()
    return {name: arrays[name] for name in names}


def _build_experts(
    rng: np.random.Generator,
    dtype: np.dtype,
    form: str,
    names: tuple[str, ...],
    F: int,
    D: int,
    rare: tuple[float, ...],
) -> dict[str, np.ndarray]:
    """Matrices of which each has another number of verbatim rows, escapes and stream words."""
    every = [reference.pack(_with_rare(rng, F, D, share), form).arrays() for share in rare]
    rows = MatrixTiling(F, D).rows
    stacked = {}
    for name in names:
        longest = max(len(arrays[name]) for arrays in every)
        padding = rows if name == "verbatim_row" else 0xAB
        own = [
            np.concatenate([x, np.full((longest - len(x), *x.shape[1:]), padding, x.dtype)])
            for x in (arrays[name] for arrays in every)
        ]
        stacked[name] = np.stack(own)
    return stacked


def abstract_matrix(form: str, F: int, D: int, leading: tuple[int, ...] = ()) -> UnweightMatrix:
    """Shapes of a real model's matrix: one row of 100 verbatim, 2.7 bits a code, 4 % escapes."""
    tiling = MatrixTiling(F, D)
    verbatim = tiling.rows // 100
    shapes: Mapping[str, tuple[tuple[int, ...], Any]] = {
        "sign_mantissa": ((tiling.rows, ROW), np.uint8),
        "palette": ((PALETTE,), np.uint8),
        "verbatim_row": ((verbatim,), np.int32),
        "verbatim": ((verbatim, ROW), np.uint8),
        "verbatim_first": ((tiling.tiles + 1,), np.int32),
        "stream": ((F * D * 27 // 320,), np.uint32),
        "chunk_first": ((tiling.chunks,), np.uint32),
        "coded": ((tiling.chunks,), np.uint16),
        "lengths": ((PALETTE,), np.uint8),
        "codes": (
            ((tiling.rows, PLANES), np.uint32)
            if form == "compact"
            else ((tiling.rows, ROW // 2), np.uint8)
        ),
        "exponents": ((tiling.rows, ROW), np.uint8),
        "tile_first": ((tiling.tiles + 1,), np.uint32),
        "pair_first": ((tiling.pairs,), np.uint16),
        "escapes": ((F * D // 25,), np.uint8),
    }
    arrays = {
        name: jax.ShapeDtypeStruct((*leading, *shapes[name][0]), shapes[name][1])
        for name in ARRAYS[form]
    }
    return UnweightMatrix(form, (F, D), **arrays).check()


def _specs(form: str, names: tuple[str, ...], whole: bool) -> tuple[ArgSpec, ...]:
    """Sets of arguments of a form, fewer for a kernel that takes a part of its arrays only."""

    def real(name: str, F: int, D: int, *leading: int) -> ArgSpec:
        def build(rng: np.random.Generator, dtype: np.dtype) -> dict[str, Any]:
            arrays = abstract_matrix(form, F, D, leading).arrays()
            return {name: arrays[name] for name in names}

        return ArgSpec(name, build, {"shape": (F, D)}, compile_only=True)

    def small(name: str, make: Callable[..., np.ndarray], F: int, D: int, **kind: Any) -> ArgSpec:
        build = partial(_build, make=make, form=form, names=names, F=F, D=D, **kind)
        return ArgSpec(name, build, {"shape": (F, D)})

    experts = partial(_build_experts, form=form, names=names, F=64, D=128, rare=(3e-3, 0.0, 2e-2))
    found = [
        small("rare exponents", _with_rare, 128, 128, rare=3e-3),
        small("a lower last band", _with_rare, 83, 128, rare=3e-3),
        ArgSpec("experts", experts, {"shape": (64, 128)}),
    ]
    if form != "exponent" and whole:
        found += [
            small("any words", _any_words, 64, 128),
            small("one exponent", _one_exponent, 64, 64),
        ]
    if form == "huffman" and whole:
        found += [
            small("long codes", _long_codes, 64, 192),
            small("several blocks", _with_rare, 64 * 11, 192, rare=1e-3),
        ]
    return (
        *found,
        real("Llama 3.1 8B gate", 14336, 4096),
        real("Llama 3.1 8B down", 4096, 14336),
        real("Kimi K2 dense up", 18432, 7168),
        real("Kimi K2 up, 48 experts", 2048, 7168, 48),
    )


# -- records


def _record(
    name: str,
    form: str,
    forms: tuple[Callable[..., Any], Callable[..., jax.Array], Callable[..., jax.Array]],
    skipped: tuple[str, ...] = (),
    weight_bytes: float = 2,
) -> Kernel:
    """A record of some arrays of a form; `weight_bytes` are those of the result."""
    names = tuple(n for n in ARRAYS[form] if n not in skipped)

    def by_name(arguments: tuple[Any, ...], named: Mapping[str, Any]) -> dict[str, Any]:
        return dict(zip(names, arguments, strict=False)) | dict(named)

    def weights(arrays: Mapping[str, Any], shape: tuple[int, int]) -> int:
        """Of all matrices."""
        whole = "sign_mantissa" in arrays
        leading = arrays["sign_mantissa"].shape[:-2] if whole else arrays["coded"].shape[:-1]
        return math.prod((*leading, *shape))

    def count_bytes(*arguments: Any, shape: tuple[int, int], **named: Any) -> int:
        """All arrays and the result once."""
        arrays = by_name(arguments, named)
        there = sum(math.prod(x.shape) * x.dtype.itemsize for x in arrays.values())
        return there + int(weight_bytes * weights(arrays, shape))

    def count_flops(*arguments: Any, shape: tuple[int, int], **named: Any) -> int:
        """One for each weight: there are only operations on bits."""
        return weights(by_name(arguments, named), shape)

    def unsupported(*arguments: Any, shape: tuple[int, int]) -> str | None:
        if shape[0] % TILE_ROWS:
            return f"the matrix has {shape[0]} rows, which is no multiple of {TILE_ROWS}"
        total = weights(by_name(arguments, {}), shape)
        if total >= mosaic.MAX_WEIGHTS:
            return f"there are {total} weights, and offsets have 32 bits"
        return None

    return Kernel(
        name=name,
        reference=forms[0],
        implementations={"xla": forms[1], "mosaic": forms[2]},
        arg_specs=_specs(form, names, not skipped),
        tolerance={"bfloat16": 0.0},
        flops=count_flops,
        bytes=count_bytes,
        unsupported=unsupported,
        exact=True,
    )


UNWEIGHT_PALETTE = _record(
    "unweight_palette",
    "palette",
    (reference.palette_reference, xla.unweight_palette_xla, mosaic.unweight_palette_mosaic),
)
UNWEIGHT_EXPONENT = _record(
    "unweight_exponent",
    "exponent",
    (reference.exponent_reference, xla.unweight_exponent_xla, mosaic.unweight_exponent_mosaic),
)
UNWEIGHT_COMPACT = _record(
    "unweight_compact",
    "compact",
    (reference.compact_reference, xla.unweight_compact_xla, mosaic.unweight_compact_mosaic),
)
UNWEIGHT_HUFFMAN = _record(
    "unweight_huffman",
    "huffman",
    (reference.huffman_reference, xla.unweight_huffman_xla, huffman.unweight_huffman_mosaic),
)
UNWEIGHT_EXPONENTS = _record(
    "unweight_exponents",
    "huffman",
    (reference.exponents_reference, xla.unweight_exponents_xla, huffman.unweight_exponents_mosaic),
    skipped=("sign_mantissa",),
    weight_bytes=1,
)
UNWEIGHT_TRANSCODE = _record(
    "unweight_transcode",
    "huffman",
    (reference.transcode_reference, xla.unweight_transcode_xla, huffman.unweight_transcode_mosaic),
    skipped=("sign_mantissa", "palette", "verbatim_row", "verbatim", "verbatim_first"),
    weight_bytes=0.5,
)

_DECOMPRESS = {
    "palette": UNWEIGHT_PALETTE,
    "exponent": UNWEIGHT_EXPONENT,
    "compact": UNWEIGHT_COMPACT,
    "huffman": UNWEIGHT_HUFFMAN,
}


# -- operations


def unweight_decompress(matrix: UnweightMatrix, *, implementation: str | None = None) -> jax.Array:
    """Matrix [..., F, D] bfloat16, bit for bit the one that was coded.

    Raises: ValueError for arrays that do not fit the form.
    """
    kernel = _DECOMPRESS[matrix.check().form]
    return kernel(*matrix.arrays().values(), shape=matrix.shape, implementation=implementation)


def unweight_exponents(
    matrix: UnweightMatrix, *, implementation: str | None = None
) -> UnweightMatrix:
    """The matrix with bytes of exponents, of every row, instead of Huffman codes.

    Raises: ValueError for another form than `huffman`.
    """
    arrays = _huffman_arrays(matrix, UNWEIGHT_EXPONENTS)
    exponents = UNWEIGHT_EXPONENTS(*arrays, shape=matrix.shape, implementation=implementation)
    return UnweightMatrix("exponent", matrix.shape, matrix.sign_mantissa, exponents=exponents)


def unweight_transcode(
    matrix: UnweightMatrix, *, implementation: str | None = None
) -> UnweightMatrix:
    """The matrix with palette codes of 4 bits instead of Huffman codes; all else is the same.

    Raises: ValueError for another form than `huffman`.
    """
    arrays = _huffman_arrays(matrix, UNWEIGHT_TRANSCODE)
    codes = UNWEIGHT_TRANSCODE(*arrays, shape=matrix.shape, implementation=implementation)
    return UnweightMatrix(
        "palette",
        matrix.shape,
        matrix.sign_mantissa,
        palette=matrix.palette,
        verbatim_row=matrix.verbatim_row,
        verbatim=matrix.verbatim,
        verbatim_first=matrix.verbatim_first,
        codes=codes,
    )


def _huffman_arrays(matrix: UnweightMatrix, kernel: Kernel) -> list[jax.Array]:
    if matrix.check().form != "huffman":
        raise ValueError(f"expected a matrix of the form huffman, received {matrix.form}")
    arrays = matrix.arrays()
    return [arrays[name] for name in kernel.arg_specs[0].shapes()]
