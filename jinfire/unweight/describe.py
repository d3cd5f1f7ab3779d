"""How well a folder is compressed: of each tensor, of each kind of tensor and of all files."""

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from safetensors import safe_open

from jinfire.unweight.container import CODED_DTYPES, SUFFIX, Coded, Options, TensorFile
from jinfire.unweight.decompress import compressed_record
from jinfire.unweight.files import read_header
from jinfire.unweight.folder import find_folder, source_index
from pallas_kernels import HEADER_BYTES, UnweightHeader

RAW = "raw"
WEIGHTS_OF_A_WORD = 8


@dataclasses.dataclass(frozen=True)
class TensorSize:
    """One tensor of a compressed folder, or all of one kind.

    `form` is "raw" where it is stored as it was. `entropy` in bits is that of exponents, and of
    4-bit values in int4 words; `verbatim_share` that of rows with a rare exponent. Both are None
    where the form has none.

    Units: a weight of int4 words is one of the eight in a word.
    """

    name: str
    dtype: str
    form: str
    weights: int
    source_bytes: int
    stored_bytes: int
    entropy: float | None = None
    verbatim_share: float | None = None
    shape: tuple[int, ...] | None = None
    file: str | None = None
    tensors: int = 1

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.stored_bytes / self.weights if self.weights else math.nan

    @property
    def ratio(self) -> float:
        return self.stored_bytes / self.source_bytes if self.source_bytes else math.nan


@dataclasses.dataclass(frozen=True)
class Description:
    """A compressed folder. Bytes are of whole files with their headers, and of the index."""

    options: Options
    files: int
    source_bytes: int
    stored_bytes: int
    tensors: tuple[TensorSize, ...]

    @property
    def weights(self) -> int:
        return sum(tensor.weights for tensor in self.tensors)

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.stored_bytes / self.weights if self.weights else math.nan

    @property
    def ratio(self) -> float:
        """Stored bytes of a byte of the source."""
        return self.stored_bytes / self.source_bytes

    @property
    def coded(self) -> TensorSize:
        """All tensors that are coded, without headers of files."""
        coded = [tensor for tensor in self.tensors if tensor.form != RAW]
        return joined("coded", coded)

    def kinds(self) -> list[TensorSize]:
        """Tensors that differ in numbers within their names alone, together."""
        groups: dict[tuple[str, str, str], list[TensorSize]] = {}
        for tensor in self.tensors:
            name = re.sub(r"(?<=\.)\d+(?=\.)", "*", tensor.name)
            groups.setdefault((name, tensor.dtype, tensor.form), []).append(tensor)
        return [joined(name, tensors) for (name, _, _), tensors in groups.items()]

    def left_raw(self) -> dict[str, TensorSize]:
        """Tensors that are stored as they were, by data type."""
        groups: dict[str, list[TensorSize]] = {}
        for tensor in self.tensors:
            if tensor.form == RAW:
                groups.setdefault(tensor.dtype, []).append(tensor)
        return {dtype: joined(dtype, tensors) for dtype, tensors in sorted(groups.items())}


def joined(name: str, tensors: list[TensorSize]) -> TensorSize:
    """Several tensors as one; shares and entropies are means over weights."""
    return TensorSize(
        name,
        ", ".join(sorted({tensor.dtype for tensor in tensors})),
        ", ".join(sorted({tensor.form for tensor in tensors})),
        sum(tensor.weights for tensor in tensors),
        sum(tensor.source_bytes for tensor in tensors),
        sum(tensor.stored_bytes for tensor in tensors),
        _mean((tensor.entropy, tensor.weights) for tensor in tensors),
        _mean((tensor.verbatim_share, tensor.weights) for tensor in tensors),
        tensors=len(tensors),
    )


def _mean(values: Iterable[tuple[float | None, int]]) -> float | None:
    known = [(value, weight) for value, weight in values if value is not None]
    total = sum(weight for _, weight in known)
    return sum(value * weight for value, weight in known) / total if total else None


def is_compressed(path: str | Path) -> bool:
    """Whether a folder, or a file, is one that `compress` has written."""
    path = Path(path)
    if path.is_file():
        files = [path] if path.suffix == ".safetensors" else []
    else:
        files = sorted(path.glob("*.safetensors"))
    return any(TensorFile(file, checked=False).record is not None for file in files)


def describe_compressed(path: str | Path) -> Description:
    """Sizes of a compressed folder or file; no weights are read.

    Raises: CheckpointMismatch where files are missing, or are not compressed.
    """
    folder = find_folder(Path(path))
    options, sizes, source_bytes, stored_bytes = None, [], 0, 0
    for shard in folder.shards:
        file = TensorFile(shard, checked=False)
        record = compressed_record(file)
        options = record.options
        source_bytes += record.source_bytes
        stored_bytes += shard.stat().st_size
        sizes += _sizes(file)
    if folder.index is not None:
        text = folder.index.read_text(encoding="utf-8")
        stored_bytes += len(text.encode())
        source_bytes += len(source_index(text).encode())
    assert options is not None  # a folder has at least one file
    return Description(options, len(folder.shards), source_bytes, stored_bytes, tuple(sizes))


def _sizes(file: TensorFile) -> Iterator[TensorSize]:
    stored = read_header(file.path).tensors
    with safe_open(file.path, framework="numpy") as opened:
        for name, entry in compressed_record(file).tensors.items():
            shape, dtype = file.shape(name), file.dtype(name)
            values = math.prod(shape)
            num_bytes = stored[file.stored_name(name)].num_bytes
            where = {"shape": shape, "file": file.path.name}
            if isinstance(entry, Coded):
                header = UnweightHeader.parse(opened.get_slice(name + SUFFIX)[:HEADER_BYTES])
                rows = header.order(shape).rows
                yield TensorSize(
                    *(name, dtype, entry.form, header.num_weights),
                    values * CODED_DTYPES[dtype][0].itemsize,
                    num_bytes,
                    entry.entropy,
                    None if entry.form == "compact" else header.verbatim_rows / rows,
                    **where,
                )
            else:
                is_packed = dtype == "I32" and name.endswith("weight_packed")
                weights = values * (WEIGHTS_OF_A_WORD if is_packed else 1)
                yield TensorSize(name, dtype, RAW, weights, num_bytes, num_bytes, **where)
