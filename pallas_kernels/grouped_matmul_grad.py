"""The gradient of the grouped product with respect to its weights, in XLA operations.

That with respect to the rows is another grouped product. Neither is made for speed on a GPU: they
train models of a size that a CPU trains.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_matmul_xla import row_tiles, tile_rows


def grouped_weights_gradient(
    x_MD: jax.Array, gradient_MF: jax.Array, group_sizes_E: jax.Array
) -> jax.Array:
    """Sums over each group's rows of the outer products of output gradient and input.

    Float32 sums, one tile of rows after the other; the tiles' number depends on the group sizes,
    which is what reverse mode cannot go through by itself. Rows behind the last group are never
    read, and an empty group's sum is zero.

    Shapes: x [M, D], gradient [M, F], group sizes [E] -> float32 [E, F, D].
    """
    M, D = x_MD.shape
    F, E = gradient_MF.shape[1], group_sizes_E.shape[0]
    N = tile_rows(M, E)
    tiles = row_tiles(group_sizes_E, M, N)
    padded_x, padded_gradient = (jnp.pad(rows, ((0, N), (0, 0))) for rows in (x_MD, gradient_MF))

    def one_tile(i: jax.Array, sums_EFD: jax.Array) -> jax.Array:
        own = jnp.arange(N)[:, None] < tiles.rows[i]

        def rows_of(padded: jax.Array) -> jax.Array:
            rows = jax.lax.dynamic_slice(padded, (tiles.start[i], 0), (N, padded.shape[1]))
            return jnp.where(own, rows, jnp.zeros((), rows.dtype))

        new_FD = jnp.einsum(
            "NF,ND->FD",
            rows_of(padded_gradient),
            rows_of(padded_x),
            preferred_element_type=jnp.float32,
        )
        return sums_EFD.at[tiles.group[i]].add(new_FD)

    live_tiles = jnp.sum((tiles.group < E) & (tiles.rows > 0))
    return jax.lax.fori_loop(0, live_tiles, one_tile, jnp.zeros((E, F, D), jnp.float32))
