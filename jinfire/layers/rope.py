"""Rotary position embedding, half-split (Llama, Qwen)."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from jinfire.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Inverse frequencies, float32 [H/2], with the llama3 long-context scaling where it is set.

    Source: transformers `_compute_llama3_parameters`; wavelengths between the two corner
    wavelengths blend, and equal corner factors leave no band to blend (no division by zero).
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    frequencies = np.float32(1) / np.float32(rope.theta) ** exponents
    if rope.scaling is None:
        return frequencies
    if rope.scaling != "llama3":
        raise ValueError(f"rope scaling: expected None or 'llama3', got {rope.scaling!r}")
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


def rope_tables(
    positions_BT: jax.Array, rope: RopeConfig, head_dim: int
) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines of the rotation angles, float32 [B, T, 1, H/2] each."""
    frequencies = jnp.asarray(inverse_frequencies(rope, head_dim))
    angles = positions_BT.astype(jnp.float32)[..., None] * frequencies[None, None]
    return jnp.cos(angles)[:, :, None], jnp.sin(angles)[:, :, None]


def apply_rope(x_BTNH: jax.Array, tables: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Heads rotated by their position; computed in float32, returned in the input's dtype."""
    cos, sin = tables
    first, second = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x_BTNH.dtype)
