"""What layers know of a position: its rotation (RoPE) and the temperature of its queries."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jinfire.config import RopeConfig, TemperatureConfig

Rotation = tuple[jax.Array, jax.Array]
"""Cosines and sines of the rotation angles, float32 [B, T, 1, H/2] each."""


class PositionTables(NamedTuple):
    """Values that follow from the positions of a batch, shared by all layers.

    Shapes: `temperature` is float32 [B, T, 1, 1], None where queries keep their size.
    """

    rotation: Rotation
    temperature: jax.Array | None = None


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Inverse frequencies, float32 [H/2], with the long-context scaling where one is set."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    frequencies = np.float32(1) / np.float32(rope.theta) ** exponents
    if rope.scaling is None:
        return frequencies
    if rope.scaling == "llama3":
        return _llama3_scaled(rope, frequencies)
    if rope.scaling == "yarn":
        return _yarn_scaled(rope, frequencies, head_dim)
    raise ValueError(f"rope scaling: expected None, 'llama3' or 'yarn', got {rope.scaling!r}")


def _llama3_scaled(rope: RopeConfig, frequencies: np.ndarray) -> np.ndarray:
    """Long waves slowed down by the factor.

    Source: transformers `_compute_llama3_parameters`; wavelengths between the two corner
    wavelengths blend, and equal corner factors leave no band to blend (no division by zero).
    """
    wavelengths = np.float32(2 * math.pi) / frequencies
    low_wavelength = rope.original_max_position / rope.low_freq_factor
    high_wavelength = rope.original_max_position / rope.high_freq_factor
    scaled = np.where(wavelengths > low_wavelength, frequencies / rope.factor, frequencies)
    if rope.high_freq_factor != rope.low_freq_factor:
        smooth = (rope.original_max_position / wavelengths - rope.low_freq_factor) / (
            rope.high_freq_factor - rope.low_freq_factor
        )
        blended = (1 - smooth) * frequencies / rope.factor + smooth * frequencies
        between = (wavelengths <= low_wavelength) & (wavelengths >= high_wavelength)
        scaled = np.where(between, blended, scaled)
    return scaled.astype(np.float32)


def _yarn_scaled(rope: RopeConfig, frequencies: np.ndarray, head_dim: int) -> np.ndarray:
    """Waves that turn often in the original context kept, rare ones slowed down by the factor.

    The pairs between blend along a ramp, whose ends are whole pairs.
    Source: YaRN (arXiv 2309.00071) section 3.2; transformers `_compute_yarn_parameters`.
    """

    def pair_that_turns(times: float) -> float:
        turns = rope.original_max_position / (times * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(rope.theta))

    first = float(max(math.floor(pair_that_turns(rope.beta_fast)), 0))
    last = float(min(math.ceil(pair_that_turns(rope.beta_slow)), head_dim - 1))
    if first == last:
        last += 0.001
    pairs = np.arange(len(frequencies), dtype=np.float32)
    slowed = np.clip((pairs - np.float32(first)) / np.float32(last - first), 0, 1)
    return (frequencies / np.float32(rope.factor) * slowed + frequencies * (1 - slowed)).astype(
        np.float32
    )


def _magnitude(rope: RopeConfig, mscale: float) -> float:
    """YaRN's correction of attention for a longer context."""
    return 1.0 if rope.factor <= 1 else 0.1 * mscale * math.log(rope.factor) + 1.0


def rotation_size(rope: RopeConfig) -> float:
    """What cosines and sines are multiplied with; 1 without YaRN."""
    if rope.scaling != "yarn":
        return 1.0
    return _magnitude(rope, rope.mscale) / _magnitude(rope, rope.mscale_all_dim)


def latent_softmax_scale(rope: RopeConfig, head_dim: int) -> float:
    """What scores of latent attention are multiplied with; `head_dim` is nope + rope.

    Source: DeepSeek-V3 reference code.
    """
    magnitude = _magnitude(rope, rope.mscale_all_dim) if rope.scaling == "yarn" else 1.0
    return head_dim**-0.5 * magnitude**2


def rope_tables(positions_BT: jax.Array, rope: RopeConfig, head_dim: int) -> Rotation:
    """Rotation of positions, int32 [B, T]."""
    frequencies = jnp.asarray(inverse_frequencies(rope, head_dim))
    angles = positions_BT.astype(jnp.float32)[..., None] * frequencies[None, None]
    cos, sin = jnp.cos(angles)[:, :, None], jnp.sin(angles)[:, :, None]
    size = rotation_size(rope)
    return (cos, sin) if size == 1.0 else (cos * size, sin * size)


def query_temperature(positions_BT: jax.Array, temperature: TemperatureConfig) -> jax.Array:
    """Growth of the queries at int32 positions, float32 [B, T, 1, 1]."""
    # Whole numbers as far as the floor: beyond 2**24 a float32 position is not exact.
    steps_BT = (positions_BT + 1) // temperature.floor
    growth_BT = 1.0 + temperature.scale * jnp.log1p(steps_BT.astype(jnp.float32))
    return growth_BT[:, :, None, None]


def apply_rope(x_BTNH: jax.Array, rotation: Rotation, interleaved: bool = False) -> jax.Array:
    """Heads rotated by their position; computed in float32, returned in the input's dtype.

    A pair is a value of the first and one of the second half, or, `interleaved`, two neighbours.
    """
    cos, sin = rotation
    wide = x_BTNH.astype(jnp.float32)
    if interleaved:
        pairs = wide.reshape(*wide.shape[:-1], -1, 2)
        first, second = pairs[..., 0], pairs[..., 1]
        rotated = jnp.stack([first * cos - second * sin, second * cos + first * sin], axis=-1)
        rotated = rotated.reshape(wide.shape)
    else:
        first, second = jnp.split(wide, 2, axis=-1)
        rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x_BTNH.dtype)
