"""Byte-level models that a CPU trains in minutes, as Hugging Face configs by name.

Llama 4 and Kimi K2 in small: the same kinds of attention, routing and experts, in the same order.
"""

from typing import Any

from experiments.byte_text import BOS, EOS, VOCAB_SIZE

Json = dict[str, Any]

CONTEXT = 256

_SHARED: Json = {
    "vocab_size": VOCAB_SIZE,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "max_position_embeddings": CONTEXT,
    "rope_theta": 10_000.0,
    "rms_norm_eps": 1e-5,
}

LLAMA4: Json = {
    **_SHARED,
    "architectures": ["Llama4ForCausalLM"],
    "model_type": "llama4_text",
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 192,  # of an expert
    "intermediate_size_mlp": 384,
    "num_local_experts": 8,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 1,
    "no_rope_layer_interval": 4,
    "attention_chunk_size": 64,
    "attn_temperature_tuning": True,
    "attn_scale": 0.1,
    "floor_scale": 64,
    "use_qk_norm": True,
}

KIMI: Json = {
    **_SHARED,
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "kimi_k2",
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 64,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "intermediate_size": 384,
    "moe_intermediate_size": 96,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_group": 1,
    "topk_group": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
}

TINY_MODELS: dict[str, Json] = {
    "llama4-tiny": LLAMA4,
    "kimi-tiny": KIMI,
    # As small as the patterns allow, for smoke runs.
    "llama4-smoke": {
        **LLAMA4,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "head_dim": 16,
        "intermediate_size": 32,
        "intermediate_size_mlp": 32,
        "num_local_experts": 4,
        "no_rope_layer_interval": 2,
        "attention_chunk_size": 16,
        "floor_scale": 16,
        "max_position_embeddings": 64,
    },
    "kimi-smoke": {
        **KIMI,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "intermediate_size": 64,
        "moe_intermediate_size": 32,
        "n_routed_experts": 4,
        "max_position_embeddings": 64,
    },
}
