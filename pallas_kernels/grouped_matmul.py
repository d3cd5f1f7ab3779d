"""Products of rows with the weights of their own group: the experts of a mixture."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.grouped_matmul_grad import grouped_weights_gradient
from pallas_kernels.grouped_matmul_mosaic import (
    SPACE,
    GroupedBlocks,
    grouped_matmul_mosaic,
    unaligned,
)
from pallas_kernels.grouped_matmul_xla import grouped_matmul_xla
from pallas_kernels.kernel import ArgSpec, Kernel


def grouped_matmul_reference(
    x: np.ndarray, weights: np.ndarray, group_sizes: np.ndarray
) -> np.ndarray:
    """Each row times the weights of its group, in float64; rows of no group are zero."""
    out_MF = np.zeros((x.shape[0], weights.shape[1]), np.float64)
    end = 0
    for weights_FD, size in zip(weights, group_sizes, strict=True):
        start, end = end, end + int(size)
        out_MF[start:end] = x[start:end].astype(np.float64) @ weights_FD.astype(np.float64).T
    return out_MF


def _unsupported(x: Any, weights: Any, group_sizes: Any) -> str | None:
    if weights.dtype != x.dtype:
        return f"weights are {weights.dtype}, x is {x.dtype}"
    return unaligned(x, weights.shape[1], 64)


def _flops(x: Any, weights: Any, group_sizes: Any) -> int:
    return int(2 * np.sum(group_sizes) * weights.shape[1] * weights.shape[2])


def _bytes(x: Any, weights: Any, group_sizes: Any) -> int:
    """The weights of groups with rows once, the rows of x in groups, and all of the output."""
    _, F, D = weights.shape
    used = np.count_nonzero(group_sizes) * F * D
    return int((used + np.sum(group_sizes) * D + x.shape[0] * F) * x.dtype.itemsize)


def build_rows(
    rng: np.random.Generator, dtype: np.dtype, num_rows: int, D: int, sizes: tuple[int, ...]
) -> dict[str, np.ndarray]:
    """Rows sorted by group, NaN behind the last group, and the groups' sizes."""
    x_MD = rng.normal(size=(num_rows, D)).astype(dtype)
    x_MD[sum(sizes) :] = np.nan
    return {"x": x_MD, "group_sizes": np.asarray(sizes, np.int32)}


def _build(
    rng: np.random.Generator,
    dtype: np.dtype,
    num_rows: int,
    sizes: tuple[int, ...],
    F: int,
    D: int,
) -> dict[str, np.ndarray]:
    weights_EFD = rng.normal(size=(len(sizes), F, D)).astype(dtype)
    weights_EFD[np.asarray(sizes) == 0] = np.nan
    rows = build_rows(rng, dtype, num_rows, D, sizes)
    return {"x": rows["x"], "weights": weights_EFD, "group_sizes": rows["group_sizes"]}


def _spec(name: str, num_rows: int, sizes: tuple[int, ...], F: int, D: int) -> ArgSpec:
    return ArgSpec(name, partial(_build, num_rows=num_rows, sizes=sizes, F=F, D=D), {})


def _model_spec(name: str, num_rows: int, experts: int, F: int, D: int) -> ArgSpec:
    def build(rng: np.random.Generator, dtype: np.dtype) -> dict[str, Any]:
        return {
            "x": jax.ShapeDtypeStruct((num_rows, D), dtype),
            "weights": jax.ShapeDtypeStruct((experts, F, D), dtype),
            "group_sizes": jax.ShapeDtypeStruct((experts,), np.int32),
        }

    return ArgSpec(name, build, {}, compile_only=True)


ARG_SPECS = (
    _spec("ragged with a tail", 30, (3, 0, 17, 1, 4), 256, 192),
    _spec("one group has all", 16, (0, 16, 0, 0), 128, 128),
    _spec("no rows", 9, (0, 0, 0), 64, 64),
    _spec("one row each", 5, (1, 1, 0, 1, 1, 1), 136, 128),
    _spec("groups of several tiles", 150, (130, 3), 128, 64),
    _model_spec("Mixtral 8x7B up, decode", 64, 8, 14336, 4096),
    _model_spec("Mixtral 8x7B down, decode", 64, 8, 4096, 14336),
    _model_spec("Mixtral 8x7B up, prefill", 8192, 8, 14336, 4096),
    _model_spec("two experts, prefill of 128", 128, 2, 4096, 4096),
    _model_spec("two experts, parts of the sum", 128, 2, 1024, 4096),
    _model_spec("Qwen3 30B-A3B up, one row", 8, 128, 768, 2048),
    _model_spec("Qwen3 30B-A3B down, decode", 512, 128, 2048, 768),
    _model_spec("Qwen3 30B-A3B up, prefill", 32768, 128, 768, 2048),
)

GROUPED_MATMUL = Kernel(
    name="grouped_matmul",
    reference=grouped_matmul_reference,
    implementations={"xla": grouped_matmul_xla, "mosaic": grouped_matmul_mosaic},
    arg_specs=ARG_SPECS,
    tolerance={"float32": 1e-5, "bfloat16": 2e-2},
    flops=_flops,
    bytes=_bytes,
    unsupported=_unsupported,
    blocks=GroupedBlocks,
    space=SPACE,
)


def grouped_matmul(
    x_MD: jax.Array,
    weights_EFD: jax.Array,
    group_sizes_E: jax.Array,
    *,
    implementation: str | None = None,
) -> jax.Array:
    """Each row times the weights of its group; rows behind the last group give zeros.

    Sums are float32. A row's result depends on its own values, its group's weights and the shapes.
    Reverse mode differentiates it with respect to rows and weights.

    Shapes: x [M, D] sorted by group, weights [E, F, D], group sizes [E] int32 with a sum of at
    most M; the result is [M, F].
    Layout: experts may be a shard of the model's, features too.
    """
    return _product(x_MD, weights_EFD, group_sizes_E, implementation)


Residuals = tuple[jax.Array, jax.Array, jax.Array]


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _product(
    x_MD: jax.Array, weights_EFD: jax.Array, group_sizes_E: jax.Array, implementation: str | None
) -> jax.Array:
    return GROUPED_MATMUL(x_MD, weights_EFD, group_sizes_E, implementation=implementation)


def _forward(*args: Any) -> tuple[jax.Array, Residuals]:
    return _product(*args), args[:3]


def _backward(
    implementation: str | None, residuals: Residuals, gradient_MF: jax.Array
) -> tuple[Any, jax.Array, None]:
    """Gradients of rows and weights; rows of no group, and weights without rows, get zeros."""
    x_MD, weights_EFD, group_sizes_E = residuals
    weights_EDF = jnp.swapaxes(weights_EFD, 1, 2)
    x_gradient_MD = _product(gradient_MF, weights_EDF, group_sizes_E, implementation)
    sums_EFD = grouped_weights_gradient(x_MD, gradient_MF, group_sizes_E)
    return x_gradient_MD, sums_EFD.astype(weights_EFD.dtype), None


_product.defvjp(_forward, _backward)
