"""Prefill attention: windows, attention chunks, and the Mosaic form's tiles in interpret mode."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import KERNELS
from pallas_kernels.kernel import build_paged
from pallas_kernels.prefill_attention_mosaic import prefill_attention_mosaic
from pallas_kernels.prefill_attention_tiles import PrefillBlocks, tile_shape

KERNEL = KERNELS["prefill_attention"]
BF16 = np.dtype(ml_dtypes.bfloat16)
SCALE = 0.125


def make(
    starts: list[int],
    lengths: list[int],
    chunk: int,
    heads: int = 2,
    kv_heads: int = 1,
    head_dim: int = 64,
    page_size: int = 16,
    width: int = 8,
    dtype: np.dtype = BF16,
) -> dict[str, np.ndarray]:
    """Arguments of rows with NaN behind their tokens, on pages in random order."""
    rng = np.random.default_rng(len(starts))
    tokens = np.asarray(starts) + np.asarray(lengths)
    return {
        "query": rng.normal(size=(len(starts), chunk, heads, head_dim)).astype(dtype),
        **build_paged(rng, dtype, tokens, kv_heads, head_dim, page_size, width),
        "starts": np.asarray(starts, np.int32),
        "lengths": np.asarray(lengths, np.int32),
    }


def run(arrays: dict[str, np.ndarray], implementation: str = "mosaic", **static: Any) -> np.ndarray:
    options = {"interpret": True} if implementation == "mosaic" else {}
    call = partial(KERNEL, implementation=implementation, scale=SCALE, **options, **static)
    return np.asarray(jax.jit(call)(*arrays.values()))


def check(arrays: dict[str, np.ndarray], got: np.ndarray, **static: Any) -> None:
    want = KERNEL.reference(**arrays, scale=SCALE, **static)
    error = np.abs(got.astype(np.float64) - want).max()
    assert error <= KERNEL.tolerance[got.dtype.name] * np.abs(want).max()
    assert not got[want == 0].any()


LIMITS = [
    {"window": 1},
    {"window": 17},
    {"window": 1000},
    {"attention_chunk": 1},
    {"attention_chunk": 16},
    {"attention_chunk": 100},
    {"window": 20, "attention_chunk": 33},
]


@pytest.mark.parametrize("limits", LIMITS, ids=str)
@pytest.mark.parametrize("chunk", [24, 200])
def test_limits_of_the_xla_form(limits: dict[str, int], chunk: int) -> None:
    rows = [(0, chunk), (3, chunk - 1), (31, 1), (130, 20), (0, 0)]
    starts, lengths = (list(x) for x in zip(*rows, strict=True))
    arrays = make(starts, lengths, chunk, heads=3, width=16, dtype=np.dtype(np.float32))
    check(arrays, run(arrays, "xla", **limits), **limits)


@pytest.mark.parametrize("limits", [{"window": 1}, {"attention_chunk": 100}], ids=str)
def test_limits_of_the_mosaic_form(limits: dict[str, int]) -> None:
    """Tiles that lie across a border of a chunk, and rows that see one key."""
    arrays = make([90, 0], [30, 5], 32, heads=4)
    check(arrays, run(arrays, **limits), **limits)


def test_every_length_at_a_page_border() -> None:
    tokens = [0, 1, 15, 16, 17, 33, 1000]
    lengths = [min(n, 16) for n in tokens]
    starts = [n - length for n, length in zip(tokens, lengths, strict=True)]
    arrays = make(starts, lengths, 16, heads=3, width=64)
    check(arrays, run(arrays))


@pytest.mark.parametrize(
    "blocks",
    [PrefillBlocks(kv_tokens=64, slots=2, warpgroups=3), PrefillBlocks(kv_tokens=64, slots=4)],
    ids=str,
)
def test_other_block_sizes(blocks: PrefillBlocks) -> None:
    arrays = make([60, 0], [40, 64], 64, heads=4, page_size=32, width=4)
    check(arrays, run(arrays, blocks=blocks))


def test_row_ignores_its_batch_mates_and_how_its_prompt_is_cut() -> None:
    """Bit-exact for one program: other mates, fewer of them, another chunk border."""
    arrays = make([60, 0, 100], [64, 20, 28], 64)
    whole = run(arrays)
    turned = {k: v if k.endswith("pages") else np.roll(v, 1, axis=0) for k, v in arrays.items()}
    np.testing.assert_array_equal(run(turned), np.roll(whole, 1, axis=0))

    # The first row's last 24 queries again, as a chunk of their own and alone in the batch.
    later = {k: v.copy() for k, v in arrays.items()}
    later["query"][0] = np.roll(arrays["query"][0], -40, axis=0)
    later["starts"][0] += 40
    later["lengths"][:] = 24, 0, 0
    got = run(later)
    np.testing.assert_array_equal(got[0, :24], whole[0, 40:])
    assert not got[0, 24:].any()
    assert not got[1:].any()


def test_columns_that_no_query_needs_may_hold_anything() -> None:
    arrays = make([120], [16], 16, width=10)
    want = run(arrays, window=30)
    # Positions 91 to 135: pages 5 to 8.
    arrays["page_table"][0, :5] = [-1, 1 << 30, 10**6, -(1 << 31), 99]
    arrays["page_table"][0, 9] = 1 << 30
    np.testing.assert_array_equal(run(arrays, window=30), want)


def test_page_outside_the_pool_reads_the_nearest() -> None:
    arrays = make([0, 0], [20, 20], 24)
    last = len(arrays["key_pages"]) - 1
    arrays["key_pages"][[0, last]] = arrays["value_pages"][[0, last]] = 1
    arrays["page_table"][0, 0], arrays["page_table"][1, 0] = 0, last
    want = run(arrays)
    arrays["page_table"][0, 0], arrays["page_table"][1, 0] = -7, 1 << 30
    np.testing.assert_array_equal(run(arrays), want)


def test_tiles_use_their_rows() -> None:
    assert tile_shape(group=1, chunk=512, rows=128) == (1, 128)
    assert tile_shape(group=4, chunk=512, rows=128) == (4, 32)
    assert tile_shape(group=8, chunk=16, rows=128) == (8, 16)
    assert tile_shape(group=16, chunk=512, rows=128) == (16, 8)
    # 3 x 40 and 5 x 24 rows are fewer than 128; three heads fill the tile of a short chunk.
    assert tile_shape(group=3, chunk=512, rows=128) == (1, 128)
    assert tile_shape(group=5, chunk=512, rows=128) == (1, 128)
    assert tile_shape(group=3, chunk=40, rows=128) == (3, 40)
    # More heads than a tile takes.
    assert tile_shape(group=64, chunk=512, rows=128) == (16, 8)


def test_what_mosaic_does_not_take() -> None:
    def refusal(head_dim: int = 64, page_size: int = 16, dtype: Any = BF16, scale: float = 1.0):
        arrays = make([0], [1], 8, head_dim=head_dim, page_size=page_size, dtype=np.dtype(dtype))
        return KERNEL.refusal(*arrays.values(), scale=scale)

    assert refusal() is None
    assert refusal(head_dim=128, page_size=128) is None
    for reason, wrong in {
        "head dimension": {"head_dim": 32},
        "page size": {"page_size": 48},
        "bfloat16": {"dtype": np.float32},
        "scale": {"scale": 0.0},
    }.items():
        assert reason in refusal(**wrong)
    arrays = make([0], [1], 8)
    null_page = {name: arrays[name][:1] for name in ("key_pages", "value_pages")}
    assert "null page" in KERNEL.refusal(*(arrays | null_page).values(), scale=1.0)


def test_counts_follow_the_limits() -> None:
    arrays = make([10, 0], [3, 0], 8, heads=1)
    # Queries at 10, 11 and 12.
    for limits, pairs, keys in (
        ({}, 11 + 12 + 13, 13),
        ({"window": 4}, 3 * 4, 6),
        ({"attention_chunk": 12}, 11 + 12 + 1, 13),
        ({"attention_chunk": 8}, 3 + 4 + 5, 5),
    ):
        assert KERNEL.flops(**arrays, scale=SCALE, **limits) == 4 * 64 * pairs
        assert KERNEL.bytes(**arrays, scale=SCALE, **limits) == 2 * (2 * 64 * keys + 2 * 64 * 3)


def test_odd_chunk_is_cut_back() -> None:
    arrays = make([5], [3], 3)
    got = run(arrays)
    assert got.shape == (1, 3, 2, 64)
    assert got.dtype == jnp.bfloat16
    check(arrays, got)


def test_threads_of_a_block_do_not_race() -> None:
    arrays = make([290, 0], [30, 64], 64, heads=4, width=24)
    params = plgpu.InterpretGPUParams(detect_races=True)
    call = partial(prefill_attention_mosaic, scale=SCALE, window=60, interpret=params)
    got = np.asarray(jax.jit(call)(*arrays.values()))
    check(arrays, got, window=60)
    assert not get_races().races_found


def test_length_beyond_the_chunk_is_cut() -> None:
    """No slot behind the chunk is read as a value, whatever the length says."""
    arrays = make([5], [3], 3)
    want = run(arrays)
    arrays["lengths"][:] = 7
    np.testing.assert_array_equal(run(arrays), want)
