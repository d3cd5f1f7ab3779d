"""Weights from a checkpoint (or at random) to the devices of one mesh, shard by shard."""

import dataclasses
import math
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import ml_dtypes
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jinfire.checkpoints import TensorSource
from jinfire.checkpoints.int4 import GROUP
from jinfire.checkpoints.source import Index, normalise
from jinfire.config import ModelConfig
from jinfire.layout import CODED_SPEC, PhysicalTensor, StageLayout, projection_of
from jinfire.models.spec import ParamSpec, abstract_tree
from jinfire.progress import progress
from jinfire.unweight.device import device_form
from jinfire.unweight.policy import Choice, check_dtype
from jinfire.unweight.tensor import (
    LENGTHS,
    MESH_AXES,
    RAGGED,
    UnweightTensor,
    common_length,
    filled,
)
from jinfire.weights import Weight
from sharding import Device

# Share of a compressed weight that may be filled up so that it has the shape of other layers'.
FILLED_UP = 0.02

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
        columns = GROUP * spec.shape[-2]
        deviation = INT4_DEVIATION * math.sqrt(columns)
        return (generator.uniform(0.75, 1.25, shape) / deviation).astype(ml_dtypes.bfloat16)
    values = generator.standard_normal(shape, np.float32)
    # A router's bias moves its choices a little; scores of random tokens lie within 0.2 or so.
    return values * np.float32(0.02) if len(shape) == 1 else values / math.sqrt(shape[-1])


def load_params(
    source: TensorSource, layout: StageLayout, mesh: Mesh, dtype: np.dtype, desc: str = "weights"
) -> dict[str, Weight]:
    """All weights of a layout, in `dtype` where the tensor has none of its own.

    Each device's part is read, cast and placed on its own, so the host holds no more than one
    tensor beyond what the source maps. What the layout compresses goes to the devices so.

    Raises: ValueError for compressed weights of another dtype than bfloat16.
    """
    if layout.unweight is not None:
        check_dtype(dtype)
    tensors = layout.tensors
    specs = abstract_tree(layout.config)

    def own_dtype(tensor: PhysicalTensor) -> np.dtype:
        spec = specs[next(source for source in tensor.sources if source)]
        return dtype if spec.dtype is None else jax.numpy.dtype(spec.dtype)

    params = {
        name: _place(source, layout, tensors[name], mesh, own_dtype(tensors[name]))
        for name in progress(tensors, desc=f"load {desc}")
    }
    return params | _of_common_lengths(params)


def _place(
    source: TensorSource, layout: StageLayout, tensor: PhysicalTensor, mesh: Mesh, dtype: np.dtype
) -> Weight:
    def shard(index: Index) -> np.ndarray:
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
        index: Index,
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
    indices = {
        device: index
        for device, index in sharding.addressable_devices_indices_map(tensor.shape).items()
        if index is not None  # which it is for arrays without dimensions
    }
    if tensor.coded is not None:
        return _place_coded(tensor.coded, shard, indices, mesh, tensor.stacked)
    shards = [
        jax.block_until_ready(jax.device_put(shard(index), device))
        for device, index in indices.items()
    ]
    return jax.make_array_from_single_device_arrays(tensor.shape, sharding, shards)


def _of_common_lengths(params: Mapping[str, Weight]) -> dict[str, Weight]:
    """Compressed weights of one kind, one in each layer, with ragged arrays of one length."""
    kinds: dict[Any, dict[str, UnweightTensor]] = {}
    for name, weight in params.items():
        if isinstance(weight, UnweightTensor):
            kind = projection_of(name), weight.choice, weight.matrix.leading, weight.matrix.shape
            kinds.setdefault(kind, {})[name] = weight
    found: dict[str, Weight] = {}
    for weights in kinds.values():
        for together in LENGTHS:
            arrays = [weight.matrix.arrays().get(together[0]) for weight in weights.values()]
            lengths = [a.shape[RAGGED[together[0]]] for a in arrays if a is not None]
            if not lengths:
                continue
            weight = next(iter(weights.values()))
            part = sum(getattr(weight.matrix, field).nbytes for field in together) / lengths[0]
            length = common_length(lengths, int(FILLED_UP * weight.nbytes / part))
            for (name, weight), own in zip(weights.items(), lengths, strict=True):
                if own < length:
                    weights[name] = _filled_up(weight, together, length)
        found |= weights
    return found


def _filled_up(weight: UnweightTensor, together: tuple[str, ...], length: int) -> UnweightTensor:
    """The weight with longer arrays, which come to the host and back: compiling costs more."""
    longer = {}
    for field in together:
        array = getattr(weight.matrix, field)
        shards = [
            jax.device_put(
                filled(field, np.asarray(shard.data), length, weight.matrix), shard.device
            )
            for shard in array.addressable_shards
        ]
        shape = list(array.shape)
        shape[RAGGED[field]] = length
        longer[field] = jax.make_array_from_single_device_arrays(
            tuple(shape), array.sharding, shards
        )
    return dataclasses.replace(weight, matrix=dataclasses.replace(weight.matrix, **longer))


def _place_coded(
    choice: Choice,
    shard: Callable[[Index], np.ndarray],
    indices: Mapping[Device, Index],
    mesh: Mesh,
    stacked: bool,
) -> UnweightTensor:
    """A compressed weight: every device's part coded on its own, a part of several devices once.

    All devices' arrays have one shape. Those whose length depends on the values wait on the host
    until it is known; they are few but for a Huffman stream, which is a fifth of the whole.
    """
    sharding = NamedSharding(mesh, CODED_SPEC)
    devices: dict[Index, list[Device]] = {}
    for device, index in indices.items():
        devices.setdefault(index, []).append(device)
    placed: dict[str, list[jax.Array]] = {}
    waiting: dict[str, list[tuple[np.ndarray, list[Device]]]] = {}

    def put(field: str, array: np.ndarray, where: list[Device]) -> None:
        part = array[(None,) * MESH_AXES]
        placed.setdefault(field, []).extend(
            jax.block_until_ready([jax.device_put(part, device) for device in where])
        )

    for index, where in devices.items():
        words = shard(index).view(np.uint16)
        matrix = device_form(words[0] if stacked else words, choice.form)
        for field, array in matrix.arrays().items():
            if field in RAGGED:
                waiting.setdefault(field, []).append((array, where))
            else:
                put(field, array, where)
    for field, parts in waiting.items():
        length = max(array.shape[RAGGED[field]] for array, _ in parts)
        while parts:
            array, where = parts.pop()
            put(field, filled(field, array, length, matrix), where)
    arrays = {}
    for field, shards in placed.items():
        shape = tuple(mesh.shape[axis] for axis in CODED_SPEC) + shards[0].shape[MESH_AXES:]
        arrays[field] = jax.make_array_from_single_device_arrays(shape, sharding, shards)
    return UnweightTensor(dataclasses.replace(matrix, **arrays), choice)
