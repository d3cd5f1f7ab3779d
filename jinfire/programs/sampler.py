"""Device sampler: one token per row from its logits, and log-probabilities for rows that ask.

The order is fixed: temperature, then top-k, then top-p, then min-p, each over what the one before
left. Ranks are by descending logit, ties by ascending token id, so top-k keeps exactly k tokens and
top-p exactly the shortest sequence whose probability reaches p; the best token is always kept. The
draw is Gumbel-max under the key fold_in(key(seed), position): a row's token depends on its own
logits, parameters and position only, and rounding in the logits can change it only where two
tokens are nearly tied.

Nothing sorts the vocabulary: cuts are found by bisection over the integer image of float32.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

TOP_LOGPROBS = 20

# A `jax.Array` on devices and inside programs, an `np.ndarray` where the host fills one in.
Array = Any


class SamplingRows(NamedTuple):
    """Sampling parameters of a batch of rows.

    `temperature_B` 0 is greedy, and so is `top_k_B` 1. `top_k_B` <= 0, `top_p_B` >= 1 and
    `min_p_B` <= 0 are off; min_p is relative to the largest probability. `logprobs_B` is the
    number of alternatives wanted, -1 for no log-probabilities. `logprob_temperature_B` divides the
    logits before the reported log-probabilities (which are those before any truncation); 1 reports
    the raw ones.

    Shapes: each [B]; float32, except top_k and logprobs int32, seed uint32.
    """

    temperature_B: Array
    top_k_B: Array
    top_p_B: Array
    min_p_B: Array
    seed_B: Array
    logprobs_B: Array
    logprob_temperature_B: Array


class Sampled(NamedTuple):
    """Drawn tokens, the log-probability of each, and the likeliest tokens with theirs.

    Log-probabilities mean something only for rows that asked; in a batch without one they are 0.

    Shapes: token [B] int32, logprob [B], top_ids [B, 20] int32, top_logprobs [B, 20], descending.
    """

    token_B: Array
    logprob_B: Array
    top_ids_BX: Array
    top_logprobs_BX: Array


def _ids(shape: tuple[int, ...]) -> jax.Array:
    return jax.lax.broadcasted_iota(jnp.int32, shape, 1)


def _first_max(x_BV: jax.Array) -> jax.Array:
    """Lowest index of the largest value; an index in range even for NaN.

    Two plain reductions: XLA's own argmax takes ten times as long on CPU.
    """
    V = x_BV.shape[1]
    top_B1 = jnp.max(x_BV, axis=1, keepdims=True)
    return jnp.min(jnp.where(x_BV == top_B1, _ids(x_BV.shape), V - 1), axis=1)


def _rank_image(x: jax.Array) -> jax.Array:
    """Unsigned integers in the order of the float32 values; both zeros are one value."""
    bits = jax.lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.uint32)
    sign = jnp.uint32(1 << 31)
    return jnp.where(bits >= sign, ~bits, bits | sign)


def _largest(bits: int, rows: int, holds: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Largest integer of so many bits per row for which `holds`: true at 0, then false for good."""

    def body(i: jax.Array, low_B: jax.Array) -> jax.Array:
        trial_B = low_B | (jnp.uint32(1) << (bits - 1 - i).astype(jnp.uint32))
        return jnp.where(holds(trial_B), trial_B, low_B)

    return jax.lax.fori_loop(0, bits, body, jnp.zeros((rows,), jnp.uint32))


def _lowest_ids(tie_BV: jax.Array, spare_B: jax.Array) -> jax.Array:
    """The first `spare` tokens of each row's ties (at least one), by ascending id."""
    B, V = tie_BV.shape
    id_BV = _ids(tie_BV.shape).astype(jnp.uint32)

    def holds(limit_B: jax.Array) -> jax.Array:
        return jnp.sum(tie_BV & (id_BV < limit_B[:, None]), axis=1) < spare_B

    limit_B = _largest(max(1, (V - 1).bit_length()), B, holds)
    return tie_BV & (id_BV <= limit_B[:, None])


def _top_k(rank_BV: jax.Array, top_k_B: jax.Array) -> jax.Array:
    B, V = rank_BV.shape
    k_B = jnp.where(top_k_B <= 0, V, jnp.minimum(top_k_B, V))
    # Counts in float32 are exact here and summed faster than integers.
    count_B = k_B.astype(jnp.float32)
    cut_B = _largest(
        32, B, lambda t: jnp.sum((rank_BV >= t[:, None]).astype(jnp.float32), axis=1) >= count_B
    )
    at_least_BV = rank_BV >= cut_B[:, None]
    above_BV = rank_BV > cut_B[:, None]
    spare_B = k_B - jnp.sum(above_BV, axis=1)
    return jax.lax.cond(
        jnp.any(jnp.sum(at_least_BV, axis=1) != k_B),
        lambda: above_BV | _lowest_ids(at_least_BV & ~above_BV, spare_B),
        lambda: at_least_BV,
    )


def _top_p(
    rank_BV: jax.Array, keep_BV: jax.Array, weight_BV: jax.Array, top_p_B: jax.Array
) -> jax.Array:
    """The shortest sequence of kept tokens by rank whose weight reaches top_p of all of it."""

    def weight_from(t_B: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(rank_BV >= t_B[:, None], weight_BV, 0.0), axis=1)

    need_B = top_p_B * jnp.sum(weight_BV, axis=1)
    cut_B = _largest(32, rank_BV.shape[0], lambda t: weight_from(t) >= need_B)
    at_least_BV = keep_BV & (rank_BV >= cut_B[:, None])
    above_BV = keep_BV & (rank_BV > cut_B[:, None])
    tie_BV = at_least_BV & ~above_BV
    above_B = jnp.sum(jnp.where(above_BV, weight_BV, 0.0), axis=1)
    each_B = jnp.max(jnp.where(tie_BV, weight_BV, 0.0), axis=1)
    missing_B = jnp.ceil((need_B - above_B) / jnp.where(each_B > 0, each_B, 1.0))
    spare_B = jnp.maximum(missing_B, 1.0).astype(jnp.int32)
    nucleus_BV = jax.lax.cond(
        jnp.any(jnp.sum(tie_BV, axis=1) > 1),
        lambda: above_BV | _lowest_ids(tie_BV, spare_B),
        lambda: at_least_BV,
    )
    return jnp.where((top_p_B >= 1.0)[:, None], keep_BV, nucleus_BV)


def _draw(logits_BV: jax.Array, positions_B: jax.Array, rows: SamplingRows) -> jax.Array:
    B, V = logits_BV.shape
    # A denormal temperature may count as zero, and 0 / 0 is NaN.
    temperature_B = jnp.maximum(rows.temperature_B, 1e-30)
    # Relative to the best logit: nothing overflows, however small the temperature.
    top_B1 = jnp.max(logits_BV, axis=1, keepdims=True)
    scaled_BV = (logits_BV - top_B1) / temperature_B[:, None]
    # The temperature keeps the order, so ranks are those of the logits as given.
    rank_BV = _rank_image(logits_BV)
    keep_BV = jax.lax.cond(
        jnp.any(rows.top_k_B > 0),
        lambda: _top_k(rank_BV, rows.top_k_B),
        lambda: jnp.ones((B, V), bool),
    )
    weight_BV = jnp.where(keep_BV, jnp.exp(scaled_BV), 0.0)
    keep_BV = jax.lax.cond(
        jnp.any(rows.top_p_B < 1.0),
        lambda: _top_p(rank_BV, keep_BV, weight_BV, rows.top_p_B),
        lambda: keep_BV,
    )
    keep_BV = keep_BV & (weight_BV >= rows.min_p_B[:, None])
    keep_BV = keep_BV | (_ids((B, V)) == _first_max(logits_BV)[:, None])

    def uniform(seed: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(seed), position)
        bits_V = jax.random.bits(key, (V,), jnp.uint32)
        # The midpoints of 2^23 cells: never 0 or 1.
        return ((bits_V >> 9).astype(jnp.float32) + 0.5) * jnp.float32(2**-23)

    gumbel_BV = -jnp.log(-jnp.log(jax.vmap(uniform)(rows.seed_B, positions_B)))
    return _first_max(jnp.where(keep_BV, scaled_BV + gumbel_BV, -jnp.inf))


def _logprobs(
    logits_BV: jax.Array, token_B: jax.Array, temperature_B: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    divisor_B = jnp.where(temperature_B > 0, temperature_B, 1.0)
    top_B1 = jnp.max(logits_BV, axis=1, keepdims=True)
    logprob_BV = jax.nn.log_softmax((logits_BV - top_B1) / divisor_B[:, None], axis=1)
    top_BX, ids_BX = jax.lax.top_k(logprob_BV, min(TOP_LOGPROBS, logits_BV.shape[1]))
    missing = TOP_LOGPROBS - top_BX.shape[1]
    return (
        jnp.take_along_axis(logprob_BV, token_B[:, None], axis=1)[:, 0],
        jnp.pad(ids_BX.astype(jnp.int32), ((0, 0), (0, missing))),
        jnp.pad(top_BX, ((0, 0), (0, missing)), constant_values=-jnp.inf),
    )


def sample(logits_BV: jax.Array, positions_B: jax.Array, rows: SamplingRows) -> Sampled:
    """One token per row, for the position that the token will take.

    Columns of a padded vocabulary hold -inf and are never drawn while a finite logit exists. A
    batch of greedy rows pays for one maximum, a batch without log-probabilities for none of them.

    Shapes: logits [B, V] float32, positions [B] int32.
    """
    B = logits_BV.shape[0]
    best_B = _first_max(logits_BV)
    greedy_B = (rows.temperature_B <= 0) | (rows.top_k_B == 1)
    token_B = jax.lax.cond(
        jnp.all(greedy_B),
        lambda: best_B,
        lambda: jnp.where(greedy_B, best_B, _draw(logits_BV, positions_B, rows)),
    )
    logprob_B, top_ids_BX, top_logprobs_BX = jax.lax.cond(
        jnp.any(rows.logprobs_B >= 0),
        lambda: _logprobs(logits_BV, token_B, rows.logprob_temperature_B),
        lambda: (
            jnp.zeros((B,), jnp.float32),
            jnp.zeros((B, TOP_LOGPROBS), jnp.int32),
            jnp.zeros((B, TOP_LOGPROBS), jnp.float32),
        ),
    )
    return Sampled(token_B, logprob_B, top_ids_BX, top_logprobs_BX)
