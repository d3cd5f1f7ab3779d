"""The Llama 4 families: Scout and Maverick, whole checkpoints or their text model alone."""

import dataclasses

from jinfire.config import ExpertsConfig, LayerSpec, ModelConfig, TemperatureConfig
from jinfire.errors import UnsupportedConfig
from jinfire.models.family import DENSE_NAMES, Fused, ModelFamily, Stored, prefixed
from jinfire.models.hf_fields import (
    INERT_VALUES,
    MAX_LAYERS,
    MAX_POSITION,
    READ,
    Defaults,
    Json,
    check_keys,
    decoder_config,
    is_int,
    read_flag,
    read_kv_heads,
    read_positive,
    read_size,
    require,
    text_config,
)

DEFAULTS = Defaults(
    vocab_size=202_048,
    mlp_width=16_384,
    max_position=131_072,
    width=5120,
    num_layers=48,
    num_heads=40,
    norm_eps=1e-5,
    rope_theta=500_000.0,
    bos_id=1,
    eos_id=2,
)
# fmt: off
OWN_KEYS = frozenset(
    (
        "intermediate_size_mlp", "interleave_moe_layer_step", "moe_layers", "num_local_experts",
        "num_experts_per_tok", "no_rope_layers", "no_rope_layer_interval", "layer_types",
        "attention_chunk_size", "attn_temperature_tuning", "floor_scale", "attn_scale",
        "use_qk_norm",
        # What a quantising tool, and a cache of transformers, are told.
        "for_llm_compressor", "cache_implementation",
    )
)
IMAGE_KEYS = frozenset(
    (
        "boi_token_index", "eoi_token_index", "image_token_index",
        "boi_token_id", "eoi_token_id", "image_token_id",
    )
)
# fmt: on


def parse_text(config: Json, generation: Json, family: str = "llama4_text") -> ModelConfig:
    """A decoder of chunked and unrotated layers, with experts in all or some of them."""
    check_keys(config, READ | OWN_KEYS, INERT_VALUES)
    model = decoder_config(
        config,
        generation,
        DEFAULTS,
        family=family,
        head_dim=read_size(config, "head_dim", 128),
        num_kv_heads=read_kv_heads(config, DEFAULTS, absent=8),
        mlp_key="intermediate_size_mlp",
    )
    width = read_size(config, "intermediate_size", 8192)
    # Elsewhere null means no chunks, which rotated layers do not have here.
    chunk = config.get("attention_chunk_size", 8192)
    require(chunk is not None, "attention_chunk_size", "a number of tokens", chunk)
    return dataclasses.replace(
        model,
        layers=_layers(config, model.num_layers),
        rope=dataclasses.replace(model.rope, interleaved=True),
        qk_norm_after_rope=read_flag(config, "use_qk_norm", True),
        attention_chunk=read_size(config, "attention_chunk_size", 8192, MAX_POSITION),
        temperature=_temperature(config),
        experts=ExpertsConfig(
            count=read_size(config, "num_local_experts", 16),
            per_token=read_size(config, "num_experts_per_tok", 1),
            width=width,
            router="scaled_input",
            shared_width=width,
        ),
    )


def parse_nested(config: Json, generation: Json) -> ModelConfig:
    """The text model of a checkpoint with a vision tower."""
    return parse_text(text_config(config, ("llama4_text",), IMAGE_KEYS), generation, LLAMA4.name)


def _layers(config: Json, num_layers: int) -> tuple[LayerSpec, ...]:
    interval = read_size(config, "no_rope_layer_interval", 4, MAX_LAYERS)
    # An empty list means as much as none: by the interval.
    rotated = config.get("no_rope_layers") or [
        int((layer + 1) % interval != 0) for layer in range(num_layers)
    ]
    ok = isinstance(rotated, list) and all(is_int(flag) and flag in (0, 1) for flag in rotated)
    require(ok, "no_rope_layers", "a list of 1 (rotated) and 0", rotated)
    require(len(rotated) == num_layers, "no_rope_layers", f"{num_layers} entries", len(rotated))

    step = read_size(config, "interleave_moe_layer_step", 1, MAX_LAYERS)
    sparse = config.get("moe_layers")
    sparse = list(range(step - 1, num_layers, step)) if sparse is None else sparse
    ok = isinstance(sparse, list) and all(
        is_int(layer) and 0 <= layer < num_layers for layer in sparse
    )
    require(ok, "moe_layers", f"a list of layers below {num_layers}", sparse)

    kinds = ["chunked_attention" if flag else "full_attention" for flag in rotated]
    if config.get("layer_types") not in (None, kinds):
        raise UnsupportedConfig(
            "layer_types: expected chunked attention in the rotated layers and full attention in "
            f"the others, got {config['layer_types']!r}"
        )
    return tuple(
        LayerSpec(
            attention="chunked" if flag else "unrotated",
            mlp="experts" if layer in sparse else "dense",
            kv_group="local" if flag else "full",
        )
        for layer, flag in enumerate(rotated)
    )


def _temperature(config: Json) -> TemperatureConfig | None:
    tuning = config.get("attn_temperature_tuning")
    # Published configs say 4, which is as good as true.
    ok = tuning is None or isinstance(tuning, bool) or (is_int(tuning) and tuning >= 0)
    require(ok, "attn_temperature_tuning", "true, false or an integer", tuning)
    if tuning is not None and not tuning:
        return None
    return TemperatureConfig(
        scale=read_positive(config, "attn_scale", 0.1),
        floor=read_size(config, "floor_scale", 8192, MAX_POSITION),
    )


_MLP = "layers.{i}.mlp."
_STORED_MLP = "model.layers.{i}.feed_forward."
TEXT_NAMES: dict[str, Stored] = {
    **DENSE_NAMES,
    **{
        f"{_MLP}{ours}.weight": f"{_STORED_MLP}{theirs}.weight"
        for ours, theirs in (
            ("gate", "gate_proj"),
            ("up", "up_proj"),
            ("down", "down_proj"),
            ("router", "router"),
            ("shared.gate", "shared_expert.gate_proj"),
            ("shared.up", "shared_expert.up_proj"),
            ("shared.down", "shared_expert.down_proj"),
        )
    },
    f"{_MLP}experts.gate.weight": Fused(f"{_STORED_MLP}experts.gate_up_proj", 0, 2),
    f"{_MLP}experts.up.weight": Fused(f"{_STORED_MLP}experts.gate_up_proj", 1, 2),
    f"{_MLP}experts.down.weight": Fused(f"{_STORED_MLP}experts.down_proj"),
}

LLAMA4_TEXT = ModelFamily(
    name="llama4_text",
    architectures=("Llama4ForCausalLM",),
    parse_config=parse_text,
    tensor_names=TEXT_NAMES,
)

LLAMA4 = ModelFamily(
    name="llama4",
    architectures=("Llama4ForConditionalGeneration",),
    parse_config=parse_nested,
    tensor_names=prefixed(TEXT_NAMES, "language_model."),
    ignored=("vision_model.", "multi_modal_projector."),
)
