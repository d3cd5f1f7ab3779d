"""Moves per-layer blocks between two meshes that split layers and heads differently.

`jax.device_put` from one mesh to another is asynchronous and stays on the devices only while both
sides cut an array alike. Otherwise it fetches the array to the host, which blocks the caller until
the program that produces it has finished. A plan therefore cuts the data, on the devices that have
it, into units which are whole on both sides, copies each unit, and joins them where they arrive.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from sharding.mesh import AXES, DATA, EXPERT, PIPELINE, TENSOR, Device
from sharding.pipeline import Cuts, Placed, align_cuts


@dataclasses.dataclass(frozen=True)
class Side:
    """One end of a transfer: a mesh, the number of kv heads, and which layer lies where on it.

    Layout: a *block* holds the same interval of slots on every stage, as one array
    [stages@pipeline, slots, ..., heads@(expert, tensor), ...]. With more devices in a stage than kv
    heads, each head is kept on shards / num_kv_heads neighbours: the array has
    max(num_kv_heads, shards) heads, and head p is the model's head p * num_kv_heads // shards.
    A `whole` block is not cut: every device of a stage has all num_kv_heads heads.
    What is cut may be another dimension than heads, as long as it is the same on both sides.
    Raises: ValueError for a data axis, heads that do not divide, or layers of other stages.
    """

    mesh: jax.sharding.Mesh
    num_kv_heads: int
    layers: Placed
    whole: bool = False

    def __post_init__(self) -> None:
        if self.mesh.axis_names != AXES or self.mesh.shape[DATA] != 1:
            raise ValueError(
                f"transfer: expected a mesh with axes {AXES}, of which {DATA} has size 1; "
                f"got {dict(self.mesh.shape)}"
            )
        divides = self.num_kv_heads % self.shards == 0 or self.shards % self.num_kv_heads == 0
        if not self.whole and not divides:
            raise ValueError(
                f"transfer: {self.num_kv_heads} kv heads cannot be split over the {self.shards} "
                "devices of a stage"
            )
        if len(self.layers) != self.stages or len(set(map(len, self.layers))) != 1:
            raise ValueError(
                f"transfer: expected the layers of {self.stages} stages, in as many slots on each, "
                f"got {self.layers}"
            )

    @property
    def stages(self) -> int:
        return self.mesh.shape[PIPELINE]

    @property
    def shards(self) -> int:
        """Number of devices of a stage."""
        return self.mesh.shape[EXPERT] * self.mesh.shape[TENSOR]

    @property
    def head_shards(self) -> int:
        """Number of different head ranges on the devices of a stage."""
        return 1 if self.whole else min(self.num_kv_heads, self.shards)

    @property
    def replicas(self) -> int:
        """Number of devices of a stage that keep the same heads."""
        return self.shards // self.head_shards

    @property
    def physical_heads(self) -> int:
        """Size of the heads dimension of a block."""
        return self.num_kv_heads if self.whole else max(self.num_kv_heads, self.shards)

    @property
    def cuts_of_block(self) -> int:
        """Parts of the heads dimension of a block, one for each device that has its own."""
        return 1 if self.whole else self.shards

    def block_sharding(self, heads_dim: int) -> NamedSharding:
        """Sharding of a block whose dimension `heads_dim` holds the heads."""
        cut = () if self.whole else (*[None] * (heads_dim - 1), (EXPERT, TENSOR))
        return NamedSharding(self.mesh, PartitionSpec(PIPELINE, *cut))


@dataclasses.dataclass(frozen=True, eq=False)
class InFlight:
    """Blocks on their way to the target mesh; `bytes` counts each of the model's values once."""

    bytes: int
    _route: "_Route"
    _copies: list[Any]

    def is_ready(self) -> bool:
        """Whether everything has arrived, so that a program given the result starts at once."""
        return all(copy.is_ready() for copy in self._copies)

    def receive(self) -> list[Any]:
        """Block pytrees on the target mesh, one per target cut.

        Empty slots of a stage are zeros, which several results share: do not donate the blocks to
        a program.
        """
        return self._route.assemble(self._copies)


@dataclasses.dataclass(frozen=True, eq=False)
class TransferPlan:
    """How blocks get from one mesh to another.

    `source_cuts` are the intervals of slots, one block each, that `send` takes; `target_cuts` those
    that `InFlight.receive` gives. On each stage an interval is full or empty; where it is empty,
    its part is ignored on the source and zero on the target.
    """

    source: Side
    target: Side
    source_cuts: Cuts
    target_cuts: Cuts
    # Runs of layers within one stage on both sides: (source cut, source stage, target cut, target
    # stage).
    pieces: tuple[tuple[int, int, int, int], ...]
    _routes: dict[Any, "_Route"] = dataclasses.field(default_factory=dict, repr=False)
    _padding: dict[Any, jax.Array] = dataclasses.field(default_factory=dict, repr=False)

    @classmethod
    def make(cls, source: Side, target: Side) -> Self:
        """Plan for the layers that both sides hold.

        Raises: ValueError for different numbers of kv heads, or different layers.
        """
        if source.num_kv_heads != target.num_kv_heads:
            raise ValueError(
                f"transfer: expected as many kv heads on both sides, got {source.num_kv_heads} "
                f"and {target.num_kv_heads}"
            )
        cuts, pieces = align_cuts(source.layers, target.layers)
        return cls(source, target, *cuts, pieces)

    @property
    def num_layers(self) -> int:
        return sum(stop - start for start, stop in (self.source_cuts[p[0]] for p in self.pieces))

    def send(self, blocks: Sequence[Any], heads_dim: int) -> InFlight:
        """Start copying blocks, one pytree of arrays per source cut; returns without waiting.

        `heads_dim` is the index of the heads dimension in the block arrays (at least 2). What
        depends on shapes is worked out, and compiled, at the first send of those shapes.
        Donates: nothing.
        Raises: ValueError for blocks of another structure, shape or sharding than planned.
        """
        leaves, treedef = jax.tree.flatten(blocks)
        key = (treedef, heads_dim, tuple((leaf.shape, leaf.dtype) for leaf in leaves))
        route = self._routes.get(key)
        if route is None:
            route = self._routes[key] = _Route(self, treedef, heads_dim, leaves)
        return InFlight(route.bytes, route, route.copy(leaves))

    def padding(self, shape: tuple[int, ...], dtype: np.dtype, device: Device) -> jax.Array:
        """Zeros for the empty slots of a stage, made once."""
        key = (shape, dtype, device)
        if key not in self._padding:
            self._padding[key] = jax.device_put(np.zeros(shape, dtype), device)
        return self._padding[key]


class _Route:
    """The copies of one plan for blocks of one structure, as tables ready to replay.

    A *unit* is the largest run of heads that lies on one device on both sides. Arrays are listed
    by (cut, leaf, part), where a part is one of the units of every device.
    """

    def __init__(self, plan: TransferPlan, treedef: Any, heads_dim: int, leaves: list[jax.Array]):
        source, target = plan.source, plan.target
        trees = treedef.children()
        if len(trees) != len(plan.source_cuts) or len(set(trees)) != 1:
            raise ValueError(
                f"transfer: expected {len(plan.source_cuts)} blocks of one structure, one per "
                f"source cut {plan.source_cuts}, got {treedef}"
            )
        self._tree = trees[0]
        self._num_leaves = count = trees[0].num_leaves
        first = leaves[:count]
        for number, leaf in enumerate(leaves):
            start, stop = plan.source_cuts[number // count]
            like = first[number % count]
            expected = (source.stages, stop - start, source.physical_heads)
            fits = 2 <= heads_dim < leaf.ndim and leaf.dtype == like.dtype
            fits = fits and leaf.shape[2:] == like.shape[2:]
            if not fits or expected != (*leaf.shape[:2], leaf.shape[heads_dim]):
                raise ValueError(
                    f"transfer: expected a block of {expected[0]} stages, {expected[1]} slots and "
                    f"{expected[2]} heads in dimension {heads_dim}, all else like {like.shape} "
                    f"{like.dtype}; got {leaf.shape} {leaf.dtype}"
                )
        self._source_sharding = source.block_sharding(heads_dim)
        self._target_sharding = target.block_sharding(heads_dim)

        per_head = [
            math.prod(x.shape[2:]) // source.physical_heads * x.dtype.itemsize for x in first
        ]
        self.bytes = plan.num_layers * source.num_kv_heads * sum(per_head)

        # Where both sides cut everything alike, and no slot is empty, blocks go as they are.
        alike = all(
            getattr(source, name) == getattr(target, name) for name in ("layers", "shards", "whole")
        )
        self._direct = alike and len(plan.pieces) == source.stages * len(plan.source_cuts)
        if self._direct:
            return

        units = math.lcm(source.head_shards, target.head_shards)
        out_of, into = units // source.head_shards, units // target.head_shards
        self._split = _program(_split, source, heads_dim, out_of) if out_of > 1 else None
        self._join = _program(_join, target, heads_dim, into) if into > 1 else None

        # Copy number of every unit on every target device, and where it comes from. The replicas
        # of a head on the source share the work of filling those on the target.
        target_devices = list(target.mesh.devices.flat)
        arrivals: dict[tuple[int, int, int, int], int] = {}
        self._picks: list[tuple[int, int]] = []
        self._devices: list[Device] = []
        for piece, leaf, unit, replica in itertools.product(
            plan.pieces, range(count), range(units), range(target.replicas)
        ):
            source_cut, source_stage, target_cut, target_stage = piece
            source_shard, source_part = divmod(unit, out_of)
            target_shard, target_part = divmod(unit, into)
            sender = source.shards * source_stage + source.replicas * source_shard
            receiver = target.shards * target_stage + target.replicas * target_shard + replica
            arrivals[target_cut, leaf, target_part, receiver] = len(self._picks)
            array = (source_cut * count + leaf) * out_of + source_part
            self._picks.append((array, sender + (unit + replica) % source.replicas))
            self._devices.append(target_devices[receiver])

        # Global shape and shards (a copy number, or zeros) of every array on the target.
        self._arrays: list[tuple[tuple[int, ...], list[int | jax.Array]]] = []
        for cut, leaf, part in itertools.product(
            range(len(plan.target_cuts)), range(count), range(into)
        ):
            start, stop = plan.target_cuts[cut]
            shape = [target.stages, stop - start, *first[leaf].shape[2:]]
            shape[heads_dim] = target.physical_heads // into
            local = [1, *shape[1:]]
            local[heads_dim] = shape[heads_dim] // target.cuts_of_block
            zeros = functools.partial(plan.padding, tuple(local), first[leaf].dtype)
            numbers = [arrivals.get((cut, leaf, part, n)) for n in range(len(target_devices))]
            shards = [
                zeros(device) if number is None else number
                for number, device in zip(numbers, target_devices, strict=True)
            ]
            self._arrays.append((tuple(shape), shards))

    def copy(self, leaves: list[jax.Array]) -> list[jax.Array]:
        """Issue the copies of blocks, given as leaves by (cut, leaf)."""
        expected = self._source_sharding
        for leaf in leaves:
            # `==` is the cheap test; the other knows that specs can differ in spelling.
            got = leaf.sharding
            if got != expected and not got.is_equivalent_to(expected, leaf.ndim):
                raise ValueError(
                    f"transfer: expected blocks with {expected}, got {got} for shape {leaf.shape}"
                )
        if self._direct:
            return jax.device_put(leaves, self._target_sharding)
        arrays = self._split(leaves) if self._split else leaves
        shards = [[shard.data for shard in array.addressable_shards] for array in arrays]
        return jax.device_put(
            [shards[array][position] for array, position in self._picks], self._devices
        )

    def assemble(self, copies: list[jax.Array]) -> list[Any]:
        """Blocks on the target mesh, one pytree per target cut, from the copies."""
        leaves = copies
        if not self._direct:
            leaves = [
                jax.make_array_from_single_device_arrays(
                    shape,
                    self._target_sharding,
                    [copies[shard] if isinstance(shard, int) else shard for shard in shards],
                )
                for shape, shards in self._arrays
            ]
            if self._join:
                leaves = self._join(leaves)
        step = self._num_leaves
        return [
            self._tree.unflatten(leaves[start : start + step])
            for start in range(0, len(leaves), step)
        ]


def _split(leaves: list[jax.Array], heads_dim: int, parts: int) -> list[jax.Array]:
    return [part for leaf in leaves for part in jnp.split(leaf, parts, axis=heads_dim)]


def _join(leaves: list[jax.Array], heads_dim: int, parts: int) -> list[jax.Array]:
    return [jnp.concatenate(group, axis=heads_dim) for group in itertools.batched(leaves, parts)]


def _program(function: Any, side: Side, heads_dim: int, parts: int) -> Any:
    """Program that splits or joins the heads on each device by themselves."""
    spec = side.block_sharding(heads_dim).spec
    local = functools.partial(function, heads_dim=heads_dim, parts=parts)
    return jax.jit(jax.shard_map(local, mesh=side.mesh, in_specs=spec, out_specs=spec))
