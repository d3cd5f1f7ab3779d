"""Weight leaves: what a matrix may be stored as, and what layers do with one.

A layer never looks inside its weight: it calls these functions. A new storage form is a new pytree
type with a branch here; models do not change.
"""

import jax
import jax.numpy as jnp
import numpy as np

from jinfire.unweight.tensor import UnweightTensor
from pallas_kernels import (
    UnweightMatrix,
    grouped_matmul,
    grouped_unweight_matmul,
    unweight_matmul,
)

Weight = jax.Array | UnweightTensor


def contract(x: jax.Array, weight: Weight, out_dtype: jnp.dtype | None = None) -> jax.Array:
    """Product of activations with an (out, in) weight.

    Shapes: x [..., in], weight [out, in] -> [..., out]. `out_dtype` defaults to x's dtype and is
    also what the product accumulates into across devices.
    """
    rows, operand = _operand(x.reshape(-1, x.shape[-1]), weight)
    num_rows, out_dtype = rows.shape[0], out_dtype or x.dtype
    if isinstance(operand, UnweightMatrix):
        out = unweight_matmul(rows, operand, out_dtype=out_dtype)
    else:
        if num_rows == 1 and x.dtype == jnp.bfloat16:
            # XLA's CPU bfloat16 product of one row runs at a tenth of the memory bandwidth; two
            # rows take the blocked path. Tensor cores pad to 8 or 16 rows anyway.
            rows = jnp.concatenate([rows, rows])
        out = jnp.einsum("mk,nk->mn", rows, operand, preferred_element_type=out_dtype)
    return out[:num_rows].reshape(*x.shape[:-1], weight.shape[0])


def grouped_contract(x_MD: jax.Array, weight: Weight, sizes_E: jax.Array) -> jax.Array:
    """Products of rows, sorted by group, with the (out, in) weight of their own group.

    Shapes: x [M, in], weight [E, out, in], sizes int32 [E] -> [M, out]; rows of no group give
    zeros.
    """
    x_MD, operand = _operand(x_MD, weight)
    if isinstance(operand, UnweightMatrix):
        return grouped_unweight_matmul(x_MD, operand, sizes_E)
    return grouped_matmul(x_MD, operand, sizes_E)


def _operand(x: jax.Array, weight: Weight) -> tuple[jax.Array, jax.Array | UnweightMatrix]:
    return weight.operand(x) if isinstance(weight, UnweightTensor) else (x, weight)


def take_rows(weight: Weight, ids: jax.Array) -> jax.Array:
    """Rows of a weight: ids [...] in range -> [..., in]."""
    if isinstance(weight, UnweightTensor):
        return weight.rows(ids)
    return jnp.take(weight, ids, axis=0, mode="clip")


def whole(x: jax.Array, weight: Weight) -> tuple[jax.Array, jax.Array]:
    """`x`, and all values of a weight that it meets in other ways than a product of rows."""
    return weight.beside(x) if isinstance(weight, UnweightTensor) else (x, weight)


def parse_dtype(name: str) -> np.dtype:
    """A data type that weights and KV may have."""
    if name not in ("float32", "bfloat16"):
        raise ValueError(f"dtype: expected 'float32' or 'bfloat16', got {name!r}")
    return jnp.dtype(name)
