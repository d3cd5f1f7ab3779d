"""Experts stored as 4-bit integers: the one scheme that is read, refusals of the others by name."""

import copy
import re
import time
from typing import Any

import pytest

from jinfire.config import ModelConfig
from jinfire.errors import UnsupportedConfig
from jinfire.models import hf_quantization, parse_architecture, parse_config
from jinfire.models.presets import preset

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
INT4 = preset("kimi-k2.5")["text_config"]["quantization_config"]


def kimi(**changes: Any) -> ModelConfig:
    return parse_config({"model_type": "kimi_k2", "num_hidden_layers": 4, **changes})


def nested_kimi(text: dict[str, Any] | None = None, **outer: Any) -> ModelConfig:
    inner = {"model_type": "kimi_k2", "num_hidden_layers": 4, **(text or {})}
    return parse_config({"model_type": "kimi_k25", "text_config": inner, **outer})


def test_fp8_is_refused_except_for_planning() -> None:
    for text in ({"model_type": "deepseek_v3"}, {"model_type": "kimi_k2"}):
        for config in (
            text | {"quantization_config": FP8},
            {"model_type": "kimi_k25", "text_config": text | {"quantization_config": FP8}},
            {"model_type": "kimi_k25", "text_config": text, "quantization_config": FP8},
        ):
            before = copy.deepcopy(config)
            with pytest.raises(UnsupportedConfig, match=r"quantization_config.*fp8 weights"):
                parse_config(config)
            bare = {key: value for key, value in config.items() if key != "quantization_config"}
            if "text_config" in bare:
                bare["text_config"] = text
            assert parse_architecture(config) == parse_config(bare)
            assert config == before
    # What else cannot be read is still refused.
    with pytest.raises(UnsupportedConfig, match="quant_method"):
        parse_architecture({"model_type": "kimi_k2", "quantization_config": {"quant_method": "x"}})
    with pytest.raises(UnsupportedConfig, match="JSON object"):
        parse_architecture([])  # type: ignore[arg-type]


def test_int4() -> None:
    for config in (
        kimi(quantization_config=INT4),
        parse_config({"model_type": "deepseek_v3", "quantization_config": INT4}),
        nested_kimi({"quantization_config": INT4}),
        nested_kimi(quantization_config=INT4),
    ):
        assert config.experts is not None
        assert config.experts.int4
    assert not kimi(quantization_config=None).experts.int4  # type: ignore[union-attr]


def changed(path: str, value: Any) -> dict[str, Any]:
    """The int4 scheme with one field of another value."""
    scheme = copy.deepcopy(INT4)
    *parents, last = path.split(".")
    fields: Any = scheme
    for key in parents:
        fields = fields[key]
    fields[last] = value
    return scheme


WEIGHTS = "config_groups.group_0.weights."


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("quant_method", "gptq"),
        ("quant_method", None),
        ("format", "int-quantized"),
        ("format", None),
        ("quantization_status", "frozen"),
        ("kv_cache_scheme", {"num_bits": 8}),
        ("sparsity_config", {"format": "sparse-24"}),
        ("modules_to_convert", ["x"]),
        ("config_groups", {}),
        ("config_groups", {"a": {}, "b": {}}),
        ("config_groups.group_0.targets", ["Linear", "Embedding"]),
        ("config_groups.group_0.input_activations", {"num_bits": 8}),
        ("config_groups.group_0.output_activations", {"num_bits": 8}),
        ("config_groups.group_0.weights", None),
        (WEIGHTS + "num_bits", 8),
        (WEIGHTS + "num_bits", 4.0),
        (WEIGHTS + "type", "float"),
        (WEIGHTS + "strategy", "channel"),
        (WEIGHTS + "group_size", 128),
        (WEIGHTS + "symmetric", False),
        (WEIGHTS + "symmetric", 1),
        (WEIGHTS + "dynamic", True),
        (WEIGHTS + "actorder", "group"),
        (WEIGHTS + "block_structure", [128, 128]),
        (WEIGHTS + "zero_point", 8),
        ("ignore", None),
        ("ignore", "lm_head"),
        ("ignore", [3]),
    ],
)
def test_every_other_scheme_is_refused_by_name(path: str, value: Any) -> None:
    name = path.rsplit(".", 1)[-1]
    with pytest.raises(UnsupportedConfig, match=f"quantization_config.*{name}"):
        kimi(quantization_config=changed(path, value))


def test_only_experts_are_int4() -> None:
    ignored = INT4["ignore"]
    for left_out, module in zip(
        ignored, ("lm_head", "self_attn", "shared_experts", "mlp.gate_proj"), strict=True
    ):
        kept = [entry for entry in ignored if entry != left_out]
        with pytest.raises(UnsupportedConfig, match=rf"ignore: expected \S*{module}"):
            kimi(quantization_config=changed("ignore", kept))
    # A layer of many, by its whole name.
    names = [
        f"model.layers.{layer}.self_attn.{name}"
        for layer in range(4)
        for name in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
    ]
    rest = [entry for entry in ignored if "self_attn" not in entry]
    kimi(quantization_config=changed("ignore", rest + names))
    with pytest.raises(UnsupportedConfig, match=r"model.layers.3.self_attn.o_proj"):
        kimi(quantization_config=changed("ignore", rest + names[:-1]))
    with pytest.raises(UnsupportedConfig, match=r"experts.0.gate_proj is ignored"):
        kimi(quantization_config=changed("ignore", ["re:.*"]))
    for pattern in ("re:(a+)+$", "re:a|b", "re:" + "a" * 300, "re:(", "re:[^a]", "re:a^", "re:$a"):
        with pytest.raises(UnsupportedConfig, match="plain patterns"):
            kimi(quantization_config=changed("ignore", [*ignored, pattern]))


@pytest.mark.parametrize(
    "pattern",
    [
        "",
        "^lm_head$",
        "lm",
        ".*head",
        ".*lm.*head.*$",
        ".*mlp\\.(gate|up|gate_up|down)_proj.*",
        "model.(layers|layer)..*.mlp$",
        "model.*mlp.*mlp",
        "(model|mo|m)(odel|del|l)\\.layers",
        ".*.*.*proj$",
        "mlp$",
        "model$",
    ],
)
def test_patterns_match_as_regular_expressions_do(pattern: str) -> None:
    names = [
        *("lm_head", "model", "model.layers.0.mlp", "model.layers.10.mlp.gate_proj", "mlp.mlp"),
        *("model.layers.0.mlp.gate_up_proj.x", "modelxlayersx0xmlp", "model.layers.0.self_attn.x"),
    ]
    globs = hf_quantization._globs(pattern, "ignore", 32)
    for name in names:
        expected = re.match(pattern, name) is not None
        assert any(glob.matches(name) for glob in globs) == expected, name


def test_patterns_cannot_run_away() -> None:
    # Equal alternatives and many stars, which a search that goes back would try for hours.
    slow = "re:model.*" + "(e|e|e)" * 12 + ".*" * 40 + "never"
    many = [f"re:.*a.*b.*c.*d.*e.*{number}$" for number in range(20)]
    start = time.perf_counter()
    config = changed("ignore", [*many, slow, slow, *INT4["ignore"]])
    assert kimi(num_hidden_layers=500, quantization_config=config).experts.int4  # type: ignore[union-attr]
    assert time.perf_counter() - start < 20
    for entries in (["re:" + "(a|b)" * 30], [f"re:{number}" for number in range(33)]):
        with pytest.raises(UnsupportedConfig, match="ignore: expected at most 32 patterns"):
            kimi(quantization_config=changed("ignore", entries))


def test_modules_of_a_nested_model_have_either_name() -> None:
    ignored = ["language_model.lm_head", "re:vision_tower.*", *INT4["ignore"][1:]]
    scheme = changed("ignore", ignored)
    assert nested_kimi({"quantization_config": scheme}).experts.int4  # type: ignore[union-attr]
    with pytest.raises(UnsupportedConfig, match="ignore: expected lm_head too"):
        kimi(quantization_config=scheme)
    scheme = changed("ignore", [*ignored, "language_model.model.layers.3.mlp.experts.0.up_proj"])
    with pytest.raises(UnsupportedConfig, match=r"experts\.0\.up_proj is ignored"):
        nested_kimi({"quantization_config": scheme})
