"""Comparison of a compressed folder with what it was made of."""

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import xxhash

from jinfire.checkpoints.shards import find_shards, truncated_tensors
from jinfire.errors import CheckpointMismatch
from jinfire.progress import bytes_bar
from jinfire.unweight.container import DAMAGED, SUFFIX, BlockReader, TensorFile
from jinfire.unweight.decompress import compressed_record, source_bytes, source_header
from jinfire.unweight.files import head_bytes
from jinfire.unweight.folder import find_folder


@dataclasses.dataclass(frozen=True)
class Damage:
    """What is wrong in a compressed folder; `tensor` None where it is a file as a whole."""

    file: str
    tensor: str | None
    problem: str


@dataclasses.dataclass(frozen=True)
class Verified:
    """The outcome for a folder, which is intact where there is no damage."""

    files: int
    tensors: int
    source_bytes: int
    damage: tuple[Damage, ...]


def verify_compressed(
    path: str | Path, source: str | Path | None = None, jobs: int | None = None
) -> Verified:
    """Comparison of every byte of a compressed folder with the hashes of its source.

    With `source` the bytes themselves are compared, too, and the sets of tensors.

    Raises: CheckpointMismatch where files are missing, or are not compressed.
    """
    path = Path(path)
    folder = find_folder(path)
    listed = find_shards(path).files if path.is_dir() else {}
    damage: list[Damage] = []
    names: set[str] = set()
    total_bytes = 0
    with contextlib.ExitStack() as stack:
        against = None if source is None else stack.enter_context(_Source(Path(source)))
        sizes = [shard.stat().st_size for shard in folder.shards]
        bar = stack.enter_context(bytes_bar(f"verify {path.name}", sum(sizes)))
        for shard, size in zip(folder.shards, sizes, strict=True):
            try:
                file = TensorFile(shard, checked=False)
            except CheckpointMismatch as error:
                damage += _unreadable(shard, error)
            else:
                total_bytes += compressed_record(file).source_bytes
                names |= file.names
                damage += _damage_of(file, against, jobs)
                lacking = (listed.get(shard) or set()) - set(map(file.stored_name, file.names))
                damage += [
                    Damage(shard.name, name.removesuffix(SUFFIX), "missing, the index names it")
                    for name in sorted(lacking)
                ]
            bar.update(size)
        known = names | {entry.tensor for entry in damage}
        if against is not None:
            damage += [
                Damage(file.path.name, name, "missing, the source has it")
                for name, file in against.files.items()
                if name not in known
            ]
    return Verified(len(folder.shards), len(names), total_bytes, tuple(damage))


def _unreadable(shard: Path, error: CheckpointMismatch) -> list[Damage]:
    lost = sorted({name.removesuffix(SUFFIX) for name in truncated_tensors(shard)})
    if lost:
        return [Damage(shard.name, name, "truncated") for name in lost]
    return [Damage(shard.name, None, str(error))]


def _damage_of(file: TensorFile, against: "_Source | None", jobs: int | None) -> Iterator[Damage]:
    """Every damaged tensor of a file; the file itself where all are right and it is not."""
    record = compressed_record(file)
    digest = xxhash.xxh3_128(head_bytes(source_header(file)))
    is_intact = True
    with BlockReader(file.path) as reader:
        for name in record.tensors:
            try:
                data = source_bytes(file, reader, name, jobs)
            except CheckpointMismatch as error:
                is_intact = False
                yield Damage(file.path.name, name, _without_names(str(error), file.path, name))
                continue
            digest.update(data)
            if against is not None:
                difference = against.difference(name, file.dtype(name), file.shape(name), data)
                if difference is not None:
                    yield Damage(file.path.name, name, difference)
    if is_intact and digest.hexdigest() != record.source_xxh3_128:
        yield Damage(file.path.name, None, f"its header or metadata: {DAMAGED}")


def _without_names(text: str, path: Path, name: str) -> str:
    return text.removeprefix(f"{path}: {name}: ")


class _Source:
    """The tensors of a plain folder or file, to compare with."""

    def __init__(self, path: Path) -> None:
        self.files = {
            name: file for file in map(TensorFile, find_folder(path).shards) for name in file.names
        }
        for file in self.files.values():
            if file.record is not None:
                raise CheckpointMismatch(f"{file.path}: expected the source, it is compressed too")
        self._stack = contextlib.ExitStack()
        self._open: tuple[Path, BlockReader] | None = None

    def __enter__(self) -> "_Source":
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def difference(
        self, name: str, dtype: str, shape: tuple[int, ...], data: np.ndarray
    ) -> str | None:
        """How a tensor differs from that of the source; None where all its bits are the same."""
        file = self.files.get(name)
        if file is None:
            return "is not in the source"
        if (file.dtype(name), file.shape(name)) != (dtype, shape):
            return (
                f"expected {file.dtype(name)} {file.shape(name)} as in the source, "
                f"got {dtype} {shape}"
            )
        place = 0
        for block in self._reader(file.path).blocks(name):
            if not np.array_equal(block, data[place : place + len(block)]):
                first = place + int((block != data[place : place + len(block)]).argmax())
                return f"differs from the source from byte {first}"
            place += len(block)
        return None

    def _reader(self, path: Path) -> BlockReader:
        if self._open is None or self._open[0] != path:
            self._stack.close()
            self._open = path, self._stack.enter_context(BlockReader(path))
        return self._open[1]
