"""The grouped product against float64 NumPy, and the tiles of rows that it works through."""

from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.grouped_matmul import GROUPED_MATMUL, grouped_matmul
from pallas_kernels.grouped_matmul_mosaic import GroupedBlocks, grouped_matmul_mosaic
from pallas_kernels.grouped_matmul_xla import num_tiles, row_tiles, tile_rows, whole_tiles
from pallas_kernels.kernel import ArgSpec

INTERPRET = plgpu.InterpretGPUParams()
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}
SPECS = [spec for spec in GROUPED_MATMUL.arg_specs if not spec.compile_only]
IMPLEMENTATIONS = {
    "xla": jax.jit(partial(GROUPED_MATMUL, implementation="xla")),
    "mosaic": jax.jit(partial(GROUPED_MATMUL, implementation="mosaic", interpret=True)),
}


def worst_error(got: jax.Array, want: np.ndarray) -> float:
    """The largest error, relative to the largest value."""
    error = np.abs(np.asarray(got).astype(np.float64) - want).max()
    return float(error / max(np.abs(want).max(), 1e-30))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_xla_form_matches_float64(spec: ArgSpec, dtype: str) -> None:
    arrays = spec.make(3, DTYPES[dtype])
    want = GROUPED_MATMUL.reference(**arrays)
    got = IMPLEMENTATIONS["xla"](*arrays.values())
    assert got.dtype == DTYPES[dtype]
    assert worst_error(got, want) <= GROUPED_MATMUL.tolerance[dtype]
    assert not np.asarray(got)[want == 0].any()


@pytest.mark.parametrize(
    "blocks",
    [
        GroupedBlocks(rows=8, features=256, depth=64, slots=2, splits=2),
        GroupedBlocks(rows=32, features=256, depth=128, slots=2, splits=1, warpgroups=4),
    ],
    ids=["splits", "warpgroups"],
)
def test_other_blocks_match_float64(blocks: GroupedBlocks) -> None:
    arrays = SPECS[0].make(5, ml_dtypes.bfloat16)
    got = grouped_matmul_mosaic(
        *map(jnp.asarray, arrays.values()), blocks=blocks, interpret=INTERPRET
    )
    assert worst_error(got, GROUPED_MATMUL.reference(**arrays)) <= 1e-2
    assert not np.asarray(got)[25:].any()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_row_ignores_its_batch_mates(implementation: str) -> None:
    """Bit-exact: other rows, other group sizes, another place in the tile."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(24, 128)).astype(ml_dtypes.bfloat16)
    weights = rng.normal(size=(3, 64, 128)).astype(ml_dtypes.bfloat16)
    call = IMPLEMENTATIONS[implementation]
    sizes = np.asarray([9, 2, 13], np.int32)
    whole = np.asarray(call(x, weights, sizes))
    # Row 10, the last of group 1, becomes row 3, its only one, among NaN.
    alone = np.full_like(x, np.nan)
    alone[3] = x[10]
    got = np.asarray(call(alone, weights, np.asarray([3, 1, 0], np.int32)))
    np.testing.assert_array_equal(got[3], whole[10])
    assert not got[4:].any()


@pytest.mark.parametrize("tile", [8, 32])
@pytest.mark.parametrize(
    "sizes", [(3, 0, 17, 1, 4), (0, 0, 0), (40,), (8, 8, 24), (0, 40), (1,) * 40, (39, 0)]
)
def test_tiles_cover_every_row_once(sizes: tuple[int, ...], tile: int) -> None:
    tiles = row_tiles(jnp.asarray(sizes, jnp.int32), 40, tile)
    owner = np.concatenate([np.repeat(np.arange(len(sizes)), sizes), np.full(40, len(sizes))])[:40]
    covered = np.zeros(40, int)
    for group, start, rows in zip(tiles.group, tiles.start, tiles.rows, strict=True):
        assert 0 <= rows <= tile
        own = slice(int(start), int(start + rows))
        assert (owner[own] == group).all()
        covered[own] += 1
    np.testing.assert_array_equal(covered, 1)
    # Needed tiles come first, so that a kernel's last ones have nothing to do.
    assert (np.diff((np.asarray(tiles.rows) > 0).astype(int)) <= 0).all()
    assert len(tiles.rows) == num_tiles(40, len(sizes), tile)


@pytest.mark.parametrize("sizes", [(50, 3), (3, 2**31 - 1), (-4, 2)])
def test_sizes_that_do_not_fit_stay_inside_the_rows(sizes: tuple[int, ...]) -> None:
    tiles = row_tiles(jnp.asarray(sizes, jnp.int32), 20, 8)
    start, rows = np.asarray(tiles.start), np.asarray(tiles.rows)
    assert ((start >= 0) & (rows >= 0) & (start + rows <= 20)).all()


def test_tiles_of_one_group() -> None:
    tiles = whole_tiles(20, 8)
    np.testing.assert_array_equal(tiles.start, [0, 8, 16])
    np.testing.assert_array_equal(tiles.rows, [8, 8, 4])
    assert not np.asarray(tiles.group).any()


def test_rows_of_a_tile_follow_the_average_group() -> None:
    assert [tile_rows(rows, 8) for rows in (1, 32, 64, 200, 5000)] == [8, 8, 16, 64, 128]


def test_default_blocks_fit_an_sm() -> None:
    """Small tiles leave room for a second block of threads."""
    for rows in (8, 16, 32, 64, 128):
        blocks = GroupedBlocks().resolved(rows, row_tiles=9, F=2048, D=4096)
        assert blocks.slots >= 3
        used = blocks.rows * blocks.features * 2
        used += blocks.slots * (blocks.rows + blocks.features) * blocks.depth * 2
        assert used + 1024 <= 227 * 1024 // (1 if rows >= 64 else 2)


def test_splits_fill_the_chip_and_leave_work_to_each() -> None:
    few = GroupedBlocks().resolved(8, row_tiles=2, F=1024, D=4096)
    assert few.splits == 8
    assert GroupedBlocks().resolved(8, row_tiles=2, F=1024, D=512).splits == 2
    assert GroupedBlocks().resolved(8, row_tiles=60, F=1024, D=4096).splits == 1


def test_xla_form_copies_little() -> None:
    """One group's weights at a time, where `jax.lax.ragged_dot` copies all of them."""
    shapes = (
        jax.ShapeDtypeStruct((32, 256), jnp.float32),
        jax.ShapeDtypeStruct((16, 512, 256), jnp.float32),
        jax.ShapeDtypeStruct((16,), jnp.int32),
    )
    memory = IMPLEMENTATIONS["xla"].lower(*shapes).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 2 * 512 * 256 * 4


def test_counts_are_of_groups_with_rows() -> None:
    x = np.zeros((10, 64), np.float32)
    weights = np.zeros((3, 8, 64), np.float32)
    sizes = np.asarray([2, 0, 5])
    assert GROUPED_MATMUL.flops(x, weights, sizes) == 2 * 7 * 8 * 64
    assert GROUPED_MATMUL.bytes(x, weights, sizes) == (2 * 8 * 64 + 7 * 64 + 10 * 8) * 4


def test_what_the_kernel_refuses_goes_another_way() -> None:
    arrays = SPECS[0].make(0)
    assert GROUPED_MATMUL.refusal(*arrays.values()) == "x is float32, not bfloat16"
    narrow = SPECS[0].make(0, ml_dtypes.bfloat16)
    cut = (narrow["x"][:, :96], narrow["weights"][:, :, :96], narrow["group_sizes"])
    assert GROUPED_MATMUL.refusal(*cut) == "96 columns are no multiple of 64"
    odd = (narrow["x"], narrow["weights"][:, :252], narrow["group_sizes"])
    assert GROUPED_MATMUL.refusal(*odd) == "252 features are no multiple of 8"
    got = jax.jit(grouped_matmul)(*arrays.values())
    assert worst_error(got, GROUPED_MATMUL.reference(**arrays)) <= 1e-5
