"""Faults that users of peer systems reported, and the test that shows each one absent here.

A row is the public thread, what went wrong there, and our tests. It covers the sections of the
collected cases that concern two meshes, faults, first tokens, paged attention, checkpoints,
determinism, sampling, stopping and JAX itself; models of experts and latents have theirs in
model_cases.py.
"""

import ast
from functools import cache
from pathlib import Path

import model_cases
import pytest

TESTS = Path(__file__).parent

IDENTITY = "test_identity_grid::test_tokens_are_those_of_a_single_device"
SOAK = "test_engine_faults::test_random_requests_with_aborts"
ABORT = "test_engine_faults::test_abort_at_every_moment"

CASES: dict[str, tuple[tuple[str, str, tuple[str, ...]], ...]] = {
    "A: transfer between unequal meshes": (
        ("vllm-project/vllm#14952", "other tensor size on the two sides hangs", (IDENTITY,)),
        (
            "vllm-project/vllm#43523",
            "tensor 4 to tensor 1 crashes",
            (IDENTITY, "test_transfer::test_every_bit_arrives"),
        ),
        (
            "sgl-project/sglang#15674",
            "unequal sizes crash under load",
            (SOAK, "test_layout::test_impossible_layouts_are_refused_before_any_weight_is_read"),
        ),
        ("NVIDIA/TensorRT-LLM#6507", "wrong text with unequal sizes", (IDENTITY,)),
        ("sgl-project/sglang#12157", "wrong answers only when disaggregated", (IDENTITY,)),
        ("vllm-project/vllm#17808", "nonsense only when disaggregated", (IDENTITY,)),
        (
            "vllm-project/vllm#52617",
            "a reported hit on other content",
            (
                "test_page_table::test_hit_needs_the_whole_prefix_not_only_the_page",
                "test_engine_faults::test_prefix_hits_give_the_same_tokens_and_are_counted",
            ),
        ),
        (
            "LMCache/LMCache#2459",
            "prompt shorter than a block hangs",
            ("test_engine::test_every_page_with_a_token_is_sent_once", IDENTITY),
        ),
        (
            "vllm-project/vllm#21074",
            "last partial block not sent",
            ("test_engine::test_every_page_with_a_token_is_sent_once", IDENTITY),
        ),
        (
            "llm-d/llm-d#2433",
            "impossible pair refused only at transfer time",
            (
                "test_layout::test_impossible_layouts_are_refused_before_any_weight_is_read",
                "test_engine_requests::test_impossible_placements_are_named",
            ),
        ),
        (
            "vllm-project/vllm#45880",
            "pipeline prefill with another decode",
            (
                IDENTITY,
                "test_identity_grid::test_deep_models_over_uneven_stages",
                "test_pipeline::test_cuts_cover_every_layer_once_on_both_sides",
            ),
        ),
        ("vllm-project/tpu-inference#3379", "unequal sizes not supported in JAX", (IDENTITY,)),
        (
            "sgl-project/sglang#23020",
            "gibberish after some hundred requests",
            (SOAK, "test_engine_faults::test_nothing_grows_over_2000_requests"),
        ),
        (
            "SemiAnalysisAI/InferenceX#1944",
            "decode goes on with pages that did not arrive",
            (
                "test_engine_callers::test_decode_never_waits_for_a_prefill",
                "test_engine_faults::test_poisoned_memory_changes_nothing",
            ),
        ),
    ),
    "B: abort, leak, death": (
        ("vllm-project/vllm#46283", "abort during a load leaks blocks", (ABORT, SOAK)),
        (
            "sgl-project/sglang#35049",
            "abort frees pages that a transfer still writes",
            (
                "test_engine_faults::test_pages_of_an_aborted_handoff_serve_the_next_request_at_once",
            ),
        ),
        (
            "vllm-project/vllm#21570",
            "pages reused before they were read",
            (
                "test_scheduler::test_handoff_frees_the_prefill_pool",
                "test_engine_faults::test_pages_of_an_aborted_handoff_serve_the_next_request_at_once",
            ),
        ),
        (
            "vllm-project/vllm#41269",
            "refused decode strands prefill pages",
            ("test_engine_faults::test_refused_requests_hold_nobody_up",),
        ),
        (
            "sgl-project/sglang#28236",
            "requests without an end after a failure",
            (SOAK, "test_engine_faults::test_abort_everything_and_go_on"),
        ),
        (
            "sgl-project/sglang#10110",
            "hang under many requests",
            (
                "test_engine_faults::test_nothing_grows_over_2000_requests",
                "test_scheduler::test_500_requests_with_aborts_leave_every_page_free",
            ),
        ),
        (
            "NVIDIA/TensorRT-LLM#15737",
            "one stalled transfer stalls all",
            ("test_engine_callers::test_decode_never_waits_for_a_prefill", SOAK),
        ),
        (
            "vllm-project/vllm-ascend#14093",
            "refusal must free the prefill's pages",
            ("test_engine_faults::test_refused_requests_hold_nobody_up",),
        ),
    ),
    "C: first token and length": (
        (
            "sgl-project/sglang#12151",
            "decode goes on after an end token in prefill",
            (
                "test_engine::test_first_token_may_end_the_request",
                "test_engine_faults::test_abort_between_tokens_and_their_copies",
            ),
        ),
        (
            "sgl-project/sglang#7147",
            "one token asked, two given",
            ("test_engine::test_one_token_needs_no_transfer",),
        ),
        (
            "NVIDIA/TensorRT-LLM#11727",
            "log-probabilities of the first token lost",
            ("test_engine::test_logprobs_are_the_models",),
        ),
        (
            "sgl-project/sglang#32897",
            "first token missing from the usage",
            ("test_engine::test_usage_is_that_of_colocated",),
        ),
        (
            "tenstorrent/tt-inference-server#4392",
            "one token less than asked",
            ("test_engine::test_every_max_tokens_gives_a_prefix",),
        ),
        (
            "ai-dynamo/dynamo#4425",
            "slow first token without a cause shown",
            (
                "test_metrics::test_disaggregated_request",
                "test_engine_requests::test_metrics_of_a_request",
            ),
        ),
    ),
    "D: paged and masked attention": (
        (
            "sgl-project/sglang-jax#20",
            "wrong in batches because of page padding",
            (
                "test_invariance::test_same_bits_in_any_company_and_row",
                "test_paged_attention::test_decode_row_ignores_its_batch_mates",
            ),
        ),
        (
            "stanford-crfm/levanter#1033",
            "clamped slice reads a shifted window",
            ("test_paged_attention::test_write_pages_sends_negative_positions_to_the_null_page",),
        ),
        (
            "vllm-project/tpu-inference#2366",
            "page id out of range writes another's page",
            ("test_paged_attention::test_write_pages_drops_pages_outside_the_pool",),
        ),
        (
            "jax-ml/jax#24491",
            "mask wrong where queries are fewer than keys",
            ("test_paged_attention::test_decode_equals_the_last_query_of_a_prefill",),
        ),
        (
            "jax-ml/jax#27224",
            "wrong where the length is no multiple of the block",
            ("test_paged_attention::test_every_length_at_a_page_border",),
        ),
        (
            "flashinfer-ai/flashinfer#4347",
            "page size above 128 is wrong",
            ("test_engine_callers::test_odd_sizes",),
        ),
        (
            "openvinotoolkit/openvino#37377",
            "0 x NaN from unwritten slots",
            (
                "test_engine_faults::test_poisoned_memory_changes_nothing",
                "test_invariance::test_same_bits_over_poisoned_memory",
                "test_paged_attention::test_matches_float64",
            ),
        ),
        (
            "sgl-project/sglang#21553",
            "NaN of padded rows spreads",
            (
                "test_engine_faults::test_poisoned_memory_changes_nothing",
                "test_engine_faults::test_a_row_that_ran_into_poison_harms_nobody",
            ),
        ),
        (
            "vllm-project/tpu-inference#3241",
            "only row 0 is right",
            ("test_invariance::test_same_bits_in_any_company_and_row",),
        ),
        (
            "vllm-project/tpu-inference#2860",
            "padded sampling parameters reach real rows",
            (
                "test_sampler::test_row_depends_on_itself_only",
                "test_invariance::test_same_bits_in_any_company_and_row",
            ),
        ),
        (
            "vllm-project/vllm#11797",
            "heads that do not divide",
            (
                "test_sharding::test_heads_that_do_not_split",
                "test_engine_requests::test_impossible_placements_are_named",
            ),
        ),
        (
            "jax-ml/jax#35916",
            "attention wrong on one backend",
            ("test_paged_attention::test_matches_float64",),
        ),
    ),
    "G: checkpoints": (
        (
            "sgl-project/sglang#32279",
            "missing shard, silent garbage",
            ("test_checkpoints::test_missing_shard_is_named_with_its_tensors",),
        ),
        (
            "Blaizzy/mlx-vlm#1827",
            "stale index, stray shards",
            (
                "test_checkpoints::test_index_is_the_truth",
                "test_checkpoints::test_stale_index_is_refused",
            ),
        ),
        (
            "huggingface/transformers#38870",
            "ties go wrong silently",
            ("test_checkpoints::test_ties_hold_both_ways",),
        ),
        (
            "vllm-project/speculators#184",
            "single file without an index",
            ("test_checkpoints::test_single_file_of_another_name",),
        ),
    ),
    "H: determinism": (
        (
            "vllm-project/vllm#5898",
            "greedy output changes with the batch",
            ("test_invariance::test_same_bits_in_any_company_and_row",),
        ),
        (
            "thinking-machines-lab/batch_invariant_ops#6",
            "one operation is left out",
            (
                "test_invariance::test_same_bits_in_any_company_and_row",
                "test_invariance::test_same_bits_at_the_width_of_a_real_model",
            ),
        ),
        (
            "kekzl/imp#1492",
            "prefix hit claimed exact and is not",
            (
                "test_invariance::test_same_bits_after_a_prefix_hit",
                "test_invariance::test_same_tokens_after_a_hit_on_an_answer",
            ),
        ),
        (
            "vllm-project/vllm#16832",
            "preemption loses output",
            (
                "test_engine_faults::test_preemption_gives_the_same_tokens",
                "test_invariance::test_same_tokens_after_preemption",
            ),
        ),
    ),
    "I: sampling and log-probabilities": (
        (
            "vllm-project/vllm#5404",
            "top_k 1 is not greedy",
            (
                "test_sampler::test_top_k_1_is_greedy",
                "test_engine::test_limits_of_sampling_are_greedy",
            ),
        ),
        (
            "vllm-project/tpu-inference#1386",
            "silently greedy by default",
            (
                "test_sampler::test_distribution",
                "test_engine::test_requests_without_a_seed_differ_and_the_engines_seed_repeats_them",
            ),
        ),
        (
            "huggingface/transformers#18976",
            "top-p at its exact boundary",
            ("test_sampler::test_top_p_at_the_exact_boundary",),
        ),
        (
            "ml-explore/mlx-lm#1912",
            "tiny top-p masks everything",
            (
                "test_sampler::test_tiny_top_p_keeps_the_best_token",
                "test_engine::test_limits_of_sampling_are_greedy",
            ),
        ),
        (
            "ohdearquant/lattice#295",
            "temperature 0 and NaN",
            (
                "test_engine::test_greedy_is_the_models_best_token",
                "test_engine_requests::test_bad_parameters_name_the_field",
            ),
        ),
        (
            "ollama/ollama#16196",
            "log-probabilities before or after the temperature",
            ("test_engine::test_logprobs_are_the_models",),
        ),
    ),
    "J: stop, capacity, empty": (
        (
            "vllm-project/vllm#3672",
            "stop string over token borders missed",
            (
                "test_engine::test_stop_strings_at_every_place_and_length",
                "test_text::test_stop_strings_over_token_borders",
            ),
        ),
        (
            "vllm-project/vllm#7746",
            "empty prompt kills the server",
            ("test_engine_requests::test_bad_prompt_fails_alone",),
        ),
        (
            "vllm-project/vllm#39734",
            "prompt larger than the pool hangs",
            (
                "test_engine_faults::test_prompts_that_fill_the_pool",
                "test_engine_faults::test_refused_requests_hold_nobody_up",
                "test_scheduler::test_add_refuses_what_can_never_fit",
            ),
        ),
    ),
    "K: pipelines and JAX": (
        (
            "vllm-project/vllm#6114",
            "layers that do not divide over stages",
            (
                "test_pipeline::test_stage_counts",
                "test_identity_grid::test_deep_models_over_uneven_stages",
            ),
        ),
        (
            "casys-kaist/LLMServingSim#55",
            "a cut inside a layer",
            ("test_layout::test_stages_are_runs_of_whole_layers",),
        ),
        (
            "sgl-project/sglang-jax#609",
            "recompiles while serving",
            ("test_compile::test_nothing_compiles_after_the_warm_up",),
        ),
        (
            "sgl-project/sglang-jax#234",
            "sharding lost at tensor size 1",
            ("test_compile::test_nothing_compiles_after_the_warm_up",),
        ),
        (
            "jax-ml/jax#4885",
            "copies between devices go over the host",
            ("test_transfer::test_send_does_not_wait_for_the_program_that_makes_the_blocks",),
        ),
        (
            "jax-ml/jax#31793",
            "device_put keeps the old mesh",
            ("test_transfer::test_a_program_on_the_target_takes_the_blocks_as_they_are",),
        ),
        (
            "jax-ml/jax#15368",
            "donation under shard_map not honoured",
            ("test_compile::test_pools_and_rows_are_updated_in_place",),
        ),
        (
            "openxla/xla#45912",
            "donated memory is not reused",
            (
                "test_compile::test_pools_and_rows_are_updated_in_place",
                "test_compile::test_device_memory_is_flat",
            ),
        ),
    ),
} | model_cases.CASES


@cache
def names_in(module: str) -> frozenset[str]:
    path = TESTS / f"{module}.py"
    if not path.is_file():
        return frozenset()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


@pytest.mark.parametrize("section", CASES)
def test_every_case_has_its_tests(section):
    threads = [thread for thread, _, _ in CASES[section]]
    assert len(set(threads)) == len(threads)
    for thread, symptom, names in CASES[section]:
        owner, _, number = thread.partition("#")
        assert owner.count("/") == 1, thread
        assert number.isdigit(), thread
        assert symptom, thread
        assert names, f"{thread}: no test"
        for name in names:
            module, _, test = name.partition("::")
            assert test in names_in(module), f"{thread}: there is no test {name}"
