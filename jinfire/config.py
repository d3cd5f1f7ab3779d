"""Frozen configuration: what a model is, where it runs, how the engine behaves."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Self

import sharding
from jinfire.checks import as_flag, convert_field, integer_in, number_where


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding.

    `scaling` is None or "llama3", whose four numbers are those of the Hugging Face config.
    Source: Llama 3.1 model card; transformers `ROPE_INIT_FUNCTIONS`.
    """

    theta: float = 10_000.0
    scaling: str | None = None
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """What kind of layer one position of the stack holds.

    `kv_group` names the page pool that the layer's keys and values live in; layers that keep the
    same tokens share a group.
    """

    attention: str = "causal"
    mlp: str = "dense"
    kv_group: str = "full"


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """One decoder-only model; the layer pattern is data."""

    family: str
    vocab_size: int
    width: int
    mlp_width: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[LayerSpec, ...]
    norm_eps: float
    rope: RopeConfig
    tie_embeddings: bool
    qk_norm: bool
    max_position: int
    eos_ids: frozenset[int] = frozenset()
    bos_id: int | None = None

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def kv_groups(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(layer.kv_group for layer in self.layers))


Layout = Sequence[int]


@dataclasses.dataclass(frozen=True)
class Placement:
    """Which mesh runs which phase.

    Layouts are (pipeline, tensor) or (pipeline, tensor, expert). `decode=None` is colocated: both
    phases share one mesh and one page pool, and the handoff is the identity.
    """

    prefill: sharding.MeshSpec
    decode: sharding.MeshSpec | None = None

    @classmethod
    def colocated(cls, layout: Layout = (1, 1)) -> Self:
        """Both phases on one mesh."""
        return cls(_mesh_spec(layout))

    @classmethod
    def disaggregated(cls, prefill: Layout, decode: Layout) -> Self:
        """Prefill and decode on disjoint meshes."""
        return cls(_mesh_spec(prefill), _mesh_spec(decode))

    @property
    def is_colocated(self) -> bool:
        return self.decode is None

    @property
    def decode_spec(self) -> sharding.MeshSpec:
        return self.decode or self.prefill

    @property
    def num_devices(self) -> int:
        return self.prefill.size + (self.decode.size if self.decode else 0)

    def __str__(self) -> str:
        if self.decode is None:
            return f"colocated {self.prefill}"
        return f"prefill {self.prefill} + decode {self.decode}"


def _mesh_spec(layout: Layout) -> sharding.MeshSpec:
    if isinstance(layout, sharding.MeshSpec):
        return layout
    try:
        sizes = _integers(layout)
        pipeline, tensor, expert = sizes if len(sizes) == 3 else (*sizes, 1)
    except (TypeError, ValueError):
        raise ValueError(
            "layout: expected (pipeline, tensor) or (pipeline, tensor, expert) of integers >= 1, "
            f"got {layout!r}"
        ) from None
    return sharding.MeshSpec(pipeline=pipeline, tensor=tensor, expert=expert)


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """How the engine batches, pages and dispatches.

    Units: `max_context` and the buckets are tokens, `num_pages` pages per pool (page 0, the null
    page, included). `num_pages=None` sizes each pool for `max_rows` requests of `max_context`.
    `prefill_shapes` are (rows, chunk) of one microbatch, tried smallest first; a prompt longer
    than the largest chunk is prefilled in several. `row_buckets` and `context_buckets` bound the
    number of compiled programs; a bucket above the maximum is dropped, the maximum added.
    `decode_steps` is J, the decode steps per dispatch. `microbatches` None is one per stage.
    A request whose pages have not reached the decode mesh `transfer_timeout_s` after its prefill
    fails alone.
    """

    page_size: int = 16
    max_rows: int = 8
    max_context: int = 1024
    num_pages: int | None = None
    prefill_shapes: tuple[tuple[int, int], ...] = ((1, 32), (4, 32), (1, 128), (1, 512))
    row_buckets: tuple[int, ...] = (1, 8, 32, 64, 128, 256)
    context_buckets: tuple[int, ...] = (256, 1024, 4096, 16384, 65536)
    decode_steps: int = 4
    microbatches: int | None = None
    prefix_caching: bool = True
    transfer_timeout_s: float = 120.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("page_size", "max_rows", "max_context", "decode_steps"):
            convert_field(self, name, "an integer >= 1", integer_in(1))
        convert_field(self, "seed", "an integer >= 0", integer_in(0))
        if self.num_pages is not None:
            convert_field(self, "num_pages", "None or an integer >= 2", integer_in(2))
        if self.microbatches is not None:
            convert_field(self, "microbatches", "None or an integer >= 1", integer_in(1))
        for name in ("row_buckets", "context_buckets"):
            convert_field(self, name, "a list of integers >= 1", _integers)
        expected = "at least one (rows, chunk), both integers >= 1"
        convert_field(self, "prefill_shapes", expected, _shapes)
        convert_field(self, "prefix_caching", "True or False", as_flag)
        seconds = number_where(lambda value: value > 0)
        convert_field(self, "transfer_timeout_s", "a number of seconds > 0", seconds)

    def fitted(self, max_position: int) -> Self:
        """This config with `max_context` within what a model was made for."""
        return dataclasses.replace(self, max_context=min(self.max_context, max_position))

    @property
    def table_width(self) -> int:
        """Page-table width W: columns that hold `max_context` tokens."""
        return -(-self.max_context // self.page_size)

    @property
    def pool_pages(self) -> int:
        return self.num_pages or self.max_rows * self.table_width + 1

    def decode_rows(self) -> tuple[int, ...]:
        return _buckets(self.row_buckets, self.max_rows)

    def context_widths(self) -> tuple[int, ...]:
        """Bucketed page-table widths, in pages."""
        return _buckets(
            tuple(-(-tokens // self.page_size) for tokens in self.context_buckets),
            self.table_width,
        )


def _buckets(sizes: Sequence[int], largest: int) -> tuple[int, ...]:
    return tuple(sorted({s for s in sizes if s < largest} | {largest}))


def _integers(values: Any) -> tuple[int, ...]:
    return tuple(map(integer_in(1), values))


def _shapes(values: Any) -> tuple[tuple[int, ...], ...]:
    shapes = tuple(_integers(shape) for shape in values)
    if not shapes or any(len(shape) != 2 for shape in shapes):
        raise ValueError(f"expected pairs, got {shapes}")
    return shapes
