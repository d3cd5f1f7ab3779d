"""Tiles of rows of one group each, and the grouped product in XLA operations."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class RowTiles:
    """Tiles of rows, none across a group's border, in the order of the rows.

    Tile i holds `rows[i]` rows of group `group[i]` from row `start[i]` on. Rows behind the last
    group are tiles of group E. Tiles that are not needed come last and hold no row.

    Shapes: int32 vectors whose length depends on the shapes of the arguments only.
    """

    group: jax.Array
    start: jax.Array
    rows: jax.Array


def row_tiles(group_sizes_E: jax.Array, num_rows: int, tile: int, align: int = 1) -> RowTiles:
    """The rows cut into tiles of at most `tile` rows of one group each.

    `align` divides `tile`. Groups are cut at its multiples only, so the rows of a tile lie in the
    `tile` rows from the last multiple at or before its start on.

    Sums over a triangle or a comparison stand for cumulative sums and searches: they fuse into
    few launches, and E is small.
    """
    E = group_sizes_E.shape[0]
    upto = jnp.tri(E + 1, dtype=bool)
    # Sizes that are no partition of the rows must not send a kernel out of its arrays.
    sizes = jnp.clip(jnp.pad(group_sizes_E.astype(jnp.int32), (0, 1)), 0, num_rows)
    end = jnp.minimum(jnp.sum(jnp.where(upto, sizes[None, :], 0), axis=1), num_rows)
    end = jnp.where(jnp.arange(E + 1) == E, num_rows, end)
    start = jnp.pad(end[:-1], (1, 0))
    first = start // align * align
    count = jnp.where(end > start, -(-(end - first) // tile), 0)
    last_tile = jnp.sum(jnp.where(upto, count[None, :], 0), axis=1)
    index = jnp.arange(num_tiles(num_rows, E, tile, align), dtype=jnp.int32)
    group = jnp.sum(index[:, None] >= last_tile[None, :], axis=1, dtype=jnp.int32)
    # Behind the last tile there is no group: the last one, and none of its rows.
    group = jnp.minimum(group, E)
    first_row = first[group] + (index - (last_tile - count)[group]) * tile
    tile_start = jnp.maximum(first_row, start[group])
    rows = jnp.clip(jnp.minimum(first_row + tile, end[group]) - tile_start, 0, tile)
    return RowTiles(group, jnp.minimum(tile_start, num_rows), rows)


def num_tiles(num_rows: int, groups: int, tile: int, align: int = 1) -> int:
    """A bound on the tiles that the rows can need.

    A group, or the tail, whose rows touch b blocks of `align` rows takes at most
    (b + per_tile - 1) / per_tile tiles. Neighbours may share a block, which counts for both.
    """
    nonempty = min(groups + 1, num_rows)
    per_tile = tile // align
    return (-(-num_rows // align) - 1 + nonempty * per_tile) // per_tile


def whole_tiles(num_rows: int, tile: int) -> RowTiles:
    """The tiles of rows that all belong to group 0: constants of the program."""
    start = np.arange(0, num_rows, tile, dtype=np.int32)
    rows = np.minimum(num_rows - start, tile)
    return RowTiles(*(jnp.asarray(x) for x in (np.zeros_like(start), start, rows)))


def power_of_two(num_rows: int) -> int:
    """Rows of the smallest tile that holds so many, between what WGMMA and registers allow."""
    return min(128, max(8, 2 ** (num_rows - 1).bit_length()))


def tile_rows(num_rows: int, groups: int) -> int:
    """Rows in a tile, such that most groups fit in one if they are small."""
    return power_of_two(2 * -(-num_rows // groups))


def grouped_matmul_xla(
    x_MD: jax.Array, weights_EFD: jax.Array, group_sizes_E: jax.Array
) -> jax.Array:
    """Grouped product, one tile of rows after the other: no work for empty groups and tails.

    `jax.lax.ragged_dot` is right too, but without a grouped GEMM it multiplies every row with
    every group's weights, and copies all weights and E times the rows for it.
    """
    return loop_over_tiles(x_MD, weights_EFD.shape[1], group_sizes_E, lambda e: weights_EFD[e])


def loop_over_tiles(
    x_MD: jax.Array,
    F: int,
    group_sizes_E: jax.Array,
    weights_of: Callable[[jax.Array], jax.Array],
) -> jax.Array:
    """Grouped product with the weights [F, D] that a function gives for a group."""
    M, D = x_MD.shape
    E = group_sizes_E.shape[0]
    N = tile_rows(M, E)
    tiles = row_tiles(group_sizes_E, M, N)
    padded_x = jnp.pad(x_MD, ((0, N), (0, 0)))

    def one_tile(i: jax.Array, out: jax.Array) -> jax.Array:
        x_ND = jax.lax.dynamic_slice(padded_x, (tiles.start[i], 0), (N, D))
        weights_FD = weights_of(tiles.group[i])
        new_NF = jnp.einsum(
            "ND,FD->NF", x_ND, weights_FD.astype(x_ND.dtype), preferred_element_type=jnp.float32
        ).astype(x_MD.dtype)
        old_NF = jax.lax.dynamic_slice(out, (tiles.start[i], 0), (N, F))
        own = jnp.arange(N)[:, None] < tiles.rows[i]
        new_NF = jnp.where(own, new_NF, old_NF)
        return jax.lax.dynamic_update_slice(out, new_NF, (tiles.start[i], 0))

    live_tiles = jnp.sum((tiles.group < E) & (tiles.rows > 0))
    out = jnp.zeros((M + N, F), x_MD.dtype)
    return jax.lax.fori_loop(0, live_tiles, one_tile, out)[:M]
