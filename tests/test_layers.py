"""Layers against formulas: rotary tables, norms, weight products, and counts derived from them."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from helpers import oracle_frequencies, tiny_config
from jax.sharding import PartitionSpec

from jinfire.config import ExpertsConfig, LatentConfig, LayerSpec, RopeConfig, TemperatureConfig
from jinfire.layers.norm import RMSNorm
from jinfire.layers.rope import (
    apply_rope,
    inverse_frequencies,
    latent_softmax_scale,
    query_temperature,
    rope_tables,
    rotation_size,
)
from jinfire.models.spec import abstract_tree, skeleton
from jinfire.programs.forward import InBatchKV
from jinfire.weights import contract
from sharding import MeshSpec, make_mesh

BFLOAT16 = ml_dtypes.bfloat16

EXPERTS = {
    "softmax": ExpertsConfig(count=4, per_token=2, width=16, normalise=True),
    "sigmoid": ExpertsConfig(
        count=6,
        per_token=2,
        width=16,
        router="sigmoid",
        normalise=True,
        scaling=2.5,
        groups=2,
        groups_per_token=1,
        shared_width=16,
    ),
    "scaled": ExpertsConfig(count=4, per_token=1, width=16, router="scaled_input", shared_width=16),
}


def yarn(theta: float, factor: float, **changes) -> RopeConfig:
    published = {"original_max_position": 4096, "mscale": 1.0, "mscale_all_dim": 1.0}
    return RopeConfig(theta, "yarn", factor, **published | changes)


ROPES = {
    "plain": (RopeConfig(10_000.0), 64),
    "SmolLM2": (RopeConfig(100_000.0), 64),
    "Llama 3.1": (RopeConfig(500_000.0, "llama3", 8.0, 1.0, 4.0, 8192), 128),
    "Llama 3.2": (RopeConfig(500_000.0, "llama3", 32.0, 1.0, 4.0, 8192), 64),
    "one corner": (RopeConfig(500_000.0, "llama3", 16.0, 1.0, 1.0, 8192), 128),
    "one corner, on a frequency": (RopeConfig(2 * np.pi, "llama3", 2.0, 1.0, 1.0, 1), 2),
    "odd head": (RopeConfig(1_000_000.0), 24),
    "DeepSeek-V3": (yarn(10_000.0, 40.0), 64),
    "Kimi K2": (yarn(50_000.0, 32.0, beta_fast=1.0), 64),
    "Kimi K2.5": (yarn(50_000.0, 64.0), 64),
    "yarn, short context": (yarn(10_000.0, 8.0, original_max_position=48, beta_fast=16.0), 16),
    "yarn, ramp without a length": (yarn(10_000.0, 8.0, original_max_position=6, beta_fast=1.0), 8),
    "yarn, ramp past the end": (yarn(2.0, 8.0, original_max_position=2000), 8),
}


@pytest.mark.parametrize("name", ROPES)
def test_rope_tables(name):
    rope, head_dim = ROPES[name]
    frequencies = oracle_frequencies(rope, head_dim)
    assert np.isfinite(frequencies).all()
    got = inverse_frequencies(rope, head_dim)
    assert got.dtype == np.float32
    if name != "one corner, on a frequency":  # there, rounding may choose the side
        np.testing.assert_allclose(got, frequencies, rtol=1e-6)

    positions = np.array([[0, 1, 2, 17, 255], [8191, 8192, 100_000, 131_071, 3]], np.int32)
    cos, sin = rope_tables(jnp.asarray(positions), rope, head_dim)
    assert cos.shape == sin.shape == (2, 5, 1, head_dim // 2)
    assert cos.dtype == sin.dtype == jnp.float32
    angles = positions[..., None, None] * got.astype(np.float64)
    # The angle is a float32: its rounding is what the reference has too.
    bound = 1e-6 + np.abs(angles) * 2.0**-23
    assert rotation_size(rope) == 1
    assert (np.abs(cos - np.cos(angles)) <= bound).all()
    assert (np.abs(sin - np.sin(angles)) <= bound).all()


def test_llama3_scaling_changes_long_waves_only():
    rope, head_dim = ROPES["Llama 3.1"]
    ratio = inverse_frequencies(rope, head_dim) / inverse_frequencies(RopeConfig(rope.theta), 128)
    waves = 2 * np.pi / inverse_frequencies(RopeConfig(rope.theta), head_dim)
    assert (ratio[waves < 8192 / 4] == 1).all()
    np.testing.assert_allclose(ratio[waves > 8192], 1 / 8, rtol=1e-6)
    between = ratio[(waves > 8192 / 4) & (waves < 8192)]
    assert between.size
    assert (np.diff(between) < 0).all()
    assert ((between > 1 / 8) & (between < 1)).all()
    with pytest.raises(ValueError, match="'linear'"):
        inverse_frequencies(RopeConfig(scaling="linear"), 8)


def test_yarn_slows_rare_turns_only():
    rope = ROPES["DeepSeek-V3"][0]
    ratio = inverse_frequencies(rope, 64) / inverse_frequencies(RopeConfig(rope.theta), 64)
    # Pair 10 turns 32 times in 4096 tokens, pair 23 once, both by the published formula.
    np.testing.assert_allclose(ratio[:11], 1, rtol=1e-6)
    np.testing.assert_allclose(ratio[23:], 1 / 40, rtol=1e-6)
    np.testing.assert_allclose(ratio[11:23], 1 - np.arange(1, 13) / 13 * (1 - 1 / 40), rtol=1e-6)


def test_yarn_sizes():
    """Sizes of the rotation and of the softmax scale, from 0.1 m ln(factor) + 1."""
    kimi = ROPES["Kimi K2.5"][0]
    assert rotation_size(kimi) == 1
    assert latent_softmax_scale(kimi, 192) == pytest.approx(0.14468, rel=1e-4)
    deepseek = ROPES["DeepSeek-V3"][0]
    assert latent_softmax_scale(deepseek, 192) == pytest.approx(0.1352337, rel=1e-5)
    unequal = yarn(1e4, 8.0, mscale=0.707, mscale_all_dim=1.3)
    assert rotation_size(unequal) == pytest.approx(1.1470168 / 1.2703274, rel=1e-6)
    # Without the two fields the rotation alone is larger.
    bare = RopeConfig(1e4, "yarn", 8.0)
    assert rotation_size(bare) == pytest.approx(1 + 0.1 * np.log(8))
    assert latent_softmax_scale(bare, 64) == 1 / 8
    assert rotation_size(yarn(1e4, 1.0, mscale=0.5)) == 1
    assert latent_softmax_scale(RopeConfig(mscale_all_dim=1.0, factor=8.0), 64) == 1 / 8

    positions = jnp.arange(7)[None]
    cos, sin = rope_tables(positions, unequal, 8)
    np.testing.assert_allclose(np.hypot(cos, sin), rotation_size(unequal), rtol=1e-6)


def test_temperature_of_queries():
    """Steps at whole multiples, with positions that float32 cannot hold."""
    config = TemperatureConfig(scale=0.3, floor=8)
    positions = np.array([[0, 6, 7, 8, 14, 15], [2**24 + 5, 2**24 + 6, 2**24 + 7, 1, 2, 3]])
    steps = np.array([[0, 0, 1, 1, 1, 2], [2**21, 2**21, 2**21 + 1, 0, 0, 0]])
    got = query_temperature(jnp.asarray(positions, jnp.int32), config)
    assert got.shape == (2, 6, 1, 1)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got[:, :, 0, 0], 1 + 0.3 * np.log1p(steps), rtol=1e-6)
    # Llama 4 Scout's published numbers: nothing before 8191, then 1 + 0.1 ln 2.
    scout = query_temperature(jnp.asarray([[8190, 8191]]), TemperatureConfig(0.1, 8192))
    np.testing.assert_allclose(scout[0, :, 0, 0], [1, 1.0693147], rtol=1e-6)


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "neighbours"])
@pytest.mark.parametrize("dtype", [np.float32, BFLOAT16], ids=["float32", "bfloat16"])
def test_rope_turns_pairs(dtype, interleaved):
    generator = np.random.default_rng(0)
    x = generator.standard_normal((2, 5, 3, 8)).astype(dtype)
    positions = generator.integers(0, 40, (2, 5)).astype(np.int32)
    rope = RopeConfig()
    tables = rope_tables(jnp.asarray(positions), rope, 8)
    rotated = apply_rope(jnp.asarray(x), tables, interleaved)
    assert rotated.dtype == dtype
    wide = x.astype(np.float64)
    angles = positions[..., None, None] * oracle_frequencies(rope, 8)
    first, second = (
        (wide[..., ::2], wide[..., 1::2]) if interleaved else (wide[..., :4], wide[..., 4:])
    )
    turned = (first + 1j * second) * np.exp(1j * angles)
    expected = np.concatenate([turned.real, turned.imag], axis=-1)
    if interleaved:
        expected = expected.reshape(2, 5, 3, 2, 4).swapaxes(-1, -2).reshape(wide.shape)
    if dtype == BFLOAT16:  # computed wider and rounded once
        expected = expected.astype(dtype).astype(np.float64)
        assert (np.asarray(rotated, np.float64) == expected).mean() > 0.99
    tolerance = 1e-5 if dtype == np.float32 else 2.0**-7
    np.testing.assert_allclose(np.asarray(rotated, np.float64), expected, tolerance, tolerance)


def norm_of(x: np.ndarray, scale: np.ndarray, eps: float) -> np.ndarray:
    norm = RMSNorm(x.shape[-1], eps, jnp.dtype(scale.dtype))
    norm.scale.set_value(jnp.asarray(scale))
    out = norm(jnp.asarray(x))
    assert out.dtype == x.dtype
    return np.asarray(out)


def test_norm_in_float32():
    generator = np.random.default_rng(0)
    x = generator.standard_normal((3, 4, 64), np.float32) * 50
    x[0, 0] = 1e-4  # the epsilon counts
    scale = generator.standard_normal(64, np.float32)
    wide = x.astype(np.float64)
    expected = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5) * scale
    np.testing.assert_allclose(norm_of(x, scale, 1e-5), expected, rtol=2e-6)


def test_norm_in_bfloat16_rounds_before_the_scale():
    """As transformers: statistics in float32, rounded to the input's dtype, then the product."""
    generator = np.random.default_rng(0)
    x = generator.standard_normal((64, 256)).astype(BFLOAT16)
    scale = generator.uniform(0.5, 1.5, 256).astype(BFLOAT16)
    wide = x.astype(np.float32)
    normed = wide / np.sqrt((wide * wide).mean(-1, keepdims=True) + np.float32(1e-5))
    expected = normed.astype(BFLOAT16) * scale
    once = (normed * scale.astype(np.float32)).astype(BFLOAT16)
    got = norm_of(x, scale, 1e-5)
    # A float32 rounding may fall on the other side of a tie, hardly ever.
    assert (got == expected).mean() > 0.999
    assert (got == once).mean() < 0.9


# --- Products


@pytest.mark.parametrize("lead", [(1,), (1, 1), (2,), (3, 1), (2, 3), (8, 1)], ids=str)
@pytest.mark.parametrize("dtype", [np.float32, BFLOAT16], ids=["float32", "bfloat16"])
def test_contract(lead, dtype):
    generator = np.random.default_rng(0)
    x = generator.standard_normal((*lead, 96)).astype(dtype)
    weight = generator.standard_normal((40, 96)).astype(dtype)
    expected = x.astype(np.float64) @ weight.astype(np.float64).T

    out = contract(jnp.asarray(x), jnp.asarray(weight))
    assert out.shape == (*lead, 40)
    assert out.dtype == dtype
    tolerance = 1e-5 if dtype == np.float32 else 2.0**-7
    np.testing.assert_allclose(np.asarray(out, np.float64), expected, tolerance, tolerance)

    wide = contract(jnp.asarray(x), jnp.asarray(weight), jnp.dtype(jnp.float32))
    assert wide.dtype == jnp.float32
    np.testing.assert_allclose(wide, expected, rtol=1e-4, atol=1e-4)


def test_one_bfloat16_row_is_the_row_of_a_pair():
    generator = np.random.default_rng(0)
    x = jnp.asarray(generator.standard_normal((1, 128)).astype(BFLOAT16))
    weight = jnp.asarray(generator.standard_normal((64, 128)).astype(BFLOAT16))
    pair = contract(jnp.concatenate([x, x]), weight)
    one = contract(x, weight)
    assert np.asarray(one[0]).tobytes() == np.asarray(pair[0]).tobytes()
    text = jax.jit(contract).lower(x, weight).as_text()
    assert "tensor<2x128xbf16>" in text  # the slow product of one row is not compiled


# --- A layer of zeros


LAYERS = {
    "plain": tiny_config(layers=1),
    "normed": tiny_config(layers=1, qk_norm=True),
    "chunked": tiny_config(
        layers=(LayerSpec("chunked"),), attention_chunk=4, qk_norm_after_rope=True
    ),
    "unrotated": tiny_config(
        layers=(LayerSpec("unrotated"),), temperature=TemperatureConfig(0.1, 4)
    ),
    "latent": tiny_config(
        layers=(LayerSpec("latent"),),
        num_kv_heads=8,
        head_dim=10,
        latent=LatentConfig(query_rank=12, rank=10, nope_dim=6, rope_dim=4, value_dim=5),
    ),
    "experts": tiny_config(layers=(LayerSpec(mlp="experts"),), experts=EXPERTS["softmax"]),
    "shared expert": tiny_config(layers=(LayerSpec(mlp="experts"),), experts=EXPERTS["sigmoid"]),
    "scaled input": tiny_config(layers=(LayerSpec(mlp="experts"),), experts=EXPERTS["scaled"]),
}


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_layer_of_zeros_is_the_identity(dtype, kind):
    """What pads a stage with fewer layers; exact, whatever passes through it."""
    config = LAYERS[kind]
    structure = skeleton(config, config.layers)
    params = {
        name: jnp.zeros(spec.shape, spec.dtype or dtype)
        for name, spec in abstract_tree(config).items()
    }
    mesh = make_mesh(MeshSpec(), jax.devices()[:1])

    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=PartitionSpec(),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    def run(hidden, params):
        model = structure.bind(params)
        positions = jnp.arange(hidden.shape[1], dtype=jnp.int32)[None]
        return model.layers[0](hidden, model.tables(positions), InBatchKV())[0]

    values = np.random.default_rng(0).standard_normal((1, 6, config.width), np.float32)
    values[0, 1] = 0.0
    values[0, 2] = 1e30
    hidden = jnp.asarray(values).astype(dtype)
    assert np.asarray(run(hidden, params)).tobytes() == np.asarray(hidden).tobytes()
