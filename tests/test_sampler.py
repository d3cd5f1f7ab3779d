"""The device sampler against exact probabilities and a NumPy oracle of its truncation order."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jinfire.programs.sampler import TOP_LOGPROBS, SamplingRows, sample

draw = jax.jit(sample)


def make_rows(batch: int, **changes: object) -> SamplingRows:
    values = {
        "temperature_B": 1.0,
        "top_k_B": 0,
        "top_p_B": 1.0,
        "min_p_B": 0.0,
        "seed_B": np.arange(batch),
        "logprobs_B": -1,
        "logprob_temperature_B": 1.0,
    }
    dtypes = {"top_k_B": np.int32, "logprobs_B": np.int32, "seed_B": np.uint32}
    for name, value in changes.items():
        values[f"{name}_B"] = value
    return SamplingRows(
        **{
            name: np.broadcast_to(np.asarray(value, dtypes.get(name, np.float32)), (batch,))
            for name, value in values.items()
        }
    )


def drawn_many(logits: np.ndarray, draws: int = 8192, **changes: object) -> np.ndarray:
    """Counts of each token over many draws of one row's logits, 64 seeds at a time."""
    batch = 64
    logits_BV = np.broadcast_to(np.asarray(logits, np.float32), (batch, len(logits)))
    rows = make_rows(batch, **changes)
    counts = np.zeros(len(logits), np.int64)
    for start in range(0, draws, batch):
        positions = np.full(batch, start, np.int32)
        tokens = np.asarray(draw(logits_BV, positions, rows).token_B)
        counts += np.bincount(tokens, minlength=len(logits))
    return counts


def oracle(
    logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float
) -> np.ndarray:
    """Exact probabilities in float64, with a sort."""
    order = np.lexsort((np.arange(len(logits)), -logits))
    scaled = (logits.astype(np.float64) - logits.max()) / temperature
    weights = np.exp(scaled[order])
    if top_k > 0:
        weights[top_k:] = 0
    if top_p < 1:
        reached = np.cumsum(weights) >= top_p * weights.sum() * (1 - 1e-9)
        weights[np.argmax(reached) + 1 :] = 0
    weights[weights < min_p * weights[0]] = 0
    out = np.zeros(len(logits))
    out[order] = weights / weights.sum()
    return out


def assert_distributed(counts: np.ndarray, probabilities: np.ndarray) -> None:
    """Chi-square at about five standard deviations, and nothing outside the support."""
    assert not counts[probabilities == 0].any()
    expected = probabilities * counts.sum()
    large = expected >= 5
    freedom = int(large.sum())
    chi_square = ((counts - expected)[large] ** 2 / expected[large]).sum()
    assert chi_square < freedom + 5 * np.sqrt(2 * freedom)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (1.0, 0, 1.0, 0.0),
        (0.6, 0, 1.0, 0.0),
        (1.7, 7, 1.0, 0.0),
        (1.0, 0, 0.8, 0.0),
        (1.0, 0, 1.0, 0.2),
        (1.3, 12, 0.9, 0.0),
        (1.3, 12, 0.9, 0.15),
    ],
)
def test_distribution(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    logits = np.random.default_rng(1).normal(size=40).astype(np.float32) * 2
    logits[5] = logits[9] = logits[20]
    params = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    assert_distributed(drawn_many(logits, **params), oracle(logits, **params))


def test_support_equals_the_oracle_with_many_ties() -> None:
    """Rounded logits tie in heaps: the kept set is still exactly the oracle's."""
    rng = np.random.default_rng(3)
    for top_k, top_p in [(5, 1.0), (0, 0.5), (9, 0.7), (1, 0.3), (16, 1.0), (40, 1.0)]:
        logits = rng.integers(-1, 3, size=16).astype(np.float32)
        params = {"temperature": 2.0, "top_k": top_k, "top_p": top_p, "min_p": 0.0}
        counts = drawn_many(logits, 4096, **params)
        np.testing.assert_array_equal(counts > 0, oracle(logits, **params) > 0)


@pytest.mark.parametrize("vocabulary", [1, 2, 7, 1000, 49152])
def test_top_k_1_is_greedy(vocabulary: int) -> None:
    logits = np.random.default_rng(0).normal(size=(4, vocabulary)).astype(np.float32)
    logits[1, vocabulary // 2 :] = logits[1].max()
    logits[2] = 0.0
    positions = np.arange(4, dtype=np.int32)
    want = logits.argmax(axis=1)
    for changes in ({"temperature": 0.0}, {"top_k": 1}, {"temperature": 0.0, "top_k": 5}):
        got = np.asarray(draw(logits, positions, make_rows(4, **changes)).token_B)
        np.testing.assert_array_equal(got, want)
    # The same where the draw runs for a neighbour's sake.
    mixed = make_rows(4, top_k=[1, 1, 1, 0], temperature=[1.0, 0.5, 0.0, 1.0])
    np.testing.assert_array_equal(np.asarray(draw(logits, positions, mixed).token_B)[:3], want[:3])


def test_top_k_2_of_a_large_vocabulary() -> None:
    logits = np.random.default_rng(0).normal(size=(64, 49152)).astype(np.float32)
    best = np.argsort(-logits, axis=1)[:, :2]
    seen = set()
    for position in range(4):
        got = np.asarray(draw(logits, np.full(64, position, np.int32), make_rows(64, top_k=2))[0])
        which = np.argmax(best == got[:, None], axis=1)
        assert (best[np.arange(64), which] == got).all()
        seen |= set(which.tolist())
    assert seen == {0, 1}


def test_top_p_at_the_exact_boundary() -> None:
    """Probabilities 1/2, 1/4, 1/8, 1/8: the smallest set whose sum is at least p."""
    logits = np.log(np.asarray([0.125, 0.5, 0.25, 0.125])).astype(np.float32)
    logits = np.asarray([-2, 0, -1, -2], np.float32) * np.float32(np.log(2))
    for top_p, support in [
        (0.5, [1]),
        (0.500001, [1, 2]),
        (0.75, [1, 2]),
        (0.751, [0, 1, 2]),
        (0.875, [0, 1, 2]),
        (0.876, [0, 1, 2, 3]),
    ]:
        counts = drawn_many(logits, 2048, top_p=top_p)
        assert np.flatnonzero(counts).tolist() == support, top_p


def test_tiny_top_p_keeps_the_best_token() -> None:
    logits = np.asarray([0.0, 3.0, 3.0, 1.0], np.float32)
    for top_p in (1e-30, 1e-9, 0.0):
        assert np.flatnonzero(drawn_many(logits, 64, top_p=top_p)).tolist() == [1]


def test_min_p_is_relative_to_the_best() -> None:
    logits = np.log(np.asarray([0.4, 0.3, 0.2, 0.1])).astype(np.float32)
    assert np.flatnonzero(drawn_many(logits, 2048, min_p=0.45)).tolist() == [0, 1, 2]
    assert np.flatnonzero(drawn_many(logits, 64, min_p=1.0)).tolist() == [0]


def test_padded_vocabulary_is_never_drawn() -> None:
    logits = np.full(70, -np.inf, np.float32)
    logits[:5] = 0.0
    for changes in ({}, {"top_k": 30}, {"top_p": 0.999}, {"temperature": 100.0}):
        counts = drawn_many(logits, 1024, **changes)
        assert counts[5:].sum() == 0
        assert (counts[:5] > 0).all()


def test_extreme_temperatures() -> None:
    logits = np.asarray([300.0, 299.0, -300.0], np.float32)
    for temperature in (1e-6, 1e-30, 1e-42):
        counts = drawn_many(logits, 64, temperature=temperature)
        assert np.flatnonzero(counts).tolist() == [0]
    assert_distributed(drawn_many(logits, temperature=1e9), np.full(3, 1 / 3))


def test_row_depends_on_itself_only() -> None:
    """Bit-exact whatever the neighbours ask for, in any order, with padding rows."""
    rng = np.random.default_rng(0)
    B, V = 8, 3000
    logits = rng.normal(size=(B, V)).astype(np.float32) * 3
    positions = rng.integers(0, 900, size=B).astype(np.int32)
    rows = make_rows(
        B,
        temperature=[0.0, 1.0, 0.7, 1.0, 1.0, 1.5, 1.0, 2.0],
        top_k=[0, 0, 40, 0, 0, 100, 1, 0],
        top_p=[1.0, 1.0, 1.0, 0.9, 1.0, 0.8, 0.5, 1.0],
        min_p=[0.0, 0.0, 0.0, 0.0, 0.05, 0.01, 0.0, 0.0],
        logprobs=[-1, 0, 5, -1, 20, -1, 3, -1],
        seed=[5, 6, 7, 8, 9, 10, 11, 2**32 - 1],
    )
    whole = draw(logits, positions, rows)
    order = rng.permutation(B)
    turned = draw(logits[order], positions[order], SamplingRows(*(x[order] for x in rows)))
    for got, want in zip(turned, whole, strict=True):
        np.testing.assert_array_equal(np.asarray(got), np.asarray(want)[order])
    for row in range(B):
        # Among greedy rows whose logits are padding.
        other = make_rows(B, temperature=0.0)
        mixed = SamplingRows(
            *(np.where(np.arange(B) == row, mine, o) for mine, o in zip(rows, other, strict=True))
        )
        padded = np.where((np.arange(B) == row)[:, None], logits, 0)
        got = draw(padded, np.where(np.arange(B) == row, positions, 0), mixed)
        assert int(got.token_B[row]) == int(whole.token_B[row])
        if rows.logprobs_B[row] >= 0:
            assert float(got.logprob_B[row]) == float(whole.logprob_B[row])


def test_seed_and_position_are_the_whole_key() -> None:
    logits = np.zeros((64, 500), np.float32)
    rows = make_rows(64, seed=3)
    same = np.asarray(draw(logits, np.full(64, 9, np.int32), rows).token_B)
    assert len(set(same.tolist())) == 1
    by_position = np.asarray(draw(logits, np.arange(64, dtype=np.int32), rows).token_B)
    by_seed = np.asarray(draw(logits, np.full(64, 9, np.int32), make_rows(64)).token_B)
    assert len(set(by_position.tolist())) > 50
    assert len(set(by_seed.tolist())) > 50
    assert by_position[9] == by_seed[3] == same[0]


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_logprobs(temperature: float) -> None:
    logits = np.random.default_rng(2).normal(size=(3, 100)).astype(np.float32) * 4
    rows = make_rows(
        3, temperature=0.5, top_k=10, logprobs=[20, -1, 0], logprob_temperature=temperature
    )
    got = draw(logits, np.arange(3, dtype=np.int32), rows)
    scaled = logits.astype(np.float64) / temperature
    want = scaled - np.log(np.exp(scaled).sum(axis=1, keepdims=True))
    tokens = np.asarray(got.token_B)
    np.testing.assert_allclose(
        np.asarray(got.logprob_B), want[np.arange(3), tokens], rtol=0, atol=1e-5
    )
    ids = np.asarray(got.top_ids_BX)
    assert ids.shape == (3, TOP_LOGPROBS)
    np.testing.assert_array_equal(ids, np.argsort(-logits, axis=1)[:, :TOP_LOGPROBS])
    np.testing.assert_allclose(
        np.asarray(got.top_logprobs_BX), np.take_along_axis(want, ids, 1), rtol=0, atol=1e-5
    )


def test_no_logprobs_wanted_are_zeros() -> None:
    got = draw(np.ones((2, 50), np.float32), np.zeros(2, np.int32), make_rows(2))
    assert not np.asarray(got.top_logprobs_BX).any()
    assert not np.asarray(got.logprob_B).any()


def test_logprobs_of_a_vocabulary_below_20() -> None:
    logits = np.asarray([[0.0, 2.0, 1.0]], np.float32)
    got = draw(logits, np.zeros(1, np.int32), make_rows(1, logprobs=20))
    assert np.asarray(got.top_ids_BX)[0, :3].tolist() == [1, 2, 0]
    assert np.isneginf(np.asarray(got.top_logprobs_BX)[0, 3:]).all()


@pytest.mark.parametrize("bad", [np.nan, -np.inf, np.inf])
def test_broken_logits_end_with_an_id_in_range(bad: float) -> None:
    logits = np.random.default_rng(0).normal(size=(4, 200)).astype(np.float32)
    logits[1, 3] = bad
    logits[2, :] = bad
    rows = make_rows(4, top_k=[5, 5, 5, 0], top_p=0.9, min_p=0.1, logprobs=1)
    got = np.asarray(draw(logits, np.zeros(4, np.int32), rows).token_B)
    assert ((got >= 0) & (got < 200)).all()
    clean = np.where(np.isfinite(logits), logits, 0)
    want = np.asarray(draw(clean, np.zeros(4, np.int32), rows).token_B)
    assert got[0] == want[0]
    assert got[3] == want[3]


def test_both_zeros_tie() -> None:
    logits = np.asarray([-1.0, -0.0, 0.0, -0.0], np.float32)
    assert np.flatnonzero(drawn_many(logits, 512, top_k=2)).tolist() == [1, 2]


def test_compiles_without_a_sort_or_a_host_callback() -> None:
    lowered = draw.lower(
        jnp.zeros((8, 4096)), jnp.zeros(8, jnp.int32), make_rows(8, top_k=4, top_p=0.5)
    )
    text = lowered.as_text()
    assert "stablehlo.sort" not in text
    assert "callback" not in text
