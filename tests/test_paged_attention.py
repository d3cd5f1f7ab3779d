"""Paged attention and page writes against float64 NumPy, with NaN in everything not to be read."""

import inspect
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels import KERNELS, paged_attention, prefill_attention, write_pages
from pallas_kernels.kernel import ArgSpec, Kernel, build_paged

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}
CASES = [
    pytest.param(kernel, spec, name, id=f"{kernel.name}-{spec.name}-{name}".replace(" ", "_"))
    for kernel in KERNELS.values()
    for spec in kernel.arg_specs
    for name in DTYPES
]

decode = jax.jit(paged_attention, static_argnames="scale")
prefill = jax.jit(prefill_attention, static_argnames="scale")
write = jax.jit(write_pages)


def run(kernel: Kernel, spec: ArgSpec, arrays: dict[str, np.ndarray], **kwargs) -> np.ndarray:
    call = jax.jit(lambda *args: kernel(*args, **spec.static, **kwargs))
    return np.asarray(call(*arrays.values()))


@pytest.mark.parametrize(("kernel", "spec", "dtype"), CASES)
def test_matches_float64(kernel: Kernel, spec: ArgSpec, dtype: str) -> None:
    arrays = spec.make(7, DTYPES[dtype])
    want = kernel.reference(**arrays, **spec.static)
    for implementation in kernel.implementations:
        got = run(kernel, spec, arrays, implementation=implementation)
        assert got.dtype == DTYPES[dtype]
        error = np.abs(got.astype(np.float64) - want).max()
        assert error <= kernel.tolerance[dtype] * np.abs(want).max()
        assert not got[want == 0].any()


@pytest.mark.parametrize("group", [1, 3, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_length_at_a_page_border(group: int, dtype: str) -> None:
    Z = 16
    lengths = np.asarray([0, 1, Z - 1, Z, Z + 1, 2 * Z + 1, 1000], np.int32)
    kernel = KERNELS["paged_attention"]
    rng = np.random.default_rng(group)
    arrays = {
        "query": rng.normal(size=(len(lengths), 3 * group, 64)).astype(DTYPES[dtype]),
        **build_paged(rng, np.dtype(DTYPES[dtype]), lengths, 3, 64, Z, 64),
        "lengths": lengths,
    }
    got = np.asarray(decode(*arrays.values(), scale=0.125))
    want = kernel.reference(**arrays, scale=0.125)
    assert np.abs(got - want).max() <= kernel.tolerance[dtype] * np.abs(want).max()
    assert not got[0].any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_decode_row_ignores_its_batch_mates(dtype: str) -> None:
    """Bit-exact for one program: any row, other mates, more or fewer of them."""
    spec = next(s for s in KERNELS["paged_attention"].arg_specs if s.name == "ragged batch")
    arrays = spec.make(3, DTYPES[dtype])
    call = partial(decode, **spec.static)
    whole = np.asarray(call(*arrays.values()))

    order = np.random.default_rng(0).permutation(len(whole))
    shuffled = {
        k: v[order] if k in ("query", "page_table", "lengths") else v for k, v in arrays.items()
    }
    np.testing.assert_array_equal(np.asarray(call(*shuffled.values())), whole[order])

    for row in range(len(whole)):
        alone = np.where(np.arange(len(whole)) == row, arrays["lengths"], 0).astype(np.int32)
        got = np.asarray(call(*{**arrays, "lengths": alone}.values()))
        np.testing.assert_array_equal(got[row], whole[row])
        assert not np.delete(got, row, axis=0).any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_prefill_row_ignores_its_batch_mates(dtype: str) -> None:
    spec = next(s for s in KERNELS["prefill_attention"].arg_specs if s.name == "tiles")
    arrays = spec.make(3, DTYPES[dtype])
    call = partial(prefill, **spec.static)
    whole = np.asarray(call(*arrays.values()))
    turned = {k: v if k.endswith("pages") else np.roll(v, 1, axis=0) for k, v in arrays.items()}
    np.testing.assert_array_equal(np.asarray(call(*turned.values())), np.roll(whole, 1, axis=0))
    alone = {**arrays, "lengths": arrays["lengths"] * np.asarray([0, 1, 0], np.int32)}
    got = np.asarray(call(*alone.values()))
    np.testing.assert_array_equal(got[1], whole[1])
    assert not got[[0, 2]].any()


def test_wider_page_table_changes_rounding_at_most() -> None:
    spec = next(s for s in KERNELS["paged_attention"].arg_specs if s.name == "page borders")
    arrays = spec.make(5)
    narrow = run(KERNELS["paged_attention"], spec, arrays)
    table = np.pad(arrays["page_table"], ((0, 0), (0, 60)))
    wide = run(KERNELS["paged_attention"], spec, {**arrays, "page_table": table})
    np.testing.assert_allclose(wide, narrow, rtol=0, atol=2e-6)


def test_decode_equals_the_last_query_of_a_prefill() -> None:
    rng = np.random.default_rng(2)
    lengths = np.asarray([33, 200, 1], np.int32)
    paged = build_paged(rng, np.dtype(np.float32), lengths, 3, 64, 16, 16)
    query = rng.normal(size=(3, 9, 64)).astype(np.float32)
    want = np.asarray(decode(query, *paged.values(), lengths, scale=0.125))
    ones = np.ones(3, np.int32)
    got = np.asarray(prefill(query[:, None], *paged.values(), lengths - 1, ones, scale=0.125))
    np.testing.assert_allclose(got[:, 0], want, rtol=0, atol=2e-6)


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


def test_unknown_implementation_is_named() -> None:
    spec = KERNELS["paged_attention"].arg_specs[0]
    with pytest.raises(ValueError, match=r"paged_attention among \['xla'\], received 'cuda'"):
        run(KERNELS["paged_attention"], spec, spec.make(0), implementation="cuda")


def test_platform_chooses_the_implementation() -> None:
    kernel = Kernel(
        name="twice",
        reference=lambda x: 2 * x,
        implementations={"xla": lambda x: x + x, "mosaic": lambda x: x * jnp.float32(3)},
        arg_specs=(),
        tolerance={},
        flops=lambda x: x.size,
        bytes=lambda x: 2 * x.nbytes,
    )
    assert float(jax.jit(kernel)(jnp.float32(4))) == 8
    assert float(kernel(jnp.float32(4), implementation="mosaic")) == 12


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_counts_are_of_the_live_tokens(kernel: Kernel) -> None:
    for spec in kernel.arg_specs:
        arrays = spec.make(0)
        assert kernel.flops(**arrays, **spec.static) > 0
        pools = arrays["key_pages"].nbytes + arrays["value_pages"].nbytes
        assert 0 < kernel.bytes(**arrays, **spec.static) < pools + 2 * arrays["query"].nbytes
        names = list(inspect.signature(kernel.reference).parameters)
        assert names == [*arrays, *spec.static]


def test_counts_of_one_case() -> None:
    rng = np.random.default_rng(0)
    paged = build_paged(rng, np.dtype(np.float32), np.asarray([3, 0]), 1, 8, 4, 1)
    query = np.zeros((2, 2, 8), np.float32)
    arrays = {"query": query, **paged, "lengths": np.asarray([3, 0])}
    assert KERNELS["paged_attention"].flops(**arrays, scale=1.0) == 3 * 2 * 8 * 4
    assert KERNELS["paged_attention"].bytes(**arrays, scale=1.0) == (3 * 8 * 2 + 2 * 32) * 4
    arrays = {
        "query": np.zeros((2, 2, 2, 8), np.float32),
        **paged,
        "starts": np.asarray([1, 0]),
        "lengths": np.asarray([2, 0]),
    }
    # Two queries that see 2 and 3 tokens.
    assert KERNELS["prefill_attention"].flops(**arrays, scale=1.0) == 5 * 2 * 8 * 4
    assert KERNELS["prefill_attention"].bytes(**arrays, scale=1.0) == (3 * 8 * 2 + 2 * 32) * 4


def test_rows_longer_than_the_table_are_refused_by_the_builder() -> None:
    with pytest.raises(ValueError, match="at most 8 tokens, received 9"):
        build_paged(np.random.default_rng(0), np.dtype(np.float32), np.asarray([9]), 1, 8, 4, 2)


def test_root_exports() -> None:
    assert set(pallas_kernels.__all__) <= set(vars(pallas_kernels))
