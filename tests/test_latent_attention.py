"""Latent attention: borders, absorbed against expanded form, independence, splits and races."""

import dataclasses
import math
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import latent_attention_mosaic as mosaic
from pallas_kernels.kernel import build_paged
from pallas_kernels.latent_attention import LATENT_ATTENTION, latent_attention
from pallas_kernels.latent_attention_plan import BLOCK, SPACE, LatentBlocks, make_plan

BFLOAT16 = ml_dtypes.bfloat16
RANK, ROTARY = 512, 64
STATIC = {"scale": 0.07, "rank": RANK}
# Implementation and dtype: the Mosaic form, interpreted, takes bfloat16 alone.
FORMS = [("xla", np.float32), ("xla", BFLOAT16), ("mosaic", BFLOAT16)]
forms = pytest.mark.parametrize(
    ("form", "dtype"), FORMS, ids=[f"{f}-{np.dtype(d).name}" for f, d in FORMS]
)


def make(
    lengths: list[int], heads: tuple[int, ...], page_size: int, columns: int, dtype, seed: int = 0
) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    width = RANK + ROTARY
    paged = build_paged(rng, np.dtype(dtype), np.asarray(lengths), 1, width, page_size, columns)
    return {
        "query": rng.normal(size=(len(lengths), *heads, width)).astype(dtype),
        "latent_pages": paged["key_pages"],
        "page_table": paged["page_table"],
        "lengths": np.asarray(lengths, np.int32),
    }


def call(form: str, **static):
    """The form as a compiled function of the arrays."""
    static = STATIC | static
    if form == "xla":
        return jax.jit(partial(LATENT_ATTENTION, implementation="xla", **static))
    return jax.jit(partial(LATENT_ATTENTION, implementation="mosaic", interpret=True, **static))


def check(got, arrays: dict[str, np.ndarray], **static) -> None:
    want = LATENT_ATTENTION.reference(**arrays, **(STATIC | static))
    got = np.asarray(got)
    assert got.dtype == arrays["query"].dtype
    assert got.shape == want.shape
    error = np.abs(got.astype(np.float64) - want).max()
    assert error <= LATENT_ATTENTION.tolerance[got.dtype.name] * np.abs(want).max()
    assert not got[want == 0].any()


@forms
def test_every_length_at_a_page_border(form: str, dtype) -> None:
    Z = 16
    lengths = [0, 1, Z - 1, Z, Z + 1, 2 * Z + 1, 1000]
    arrays = make(lengths, (8,), Z, -(-1024 // Z), dtype)
    check(call(form)(*arrays.values()), arrays)


@pytest.mark.parametrize(("form", "scale"), [("xla", -0.3), ("xla", 1.7), ("mosaic", -0.3)])
def test_any_scale(form: str, scale: float) -> None:
    arrays = make([90], (16,), 32, 4, BFLOAT16)
    arrays["query"] = (arrays["query"] / 8).astype(BFLOAT16)
    check(call(form, scale=scale)(*arrays.values()), arrays, scale=scale)


def test_absorbed_equals_expanded() -> None:
    """The same latents, once as they are and once as keys and values of each head."""
    N, nope, value = 6, 128, 96
    lengths = [70, 1, 33]
    arrays = make(lengths, (N,), 16, 5, np.float32)
    rng = np.random.default_rng(1)
    q_nope = rng.normal(size=(len(lengths), N, nope)).astype(np.float32)
    q_rope = rng.normal(size=(len(lengths), N, ROTARY)).astype(np.float32)
    w_uk = (rng.normal(size=(N, nope, RANK)) / math.sqrt(RANK)).astype(np.float32)
    w_uv = (rng.normal(size=(N, RANK, value)) / math.sqrt(RANK)).astype(np.float32)
    scale = 1 / math.sqrt(nope + ROTARY)

    @jax.jit
    def absorbed(pages, table, lengths):
        with jax.default_matmul_precision("highest"):
            query = jnp.concatenate([jnp.einsum("BNI,NIC->BNC", q_nope, w_uk), q_rope], axis=-1)
            out_BNC = latent_attention(query, pages, table, lengths, scale=scale, rank=RANK)
            return jnp.einsum("BNC,NCV->BNV", out_BNC, w_uv)

    got = absorbed(arrays["latent_pages"], arrays["page_table"], arrays["lengths"])
    for row, length in enumerate(lengths):
        pages = arrays["latent_pages"][arrays["page_table"][row]]
        latents_SD = pages.reshape(-1, RANK + ROTARY)[:length].astype(np.float64)
        keys_NSI = np.einsum("SC,NIC->NSI", latents_SD[:, :RANK], w_uk)
        values_NSV = np.einsum("SC,NCV->NSV", latents_SD[:, :RANK], w_uv)
        scores_NS = np.einsum("NI,NSI->NS", q_nope[row], keys_NSI)
        scores_NS = scale * (scores_NS + q_rope[row] @ latents_SD[:, RANK:].T)
        weights_NS = np.exp(scores_NS - scores_NS.max(axis=1, keepdims=True))
        weights_NS /= weights_NS.sum(axis=1, keepdims=True)
        want = np.einsum("NS,NSV->NV", weights_NS, values_NSV)
        assert np.abs(got[row] - want).max() <= 1e-5 * np.abs(want).max()


@forms
def test_row_ignores_its_batch_mates(form: str, dtype) -> None:
    """Bit-exact for one program: other places, other mates, none."""
    lengths = [300, 0, 65]
    # 512 tokens of table: the Mosaic form may split a row in two, and the first one is.
    arrays = make(lengths, (8,), 64, 8, dtype)
    run = call(form)
    whole = np.asarray(run(*arrays.values()))
    turned = {k: v if k == "latent_pages" else np.roll(v, 1, axis=0) for k, v in arrays.items()}
    np.testing.assert_array_equal(np.asarray(run(*turned.values())), np.roll(whole, 1, axis=0))
    for row in (0, 2):
        alone = np.where(np.arange(3) == row, lengths, 0).astype(np.int32)
        got = np.asarray(run(*{**arrays, "lengths": alone}.values()))
        np.testing.assert_array_equal(got[row], whole[row])
        assert not np.delete(got, row, axis=0).any()


@forms
@pytest.mark.parametrize(("heads", "columns"), [((3, 40), 8), ((8,), 20)], ids=["tiles", "splits"])
def test_log_sums(form: str, dtype, heads: tuple[int, ...], columns: int) -> None:
    """Beside the outputs, and exact to float32 in every dtype."""
    arrays = make([0, 2, 70, columns * 16], heads, 16, columns, dtype)
    out, lse = call(form, with_lse=True)(*arrays.values())
    check(out, arrays)
    _, want = LATENT_ATTENTION.reference(**arrays, **STATIC, with_lse=True)
    assert lse.dtype == np.float32
    assert np.isneginf(want[0]).all()
    assert LATENT_ATTENTION.error(lse, want) <= 1e-5


@forms
def test_several_tokens_equal_one_at_a_time(form: str, dtype) -> None:
    T = 3
    arrays = make([66, 2, 0], (T, 8), 16, 5, dtype)
    got = np.asarray(call(form)(*arrays.values())).astype(np.float32)
    check(call(form)(*arrays.values()), arrays)
    single = call("xla")
    for token in range(T):
        lengths = np.maximum(arrays["lengths"] - T + 1 + token, 0)
        one = {**arrays, "query": arrays["query"][:, token], "lengths": lengths}
        want = np.asarray(single(*one.values())).astype(np.float32)
        np.testing.assert_allclose(got[:, token], want, rtol=0, atol=2e-2 * np.abs(want).max())
    # The first of three tokens in a row of two is before its beginning.
    assert not got[1, 0].any()
    assert got[1, 1].any()


@forms
def test_pages_outside_the_pool_are_clamped(form: str, dtype) -> None:
    arrays = make([40], (8,), 16, 4, dtype)
    last = len(arrays["latent_pages"]) - 1
    arrays["latent_pages"][last] = arrays["latent_pages"][arrays["page_table"][0, 1]]
    run = call(form)
    want = np.asarray(run(*arrays.values()))
    # Column 3 lies behind the row's end: whatever it holds is not read.
    for outside in (last + 1, 1 << 30):
        arrays["page_table"][0, 1] = arrays["page_table"][0, 3] = outside
        np.testing.assert_array_equal(np.asarray(run(*arrays.values())), want)
    arrays["page_table"][0, 3] = -7
    np.testing.assert_array_equal(np.asarray(run(*arrays.values())), want)


@pytest.mark.parametrize("form", ["xla", "mosaic"])
@pytest.mark.parametrize("columns", [2, 17])
def test_rows_longer_than_the_table_are_cut(form: str, columns: int) -> None:
    arrays = make([columns * 16], (8,), 16, columns, BFLOAT16)
    run = call(form)
    want = np.asarray(run(*arrays.values()))
    long = {**arrays, "lengths": arrays["lengths"] + 100}
    np.testing.assert_array_equal(np.asarray(run(*long.values())), want)


def test_xla_form_copies_no_more_than_a_chunk_of_blocks() -> None:
    B, N, Z, W = 16, 8, 16, 256
    shape = jax.ShapeDtypeStruct
    compiled = (
        call("xla")
        .lower(
            shape((B, N, RANK + ROTARY), jnp.bfloat16),
            shape((300, Z, 1, RANK + ROTARY), jnp.bfloat16),
            shape((B, W), jnp.int32),
            shape((B,), jnp.int32),
        )
        .compile()
    )
    row_in_float32 = W * Z * (RANK + ROTARY) * 4
    assert compiled.memory_analysis().temp_size_in_bytes < B * row_in_float32 / 4


@pytest.mark.parametrize(
    "blocks",
    [
        LatentBlocks(),
        LatentBlocks(split_tokens=512, max_splits=16),
        LatentBlocks(split_tokens=64, max_splits=3),
    ],
)
@pytest.mark.parametrize("batch", [1, 7, 200])
def test_splits_cover_a_row_once(batch: int, blocks: LatentBlocks) -> None:
    shape = jax.ShapeDtypeStruct
    columns, Z = 512, 64
    plan = make_plan(
        shape((batch, 64, 576), jnp.bfloat16),
        shape((9, Z, 1, 576), jnp.bfloat16),
        shape((batch, columns), jnp.int32),
        1.0,
        RANK,
        blocks,
    )
    parts_of = jax.jit(jax.vmap(lambda n, s: plan.work(n, 0, s, 0)[-4:], (None, 0)))
    for length in (0, 1, 64, 65, 2048, 2049, 5000, columns * Z - 1, columns * Z):
        _, first, count, alone = parts_of(jnp.int32(length), jnp.arange(plan.splits))
        covered = [b for f, c in zip(first, count, strict=True) for b in range(f, f + c)]
        assert covered == list(range(-(-length // BLOCK)))
        assert bool(alone[0]) == (np.count_nonzero(count) <= 1)
        if length > blocks.split_tokens:
            assert not alone[0]


def test_each_live_page_is_read_once_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = make([300, 17, 0], (8,), 32, 16, BFLOAT16)
    read = []
    copy = gpu_callbacks.copy_gmem_to_smem

    def count_copy(*args, src_transforms, **kwargs):
        (indexer,) = src_transforms
        if indexer.shape == arrays["latent_pages"][:, :, 0].shape:
            page, tokens, columns = indexer.indices
            assert (int(tokens.start), tokens.size, columns.size) == (0, 32, RANK + ROTARY)
            read.append(int(page))
        return copy(*args, src_transforms=src_transforms, **kwargs)

    monkeypatch.setattr(gpu_callbacks, "copy_gmem_to_smem", count_copy)
    check(call("mosaic")(*arrays.values()), arrays)
    assert sorted(read) == sorted(arrays["page_table"][arrays["page_table"] > 0])


def test_short_splits_give_the_same() -> None:
    # Ten splits of a block each: more than the combine step reads at once.
    arrays = make([600, 130], (8,), 64, 10, BFLOAT16)
    run = partial(LATENT_ATTENTION, implementation="mosaic", interpret=True, **STATIC)
    got = jax.jit(partial(run, blocks=LatentBlocks(64, 10)))(*arrays.values())
    check(got, arrays)


def test_warpgroups_do_not_race(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither within an item of work nor from one to the next: all three are one CTA's."""
    monkeypatch.setattr(mosaic, "PROCESSORS", 1)
    arrays = make([300, 70], (2, 8), 32, 10, BFLOAT16)
    params = plgpu.InterpretGPUParams(detect_races=True)
    blocks = LatentBlocks(split_tokens=256)
    attend = partial(mosaic.latent_attention_mosaic, **STATIC, blocks=blocks, interpret=params)
    check(jax.jit(attend)(*arrays.values()), arrays)
    assert not get_races().races_found


def refusal(heads=8, width=576, page_size=16, dtype=jnp.bfloat16, rank=512) -> str | None:
    shape = jax.ShapeDtypeStruct
    return LATENT_ATTENTION.refusal(
        shape((2, heads, width), dtype),
        shape((9, page_size, 1, width), dtype),
        shape((2, 4), jnp.int32),
        shape((2,), jnp.int32),
        scale=1.0,
        rank=rank,
    )


def test_what_the_mosaic_form_takes() -> None:
    for heads in (1, 8, 12, 64, 128):
        for page_size in (8, 16, 32, 64, 128, 192):
            assert refusal(heads=heads, page_size=page_size) is None
    assert "received float32" in (refusal(dtype=jnp.float32) or "")
    assert "received 24" in (refusal(page_size=24) or "")
    assert "received 64 of 576" in (refusal(rank=64) or "")
    assert "received 512 of 640" in (refusal(width=640) or "")


def test_counts() -> None:
    arrays = make([10, 2, 0], (3, 8), 16, 1, BFLOAT16)
    seen = (8 + 9 + 10) + (0 + 1 + 2)
    assert LATENT_ATTENTION.flops(**arrays, **STATIC) == 2 * 8 * seen * (576 + 512)
    queries = 3 * 3 * 8
    assert LATENT_ATTENTION.bytes(**arrays, **STATIC) == 2 * (12 * 576 + queries * (576 + 512))


def test_blocks_are_those_of_the_search_space() -> None:
    fields = {field.name for field in dataclasses.fields(LatentBlocks)}
    assert fields == set(SPACE)
    for name, values in SPACE.items():
        assert getattr(LatentBlocks(), name) in values
