"""Safetensors files written tensor by tensor, which appear complete or not at all.

Source: https://huggingface.co/docs/safetensors, "Format": 8 bytes of header length, a header of
JSON that may end in spaces, the data of all tensors without gaps. Reading is the library's part.
"""

import contextlib
import dataclasses
import errno
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

METADATA = "__metadata__"
PARTIAL = ".partial"
COPY_BYTES = 8 * 2**20
LENGTH_BYTES = 8


@dataclasses.dataclass(frozen=True)
class Stored:
    """A tensor's data type as files name it, its shape and its bytes in the data of its file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.begin


@dataclasses.dataclass(frozen=True)
class Header:
    """The header of a file that the library has accepted; `tensors` in the order of the data."""

    text: str
    metadata: dict[str, str] | None
    tensors: dict[str, Stored]


def read_header(path: Path) -> Header:
    """The header with its text and the order of its parts, which the library does not give.

    Raises: ValueError where the data of a tensor is not right behind that of another.
    """
    with path.open("rb") as file:
        size = int.from_bytes(file.read(LENGTH_BYTES), "little")
        text = file.read(size).decode()
    content = json.loads(text)
    metadata = content.pop(METADATA, None)
    found = {
        name: Stored(entry["dtype"], tuple(entry["shape"]), *entry["data_offsets"])
        for name, entry in content.items()
    }
    tensors = dict(sorted(found.items(), key=lambda item: (item[1].begin, item[1].end)))
    end = 0
    for name, stored in tensors.items():
        if stored.begin != end:
            raise ValueError(f"{path}: {name}: expected data from byte {end}, got {stored.begin}")
        end = stored.end
    return Header(text, metadata, tensors)


def header_text(metadata: Mapping[str, str] | None, tensors: Mapping[str, Stored]) -> str:
    """A header as the library writes it: metadata, then tensors in the order given."""
    content: dict[str, Any] = {} if metadata is None else {METADATA: metadata}
    for name, stored in tensors.items():
        content[name] = header_entry(stored)
    text = compact_json(content)
    return text + " " * (-len(text.encode()) % LENGTH_BYTES)


def header_entry(stored: Stored) -> dict[str, Any]:
    offsets = [stored.begin, stored.end]
    return {"dtype": stored.dtype, "shape": stored.shape, "data_offsets": offsets}


def compact_json(content: object) -> str:
    return json.dumps(content, separators=(",", ":"), ensure_ascii=False)


def head_bytes(text: str) -> bytes:
    """What a file begins with: the length of its header and the header."""
    encoded = text.encode()
    return len(encoded).to_bytes(LENGTH_BYTES, "little") + encoded


class Writer:
    """A safetensors file whose header comes last: sizes are known only when all is written.

    The header has `room_bytes`, which its owner knows to be enough.
    """

    def __init__(self, file: IO[bytes], room_bytes: int) -> None:
        self._file = file
        self._room_bytes = room_bytes + -room_bytes % LENGTH_BYTES
        self._tensors: dict[str, Stored] = {}
        self._end = 0
        file.seek(LENGTH_BYTES + self._room_bytes)

    def add(self, name: str, dtype: str, shape: tuple[int, ...], data: np.ndarray) -> None:
        """One tensor; `data` are its bytes, in one dimension."""
        self._file.write(data.data)
        begin, self._end = self._end, self._end + data.nbytes
        self._tensors[name] = Stored(dtype, shape, begin, self._end)

    def finish(self, metadata: Mapping[str, str]) -> None:
        text = header_text(metadata, self._tensors)
        spare = self._room_bytes - len(text.encode())
        assert spare >= 0, "more header than the most there can be"
        self._file.seek(0)
        self._file.write(head_bytes(text + " " * spare))


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[IO[bytes]]:
    """A file to write, which takes the name when it is complete and on the disk.

    Raises: OSError, whose message says what to do where the disk is full.
    """
    partial = path.with_name(path.name + PARTIAL)
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
        _sync_folder(path.parent)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise OSError(
                f"{path}: no space left on the disk; free some and run the same command again, "
                "which goes on after the last complete file"
            ) from error
        raise
    finally:
        partial.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_blocks(path: Path) -> Iterator[bytes]:
    """A file's bytes in blocks."""
    with path.open("rb") as file:
        while block := file.read(COPY_BYTES):
            yield block
