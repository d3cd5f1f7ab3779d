"""What families share in reading a Hugging Face `config.json`: fields, RoPE, end tokens, refusals.

A config is untrusted input. Every key is either read, known to leave the result alone, or known to
have one value that does; anything else is refused by name, because a field that is silently
ignored gives a model that silently answers nonsense.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from jinfire.config import ExpertsConfig, LatentConfig, LayerSpec, ModelConfig, RopeConfig
from jinfire.errors import UnsupportedConfig
from jinfire.layers.routing import check_router

Json = Mapping[str, Any]

# Bounds of what is believed, far above any published model: a hostile size must not allocate.
MAX_WIDTH = 2**20
MAX_VOCAB = 2**24
MAX_LAYERS = 4096
MAX_POSITION = 2**31
MAX_EOS_IDS = 1024
MAX_EXPERTS = 2**16
# Of all layers together: each is several tensors with names of their own.
MAX_ALL_EXPERTS = 2**20
# Far beyond any rotary number of a model, and of which every power and quotient is finite.
MAX_ROPE = 2.0**40

# Training, bookkeeping and output options: no influence on a forward pass in inference.
# fmt: off
HARMLESS = frozenset(
    (
        "model_type", "architectures", "torch_dtype", "dtype", "transformers_version",
        "name_or_path", "use_cache", "initializer_range", "attention_dropout", "pretraining_tp",
        "pad_token_id", "is_llama_config", "transformers.js_config", "return_dict",
        "output_hidden_states", "output_attentions", "torchscript", "chunk_size_feed_forward",
        "id2label", "label2id", "problem_type", "finetuning_task", "task_specific_params",
        "tokenizer_class", "prefix", "sep_token_id", "unk_token_id", "decoder_start_token_id",
        "output_router_logits", "router_aux_loss_coef", "router_jitter_noise",
    )
)
# fmt: on

# Fields whose listed values change nothing; any other value asks for something not implemented.
INERT_VALUES: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "hidden_act": ("silu",),
    "quantization_config": (None,),
    "partial_rotary_factor": (1, None),
    "rope_interleaved": (False, None),
    "is_encoder_decoder": (False, None),
    "add_cross_attention": (False, None),
    "is_decoder": (False, True, None),
    "cross_attention_hidden_size": (None,),
    "tie_encoder_decoder": (False, None),
    "pruned_heads": ({}, None),
}

# fmt: off
READ = frozenset(
    (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
        "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps",
        "max_position_embeddings", "tie_word_embeddings", "rope_theta", "rope_scaling",
        "rope_parameters", "bos_token_id", "eos_token_id",
    )
)
# fmt: on


@dataclasses.dataclass(frozen=True)
class Defaults:
    """What transformers takes for keys that a family's config lacks."""

    vocab_size: int
    mlp_width: int
    max_position: int
    width: int = 4096
    num_layers: int = 32
    num_heads: int = 32
    norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    bos_id: int | None = None
    eos_id: int | None = None


def decoder_config(
    config: Json,
    generation: Json,
    defaults: Defaults,
    *,
    family: str,
    head_dim: int,
    num_kv_heads: int,
    qk_norm: bool = False,
    mlp_key: str = "intermediate_size",
    rope_kinds: tuple[str, ...] = ("default", "llama3"),
) -> ModelConfig:
    """A `ModelConfig` of what all decoders share, and of what a family says about itself.

    Its layers are dense and causal; a family of others replaces them. `check_sizes` is left to
    whoever has the whole of it.

    Raises: UnsupportedConfig naming the field.
    """
    max_position = read_size(
        config, "max_position_embeddings", defaults.max_position, high=MAX_POSITION
    )
    num_layers = read_size(config, "num_hidden_layers", defaults.num_layers, high=MAX_LAYERS)
    bos = config.get("bos_token_id", generation.get("bos_token_id", defaults.bos_id))
    require(bos is None or is_int(bos), "bos_token_id", "a token id or null", bos)
    return ModelConfig(
        family=family,
        vocab_size=read_size(config, "vocab_size", defaults.vocab_size, high=MAX_VOCAB),
        width=read_size(config, "hidden_size", defaults.width),
        mlp_width=read_size(config, mlp_key, defaults.mlp_width),
        num_heads=read_size(config, "num_attention_heads", defaults.num_heads),
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        layers=(LayerSpec(),) * num_layers,
        norm_eps=read_positive(config, "rms_norm_eps", defaults.norm_eps),
        rope=read_rope(config, max_position, defaults.rope_theta, rope_kinds),
        tie_embeddings=read_flag(config, "tie_word_embeddings", False),
        qk_norm=qk_norm,
        max_position=max_position,
        eos_ids=read_eos_ids(config, generation, defaults.eos_id),
        bos_id=bos,
    )


def shared_head_dim(config: Json, defaults: Defaults) -> int:
    """The head dimension that the width gives, of families whose heads share it.

    Raises: UnsupportedConfig where the heads do not divide the width and `head_dim` is missing.
    """
    heads = read_size(config, "num_attention_heads", defaults.num_heads)
    width = read_size(config, "hidden_size", defaults.width)
    if config.get("head_dim") is None and width % heads:
        raise UnsupportedConfig(
            f"hidden_size: expected a multiple of num_attention_heads {heads}, got {width}"
        )
    return read_size(config, "head_dim", width // heads)


def read_kv_heads(config: Json, defaults: Defaults, absent: int | None = None) -> int:
    """KV heads; an explicit null means "as many as query heads", an absent key means `absent`."""
    heads = read_size(config, "num_attention_heads", defaults.num_heads)
    is_absent = "num_key_value_heads" not in config
    return read_size(config, "num_key_value_heads", absent if is_absent and absent else heads)


def text_config(config: Json, model_types: tuple[str, ...], known: frozenset[str]) -> Json:
    """The decoder's part of a config that has a vision tower beside it.

    End tokens are the union of both levels. What else both levels say must agree. `known` are
    keys of the outer level that say nothing about text.

    Raises: UnsupportedConfig naming the field.
    """
    text = config.get("text_config")
    require(isinstance(text, Mapping), "text_config", "a JSON object", text)
    assert text is not None
    own_type = text.get("model_type", model_types[0])
    require(own_type in model_types, "text_config.model_type", f"one of {model_types}", own_type)
    check_keys(config, known | {"text_config", "vision_config", "eos_token_id", *SHARED}, {})
    merged = dict(text)
    for key in SHARED:
        outer, inner = config.get(key), text.get(key)
        if outer is not None and inner is not None and outer != inner:
            raise UnsupportedConfig(f"{key}: {outer!r}, but {inner!r} in text_config")
        if outer is not None:
            merged[key] = outer
    if "eos_token_id" in config:
        merged["eos_token_id"] = [
            token
            for level in (config, text)
            for token in _as_list(level.get("eos_token_id"))
            if token is not None
        ]
    return merged


# What a config with a vision tower may say at either level.
SHARED = ("tie_word_embeddings", "bos_token_id", "quantization_config")


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def without_unused(config: ModelConfig) -> ModelConfig:
    """A model without the parts that none of its layers has, such as experts of dense layers."""
    unused = [name for name, uses in layers_that_use(config).items() if not any(uses)]
    return dataclasses.replace(config, **dict.fromkeys(unused))


def layers_that_use(config: ModelConfig) -> dict[str, list[bool]]:
    """For each part of a config that only layers of some kind need, which layers do."""
    layers = config.layers
    return {
        "latent": [layer.attention == "latent" for layer in layers],
        "attention_chunk": [layer.attention == "chunked" for layer in layers],
        "temperature": [layer.attention == "unrotated" for layer in layers],
        "experts": [layer.mlp == "experts" for layer in layers],
    }


def check_sizes(config: ModelConfig) -> None:
    """Refusal of sizes that contradict each other or exceed any plausible model.

    Raises: UnsupportedConfig naming the field.
    """
    sizes = {
        "vocab_size": (config.vocab_size, MAX_VOCAB),
        "width": (config.width, MAX_WIDTH),
        "mlp_width": (config.mlp_width, MAX_WIDTH),
        "num_heads": (config.num_heads, MAX_WIDTH),
        "num_kv_heads": (config.num_kv_heads, MAX_WIDTH),
        "head_dim": (config.head_dim, MAX_WIDTH),
        "num_layers": (config.num_layers, MAX_LAYERS),
        "max_position": (config.max_position, MAX_POSITION),
    }
    for name, (value, high) in sizes.items():
        require(is_int(value) and 1 <= value <= high, name, f"an integer in [1, {high}]", value)
    require(
        config.num_heads % config.num_kv_heads == 0,
        "num_key_value_heads",
        f"a divisor of num_attention_heads {config.num_heads}",
        config.num_kv_heads,
    )
    latent, rope = config.latent, config.rope
    if latent is None:
        require(config.head_dim % 2 == 0, "head_dim", "an even number (RoPE)", config.head_dim)
    else:
        _check_latent(config, latent)
    if config.experts is not None:
        check_experts(config.experts)
        layers = sum(layer.mlp == "experts" for layer in config.layers)
        count = layers * config.experts.count
        few = f"at most {MAX_ALL_EXPERTS} in all layers"
        require(count <= MAX_ALL_EXPERTS, "number of experts", few, count)
        if config.experts.int4:
            require(config.width % 32 == 0, "width", "a multiple of 32 (int4)", config.width)
    ok = is_real(config.norm_eps) and config.norm_eps > 0
    require(ok, "norm_eps", "a finite number > 0", config.norm_eps)
    _check_rope(rope)
    ids = {"eos_token_id": config.eos_ids, "bos_token_id": {config.bos_id} - {None}}
    for name, values in ids.items():
        for value in values:
            ok = is_int(value) and 0 <= value < config.vocab_size
            require(ok, name, f"a token id in [0, {config.vocab_size})", value)


def _check_rope(rope: RopeConfig) -> None:
    numbers = dataclasses.asdict(rope)
    for name in ("scaling", "interleaved", "mscale_all_dim"):
        del numbers[name]
    for name, value in numbers.items():
        ok = is_real(value) and 1 / MAX_ROPE <= value <= MAX_ROPE
        require(ok, f"rope {name}", f"a number > 0, at most {MAX_ROPE:g}", value)
    # 0 is none.
    ok = is_real(rope.mscale_all_dim) and 0 <= rope.mscale_all_dim <= MAX_ROPE
    require(ok, "rope mscale_all_dim", f"a number from 0 to {MAX_ROPE:g}", rope.mscale_all_dim)
    if rope.scaling == "yarn":
        require(rope.theta > 1, "rope_theta", "a number > 1 (yarn)", rope.theta)


def _check_latent(config: ModelConfig, latent: LatentConfig) -> None:
    sizes = dataclasses.asdict(latent)
    del sizes["norm_eps"]
    for name, value in sizes.items():
        ok = (is_int(value) and 1 <= value <= MAX_WIDTH) or (name == "query_rank" and value is None)
        require(ok, f"latent {name}", f"an integer in [1, {MAX_WIDTH}]", value)
    require(latent.rope_dim % 2 == 0, "qk_rope_head_dim", "an even number", latent.rope_dim)
    whole = latent.nope_dim + latent.rope_dim
    require(
        config.head_dim == whole, "head_dim", f"{whole}, nope and rope together", config.head_dim
    )


def check_experts(experts: ExpertsConfig) -> None:
    """Refusal of numbers of experts that contradict each other.

    Raises: UnsupportedConfig naming the field.
    """
    count, groups = experts.count, experts.groups
    sizes = {
        "number of experts": (count, 1, MAX_EXPERTS),
        "expert width": (experts.width, 1, MAX_WIDTH),
        "shared expert width": (experts.shared_width, 0, MAX_WIDTH),
        "num_experts_per_tok": (experts.per_token, 1, count),
        "expert groups": (groups, 1, count),
        "topk_group": (experts.groups_per_token, 1, groups),
    }
    for name, (value, low, high) in sizes.items():
        ok = is_int(value) and low <= value <= high
        require(ok, name, f"an integer in [{low}, {high}]", value)
    require(count % groups == 0, "expert groups", f"a divisor of {count} experts", groups)
    choice = count // groups * experts.groups_per_token
    if experts.router == "sigmoid":
        # A group's score is the sum of its best two.
        require(count // groups >= 2, "expert groups", "at least 2 experts in each", groups)
    require(
        experts.per_token <= choice,
        "num_experts_per_tok",
        f"at most the {choice} experts of the chosen groups",
        experts.per_token,
    )
    ok = is_real(experts.scaling) and experts.scaling > 0
    require(ok, "routed_scaling_factor", "a finite number > 0", experts.scaling)
    try:
        check_router(experts)
    except ValueError as error:
        raise UnsupportedConfig(f"experts: {error}") from None
    if experts.int4:
        require(experts.width % 32 == 0, "expert width", "a multiple of 32 (int4)", experts.width)


# The numbers that each kind of scaling takes from the config.
ROPE_FIELDS: dict[str, frozenset[str]] = {
    "default": frozenset(),
    "llama3": frozenset(
        ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    ),
    "yarn": frozenset(
        (
            *("factor", "original_max_position_embeddings", "beta_fast", "beta_slow"),
            *("mscale", "mscale_all_dim"),
        )
    ),
}


def read_rope(
    config: Json,
    max_position: int,
    default_theta: float = 10_000.0,
    kinds: tuple[str, ...] = ("default", "llama3"),
) -> RopeConfig:
    """Rotary embedding of the published style (`rope_scaling`) or of transformers v5.

    Raises: UnsupportedConfig naming the field; also of numbers of a scaling without its name.
    """
    scaling = config.get("rope_scaling") or None
    parameters = config.get("rope_parameters") or None
    if scaling is not None and parameters is not None and scaling != parameters:
        raise UnsupportedConfig("rope_scaling and rope_parameters: both present and different")
    source = "rope_scaling" if parameters is None else "rope_parameters"
    rope = scaling if parameters is None else parameters
    rope = {} if rope is None else rope
    if not isinstance(rope, Mapping) or any(isinstance(v, Mapping) for v in rope.values()):
        raise UnsupportedConfig(f"{source}: expected one flat object for all layers, got {rope!r}")

    named = [rope[key] for key in ("rope_type", "type") if rope.get(key) is not None] or ["default"]
    kind = named[0]
    if named[-1] != kind or kind not in kinds:
        got = {key: rope[key] for key in ("rope_type", "type") if key in rope}
        raise UnsupportedConfig(f"{source}.rope_type: expected one of {kinds}, got {got}")
    theta = read_positive(rope, "rope_theta", read_positive(config, "rope_theta", default_theta))
    if config.get("rope_theta", theta) not in (theta, None):
        raise UnsupportedConfig(f"rope_theta: differs from {source}.rope_theta")
    if rope.get("partial_rotary_factor", 1) not in (1, None):
        raise UnsupportedConfig(f"{source}.partial_rotary_factor: expected 1")

    known = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
    if unknown := rope.keys() - known.union(*(ROPE_FIELDS[name] for name in kinds)):
        raise UnsupportedConfig(f"{source}: unknown fields {sorted(unknown)}")
    if kind == "default":
        scales = set().union(*ROPE_FIELDS.values())
        if given := sorted(key for key in rope.keys() & scales if rope[key] is not None):
            raise UnsupportedConfig(
                f"{source}.rope_type: expected one of {kinds[1:]} beside {given}, got {named[0]!r}"
            )
        return RopeConfig(theta=theta)
    original = read_size(rope, "original_max_position_embeddings", max_position, high=MAX_POSITION)
    if kind == "yarn":
        return _read_yarn(rope, source, theta, original)
    if missing := {"factor", "low_freq_factor", "high_freq_factor"} - rope.keys():
        raise UnsupportedConfig(f"{source}: rope type llama3 lacks {sorted(missing)}")
    return RopeConfig(
        theta=theta,
        scaling="llama3",
        factor=read_positive(rope, "factor"),
        low_freq_factor=read_positive(rope, "low_freq_factor"),
        high_freq_factor=read_positive(rope, "high_freq_factor"),
        original_max_position=original,
    )


def _read_yarn(rope: Json, source: str, theta: float, original: int) -> RopeConfig:
    if "factor" not in rope:
        raise UnsupportedConfig(f"{source}: rope type yarn lacks ['factor']")
    # transformers takes one of the two alone for neither, other readers for its own half.
    given = [key for key in ("mscale", "mscale_all_dim") if rope.get(key) is not None]
    if len(given) == 1:
        raise UnsupportedConfig(f"{source}: mscale and mscale_all_dim: expected both, got {given}")
    return RopeConfig(
        theta=theta,
        scaling="yarn",
        factor=read_positive(rope, "factor"),
        original_max_position=original,
        beta_fast=read_positive(rope, "beta_fast", 32.0),
        beta_slow=read_positive(rope, "beta_slow", 1.0),
        mscale=read_positive(rope, "mscale", 1.0),
        mscale_all_dim=read_positive(rope, "mscale_all_dim") if given else 0.0,
    )


def read_eos_ids(config: Json, generation: Json, default: int | None) -> frozenset[int]:
    """Union of the end tokens that both files name."""
    named = [c["eos_token_id"] for c in (config, generation) if "eos_token_id" in c]
    # A family's default is a guess that only an entirely silent checkpoint gets.
    ids: set[int] = set()
    for value in named or [default]:
        values = _as_list(value)
        if len(values) > MAX_EOS_IDS:
            raise UnsupportedConfig(f"eos_token_id: at most {MAX_EOS_IDS} ids, got {len(values)}")
        for token in values:
            if token is not None:
                require(is_int(token), "eos_token_id", "integers", token)
                ids.add(token)
    return frozenset(ids)


def check_keys(config: Json, read: frozenset[str], inert: Mapping[str, tuple[Any, ...]]) -> None:
    """Refusal of every key that is not read, harmless, or inert at its value."""
    for key, value in config.items():
        if key in inert:
            if value not in inert[key]:
                raise UnsupportedConfig(f"{key}: expected {inert[key][0]!r}, got {value!r}")
        # Keys with a leading underscore are notes of the tools that wrote the file.
        elif key not in read and key not in HARMLESS and not key.startswith("_"):
            raise UnsupportedConfig(f"{key}: unknown field with value {value!r}")


def read_size(config: Json, key: str, default: int, high: int = MAX_WIDTH, low: int = 1) -> int:
    """An integer field from `low` to `high`; null counts as absent."""
    value = config.get(key)
    value = default if value is None else value
    require(is_int(value) and low <= value <= high, key, f"an integer in [{low}, {high}]", value)
    return value


def read_positive(config: Json, key: str, default: float | None = None) -> float:
    """A finite number above 0; null counts as absent."""
    value: Any = config.get(key)
    value = default if value is None else value
    require(is_real(value) and value > 0, key, "a finite number > 0", value)
    return float(value)


def read_flag(config: Json, key: str, default: bool) -> bool:
    """A boolean field; null counts as absent."""
    value = config.get(key)
    value = default if value is None else value
    require(isinstance(value, bool), key, "true or false", value)
    return value


def is_int(value: object) -> bool:
    """Whether a JSON value is an integer; booleans are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_real(value: object) -> bool:
    """Whether a JSON value is a finite number; booleans are not."""
    try:
        return (
            isinstance(value, int | float)
            and not isinstance(value, bool)
            and math.isfinite(float(value))
        )
    except OverflowError:
        return False


def require(ok: bool, key: str, expected: str, got: object) -> None:
    """UnsupportedConfig with the field, what is allowed and what came, unless `ok`."""
    if not ok:
        raise UnsupportedConfig(f"{key}: expected {expected}, got {got!r}")
