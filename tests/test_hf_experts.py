"""`config.json` of mixtures of experts and latent attention: defaults, nesting, refusals."""

import json
from typing import Any

import pytest

from jinfire.config import (
    ExpertsConfig,
    LatentConfig,
    LayerSpec,
    ModelConfig,
    RopeConfig,
    TemperatureConfig,
)
from jinfire.errors import UnsupportedConfig
from jinfire.models import parse_config
from jinfire.models.presets import preset

LATENT_EXPERTS, LATENT_DENSE = LayerSpec("latent", "experts"), LayerSpec("latent")
YARN = {
    "type": "yarn",
    "factor": 40,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
INT4 = preset("kimi-k2.5")["text_config"]["quantization_config"]


def deepseek(**changes: Any) -> ModelConfig:
    return parse_config({"model_type": "deepseek_v3", "num_hidden_layers": 4, **changes})


def kimi(**changes: Any) -> ModelConfig:
    return parse_config({"model_type": "kimi_k2", "num_hidden_layers": 4, **changes})


def nested_kimi(text: dict[str, Any] | None = None, **outer: Any) -> ModelConfig:
    inner = {"model_type": "kimi_k2", "num_hidden_layers": 4, **(text or {})}
    return parse_config({"model_type": "kimi_k25", "text_config": inner, **outer})


def llama4(**changes: Any) -> ModelConfig:
    return parse_config({"model_type": "llama4_text", "num_hidden_layers": 8, **changes})


def nested_llama4(text: dict[str, Any] | None = None, **outer: Any) -> ModelConfig:
    inner = {"model_type": "llama4_text", "num_hidden_layers": 8, **(text or {})}
    return parse_config({"model_type": "llama4", "text_config": inner, **outer})


def qwen3(**changes: Any) -> ModelConfig:
    return parse_config({"model_type": "qwen3_moe", "num_hidden_layers": 4, **changes})


def mixtral(**changes: Any) -> ModelConfig:
    return parse_config({"model_type": "mixtral", "num_hidden_layers": 4, **changes})


# --- What a silent config means


def test_deepseek_defaults() -> None:
    config = parse_config({"model_type": "deepseek_v3"})
    assert (config.vocab_size, config.width, config.mlp_width) == (129_280, 7168, 18_432)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (128, 128, 192)
    assert config.layers == (LATENT_DENSE,) * 3 + (LATENT_EXPERTS,) * 58
    assert config.latent == LatentConfig(1536, 512, 128, 64, 128, norm_eps=1e-6)
    assert config.experts == ExpertsConfig(
        256, 8, 2048, "sigmoid", True, 2.5, groups=8, groups_per_token=4, shared_width=2048
    )
    assert config.rope == RopeConfig(interleaved=True)
    assert (config.max_position, config.norm_eps) == (4096, 1e-6)
    assert (config.bos_id, config.eos_ids, config.tie_embeddings) == (0, {1}, False)
    assert config.kv_groups == ("full",)


def test_llama4_defaults() -> None:
    config = parse_config({"model_type": "llama4_text"})
    local, full = LayerSpec("chunked", "experts", "local"), LayerSpec("unrotated", "experts")
    assert config.layers == (local, local, local, full) * 12
    assert (config.vocab_size, config.width, config.mlp_width) == (202_048, 5120, 16_384)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (40, 8, 128)
    assert (config.max_position, config.norm_eps) == (131_072, 1e-5)
    assert config.rope == RopeConfig(theta=500_000.0, interleaved=True)
    assert (config.attention_chunk, config.temperature) == (8192, TemperatureConfig(0.1, 8192))
    assert config.experts == ExpertsConfig(16, 1, 8192, "scaled_input", shared_width=8192)
    assert (config.qk_norm, config.qk_norm_after_rope, config.tie_embeddings) == (
        False,
        True,
        False,
    )
    assert (config.bos_id, config.eos_ids) == (1, {2})


def test_qwen3_moe_defaults() -> None:
    config = parse_config({"model_type": "qwen3_moe"})
    assert config.layers == (LayerSpec(mlp="experts"),) * 24
    assert (config.vocab_size, config.width, config.mlp_width) == (151_936, 2048, 6144)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (32, 4, 64)
    assert config.experts == ExpertsConfig(128, 8, 768)
    assert (config.qk_norm, config.rope, config.eos_ids) == (True, RopeConfig(), frozenset())


def test_mixtral_defaults() -> None:
    config = parse_config({"model_type": "mixtral"})
    assert config.layers == (LayerSpec(mlp="experts"),) * 32
    assert (config.vocab_size, config.width, config.num_heads) == (32_000, 4096, 32)
    assert (config.num_kv_heads, config.head_dim, config.norm_eps) == (8, 128, 1e-5)
    assert config.experts == ExpertsConfig(8, 2, 14_336, normalise=True)
    assert (config.qk_norm, config.rope.theta, config.max_position) == (False, 1e6, 131_072)


# --- Which layers are of which kind


def test_dense_layers() -> None:
    assert deepseek(first_k_dense_replace=0).layers == (LATENT_EXPERTS,) * 4
    assert deepseek(first_k_dense_replace=9).layers == (LATENT_DENSE,) * 4
    experts = [spec.mlp == "experts" for spec in llama4(interleave_moe_layer_step=2).layers]
    assert experts == [False, True] * 4
    experts = [spec.mlp == "experts" for spec in llama4(moe_layers=[0, 5]).layers]
    assert experts == [True, False, False, False, False, True, False, False]
    experts = [spec.mlp == "experts" for spec in llama4(moe_layers=[]).layers]
    assert not any(experts)
    sparse = qwen3(decoder_sparse_step=2, mlp_only_layers=[1])
    assert [spec.mlp for spec in sparse.layers] == ["dense", "dense", "dense", "experts"]


def test_parts_that_no_layer_has() -> None:
    for config in (
        deepseek(first_k_dense_replace=9),
        llama4(moe_layers=[]),
        qwen3(mlp_only_layers=[0, 1, 2, 3]),
    ):
        assert config.experts is None
    whole = llama4(no_rope_layers=[0] * 8)
    assert (whole.attention_chunk, whole.temperature is None) == (None, False)
    local = llama4(no_rope_layers=[1] * 8)
    assert (local.attention_chunk, local.temperature) == (8192, None)


def test_unrotated_layers() -> None:
    def rotated(**changes: Any) -> list[int]:
        return [int(spec.attention == "chunked") for spec in llama4(**changes).layers]

    assert rotated() == rotated(no_rope_layers=[]) == [1, 1, 1, 0] * 2
    assert rotated(no_rope_layer_interval=2) == [1, 0] * 4
    given = [0, 1, 1, 1, 1, 1, 1, 0]
    assert rotated(no_rope_layers=given) == given
    kinds = ["chunked_attention" if flag else "full_attention" for flag in given]
    assert rotated(no_rope_layers=given, layer_types=kinds) == given
    with pytest.raises(UnsupportedConfig, match="layer_types"):
        rotated(layer_types=kinds)


def test_temperature() -> None:
    # Published configs write 4 for true.
    for tuning in (True, 4, 1, None):
        assert llama4(attn_temperature_tuning=tuning).temperature == TemperatureConfig(0.1, 8192)
    for tuning in (False, 0):
        assert llama4(attn_temperature_tuning=tuning).temperature is None
    own = llama4(attn_scale=0.3, floor_scale=8).temperature
    assert own == TemperatureConfig(0.3, 8)


def test_latent_sizes() -> None:
    assert deepseek(q_lora_rank=None).latent == LatentConfig(None, 512, 128, 64, 128)
    config = deepseek(
        q_lora_rank=32, kv_lora_rank=24, qk_nope_head_dim=15, qk_rope_head_dim=8, v_head_dim=24
    )
    assert config.latent == LatentConfig(32, 24, 15, 8, 24)
    assert (config.head_dim, config.kv_widths, config.cached_heads) == (23, (32,), 1)
    # Whatever norms elsewhere have.
    config = deepseek(rms_norm_eps=1e-3)
    assert config.latent is not None
    assert (config.norm_eps, config.latent.norm_eps) == (1e-3, 1e-6)
    deepseek(head_dim=64, qk_head_dim=192)  # derived fields of transformers v5
    assert deepseek(n_shared_experts=2).experts.shared_width == 4096  # type: ignore[union-attr]
    for none in (0, None):
        experts = deepseek(n_shared_experts=none).experts
        assert experts is not None
        assert experts.shared_width == 0


def test_yarn() -> None:
    expected = RopeConfig(
        1e4, "yarn", 40.0, original_max_position=4096, mscale_all_dim=1.0, interleaved=True
    )
    assert deepseek(rope_scaling=YARN).rope == expected
    v5 = {key: value for key, value in YARN.items() if key != "type"} | {"rope_type": "yarn"}
    assert deepseek(rope_parameters=v5 | {"rope_theta": 1e4}).rope == expected
    bare = {"type": "yarn", "factor": 4, "original_max_position_embeddings": 64}
    rope = deepseek(rope_scaling=bare, rope_interleave=False).rope
    assert rope == RopeConfig(1e4, "yarn", 4.0, original_max_position=64)


# --- A vision tower beside the text


def test_nested_is_the_text() -> None:
    text = {"vocab_size": 200, "eos_token_id": 2}
    for nested, plain, family in (
        (nested_kimi(text, vision_config={"x": 1}), kimi(**text), "kimi_k25"),
        (nested_llama4(text, vision_config={"x": 1}), llama4(**text), "llama4"),
    ):
        assert nested.family == family
        fields = vars(nested) | {"family": plain.family}
        assert fields == vars(plain)


def test_end_tokens_of_all_levels() -> None:
    config = {
        "model_type": "kimi_k25",
        "eos_token_id": 5,
        "text_config": {"model_type": "kimi_k2", "eos_token_id": [6, 7]},
    }
    assert parse_config(config, {"eos_token_id": 8}).eos_ids == {5, 6, 7, 8}
    assert nested_kimi({"eos_token_id": 6}).eos_ids == {6}
    assert nested_kimi(eos_token_id=5).eos_ids == {5}
    assert nested_kimi({"eos_token_id": 6}, eos_token_id=None).eos_ids == {6}
    assert nested_llama4().eos_ids == {2}


@pytest.mark.parametrize("nested", [nested_kimi, nested_llama4])
def test_tied_embeddings_of_both_levels(nested) -> None:
    assert not nested().tie_embeddings
    assert nested(tie_word_embeddings=True).tie_embeddings
    assert nested({"tie_word_embeddings": True}).tie_embeddings
    assert not nested(tie_word_embeddings=False).tie_embeddings
    with pytest.raises(UnsupportedConfig, match="tie_word_embeddings: True, but False"):
        nested({"tie_word_embeddings": False}, tie_word_embeddings=True)


# --- What changes the result is refused by name


@pytest.mark.parametrize(
    ("parse", "changes", "message"),
    [
        (deepseek, {"scoring_func": "softmax"}, "scoring_func.*'sigmoid'.*'softmax'"),
        (deepseek, {"topk_method": "greedy"}, "topk_method"),
        (deepseek, {"moe_layer_freq": 2}, "moe_layer_freq"),
        (deepseek, {"attention_bias": True}, "attention_bias"),
        (deepseek, {"index_topk": 2048}, "index_topk"),
        (deepseek, {"num_key_value_heads": 8}, "num_key_value_heads.*128"),
        (deepseek, {"head_dim": 128}, "head_dim.*64"),
        (deepseek, {"qk_head_dim": 128}, "qk_head_dim.*192"),
        (deepseek, {"qk_rope_head_dim": 63}, "qk_rope_head_dim.*even"),
        (deepseek, {"q_lora_rank": 0}, "q_lora_rank"),
        (deepseek, {"n_group": 5}, "expert groups.*divisor of 256"),
        (deepseek, {"n_group": 256}, "expert groups.*at least 2"),
        (deepseek, {"topk_group": 9}, "topk_group"),
        (deepseek, {"num_experts_per_tok": 129}, "num_experts_per_tok.*128"),
        (deepseek, {"num_local_experts": 8}, "num_local_experts"),
        (deepseek, {"routed_scaling_factor": 0}, "routed_scaling_factor"),
        (deepseek, {"first_k_dense_replace": -1}, "first_k_dense_replace"),
        (deepseek, {"norm_topk_prob": 1}, "norm_topk_prob"),
        (deepseek, {"rope_scaling": YARN | {"attention_factor": 2}}, "attention_factor"),
        (deepseek, {"rope_scaling": YARN | {"truncate": False}}, "truncate"),
        (deepseek, {"rope_scaling": {"type": "yarn"}}, "factor"),
        (deepseek, {"rope_scaling": YARN | {"mscale": None}}, "mscale_all_dim.*both"),
        (deepseek, {"rope_scaling": YARN | {"mscale_all_dim": 0}}, "mscale_all_dim"),
        (deepseek, {"rope_scaling": YARN, "rope_theta": 1}, "rope_theta"),
        (deepseek, {"rope_scaling": {"type": "llama3", "factor": 8}}, "rope_type.*llama3"),
        (deepseek, {"moe_intermediate_size": 48, "quantization_config": INT4}, "multiple of 32"),
        (deepseek, {"hidden_size": 100, "quantization_config": INT4}, "width: .*multiple of 32"),
        (deepseek, {"rope_scaling": {"factor": 40}}, r"rope_type.*yarn.*\['factor'\].*'default'"),
        (deepseek, {"rope_scaling": YARN | {"beta_fast": 1e-300}}, "rope beta_fast"),
        (deepseek, {"num_hidden_layers": 4096, "n_routed_experts": 512}, "at most 1048576 in all"),
        (qwen3, {"num_experts": 65_536, "num_hidden_layers": 17}, "number of experts: .*1114112"),
        (nested_kimi, {"text_config": None}, "text_config"),
        (nested_kimi, {"text_config": {"model_type": "llama"}}, "text_config.model_type.*llama"),
        (nested_kimi, {"logit_scale": 2}, "logit_scale"),
        (nested_kimi, {"text": {"logit_scale": 2}}, "logit_scale"),
        (nested_kimi, {"bos_token_id": 1, "text": {"bos_token_id": 0}}, "bos_token_id"),
        (llama4, {"no_rope_layers": [1, 0]}, "no_rope_layers.*8 entries"),
        (llama4, {"no_rope_layers": [2] * 8}, "no_rope_layers"),
        (llama4, {"moe_layers": [8]}, "moe_layers"),
        (llama4, {"attn_temperature_tuning": "yes"}, "attn_temperature_tuning"),
        (llama4, {"attn_scale": 0}, "attn_scale"),
        (llama4, {"floor_scale": 0}, "floor_scale"),
        (llama4, {"attention_chunk_size": 0}, "attention_chunk_size"),
        (llama4, {"attention_chunk_size": None}, "attention_chunk_size: .*tokens, got None"),
        (llama4, {"num_experts_per_tok": 17}, "num_experts_per_tok"),
        (llama4, {"quantization_config": INT4}, "quantization_config"),
        (llama4, {"rope_scaling": YARN}, "rope_type"),
        (nested_llama4, {"text_config": {"model_type": "llama"}}, "text_config.model_type"),
        (nested_llama4, {"router_scale": 2}, "router_scale"),
        (qwen3, {"use_sliding_window": True}, "use_sliding_window"),
        (qwen3, {"mlp_only_layers": "all"}, "mlp_only_layers"),
        (qwen3, {"num_experts": 4}, "num_experts_per_tok"),
        (qwen3, {"num_experts": 16, "num_local_experts": 8}, "num_local_experts"),
        (qwen3, {"decoder_sparse_step": 0}, "decoder_sparse_step"),
        (qwen3, {"shared_expert_intermediate_size": 8}, "shared_expert"),
        (qwen3, {"qkv_bias": True}, "qkv_bias"),
        (qwen3, {"use_qk_norm": False}, "use_qk_norm"),
        (mixtral, {"sliding_window": 4096}, "sliding_window"),
        (mixtral, {"num_local_experts": 1}, "num_experts_per_tok"),
    ],
)
def test_refusals(parse, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedConfig, match=message):
        parse(**changes)


def test_harmless_fields_are_accepted() -> None:
    deepseek(ep_size=1, aux_loss_alpha=0.001, seq_aux=True, num_nextn_predict_layers=1)
    deepseek(auto_map={"AutoModel": "modeling.Model"}, pretraining_tp=1, pad_token_id=3)
    llama4(for_llm_compressor=False, router_jitter_noise=0.1, cache_implementation="hybrid")
    nested_llama4(boi_token_index=3, eoi_token_index=4, image_token_index=5, torch_dtype="x")
    nested_kimi(ignore_index=-100, media_placeholder_token_id=7, use_unified_vision_chunk=True)
    qwen3(output_router_logits=False, router_aux_loss_coef=0.1, sliding_window=4096)
    qwen3(qkv_bias=False, use_qk_norm=True, shared_expert_intermediate_size=0)
    mixtral(router_aux_loss_coef=0.02, sliding_window=None)


def test_golden_configs(golden) -> None:
    def parsed(case: str) -> ModelConfig:
        return parse_config(json.loads((golden(case) / "config.json").read_text()))

    def int4(case: str) -> bool:
        experts = parsed(case).experts
        return experts is not None and experts.int4

    assert parsed("llama4_nested_scout_f32").rope.low_freq_factor == 1
    assert parsed("llama4_step2_bf16").temperature == TemperatureConfig(0.25, 6)
    assert not parsed("deepseek_v3_rope_half_f32").rope.interleaved
    assert parsed("deepseek_v3_noqlora_bf16").latent == LatentConfig(None, 24, 16, 16, 24)
    assert int4("kimi_k2_int4")
    assert int4("kimi_k25_int4_sharded")
    assert not int4("kimi_k25_f32")
