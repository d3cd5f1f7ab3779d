"""`config.json` to `ModelConfig`: both styles, transformers' defaults, refusals by name."""

import json

import pytest

from jinfire.config import RopeConfig
from jinfire.errors import UnsupportedConfig
from jinfire.models import parse_config

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
QWEN3 = {**LLAMA, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 24}
QWEN3 |= {"num_key_value_heads": 2}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def llama(**changes):
    return parse_config({**LLAMA, **changes})


def qwen3(**changes):
    return parse_config({**QWEN3, **changes})


def test_defaults_are_those_of_transformers():
    config = parse_config({"model_type": "llama"})
    assert (config.vocab_size, config.width, config.mlp_width) == (32000, 4096, 11008)
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (32, 32, 32)
    assert (config.head_dim, config.norm_eps, config.max_position) == (128, 1e-6, 2048)
    assert (config.tie_embeddings, config.qk_norm, config.bos_id) == (False, False, 1)
    assert (config.rope, config.eos_ids) == (RopeConfig(theta=1e4), {2})

    config = parse_config({"model_type": "qwen3"})
    assert (config.vocab_size, config.width, config.mlp_width) == (151936, 4096, 22016)
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (32, 32, 32)
    assert (config.head_dim, config.norm_eps, config.max_position) == (128, 1e-6, 32768)
    assert (config.tie_embeddings, config.qk_norm, config.bos_id) == (False, True, None)
    assert (config.rope, config.eos_ids) == (RopeConfig(theta=1e4), frozenset())


def test_heads():
    assert llama().num_kv_heads == 4
    assert llama(num_key_value_heads=None).num_kv_heads == 4
    assert llama(num_key_value_heads=2).num_kv_heads == 2
    assert llama().head_dim == llama(head_dim=None).head_dim == 16
    assert llama(head_dim=32).head_dim == 32
    assert llama(hidden_size=70, head_dim=32).width == 70
    assert qwen3(num_key_value_heads=None).num_kv_heads == 4


def test_published_and_v5_rope_styles_agree():
    expected = RopeConfig(5e5, "llama3", 8.0, 1.0, 4.0, 8192)
    assert llama(rope_theta=5e5, rope_scaling=LLAMA3_ROPE).rope == expected
    old = {"type": "llama3", **{k: v for k, v in LLAMA3_ROPE.items() if k != "rope_type"}}
    assert llama(rope_theta=5e5, rope_scaling=old).rope == expected
    assert llama(rope_parameters={**LLAMA3_ROPE, "rope_theta": 5e5}).rope == expected
    plain = RopeConfig(theta=5e5)
    assert llama(rope_theta=500000, rope_scaling=None).rope == plain
    assert llama(rope_parameters={"rope_type": "default", "rope_theta": 5e5}).rope == plain
    assert llama(rope_theta=5e5, rope_scaling={"type": "default"}).rope == plain
    assert llama(rope_theta=5e5, rope_scaling={"type": "default", "factor": None}).rope == plain


def test_llama3_rope_without_original_length_takes_the_context():
    rope = {k: v for k, v in LLAMA3_ROPE.items() if not k.startswith("original")}
    config = llama(rope_scaling=rope, max_position_embeddings=4096)
    assert config.rope.original_max_position == 4096


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        ({"eos_token_id": 2}, {"eos_token_id": [3, 2]}, {2, 3}),
        ({"eos_token_id": [2, 3]}, None, {2, 3}),
        ({"eos_token_id": None}, {"eos_token_id": 5}, {5}),
        ({"eos_token_id": None}, None, set()),
        ({}, {"eos_token_id": 5}, {5}),
        ({}, {}, {2}),
    ],
)
def test_end_tokens_are_the_union(config, generation, expected):
    bare = {k: v for k, v in LLAMA.items() if k != "eos_token_id"}
    assert parse_config({**bare, **config}, generation).eos_ids == expected


def test_start_token_falls_back_to_the_generation_config():
    bare = {k: v for k, v in LLAMA.items() if k != "bos_token_id"}
    assert parse_config(bare, {"bos_token_id": 7}).bos_id == 7
    assert llama(bos_token_id=None).bos_id is None


def test_harmless_fields_are_accepted():
    llama(
        torch_dtype="bfloat16",
        dtype="bfloat16",
        transformers_version="5.24.0",
        use_cache=True,
        initializer_range=0.04,
        attention_dropout=0.1,
        pretraining_tp=2,
        pad_token_id=-1,
        attention_bias=False,
        mlp_bias=False,
        hidden_act="silu",
        rope_interleaved=False,
        is_llama_config=True,
        partial_rotary_factor=1.0,
        sliding_window=None,
        _name_or_path="x",
        **{"transformers.js_config": {"dtype": "q4"}},
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "hidden_act.*'gelu'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_interleaved": True}, "rope_interleaved"),
        ({"sliding_window": 4096}, "sliding_window"),
        ({"auto_map": {"AutoModel": "code.Model"}}, "auto_map"),
        ({"logit_scale": 0.1}, "logit_scale"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "architectures"),
        ({"architectures": "LlamaForCausalLM"}, "architectures"),
        ({"model_type": "mistral"}, r"model_type.*'llama', .*'qwen3'.*'mistral'"),
        ({"model_type": None}, "model_type"),
        ({"model_type": ["llama"]}, "model_type"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4}}, r"rope_scaling.rope_type.*yarn"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "linear"),
        ({"rope_scaling": {"rope_type": "default", "type": "linear"}}, "rope_type"),
        ({"rope_scaling": {**LLAMA3_ROPE, "beta": 1}}, "beta"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"rope_scaling": {**LLAMA3_ROPE, "factor": float("nan")}}, "factor"),
        ({"rope_scaling": "llama3"}, "rope_scaling"),
        ({"rope_scaling": {"factor": 8.0}}, r"rope_scaling.rope_type.*llama3.*\['factor'\]"),
        ({"rope_parameters": {"rope_type": "default", "factor": 2}}, "rope_parameters.*factor"),
        ({"rope_theta": 1e13}, "rope theta"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "one flat object"),
        ({"rope_parameters": {"rope_theta": 1e4}, "rope_theta": 1e5}, "rope_theta"),
        ({"rope_parameters": {"rope_theta": 1e4}, "rope_scaling": LLAMA3_ROPE}, "both present"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"hidden_size": -64}, "hidden_size"),
        ({"hidden_size": 2**40}, "hidden_size"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"hidden_size": True}, "hidden_size"),
        ({"hidden_size": 64.0}, "hidden_size"),
        ({"hidden_size": 66}, "hidden_size.*multiple"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers"),
        ({"vocab_size": 2**31}, "vocab_size"),
        ({"num_key_value_heads": 3}, "num_key_value_heads.*divisor.*4"),
        ({"head_dim": 15}, "head_dim.*even"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps"),
        ({"rope_theta": float("inf")}, "rope_theta"),
        ({"rope_theta": 10**400}, "rope_theta"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings"),
        ({"eos_token_id": 100}, r"eos_token_id.*\[0, 100\)"),
        ({"eos_token_id": -1}, "eos_token_id"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        ({"eos_token_id": [[2]]}, "eos_token_id"),
        ({"eos_token_id": list(range(99)) * 99}, "eos_token_id: at most"),
        ({"bos_token_id": 1000}, "bos_token_id"),
        ({"bos_token_id": [1]}, "bos_token_id"),
    ],
)
def test_what_changes_the_result_is_refused_by_name(changes, message):
    with pytest.raises(UnsupportedConfig, match=message):
        llama(**changes)


def test_qwen3_windows():
    qwen3(use_sliding_window=False, sliding_window=4096, max_window_layers=1)
    qwen3(use_sliding_window=True, sliding_window=None)
    qwen3(use_sliding_window=True, sliding_window=4096, max_window_layers=3)
    qwen3(layer_types=["full_attention"] * 3)
    for changes, message in (
        ({"use_sliding_window": True, "max_window_layers": 2}, "use_sliding_window.*layer 2 of 3"),
        ({"use_sliding_window": True, "num_hidden_layers": 30}, "layer 28 of 30"),
        ({"layer_types": ["full_attention"] * 2 + ["sliding_attention"]}, "layer_types"),
        ({"layer_types": ["full_attention"] * 2}, "layer_types"),
    ):
        with pytest.raises(UnsupportedConfig, match=message):
            qwen3(**changes)


@pytest.mark.parametrize("config", [[], None, "llama", 3])
def test_a_config_is_an_object(config):
    with pytest.raises(UnsupportedConfig, match="JSON object"):
        parse_config(config)
    with pytest.raises(UnsupportedConfig, match="generation_config"):
        parse_config(LLAMA, [1])


def test_golden_configs(golden):
    def parsed(case):
        return parse_config(json.loads((golden(case) / "config.json").read_text()))

    assert parsed("llama31_f32").rope == RopeConfig(1e4, "llama3", 8.0, 1.0, 4.0, 96)
    assert parsed("llama3_v5config_f32").rope == RopeConfig(2e4, "llama3", 4.0, 2.0, 8.0, 40)
    tied = parsed("llama32_tied_sharded_bf16")
    assert (tied.tie_embeddings, tied.head_dim, tied.eos_ids) == (True, 16, {2, 3})
    qwen = parsed("qwen3_tied_f32")
    assert (qwen.qk_norm, qwen.head_dim, qwen.rope.theta) == (True, 24, 1e6)
