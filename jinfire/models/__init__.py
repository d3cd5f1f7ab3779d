"""The model families: one file each, one line each in `MODELS`."""

from collections.abc import Mapping
from typing import Any

from jinfire.config import ModelConfig
from jinfire.errors import UnsupportedConfig
from jinfire.models.family import GGUFForm, ModelFamily
from jinfire.models.llama import LLAMA
from jinfire.models.qwen3 import QWEN3

__all__ = ["MODELS", "GGUFForm", "ModelFamily", "parse_config"]

MODELS: dict[str, ModelFamily] = {
    "llama": LLAMA,
    "qwen3": QWEN3,
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
    return family.parse_config(config, generation_config or {})
