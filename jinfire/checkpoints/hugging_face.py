"""A Hugging Face folder: `config.json` and safetensors, in one file or in shards with an index."""

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jinfire.checkpoints.shards import find_shards
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
from jinfire.unweight.container import LastBlob, TensorFile

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
    """The tensors of a Hugging Face folder, plain or compressed.

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
        self._file_of: dict[str, TensorFile] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._dtypes: dict[str, str] = {}
        self._last_blob = LastBlob()
        shards = find_shards(folder)
        self._warn_stray(shards.stray)
        for path, listed in shards.files.items():
            self._add_file(TensorFile(path, self._last_blob), listed)
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
        for file, batch in self._batches(pieces, form, out.nbytes * MAPPED_PART):
            with file.reading() as read:
                for piece in batch:
                    out[piece.target] = form.logical(read(piece.native, piece.source))
        return out

    def close(self) -> None:
        """No file stays open between reads; the coded bytes that were read last go."""
        self._last_blob.clear()

    def _row_bytes(self, form: Form, native: str) -> int:
        """Bytes of one row, of all that is not cut, of one matrix of a native tensor."""
        shape, axis = self._shapes[native], form.rows[0]
        return math.prod(shape[axis + 1 :]) * DTYPES[self._dtypes[native]].itemsize

    def _batches(
        self, pieces: Iterable[Copy], form: Form, most_bytes: float
    ) -> Iterator[tuple[TensorFile, list[Copy]]]:
        """Runs of pieces of one file, of one block or at most so many bytes."""
        batch: list[Copy] = []
        last, size = None, 0
        for piece in pieces:
            rows = piece.source[form.rows[0]]
            own = (rows.stop - rows.start) * self._row_bytes(form, piece.native)
            file = self._file_of[piece.native]
            if last and (file is not last or size + own > max(BLOCK_BYTES, most_bytes)):
                yield last, batch
                batch, size = [], 0
            last, size = file, size + own
            batch.append(piece)
        if last:
            yield last, batch

    def _check_constants(self, form: Form, experts: slice) -> None:
        """Comparison of stored values that the config implies, for the part that is read."""
        by_file: dict[TensorFile, list[tuple[str, tuple[int, ...]]]] = {}
        for native, _, values in form.constants(experts):
            by_file.setdefault(self._file_of[native], []).append((native, values))
        for file, entries in by_file.items():
            with file.reading() as read:
                for native, values in entries:
                    got = tuple(read(native, (slice(None),)).tolist())
                    if got != values:
                        raise CheckpointMismatch(
                            f"{file.path}: {native}: expected {list(values)}, got {list(got)}"
                        )

    def _warn_stray(self, stray: set[str]) -> None:
        if stray:
            warnings.warn(
                f"{self._folder}: files that are not part of the checkpoint and are not read: "
                f"{listing(stray)}",
                stacklevel=4,
            )

    def _add_file(self, file: TensorFile, listed: set[str] | None) -> None:
        wanted = file.names if listed is None else {file.name_of(name) for name in listed}
        if lacking := wanted - file.names:
            raise CheckpointMismatch(
                f"{file.path}: the index is stale, this file lacks {listing(lacking)}"
            )
        for name in wanted:
            if self._is_ignored(name):
                continue
            self._file_of[name] = file
            self._shapes[name] = file.shape(name)
            self._dtypes[name] = file.dtype(name)
        if unlisted := file.names - wanted:
            warnings.warn(
                f"{file.path}: tensors that the index does not name are not read: "
                f"{listing(unlisted)}",
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
        with self._file_of[native].reading() as read:
            return read(native, (rows, slice(None)))


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


def _name(code: str) -> str:
    """NumPy's name of a dtype, or the file's own where it is none that is read."""
    return DTYPE_NAMES.get(code, code)
