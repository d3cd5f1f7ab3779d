"""Counts that derive from the abstract tree: parameters, FLOPs and bytes of a token."""

import pytest
from helpers import tiny_config

from jinfire.config import ExpertsConfig, LatentConfig, LayerSpec
from jinfire.models import parse_config
from jinfire.models.spec import (
    active_parameter_count,
    flops_per_token,
    kv_bytes_per_token,
    parameter_count,
)

# Published sizes, where they are not transformers' defaults.
KIMI_K25 = {
    "model_type": "kimi_k2",
    "vocab_size": 163_840,
    "num_attention_heads": 64,
    "first_k_dense_replace": 1,
    "n_routed_experts": 384,
    "n_group": 1,
    "topk_group": 1,
    "eos_token_id": 163_585,
}
INT4_SCHEME = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4,
                "type": "int",
                "strategy": "group",
                "group_size": 32,
                "symmetric": True,
            },
        }
    },
    "ignore": [
        "lm_head",
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        "re:.*mlp.(gate|up|down)_proj",
    ],
}
MAVERICK = {
    "model_type": "llama4_text",
    "num_local_experts": 128,
    "interleave_moe_layer_step": 2,
    "use_qk_norm": False,
}
QWEN3_30B = {"model_type": "qwen3_moe", "head_dim": 128, "num_hidden_layers": 48}


@pytest.mark.parametrize("context", [0, 1, 1000])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_flops_per_token(context, tied, qk_norm):
    config = tiny_config(layers=3, tie_embeddings=tied, qk_norm=qk_norm)
    layer_weights = 32 * (8 + 2 + 2) * 8 + 8 * 8 * 32 + 3 * 32 * 48
    head_weights = 61 * 32
    attention = 3 * 8 * context * (2 * 8 + 2 * 8)  # scores and values, per layer and head
    expected = 2 * (3 * layer_weights + head_weights) + attention
    assert flops_per_token(config, context) == expected


def mixture_flops(context: int) -> int:
    """Of a token in a layer of latent attention and experts, by hand."""
    attention_weights = 32 * 12 + 12 * 8 * 10 + 32 * (10 + 4) + 10 * 8 * (6 + 5) + 8 * 5 * 32
    expert_weights = 32 * 6 + 2 * 3 * 32 * 64 + 3 * 32 * 16  # router, two of six, shared
    attention = 8 * context * (2 * (10 + 4) + 2 * 10)
    return 2 * (attention_weights + expert_weights) + attention


@pytest.mark.parametrize("int4", [False, True])
@pytest.mark.parametrize("context", [0, 7])
def test_counts_of_latent_attention_and_experts(context, int4):
    config = tiny_config(
        (LayerSpec("latent", "experts"),) * 2,
        num_kv_heads=8,
        head_dim=10,
        latent=LatentConfig(query_rank=12, rank=10, nope_dim=6, rope_dim=4, value_dim=5),
        experts=ExpertsConfig(
            count=6,
            per_token=2,
            width=64,
            router="sigmoid",
            groups=2,
            shared_width=16,
            int4=int4,
        ),
    )
    assert flops_per_token(config, context) == 2 * mixture_flops(context) + 2 * 61 * 32
    unused = 2 * 4 * 3 * 32 * 64  # experts that a token does not take, in two layers
    assert parameter_count(config) - active_parameter_count(config) == unused
    norms = 2 * (2 * 32 + 12 + 10) + 32
    biases = 2 * 6
    products = flops_per_token(config) // 2
    assert active_parameter_count(config) == products + 61 * 32 + norms + biases
    assert kv_bytes_per_token(config, 2) == 2 * (10 + 4) * 2


def test_chunked_layers_see_their_chunk():
    chunked = tiny_config(layers=(LayerSpec("chunked"), LayerSpec("unrotated")), attention_chunk=16)
    first, second = flops_per_token(chunked, 10), flops_per_token(chunked, 100)
    whole = 4 * 8 * 8
    assert first - flops_per_token(chunked) == 2 * 10 * whole
    assert second - flops_per_token(chunked) == (16 + 100) * whole


@pytest.mark.parametrize(
    ("config", "total_b", "active_b", "kv_bytes"),
    [
        ({"model_type": "deepseek_v3"}, 671.0, 37.6, 70_272),
        (KIMI_K25, 1026.4, 32.9, 70_272),
        (KIMI_K25 | {"quantization_config": INT4_SCHEME}, 1026.4, 32.9, 70_272),
        ({"model_type": "llama4_text"}, 107.8, 17.2, 196_608),
        (MAVERICK, 400.7, 17.2, 196_608),
        (QWEN3_30B, 30.5, 3.4, 98_304),
        ({"model_type": "mixtral"}, 46.7, 12.9, 131_072),
    ],
)
def test_published_counts(config, total_b, active_b, kv_bytes):
    """Billions of parameters, in all and for one token, and bfloat16 KV."""
    model = parse_config(config)
    assert round(parameter_count(model) / 1e9, 1) == total_b
    assert round(active_parameter_count(model) / 1e9, 1) == active_b
    assert kv_bytes_per_token(model, 2) == kv_bytes


def test_kv_bytes_per_token():
    smollm2 = tiny_config(layers=30, num_heads=9, num_kv_heads=3, head_dim=64, width=576)
    assert kv_bytes_per_token(smollm2, 4) == 46_080
    llama = tiny_config(layers=32, num_heads=32, num_kv_heads=8, head_dim=128, width=4096)
    assert kv_bytes_per_token(llama, 2) == 131_072
