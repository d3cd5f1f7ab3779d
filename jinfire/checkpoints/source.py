"""What every checkpoint format offers, and the checks they share."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jinfire.config import ModelConfig
from jinfire.errors import CheckpointMismatch
from jinfire.models.spec import ParamSpec

Index = tuple[slice, ...]

MAX_JSON_BYTES = 512 * 2**20
# Rows are copied in blocks of this many bytes, so that a read needs little beside its result.
BLOCK_BYTES = 8 * 2**20
MAX_NAMED = 20
FLOATS = ("float32", "float16", "bfloat16")


class TensorSource(Protocol):
    """One checkpoint, opened: its tensors by logical name, read slice by slice.

    All names and shapes are checked against `config` when the checkpoint is opened.
    """

    config: ModelConfig

    def names(self) -> set[str]:
        """Logical names, e.g. `layers.3.attention.query.weight`."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Unsharded shape of one tensor, weights as (out, in)."""
        ...

    def read(self, name: str, index: Index) -> np.ndarray:
        """One slice (steps of 1), in the stored dtype; nothing else of the tensor is kept."""
        ...

    def close(self) -> None:
        """Release of files and caches."""
        ...


class NameMap:
    """A bijection between logical names and a format's own, `{i}` standing for the layer."""

    def __init__(self, native_of_logical: Mapping[str, str]) -> None:
        self._native = dict(native_of_logical)
        self._logical = {native: logical for logical, native in self._native.items()}

    def native(self, logical: str) -> str:
        return _translate(logical, self._native) or logical

    def logical(self, native: str) -> str | None:
        """The logical name, or None where the format's name is not one of the map's."""
        return _translate(native, self._logical)


def _translate(name: str, table: Mapping[str, str]) -> str | None:
    # ASCII and without leading zeros: two spellings must not name one tensor.
    match = re.search(r"(?<=\.)(0|[1-9][0-9]{0,5})(?=\.)", name)
    if match is None:
        return table.get(name)
    pattern = table.get(f"{name[: match.start()]}{{i}}{name[match.end() :]}")
    return None if pattern is None else pattern.replace("{i}", match.group())


def check_tensors(
    where: str,
    expected: Mapping[str, tuple[int, ...]],
    shapes: Mapping[str, tuple[int, ...]],
    unexpected: Iterable[str] = (),
    head: str = "head.weight",
) -> None:
    """Comparison of a checkpoint's tensors with the model's.

    All names are the format's own; `head` is that of the output matrix.

    Raises: CheckpointMismatch naming every tensor that is missing, extra or of another shape.
    """
    extra = list(unexpected) + [name for name in shapes if name not in expected]
    missing = [name for name in expected if name not in shapes]
    wrong = [
        f"{name} (expected {shape}, got {tuple(shapes[name])})"
        for name, shape in expected.items()
        if name in shapes and tuple(shapes[name]) != shape
    ]
    problems = []
    if missing:
        hint = ""
        if head in missing:
            hint = " (embeddings are not tied, so the head must be stored)"
        problems.append(f"missing tensors: {listing(missing)}{hint}")
    if extra:
        problems.append(f"unexpected tensors: {listing(extra)}")
    if wrong:
        problems.append(f"tensors of another shape: {listing(wrong)}")
    if problems:
        raise CheckpointMismatch(f"{where}: " + "; ".join(problems))


def allowed_dtypes(spec: ParamSpec) -> tuple[str, ...]:
    """What a tensor may be stored as: any float where a cast is meant, else its own dtype.

    A narrow float widens exactly to a tensor that is always float32.
    """
    if spec.dtype in (None, "float32"):
        return FLOATS
    return (spec.dtype,)


def check_dtypes(
    where: str, expected: Mapping[str, tuple[str, ...]], dtypes: Mapping[str, str]
) -> None:
    """Refusal of every tensor that is stored as what it may not be.

    Raises: CheckpointMismatch naming the tensors and what they are.
    """
    wrong = [name for name, allowed in expected.items() if dtypes[name] not in allowed]
    if wrong:
        allowed = sorted({", ".join(expected[name]) for name in wrong})
        raise CheckpointMismatch(
            f"{where}: expected dtypes {' or '.join(allowed)}, got "
            + listing(f"{name} ({dtypes[name]})" for name in wrong)
        )


def listing(names: Iterable[str]) -> str:
    """Names for a message, in order, the first few of many."""
    names = sorted(names)
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(names[:MAX_NAMED]) + more


def normalise(index: Index, shape: tuple[int, ...]) -> Index:
    """An index as one slice with explicit bounds per dimension."""
    if len(index) > len(shape):
        raise ValueError(f"index: expected at most {len(shape)} slices, got {index!r}")
    full = tuple(index) + (slice(None),) * (len(shape) - len(index))
    bounds = []
    for part, size in zip(full, shape, strict=True):
        start, stop, step = part.indices(size)
        if step != 1:
            raise ValueError(f"index: expected steps of 1, got {part!r}")
        bounds.append(slice(start, max(start, stop)))
    return tuple(bounds)


def row_blocks(rows: slice, row_bytes: int) -> Iterator[slice]:
    """Consecutive runs of rows of about `BLOCK_BYTES` each."""
    step = max(1, BLOCK_BYTES // max(1, row_bytes))
    for start in range(rows.start, rows.stop, step):
        yield slice(start, min(start + step, rows.stop))


def read_json(path: Path) -> Any:
    """A JSON file of bounded size.

    Raises: CheckpointMismatch where the file is missing, too large or not JSON.
    """
    try:
        size = path.stat().st_size
        if size > MAX_JSON_BYTES:
            raise CheckpointMismatch(f"{path}: {size} bytes of JSON, at most {MAX_JSON_BYTES}")
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointMismatch(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        if isinstance(error, CheckpointMismatch):
            raise
        raise CheckpointMismatch(f"{path}: not valid JSON ({error})") from error
