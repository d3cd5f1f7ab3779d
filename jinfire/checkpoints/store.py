"""A folder of this project's own: Orbax arrays by logical name, the config as JSON beside them.

Restoring goes straight to the target shardings, on whatever mesh. Nothing is pickled.
"""

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from jinfire.checkpoints.source import Index, check_tensors, listing, normalise, read_json
from jinfire.config import LayerSpec, ModelConfig, RopeConfig
from jinfire.errors import CheckpointMismatch, UnsupportedConfig
from jinfire.models import MODELS
from jinfire.models.hf_fields import check_sizes
from jinfire.tokenizer import Tokenizer

CONFIG_NAME = "jinfire.json"
ARRAYS_NAME = "arrays"
FORMAT = "jinfire checkpoint 1"
DTYPES = ("float32", "bfloat16", "float16")


def config_to_json(config: ModelConfig) -> dict[str, Any]:
    """A model config as plain JSON values."""
    fields = dataclasses.asdict(config)
    return {**fields, "layers": list(fields["layers"]), "eos_ids": sorted(config.eos_ids)}


def config_from_json(fields: Any) -> ModelConfig:
    """The inverse of `config_to_json`.

    Raises: UnsupportedConfig naming fields that are missing, unknown or of an impossible value.
    """
    fields = _fields(ModelConfig, fields)
    layers, eos_ids = fields["layers"], fields["eos_ids"]
    if not isinstance(layers, list) or not isinstance(eos_ids, list):
        raise UnsupportedConfig("layers, eos_ids: expected lists")
    fields["layers"] = tuple(LayerSpec(**_fields(LayerSpec, layer)) for layer in layers)
    fields["rope"] = RopeConfig(**_fields(RopeConfig, fields["rope"]))
    if not all(isinstance(token, int) for token in eos_ids):
        raise UnsupportedConfig(f"eos_ids: expected integers, got {eos_ids!r}")
    fields["eos_ids"] = frozenset(eos_ids)
    for name, allowed in (
        ("family", tuple(MODELS)),
        ("tie_embeddings", (True, False)),
        ("qk_norm", (True, False)),
    ):
        if fields[name] not in allowed:
            raise UnsupportedConfig(f"{name}: expected one of {allowed}, got {fields[name]!r}")
    for layer in fields["layers"]:
        if layer != LayerSpec():
            raise UnsupportedConfig(f"layers: expected {LayerSpec()}, got {layer}")
    if fields["rope"].scaling not in (None, "llama3"):
        raise UnsupportedConfig(f"rope.scaling: expected null or llama3, got {fields['rope']}")
    config = ModelConfig(**fields)
    check_sizes(config)
    return config


def _fields(cls: type, values: Any) -> dict[str, Any]:
    names = {field.name for field in dataclasses.fields(cls)}
    if not isinstance(values, dict) or values.keys() != names:
        got = sorted(values) if isinstance(values, dict) else values
        raise UnsupportedConfig(f"{cls.__name__}: expected fields {sorted(names)}, got {got}")
    return dict(values)


def save(
    path: str | Path,
    config: ModelConfig,
    arrays: Mapping[str, jax.Array],
    tokenizer: Tokenizer | None = None,
) -> None:
    """A checkpoint folder from arrays by logical name, on any mesh.

    The config is written last: a folder without it is not a checkpoint.

    Raises: CheckpointMismatch naming arrays that do not fit the config; ValueError where the
    folder holds a checkpoint already.
    """
    folder = Path(path).absolute()
    check_tensors(
        str(folder), config, {name: a.shape for name, a in arrays.items()}, (), lambda name: name
    )
    if (folder / CONFIG_NAME).exists() or (folder / ARRAYS_NAME).exists():
        raise ValueError(f"{folder}: expected a new folder, it holds a checkpoint already")
    folder.mkdir(parents=True, exist_ok=True)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / ARRAYS_NAME, dict(arrays))
        checkpointer.wait_until_finished()
    if tokenizer is not None:
        tokenizer.save(folder)
    partial = folder / f"{CONFIG_NAME}.partial"
    content = {"format": FORMAT, "config": config_to_json(config)}
    partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    os.replace(partial, folder / CONFIG_NAME)


def restore(
    path: str | Path, shardings: Mapping[str, jax.sharding.Sharding], dtype: Any = None
) -> dict[str, jax.Array]:
    """All arrays of a checkpoint, each on its sharding.

    `dtype` None keeps what is stored.

    Raises: CheckpointMismatch naming arrays that do not fit, or that `shardings` lacks.
    """
    source = Store(Path(path))
    if source.names() != shardings.keys():
        raise CheckpointMismatch(
            f"{path}: shardings: missing {listing(source.names() - shardings.keys())}; "
            f"unexpected {listing(shardings.keys() - source.names())}"
        )
    target = {
        name: jax.ShapeDtypeStruct(
            source.shape(name), dtype or source.dtype(name), sharding=sharding
        )
        for name, sharding in shardings.items()
    }
    with _reading(source.arrays_path), ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(source.arrays_path, target)


class Store:
    """A checkpoint folder as a `TensorSource`.

    `restore` is the faster way to device arrays; `read` loads a whole array for each slice that
    is not of the array read last.
    """

    def __init__(self, folder: Path) -> None:
        folder = folder.absolute()
        content = read_json(folder / CONFIG_NAME)
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise CheckpointMismatch(f"{folder / CONFIG_NAME}: expected format {FORMAT!r}")
        self.config = config_from_json(content.get("config"))
        self.arrays_path = folder / ARRAYS_NAME
        self._cached: tuple[str, np.ndarray] | None = None
        with _reading(self.arrays_path), ocp.StandardCheckpointer() as checkpointer:
            metadata = checkpointer.metadata(self.arrays_path).item_metadata
            if metadata is None:
                raise CheckpointMismatch(f"{self.arrays_path}: no readable Orbax metadata")
            self._shapes = {name: tuple(m.shape) for name, m in metadata.tree.items()}
            self._dtypes = {name: np.dtype(m.dtype) for name, m in metadata.tree.items()}
        where = str(self.arrays_path)
        check_tensors(where, self.config, self._shapes, (), lambda name: name)
        if wrong := [n for n, dtype in self._dtypes.items() if dtype.name not in DTYPES]:
            raise CheckpointMismatch(f"{where}: expected dtypes {DTYPES}, not so {listing(wrong)}")

    def names(self) -> set[str]:
        return set(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def dtype(self, name: str) -> np.dtype:
        return self._dtypes[name]

    def read(self, name: str, index: Index) -> np.ndarray:
        bounds = normalise(index, self.shape(name))
        if self._cached is None or self._cached[0] != name:
            self._cached = None
            args = ocp.args.PyTreeRestore(
                item={name: 0},
                restore_args={name: ocp.RestoreArgs(restore_type=np.ndarray)},
                partial_restore=True,
            )
            with _reading(self.arrays_path), ocp.PyTreeCheckpointer() as checkpointer:
                self._cached = (name, checkpointer.restore(self.arrays_path, args=args)[name])
        return self._cached[1][bounds].copy()

    def close(self) -> None:
        self._cached = None


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Orbax's many kinds of failure on damaged files as one, with the path."""
    try:
        yield
    except CheckpointMismatch:
        raise
    except Exception as error:
        raise CheckpointMismatch(f"{path}: cannot be read ({error})") from error
