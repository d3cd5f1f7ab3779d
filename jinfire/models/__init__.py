"""The model families: one file each, one line each in `MODELS`."""

from collections.abc import Mapping
from typing import Any

from jinfire.config import ModelConfig
from jinfire.errors import UnsupportedConfig
from jinfire.models.deepseek import DEEPSEEK_V3, KIMI_K2, KIMI_K25
from jinfire.models.family import GGUFForm, ModelFamily
from jinfire.models.hf_fields import check_sizes, without_unused
from jinfire.models.hf_quantization import FP8
from jinfire.models.llama import LLAMA
from jinfire.models.llama4 import LLAMA4, LLAMA4_TEXT
from jinfire.models.mixtral import MIXTRAL
from jinfire.models.qwen3 import QWEN3
from jinfire.models.qwen3_moe import QWEN3_MOE

__all__ = ["MODELS", "GGUFForm", "ModelFamily", "parse_architecture", "parse_config"]

MODELS: dict[str, ModelFamily] = {
    "llama": LLAMA,
    "llama4": LLAMA4,
    "llama4_text": LLAMA4_TEXT,
    "qwen3": QWEN3,
    "qwen3_moe": QWEN3_MOE,
    "mixtral": MIXTRAL,
    "deepseek_v3": DEEPSEEK_V3,
    "kimi_k2": KIMI_K2,
    "kimi_k25": KIMI_K25,
}


def parse_config(
    config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None
) -> ModelConfig:
    """The model that a `config.json` (and `generation_config.json`) describes.

    Both the published and the transformers-v5 style are read. End tokens are the union of both
    files: chat models often name their end-of-turn token in one of the two only.

    Raises: UnsupportedConfig naming the field, what is supported and what came.
    """
    if not isinstance(config, Mapping):
        raise UnsupportedConfig(f"config: expected a JSON object, got {type(config).__name__}")
    if generation_config is not None and not isinstance(generation_config, Mapping):
        raise UnsupportedConfig("generation_config: expected a JSON object")
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in MODELS:
        raise UnsupportedConfig(f"model_type: expected one of {sorted(MODELS)}, got {model_type!r}")
    family = MODELS[model_type]
    named = config.get("architectures")
    if named is not None and named not in [[name] for name in family.architectures]:
        raise UnsupportedConfig(
            f"architectures: expected one of {list(family.architectures)}, got {named!r}"
        )
    model = without_unused(family.parse_config(config, generation_config or {}))
    check_sizes(model)
    return model


def parse_architecture(
    config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None
) -> ModelConfig:
    """The model that a config describes, for planning, with weights that are not fp8.

    As `parse_config`, which refuses checkpoints of fp8 weights because they cannot be read.
    """
    return parse_config(_without_fp8(config), generation_config)


def _without_fp8(config: Mapping[str, Any]) -> Mapping[str, Any]:
    if not isinstance(config, Mapping):
        return config
    kept = dict(config)
    scheme = kept.get("quantization_config")
    if isinstance(scheme, Mapping) and scheme.get("quant_method") == FP8:
        del kept["quantization_config"]
    if "text_config" in kept:
        kept["text_config"] = _without_fp8(kept["text_config"])
    return kept
