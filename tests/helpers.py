"""Shared parts of the tests: tiny models, an independent float64 forward, pages by layer."""

import dataclasses
import zlib
from collections.abc import Sequence

import jax
import numpy as np

from jinfire.config import EngineConfig, LayerSpec, ModelConfig, RopeConfig
from jinfire.layout import StageLayout
from jinfire.loading import RandomSource, TensorSource
from jinfire.request import RequestOutput

LLAMA3_ROPE = RopeConfig(10_000.0, "llama3", 8.0, 1.0, 4.0, 24)


def tiny_config(layers: int | tuple[LayerSpec, ...] = 5, **changes) -> ModelConfig:
    """A Llama small enough to compile in seconds; 8 query and 2 kv heads."""
    if isinstance(layers, int):
        layers = (LayerSpec(),) * layers
    base = ModelConfig(
        family="llama",
        vocab_size=61,
        width=32,
        mlp_width=48,
        num_heads=8,
        num_kv_heads=2,
        head_dim=8,
        layers=layers,
        norm_eps=1e-5,
        rope=LLAMA3_ROPE,
        tie_embeddings=False,
        qk_norm=False,
        max_position=256,
    )
    return dataclasses.replace(base, **changes)


def small_engine_config(**changes) -> EngineConfig:
    """One row bucket, one context bucket, one prefill shape: few programs to compile."""
    base = EngineConfig(
        page_size=8,
        max_rows=8,
        max_context=48,
        row_buckets=(),
        context_buckets=(),
        prefill_shapes=((2, 16),),
        decode_steps=3,
    )
    return dataclasses.replace(base, **changes)


class ChangedSource:
    """A source whose tensors pass through `change(name, array)` on the way."""

    def __init__(self, source: TensorSource, change) -> None:
        self.config = source.config
        self._source, self._change = source, change

    def names(self) -> set[str]:
        return self._source.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(name)

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        return self._change(name, self._source.read(name, index))

    def close(self) -> None:
        self._source.close()


def tiny_source(config: ModelConfig, seed: int = 0) -> ChangedSource:
    """Random weights with random norm scales too, so that a scale left out shows."""

    def change(name: str, values: np.ndarray) -> np.ndarray:
        if not name.endswith("norm.scale"):
            return values
        generator = np.random.default_rng([seed, zlib.crc32(name.encode())])
        return values * generator.uniform(0.5, 1.5, values.shape).astype(np.float32)

    return ChangedSource(RandomSource(config, seed), change)


def random_prompts(lengths: Sequence[int], vocab: int, seed: int = 0) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    return [generator.integers(0, vocab, length).tolist() for length in lengths]


def margins(output: RequestOutput) -> list[float]:
    """Log-probability of the best token over the second best, per step (needs logprobs >= 2)."""
    assert output.logprobs is not None
    return [step.top[0][1] - step.top[1][1] for step in output.logprobs]


class Oracle:
    """A dense decoder in NumPy float64 that shares no code with jinfire's layers."""

    def __init__(self, source: TensorSource) -> None:
        self.config = source.config
        whole = (slice(None), slice(None))
        self.weights = {
            name: np.asarray(source.read(name, whole[: len(source.shape(name))]), np.float64)
            for name in source.names()
        }

    def logits(self, ids: Sequence[int]) -> np.ndarray:
        """[T, V] of one sequence."""
        w, config = self.weights, self.config
        x = w["embed.weight"][np.asarray(ids)]
        angles = np.arange(len(ids))[:, None] * oracle_frequencies(config.rope, config.head_dim)
        for i in range(config.num_layers):
            p = f"layers.{i}."
            x = x + self._attention(p, self._norm(x, p + "attention_norm"), angles)
            y = self._norm(x, p + "mlp_norm")
            gate = y @ w[p + "mlp.gate.weight"].T
            up = y @ w[p + "mlp.up.weight"].T
            x = x + (gate / (1 + np.exp(-gate)) * up) @ w[p + "mlp.down.weight"].T
        head = "embed.weight" if config.tie_embeddings else "head.weight"
        return self._norm(x, "final_norm") @ w[head].T

    def greedy(self, prompt: Sequence[int], count: int) -> tuple[list[int], float]:
        """The greedy continuation and its smallest margin between best and second best logit."""
        ids, least = list(prompt), np.inf
        for _ in range(count):
            last = self.logits(ids)[-1]
            second, best = np.sort(last)[-2:]
            least = min(least, best - second)
            ids.append(int(last.argmax()))
        return ids[len(prompt) :], float(least)

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        rms = np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + self.config.norm_eps)
        return x / rms * self.weights[name + ".scale"]

    def _attention(self, prefix: str, x: np.ndarray, angles: np.ndarray) -> np.ndarray:
        config, length = self.config, len(x)
        heads = {}
        for name in ("query", "key", "value"):
            y = x @ self.weights[f"{prefix}attention.{name}.weight"].T
            y = y.reshape(length, -1, config.head_dim)
            if name != "value":
                if config.qk_norm:
                    y = self._norm(y, f"{prefix}attention.{name}_norm")
                y = _rotated(y, angles)
            heads[name] = y
        outputs = []
        for n in range(config.num_heads):
            k = n * config.num_kv_heads // config.num_heads
            scores = heads["query"][:, n] @ heads["key"][:, k].T / np.sqrt(config.head_dim)
            scores[np.triu_indices(length, 1)] = -np.inf
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            outputs.append(weights / weights.sum(axis=1, keepdims=True) @ heads["value"][:, k])
        return np.concatenate(outputs, axis=1) @ self.weights[f"{prefix}attention.output.weight"].T


def _rotated(x: np.ndarray, angles: np.ndarray) -> np.ndarray:
    turned = (x[..., : x.shape[-1] // 2] + 1j * x[..., x.shape[-1] // 2 :]) * np.exp(
        1j * angles[:, None]
    )
    return np.concatenate([turned.real, turned.imag], axis=-1)


def oracle_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Rotation per position in float64, one frequency at a time (reference codes)."""
    result = []
    for i in range(0, head_dim, 2):
        frequency = rope.theta ** (-i / head_dim)
        if rope.scaling == "yarn":
            # The pair (not rounded) that turns so many times in the original context.
            first, last = (
                head_dim
                / 2
                * np.log(rope.original_max_position / (2 * np.pi * turns))
                / np.log(rope.theta)
                for turns in (rope.beta_fast, rope.beta_slow)
            )
            first, last = max(np.floor(first), 0), min(np.ceil(last), head_dim - 1)
            part = (i / 2 - first) / (last - first if last != first else 0.001)
            part = min(max(part, 0), 1)
            frequency *= (1 - part) + part / rope.factor
        if rope.scaling == "llama3":
            turns = rope.original_max_position * frequency / (2 * np.pi)
            if turns < rope.low_freq_factor:
                frequency /= rope.factor
            elif turns <= rope.high_freq_factor and rope.low_freq_factor < rope.high_freq_factor:
                part = (turns - rope.low_freq_factor) / (
                    rope.high_freq_factor - rope.low_freq_factor
                )
                frequency *= (1 - part) / rope.factor + part
        result.append(frequency)
    return np.array(result)


def logical_pages(layout: StageLayout, pools) -> np.ndarray:
    """A mesh's pools by model layer and logical head: [L, 2, P, Z, K, H]."""
    (group,) = pools.values()
    copies = layout.kv_heads // layout.config.num_kv_heads
    layers: list[np.ndarray | None] = [None] * layout.config.num_layers
    for slot, pair in enumerate(group):
        stacked = np.stack([np.asarray(jax.device_get(pages)) for pages in pair], axis=1)
        for stage in range(layout.mesh_spec.pipeline):
            layer = layout.layer_at(stage, slot)
            if layer is not None:
                layers[layer] = stacked[stage][..., ::copies, :]
    return np.stack([layer for layer in layers if layer is not None])
