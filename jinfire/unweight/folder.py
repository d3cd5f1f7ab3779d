"""Folders of safetensors files, written anew file by file from another folder."""

import contextlib
import dataclasses
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from jinfire.checkpoints.shards import INDEX_NAME, find_shards, read_weight_map
from jinfire.checkpoints.source import listing
from jinfire.errors import CheckpointMismatch
from jinfire.unweight.container import SUFFIX
from jinfire.unweight.files import PARTIAL, file_blocks, replaced

CONFIG_NAME = "config.json"
# Weights in formats that are not read, which a folder may hold beside its safetensors files.
OTHER_WEIGHTS = (
    *(".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx"),
    *(".ot", PARTIAL),
)
GGUF_MAGIC = b"GGUF"


@dataclasses.dataclass(frozen=True)
class Folder:
    """A checkpoint's files: its shards, the index, what lies beside them and what is not taken."""

    root: Path
    shards: tuple[Path, ...]
    index: Path | None = None
    beside: tuple[Path, ...] = ()
    left_out: tuple[str, ...] = ()


def find_folder(path: Path) -> Folder:
    """The files of a Hugging Face folder, or a safetensors file alone.

    Raises: FileNotFoundError; CheckpointMismatch for anything else, and where shards are missing.
    """
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such checkpoint file or folder")
    if path.is_file():
        _refuse_gguf([path])
        if path.suffix != ".safetensors":
            raise CheckpointMismatch(f"{path}: expected a folder or a safetensors file")
        return Folder(path.parent, (path,))
    if not any(path.glob("*.safetensors")):
        _refuse_gguf(sorted(path.glob("*.gguf")))
    shards = find_shards(path)
    index = path / INDEX_NAME
    own = {*(shard.name for shard in shards.files), INDEX_NAME}
    beside, left_out = [], []
    for entry in sorted(path.iterdir()):
        if entry.name in own:
            continue
        if entry.is_file() and not entry.name.endswith(OTHER_WEIGHTS):
            beside.append(entry)
        elif not entry.name.endswith(PARTIAL):
            left_out.append(entry.name)
    # A folder without its config is not a checkpoint, so it comes last.
    beside.sort(key=lambda entry: entry.name == CONFIG_NAME)
    return Folder(
        path,
        tuple(shards.files),
        index if index.exists() else None,
        tuple(beside),
        tuple(left_out),
    )


def _refuse_gguf(paths: list[Path]) -> None:
    for path in paths:
        with path.open("rb") as file:
            if file.read(len(GGUF_MAGIC)) == GGUF_MAGIC:
                raise CheckpointMismatch(
                    f"{path}: expected a Hugging Face folder (config.json and safetensors), got a "
                    "GGUF file, whose weights are mostly quantised already: get the model's "
                    "original folder, e.g. with `hf download ORGANISATION/MODEL --local-dir DIR`"
                )


@dataclasses.dataclass(frozen=True)
class Written:
    """What a conversion did: files that were complete already, and what it did not take over."""

    kept: tuple[str, ...]
    left_out: tuple[str, ...]


class Conversion(Protocol):
    """How the files of a folder are written anew."""

    def difference(self, shard: Path, existing: Path) -> str | None:
        """Why an existing file is not what would be written; None where it is."""
        ...

    def most_bytes(self, shard: Path) -> int:
        """Bytes without which the new file surely does not fit."""
        ...

    def write(self, shard: Path, target: Path) -> None: ...

    def index_text(self, text: str, written: Sequence[Path]) -> str:
        """The new index, once all new files are there."""
        ...


def convert(folder: Folder, target: Path, conversion: Conversion, force: bool) -> Written:
    """Writes a folder anew in `target`.

    A target that an earlier run has begun is gone on with. Index and config are written last.

    Raises: ValueError where the target is the source, holds something else (unless `force`) or
    has no space; OSError.
    """
    if target.exists() and not target.is_dir():
        raise ValueError(f"{target}: expected a folder to write to, got a file")
    if target.exists() and target.samefile(folder.root):
        raise ValueError(f"{target}: expected another folder than the source's own")
    target.mkdir(parents=True, exist_ok=True)
    with _locked(target):
        kept, problems = _standing(folder, target, conversion)
        if problems and not force:
            raise ValueError(
                f"{target}: expected a new or empty folder, or one that the same command has "
                f"begun: {'; '.join(problems)} (--force replaces files of the same name)"
            )
        for name in _own_names(folder):
            (target / (name + PARTIAL)).unlink(missing_ok=True)
        written = [shard for shard in folder.shards if shard.name not in kept]
        _check_room(target, sum(map(conversion.most_bytes, written)))
        for shard in written:
            conversion.write(shard, target / shard.name)
        if folder.index is not None:
            text = folder.index.read_text(encoding="utf-8")
            text = conversion.index_text(text, [target / shard.name for shard in folder.shards])
            with replaced(target / folder.index.name) as file:
                file.write(text.encode())
        for path in folder.beside:
            with replaced(target / path.name) as file:
                for block in file_blocks(path):
                    file.write(block)
    return Written(tuple(kept), folder.left_out)


def _standing(folder: Folder, target: Path, conversion: Conversion) -> tuple[list[str], list[str]]:
    """Shards that are complete already, and what in the target is not of this conversion."""
    kept, problems = [], []
    own = _own_names(folder)
    foreign = {entry.name for entry in target.iterdir()} - own - {name + PARTIAL for name in own}
    if foreign:
        problems.append(f"it holds {listing(foreign)}")
    for shard in folder.shards:
        existing = target / shard.name
        if not existing.exists():
            continue
        difference = conversion.difference(shard, existing)
        if difference is None:
            kept.append(shard.name)
        else:
            problems.append(f"{shard.name} {difference}")
    for path in folder.beside:
        existing = target / path.name
        if existing.exists() and not _same_bytes(path, existing):
            problems.append(f"{path.name} is another")
    index = target / INDEX_NAME
    if index.exists() and (folder.index is None or _tensors(index) != _tensors(folder.index)):
        problems.append(f"{INDEX_NAME} is another")
    return kept, problems


def _own_names(folder: Folder) -> set[str]:
    return {path.name for path in (*folder.shards, *folder.beside)} | {INDEX_NAME}


def _same_bytes(one: Path, other: Path) -> bool:
    if one.stat().st_size != other.stat().st_size:
        return False
    return all(a == b for a, b in zip(file_blocks(one), file_blocks(other), strict=True))


def _tensors(index: Path) -> dict[str, str] | None:
    try:
        names = read_weight_map(index)
    except CheckpointMismatch:
        return None
    return {name.removesuffix(SUFFIX): shard for name, shard in names.items()}


def _check_room(target: Path, needed_bytes: int) -> None:
    free = shutil.disk_usage(target).free
    if needed_bytes > free:
        raise ValueError(
            f"{target}: about {needed_bytes / 1e9:.2f} GB are to be written, "
            f"{free / 1e9:.2f} GB are free"
        )


@contextlib.contextmanager
def _locked(target: Path) -> Iterator[None]:
    """Sole use of a folder among such commands; the lock goes with the process."""
    descriptor = os.open(target, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(f"{target}: another command is writing to this folder") from error
        yield
    finally:
        os.close(descriptor)


# The index.


def compressed_index(text: str, coded: set[str], stored_bytes: int) -> str:
    """The index of a compressed folder, which keeps what the source's said.

    `coded` are the tensors that are stored coded, `stored_bytes` is the size of all tensors.
    """
    content = json.loads(text)
    kept: dict[str, Any] = {"metadata": content["metadata"]} if "metadata" in content else {}
    names = {name + SUFFIX if name in coded else name: s for name, s in _weight_map(content)}

    def index(kept: dict[str, Any]) -> str:
        metadata = {"total_size": stored_bytes, "unweight": kept}
        return _index_json({**content, "metadata": metadata, "weight_map": names})

    if source_index(index(kept)) != text:
        return index({"text": text})
    return index(kept)


def source_index(text: str) -> str:
    """The index of the source, from that of the compressed folder.

    Raises: CheckpointMismatch where it is none.
    """
    try:
        content = json.loads(text)
        kept = content["metadata"]["unweight"]
        if "text" in kept:
            return kept["text"]
        names = _weight_map(content)
        content["weight_map"] = {name.removesuffix(SUFFIX): shard for name, shard in names}
        if "metadata" in kept:
            content["metadata"] = kept["metadata"]
        else:
            del content["metadata"]
        return _index_json(content)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointMismatch(
            f"{INDEX_NAME}: expected that of a compressed folder ({type(error).__name__} {error})"
        ) from error


def _weight_map(content: dict[str, Any]) -> list[tuple[str, str]]:
    return list(content["weight_map"].items())


def _index_json(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=2) + "\n"
