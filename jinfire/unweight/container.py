"""Safetensors files with coded tensors in them, read as if they were plain.

A coded tensor `name` is stored as bytes (U8, one dimension) under `name.unweight`. The entry
`unweight` of the file's metadata is JSON, a `Record`: how each coded tensor was stored in the
source, the hash of every other one, and what the source file was. `unweight_xxh3` is its hash.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import xxhash
from safetensors import SafetensorError, safe_open

from jinfire.checkpoints.shards import truncated_tensors
from jinfire.checkpoints.source import BLOCK_BYTES, Index, listing, normalise, row_blocks
from jinfire.errors import CheckpointMismatch
from jinfire.unweight import codec
from pallas_kernels import Corrupt, UnweightHeader

SUFFIX = ".unweight"
METADATA_KEY = "unweight"
HASH_KEY = "unweight_xxh3"  # of the text under the other key
VERSION = 1
# The words that are coded, and the arrays that they are, by the data type's name in a file.
CODED_DTYPES = {
    "BF16": (np.dtype("<u2"), np.dtype(ml_dtypes.bfloat16)),
    "F32": (np.dtype("<u4"), np.dtype(np.float32)),
    "I32": (np.dtype("<i4"), np.dtype(np.int32)),
}
# Pages of one opening of a file, which count as memory of the process while it lasts: a block, or
# a part of a large tensor.
MAPPED_PART = 1 / 4


@dataclasses.dataclass(frozen=True)
class Options:
    """What was asked for: the form of coded tensors, and which tensors are coded."""

    form: str
    tensors: str


@dataclasses.dataclass(frozen=True)
class Coded:
    """A tensor that is stored coded; `entropy` is that of its symbols, in bits.

    Symbols are exponents, and the 4-bit values of int4 words.
    """

    dtype: str
    shape: tuple[int, ...]
    form: str
    entropy: float


@dataclasses.dataclass(frozen=True)
class Raw:
    """A tensor that is stored as it was, with the xxh3_64 of its bytes."""

    xxh3: str


@dataclasses.dataclass(frozen=True)
class Record:
    """What a compressed file says about itself.

    `tensors` are in the order of the source's data. `source_header` is its header where that
    does not follow from tensors and metadata (`jinfire/unweight/files.py:header_text`).
    """

    options: Options
    source_bytes: int
    source_xxh3_128: str
    tensors: dict[str, Coded | Raw]
    source_header: str | None = None

    def to_json(self) -> str:
        source: dict[str, Any] = {"bytes": self.source_bytes, "xxh3_128": self.source_xxh3_128}
        if self.source_header is not None:
            source["header"] = self.source_header
        content = {
            "version": VERSION,
            "options": dataclasses.asdict(self.options),
            "source": source,
            "tensors": {name: dataclasses.asdict(entry) for name, entry in self.tensors.items()},
        }
        return json.dumps(content, separators=(",", ":"))

    def to_metadata(self, own: Mapping[str, str] | None = None) -> dict[str, str]:
        """Metadata of the compressed file, behind what the source's own had."""
        text = self.to_json()
        digest = xxhash.xxh3_64(text.encode()).hexdigest()
        return {**(own or {}), METADATA_KEY: text, HASH_KEY: digest}

    @staticmethod
    def from_json(text: str) -> "Record":
        """Raises: ValueError or TypeError with what is wrong."""
        try:
            content = json.loads(text)
            if content["version"] != VERSION:
                raise ValueError(f"expected version {VERSION}, got {content['version']!r:.20}")
            source = content["source"]
            return Record(
                Options(**content["options"]),
                int(source["bytes"]),
                str(source["xxh3_128"]),
                {name: _entry(entry) for name, entry in content["tensors"].items()},
                source.get("header"),
            )
        except (KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{type(error).__name__} {error}") from error


def _entry(content: dict[str, Any]) -> Coded | Raw:
    if "xxh3" in content:
        return Raw(**content)
    entry = Coded(**content)
    shape = tuple(entry.shape)
    if not all(isinstance(size, int) and size >= 0 for size in shape):
        raise ValueError(f"expected a shape, got {entry.shape!r:.40}")
    if entry.dtype not in CODED_DTYPES:
        raise ValueError(f"expected dtypes {sorted(CODED_DTYPES)}, got {entry.dtype!r:.20}")
    return dataclasses.replace(entry, shape=shape)


@dataclasses.dataclass
class LastBlob:
    """The coded bytes that were needed last: slices of a tensor are read one after the other."""

    path: Path | None = None
    name: str = ""
    blob: np.ndarray | None = None

    def clear(self) -> None:
        self.path, self.name, self.blob = None, "", None


def source_metadata(metadata: Mapping[str, str]) -> dict[str, str]:
    """What a compressed file's metadata kept of its source's."""
    return {key: text for key, text in metadata.items() if key not in (METADATA_KEY, HASH_KEY)}


class TensorFile:
    """One safetensors file, its tensors by the names, shapes and data types of the source.

    What a compressed file says is checked when a tensor is first read; `checked=False` leaves
    that to the caller.

    Raises: CheckpointMismatch naming the file, and the tensors where they are known.
    """

    def __init__(self, path: Path, last: LastBlob | None = None, checked: bool = True) -> None:
        self.path = path
        self._last = LastBlob() if last is None else last
        self._unchecked: set[str] = set()
        self._stored: dict[str, tuple[tuple[int, ...], str]] = {}
        try:
            with safe_open(path, framework="numpy") as file:
                self.metadata: dict[str, str] = file.metadata() or {}
                stored = file.keys()  # no mapping, though it has keys
                for name in stored:
                    view = file.get_slice(name)
                    self._stored[name] = tuple(view.get_shape()), view.get_dtype()
        except (SafetensorError, OSError) as error:
            lost = [name.removesuffix(SUFFIX) for name in truncated_tensors(path)]
            named = f"; truncated tensors: {listing(lost)}" if lost else ""
            raise CheckpointMismatch(
                f"{path}: not a complete safetensors file ({error}){named}"
            ) from error
        self.record = self._record()
        if self.record is None:
            self.names = set(self._stored)
        else:
            self.names = set(self.record.tensors)
            self._check_names(self.record)
            if checked:
                self._unchecked = set(self.names)

    def _record(self) -> Record | None:
        text = self.metadata.get(METADATA_KEY)
        if text is None:
            if coded := [name for name in self._stored if name.endswith(SUFFIX)]:
                raise CheckpointMismatch(
                    f"{self.path}: tensors {listing(coded)} are coded, but the file's metadata "
                    f"does not say how: expected the entry {METADATA_KEY!r}"
                )
            return None
        try:
            if xxhash.xxh3_64(text.encode()).hexdigest() != self.metadata.get(HASH_KEY):
                raise ValueError(f"its hash is not that under {HASH_KEY!r}")
            return Record.from_json(text)
        except ValueError as error:
            raise CheckpointMismatch(
                f"{self.path}: the metadata of its coded tensors is damaged ({error})"
            ) from error

    def _check_names(self, record: Record) -> None:
        expected = {self.stored_name(name) for name in record.tensors}
        wrong = [
            name
            for name, entry in record.tensors.items()
            if isinstance(entry, Coded)
            and (found := self._stored.get(name + SUFFIX)) is not None
            and (found[1] != "U8" or len(found[0]) != 1)
        ]
        if wrong or expected != self._stored.keys():
            different = {name.removesuffix(SUFFIX) for name in expected ^ self._stored.keys()}
            raise CheckpointMismatch(
                f"{self.path}: stored tensors and the metadata about them differ in "
                f"{listing(different.union(wrong))}"
            )

    def entry(self, name: str) -> Coded | Raw | None:
        """What the metadata says of a tensor; None in a plain file."""
        return None if self.record is None else self.record.tensors[name]

    def shape(self, name: str) -> tuple[int, ...]:
        entry = self.entry(name)
        return entry.shape if isinstance(entry, Coded) else self._stored[name][0]

    def dtype(self, name: str) -> str:
        """As the file names it, e.g. "BF16"."""
        entry = self.entry(name)
        return entry.dtype if isinstance(entry, Coded) else self._stored[name][1]

    def stored_name(self, name: str) -> str:
        return name + SUFFIX if isinstance(self.entry(name), Coded) else name

    def name_of(self, stored_name: str) -> str:
        """The tensor that a stored one holds."""
        name = stored_name.removesuffix(SUFFIX)
        is_coded = self.record is not None and isinstance(self.record.tensors.get(name), Coded)
        return name if is_coded else stored_name

    @contextlib.contextmanager
    def reading(self) -> Iterator[Callable[[str, Index], np.ndarray]]:
        """`read(name, index)` for slices that are not empty, with steps of 1.

        Of a coded tensor only the tiles are decoded that the slice needs.

        Raises: CheckpointMismatch naming the tensor where its bytes are not those of the source.
        """
        with safe_open(self.path, framework="numpy") as file:
            yield functools.partial(self._read, file)

    def _read(self, file: Any, name: str, index: Index) -> np.ndarray:
        entry = self.entry(name)
        bounds = normalise(index, self.shape(name))
        if isinstance(entry, Coded):
            blob = self._blob(file, name, entry)
            with self._corrupt_named(name):
                return decode_part(blob, entry, bounds)
        if name in self._unchecked:
            assert isinstance(entry, Raw)
            self._check_raw(file, name, entry)
        return file.get_slice(name)[bounds] if bounds else file.get_tensor(name)

    def _check_raw(self, file: Any, name: str, entry: Raw) -> None:
        digest = xxhash.xxh3_64()
        shape = self._stored[name][0]
        if 0 < math.prod(shape) <= BLOCK_BYTES // 8:
            digest.update(file.get_tensor(name).tobytes())
        else:
            with BlockReader(self.path) as reader:
                for block in reader.blocks(name):
                    digest.update(block)
        if digest.hexdigest() != entry.xxh3:
            raise CheckpointMismatch(f"{self.path}: {name}: {DAMAGED}")
        self._unchecked.discard(name)

    def _blob(self, file: Any, name: str, entry: Coded) -> np.ndarray:
        last = self._last
        if (last.path, last.name) == (self.path, name) and last.blob is not None:
            return last.blob
        last.clear()  # before the next one is there
        stored = name + SUFFIX
        if self._stored[stored][0][0] <= BLOCK_BYTES:
            blob = file.get_tensor(stored)
        else:
            with BlockReader(self.path) as reader:
                blob = reader.read(stored)
        if name in self._unchecked:
            with self._corrupt_named(name):
                check_blob(blob, entry)
            self._unchecked.discard(name)
        last.path, last.name, last.blob = self.path, name, blob
        return blob

    @contextlib.contextmanager
    def _corrupt_named(self, name: str) -> Iterator[None]:
        try:
            yield
        except Corrupt as error:
            raise CheckpointMismatch(f"{self.path}: {name}: {DAMAGED} ({error})") from error


DAMAGED = "the stored bytes are damaged, expected those that were written"


def check_blob(blob: np.ndarray, entry: Coded) -> UnweightHeader:
    """The header of coded bytes that are those that were written, of this tensor.

    Raises: Corrupt.
    """
    header = UnweightHeader.parse(blob)
    if (header.form, header.dtype) != (entry.form, entry.dtype):
        raise Corrupt(
            f"expected {entry.dtype} as {entry.form}, got {header.dtype} as {header.form}"
        )
    header.sections(header.order(entry.shape), blob.size)
    codec.check(blob)
    return header


def decode_part(blob: np.ndarray, entry: Coded, bounds: Index) -> np.ndarray:
    """A slice of a coded tensor in its own data type."""
    kind = CODED_DTYPES[entry.dtype][1]
    if len(entry.shape) < 2:
        return codec.decode(blob, entry.shape).view(kind)[bounds]
    *lead, rows, columns = entry.shape
    *lead_bounds, row_bounds, column_bounds = bounds
    matrix = (math.prod(lead) * rows, columns)
    parts = []
    # The rows of the matrix that leading indices choose are not adjacent.
    for place in itertools.product(*(range(part.start, part.stop) for part in lead_bounds)):
        first = rows * sum(index * math.prod(lead[axis + 1 :]) for axis, index in enumerate(place))
        chosen = slice(first + row_bounds.start, first + row_bounds.stop)
        parts.append(codec.decode_part(blob, matrix, (chosen, column_bounds)).view(kind))
    shape = [part.stop - part.start for part in bounds]
    return (parts[0] if len(parts) == 1 else np.stack(parts)).reshape(shape)


class BlockReader:
    """The bytes of a file's stored tensors, in blocks.

    The file is opened anew now and then: pages of a mapped file count as the process's memory
    for as long as the mapping lives. Not for each block, because opening parses the header.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stack = contextlib.ExitStack()
        self._file: Any = None
        self._mapped_bytes = 0

    def __enter__(self) -> "BlockReader":
        return self

    def __exit__(self, *error: object) -> None:
        self._close()

    def read(self, name: str) -> np.ndarray:
        """All bytes of a tensor."""
        shape, itemsize = self._geometry(name)
        out = np.empty(math.prod(shape) * itemsize, np.uint8)
        place = 0
        for block in self.blocks(name):
            out[place : place + len(block)] = block
            place += len(block)
        return out

    def blocks(self, name: str) -> Iterator[np.ndarray]:
        """The same in order, block by block."""
        shape, itemsize = self._geometry(name)
        if not math.prod(shape):
            return
        if not shape:
            yield self._opened().get_tensor(name).reshape(1).view(np.uint8)
            return
        axis = next((axis for axis, size in enumerate(shape) if size > 1), 0)
        row_bytes = math.prod(shape[axis + 1 :]) * itemsize
        most_bytes = max(BLOCK_BYTES, shape[axis] * row_bytes * MAPPED_PART)
        for rows in row_blocks(slice(0, shape[axis]), row_bytes):
            part = self._opened(most_bytes).get_slice(name)[(*[slice(0, 1)] * axis, rows)]
            self._mapped_bytes += part.nbytes
            yield part.reshape(-1).view(np.uint8)

    def _geometry(self, name: str) -> tuple[tuple[int, ...], int]:
        view = self._opened().get_slice(name)
        shape = tuple(view.get_shape())
        if not math.prod(shape) or not shape:
            return shape, self._opened().get_tensor(name).itemsize
        return shape, view[(slice(0, 1),) * len(shape)].itemsize

    def _opened(self, most_bytes: float = BLOCK_BYTES) -> Any:
        if self._file is None or self._mapped_bytes >= most_bytes:
            self._close()
            self._file = self._stack.enter_context(safe_open(self._path, framework="numpy"))
        return self._file

    def _close(self) -> None:
        self._stack.close()
        self._file, self._mapped_bytes = None, 0
