"""Weights from a checkpoint (or at random) to the devices of one mesh, shard by shard."""

import math
import zlib

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jinfire.checkpoints import TensorSource
from jinfire.config import ModelConfig
from jinfire.layout import PhysicalTensor, StageLayout
from jinfire.models.spec import abstract_tree
from jinfire.progress import progress


class RandomSource:
    """Random weights that depend on the seed and the tensor's name alone, on any layout.

    Normal weights have standard deviation 1/sqrt(in); scales are one.
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
        if spec.init == "ones":
            return np.ones(spec.shape, np.float32)[index]
        generator = np.random.default_rng([self._seed, zlib.crc32(name.encode())])
        values = generator.standard_normal(spec.shape, np.float32)
        return (values / math.sqrt(spec.shape[-1]))[index]

    def close(self) -> None:
        """Nothing to release."""


def load_params(
    source: TensorSource, layout: StageLayout, mesh: Mesh, dtype: np.dtype, desc: str = "weights"
) -> dict[str, jax.Array]:
    """All device arrays of a layout.

    Each device's part is read, cast and placed on its own, so the host holds no more than one
    tensor beyond what the source maps.
    """
    tensors = layout.tensors
    return {
        name: _place(source, layout, tensors[name], mesh, dtype)
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
