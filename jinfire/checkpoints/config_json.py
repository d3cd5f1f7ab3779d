"""A model config as JSON and back, for checkpoints of this project's own."""

import dataclasses
import types
import typing
from typing import Any

from jinfire.config import LayerSpec, ModelConfig
from jinfire.errors import UnsupportedConfig
from jinfire.models import MODELS
from jinfire.models.hf_fields import (
    MAX_LAYERS,
    MAX_POSITION,
    check_sizes,
    is_int,
    is_real,
    layers_that_use,
)

# Fields of which only some values have a meaning, by class and name.
CHOICES: dict[tuple[str, str], tuple[object, ...]] = {
    ("RopeConfig", "scaling"): (None, "llama3", "yarn"),
    ("LayerSpec", "attention"): ("causal", "chunked", "unrotated", "latent"),
    ("LayerSpec", "mlp"): ("dense", "experts"),
    ("LayerSpec", "kv_group"): ("full", "local"),
    ("ExpertsConfig", "router"): ("softmax", "sigmoid", "scaled_input"),
}
# Integers that may be 0; the others are at least 1.
ZERO = {("ModelConfig", "bos_id"), ("ExpertsConfig", "shared_width")}


def config_to_json(config: ModelConfig) -> dict[str, Any]:
    """A model config as plain JSON values."""
    fields = dataclasses.asdict(config)
    return {**fields, "layers": list(fields["layers"]), "eos_ids": sorted(config.eos_ids)}


def config_from_json(fields: Any) -> ModelConfig:
    """The inverse of `config_to_json`; what is absent has its default.

    Raises: UnsupportedConfig naming fields that are missing, unknown or of an impossible value.
    """
    config = _record(ModelConfig, fields)
    if config.family not in MODELS:
        raise UnsupportedConfig(f"family: expected one of {tuple(MODELS)}, got {config.family!r}")
    # Parts first: sizes are checked as what the layers make of them.
    _check_parts(config)
    check_sizes(config)
    return config


def _record(cls: type, values: Any) -> Any:
    """A dataclass from a JSON object, each field as its annotation says."""
    fields = dataclasses.fields(cls)
    names = {field.name for field in fields}
    required = {
        field.name
        for field in fields
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    }
    if not isinstance(values, dict) or not required <= values.keys() <= names:
        got = sorted(map(str, values)) if isinstance(values, dict) else repr(values)
        raise UnsupportedConfig(
            f"{cls.__name__}: expected fields {sorted(required)}, perhaps "
            f"{sorted(names - required)}, got {got}"
        )
    hints = typing.get_type_hints(cls)
    return cls(**{name: _value(cls, name, hints[name], got) for name, got in values.items()})


def _value(cls: type, name: str, kind: Any, got: Any) -> Any:
    """One field of a dataclass.

    Raises: UnsupportedConfig where the value is not what the annotation says.
    """
    place = cls.__name__, name
    if isinstance(kind, types.UnionType):
        if got is None and type(None) in kind.__args__:
            return None
        (kind,) = set(kind.__args__) - {type(None)}
    if dataclasses.is_dataclass(kind):
        return _record(typing.cast(type, kind), got)
    if place in CHOICES:
        if not isinstance(got, str | None) or got not in CHOICES[place]:
            raise UnsupportedConfig(f"{name}: expected one of {CHOICES[place]}, got {got!r}")
        return got
    if isinstance(got, list):
        if typing.get_origin(kind) is tuple and len(got) <= MAX_LAYERS:
            return tuple(_record(LayerSpec, layer) for layer in got)
        if typing.get_origin(kind) is frozenset and all(map(is_int, got)):
            return frozenset(got)
    elif _is_scalar(got, kind, 0 if place in ZERO else 1):
        return typing.cast(Any, kind)(got)
    raise UnsupportedConfig(f"{name}: expected {kind}, got {got!r}")


def _is_scalar(got: Any, kind: Any, least: int) -> bool:
    if kind is int:
        return is_int(got) and least <= got <= MAX_POSITION
    if kind is float:
        return is_real(got) and got >= 0
    return kind in (bool, str) and isinstance(got, kind)


def _check_parts(config: ModelConfig) -> None:
    """Refusal of layers without the part that describes them, and of parts without layers."""
    for name, uses in layers_that_use(config).items():
        part = getattr(config, name)
        # Unrotated queries grow or do not.
        if part is None and any(uses) and name != "temperature":
            raise UnsupportedConfig(
                f"{name}: expected a value, as layer {uses.index(True)} needs it, got null"
            )
        if part is not None and not any(uses):
            raise UnsupportedConfig(f"{name}: expected null, as no layer needs it, got {part}")
    latent = layers_that_use(config)["latent"]
    if any(latent) and not all(latent):
        raise UnsupportedConfig(
            f"layers: expected latent attention in all or none, got none in {latent.index(False)}"
        )
    for layer in config.layers:
        if (layer.attention == "chunked") != (layer.kv_group == "local"):
            raise UnsupportedConfig(
                f"layers: expected kv_group local for chunked attention alone, got {layer}"
            )
