"""The grouped product against float64 NumPy, and the tiles of rows that it works through."""

from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.grouped_matmul import GROUPED_MATMUL, grouped_matmul
from pallas_kernels.grouped_matmul_mosaic import ALIGN, GroupedBlocks, grouped_matmul_mosaic
from pallas_kernels.grouped_matmul_xla import num_tiles, row_tiles, tile_rows, whole_tiles
from pallas_kernels.int4_matmul import GROUPED_INT4_MATMUL
from pallas_kernels.kernel import ArgSpec, Kernel

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


def assert_tiles_cover(
    tiles: list[np.ndarray], sizes: tuple[int, ...], num_rows: int, tile: int, align: int
) -> None:
    """Every row is in one tile, which is of its group and in the rows that the kernel loads."""
    owner = np.repeat(np.arange(len(sizes) + 1), [*sizes, num_rows - sum(sizes)])
    covered = np.zeros(num_rows, int)
    for group, start, rows in zip(*tiles, strict=True):
        assert rows >= 0
        assert start % align + rows <= tile
        own = slice(int(start), int(start + rows))
        assert (owner[own] == group).all()
        covered[own] += 1
    np.testing.assert_array_equal(covered, 1)
    # Needed tiles come first, so that a kernel's last ones have nothing to do.
    assert (np.diff((tiles[2] > 0).astype(int)) <= 0).all()
    assert len(tiles[2]) == num_tiles(num_rows, len(sizes), tile, align)


@pytest.mark.parametrize("align", [1, ALIGN])
@pytest.mark.parametrize("tile", [8, 32])
@pytest.mark.parametrize(
    "sizes", [(3, 0, 17, 1, 4), (0, 0, 0), (40,), (8, 8, 24), (0, 40), (1,) * 40, (39, 0)]
)
def test_tiles_cover_every_row_once(sizes: tuple[int, ...], tile: int, align: int) -> None:
    tiles = row_tiles(jnp.asarray(sizes, jnp.int32), 40, tile, align)
    listed = [np.asarray(x) for x in (tiles.group, tiles.start, tiles.rows)]
    assert_tiles_cover(listed, sizes, 40, tile, align)


@pytest.mark.parametrize("align", [1, ALIGN])
@pytest.mark.parametrize(
    ("num_rows", "groups", "tile"),
    [(1, 3, 8), (9, 2, 8), (40, 5, 8), (67, 4, 16), (64, 20, 8), (150, 3, 32), (300, 2, 128)],
)
def test_list_is_long_enough_for_any_sizes(
    num_rows: int, groups: int, tile: int, align: int
) -> None:
    """Borders anywhere, and one row around as many as possible, which needs the most tiles."""
    rng = np.random.default_rng(0)
    ends = np.sort(rng.integers(0, num_rows + 1, size=(200, groups)), axis=1)
    astride = np.minimum(tile * np.arange(groups) + 1, num_rows)
    ends = np.concatenate([ends, astride[None, :]]).astype(np.int32)
    sizes = np.diff(ends, axis=1, prepend=0)

    def listed(sizes: jax.Array) -> list[jax.Array]:
        tiles = row_tiles(sizes, num_rows, tile, align)
        return [tiles.group, tiles.start, tiles.rows]

    columns = [np.asarray(x) for x in jax.jit(jax.vmap(listed))(sizes)]
    for i, own_sizes in enumerate(sizes.tolist()):
        assert_tiles_cover([x[i] for x in columns], own_sizes, num_rows, tile, align)


@pytest.mark.parametrize("align", [1, ALIGN])
@pytest.mark.parametrize("sizes", [(50, 3), (3, 2**31 - 1), (-4, 2)])
def test_sizes_that_do_not_fit_stay_inside_the_rows(sizes: tuple[int, ...], align: int) -> None:
    tiles = row_tiles(jnp.asarray(sizes, jnp.int32), 20, 8, align)
    start, rows = np.asarray(tiles.start), np.asarray(tiles.rows)
    assert ((start >= 0) & (rows >= 0) & (start + rows <= 20)).all()


@pytest.mark.parametrize(
    ("kernel", "name"),
    [
        (GROUPED_MATMUL, "ragged with a tail"),
        (GROUPED_MATMUL, "one row each"),
        (GROUPED_INT4_MATMUL, "groups of several tiles"),
    ],
    ids=["dense, rows", "dense, features", "int4"],
)
def test_copies_ask_nothing_that_a_gpu_refuses(
    kernel: Kernel, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What interpret mode allows, and TMA does not.

    A load to swizzled memory moves whole tiles of 8 rows: here it starts at one, whatever it is
    asked for. A store of a single row knows no bound but the end of the array: here rows have
    to end where tiles of features do.
    """
    spec = next(spec for spec in kernel.arg_specs if spec.name == name)
    arrays = spec.make(1, ml_dtypes.bfloat16)
    stored_widths = set()
    copy_in, copy_out = plgpu.copy_gmem_to_smem, plgpu.copy_smem_to_gmem

    def load(source, target, barrier) -> None:
        *outer, rows, columns = source.transforms[-1].indices
        if rows.size % ALIGN == 0:  # not scales, which are not swizzled
            rows = pl.ds(rows.start - jax.lax.rem(rows.start, ALIGN), rows.size)
        copy_in(source.ref.at[*outer, rows, columns], target, barrier)

    def store(source, target) -> None:
        stored_widths.add(target.ref.shape[-1])
        copy_out(source, target)

    monkeypatch.setattr(plgpu, "copy_gmem_to_smem", load)
    monkeypatch.setattr(plgpu, "copy_smem_to_gmem", store)
    got = jax.jit(partial(kernel, implementation="mosaic", interpret=True))(*arrays.values())
    want = kernel.reference(**arrays)
    assert got.shape == want.shape
    assert worst_error(got, want) <= 1e-2
    assert stored_widths
    assert not any(width % 128 for width in stored_widths)


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


@pytest.mark.parametrize(
    ("num_rows", "groups", "F"), [(128, 2, 4096), (128, 2, 1024), (64, 1, 512), (8, 4, 256)]
)
@pytest.mark.parametrize("forced", [{}, {"splits": 2}, {"features": 256}, {"warpgroups": 4}])
def test_few_tiles_fit_an_sm(num_rows: int, groups: int, F: int, forced: dict[str, int]) -> None:
    """Parts of a sum are twice as large in shared memory."""
    rows = tile_rows(num_rows, groups)
    tiles = num_tiles(num_rows, groups, rows, ALIGN)
    blocks = GroupedBlocks(**forced).resolved(rows, tiles, F, 4096)
    out_bytes = blocks.rows * blocks.features * (4 if blocks.splits > 1 else 2)
    slot_bytes = (blocks.rows + blocks.features) * blocks.depth * 2
    assert out_bytes + blocks.slots * slot_bytes + 1024 <= 227 * 1024
    assert blocks.features >= 64 * blocks.warpgroups  # as few as WGMMA takes


def test_narrow_tiles_come_before_splits() -> None:
    def chosen(F: int) -> tuple[int, int]:
        blocks = GroupedBlocks().resolved(128, row_tiles=3, F=F, D=4096)
        return blocks.features, blocks.splits

    assert [chosen(F) for F in (14336, 4096, 1024)] == [(256, 1), (128, 1), (128, 5)]


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
