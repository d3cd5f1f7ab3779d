"""Weights from a checkpoint (or at random) to the devices of one mesh, shard by shard."""

import math
import zlib

import jax
import ml_dtypes
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jinfire.checkpoints import TensorSource
from jinfire.checkpoints.source import normalise
from jinfire.config import ModelConfig
from jinfire.layout import PhysicalTensor, StageLayout
from jinfire.models.spec import ParamSpec, abstract_tree
from jinfire.progress import progress
from pallas_kernels import INT4_GROUP

# Root mean square of an even draw from -8 to 7.
INT4_DEVIATION = math.sqrt(sum(value * value for value in range(-8, 8)) / 16)


class RandomSource:
    """Random weights that depend on the seed and the tensor's name alone, on any layout.

    Normal weights have standard deviation 1/sqrt(in), 4-bit ones too; scales of norms are one.
    Every expert of a stack is drawn on its own, so a part of a stack costs no more than itself.
    """

    def __init__(self, config: ModelConfig, seed: int = 0):
        self.config = config
        self._seed = seed
        self._tree = abstract_tree(config)

    def names(self) -> set[str]:
        return set(self._tree)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tree[name].shape

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        spec = self._tree[name]
        key = [self._seed, zlib.crc32(name.encode())]
        if len(spec.shape) < 3:
            return _draw(np.random.default_rng(key), spec, spec.shape)[index]
        experts, *rest = normalise(index, spec.shape)
        drawn = [
            _draw(np.random.default_rng([*key, expert]), spec, spec.shape[1:])[tuple(rest)]
            for expert in range(experts.start, experts.stop)
        ]
        if drawn:
            return np.stack(drawn)
        return _draw(np.random.default_rng(key), spec, (0, *spec.shape[1:]))[:, *rest]

    def close(self) -> None:
        """Nothing to release."""


def _draw(generator: np.random.Generator, spec: ParamSpec, shape: tuple[int, ...]) -> np.ndarray:
    if spec.init == "ones":
        return np.ones(shape, np.float32)
    if spec.init == "words":  # of 4-bit values
        return generator.integers(-(2**31), 2**31, shape, np.int32)
    if spec.init == "scales":
        columns = INT4_GROUP * spec.shape[-2]
        deviation = INT4_DEVIATION * math.sqrt(columns)
        return (generator.uniform(0.75, 1.25, shape) / deviation).astype(ml_dtypes.bfloat16)
    values = generator.standard_normal(shape, np.float32)
    # A router's bias moves its choices a little; scores of random tokens lie within 0.2 or so.
    return values * np.float32(0.02) if len(shape) == 1 else values / math.sqrt(shape[-1])


def load_params(
    source: TensorSource, layout: StageLayout, mesh: Mesh, dtype: np.dtype, desc: str = "weights"
) -> dict[str, jax.Array]:
    """All device arrays of a layout, in `dtype` where the tensor has none of its own.

    Each device's part is read, cast and placed on its own, so the host holds no more than one
    tensor beyond what the source maps.
    """
    tensors = layout.tensors
    specs = abstract_tree(layout.config)

    def own_dtype(tensor: PhysicalTensor) -> np.dtype:
        spec = specs[next(source for source in tensor.sources if source)]
        return dtype if spec.dtype is None else jax.numpy.dtype(spec.dtype)

    return {
        name: _place(source, layout, tensors[name], mesh, own_dtype(tensors[name]))
        for name in progress(tensors, desc=f"load {desc}")
    }


def _place(
    source: TensorSource, layout: StageLayout, tensor: PhysicalTensor, mesh: Mesh, dtype: np.dtype
) -> jax.Array:
    def shard(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None  # every array here has at least one dimension
        shape = tuple(
            len(range(*part.indices(size))) for part, size in zip(index, tensor.shape, strict=True)
        )
        if not tensor.stacked:
            return read(tensor.sources[0], index, tensor.axes, tensor.shape, shape)
        stages = range(*index[0].indices(tensor.shape[0]))
        parts = [
            read(tensor.sources[stage], index[1:], tensor.axes[1:], tensor.shape[1:], shape[1:])
            for stage in stages
        ]
        return parts[0][None] if len(parts) == 1 else np.stack(parts)

    def read(
        name: str | None,
        index: tuple[slice, ...],
        axes: tuple[str | None, ...],
        full: tuple[int, ...],
        shape: tuple[int, ...],
    ) -> np.ndarray:
        if name is None:
            return np.zeros(shape, dtype)
        logical = tuple(
            layout.logical_slice(axis, part, size)
            for axis, part, size in zip(axes, index, full, strict=True)
        )
        block = np.asarray(source.read(name, logical)).astype(dtype, copy=False)
        return layout.fit(block, shape)

    # One shard after the other: `jax.make_array_from_callback` would hold all of them on the host,
    # which is as many tensors as there are stages.
    sharding = NamedSharding(mesh, tensor.spec)
    shards = [
        jax.block_until_ready(jax.device_put(shard(index), device))
        for device, index in sharding.addressable_devices_indices_map(tensor.shape).items()
    ]
    return jax.make_array_from_single_device_arrays(tensor.shape, sharding, shards)
