"""The source of a compressed folder, byte for byte."""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import numpy as np
import xxhash
from tqdm import tqdm

from jinfire.errors import CheckpointMismatch
from jinfire.progress import bytes_bar
from jinfire.unweight import codec
from jinfire.unweight.container import (
    CODED_DTYPES,
    DAMAGED,
    SUFFIX,
    BlockReader,
    Coded,
    Record,
    TensorFile,
    check_blob,
    source_metadata,
)
from jinfire.unweight.files import (
    Stored,
    file_blocks,
    head_bytes,
    header_text,
    read_header,
    replaced,
)
from jinfire.unweight.folder import Written, convert, find_folder, source_index


def decompress(
    source: str | Path, target: str | Path, jobs: int | None = None, force: bool = False
) -> Written:
    """Writes what was compressed: every safetensors file as it was, byte for byte.

    So are the index and the files beside. A folder that an interrupted run left is gone on with.

    Raises: ValueError for a target that cannot be written to; CheckpointMismatch naming damaged
    tensors, or files that are not compressed.
    """
    path = Path(source)
    folder = find_folder(path)
    total_bytes = sum(_record(shard).source_bytes for shard in folder.shards)
    with bytes_bar(f"decompress {path.name}", total_bytes) as bar:
        return convert(folder, Path(target), _Decompression(jobs, bar), force)


@dataclasses.dataclass(frozen=True)
class _Decompression:
    """The `Conversion` of compressed files to what they were."""

    jobs: int | None
    bar: tqdm

    def difference(self, shard: Path, existing: Path) -> str | None:
        record = _record(shard)
        if existing.stat().st_size == record.source_bytes:
            digest = xxhash.xxh3_128()
            for block in file_blocks(existing):
                digest.update(block)
            if digest.hexdigest() == record.source_xxh3_128:
                self.bar.update(record.source_bytes)
                return None
        return "is another"

    def most_bytes(self, shard: Path) -> int:
        return _record(shard).source_bytes

    def write(self, shard: Path, target: Path) -> None:
        file = TensorFile(shard, checked=False)
        record = compressed_record(file)
        before = head_bytes(source_header(file))
        digest = xxhash.xxh3_128(before)
        with BlockReader(shard) as reader, replaced(target) as out:
            out.write(before)
            self.bar.update(len(before))
            for name in record.tensors:
                self._add(out, digest, file, reader, name)
            if digest.hexdigest() != record.source_xxh3_128:
                raise CheckpointMismatch(f"{shard}: its header: {DAMAGED}")

    def _add(
        self,
        out: IO[bytes],
        digest: xxhash.xxh3_128,
        file: TensorFile,
        reader: BlockReader,
        name: str,
    ) -> None:
        data = source_bytes(file, reader, name, self.jobs)
        digest.update(data)
        out.write(data.data)
        self.bar.update(data.nbytes)

    def index_text(self, text: str, written: Sequence[Path]) -> str:
        return source_index(text)


def _record(path: Path) -> Record:
    return compressed_record(TensorFile(path, checked=False))


def source_bytes(
    file: TensorFile, reader: BlockReader, name: str, jobs: int | None = None
) -> np.ndarray:
    """The bytes of a tensor of a compressed file as the source had them; `reader` is the file's.

    Raises: CheckpointMismatch naming the tensor where its bytes are damaged.
    """
    entry = file.entry(name)
    try:
        if isinstance(entry, Coded):
            blob = reader.read(name + SUFFIX)
            expected = check_blob(blob, entry).source_hash
            words = codec.decode(blob, entry.shape, jobs)
            data = words.reshape(-1).view(np.uint8)
        else:
            assert entry is not None
            expected = int(entry.xxh3, 16)
            data = reader.read(name)
    except ValueError as error:  # Corrupt is one
        raise CheckpointMismatch(f"{file.path}: {name}: {DAMAGED} ({error})") from error
    if xxhash.xxh3_64(data).intdigest() != expected:
        raise CheckpointMismatch(f"{file.path}: {name}: {DAMAGED}")
    return data


def source_header(file: TensorFile) -> str:
    """The header that the source of a compressed file had."""
    record = compressed_record(file)
    if record.source_header is not None:
        return record.source_header
    own = read_header(file.path)
    tensors, end = {}, 0
    for name, entry in record.tensors.items():
        if isinstance(entry, Coded):
            num_bytes = math.prod(entry.shape) * CODED_DTYPES[entry.dtype][0].itemsize
        else:
            num_bytes = own.tensors[name].num_bytes
        begin, end = end, end + num_bytes
        tensors[name] = Stored(file.dtype(name), file.shape(name), begin, end)
    return header_text(source_metadata(own.metadata or {}) or None, tensors)


def compressed_record(file: TensorFile) -> Record:
    """What a compressed file says about itself.

    Raises: CheckpointMismatch where it is not compressed.
    """
    if file.record is None:
        raise CheckpointMismatch(
            f"{file.path}: expected a file that `jinfire compress` has written, got a plain one"
        )
    return file.record
