"""The dense Qwen3 family: per-head query and key norms, a head dimension of its own."""

from jinfire.config import ModelConfig
from jinfire.errors import UnsupportedConfig
from jinfire.models.family import (
    DENSE_GGUF_NAMES,
    DENSE_NAMES,
    QK_NORM_NAMES,
    GGUFForm,
    ModelFamily,
)
from jinfire.models.hf_fields import (
    INERT_VALUES,
    MAX_LAYERS,
    READ,
    Defaults,
    Json,
    check_keys,
    decoder_config,
    is_int,
    read_flag,
    read_kv_heads,
    read_size,
)

DEFAULTS = Defaults(vocab_size=151936, mlp_width=22016, max_position=32768)
WINDOW_KEYS = frozenset(
    ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types")
)


def parse_config(config: Json, generation: Json) -> ModelConfig:
    """A dense decoder with query and key norms; sliding windows are refused."""
    check_keys(config, READ | WINDOW_KEYS, INERT_VALUES)
    _check_no_window(config, read_size(config, "num_hidden_layers", 32, MAX_LAYERS))
    return decoder_config(
        config,
        generation,
        DEFAULTS,
        family=QWEN3.name,
        head_dim=read_size(config, "head_dim", 128),
        num_kv_heads=read_kv_heads(config, DEFAULTS, absent=32),
        qk_norm=True,
    )


def _check_no_window(config: Json, num_layers: int) -> None:
    layer_types = config.get("layer_types")
    if layer_types is not None:
        expected = ["full_attention"] * num_layers
        if layer_types != expected:
            raise UnsupportedConfig(
                f"layer_types: expected {num_layers} x full_attention, got {layer_types!r}"
            )
        return
    window = config.get("sliding_window", 4096)
    first = config.get("max_window_layers", 28)
    is_windowed = read_flag(config, "use_sliding_window", False) and window is not None
    if is_windowed and not (is_int(first) and first >= num_layers):
        raise UnsupportedConfig(
            f"use_sliding_window: sliding attention from layer {first!r} of {num_layers} is not "
            "implemented"
        )


QWEN3 = ModelFamily(
    name="qwen3",
    architectures=("Qwen3ForCausalLM",),
    parse_config=parse_config,
    tensor_names=DENSE_NAMES | QK_NORM_NAMES,
    gguf=GGUFForm(
        {
            **DENSE_GGUF_NAMES,
            "layers.{i}.attention.query_norm.scale": "blk.{i}.attn_q_norm.weight",
            "layers.{i}.attention.key_norm.scale": "blk.{i}.attn_k_norm.weight",
        },
        # The config's default is another than the format's; every converter writes the key.
        required_keys=frozenset({"attention.key_length"}),
    ),
)
