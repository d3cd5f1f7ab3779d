"""The safetensors files of a Hugging Face folder, by its index or without one."""

import dataclasses
import json
from pathlib import Path

from jinfire.checkpoints.source import listing, read_json
from jinfire.errors import CheckpointMismatch

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"


@dataclasses.dataclass(frozen=True)
class Shards:
    """Files to read with the tensors the index expects in each, None without an index.

    `stray` are safetensors files of the folder that do not belong to the checkpoint.
    """

    files: dict[Path, set[str] | None]
    stray: set[str]


def find_shards(folder: Path) -> Shards:
    """The safetensors files of a checkpoint; the index is the truth where there is one.

    Raises: CheckpointMismatch naming files that are missing, and the tensors in them.
    """
    present = {p.name for p in folder.glob("*.safetensors")}
    index = folder / INDEX_NAME
    if not index.exists():
        name = SINGLE_NAME if SINGLE_NAME in present else next(iter(present), "")
        if not present or (len(present) > 1 and name != SINGLE_NAME):
            raise CheckpointMismatch(
                f"{folder}: expected {SINGLE_NAME} or {INDEX_NAME}, found "
                f"{listing(present) or 'no safetensors file (pickled weights are not read)'}"
            )
        return Shards({folder / name: None}, present - {name})

    shards: dict[str, set[str]] = {}
    for tensor, shard in read_weight_map(index).items():
        shards.setdefault(shard, set()).add(tensor)
    if missing := shards.keys() - present:
        lost = set().union(*(shards[s] for s in missing))
        raise CheckpointMismatch(
            f"{folder}: missing shards {listing(missing)} with tensors {listing(lost)}"
        )
    files = {folder / shard: tensors for shard, tensors in sorted(shards.items())}
    return Shards(dict(files), present - shards.keys())


def read_weight_map(index: Path) -> dict[str, str]:
    """Tensors of an index and the files of its folder that hold them.

    Raises: CheckpointMismatch for anything else.
    """
    content = read_json(index)
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointMismatch(f"{index}: expected a weight_map of tensor names to files")
    plain: set[str] = set()
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str) or (shard not in plain and not _is_plain(shard)):
            raise CheckpointMismatch(
                f"{index}: {tensor}: expected the plain name of a safetensors file, got {shard!r}"
            )
        plain.add(shard)
    return weight_map


def truncated_tensors(path: Path) -> list[str]:
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


def _is_plain(shard: str) -> bool:
    """Whether it is the name of a safetensors file of the folder, not a path elsewhere."""
    return (
        shard.endswith(".safetensors")
        and Path(shard).name == shard
        and "\\" not in shard
        and "\0" not in shard
    )
