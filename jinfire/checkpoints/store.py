"""A folder of this project's own: Orbax arrays by logical name, the config as JSON beside them.

Restoring goes straight to the target shardings, on whatever mesh. Nothing is pickled.
"""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from jinfire.checkpoints.config_json import config_from_json, config_to_json
from jinfire.checkpoints.source import (
    Index,
    allowed_dtypes,
    check_dtypes,
    check_tensors,
    listing,
    normalise,
    read_json,
)
from jinfire.config import ModelConfig
from jinfire.errors import CheckpointMismatch
from jinfire.models.spec import abstract_tree
from jinfire.tokenizer import Tokenizer

CONFIG_NAME = "jinfire.json"
ARRAYS_NAME = "arrays"
FORMAT = "jinfire checkpoint 1"


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
    specs = abstract_tree(config)
    where, expected = str(folder), {name: spec.shape for name, spec in specs.items()}
    check_tensors(where, expected, {name: array.shape for name, array in arrays.items()})
    allowed = {name: allowed_dtypes(spec) for name, spec in specs.items()}
    check_dtypes(where, allowed, {name: array.dtype.name for name, array in arrays.items()})
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

    `dtype` None keeps what is stored; another is that of all tensors that have none of their own.

    Raises: CheckpointMismatch naming arrays that do not fit, or that `shardings` lacks.
    """
    source = Store(Path(path))
    if source.names() != shardings.keys():
        raise CheckpointMismatch(
            f"{path}: shardings: missing {listing(source.names() - shardings.keys())}; "
            f"unexpected {listing(shardings.keys() - source.names())}"
        )
    specs = abstract_tree(source.config)
    target = {
        name: jax.ShapeDtypeStruct(
            source.shape(name),
            specs[name].dtype or dtype or source.dtype(name),
            sharding=sharding,
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
        specs = abstract_tree(self.config)
        check_tensors(where, {name: spec.shape for name, spec in specs.items()}, self._shapes)
        allowed = {name: allowed_dtypes(spec) for name, spec in specs.items()}
        check_dtypes(where, allowed, {name: dtype.name for name, dtype in self._dtypes.items()})

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
