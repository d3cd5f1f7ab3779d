"""Bytes that a model takes on every device of a layout, from shapes alone.

All devices of a mesh hold the same number of bytes: stages run one program, so a stage with fewer
layers than others holds zeros in their place, and what is not split is whole on every device.
"""

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Self

import jax.numpy as jnp

from jinfire.config import EngineConfig, LayerSpec, ModelConfig
from jinfire.kvcache.page_set import FULL, kv_groups
from jinfire.layout import RULES, UNWEIGHT_TILE, StageLayout
from jinfire.models.spec import ParamSpec, skeleton
from jinfire.planner.unweight import CODES, DENSE, DENSE_KINDS, SCALES, WEIGHTS, Unweight
from jinfire.programs.decode import decode_microbatches
from jinfire.weights import parse_dtype
from pallas_kernels import INT4_PER_WORD

# What weights are counted by, in the order of their first use.
KINDS = (
    *("embedding", "attention", "dense_mlp", "router"),
    *("routed_experts", "shared_experts", "norms"),
)


@dataclasses.dataclass(frozen=True)
class Workload:
    """What a mesh is to hold and run at a time.

    `rows` decode at once, each of up to `context` tokens; `steps` tokens of a row are made in one
    dispatch. A prefill microbatch has `prefill_rows` rows of `chunk` tokens.
    """

    rows: int = 8
    context: int = 8192
    prefill_rows: int = 1
    chunk: int = 1024
    steps: int = 8
    page_size: int = 64

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name}: expected an integer >= 1, got {value!r}")

    @classmethod
    def of(cls, config: ModelConfig, **fields: int) -> Self:
        """A workload of the model, whose context is no more than the model has if not given."""
        return cls(**{"context": min(cls.context, config.max_position)} | fields)

    def check(self, config: ModelConfig) -> None:
        """Raises: ValueError for a context that the model does not have."""
        if self.context > config.max_position:
            raise ValueError(
                f"context: expected at most the model's {config.max_position} positions, "
                f"got {self.context}"
            )

    @property
    def engine(self) -> EngineConfig:
        """An engine that runs exactly this."""
        return EngineConfig(
            page_size=self.page_size,
            max_rows=self.rows,
            max_context=self.context,
            prefill_shapes=((self.prefill_rows, self.chunk),),
            decode_steps=self.steps,
        )


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One logical tensor of the model, and what a device of the layout holds of it.

    `layer` is None for those outside of layers; else the tensor is that of every layer of this
    kind. Units: elements as stored, so an int32 of 4-bit values counts once.
    """

    name: str
    spec: ParamSpec
    layer: LayerSpec | None
    device_elements: int

    @property
    def kind(self) -> str:
        return weight_kind(self.name)

    @property
    def coding(self) -> str | None:
        """The class of `jinfire.planner.unweight` that it may be coded as, None for none."""
        if self.name.endswith(".packed"):
            return CODES
        if ".experts." in self.name and self.name.endswith(".scale"):
            return SCALES
        own = self.spec.dtype is None and self.is_matrix and self.kind not in DENSE_KINDS
        return WEIGHTS if own else None

    @property
    def projection(self) -> str:
        """Its name without that of the parameter: `mlp.gate`."""
        return self.name.rpartition(".")[0]

    @property
    def values(self) -> float:
        """Parameters in a stored element."""
        # Scales are what 4-bit values are multiplied by, and no parameters.
        return {CODES: INT4_PER_WORD, SCALES: 0}.get(self.coding or "", 1)

    @property
    def is_matrix(self) -> bool:
        return len(self.spec.shape) > 1

    def itemsize(self, dtype: str) -> int:
        return jnp.dtype(self.spec.dtype or dtype).itemsize


def weight_kind(name: str) -> str:
    """Which of `KINDS` a tensor is, by its logical name."""
    parts = name.split(".")
    if parts[0] in ("embed", "head"):
        return "embedding"
    if "mlp" in parts:
        for part, kind in (
            ("experts", "routed_experts"),
            ("shared", "shared_experts"),
            ("router", "router"),
        ):
            if part in parts:
                return kind
        return "dense_mlp"
    return "norms" if parts[-1] == "scale" else "attention"


@dataclasses.dataclass(frozen=True)
class Footprint:
    """A model of one data type on one layout, its weights in a form of Unweight or dense.

    Units: bytes of one device, unless a name says otherwise.
    """

    layout: StageLayout
    dtype: str = "bfloat16"
    unweight: Unweight = DENSE

    @property
    def config(self) -> ModelConfig:
        return self.layout.config

    @property
    def itemsize(self) -> int:
        return parse_dtype(self.dtype).itemsize

    @functools.cached_property
    def tensors(self) -> tuple[Tensor, ...]:
        """Every different tensor, those of a kind of layer once."""
        kinds = tuple(dict.fromkeys(self.config.layers))
        found = []
        # A stack of one layer of each kind: tracing all of them would take most of the time.
        for name, spec in skeleton(self.config, kinds).specs.items():
            layer = None
            if name.startswith("layers."):
                _, index, name = name.split(".", 2)
                layer = kinds[int(index)]
            found.append(Tensor(name, spec, layer, self._device_elements(spec)))
        return tuple(found)

    def _device_elements(self, spec: ParamSpec) -> int:
        sizes = dataclasses.asdict(self.layout.mesh_spec)
        count = 1
        for axis, size in zip(spec.axes, self.layout.padded_shape(spec), strict=True):
            rule = RULES[axis] if axis is not None else None
            split = () if rule is None else (rule,) if isinstance(rule, str) else rule
            count *= size // math.prod(sizes[mesh_axis] for mesh_axis in split)
        return count

    def held(self) -> Iterator[tuple[Tensor, int]]:
        """Every tensor and how many of it a device has room for."""
        slots = collections.Counter(self.layout.slot_specs)
        for tensor in self.tensors:
            yield tensor, 1 if tensor.layer is None else slots[tensor.layer]

    # -- weights

    @functools.cached_property
    def parameters(self) -> dict[str, int]:
        """Parameters of the whole model by kind; tied embeddings count once."""
        return self._by_kind(lambda tensor: tensor.spec.size * tensor.values)

    @functools.cached_property
    def model_bytes(self) -> dict[str, int]:
        """Bytes of the whole model by kind, each weight once."""
        return self._by_kind(
            lambda tensor: tensor.spec.size * tensor.itemsize(self.dtype) * self._share(tensor)
        )

    def _coding(self, tensor: Tensor) -> str:
        """The class that a tensor is coded as on this layout, "dense" for none.

        Rows of a device's part are whole rows of the format, or it stays dense.
        """
        is_cut = self.layout.shard_shape(tensor.spec)[-1] % UNWEIGHT_TILE
        if tensor.coding is None or (tensor.coding == WEIGHTS and is_cut):
            return "dense"
        return tensor.coding

    def _share(self, tensor: Tensor) -> float:
        """Bytes of a tensor over those that it has as a dense one."""
        return self.unweight.share(self._coding(tensor), tensor.itemsize(self.dtype))

    def _by_kind(self, size: Callable[[Tensor], float]) -> dict[str, int]:
        layers = collections.Counter(self.config.layers)
        result = dict.fromkeys(KINDS, 0)
        for tensor in self.tensors:
            count = 1 if tensor.layer is None else layers[tensor.layer]
            result[tensor.kind] += int(size(tensor)) * count
        return result

    @functools.cached_property
    def weights(self) -> dict[str, int]:
        """Weights by kind, with the zeros of padded slots and vocabulary and all copies."""
        return self._held_bytes(lambda tensor: tensor.kind, KINDS, self._share)

    @functools.cached_property
    def weights_by_coding(self) -> dict[str, dict[str, int]]:
        """Plain and coded bytes by how tensors are coded; "dense" stays as it is."""
        kinds = (WEIGHTS, CODES, SCALES, "dense")
        by_coding = functools.partial(self._held_bytes, self._coding, kinds)
        plain, coded = by_coding(lambda tensor: 1.0), by_coding(self._share)
        return {kind: {"plain": plain[kind], "coded": coded[kind]} for kind in kinds if plain[kind]}

    def _held_bytes(
        self,
        key: Callable[[Tensor], str],
        keys: tuple[str, ...],
        share: Callable[[Tensor], float],
    ) -> dict[str, int]:
        result = dict.fromkeys(keys, 0)
        for tensor, count in self.held():
            result[key(tensor)] += count * round(self._plain_bytes(tensor) * share(tensor))
        return result

    def _plain_bytes(self, tensor: Tensor) -> int:
        return tensor.device_elements * tensor.itemsize(self.dtype)

    def moved_bytes(self, tensor: Tensor) -> float:
        """What one use of a tensor reads and writes, decoding included."""
        itemsize = tensor.itemsize(self.dtype)
        share = self.unweight.moved_share(self._coding(tensor), tensor.projection, itemsize)
        return self._plain_bytes(tensor) * share

    def _decoded_bytes(self, tensor: Tensor) -> int:
        """What decoding a tensor writes to memory."""
        share = self.unweight.temp_share(self._coding(tensor), tensor.projection)
        return round(self._plain_bytes(tensor) * share)

    @functools.cached_property
    def decoding_temp(self) -> int:
        """What decoding writes to memory, one tensor at a time: of the one that needs most."""
        return max(map(self._decoded_bytes, self.tensors))

    # -- keys and values

    @property
    def slot_kv_bytes(self) -> int:
        """What one slot of a page takes in one layer, copied heads and latents included."""
        return self.layout.device_kv_heads * sum(self.config.kv_widths) * self.itemsize

    @functools.cached_property
    def kv_bytes_per_token(self) -> dict[str, float]:
        """Keys and values of one token by group; of split latents a device's share."""
        parts = self.layout.slot_parts
        return {
            group: size if parts == 1 else size / parts for group, size in self._slot_bytes.items()
        }

    @functools.cached_property
    def _slot_bytes(self) -> dict[str, int]:
        """What one slot of a page takes in all layers of a group."""
        layers = collections.Counter(spec.kv_group for spec in self.layout.slot_specs)
        return {group: layers[group] * self.slot_kv_bytes for group in self.config.kv_groups}

    def page_bytes(self, load: Workload) -> dict[str, int]:
        """A page by group, or the part of it that a device holds."""
        slots = self.layout.page_slots(load.page_size)
        return {group: slots * size for group, size in self._slot_bytes.items()}

    def pool_pages(self, load: Workload) -> dict[str, int]:
        """Pages of each group for all rows, null pages included, as an engine makes its pools."""
        return {group.name: group.pool_pages for group in kv_groups(self.config, load.engine)}

    def kv_bytes(self, load: Workload) -> int:
        """Pools in which every row of the workload holds its whole context."""
        page_bytes = self.page_bytes(load)
        return sum(pages * page_bytes[group] for group, pages in self.pool_pages(load).items())

    def kv_tokens(self, free_bytes: int, load: Workload) -> int:
        """Tokens that `free_bytes` of a device hold over all rows.

        Layers that keep an attention chunk cost the same for every row however long it is; what
        is left for the others sets the number.
        """
        page_bytes = self.page_bytes(load)
        pages = self.pool_pages(load)
        fixed = sum(pages[group] * size for group, size in page_bytes.items() if group != FULL)
        if FULL not in pages:  # nothing grows with the context
            return load.rows * load.context if fixed <= free_bytes else 0
        left = (free_bytes - fixed) // page_bytes[FULL] - 1  # less the null page
        return max(0, left) * load.page_size

    # -- activations

    def prefill_temp(self, load: Workload) -> int:
        """Activations of a prefill dispatch."""
        tokens = load.prefill_rows * load.chunk
        stages = self.layout.mesh_spec.pipeline
        embedded = stages * tokens * self.config.width * self.itemsize
        head_rows = stages * load.prefill_rows
        # Of split latents, those of a row's whole table are gathered.
        table = load.engine.table_width * load.page_size
        gathered = table * self.slot_kv_bytes if self.layout.splits_latents else 0
        work = embedded + gathered + self._layer_temp(tokens) + self._sampling_temp(head_rows)
        return work + self.decoding_temp

    def decode_temp(self, load: Workload) -> int:
        """Activations of a decode dispatch."""
        rows = microbatch_rows(self.layout.mesh_spec.pipeline, load.rows)
        work = self._layer_temp(rows) + self._sampling_temp(rows) + rows * self.exchanged_bytes
        return work + self.decoding_temp

    @property
    def exchanged_bytes(self) -> int:
        """What a token's queries of all heads are, and the results with their float32 sums.

        Those of a layer whose latents are split: a device has them for its part of the latents.
        """
        latent = self.config.latent
        if latent is None or not self.layout.splits_latents:
            return 0
        return self.config.num_heads * ((2 * latent.rank + latent.rope_dim) * self.itemsize + 4)

    def _layer_temp(self, tokens: int) -> int:
        """The residual stream with what a layer makes of it, at the widest layer."""
        config, shards = self.config, self.layout.shards
        latent = config.latent
        heads = config.num_heads // shards
        if latent is None:
            attention = heads * config.head_dim * 2
        else:
            attention = heads * (config.head_dim + latent.rank + latent.rope_dim + latent.value_dim)
        widths = []
        if any(layer.mlp == "dense" for layer in config.layers):
            widths.append(2 * config.mlp_width // shards)
        experts = config.experts
        if experts is not None:
            # Tokens are copied for each of their experts, and come back in float32.
            inside = 2 * experts.width // self.layout.mesh_spec.tensor
            widths.append(experts.per_token * (config.width * 3 + inside))
        return tokens * (3 * config.width + max(attention, *widths)) * self.itemsize

    def _sampling_temp(self, rows: int) -> int:
        """Logits of the whole vocabulary in float32, and what sampling makes of them."""
        return int(6.5 * rows * self.config.vocab_size * 4)


def microbatch_rows(stages: int, rows: int) -> int:
    """Rows of a decode microbatch."""
    return rows // decode_microbatches(stages, rows)
