"""One layer over three stores of its keys and values: the batch, and pages in both phases."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import tiny_config, tiny_source
from jax.sharding import PartitionSpec

from jinfire.config import LatentConfig, LayerSpec, ModelConfig, RopeConfig, TemperatureConfig
from jinfire.kvcache.pages import pages_like
from jinfire.models.spec import Skeleton, skeleton
from jinfire.programs.decode import DecodeKV
from jinfire.programs.forward import InBatchKV, seen_in_batch
from jinfire.programs.prefill import PrefillKV
from pallas_kernels import expanded_latent_attention
from pallas_kernels.kernel import build_paged
from sharding import MeshSpec, make_mesh

PAGE, COLUMNS = 4, 6
LENGTH = 22

YARN = RopeConfig(
    theta=100.0,
    scaling="yarn",
    factor=4.0,
    original_max_position=8,
    beta_fast=4.0,
    mscale=0.7,
    mscale_all_dim=1.3,
    interleaved=True,
)
LATENT = LatentConfig(query_rank=12, rank=10, nope_dim=6, rope_dim=4, value_dim=5)


def one_layer(attention: str, **changes) -> ModelConfig:
    return tiny_config((LayerSpec(attention),), **changes)


CONFIGS = {
    "causal": one_layer("causal", qk_norm=True),
    "chunked": one_layer(
        "chunked",
        attention_chunk=8,
        qk_norm_after_rope=True,
        rope=RopeConfig(interleaved=True),
    ),
    "unrotated": one_layer(
        "unrotated", temperature=TemperatureConfig(0.3, 5), qk_norm_after_rope=True
    ),
    "latent": one_layer("latent", num_kv_heads=8, head_dim=10, latent=LATENT, rope=YARN),
    "latent without query rank": one_layer(
        "latent",
        num_kv_heads=8,
        head_dim=10,
        latent=LatentConfig(None, LATENT.rank, LATENT.nope_dim, LATENT.rope_dim, 7),
    ),
}
kinds = pytest.mark.parametrize("kind", CONFIGS)


def on_one_device(function):
    """`function` of arrays inside `shard_map`, compiled."""
    mesh = make_mesh(MeshSpec(), jax.devices()[:1])
    spec = PartitionSpec()
    return jax.jit(
        jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    )


def build(config: ModelConfig, dtype=jnp.float32) -> tuple[Skeleton, dict[str, jax.Array]]:
    source, structure = tiny_source(config), skeleton(config, config.layers)
    return structure, {
        name: jnp.asarray(source.read(name, (slice(None),) * len(spec.shape))).astype(dtype)
        for name, spec in structure.specs.items()
    }


def run_in_batch(config: ModelConfig, structure: Skeleton, params, hidden) -> np.ndarray:
    def run(params, hidden):
        model = structure.bind(params)
        positions = jnp.broadcast_to(jnp.arange(hidden.shape[1])[None], hidden.shape[:2])
        return model.layers[0](hidden, model.tables(positions), InBatchKV())[0]

    return np.asarray(on_one_device(run)(params, hidden))


def run_in_pages(
    config: ModelConfig, structure: Skeleton, params, hidden, prefills: tuple[int, ...]
) -> np.ndarray:
    """The tokens in chunks of a prefill of two rows, one of them padding, then in decode steps."""
    num_pages = 2 * COLUMNS + 1
    # Rows hold their pages in no order; nothing that is not written may matter.
    table = np.random.default_rng(0).permutation(np.arange(1, num_pages)).reshape(2, COLUMNS)
    table = jnp.asarray(table, jnp.int32)
    pages = pages_like(
        config, lambda w: jnp.full((num_pages, PAGE, config.cached_heads, w), jnp.nan, hidden.dtype)
    )
    width = max(prefills)

    @on_one_device
    def prefill(params, pages, hidden_RCD, starts, lengths):
        model = structure.bind(params)
        index = jnp.arange(width, dtype=jnp.int32)[None]
        positions = starts[:, None] + index
        kv = PrefillKV(pages, table, starts, lengths, positions, index < lengths[:, None])
        out, kv = model.layers[0](hidden_RCD, model.tables(positions), kv)
        return out, kv.pages

    @on_one_device
    def decode(params, pages, hidden_B1D, positions, lengths):
        model = structure.bind(params)
        kv = DecodeKV(pages, table, positions, lengths)
        out, kv = model.layers[0](hidden_B1D, model.tables(positions[:, None]), kv)
        return out, kv.pages

    outs, start = [], 0
    for count in prefills:
        chunk = jnp.zeros((2, width, hidden.shape[-1]), hidden.dtype)
        chunk = chunk.at[0, :count].set(hidden[0, start : start + count])
        starts = jnp.asarray([start, 0], jnp.int32)
        out, pages = prefill(params, pages, chunk, starts, jnp.asarray([count, 0], jnp.int32))
        outs.append(np.asarray(out)[0, :count])
        start += count
    for position in range(start, hidden.shape[1]):
        rows = jnp.concatenate([hidden[:, position : position + 1]] * 2)
        positions = jnp.asarray([position, 3], jnp.int32)
        lengths = jnp.asarray([position + 1, 0], jnp.int32)
        out, pages = decode(params, pages, rows, positions, lengths)
        outs.append(np.asarray(out)[0])
    return np.concatenate(outs)[None]


@kinds
@pytest.mark.parametrize("prefills", [(13,), (8, 7), (1,)], ids=str)
def test_pages_are_the_batch(kind: str, prefills: tuple[int, ...]) -> None:
    """Prefill attends to expanded latents, decode to latents as they are: the same attention."""
    config = CONFIGS[kind]
    structure, params = build(config)
    hidden = np.random.default_rng(1).standard_normal((1, LENGTH, config.width), np.float32)
    expected = run_in_batch(config, structure, params, jnp.asarray(hidden))
    got = run_in_pages(config, structure, params, jnp.asarray(hidden), prefills)
    assert np.abs(expected - hidden).max() > 0.1  # the layer does something
    np.testing.assert_allclose(got, expected, atol=2e-5, rtol=2e-5)


@kinds
def test_bfloat16(kind: str) -> None:
    config = CONFIGS[kind]
    structure, exact = build(config)
    rounded = {name: value.astype(jnp.bfloat16) for name, value in exact.items()}
    exact = {name: value.astype(jnp.float32) for name, value in rounded.items()}
    hidden = np.random.default_rng(1).standard_normal((1, LENGTH, config.width), np.float32)
    narrow = jnp.asarray(hidden).astype(jnp.bfloat16)
    expected = run_in_batch(config, structure, exact, narrow.astype(jnp.float32))
    for got in (
        run_in_batch(config, structure, rounded, narrow),
        run_in_pages(config, structure, rounded, narrow, (13,)),
    ):
        assert got.dtype == jnp.bfloat16
        error = np.abs(got.astype(np.float32) - expected)
        assert error.mean() < 0.01
        assert error.max() < 0.1


# --- What is seen


def test_chunk_of_eight_by_hand() -> None:
    seen = np.asarray(seen_in_batch(18, 8)).astype(int)
    rows = ["".join(map(str, row)) for row in seen]
    assert rows[0] == "100000000000000000"
    assert rows[6] == "111111100000000000"
    assert rows[7] == "111111110000000000"
    assert rows[8] == "000000001000000000"  # a block, not a sliding window
    assert rows[9] == "000000001100000000"
    assert rows[15] == "000000001111111100"
    assert rows[16] == "000000000000000010"
    assert rows[17] == "000000000000000011"
    whole = np.asarray(seen_in_batch(18, None))
    assert (whole == np.tril(np.ones((18, 18), bool))).all()


@pytest.mark.parametrize("kind", ["causal", "chunked"])
def test_a_token_reaches_those_that_see_it(kind: str) -> None:
    config = CONFIGS[kind]
    structure, params = build(config)
    hidden = np.random.default_rng(1).standard_normal((1, LENGTH, config.width), np.float32)
    other = hidden.copy()
    other[0, 9] += 1
    one, two = (run_in_batch(config, structure, params, jnp.asarray(x)) for x in (hidden, other))
    changed = [position for position in range(LENGTH) if (one != two)[0, position].any()]
    assert changed == list(range(9, 16 if kind == "chunked" else LENGTH))


# --- The expanded form alone


def expanded_reference(
    query: np.ndarray,
    latents: np.ndarray,
    up: np.ndarray,
    start: int,
    scale: float,
) -> np.ndarray:
    """Float64, a query and a head at a time: [T, N, value]."""
    plain = query.shape[-1] - (latents.shape[-1] - up.shape[-1])
    rank = up.shape[-1]
    out = np.zeros((*query.shape[:2], up.shape[1] - plain))
    for t, n in np.ndindex(*query.shape[:2]):
        seen = latents[: start + t + 1]
        keys = np.concatenate([seen[:, :rank] @ up[n, :plain].T, seen[:, rank:]], axis=1)
        scores = keys @ query[t, n] * scale
        weights = np.exp(scores - scores.max())
        out[t, n] = weights / weights.sum() @ (seen[:, :rank] @ up[n, plain:].T)
    return out


EXPANDED = jax.jit(functools.partial(expanded_latent_attention, scale=0.3))


def expanded_case(starts, lengths, chunk: int, columns: int, page: int = 16) -> dict:
    rng = np.random.default_rng(3)
    heads, plain, rotary, rank, value = 3, 6, 4, 10, 5
    tokens = np.add(starts, lengths)
    paged = build_paged(rng, np.dtype(np.float32), tokens, 1, rank + rotary, page, columns)
    query = rng.standard_normal((len(starts), chunk, heads, plain + rotary), np.float32)
    query[np.arange(chunk) >= np.asarray(lengths)[:, None]] = np.nan
    return {
        "query_RTNH": query,
        "latent_pages": paged["key_pages"],
        "up_NUC": rng.standard_normal((heads, plain + value, rank), np.float32),
        "page_table_RW": paged["page_table"],
        "starts_R": np.asarray(starts, np.int32),
        "lengths_R": np.asarray(lengths, np.int32),
    }


@pytest.mark.parametrize(
    ("starts", "lengths", "chunk", "columns"),
    [
        ((0,), (1,), 4, 1),
        ((0, 5, 16, 0), (16, 11, 1, 0), 16, 3),
        # Several blocks, a border inside a chunk, one on its edge, an empty row behind a start.
        ((250, 0, 256, 300), (20, 32, 32, 0), 32, 40),
        ((500, 511), (30, 1), 40, 34),
    ],
)
def test_expanded_form(starts, lengths, chunk, columns) -> None:
    case = expanded_case(starts, lengths, chunk, columns)
    got = np.asarray(EXPANDED(**case))
    assert got.dtype == np.float32
    for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        pages = case["latent_pages"][case["page_table_RW"][row]]
        latents = pages.reshape(-1, pages.shape[-1])[: start + length].astype(np.float64)
        want = expanded_reference(
            case["query_RTNH"][row, :length].astype(np.float64),
            latents,
            case["up_NUC"].astype(np.float64),
            start,
            0.3,
        )
        np.testing.assert_allclose(got[row, :length], want, atol=2e-5, rtol=2e-5)
        assert not got[row, length:].any()


def test_expanded_rows_are_independent() -> None:
    """Bit for bit: neither other rows nor columns of the table without tokens have a say."""
    case = expanded_case((250, 0, 300), (20, 32, 1), 32, 40)
    whole = np.asarray(EXPANDED(**case))
    for row in range(3):
        one = {
            name: value[row : row + 1] if name.endswith(("RTNH", "RW", "_R")) else value
            for name, value in case.items()
        }
        assert np.asarray(EXPANDED(**one)).tobytes() == whole[row].tobytes()
    # A narrower table of whole blocks.
    narrow = case | {"page_table_RW": case["page_table_RW"][:, :32]}
    assert np.asarray(EXPANDED(**narrow)).tobytes() == whole.tobytes()


def test_expansion_is_bounded() -> None:
    """The widest context costs no more memory at a time than one of a few blocks."""

    def temporary_bytes(columns: int) -> int:
        case = expanded_case((0,), (8,), 8, columns)
        analysis = EXPANDED.lower(**case).compile().memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes

    few, many = temporary_bytes(32), temporary_bytes(1024)
    one_token = 3 * (6 + 5) * 4
    assert many - few < 100 * one_token  # not (1024 - 32) * 16 of them
