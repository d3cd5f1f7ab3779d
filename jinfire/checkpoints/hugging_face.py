"""A Hugging Face folder: `config.json` and safetensors, in one file or in shards with an index."""

import json
import warnings
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from jinfire.checkpoints.source import (
    Index,
    NameMap,
    check_tensors,
    listing,
    normalise,
    read_json,
    row_blocks,
)
from jinfire.errors import CheckpointMismatch
from jinfire.models import MODELS, parse_config

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
# Buffers that old writers saved although they follow from the config.
HARMLESS_SUFFIXES = (".rotary_emb.inv_freq",)


class HuggingFaceSource:
    """The tensors of a Hugging Face folder.

    The index is the truth: files it does not name are not read (and warned of), tensors it names
    must be where it says.

    Raises: CheckpointMismatch naming files and tensors; UnsupportedConfig.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        generation = folder / "generation_config.json"
        self.config = parse_config(
            read_json(folder / "config.json"),
            read_json(generation) if generation.exists() else None,
        )
        names = MODELS[self.config.family].tensor_names
        self._map = NameMap({k: v for k, v in names.items() if isinstance(v, str)})
        self._file_of: dict[str, Path] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._dtypes: dict[str, str] = {}
        for path, listed in self._files().items():
            self._add_file(path, listed)
        self._check()

    def names(self) -> set[str]:
        return {logical for n in self._shapes if (logical := self._map.logical(n))}

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[self._map.native(name)]

    def read(self, name: str, index: Index) -> np.ndarray:
        return self._read(self._map.native(name), index)

    def close(self) -> None:
        """Nothing stays open between reads."""

    def _files(self) -> dict[Path, set[str] | None]:
        """Files to read with the tensors the index expects in each, None without an index."""
        present = {p.name for p in self._folder.glob("*.safetensors")}
        index = self._folder / INDEX_NAME
        if not index.exists():
            name = SINGLE_NAME if SINGLE_NAME in present else next(iter(present), "")
            if not present or (len(present) > 1 and name != SINGLE_NAME):
                raise CheckpointMismatch(
                    f"{self._folder}: expected {SINGLE_NAME} or {INDEX_NAME}, found "
                    f"{listing(present) or 'no safetensors file (pickled weights are not read)'}"
                )
            self._warn_stray(present - {name})
            return {self._folder / name: None}

        content = read_json(index)
        weight_map = content.get("weight_map") if isinstance(content, dict) else None
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointMismatch(f"{index}: expected a weight_map of tensor names to files")
        shards: dict[str, set[str]] = {}
        for tensor, shard in weight_map.items():
            if (
                not isinstance(shard, str)
                or not shard.endswith(".safetensors")
                or Path(shard).name != shard
                or "\\" in shard
                or "\0" in shard
            ):
                raise CheckpointMismatch(
                    f"{index}: {tensor}: expected the plain name of a safetensors file, "
                    f"got {shard!r}"
                )
            shards.setdefault(shard, set()).add(tensor)
        if missing := shards.keys() - present:
            lost = set().union(*(shards[s] for s in missing))
            raise CheckpointMismatch(
                f"{self._folder}: missing shards {listing(missing)} with tensors {listing(lost)}"
            )
        self._warn_stray(present - shards.keys())
        return {self._folder / shard: tensors for shard, tensors in sorted(shards.items())}

    def _warn_stray(self, stray: set[str]) -> None:
        if stray:
            warnings.warn(
                f"{self._folder}: files that are not part of the checkpoint and are not read: "
                f"{listing(stray)}",
                stacklevel=5,
            )

    def _add_file(self, path: Path, listed: set[str] | None) -> None:
        try:
            with safe_open(path, framework="numpy") as file:
                stored = set(file.keys())
                wanted = stored if listed is None else listed
                if lacking := wanted - stored:
                    raise CheckpointMismatch(
                        f"{path}: the index is stale, this file lacks {listing(lacking)}"
                    )
                for name in wanted:
                    view = file.get_slice(name)
                    self._file_of[name] = path
                    self._shapes[name] = tuple(view.get_shape())
                    self._dtypes[name] = view.get_dtype()
        except (SafetensorError, OSError) as error:
            lost = _tensors_beyond_end(path)
            named = f"; truncated tensors: {listing(lost)}" if lost else ""
            raise CheckpointMismatch(
                f"{path}: not a complete safetensors file ({error}){named}"
            ) from error
        if unlisted := stored - wanted:
            warnings.warn(
                f"{path}: tensors that the index does not name are not read: {listing(unlisted)}",
                stacklevel=4,
            )

    def _check(self) -> None:
        head, embed = self._map.native("head.weight"), self._map.native("embed.weight")
        tied_head = self.config.tie_embeddings and head in self._shapes
        shapes, unexpected = {}, []
        for name in list(self._shapes):
            if name.endswith(HARMLESS_SUFFIXES):
                del self._shapes[name]
            elif logical := self._map.logical(name):
                shapes[logical] = self._shapes[name]
            else:
                unexpected.append(name)
        if tied_head:
            del shapes["head.weight"]
        where = str(self._folder)
        check_tensors(where, self.config, shapes, unexpected, self._map.native)
        if wrong := [n for n in self._shapes if self._dtypes[n] not in DTYPES]:
            raise CheckpointMismatch(
                f"{where}: expected dtypes {', '.join(DTYPES)}, got "
                + listing(f"{n} ({self._dtypes[n]})" for n in wrong)
            )
        if tied_head:
            if not self._same(head, embed):
                raise CheckpointMismatch(
                    f"{where}: tie_word_embeddings is true but {head} differs from {embed}"
                )
            del self._shapes[head]

    def _same(self, one: str, other: str) -> bool:
        if self._shapes[one] != self._shapes[other] or self._dtypes[one] != self._dtypes[other]:
            return False
        row_bytes = self._shapes[one][1] * np.dtype(DTYPES[self._dtypes[one]]).itemsize
        return all(
            self._read(one, (rows,)).tobytes() == self._read(other, (rows,)).tobytes()
            for rows in row_blocks(slice(0, self._shapes[one][0]), row_bytes)
        )

    def _read(self, native: str, index: Index) -> np.ndarray:
        shape, dtype = self._shapes[native], np.dtype(DTYPES[self._dtypes[native]])
        bounds = normalise(index, shape)
        rows, rest = bounds[0], bounds[1:]
        out = np.empty([part.stop - part.start for part in bounds], dtype)
        for block in row_blocks(rows, int(np.prod(shape[1:])) * dtype.itemsize):
            # Opened anew per block: pages of a mapped file count as the process's memory for as
            # long as the mapping lives.
            with safe_open(self._file_of[native], framework="numpy") as file:
                part = file.get_slice(native)[(block, *rest)]
            out[block.start - rows.start : block.stop - rows.start] = part
        return out


def _tensors_beyond_end(path: Path) -> list[str]:
    """Tensors whose bytes a truncated file lacks, as far as its header can be read."""
    try:
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            data_bytes = path.stat().st_size - 8 - header_bytes
            if not 0 <= header_bytes <= path.stat().st_size:
                return []
            header = json.loads(file.read(header_bytes))
        return [
            name
            for name, entry in header.items()
            if name != "__metadata__" and entry["data_offsets"][1] > data_bytes
        ]
    except (OSError, ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        return []
