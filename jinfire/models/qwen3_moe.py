"""The Qwen3-MoE family: Qwen3's attention, experts in all or some layers."""

import dataclasses

from jinfire.config import ExpertsConfig, LayerSpec, ModelConfig
from jinfire.models.family import DENSE_NAMES, QK_NORM_NAMES, ModelFamily
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
    require,
    shared_head_dim,
)

DEFAULTS = Defaults(
    vocab_size=151_936, mlp_width=6144, max_position=32_768, width=2048, num_layers=24
)
# fmt: off
OWN_KEYS = frozenset(
    (
        "num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size",
        "norm_topk_prob", "decoder_sparse_step", "mlp_only_layers",
        "use_sliding_window", "sliding_window", "max_window_layers",
    )
)
# fmt: on
INERT = {
    **INERT_VALUES,
    "qkv_bias": (False, None),
    "use_qk_norm": (True, None),
    "shared_expert_intermediate_size": (0, None),
}


def parse_config(config: Json, generation: Json) -> ModelConfig:
    """A decoder with query and key norms and experts; sliding windows are refused."""
    check_keys(config, READ | OWN_KEYS, INERT)
    windowed = read_flag(config, "use_sliding_window", False)
    window = config.get("sliding_window", 4096) if windowed else None
    require(window is None, "use_sliding_window", "false", windowed)
    model = decoder_config(
        config,
        generation,
        DEFAULTS,
        family=QWEN3_MOE.name,
        head_dim=shared_head_dim(config, DEFAULTS),
        num_kv_heads=read_kv_heads(config, DEFAULTS, absent=4),
        qk_norm=True,
    )
    count = read_size(config, "num_experts", read_size(config, "num_local_experts", 128))
    again = read_size(config, "num_local_experts", count)
    require(again == count, "num_local_experts", f"num_experts {count}", again)
    return dataclasses.replace(
        model,
        layers=_layers(config, model.num_layers),
        experts=ExpertsConfig(
            count=count,
            per_token=read_size(config, "num_experts_per_tok", 8),
            width=read_size(config, "moe_intermediate_size", 768),
            normalise=read_flag(config, "norm_topk_prob", False),
        ),
    )


def _layers(config: Json, num_layers: int) -> tuple[LayerSpec, ...]:
    step = read_size(config, "decoder_sparse_step", 1, MAX_LAYERS)
    dense = config.get("mlp_only_layers") or []
    ok = isinstance(dense, list) and all(map(is_int, dense))
    require(ok, "mlp_only_layers", "a list of layers", dense)
    return tuple(
        LayerSpec(mlp="experts" if layer not in dense and (layer + 1) % step == 0 else "dense")
        for layer in range(num_layers)
    )


QWEN3_MOE = ModelFamily(
    name="qwen3_moe",
    architectures=("Qwen3MoeForCausalLM",),
    parse_config=parse_config,
    tensor_names={
        **DENSE_NAMES,
        **QK_NORM_NAMES,
        "layers.{i}.mlp.router.weight": "model.layers.{i}.mlp.gate.weight",
        **{
            f"layers.{{i}}.mlp.experts.{name}.weight": (
                f"model.layers.{{i}}.mlp.experts.{{e}}.{name}_proj.weight"
            )
            for name in ("gate", "up", "down")
        },
    },
)
