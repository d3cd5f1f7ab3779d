"""Decode attention and page writes against float64 NumPy, with NaN in everything not to be read."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import KERNELS, paged_attention, prefill_attention, write_pages
from pallas_kernels.kernel import build_paged
from pallas_kernels.paged_attention_plan import DEFAULT_BLOCKS, PagedBlocks, Plan, plan_of

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}
KERNEL = KERNELS["paged_attention"]
SPECS = {spec.name: spec for spec in KERNEL.arg_specs}

decode = jax.jit(paged_attention, static_argnames=("scale", "window", "attention_chunk"))
mosaic = partial(KERNEL, implementation="mosaic", interpret=True)
write = jax.jit(write_pages)


def make_rows(
    lengths: tuple[int, ...],
    *,
    tokens: int | None = None,
    group: int = 3,
    kv_heads: int = 3,
    head_dim: int = 64,
    page_size: int = 16,
    width: int = 64,
    dtype: str = "float32",
) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(group)
    shape = (group * kv_heads, head_dim)
    query = rng.normal(size=(len(lengths), *(() if tokens is None else (tokens,)), *shape))
    paged = build_paged(
        rng, np.dtype(DTYPES[dtype]), np.asarray(lengths), kv_heads, head_dim, page_size, width
    )
    return {
        "query": query.astype(DTYPES[dtype]),
        **paged,
        "lengths": np.asarray(lengths, np.int32),
    }


def check(got: Any, arrays: dict[str, np.ndarray], **static: Any) -> None:
    want = KERNEL.reference(**arrays, **static)
    got = np.asarray(got)
    assert got.dtype == arrays["query"].dtype
    tolerance = KERNEL.tolerance[got.dtype.name]
    assert np.abs(got.astype(np.float64) - want).max() <= tolerance * np.abs(want).max()
    # Rows without a token are zero, not small.
    assert not got[want == 0].any()


@pytest.mark.parametrize("name", ["ragged batch", "page of three", "four tokens"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_matches_float64(name: str, dtype: str) -> None:
    spec = SPECS[name]
    arrays = spec.make(7, DTYPES[dtype])
    check(decode(*arrays.values(), **spec.static), arrays, **spec.static)


@pytest.mark.parametrize(
    ("group", "dtype"), list(zip((1, 3, 4, 5, 8, 16), 3 * list(DTYPES), strict=True))
)
def test_every_length_at_a_page_border(group: int, dtype: str) -> None:
    arrays = make_rows((0, 1, 15, 16, 17, 33, 1000), group=group, dtype=dtype)
    check(decode(*arrays.values(), scale=0.125), arrays, scale=0.125)


def test_mosaic_at_every_length_at_a_page_border() -> None:
    arrays = make_rows(
        (0, 1, 63, 64, 65, 129, 1000),
        group=1,
        kv_heads=1,
        page_size=64,
        width=16,
        dtype="bfloat16",
    )
    check(jax.jit(partial(mosaic, scale=-0.3))(*arrays.values()), arrays, scale=-0.3)


@pytest.mark.parametrize(
    "blocks",
    [
        PagedBlocks(kv_tokens=128, copy_bytes=8192, split_tokens=128),
        PagedBlocks(ring_bytes=1, copy_bytes=1, programs=1),
    ],
    ids=["large", "small"],
)
def test_mosaic_with_other_blocks(blocks: PagedBlocks) -> None:
    arrays = make_rows((0, 200), kv_heads=2, page_size=32, width=8, dtype="bfloat16")
    static = {"scale": 0.125, "window": 150}
    call = jax.jit(partial(mosaic, blocks=blocks, **static))
    check(call(*arrays.values()), arrays, **static)


@pytest.mark.parametrize("dtype", DTYPES)
def test_decode_row_ignores_its_batch_mates(dtype: str) -> None:
    """Bit-exact for one program: any row, other mates, more or fewer of them."""
    spec = SPECS["ragged batch"]
    arrays = spec.make(3, DTYPES[dtype])
    call = partial(decode, **spec.static)
    whole = np.asarray(call(*arrays.values()))
    order = np.random.default_rng(0).permutation(len(whole))
    np.testing.assert_array_equal(np.asarray(call(*reorder(arrays, order))), whole[order])
    for row in range(len(whole)):
        got = np.asarray(call(*alone(arrays, row)))
        np.testing.assert_array_equal(got[row], whole[row])
        assert not np.delete(got, row, axis=0).any()


def test_mosaic_row_ignores_its_batch_mates() -> None:
    arrays = make_rows((200, 0, 65), group=1, kv_heads=1, page_size=64, width=4, dtype="bfloat16")
    assert plan(arrays).splits > 1
    call = jax.jit(partial(mosaic, scale=0.125))
    whole = np.asarray(call(*arrays.values()))
    order = np.asarray([2, 0, 1])
    np.testing.assert_array_equal(np.asarray(call(*reorder(arrays, order))), whole[order])
    got = np.asarray(call(*alone(arrays, 0)))
    np.testing.assert_array_equal(got[0], whole[0])
    assert not got[1:].any()


def reorder(arrays: dict[str, np.ndarray], order: np.ndarray) -> list[np.ndarray]:
    """The arguments with their rows in another order."""
    return [v if k.endswith("pages") else v[order] for k, v in arrays.items()]


def alone(arrays: dict[str, np.ndarray], row: int) -> list[np.ndarray]:
    """The arguments with all other rows empty."""
    lengths = arrays["lengths"]
    kept = np.where(np.arange(len(lengths)) == row, lengths, 0).astype(np.int32)
    return list({**arrays, "lengths": kept}.values())


def test_wider_page_table_changes_rounding_at_most() -> None:
    arrays = SPECS["page borders"].make(5)
    narrow = decode(*arrays.values(), scale=0.125)
    table = np.pad(arrays["page_table"], ((0, 0), (0, 60)))
    wide = decode(*{**arrays, "page_table": table}.values(), scale=0.125)
    np.testing.assert_allclose(wide, narrow, rtol=0, atol=2e-6)


@pytest.mark.parametrize("call", [decode, jax.jit(mosaic, static_argnames="scale")])
def test_what_the_table_says_behind_a_row_does_not_matter(call: Any) -> None:
    arrays = make_rows((17, 0), group=1, kv_heads=1, width=4, dtype="bfloat16")
    want = np.asarray(call(*arrays.values(), scale=0.125))
    owned = np.arange(4)[None, :] < -(-arrays["lengths"] // 16)[:, None]
    garbage = np.asarray([-5, -(1 << 31), 1 << 30, 9999], np.int32)[None, :]
    table = np.where(owned, arrays["page_table"], garbage)
    got = call(*{**arrays, "page_table": table}.values(), scale=0.125)
    np.testing.assert_array_equal(np.asarray(got), want)


@pytest.mark.parametrize("limit", [{}, {"window": 20}, {"attention_chunk": 24}])
def test_tokens_of_a_row_equal_rows_of_one_token(limit: dict[str, int]) -> None:
    T = 4
    arrays = make_rows((50, 4, 2, 0, 300), tokens=T)
    got = np.asarray(decode(*arrays.values(), scale=0.125, **limit))
    for t in range(T):
        one = {**arrays, "query": arrays["query"][:, t], "lengths": arrays["lengths"] - T + t + 1}
        want = np.asarray(decode(*one.values(), scale=0.125, **limit))
        np.testing.assert_allclose(got[:, t], want, rtol=0, atol=2e-6)


@pytest.mark.parametrize("limit", [{}, {"window": 20}, {"attention_chunk": 24}])
def test_decode_equals_the_last_query_of_a_prefill(limit: dict[str, int]) -> None:
    arrays = make_rows((33, 200, 1), width=16)
    want = np.asarray(decode(*arrays.values(), scale=0.125, **limit))
    query, *paged, lengths = arrays.values()
    ones = np.ones(3, np.int32)
    prefill = jax.jit(partial(prefill_attention, scale=0.125, **limit))
    got = np.asarray(prefill(query[:, None], *paged, lengths - 1, ones))
    np.testing.assert_allclose(got[:, 0], want, rtol=0, atol=2e-6)


def test_a_limit_longer_than_the_rows_changes_nothing() -> None:
    arrays = make_rows((50, 0, 300))
    want = np.asarray(decode(*arrays.values(), scale=0.125))
    for limit in ({"window": 300}, {"attention_chunk": 300}):
        got = np.asarray(decode(*arrays.values(), scale=0.125, **limit))
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-6)


@pytest.mark.parametrize("limit", [{"window": 0}, {"attention_chunk": -1}])
def test_limits_are_positive(limit: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="expected a positive window"):
        paged_attention(*make_rows((3,)).values(), scale=0.125, **limit)


def plan(arrays: Any, blocks: PagedBlocks = DEFAULT_BLOCKS, **static: Any) -> Plan:
    return plan_of(
        arrays["query"],
        arrays["key_pages"],
        arrays["page_table"],
        1.0,
        static.get("window"),
        static.get("attention_chunk"),
        blocks,
    )


@pytest.mark.parametrize("name", SPECS)
def test_splits_cover_what_a_row_sees_once(name: str) -> None:
    sizes = plan(SPECS[name].shapes(DTYPES["bfloat16"]), **SPECS[name].static)
    longest = sizes.W * sizes.Z
    lengths = np.unique(np.r_[0:200, np.linspace(0, longest, 50), longest - 1]).astype(np.int32)
    first, end = (np.asarray(x) for x in sizes.seen(jnp.asarray(lengths)))
    start, count, each = (np.asarray(x) for x in sizes.split(jnp.asarray(first), jnp.asarray(end)))
    # The first block holds the first seen token, the last one the last.
    assert np.all(start * sizes.kv <= first)
    assert np.all((start + count) * sizes.kv >= end)
    assert np.all((start + count - 1) * sizes.kv < np.maximum(end, 1))
    assert np.all(each * sizes.splits >= count)


@pytest.mark.parametrize("name", [name for name, spec in SPECS.items() if spec.compile_only])
def test_copies_read_little_beside_what_is_seen(name: str) -> None:
    """Bytes that TMA copies, for rows of a thousand tokens on, against each seen byte once."""
    spec = SPECS[name]
    sizes = plan(spec.shapes(DTYPES["bfloat16"]), **spec.static)
    lengths = np.random.default_rng(0).integers(1000, sizes.W * sizes.Z, 1000).astype(np.int32)
    first, end = (np.asarray(x) for x in sizes.seen(jnp.asarray(lengths)))
    copied = -(-end // sizes.copy_rows) - first // sizes.copy_rows
    assert np.sum(copied * sizes.copy_rows) <= 1.05 * np.sum(end - first)


@pytest.mark.parametrize("name", [name for name, spec in SPECS.items() if spec.compile_only])
def test_partial_results_stay_in_cache(name: str) -> None:
    """They take no more than half of the 50 MB of second-level cache of an H100 or H200."""
    sizes = plan(SPECS[name].shapes(DTYPES["bfloat16"]), **SPECS[name].static)
    rows = sizes.splits * sizes.B * sizes.K * sizes.rows
    assert 4 * rows * sizes.H <= 25e6


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": "float32"}, "TF32"),
        ({"head_dim": 32}, "head dims"),
        ({"page_size": 12}, "tiles of 8"),
        ({"tokens": 22}, "66 query rows"),
    ],
    ids=["float32", "head_dim", "page_size", "rows"],
)
def test_mosaic_says_what_it_does_not_take(change: dict[str, Any], reason: str) -> None:
    arrays = make_rows((40,), **{"dtype": "bfloat16", **change})
    with pytest.raises(ValueError, match=reason):
        mosaic(*arrays.values(), scale=0.125)
    # Dispatch takes the other form then.
    check(decode(*arrays.values(), scale=0.125), arrays, scale=0.125)


def test_counts_of_one_case() -> None:
    rng = np.random.default_rng(0)
    paged = build_paged(rng, np.dtype(np.float32), np.asarray([3, 0]), 1, 8, 4, 1)
    query = np.zeros((2, 2, 8), np.float32)
    arrays = {"query": query, **paged, "lengths": np.asarray([3, 0])}
    assert KERNEL.flops(**arrays, scale=1.0) == 3 * 2 * 8 * 4
    assert KERNEL.bytes(**arrays, scale=1.0) == (3 * 8 * 2 + 2 * 32) * 4
    assert KERNEL.flops(**arrays, scale=1.0, window=2) == 2 * 2 * 8 * 4
    assert KERNEL.bytes(**arrays, scale=1.0, attention_chunk=2) == (1 * 8 * 2 + 2 * 32) * 4
    # Two tokens that see 2 and 3 positions, or with a window of 2 each two of the three.
    arrays["query"] = np.zeros((2, 2, 2, 8), np.float32)
    assert KERNEL.flops(**arrays, scale=1.0) == 5 * 2 * 8 * 4
    assert KERNEL.bytes(**arrays, scale=1.0, window=2) == (3 * 8 * 2 + 4 * 32) * 4


def test_rows_longer_than_the_table_are_refused_by_the_builder() -> None:
    with pytest.raises(ValueError, match="at most 8 tokens, received 9"):
        build_paged(np.random.default_rng(0), np.dtype(np.float32), np.asarray([9]), 1, 8, 4, 2)


def test_write_pages_stores_each_token_in_its_slot() -> None:
    rng = np.random.default_rng(0)
    P, Z, K, H = 7, 4, 2, 8
    pages = rng.normal(size=(P, Z, K, H)).astype(np.float32)
    new = rng.normal(size=(2, 5, K, H)).astype(np.float32)
    table = np.asarray([[3, 5, 1], [2, 6, 4]], np.int32)
    positions = np.asarray([[2, 3, 4, 5, 6], [8, 9, 10, 11, 12]], np.int32)
    valid = np.asarray([[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]], bool)
    got = np.asarray(write(pages, new, table, positions, valid))
    want = pages.copy()
    for b in range(2):
        for t in range(5):
            # Position 12 lies outside the table of 3 pages.
            if valid[b, t] and positions[b, t] < 12:
                want[table[b, positions[b, t] // Z], positions[b, t] % Z] = new[b, t]
    np.testing.assert_array_equal(got[1:], want[1:])
    np.testing.assert_array_equal(got[0, 1:], want[0, 1:])


@pytest.mark.parametrize("page", [-1, -8, 7, 1 << 30, -(1 << 31)])
def test_write_pages_drops_pages_outside_the_pool(page: int) -> None:
    pages = np.arange(7 * 4 * 2 * 8, dtype=np.float32).reshape(7, 4, 2, 8)
    new = np.full((1, 1, 2, 8), np.nan, np.float32)
    table = np.asarray([[page]], np.int32)
    got = write(pages, new, table, np.asarray([[1]], np.int32), np.asarray([[True]]))
    np.testing.assert_array_equal(np.asarray(got), pages)


def test_write_pages_sends_negative_positions_to_the_null_page() -> None:
    pages = jnp.zeros((3, 4, 1, 2))
    new = jnp.ones((1, 1, 1, 2))
    table = jnp.asarray([[1, 2]], jnp.int32)
    got = write(pages, new, table, jnp.asarray([[-1]], jnp.int32), jnp.asarray([[True]]))
    assert not np.asarray(got)[1:].any()


def test_write_pages_updates_a_donated_pool_in_place() -> None:
    pages = jnp.zeros((9, 4, 2, 8))
    new = jnp.ones((1, 1, 2, 8))
    table = jnp.asarray([[1]], jnp.int32)
    step = jax.jit(write_pages, donate_argnums=0).lower(
        pages, new, table, jnp.zeros((1, 1), jnp.int32), jnp.ones((1, 1), bool)
    )
    compiled = step.compile()
    assert compiled.memory_analysis().alias_size_in_bytes == pages.nbytes
    assert compiled.memory_analysis().temp_size_in_bytes < pages.nbytes
