"""Frozen configuration: what a model is, where it runs, how the engine behaves."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Self

import sharding
from jinfire.checks import as_flag, convert_field, integer_in, number_where


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding.

    `scaling` is None, "llama3" or "yarn"; the numbers are those of the Hugging Face config, with
    its defaults where they apply. `interleaved`: a pair is two neighbours, not two halves.
    Source: Llama 3.1 model card; YaRN (arXiv 2309.00071); transformers `ROPE_INIT_FUNCTIONS`.
    """

    theta: float = 10_000.0
    scaling: str | None = None
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0
    interleaved: bool = False


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """What kind of layer one position of the stack holds.

    `attention` is "causal" (rotary, over everything), "chunked" (rotary, within the attention
    chunk), "unrotated" (no positions, over everything) or "latent" (MLA); `mlp` is "dense" or
    "experts". `kv_group` names the page pool that the layer's keys and values live in; layers that
    keep the same tokens share a group: "full" keeps all of them, "local" the attention chunk.
    """

    attention: str = "causal"
    mlp: str = "dense"
    kv_group: str = "full"


@dataclasses.dataclass(frozen=True)
class LatentConfig:
    """Multi-head latent attention (MLA): keys and values from one vector a token.

    A head's query and key have `nope_dim` plain and `rope_dim` rotary values, its value has
    `value_dim`. What is cached are `rank` latents and `rope_dim` rotary values, shared by all
    heads. `query_rank` None: queries come straight from the residual stream.
    Source: DeepSeek-V2 (arXiv 2405.04434) section 2.1.
    """

    query_rank: int | None
    rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    norm_eps: float = 1e-6


@dataclasses.dataclass(frozen=True)
class ExpertsConfig:
    """Mixture of experts: how many, which of them a token takes, and with which weights.

    `router` is
    "softmax": the most probable `per_token` experts, weighted by their probabilities
    (Qwen3-MoE, Mixtral);
    "sigmoid": the highest sigmoid scores + selection bias within the best `groups_per_token` of
    `groups` groups, weighted by the scores alone (DeepSeek-V3, `noaux_tc`);
    "scaled_input": the highest logits, whose sigmoids scale what the experts are given (Llama 4).
    `normalise` divides the weights of a token by their sum, `scaling` multiplies them afterwards.
    `shared_width` is the MLP width of the expert that every token takes, 0 without one.
    `int4`: the weights of routed experts are 4-bit values with a scale for every 32.
    """

    count: int
    per_token: int
    width: int
    router: str = "softmax"
    normalise: bool = False
    scaling: float = 1.0
    groups: int = 1
    groups_per_token: int = 1
    shared_width: int = 0
    int4: bool = False


@dataclasses.dataclass(frozen=True)
class TemperatureConfig:
    """Growth of unrotated queries with their position: 1 + scale x log(1 + floor((p + 1) / floor)).

    Source: Llama 4, `attn_scale` and `floor_scale`.
    """

    scale: float
    floor: int


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """One decoder-only model; the layer pattern is data.

    `head_dim` is that of queries; with `latent` its plain and rotary values together. `qk_norm` is
    the learned one before RoPE, `qk_norm_after_rope` the one without weights, of rotated layers.
    """

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
    qk_norm_after_rope: bool = False
    attention_chunk: int | None = None
    temperature: TemperatureConfig | None = None
    latent: LatentConfig | None = None
    experts: ExpertsConfig | None = None

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def kv_widths(self) -> tuple[int, ...]:
        """Width of each array that a layer caches: key and value, or latents alone."""
        if self.latent is not None:
            return (self.latent.rank + self.latent.rope_dim,)
        return (self.head_dim, self.head_dim)

    @property
    def cached_heads(self) -> int:
        """KV heads that a layer caches; latents are one."""
        return 1 if self.latent is not None else self.num_kv_heads

    @property
    def kv_groups(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(layer.kv_group for layer in self.layers))


Layout = Sequence[int]

KV_CODECS = ("none", "unweight")

SPLIT = "split"
LATENTS = ("replicated", SPLIT)
"""What the devices of a stage hold of the latents (MLA): all of them each, or a part each."""


@dataclasses.dataclass(frozen=True)
class Placement:
    """Which mesh runs which phase.

    Layouts are (pipeline, tensor) or (pipeline, tensor, expert). `decode=None` is colocated: both
    phases share one mesh and one page pool, and the handoff is the identity. `kv_codec` is "none",
    or "unweight": pages cross the meshes in fewer bytes and arrive bit for bit.
    `latents` is one of `LATENTS` for all meshes, or one for the prefill and one for the decode.
    """

    prefill: sharding.MeshSpec
    decode: sharding.MeshSpec | None = None
    kv_codec: str = "none"
    latents: str | tuple[str, str] = LATENTS[0]

    def __post_init__(self) -> None:
        allowed = KV_CODECS if self.decode else KV_CODECS[:1]
        if self.kv_codec not in allowed:
            where = "meshes apart" if self.decode else "one mesh, where no page moves"
            raise ValueError(
                f"kv_codec: expected {' or '.join(map(repr, allowed))} on {where}, "
                f"got {self.kv_codec!r}"
            )
        expected = f"one of {', '.join(LATENTS)}, or one for each phase"
        convert_field(self, "latents", expected, _latents_of_phases)
        if self.decode is None and self.prefill_latents != self.decode_latents:
            raise ValueError(
                f"Placement.latents: expected one for both phases on one mesh, got {self.latents}"
            )
        if SPLIT in self.latents and self.kv_codec != "none":
            raise ValueError(
                f"kv_codec: expected 'none' with split latents, whose parts cross the meshes as "
                f"they are, got {self.kv_codec!r}"
            )

    @classmethod
    def colocated(cls, layout: Layout = (1, 1), *, latents: str = LATENTS[0]) -> Self:
        """Both phases on one mesh."""
        return cls(_mesh_spec(layout), latents=latents)

    @classmethod
    def disaggregated(
        cls,
        prefill: Layout,
        decode: Layout,
        kv_codec: str | None = None,
        *,
        latents: str | tuple[str, str] = LATENTS[0],
    ) -> Self:
        """Prefill and decode on disjoint meshes."""
        return cls(_mesh_spec(prefill), _mesh_spec(decode), kv_codec or "none", latents)

    @property
    def prefill_latents(self) -> str:
        return self.latents[0]

    @property
    def decode_latents(self) -> str:
        return self.latents[1]

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
            return f"colocated {self.prefill}{_split_text(self.prefill_latents)}"
        coded = "" if self.kv_codec == "none" else f", KV by {self.kv_codec}"
        prefill = f"{self.prefill}{_split_text(self.prefill_latents)}"
        decode = f"{self.decode}{_split_text(self.decode_latents)}"
        return f"prefill {prefill} + decode {decode}{coded}"


def _latents_of_phases(value: Any) -> tuple[str, str]:
    prefill, decode = (value, value) if isinstance(value, str) else value
    if prefill not in LATENTS or decode not in LATENTS:
        raise ValueError(f"expected {LATENTS}, got {value}")
    return prefill, decode


def _split_text(latents: str) -> str:
    return " (latents split)" if latents == SPLIT else ""


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
    page, included). `num_pages=None` sizes each pool for `max_rows` requests of `max_context`; the
    pool of a local KV group is never larger than `max_rows` rings, with or without `num_pages`.
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
