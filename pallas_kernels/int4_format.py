"""The 4-bit weight format of compressed-tensors (`pack-quantized`), and its order on the device.

A checkpoint stores weights [F, D] as int32 words [F, D / 8]: eight values a word, the first in the
lowest four bits, each as value + 8. Every 32 values along D, a group, share a bfloat16 scale of
[F, D / 32]. A weight is value x scale, rounded to bfloat16.

The device form has the same bytes in another order. The four words of a group are 32 values that
four lanes of a warp hold for a row of a WGMMA operand: lane t takes the columns 2t and 2t + 1 of
every eight. So word t of the device form has those of its lane,

    bits 4(i + 4e) .. 4(i + 4e) + 3    column 8i + 2t + e    for i in 0..3 and e in 0..1

and one mask takes both halves of a pair, which come out 16 bits apart, as a pair of bfloat16 does.
Scales lie as [D / 32, F], so that a tile's scales of one group are consecutive.

Source: compressed-tensors, `PackedQuantizationCompressor`.
"""

import jax
import jax.numpy as jnp
import numpy as np

GROUP = 32  # values that share a scale
PER_WORD = 8
WORDS = GROUP // PER_WORD  # words of a group
OFFSET = 8  # a value is stored as value + 8


def pack_for_device(
    packed_FW: jax.Array | np.ndarray, scales_FG: jax.Array | np.ndarray
) -> tuple[jax.Array, jax.Array]:
    """Device form of weights and scales as a checkpoint has them, with any leading axes.

    Shapes: packed [..., F, D / 8] int32 and scales [..., F, D / 32]; the results are
    [..., F, D / 8] int32 and [..., D / 32, F].
    """
    words = _group_words(packed_FW)
    nibbles = [
        # Column 8i + 2t + e is value 2t + e of the checkpoint's word i.
        [_take(words[i], 2 * t + e) << (4 * (i + 4 * e)) for i in range(4) for e in range(2)]
        for t in range(WORDS)
    ]
    return _join_words(nibbles), jnp.swapaxes(jnp.asarray(scales_FG), -1, -2)


def unpack_from_device(weights_FW: jax.Array, scales_GF: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The inverse of `pack_for_device`, exact."""
    words = _group_words(weights_FW)
    nibbles = [
        [_take(words[t], i + 4 * e) << (4 * (2 * t + e)) for t in range(WORDS) for e in range(2)]
        for i in range(4)
    ]
    return _join_words(nibbles), jnp.swapaxes(scales_GF, -1, -2)


def _group_words(words_FW: jax.Array | np.ndarray) -> list[jax.Array]:
    """The first, second, third and fourth word of every group, unsigned."""
    words = jax.lax.bitcast_convert_type(jnp.asarray(words_FW), jnp.uint32)
    words = words.reshape(*words.shape[:-1], -1, WORDS)
    return [words[..., i] for i in range(WORDS)]


def _take(word: jax.Array, index: int) -> jax.Array:
    return (word >> (4 * index)) & 0xF


def _join_words(nibbles: list[list[jax.Array]]) -> jax.Array:
    words = jnp.stack([sum(own[1:], own[0]) for own in nibbles], axis=-1)
    words = words.reshape(*words.shape[:-2], -1)
    return jax.lax.bitcast_convert_type(words, jnp.int32)


def dequantise(weights_FW: jax.Array, scales_GF: jax.Array) -> jax.Array:
    """Weights [..., F, D] in the scales' dtype, from the device form."""
    packed_FW, scales_FG = unpack_from_device(weights_FW, scales_GF)
    stored = [(packed_FW >> (4 * i)) & 0xF for i in range(PER_WORD)]
    values = jnp.stack(stored, axis=-1) - OFFSET
    values = values.reshape(*scales_FG.shape, GROUP).astype(jnp.float32)
    weights = values * scales_FG[..., None].astype(jnp.float32)
    # A compiler may skip the rounding of a bfloat16 product that it goes on with in float32, but
    # not this one.
    weights = jax.lax.reduce_precision(weights, exponent_bits=8, mantissa_bits=7)
    return weights.reshape(*scales_FG.shape[:-1], -1).astype(scales_GF.dtype)


def dequantise_reference(weights_FW: np.ndarray, scales_GF: np.ndarray) -> np.ndarray:
    """Weights [..., F, D] from the device form in NumPy, one value at a time of every word."""
    *rest, F, W = weights_FW.shape
    words = weights_FW.view(np.uint32).reshape(*rest, F, W // WORDS, WORDS)
    values = np.zeros((*rest, F, W // WORDS, GROUP), np.float32)
    for column in range(GROUP):
        i, t, e = column // 8, column % 8 // 2, column % 2
        values[..., column] = (words[..., t] >> np.uint32(4 * (i + 4 * e)) & np.uint32(15)) - 8.0
    scales = np.swapaxes(scales_GF, -1, -2)[..., None]
    weights = (values * scales.astype(np.float32)).astype(scales_GF.dtype)
    return weights.reshape(*rest, F, W * PER_WORD)
