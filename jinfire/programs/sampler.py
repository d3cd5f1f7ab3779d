"""Device sampler: one token per row from its logits, and log-probabilities for rows that ask."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

TOP_LOGPROBS = 20


class SamplingRows(NamedTuple):
    """Sampling parameters of a batch of rows, one entry a row.

    `temperature_B` 0 is greedy. `top_k_B` <= 0, `top_p_B` >= 1 and `min_p_B` <= 0 are off.
    `logprobs_B` is the number of alternatives wanted, -1 for no log-probabilities at all.
    `logprob_temperature_B` is what logits are divided by for the reported log-probabilities;
    1 (or 0) reports those of the raw logits.
    """

    temperature_B: jax.Array
    top_k_B: jax.Array
    top_p_B: jax.Array
    min_p_B: jax.Array
    seed_B: jax.Array
    logprobs_B: jax.Array
    logprob_temperature_B: jax.Array


class Sampled(NamedTuple):
    """Drawn tokens with the log-probability of each, and the likeliest 20 tokens.

    Without a row that wants log-probabilities, all three of them are zeros.
    """

    token_B: jax.Array
    logprob_B: jax.Array
    top_ids_BX: jax.Array
    top_logprobs_BX: jax.Array


def _ordered(x: jax.Array) -> jax.Array:
    """Unsigned integers in the order of the float32 values."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    sign = jnp.uint32(0x80000000)
    return jnp.where(bits >= sign, ~bits, bits | sign)


def _bisect(size_bits: int, B: int, holds) -> jax.Array:
    """Largest unsigned threshold per row for which `holds` is true (monotone, true at 0)."""

    def body(i, low_B):
        step = jnp.uint32(1) << (jnp.uint32(size_bits - 1) - i.astype(jnp.uint32))
        trial_B = low_B | step
        return jnp.where(holds(trial_B), trial_B, low_B)

    return jax.lax.fori_loop(0, size_bits, body, jnp.zeros((B,), jnp.uint32))


def _filter(logits_BV: jax.Array, rows: SamplingRows) -> jax.Array:
    """Boolean mask of the tokens that may be drawn, by top-k, then top-p, then min-p."""
    B, V = logits_BV.shape
    key_BV = _ordered(logits_BV)
    id_BV = jax.lax.broadcasted_iota(jnp.uint32, (B, V), 1)
    id_bits = max(1, (V - 1).bit_length())

    # Top-k: the k-th largest value, then the highest id among its ties that still fits.
    k_B = jnp.where(rows.top_k_B <= 0, V, jnp.minimum(rows.top_k_B, V))
    cut_B = _bisect(32, B, lambda t: jnp.sum(key_BV >= t[:, None], axis=1) >= k_B)
    spare_B = k_B - jnp.sum(key_BV > cut_B[:, None], axis=1)
    tie_BV = key_BV == cut_B[:, None]
    limit_B = _bisect(
        id_bits, B, lambda t: jnp.sum(tie_BV & (id_BV < t[:, None]), axis=1) < spare_B
    )
    keep_BV = (key_BV > cut_B[:, None]) | (tie_BV & (id_BV <= limit_B[:, None]))

    top_B1 = jnp.max(logits_BV, axis=1, keepdims=True)
    weight_BV = jnp.where(keep_BV, jnp.exp(logits_BV - top_B1), 0.0)

    # Top-p: the same over sums of probability.
    def nucleus(weight_BV):
        need_B = rows.top_p_B * jnp.sum(weight_BV, axis=1)
        cut_B = _bisect(
            32,
            B,
            lambda t: jnp.sum(jnp.where(key_BV >= t[:, None], weight_BV, 0.0), axis=1) >= need_B,
        )
        above_BV = key_BV > cut_B[:, None]
        tie_BV = (key_BV == cut_B[:, None]) & keep_BV
        sum_B = jnp.sum(jnp.where(above_BV, weight_BV, 0.0), axis=1)
        tie_weight_B = jnp.max(jnp.where(tie_BV, weight_BV, 0.0), axis=1)
        limit_B = _bisect(
            id_bits,
            B,
            lambda t: (
                sum_B
                + tie_weight_B * jnp.sum(tie_BV & (id_BV < t[:, None]), axis=1).astype(jnp.float32)
                < need_B
            ),
        )
        kept_BV = (above_BV & keep_BV) | (tie_BV & (id_BV <= limit_B[:, None]))
        return jnp.where((rows.top_p_B >= 1.0)[:, None], keep_BV, kept_BV)

    keep_BV = jax.lax.cond(jnp.any(rows.top_p_B < 1.0), nucleus, lambda w: keep_BV, weight_BV)
    keep_BV = keep_BV & (weight_BV >= rows.min_p_B[:, None])
    return keep_BV | (id_BV == jnp.argmax(logits_BV, axis=1).astype(jnp.uint32)[:, None])


def _gumbel(seed_B: jax.Array, positions_B: jax.Array, V: int) -> jax.Array:
    def one(seed, position):
        return jax.random.gumbel(jax.random.fold_in(jax.random.key(seed), position), (V,))

    return jax.vmap(one)(seed_B, positions_B)


def sample(logits_BV: jax.Array, positions_B: jax.Array, rows: SamplingRows) -> Sampled:
    """One token per row."""
    B, V = logits_BV.shape
    best_B = jnp.argmax(logits_BV, axis=1).astype(jnp.int32)
    greedy_B = (rows.temperature_B <= 0) | (rows.top_k_B == 1)

    def draw(_):
        scaled_BV = logits_BV / jnp.where(greedy_B, 1.0, rows.temperature_B)[:, None]
        keep_BV = _filter(scaled_BV, rows)
        noisy_BV = scaled_BV + _gumbel(rows.seed_B, positions_B, V)
        drawn_B = jnp.argmax(jnp.where(keep_BV, noisy_BV, -jnp.inf), axis=1).astype(jnp.int32)
        return jnp.where(greedy_B, best_B, drawn_B)

    token_B = jax.lax.cond(jnp.all(greedy_B), lambda _: best_B, draw, None)

    def logprobs(_):
        divisor_B = jnp.where(rows.logprob_temperature_B > 0, rows.logprob_temperature_B, 1.0)
        logprobs_BV = jax.nn.log_softmax(logits_BV / divisor_B[:, None], axis=1)
        top_BX, ids_BX = jax.lax.top_k(logprobs_BV, TOP_LOGPROBS)
        chosen_B = jnp.take_along_axis(logprobs_BV, token_B[:, None], axis=1)[:, 0]
        return chosen_B, ids_BX.astype(jnp.int32), top_BX

    def nothing(_):
        return (
            jnp.zeros((B,), jnp.float32),
            jnp.zeros((B, TOP_LOGPROBS), jnp.int32),
            jnp.zeros((B, TOP_LOGPROBS), jnp.float32),
        )

    return Sampled(token_B, *jax.lax.cond(jnp.any(rows.logprobs_B >= 0), logprobs, nothing, None))
