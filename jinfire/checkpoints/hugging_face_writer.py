"""A model as a Hugging Face folder: `config.json` and safetensors in shards, with an index."""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import save_file

from jinfire.checkpoints.shards import INDEX_NAME, SINGLE_NAME
from jinfire.checkpoints.source import (
    Index,
    TensorSource,
    allowed_dtypes,
    check_dtypes,
    check_tensors,
)
from jinfire.checkpoints.stored import Copy, Form, stored_forms
from jinfire.config import ModelConfig
from jinfire.models import MODELS, parse_config
from jinfire.models.spec import abstract_tree
from jinfire.progress import progress

# As transformers writes them.
SHARD_BYTES = 5 * 10**9
METADATA = {"format": "pt"}


def save_hugging_face(
    path: str | Path,
    config_json: Mapping[str, Any],
    config: ModelConfig,
    arrays: Mapping[str, jax.Array | np.ndarray],
    generation_config: Mapping[str, Any] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """A Hugging Face folder from arrays by logical name, the inverse of reading one.

    `config_json` is the content of `config.json` and must describe `config`.

    Raises: CheckpointMismatch naming arrays that do not fit the config; ValueError where the two
    configs differ or the folder holds a checkpoint already.
    """
    specs = abstract_tree(config)
    where, expected = str(path), {name: spec.shape for name, spec in specs.items()}
    check_tensors(where, expected, {name: array.shape for name, array in arrays.items()})
    allowed = {name: allowed_dtypes(spec) for name, spec in specs.items()}
    check_dtypes(where, allowed, {name: array.dtype.name for name, array in arrays.items()})
    source = _Arrays(config, arrays)
    write_hugging_face(path, config_json, source, generation_config, shard_bytes)


def write_hugging_face(
    path: str | Path,
    config_json: Mapping[str, Any],
    source: TensorSource,
    generation_config: Mapping[str, Any] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """A Hugging Face folder from another checkpoint; the host holds one shard at a time.

    The index and then the config are written last: a folder without them is not a checkpoint.

    Raises: ValueError where the configs differ or the folder holds a checkpoint already.
    """
    folder = Path(path)
    if parse_config(config_json, generation_config) != source.config:
        raise ValueError(f"{folder}: config_json: expected that of the model, got another")
    if any(folder.glob("*.safetensors")) or (folder / "config.json").exists():
        raise ValueError(f"{folder}: expected a new folder, it holds a checkpoint already")
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[list[str]] = []
    total_bytes = 0
    try:
        for tensors in _shards(config_json["model_type"], source, shard_bytes):
            save_file(tensors, _partial(folder, len(shards)), METADATA)
            shards.append(list(tensors))
            total_bytes += sum(tensor.nbytes for tensor in tensors.values())
        weight_map = {}
        for number, names in enumerate(shards):
            name = SINGLE_NAME
            if len(shards) > 1:
                name = f"model-{number + 1:05}-of-{len(shards):05}.safetensors"
            os.replace(_partial(folder, number), folder / name)
            weight_map |= dict.fromkeys(names, name)
    finally:
        for left in folder.glob("*.partial"):
            left.unlink()
    if len(shards) > 1:
        index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        _write_json(folder / INDEX_NAME, index)
    if generation_config is not None:
        _write_json(folder / "generation_config.json", generation_config)
    _write_json(folder / "config.json", config_json)


def _shards(
    model_type: str, source: TensorSource, shard_bytes: int
) -> Iterator[dict[str, np.ndarray]]:
    """Native tensors in runs of at most so many bytes, or of one."""
    shard, size = {}, 0
    for name, tensor in _native_tensors(model_type, source):
        if shard and size + tensor.nbytes > shard_bytes:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor
        size += tensor.nbytes
    yield shard


def _native_tensors(model_type: str, source: TensorSource) -> Iterator[tuple[str, np.ndarray]]:
    """Every tensor of the checkpoint, of one logical tensor after the other.

    A native tensor with parts of several logical ones comes with the last of them.
    """
    forms = stored_forms(source.config, MODELS[model_type].tensor_names)
    waiting: dict[str, int] = {}
    for form in forms.values():
        for native, _ in form.natives():
            waiting[native] = waiting.get(native, 0) + 1
    begun: dict[str, np.ndarray] = {}
    for name in progress(forms, desc="write weights"):
        form = forms[name]
        whole = tuple(slice(0, size) for size in form.shape)
        values = source.read(name, whole)
        shapes = {native: expected.shape for native, expected in form.natives()}
        for native, copies in _by_native(form, whole):
            tensor = begun.pop(native, None)
            if tensor is None:
                tensor = np.empty(shapes[native], values.dtype)
            for copy in copies:
                tensor[copy.source] = form.native(values[copy.target])
            waiting[native] -= 1
            if waiting[native]:
                begun[native] = tensor
            else:
                yield native, tensor
        for native, _, constant in form.constants(whole[0]):
            yield native, np.array(constant, np.int32)


def _by_native(form: Form, whole: Index) -> Iterator[tuple[str, list[Copy]]]:
    copies: dict[str, list[Copy]] = {}
    for copy in form.copies(whole):
        copies.setdefault(copy.native, []).append(copy)
    yield from copies.items()


class _Arrays:
    """Arrays by logical name as a `TensorSource`."""

    def __init__(self, config: ModelConfig, arrays: Mapping[str, jax.Array | np.ndarray]) -> None:
        self.config = config
        self._arrays = arrays

    def names(self) -> set[str]:
        return set(self._arrays)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._arrays[name].shape

    def read(self, name: str, index: Index) -> np.ndarray:
        return np.asarray(self._arrays[name])[index]

    def close(self) -> None:
        """Nothing to release."""


def _partial(folder: Path, number: int) -> Path:
    return folder / f"{number:05}.safetensors.partial"


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    os.replace(partial, path)
