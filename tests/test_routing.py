"""Routers against an oracle that goes through one token at a time, and the load of experts."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jinfire.config import ExpertsConfig
from jinfire.layers.routing import check_router, expert_load, imbalance, route

SIGMOID = ExpertsConfig(8, 3, 32, router="sigmoid", groups=4, groups_per_token=2)
SOFTMAX = ExpertsConfig(8, 3, 32)
SCALED_INPUT = ExpertsConfig(8, 1, 32, router="scaled_input")

jitted_route = jax.jit(route, static_argnums=2)


def best(scores: list[float], count: int) -> list[int]:
    """Indices of the highest scores, the first of equal ones first."""
    return sorted(range(len(scores)), key=lambda index: (-scores[index], index))[:count]


def oracle_token(
    logits: np.ndarray, bias: np.ndarray | None, config: ExpertsConfig
) -> tuple[list[int], list[float]]:
    wide = logits.astype(np.float64)
    sigmoids = 1 / (1 + np.exp(-wide))
    if config.router == "scaled_input":
        ids = best(list(wide), config.per_token)
        return ids, [sigmoids[e] for e in ids]
    if config.router == "softmax":
        scores = np.exp(wide - wide.max())
        scores /= scores.sum()
        ids = best(list(scores), config.per_token)
    else:
        scores = sigmoids
        biased = scores + (0 if bias is None else bias.astype(np.float64))
        size = config.count // config.groups
        members = [range(g * size, (g + 1) * size) for g in range(config.groups)]
        worth = [sum(sorted((biased[e] for e in own), reverse=True)[:2]) for own in members]
        allowed = {e for g in best(worth, config.groups_per_token) for e in members[g]}
        ids = [e for e in best(list(biased), config.count) if e in allowed][: config.per_token]
    weights = np.asarray([scores[e] for e in ids])
    if config.normalise:
        weights = weights / weights.sum()
    return ids, list(weights * config.scaling)


def routed(
    logits: np.ndarray, bias: np.ndarray | None, config: ExpertsConfig
) -> tuple[np.ndarray, np.ndarray]:
    bias_E = None if bias is None else jnp.asarray(bias, jnp.float32)
    ids, weights = jitted_route(jnp.asarray(logits, jnp.float32), bias_E, config)
    assert ids.dtype == jnp.int32
    assert weights.dtype == jnp.float32
    return np.asarray(ids), np.asarray(weights)


def compare(logits: np.ndarray, bias: np.ndarray | None, config: ExpertsConfig) -> None:
    check_router(config)
    ids, weights = routed(logits, bias, config)
    for token, row in enumerate(logits):
        want_ids, want_weights = oracle_token(row, bias, config)
        assert ids[token].tolist() == want_ids
        np.testing.assert_allclose(weights[token], want_weights, rtol=3e-6)


def random_logits(tokens: int = 200, count: int = 8) -> np.ndarray:
    return (2 * np.random.default_rng(0).standard_normal((tokens, count))).astype(np.float32)


@pytest.mark.parametrize("scaling", [1.0, 2.5])
@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("base", [SIGMOID, SOFTMAX], ids=lambda config: config.router)
def test_normalising_and_scaling_are_independent(base, normalise, scaling):
    config = dataclasses.replace(base, normalise=normalise, scaling=scaling)
    bias = np.linspace(-0.3, 0.3, 8).astype(np.float32) if base is SIGMOID else None
    compare(random_logits(), bias, config)
    if normalise:
        _, weights = routed(random_logits(), bias, config)
        np.testing.assert_allclose(weights.sum(axis=1), scaling, rtol=1e-6)


@pytest.mark.parametrize("per_token", [1, 2])
def test_scaled_input(per_token):
    compare(random_logits(), None, dataclasses.replace(SCALED_INPUT, per_token=per_token))


@pytest.mark.parametrize(("groups", "kept"), [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 3)])
def test_groups(groups, kept):
    config = dataclasses.replace(SIGMOID, per_token=2, groups=groups, groups_per_token=kept)
    compare(random_logits(), np.linspace(0.2, -0.2, 8).astype(np.float32), config)


@pytest.mark.parametrize("bias", [-2.0, -1.0, 0.0, 1.0])
def test_a_dropped_group_never_wins(bias):
    """Also where every biased score is negative, and a group of zeros would beat them all."""
    config = dataclasses.replace(SIGMOID, per_token=4)
    logits = random_logits()
    biases = np.full(8, bias, np.float32)
    compare(logits, biases, config)
    ids, _ = routed(logits, biases, config)
    assert all(len({e // 2 for e in row}) == 2 for row in ids.tolist())


def test_a_group_counts_as_its_best_two():
    """Group 0 has the best expert, group 1 the best pair."""
    config = dataclasses.replace(SIGMOID, per_token=2, groups=2, groups_per_token=1)
    logits = np.asarray([[5, -5, -5, -5, 1, 1, -5, -5]], np.float32)
    ids, _ = routed(logits, np.zeros(8, np.float32), config)
    assert ids.tolist() == [[4, 5]]


def test_a_group_without_hope_is_empty():
    bias = np.asarray([0, 0, -np.inf, -np.inf, 0, 0, 0, 0], np.float32)
    logits = random_logits()
    logits[:, 2:4] = 30
    compare(logits, bias, SIGMOID)
    ids, weights = routed(logits, bias, SIGMOID)
    assert not np.isin(ids, [2, 3]).any()
    assert np.isfinite(weights).all()


def test_the_bias_selects_and_does_not_weigh():
    """A bias that swallows all digits of the scores leaves the weights their digits."""
    config = dataclasses.replace(SIGMOID, groups=1, groups_per_token=1)
    bias = np.zeros(8, np.float32)
    bias[[1, 4, 6]] = 1e9
    logits = random_logits()
    ids, weights = routed(logits, bias, config)
    assert (np.sort(ids, axis=1) == [1, 4, 6]).all()
    chosen = np.take_along_axis(logits.astype(np.float64), ids, axis=1)
    np.testing.assert_allclose(weights, 1 / (1 + np.exp(-chosen)), rtol=1e-6)


@pytest.mark.parametrize("config", [SIGMOID, SOFTMAX, SCALED_INPUT], ids=lambda c: c.router)
def test_among_equals_the_lowest_id_wins(config):
    logits = np.zeros((3, 8), np.float32)
    logits[1, 3] = logits[1, 6] = 2  # a tie at the top
    logits[2, :] = [1, 1, 0, 0, 2, 2, 1, 1]  # ties of experts, and of groups 0 and 3
    compare(logits, None, config)
    ids, _ = routed(logits, None, config)
    assert ids[0].tolist() == list(range(config.per_token))


def test_normalised_weights_of_no_score_are_finite():
    config = dataclasses.replace(SIGMOID, normalise=True)
    _, weights = routed(np.full((2, 8), -200, np.float32), None, config)
    assert np.isfinite(weights).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"router": "random"}, r"expected one of \['scaled_input', 'sigmoid', 'softmax'\]"),
        ({"per_token": 9}, "expected 1 to 8, got 9"),
        ({"per_token": 0}, "expected 1 to 8, got 0"),
        ({"router": "softmax"}, "expected one group of experts, got 4"),
        ({"groups": 3}, "groups of equal size, at least 2, got 3 groups"),
        ({"groups": 8}, "groups of equal size, at least 2, got 8 groups"),
        ({"groups_per_token": 5}, "expected 1 to 4, got 5"),
        ({"groups_per_token": 1}, "expected at most 2, those in 1 groups of 2, got 3"),
    ],
)
def test_router_refuses(changes, message):
    with pytest.raises(ValueError, match=message):
        check_router(dataclasses.replace(SIGMOID, **changes))


@pytest.mark.parametrize("changes", [{"normalise": True}, {"scaling": 2.0}])
def test_scaled_input_refuses_other_weights(changes):
    with pytest.raises(ValueError, match="expected weights as they are"):
        check_router(dataclasses.replace(SCALED_INPUT, **changes))


def test_load_counts_valid_tokens():
    ids = jnp.asarray([[0, 2], [2, 3], [1, 2], [2, 0]], jnp.int32)
    valid = jnp.asarray([True, True, False, True])
    load = expert_load(ids, 5, valid)
    assert load.dtype == jnp.int32
    assert load.tolist() == [2, 0, 3, 1, 0]
    assert float(imbalance(load)) == pytest.approx(3 / (6 / 5))
    assert np.isnan(imbalance(expert_load(ids, 5, jnp.zeros(4, bool))))
