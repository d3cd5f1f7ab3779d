"""Meshes that always carry the four axes pipeline, data, expert and tensor."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

PIPELINE = "pipeline"
DATA = "data"
EXPERT = "expert"
TENSOR = "tensor"
AXES = (PIPELINE, DATA, EXPERT, TENSOR)

# jax.Device, which type checkers take for a variable.
Device = Any


@dataclasses.dataclass(frozen=True)
class MeshSpec:
    """Number of devices along each mesh axis.

    Raises: ValueError for a size that is not an integer >= 1.
    """

    pipeline: int = 1
    data: int = 1
    expert: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        for axis, size in zip(AXES, self.shape, strict=True):
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ValueError(f"MeshSpec.{axis}: expected an integer >= 1, got {size!r}")

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Axis sizes in the order of `AXES`."""
        return (self.pipeline, self.data, self.expert, self.tensor)

    @property
    def size(self) -> int:
        """Number of devices."""
        return math.prod(self.shape)

    def __str__(self) -> str:
        # The two axes that every layout names, and the others only where they do something.
        shown = [
            f"{axis} {size}"
            for axis, size in zip(AXES, self.shape, strict=True)
            if size > 1 or axis in (PIPELINE, TENSOR)
        ]
        return " x ".join(shown)


def make_mesh(spec: MeshSpec, devices: Sequence[Device]) -> jax.sharding.Mesh:
    """Mesh over exactly `spec.size` devices, in the order given.

    Layout: pipeline-major, then data, expert, tensor, so that the devices of one stage, which
    talk most, are neighbours. All axes are `AxisType.Auto`.
    Raises: ValueError for another number of devices, or a device given twice.
    """
    if len(devices) != spec.size or len(set(devices)) != spec.size:
        raise ValueError(
            f"mesh {spec}: expected {spec.size} distinct devices, got {len(devices)} "
            f"({len(set(devices))} distinct)"
        )
    grid = np.empty(spec.size, dtype=object)
    grid[:] = list(devices)
    axis_types = (jax.sharding.AxisType.Auto,) * len(AXES)
    return jax.sharding.Mesh(grid.reshape(spec.shape), AXES, axis_types=axis_types)


def split_devices(
    specs: Sequence[MeshSpec], devices: Sequence[Device] | None = None
) -> list[list[Device]]:
    """Disjoint device lists, one per spec, taken in order from `devices` (all that JAX has).

    Raises: ValueError when there are too few devices, with the ways to get more.
    """
    available = list(jax.devices() if devices is None else devices)
    if len(set(available)) != len(available):
        raise ValueError(f"devices: expected each once, got {available}")
    needed = sum(spec.size for spec in specs)
    if needed > len(available):
        wanted = " + ".join(f"({spec})" for spec in specs)
        raise ValueError(
            f"{wanted}: needs {needed} devices, {len(available)} present. For virtual CPU devices "
            f'call jax.config.update("jax_num_cpu_devices", {needed}) before JAX is first used, '
            f"or pass --devices {needed} on the command line"
        )
    lists = []
    start = 0
    for spec in specs:
        lists.append(available[start : start + spec.size])
        start += spec.size
    return lists


def replicate(tree: Any, mesh: jax.sharding.Mesh) -> Any:
    """Pytree with a whole copy of every array on every device of a mesh.

    Asynchronous for host arrays and for arrays that are whole on their devices.
    """
    return jax.device_put(tree, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
