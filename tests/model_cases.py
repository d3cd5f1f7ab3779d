"""Rows of test_cases.py for mixtures of experts, Llama 4, DeepSeek-V3 and Kimi."""

GOLDEN = "test_golden::test_logits_and_hidden_states"
ENGINE = "test_golden::test_engine_continues_like_the_reference"

CASES: dict[str, tuple[tuple[str, str, tuple[str, ...]], ...]] = {
    "E: Llama 4": (
        (
            "huggingface/transformers#37351",
            "chunked attention is a sliding window",
            ("test_kv_views::test_chunk_of_eight_by_hand", GOLDEN),
        ),
        (
            "vllm-project/vllm#19997",
            "temperature of unrotated layers missing",
            ("test_layers::test_temperature_of_queries", "test_hf_experts::test_temperature"),
        ),
        ("vllm-project/vllm#16311", "qk norm over the whole row instead of a head", (ENGINE,)),
        (
            "meta-llama/llama-models#322",
            "RoPE factor taken from elsewhere than the config",
            ("test_hf_experts::test_llama4_defaults", GOLDEN),
        ),
        (
            "vllm-project/llm-compressor#1907",
            "router score scales the output of an expert",
            ("test_moe::test_every_layout_and_form_is_the_mixture", GOLDEN),
        ),
        (
            "vllm-project/tpu-inference#923",
            "nested text_config and the interleaving of experts ignored",
            ("test_hf_experts::test_nested_is_the_text", "test_hf_experts::test_dense_layers"),
        ),
        (
            "keras-team/keras-hub#2658",
            "one of the family's specifics missing",
            (GOLDEN, ENGINE),
        ),
    ),
    "F: DeepSeek-V3 and Kimi": (
        (
            "vllm-project/vllm#13474",
            "dropped groups masked with 0 win over negative scores",
            (
                "test_routing::test_a_dropped_group_never_wins",
                "test_routing::test_a_group_counts_as_its_best_two",
            ),
        ),
        (
            "vllm-project/vllm#12002",
            "selection bias used in the weights",
            ("test_routing::test_the_bias_selects_and_does_not_weigh",),
        ),
        (
            "flashinfer-ai/flashinfer#3875",
            "score recovered from the biased one cancels",
            ("test_routing::test_the_bias_selects_and_does_not_weigh",),
        ),
        (
            "sgl-project/sglang-jax#1282",
            "scaling factor skipped without normalisation",
            ("test_routing::test_normalising_and_scaling_are_independent",),
        ),
        (
            "vllm-project/vllm#24119",
            "scaling factor applied twice",
            ("test_routing::test_normalising_and_scaling_are_independent", GOLDEN),
        ),
        (
            "sgl-project/sglang#28237",
            "shared expert scaled wrong, seen on long outputs only",
            ("test_moe::test_every_layout_and_form_is_the_mixture", GOLDEN),
        ),
        (
            "AI-Hypercomputer/maxtext#1370",
            "softmax scale without yarn's mscale",
            ("test_hf_experts::test_yarn", "test_layers::test_yarn_sizes", GOLDEN),
        ),
        (
            "NVIDIA/Megatron-LM#1429",
            "mscale and mscale_all_dim confused",
            ("test_layers::test_yarn_sizes", GOLDEN),
        ),
        (
            "vllm-project/vllm#41569",
            "width of the latents taken for that of a head in the scale",
            ("test_kv_views::test_pages_are_the_batch", "test_hf_experts::test_latent_sizes"),
        ),
        (
            "flashinfer-ai/flashinfer#3161",
            "a kernel assumes 128 heads",
            ("test_kernels_interpret::test_matches_float64",),
        ),
        (
            "pegainfer-project/pegainfer#238",
            "never stops, for the end token is not loaded",
            ("test_hf_experts::test_end_tokens_of_all_levels",),
        ),
        (
            "ml-explore/mlx-lm#907",
            "compressed-tensors weights read as something else",
            ("test_hf_quantization::test_int4", GOLDEN),
        ),
        (
            "vllm-project/llm-compressor#1613",
            "order of the packed values",
            (
                "test_moe_checkpoints::test_host_and_device_order_words_alike",
                "test_int4_matmul::test_device_order_of_a_group",
                GOLDEN,
            ),
        ),
        (
            "ndif-team/nnsight#653",
            "nested text_config not found",
            ("test_hf_experts::test_nested_is_the_text",),
        ),
        (
            "sgl-project/sglang#38443",
            "modules of the ignore list quantised",
            ("test_hf_quantization::test_only_experts_are_int4",),
        ),
        (
            "deepseek-ai/DeepSeek-V3#741",
            "how groups are chosen",
            ("test_routing::test_groups",),
        ),
        (
            "sgl-project/sglang#30433",
            "absorbed decode differs from the expanded form",
            ("test_kv_views::test_pages_are_the_batch", "test_kv_groups::test_latents", ENGINE),
        ),
        (
            "huggingface/transformers#42580",
            "router bias rounded to bfloat16",
            ("test_loading::test_tensors_with_a_dtype_of_their_own_keep_it",),
        ),
    ),
    "K: experts": (
        (
            "trymirai/lalamo#310",
            "tail rows of a grouped product",
            ("test_kernels_interpret::test_matches_float64",),
        ),
        (
            "openxla/tokamax#889",
            "gradient of a grouped product wrong for empty groups",
            ("test_grouped_matmul_grad::test_matches_ragged_dot",),
        ),
    ),
}
