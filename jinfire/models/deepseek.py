"""The DeepSeek-V3 architecture: DeepSeek-V3 and R1, Kimi K2 and K2.5, with int4 experts or not."""

import dataclasses

from jinfire.config import ExpertsConfig, LatentConfig, LayerSpec, ModelConfig
from jinfire.models.family import DENSE_NAMES, ModelFamily, Packed, Stored, prefixed
from jinfire.models.hf_fields import (
    INERT_VALUES,
    MAX_LAYERS,
    READ,
    Defaults,
    Json,
    check_keys,
    decoder_config,
    read_flag,
    read_positive,
    read_size,
    require,
    text_config,
)
from jinfire.models.hf_quantization import read_int4

DEFAULTS = Defaults(
    vocab_size=129_280,
    mlp_width=18_432,
    max_position=4096,
    width=7168,
    num_layers=61,
    num_heads=128,
    bos_id=0,
    eos_id=1,
)
# fmt: off
OWN_KEYS = frozenset(
    (
        "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
        "qk_head_dim", "rope_interleave", "moe_intermediate_size", "n_routed_experts",
        "num_local_experts", "n_shared_experts", "num_experts_per_tok", "first_k_dense_replace",
        "n_group", "topk_group", "norm_topk_prob", "routed_scaling_factor", "quantization_config",
        # Training, and layers after the last one that only training and speculation use.
        "aux_loss_alpha", "seq_aux", "ep_size", "num_nextn_predict_layers",
        # Names of classes that are not run: the family is known.
        "auto_map",
    )
)
IMAGE_KEYS = frozenset(
    (
        "ignore_index", "image_token_id", "media_placeholder_token_id", "video_token_id",
        "video_placeholder", "use_unified_vision_chunk", "projection_hidden_size", "auto_map",
    )
)
# fmt: on
NESTED_PREFIX = "language_model."
INERT = {
    **{key: values for key, values in INERT_VALUES.items() if key != "quantization_config"},
    "moe_layer_freq": (1, None),
    "scoring_func": ("sigmoid", None),
    "topk_method": ("noaux_tc", None),
}


def parse_text(config: Json, generation: Json, family: str, prefix: str = "") -> ModelConfig:
    """A decoder of latent attention, dense in its first layers, with experts in the others.

    `prefix` is what names of its modules begin with where it is a part of a larger model.
    """
    check_keys(config, READ | OWN_KEYS, INERT)
    latent = _latent(config)
    heads = read_size(config, "num_attention_heads", DEFAULTS.num_heads)
    kv_heads = read_size(config, "num_key_value_heads", heads)
    require(kv_heads == heads, "num_key_value_heads", f"{heads}, one a query head", kv_heads)
    model = decoder_config(
        config,
        generation,
        DEFAULTS,
        family=family,
        head_dim=latent.nope_dim + latent.rope_dim,
        num_kv_heads=heads,
        rope_kinds=("default", "yarn"),
    )
    dense = read_size(config, "first_k_dense_replace", 3, MAX_LAYERS, low=0)
    return dataclasses.replace(
        model,
        layers=tuple(
            LayerSpec(attention="latent", mlp="dense" if layer < dense else "experts")
            for layer in range(model.num_layers)
        ),
        rope=dataclasses.replace(
            model.rope, interleaved=read_flag(config, "rope_interleave", True)
        ),
        latent=latent,
        experts=_experts(config, model.num_layers, dense, prefix),
    )


def _latent(config: Json) -> LatentConfig:
    rank = config.get("q_lora_rank", 1536)
    latent = LatentConfig(
        # An explicit null is a choice here: no latent of queries.
        query_rank=None if rank is None else read_size(config, "q_lora_rank", 1536),
        rank=read_size(config, "kv_lora_rank", 512),
        nope_dim=read_size(config, "qk_nope_head_dim", 128),
        rope_dim=read_size(config, "qk_rope_head_dim", 64),
        value_dim=read_size(config, "v_head_dim", 128),
    )
    # Derived fields that transformers v5 writes out.
    derived = {"qk_head_dim": latent.nope_dim + latent.rope_dim, "head_dim": latent.rope_dim}
    for key, value in derived.items():
        got = read_size(config, key, value)
        require(got == value, key, f"{value}, which follows from the other sizes", got)
    return latent


def _experts(config: Json, num_layers: int, dense: int, prefix: str) -> ExpertsConfig:
    width = read_size(config, "moe_intermediate_size", 2048)
    count = read_size(config, "n_routed_experts", 256)
    again = read_size(config, "num_local_experts", count)
    require(again == count, "num_local_experts", f"n_routed_experts {count}", again)
    # An explicit null is a choice here too: no shared expert.
    none_shared = config.get("n_shared_experts", 1) is None
    shared = 0 if none_shared else read_size(config, "n_shared_experts", 1, low=0)
    return ExpertsConfig(
        count=count,
        per_token=read_size(config, "num_experts_per_tok", 8),
        width=width,
        router="sigmoid",
        normalise=read_flag(config, "norm_topk_prob", True),
        scaling=read_positive(config, "routed_scaling_factor", 2.5),
        groups=read_size(config, "n_group", 8),
        groups_per_token=read_size(config, "topk_group", 4),
        shared_width=shared * width,
        int4=read_int4(config, *_modules(config, num_layers, dense), prefix),
    )


def _modules(config: Json, num_layers: int, dense: int) -> tuple[list[str], list[str]]:
    """Modules that the int4 scheme must leave alone, and such that it is for."""
    queries = ("q_a_proj", "q_b_proj") if config.get("q_lora_rank", 1536) else ("q_proj",)
    projections = ("gate_proj", "up_proj", "down_proj")
    whole, experts = ["lm_head"], []
    for layer in range(num_layers):
        attention, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
        whole += [f"{attention}.{name}" for name in (*queries, "kv_a_proj_with_mqa", "kv_b_proj")]
        whole += [f"{attention}.o_proj"]
        if layer < dense:
            whole += [f"{mlp}.{name}" for name in projections]
        else:
            whole += [f"{mlp}.shared_experts.{name}" for name in projections]
            experts += [f"{mlp}.experts.0.{name}" for name in projections]
    return whole, experts


def parse_nested(config: Json, generation: Json) -> ModelConfig:
    """The text model of a checkpoint with a vision tower."""
    text = text_config(config, ("kimi_k2", "deepseek_v3"), IMAGE_KEYS)
    return parse_text(text, generation, KIMI_K25.name, NESTED_PREFIX)


_LAYER, _STORED = "layers.{i}.", "model.layers.{i}."
NAMES: dict[str, Stored] = {
    **{
        logical: stored
        for logical, stored in DENSE_NAMES.items()
        if not logical.endswith(("query.weight", "key.weight", "value.weight"))
    },
    **{
        f"{_LAYER}{ours}": f"{_STORED}{theirs}"
        for ours, theirs in (
            ("attention.query.weight", "self_attn.q_proj.weight"),
            ("attention.query_down.weight", "self_attn.q_a_proj.weight"),
            ("attention.query_norm.scale", "self_attn.q_a_layernorm.weight"),
            ("attention.query_up.weight", "self_attn.q_b_proj.weight"),
            ("attention.latent_down.weight", "self_attn.kv_a_proj_with_mqa.weight"),
            ("attention.latent_norm.scale", "self_attn.kv_a_layernorm.weight"),
            ("attention.latent_up.weight", "self_attn.kv_b_proj.weight"),
            ("mlp.router.weight", "mlp.gate.weight"),
            ("mlp.router.bias", "mlp.gate.e_score_correction_bias"),
            ("mlp.shared.gate.weight", "mlp.shared_experts.gate_proj.weight"),
            ("mlp.shared.up.weight", "mlp.shared_experts.up_proj.weight"),
            ("mlp.shared.down.weight", "mlp.shared_experts.down_proj.weight"),
        )
    },
}
for _name in ("gate", "up", "down"):
    _module = f"{_STORED}mlp.experts.{{e}}.{_name}_proj"
    NAMES |= {
        f"{_LAYER}mlp.experts.{_name}.weight": f"{_module}.weight",
        f"{_LAYER}mlp.experts.{_name}.packed": Packed(_module, "weight_packed"),
        f"{_LAYER}mlp.experts.{_name}.scale": Packed(_module, "weight_scale"),
    }

DEEPSEEK_V3 = ModelFamily(
    name="deepseek_v3",
    architectures=("DeepseekV3ForCausalLM",),
    parse_config=lambda config, generation: parse_text(config, generation, DEEPSEEK_V3.name),
    tensor_names=NAMES,
)

KIMI_K2 = ModelFamily(
    name="kimi_k2",
    architectures=("DeepseekV3ForCausalLM",),
    parse_config=lambda config, generation: parse_text(config, generation, KIMI_K2.name),
    tensor_names=NAMES,
)

KIMI_K25 = ModelFamily(
    name="kimi_k25",
    # The published name and transformers' own.
    architectures=("KimiK25ForConditionalGeneration", "Kimi_K25ForConditionalGeneration"),
    parse_config=parse_nested,
    tensor_names=prefixed(NAMES, NESTED_PREFIX),
    ignored=("vision_tower.", "mm_projector."),
)
