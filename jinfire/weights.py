"""Weight leaves: what a matrix may be stored as, and the one product all layers use.

A layer never looks inside its weight. A new storage form (compressed, quantised) is a new pytree
type with a branch here; models do not change.
"""

import jax
import jax.numpy as jnp
import numpy as np


def contract(x: jax.Array, weight: jax.Array, out_dtype: jnp.dtype | None = None) -> jax.Array:
    """Product of activations with an (out, in) weight.

    Shapes: x [..., in], weight [out, in] -> [..., out]. `out_dtype` defaults to x's dtype and is
    also what the product accumulates into across devices.
    """
    rows = x.reshape(-1, x.shape[-1])
    num_rows = rows.shape[0]
    if num_rows == 1 and x.dtype == jnp.bfloat16:
        # XLA's CPU bfloat16 product of one row runs at a tenth of the memory bandwidth; two rows
        # take the blocked path. Tensor cores pad to 8 or 16 rows anyway.
        rows = jnp.concatenate([rows, rows])
    out = jnp.einsum("mk,nk->mn", rows, weight, preferred_element_type=out_dtype or x.dtype)
    return out[:num_rows].reshape(*x.shape[:-1], weight.shape[0])


def parse_dtype(name: str) -> np.dtype:
    """A data type that weights and KV may have."""
    if name not in ("float32", "bfloat16"):
        raise ValueError(f"dtype: expected 'float32' or 'bfloat16', got {name!r}")
    return jnp.dtype(name)
