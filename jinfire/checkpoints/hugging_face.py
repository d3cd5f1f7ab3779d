"""A Hugging Face folder: `config.json` and safetensors, in one file or in shards with an index."""

import json
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from jinfire.checkpoints.source import (
    BLOCK_BYTES,
    FLOATS,
    Index,
    check_dtypes,
    check_tensors,
    listing,
    normalise,
    read_json,
    row_blocks,
)
from jinfire.checkpoints.stored import Copy, Form, Native, blocks, natives_of, stored_forms
from jinfire.errors import CheckpointMismatch
from jinfire.models import MODELS, ModelFamily, parse_config
from jinfire.models.hf_fields import is_int

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
DTYPES = {
    code: np.dtype(kind)
    for code, kind in {
        "F32": np.float32,
        "F16": np.float16,
        "BF16": ml_dtypes.bfloat16,
        "I32": np.int32,
        "I64": np.int64,
    }.items()
}
DTYPE_NAMES = {code: kind.name for code, kind in DTYPES.items()}
# Buffers that old writers saved although they follow from the config.
HARMLESS_SUFFIXES = (".rotary_emb.inv_freq",)
# Digits of a layer's number that are read as one.
MAX_DIGITS = 6
# Pages of one opening of a file, as a part of what is read.
MAPPED_PART = 1 / 16


class HuggingFaceSource:
    """The tensors of a Hugging Face folder.

    The index is the truth: files it does not name are not read (and warned of), tensors it names
    must be where it says. Tensors of parts that are not read are skipped (`ignored_tensor`).

    Raises: CheckpointMismatch naming files and tensors; UnsupportedConfig.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        generation = folder / "generation_config.json"
        content = read_json(folder / "config.json")
        self.config = parse_config(content, read_json(generation) if generation.exists() else None)
        # Not the config's `family`: several names of one family may store it differently.
        family = MODELS[content["model_type"]]
        self._head = _native(family, "head.weight")
        self._embed = _native(family, "embed.weight")
        self._is_ignored = ignored_tensor(family, content, self.config.num_layers)
        self._forms = stored_forms(self.config, family.tensor_names)
        self._file_of: dict[str, Path] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._dtypes: dict[str, str] = {}
        for path, listed in self._files().items():
            self._add_file(path, listed)
        self._dtype_of = self._check()

    def names(self) -> set[str]:
        return set(self._forms)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._forms[name].shape

    def read(self, name: str, index: Index) -> np.ndarray:
        form = self._forms[name]
        bounds = normalise(index, form.shape)
        out = np.empty([part.stop - part.start for part in bounds], self._dtype_of[name])
        if not out.size:
            return out
        self._check_constants(form, bounds[0])
        pieces = (
            piece
            for copy in form.copies(bounds)
            for piece in blocks(form, copy, self._row_bytes(form, copy.native))
        )
        # Opened anew for every few pieces: pages of a mapped file count as the process's memory
        # for as long as the mapping lives. Not for each, because opening parses the whole header.
        for path, batch in self._batches(pieces, form, out.nbytes * MAPPED_PART):
            with safe_open(path, framework="numpy") as file:
                for piece in batch:
                    part = file.get_slice(piece.native)[piece.source]
                    out[piece.target] = form.logical(part)
        return out

    def close(self) -> None:
        """Nothing stays open between reads."""

    def _row_bytes(self, form: Form, native: str) -> int:
        """Bytes of one row, of all that is not cut, of one matrix of a native tensor."""
        shape, axis = self._shapes[native], form.rows[0]
        return math.prod(shape[axis + 1 :]) * DTYPES[self._dtypes[native]].itemsize

    def _batches(
        self, pieces: Iterable[Copy], form: Form, most_bytes: float
    ) -> Iterator[tuple[Path, list[Copy]]]:
        """Runs of pieces of one file, of one block or at most so many bytes."""
        path, batch, size = self._folder, [], 0
        for piece in pieces:
            rows = piece.source[form.rows[0]]
            own = (rows.stop - rows.start) * self._row_bytes(form, piece.native)
            file = self._file_of[piece.native]
            if batch and (file != path or size + own > max(BLOCK_BYTES, most_bytes)):
                yield path, batch
                batch, size = [], 0
            path, size = file, size + own
            batch.append(piece)
        if batch:
            yield path, batch

    def _check_constants(self, form: Form, experts: slice) -> None:
        """Comparison of stored values that the config implies, for the part that is read."""
        by_file: dict[Path, list[tuple[str, tuple[int, ...]]]] = {}
        for native, _, values in form.constants(experts):
            by_file.setdefault(self._file_of[native], []).append((native, values))
        for path, entries in by_file.items():
            with safe_open(path, framework="numpy") as file:
                for native, values in entries:
                    got = tuple(file.get_tensor(native).tolist())
                    if got != values:
                        raise CheckpointMismatch(
                            f"{path}: {native}: expected {list(values)}, got {list(got)}"
                        )

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
            if not isinstance(shard, str) or (shard not in shards and not _is_plain(shard)):
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
                    if self._is_ignored(name):
                        continue
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

    def _check(self) -> dict[str, np.dtype]:
        """The dtype of every logical tensor, once all native ones are as they must be."""
        where = str(self._folder)
        tied_head = self.config.tie_embeddings and self._head in self._shapes
        expected: dict[str, Native] = {}
        for form in self._forms.values():
            expected.update(natives_of(form))
        shapes = dict(self._shapes)
        if tied_head:
            del shapes[self._head]
        check_tensors(
            where, {n: native.shape for n, native in expected.items()}, shapes, head=self._head
        )
        allowed = {name: native.dtypes for name, native in expected.items()}
        if tied_head:
            allowed[self._head] = FLOATS
        check_dtypes(where, allowed, {n: _name(code) for n, code in self._dtypes.items()})
        if tied_head and not self._same(self._head, self._embed):
            raise CheckpointMismatch(
                f"{where}: tie_word_embeddings is true but {self._head} differs from {self._embed}"
            )
        result, mixed = {}, []
        for name, form in self._forms.items():
            found = {self._dtypes[native] for native, _ in form.natives()}
            result[name] = DTYPES[min(found)]
            if len(found) > 1:
                mixed.append(f"{name} ({', '.join(sorted(found))})")
        if mixed:
            raise CheckpointMismatch(
                f"{where}: expected experts of one dtype, got {listing(mixed)}"
            )
        return result

    def _same(self, one: str, other: str) -> bool:
        if self._shapes[one] != self._shapes[other] or self._dtypes[one] != self._dtypes[other]:
            return False
        row_bytes = self._shapes[one][1] * DTYPES[self._dtypes[one]].itemsize
        return all(
            self._rows(one, rows).tobytes() == self._rows(other, rows).tobytes()
            for rows in row_blocks(slice(0, self._shapes[one][0]), row_bytes)
        )

    def _rows(self, native: str, rows: slice) -> np.ndarray:
        with safe_open(self._file_of[native], framework="numpy") as file:
            return file.get_slice(native)[(rows, slice(None))]


def ignored_tensor(
    family: ModelFamily, config: Mapping[str, Any], num_layers: int
) -> Callable[[str], bool]:
    """Whether a native name belongs to a part that is not read.

    Those are what the family says, buffers that follow from the config, and as many layers past
    the model's as the config has for the prediction of further tokens.
    """
    text = config.get("text_config")
    own = text if isinstance(text, Mapping) else config
    further: Any = own.get("num_nextn_predict_layers")
    last = num_layers + (further if is_int(further) else 0)
    before = _native(family, "layers.{i}.attention_norm.scale").partition("{i}")[0]

    def is_ignored(name: str) -> bool:
        if name.startswith(family.ignored) or name.endswith(HARMLESS_SUFFIXES):
            return True
        if not name.startswith(before):
            return False
        layer = name[len(before) :].partition(".")[0]
        is_number = layer.isascii() and layer.isdecimal() and len(layer) <= MAX_DIGITS
        return is_number and num_layers <= int(layer) < last

    return is_ignored


def _native(family: ModelFamily, logical: str) -> str:
    stored = family.tensor_names[logical]
    assert isinstance(stored, str)  # only experts have other forms
    return stored


def _is_plain(shard: str) -> bool:
    """Whether it is the name of a safetensors file of the folder, not a path elsewhere."""
    return (
        shard.endswith(".safetensors")
        and Path(shard).name == shard
        and "\\" not in shard
        and "\0" not in shard
    )


def _name(code: str) -> str:
    """NumPy's name of a dtype, or the file's own where it is none that is read."""
    return DTYPE_NAMES.get(code, code)


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
