"""Which experts a token takes and how much each counts, from router logits.

All of it is float32, and among equal scores the lowest expert id wins, so a token's choice is a
function of its own logits.
"""

import functools

import jax
import jax.numpy as jnp

from jinfire.config import ExpertsConfig


def check_router(config: ExpertsConfig) -> None:
    """Check that a router of this kind can choose as many experts as it should.

    Raises: ValueError with what was expected and what came.
    """
    if config.router not in ROUTERS:
        raise ValueError(f"router: expected one of {sorted(ROUTERS)}, got {config.router!r}")
    if not 1 <= config.per_token <= config.count:
        raise ValueError(
            f"experts of a token: expected 1 to {config.count}, got {config.per_token}"
        )
    if config.router != "sigmoid" and (config.groups, config.groups_per_token) != (1, 1):
        raise ValueError(
            f"router {config.router!r}: expected one group of experts, got {config.groups}"
        )
    if config.router == "scaled_input" and (config.normalise or config.scaling != 1):
        raise ValueError(
            "router 'scaled_input': expected weights as they are, got "
            f"normalise={config.normalise}, scaling={config.scaling}"
        )
    if config.groups == 1:
        return
    size, rest = divmod(config.count, config.groups)
    if rest or size < 2:
        raise ValueError(
            f"{config.count} experts: expected groups of equal size, at least 2, "
            f"got {config.groups} groups"
        )
    if not 1 <= config.groups_per_token <= config.groups:
        raise ValueError(
            f"groups of a token: expected 1 to {config.groups}, got {config.groups_per_token}"
        )
    if config.per_token > size * config.groups_per_token:
        raise ValueError(
            f"experts of a token: expected at most {size * config.groups_per_token}, those in "
            f"{config.groups_per_token} groups of {size}, got {config.per_token}"
        )


def route(
    logits_TE: jax.Array, bias_E: jax.Array | None, config: ExpertsConfig
) -> tuple[jax.Array, jax.Array]:
    """Expert ids, best first, and their weights, as `config.router` has it.

    Shapes: logits float32 [T, E], bias float32 [E] or None; int32 [T, X] and float32 [T, X].
    """
    return ROUTERS[config.router](logits_TE, bias_E, config)


def softmax_route(
    logits_TE: jax.Array, bias_E: jax.Array | None, config: ExpertsConfig
) -> tuple[jax.Array, jax.Array]:
    """The most probable experts with their probabilities.

    Source: transformers `Qwen3MoeTopKRouter`, `MixtralTopKRouter`.
    """
    weights_TX, ids_TX = jax.lax.top_k(jax.nn.softmax(logits_TE, axis=-1), config.per_token)
    if config.normalise:
        weights_TX = weights_TX / _sum(weights_TX)
    return ids_TX, weights_TX * config.scaling


def sigmoid_route(
    logits_TE: jax.Array, bias_E: jax.Array | None, config: ExpertsConfig
) -> tuple[jax.Array, jax.Array]:
    """The best experts of the best groups by biased score, weighted by the score alone.

    Source: DeepSeek-V3 (arXiv 2412.19437) section 2.1.2; transformers `DeepseekV3MoE`.
    """
    scores_TE = jax.nn.sigmoid(logits_TE)
    biased_TE = scores_TE if bias_E is None else scores_TE + bias_E[None]
    _, ids_TX = jax.lax.top_k(_in_best_groups(biased_TE, config), config.per_token)
    # Gathered, not recovered from the biased ones: a large bias would cancel the score's digits.
    weights_TX = jnp.take_along_axis(scores_TE, ids_TX, axis=1)
    if config.normalise:
        weights_TX = weights_TX / (_sum(weights_TX) + 1e-20)
    return ids_TX, weights_TX * config.scaling


def scaled_input_route(
    logits_TE: jax.Array, bias_E: jax.Array | None, config: ExpertsConfig
) -> tuple[jax.Array, jax.Array]:
    """The experts of the highest logits, with the sigmoids that scale their input.

    Source: transformers `Llama4Router`.
    """
    chosen_TX, ids_TX = jax.lax.top_k(logits_TE, config.per_token)
    return ids_TX, jax.nn.sigmoid(chosen_TX)


ROUTERS = {
    "softmax": softmax_route,
    "sigmoid": sigmoid_route,
    "scaled_input": scaled_input_route,
}


def _in_best_groups(biased_TE: jax.Array, config: ExpertsConfig) -> jax.Array:
    """Scores with -inf outside the best groups; a group counts as much as its best two."""
    if config.groups == config.groups_per_token:
        return biased_TE
    biased_TGE = biased_TE.reshape(biased_TE.shape[0], config.groups, -1)
    best_TG2, _ = jax.lax.top_k(biased_TGE, 2)
    _, kept_TX = jax.lax.top_k(best_TG2[..., 0] + best_TG2[..., 1], config.groups_per_token)
    groups = jnp.arange(config.groups, dtype=kept_TX.dtype)[None, None]
    kept_TG = jnp.any(kept_TX[:, :, None] == groups, axis=1)
    # Not zero, which beats every expert of the kept groups where biases are negative.
    return jnp.where(kept_TG[:, :, None], biased_TGE, -jnp.inf).reshape(biased_TE.shape)


def _sum(weights_TX: jax.Array) -> jax.Array:
    """Sums [T, 1], from the best expert on."""
    columns = jnp.split(weights_TX, weights_TX.shape[1], axis=1)
    return functools.reduce(jnp.add, columns)


def expert_load(ids_TX: jax.Array, count: int, valid_T: jax.Array) -> jax.Array:
    """Tokens that each expert has, int32 [count], among the valid tokens."""
    experts = jnp.arange(count, dtype=ids_TX.dtype)[None, None]
    taken = (ids_TX[:, :, None] == experts) & valid_T[:, None, None]
    return jnp.sum(taken, axis=(0, 1), dtype=jnp.int32)


def imbalance(load_E: jax.Array) -> jax.Array:
    """The largest load over the mean, float32: 1 is balanced. NaN without tokens."""
    load_E = load_E.astype(jnp.float32)
    return jnp.max(load_E) / jnp.mean(load_E)
