"""What families share in reading a Hugging Face `config.json`: fields, RoPE, end tokens, refusals.

A config is untrusted input. Every key is either read, known to leave the result alone, or known to
have one value that does; anything else is refused by name, because a field that is silently
ignored gives a model that silently answers nonsense.
"""

import math
from collections.abc import Mapping
from typing import Any

from jinfire.config import LayerSpec, ModelConfig, RopeConfig
from jinfire.errors import UnsupportedConfig

Json = Mapping[str, Any]

# Bounds of what is believed, far above any published model: a hostile size must not allocate.
MAX_WIDTH = 2**20
MAX_VOCAB = 2**24
MAX_LAYERS = 4096
MAX_POSITION = 2**31
MAX_EOS_IDS = 1024

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


def dense_config(
    config: Json,
    generation: Json,
    *,
    family: str,
    head_dim: int,
    num_kv_heads: int,
    defaults: dict[str, int],
    default_bos: int | None,
    default_eos: int | None,
    qk_norm: bool,
) -> ModelConfig:
    """A `ModelConfig` of what all dense decoders share, and of what a family says about itself.

    `defaults` are transformers' for keys that the config lacks.

    Raises: UnsupportedConfig naming the field.
    """
    max_position = read_size(
        config, "max_position_embeddings", defaults["max_position"], high=MAX_POSITION
    )
    bos = config.get("bos_token_id", generation.get("bos_token_id", default_bos))
    require(bos is None or is_int(bos), "bos_token_id", "a token id or null", bos)
    model = ModelConfig(
        family=family,
        vocab_size=read_size(config, "vocab_size", defaults["vocab_size"], high=MAX_VOCAB),
        width=read_size(config, "hidden_size", 4096),
        mlp_width=read_size(config, "intermediate_size", defaults["intermediate_size"]),
        num_heads=read_size(config, "num_attention_heads", 32),
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        layers=(LayerSpec(),) * read_size(config, "num_hidden_layers", 32, high=MAX_LAYERS),
        norm_eps=read_positive(config, "rms_norm_eps", 1e-6),
        rope=read_rope(config, max_position),
        tie_embeddings=read_flag(config, "tie_word_embeddings", False),
        qk_norm=qk_norm,
        max_position=max_position,
        eos_ids=read_eos_ids(config, generation, default_eos),
        bos_id=bos,
    )
    check_sizes(model)
    return model


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
    require(config.head_dim % 2 == 0, "head_dim", "an even number (RoPE)", config.head_dim)
    rope = config.rope
    reals = {"norm_eps": config.norm_eps, "rope_theta": rope.theta, "rope factor": rope.factor}
    for name, value in reals.items():
        require(is_real(value) and value > 0, name, "a finite number > 0", value)
    ids = {"eos_token_id": config.eos_ids, "bos_token_id": {config.bos_id} - {None}}
    for name, values in ids.items():
        for value in values:
            ok = is_int(value) and 0 <= value < config.vocab_size
            require(ok, name, f"a token id in [0, {config.vocab_size})", value)


def read_rope(config: Json, max_position: int) -> RopeConfig:
    """Rotary embedding of the published style (`rope_scaling`) or of transformers v5."""
    scaling = config.get("rope_scaling") or None
    parameters = config.get("rope_parameters") or None
    if scaling is not None and parameters is not None and scaling != parameters:
        raise UnsupportedConfig("rope_scaling and rope_parameters: both present and different")
    source = "rope_scaling" if parameters is None else "rope_parameters"
    rope = scaling if parameters is None else parameters
    rope = {} if rope is None else rope
    if not isinstance(rope, Mapping) or any(isinstance(v, Mapping) for v in rope.values()):
        raise UnsupportedConfig(f"{source}: expected one flat object for all layers, got {rope!r}")

    kinds = [rope[key] for key in ("rope_type", "type") if rope.get(key) is not None] or ["default"]
    kind = kinds[0]
    if kinds[-1] != kind or kind not in ("default", "llama3"):
        got = {key: rope[key] for key in ("rope_type", "type") if key in rope}
        raise UnsupportedConfig(f"{source}.rope_type: expected default or llama3, got {got}")
    theta = read_positive(rope, "rope_theta", read_positive(config, "rope_theta", 10_000.0))
    if config.get("rope_theta", theta) not in (theta, None):
        raise UnsupportedConfig(f"rope_theta: differs from {source}.rope_theta")
    if rope.get("partial_rotary_factor", 1) not in (1, None):
        raise UnsupportedConfig(f"{source}.partial_rotary_factor: expected 1")

    known = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
    llama3 = {
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    }
    if unknown := rope.keys() - known - llama3:
        raise UnsupportedConfig(f"{source}: unknown fields {sorted(unknown)}")
    if kind == "default":
        return RopeConfig(theta=theta)
    if missing := llama3 - {"original_max_position_embeddings"} - rope.keys():
        raise UnsupportedConfig(f"{source}: rope type llama3 lacks {sorted(missing)}")
    return RopeConfig(
        theta=theta,
        scaling="llama3",
        factor=read_positive(rope, "factor"),
        low_freq_factor=read_positive(rope, "low_freq_factor"),
        high_freq_factor=read_positive(rope, "high_freq_factor"),
        original_max_position=read_size(
            rope, "original_max_position_embeddings", max_position, high=MAX_POSITION
        ),
    )


def read_eos_ids(config: Json, generation: Json, default: int | None) -> frozenset[int]:
    """Union of the end tokens that both files name."""
    named = [c["eos_token_id"] for c in (config, generation) if "eos_token_id" in c]
    # A family's default is a guess that only an entirely silent checkpoint gets.
    ids: set[int] = set()
    for value in named or [default]:
        values = value if isinstance(value, list) else [value]
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


def read_size(config: Json, key: str, default: int, high: int = MAX_WIDTH) -> int:
    """An integer field from 1 to `high`; null counts as absent."""
    value = config.get(key)
    value = default if value is None else value
    require(is_int(value) and 1 <= value <= high, key, f"an integer in [1, {high}]", value)
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
