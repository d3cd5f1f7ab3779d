"""Variables of a CTranslate2 `model.bin`, for statistics of their weights.

*Layout*, little-endian: u32 version, the specification's name, u32 revision, u32 number of
variables; of each its name, u8 rank, u32 dimensions, u8 dtype, u32 bytes, the values; then u32
number of aliases, of each two names. A name is a u16 length and that many bytes, the last one 0.

*Source*: CTranslate2, `python/ctranslate2/specs/model_spec.py`, binary version 6.
"""

import math
import mmap
import pathlib
import struct
from collections.abc import Iterator

import ml_dtypes
import numpy as np

VERSION = 6
MAX_RANK = 8
DTYPES = (
    *(np.dtype("<f4"), np.dtype("i1"), np.dtype("<i2"), np.dtype("<i4"), np.dtype("<f2")),
    np.dtype(ml_dtypes.bfloat16),
)


class _Reader:
    """Fields of a buffer, one after another; nothing beyond its end."""

    def __init__(self, data: memoryview, where: str) -> None:
        self.data, self.where, self.at = data, where, 0

    def take(self, size_bytes: int, what: str) -> memoryview:
        left = len(self.data) - self.at
        if size_bytes > left:
            raise ValueError(
                f"{self.where}: expected {size_bytes} bytes of {what} at {self.at}, {left} are left"
            )
        self.at += size_bytes
        return self.data[self.at - size_bytes : self.at]

    def number(self, form: str, what: str) -> int:
        return struct.unpack(f"<{form}", self.take(struct.calcsize(form), what))[0]

    def text(self, what: str) -> str:
        raw = bytes(self.take(self.number("H", what), what))
        if raw[-1:] != b"\0":
            raise ValueError(f"{self.where}: expected {what} to end in 0, got {raw[-8:]!r}")
        try:
            return raw[:-1].decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"{self.where}: expected {what} in UTF-8, got {raw!r}") from error


def read_variables(path: pathlib.Path) -> Iterator[tuple[str, np.ndarray]]:
    """Name and values of every variable, in the file's order; aliases are not repeated.

    Each array is a copy, and the only one that is alive.

    Raises: ValueError where the file is of another version, is cut, or contradicts itself.
    """
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
        memoryview(mapped) as data,
    ):
        yield from _variables(_Reader(data, str(path)))


def _variables(reader: _Reader) -> Iterator[tuple[str, np.ndarray]]:
    version = reader.number("I", "version")
    if version != VERSION:
        raise ValueError(f"{reader.where}: expected a file of version {VERSION}, got {version}")
    reader.text("the specification's name")
    reader.number("I", "revision")
    for _ in range(reader.number("I", "number of variables")):
        name = reader.text("a variable's name")
        rank = reader.number("B", f"rank of {name}")
        if rank > MAX_RANK:
            raise ValueError(
                f"{reader.where}: {name}: expected at most {MAX_RANK} axes, got {rank}"
            )
        shape = [reader.number("I", f"shape of {name}") for _ in range(rank)]
        kind = reader.number("B", f"dtype of {name}")
        if kind >= len(DTYPES):
            raise ValueError(
                f"{reader.where}: {name}: expected a dtype below {len(DTYPES)}, got {kind}"
            )
        size_bytes = reader.number("I", f"size of {name}")
        # Python's integers: a product of dimensions cannot wrap around.
        if size_bytes != math.prod(shape) * DTYPES[kind].itemsize:
            raise ValueError(
                f"{reader.where}: {name}: expected {DTYPES[kind]} {shape}, got {size_bytes} bytes"
            )
        values = np.frombuffer(bytes(reader.take(size_bytes, name)), DTYPES[kind])
        yield name, values.reshape(shape)
    for _ in range(reader.number("I", "number of aliases")):
        reader.text("an alias")
        reader.text("an alias's variable")
    if reader.at != len(reader.data):
        raise ValueError(f"{reader.where}: {len(reader.data) - reader.at} bytes behind the end")
