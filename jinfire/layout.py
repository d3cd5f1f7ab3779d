"""How a model's logical tensors lie on one mesh: stages, slots, shards and padding.

Weights of the layers that share a *slot* (their position within a stage) are one array with a
leading stage axis that is sharded over pipeline, so every stage runs the same program. A slot is
of one kind on all stages; a stage without a layer for it holds zeros there, and a decoder layer of
zeros is the identity.
"""

import dataclasses
import functools
import itertools
import math

import numpy as np
from jax.sharding import PartitionSpec

from jinfire.config import LayerSpec, ModelConfig
from jinfire.models.spec import ParamSpec, Skeleton, abstract_tree, skeleton
from jinfire.unweight.policy import DECOMPRESSED, Choice, UnweightPolicy
from sharding import (
    EXPERT,
    PIPELINE,
    TENSOR,
    MeshSpec,
    check_experts,
    check_tensor,
    partition_spec,
    stage_counts,
)

# Whole experts are split over the expert axis and their insides over tensor; everything else is
# split over both together, as if all devices of a stage were one tensor axis.
RULES = {
    "stage": PIPELINE,
    "vocab": (PIPELINE, EXPERT, TENSOR),
    "heads": (EXPERT, TENSOR),
    "kv_heads": (EXPERT, TENSOR),
    "mlp": (EXPERT, TENSOR),
    "experts": EXPERT,
    "expert_mlp": TENSOR,
    "embed": None,
    "norm": None,
}


INT4_GROUP = 32
"""Columns of an int4 weight that share a scale, and stay together."""

UNWEIGHT_TILE = 64
"""Columns of a compressed weight that are coded together, and stay together; and rows of a tile."""

# What each device holds of a compressed weight is coded on its own, in arrays of one shape.
CODED_SPEC = PartitionSpec(PIPELINE, EXPERT, TENSOR)

# Projections whose weights attention takes whole, for products of its own.
OPERANDS = ("attention.latent_up",)


def projection_of(name: str) -> str:
    """What policies call a tensor: `layers.3.mlp.gate.weight` is `mlp.gate`."""
    parts = name.split(".")[:-1]
    return ".".join(parts[2:] if parts[0] == "layers" else parts)


def _mesh_axes(axis: str | None) -> tuple[str, ...]:
    rule = RULES[axis] if axis is not None else None
    return () if rule is None else (rule,) if isinstance(rule, str) else rule


@dataclasses.dataclass(frozen=True)
class PhysicalTensor:
    """One device array: which logical tensors it holds, by stage, and how it is sharded.

    Shapes: `shape` is that of the global array, with a leading stage axis when `stacked`.
    `sources` is the logical name per stage (None for a padded slot), one entry when not stacked.
    `coded` is how a compressed one is held and multiplied, `why_dense` why one that could have
    been compressed is not. The other fields are those of the weight that is held so.
    """

    shape: tuple[int, ...]
    spec: PartitionSpec
    sources: tuple[str | None, ...]
    stacked: bool
    axes: tuple[str | None, ...]
    coded: Choice | None = None
    why_dense: str | None = None

    @property
    def device_spec(self) -> PartitionSpec:
        """How the arrays that hold it are sharded."""
        return self.spec if self.coded is None else CODED_SPEC


@dataclasses.dataclass(frozen=True)
class StageLayout:
    """A model on a mesh of a given shape, its weights compressed as `unweight` says.

    Raises: ValueError when heads, MLP width or layers cannot be split that way, with the sizes
    that can.
    """

    config: ModelConfig
    mesh_spec: MeshSpec
    unweight: UnweightPolicy | None = None

    def __post_init__(self) -> None:
        config, spec = self.config, self.mesh_spec
        kinds = {layer.mlp for layer in config.layers}
        widths = {"mlp_width": config.mlp_width} if "dense" in kinds else {}
        experts = config.experts
        if experts is not None and experts.shared_width:
            widths["shared_width"] = experts.shared_width
        check_tensor(config.num_heads, config.cached_heads, spec.tensor, spec.expert, **widths)
        if experts is not None:
            unit = INT4_GROUP if experts.int4 else 1
            check_experts(experts.count, spec.expert, experts.width, spec.tensor, unit)
        elif spec.expert > 1:
            raise ValueError(
                f"expert axis: expected 1 for the dense model family {config.family!r}, "
                f"got {spec.expert}"
            )
        stage_counts(config.num_layers, spec.pipeline)

    @functools.cached_property
    def counts(self) -> tuple[int, ...]:
        """Layers per stage."""
        return stage_counts(self.config.num_layers, self.mesh_spec.pipeline)

    @functools.cached_property
    def _slots(self) -> tuple[tuple[LayerSpec, tuple[int | None, ...]], ...]:
        """Kind of every slot, and the layer in it by stage.

        The kinds are a sequence of which every stage's layers are a part, in their order. Each
        slot is what the stage with the most layers left needs next, and all stages that need the
        same fill it. Stages of one pattern thus get one slot per layer.
        """
        starts = itertools.accumulate(self.counts, initial=0)
        left = [list(range(*ends)) for ends in itertools.pairwise(starts)]
        slots = []
        while any(left):
            kind = self.config.layers[max(left, key=len)[0]]
            fits = [bool(layers) and self.config.layers[layers[0]] == kind for layers in left]
            placed = [
                layers.pop(0) if fit else None for layers, fit in zip(left, fits, strict=True)
            ]
            slots.append((kind, tuple(placed)))
        return tuple(slots)

    @property
    def slots(self) -> int:
        """Layers that every stage's program runs."""
        return len(self._slots)

    @property
    def padded_slots(self) -> int:
        """Slots without a layer, over all stages."""
        return self.slots * self.mesh_spec.pipeline - self.config.num_layers

    def layer_at(self, stage: int, slot: int) -> int | None:
        """Model layer in a stage's slot, None where the slot only pads."""
        return self._slots[slot][1][stage]

    @property
    def coded_projections(self) -> dict[str, Choice]:
        """Projections that are compressed, and how."""
        return {
            projection_of(name): tensor.coded
            for name, tensor in self.tensors.items()
            if tensor.coded is not None
        }

    @property
    def slot_specs(self) -> tuple[LayerSpec, ...]:
        return tuple(kind for kind, _ in self._slots)

    @property
    def skeleton(self) -> Skeleton:
        """The module that one stage's program runs."""
        return skeleton(self.config, self.slot_specs)

    @property
    def shards(self) -> int:
        """Devices of a stage, over which everything but the experts is split."""
        return self.mesh_spec.expert * self.mesh_spec.tensor

    @property
    def kv_heads(self) -> int:
        """KV heads as stored: replicated up to one per device of a stage."""
        return max(self.config.cached_heads, self.shards)

    @property
    def padded_vocab(self) -> int:
        """Rows of the vocabulary on all devices: whole tiles on each, where it has many.

        Whether weights are compressed or not: a product of another width has other last bits.
        """
        parts = self.mesh_spec.pipeline * self.shards
        if self.config.vocab_size >= parts * UNWEIGHT_TILE**2:
            parts *= UNWEIGHT_TILE
        return -(-self.config.vocab_size // parts) * parts

    @functools.cached_property
    def tensors(self) -> dict[str, PhysicalTensor]:
        """Every device array by slot name."""
        logical = abstract_tree(self.config)
        result = {}
        for name in self.skeleton.names:
            if name.startswith("layers."):
                _, slot, rest = name.split(".", 2)
                layers = [self.layer_at(s, int(slot)) for s in range(self.mesh_spec.pipeline)]
                sources = tuple(None if i is None else f"layers.{i}.{rest}" for i in layers)
                spec = logical[next(source for source in sources if source)]
                shape, axes = (len(sources), *self.padded_shape(spec)), ("stage", *spec.axes)
            else:
                spec, sources = logical[name], (name,)
                shape, axes = self.padded_shape(spec), spec.axes
            result[name] = PhysicalTensor(
                shape,
                partition_spec(axes, RULES),
                sources,
                len(shape) > len(spec.shape),
                axes,
                *self._coded(name, spec),
            )
        return result

    def _coded(self, name: str, spec: ParamSpec) -> tuple[Choice | None, str | None]:
        """How a weight is compressed; None and why not, where it could have been."""
        projection = projection_of(name)
        if self.unweight is None or len(spec.shape) < 2:
            return None, None
        if spec.dtype is not None:
            return None, f"stored as {spec.dtype}"
        if projection.endswith("router"):
            return None, "multiplied in float32"
        choice = self.unweight.choice(projection)
        if choice.is_dense:
            return None, "by the policy"
        columns = self.shard_shape(spec)[-1]
        if columns % UNWEIGHT_TILE:
            return None, f"{columns} columns on a device, not a multiple of {UNWEIGHT_TILE}"
        if projection in OPERANDS:
            return Choice.always(DECOMPRESSED[choice.form]), None
        return choice, None

    def shard_shape(self, spec: ParamSpec) -> tuple[int, ...]:
        """What a device holds of a logical tensor."""
        sizes = dataclasses.asdict(self.mesh_spec)
        parts = (_mesh_axes(axis) for axis in spec.axes)
        return tuple(
            size // math.prod(sizes[axis] for axis in split)
            for size, split in zip(self.padded_shape(spec), parts, strict=True)
        )

    def padded_shape(self, spec: ParamSpec) -> tuple[int, ...]:
        """Shape of a logical tensor with the padding and the copies that splitting it needs."""
        sizes = {
            "vocab": self.padded_vocab,
            "kv_heads": self.kv_heads * self.config.head_dim,
        }
        return tuple(
            sizes.get(axis or "", size) for axis, size in zip(spec.axes, spec.shape, strict=True)
        )

    def logical_slice(self, axis: str | None, index: slice, size: int) -> slice:
        """The part of a logical axis that a shard's part of the physical axis holds.

        A slice past the logical end (padded vocabulary) comes back shorter or empty. With
        replicated KV heads one shard holds one head, and neighbours hold the same one.
        """
        start, stop, _ = index.indices(size)
        if axis == "vocab":
            end = self.config.vocab_size
            return slice(min(start, end), min(stop, end))
        if axis == "kv_heads" and self.kv_heads != self.config.num_kv_heads:
            head_dim = self.config.head_dim
            copies = self.kv_heads // self.config.num_kv_heads
            first, last = start // head_dim // copies, (stop // head_dim - 1) // copies
            if (stop - start) // head_dim != last - first + 1:
                raise ValueError(
                    f"kv heads: expected shards of one head of {head_dim}, got rows {start}:{stop}"
                )
            return slice(first * head_dim, (last + 1) * head_dim)
        return slice(start, stop)

    def fit(self, block: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """A block padded with zeros up to a shard's shape."""
        if block.shape == shape:
            return block
        padding = [(0, want - have) for want, have in zip(shape, block.shape, strict=True)]
        return np.pad(block, padding)
