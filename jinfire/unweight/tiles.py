"""What kernels are called with: bytes to read, and ranges of tiles, one a thread."""

import itertools
import os
from collections.abc import Buffer, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from jinfire.unweight import kernels
from pallas_kernels import TileOrder

# Below this a second thread costs more than it saves.
JOB_WEIGHTS = 1 << 17


def as_input(data: Buffer) -> np.ndarray:
    """Bytes as kernels read them: every kernel is compiled for one kind of array only."""
    array = data if isinstance(data, np.ndarray) else np.frombuffer(data, np.uint8)
    array = array.view(np.ndarray).reshape(-1).view(np.uint8)
    array.flags.writeable = False
    return array


def row_of(tile: int, order: TileOrder) -> int:
    """First row of a tile, or the number of rows behind the last."""
    return order.rows if tile >= order.tiles else kernels.first_row(tile, order.across, order.F)


def verbatim_before(flags_R: np.ndarray, tile: int, order: TileOrder) -> int:
    """Rows before a tile that are verbatim."""
    return int(np.count_nonzero(flags_R[: row_of(tile, order)]))


def threads(num_weights: int, jobs: int | None) -> int:
    """Threads that so much work is worth, of `jobs` or the processors there are."""
    return max(1, min(jobs or os.cpu_count() or 1, num_weights // JOB_WEIGHTS))


def tile_ranges(
    order: TileOrder, jobs: int | None, within: tuple[int, int] | None = None
) -> list[tuple[int, int]]:
    """Tiles in as many consecutive ranges as there are threads for them."""
    first, last = within or (0, order.tiles)
    number = max(
        1, min(threads((last - first) * kernels.ROW * kernels.TILE_ROWS, jobs), last - first)
    )
    bounds = [first + (last - first) * i // number for i in range(number + 1)]
    return list(itertools.pairwise(bounds))


def on_tiles[T](
    work: Callable[[int, int], T],
    order: TileOrder,
    jobs: int | None,
    within: tuple[int, int] | None = None,
) -> list[T]:
    """Results for ranges that are all tiles, or those `within`, in order."""
    ranges = tile_ranges(order, jobs, within)
    return on_threads(work, ranges, len(ranges))


def on_threads[T](
    work: Callable[[int, int], T], ranges: Sequence[tuple[int, int]], jobs: int | None
) -> list[T]:
    """Results of the ranges, in order."""
    jobs = min(jobs or os.cpu_count() or 1, len(ranges))
    if jobs <= 1:
        return [work(*range_) for range_ in ranges]
    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(lambda range_: work(*range_), ranges))
