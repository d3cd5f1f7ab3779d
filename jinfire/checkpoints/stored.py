"""Where the parts of a logical tensor lie among the tensors of a Hugging Face checkpoint.

A form knows its native tensors, which part of which of them a slice of the logical tensor is, and
how the two orders turn into each other. Reading and writing are the same table used both ways.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import ClassVar

import numpy as np

from jinfire.checkpoints.int4 import WORDS, device_words, published_words
from jinfire.checkpoints.source import Index, allowed_dtypes, row_blocks
from jinfire.config import ModelConfig
from jinfire.models.family import Fused, Packed, Stored
from jinfire.models.spec import ParamSpec, abstract_tree
from pallas_kernels import INT4_GROUP, INT4_PER_WORD

Shape = tuple[int, ...]
# The published shape of a packed matrix, which its words and scales imply.
SHAPE_SUFFIX = "weight_shape"


@dataclasses.dataclass(frozen=True)
class Native:
    """What a tensor of the checkpoint must be."""

    shape: Shape
    dtypes: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Copy:
    """A part of a native tensor and the part of a logical slice that has the same values."""

    native: str
    source: Index
    target: Index


@dataclasses.dataclass(frozen=True)
class Form:
    """One logical tensor that is stored as it is; other forms derive from it.

    `rows` are the axis of a native tensor, and that of the logical one, along which a copy is
    cut into smaller ones.
    """

    name: str
    spec: ParamSpec
    rows: ClassVar[tuple[int, int]] = (0, 0)

    @property
    def shape(self) -> Shape:
        return self.spec.shape

    def natives(self) -> Iterator[tuple[str, Native]]:
        """Tensors that hold the values, by name."""
        yield self.name, Native(self.shape, allowed_dtypes(self.spec))

    def constants(self, experts: slice) -> Iterator[tuple[str, Native, tuple[int, ...]]]:
        """Tensors beside those of these experts whose values the config implies."""
        yield from ()

    def copies(self, bounds: Index) -> Iterator[Copy]:
        """What makes up a slice."""
        yield Copy(self.name, bounds, tuple(_from_zero(part) for part in bounds))

    def logical(self, part: np.ndarray) -> np.ndarray:
        """A part of a native tensor in the logical order."""
        return part

    def native(self, part: np.ndarray) -> np.ndarray:
        """The inverse of `logical`."""
        return part


@dataclasses.dataclass(frozen=True)
class Stack(Form):
    """A stack [E, ...] of one tensor for each expert, `{e}` in `name` standing for it."""

    rows: ClassVar[tuple[int, int]] = (0, 1)

    def natives(self) -> Iterator[tuple[str, Native]]:
        one = Native(self._turned(self.shape[1:]), allowed_dtypes(self.spec))
        for expert in range(self.shape[0]):
            yield self._of(expert), one

    def copies(self, bounds: Index) -> Iterator[Copy]:
        experts, *rest = bounds
        source = self._turned(tuple(rest))
        target = tuple(_from_zero(part) for part in rest)
        for place, expert in enumerate(range(experts.start, experts.stop)):
            yield Copy(self._of(expert), source, (slice(place, place + 1), *target))

    def logical(self, part: np.ndarray) -> np.ndarray:
        return part[None]

    def native(self, part: np.ndarray) -> np.ndarray:
        return part[0]

    def _turned[T](self, axes: tuple[T, ...]) -> tuple[T, ...]:
        """Shape or index of one expert in the order of its native tensor."""
        return axes

    def _of(self, expert: int) -> str:
        return self.name.replace("{e}", str(expert))


@dataclasses.dataclass(frozen=True)
class PackedWords(Stack):
    """Words of 4-bit experts, whose order in a group of columns is the device's.

    Slices along the words are whole groups.
    """

    prefix: str

    def constants(self, experts: slice) -> Iterator[tuple[str, Native, tuple[int, ...]]]:
        _, rows, words = self.shape
        one = Native((2,), ("int32", "int64"))
        for expert in range(experts.start, experts.stop):
            prefix = self.prefix.replace("{e}", str(expert))
            yield f"{prefix}.{SHAPE_SUFFIX}", one, (rows, words * INT4_PER_WORD)

    def copies(self, bounds: Index) -> Iterator[Copy]:
        words = bounds[2]
        if words.start % WORDS or words.stop % WORDS:
            raise ValueError(
                f"{self.name}: expected slices of whole groups of {INT4_GROUP} values, {WORDS} "
                f"words, got {words}"
            )
        return super().copies(bounds)

    def logical(self, part: np.ndarray) -> np.ndarray:
        return device_words(part)[None]

    def native(self, part: np.ndarray) -> np.ndarray:
        return published_words(part[0])


@dataclasses.dataclass(frozen=True)
class PackedScales(Stack):
    """Scales [E, in / 32, out] of 4-bit experts, stored [out, in / 32]."""

    rows: ClassVar[tuple[int, int]] = (0, 2)

    def logical(self, part: np.ndarray) -> np.ndarray:
        return part.T[None]

    def native(self, part: np.ndarray) -> np.ndarray:
        return part[0].T

    def _turned[T](self, axes: tuple[T, ...]) -> tuple[T, ...]:
        return axes[::-1]


@dataclasses.dataclass(frozen=True)
class FusedPart(Form):
    """Experts [E, out, in] that are one run of the last axis of a tensor [E, in, parts x out]."""

    part: int
    parts: int
    rows: ClassVar[tuple[int, int]] = (1, 2)

    def natives(self) -> Iterator[tuple[str, Native]]:
        experts, rows, columns = self.shape
        yield (
            self.name,
            Native((experts, columns, self.parts * rows), allowed_dtypes(self.spec)),
        )

    def copies(self, bounds: Index) -> Iterator[Copy]:
        experts, rows, columns = bounds
        offset = self.part * self.shape[1]
        shifted = slice(rows.start + offset, rows.stop + offset)
        target = _from_zero(rows), _from_zero(columns)
        # One expert each, so that a copy's rows are those of one matrix.
        for place, expert in enumerate(range(experts.start, experts.stop)):
            yield Copy(
                self.name,
                (slice(expert, expert + 1), columns, shifted),
                (slice(place, place + 1), *target),
            )

    def logical(self, part: np.ndarray) -> np.ndarray:
        return part.swapaxes(1, 2)

    def native(self, part: np.ndarray) -> np.ndarray:
        return part.swapaxes(1, 2)


def natives_of(form: Form) -> Iterator[tuple[str, Native]]:
    """All tensors of a checkpoint that belong to one logical tensor."""
    yield from form.natives()
    for name, native, _ in form.constants(slice(0, form.shape[0])):
        yield name, native


def stored_forms(config: ModelConfig, tensor_names: Mapping[str, Stored]) -> dict[str, Form]:
    """The form of every tensor of a model, by logical name."""
    return {name: _form(name, spec, tensor_names) for name, spec in abstract_tree(config).items()}


def _form(name: str, spec: ParamSpec, tensor_names: Mapping[str, Stored]) -> Form:
    layer = re.match(r"layers\.(\d+)\.", name)
    number = layer.group(1) if layer else ""
    pattern = f"layers.{{i}}.{name[layer.end() :]}" if layer else name
    stored = tensor_names[pattern]
    if isinstance(stored, Fused):
        return FusedPart(stored.name.replace("{i}", number), spec, stored.part, stored.parts)
    if isinstance(stored, Packed):
        prefix = stored.prefix.replace("{i}", number)
        own = f"{prefix}.{stored.suffix}"
        if stored.suffix == "weight_packed":
            return PackedWords(own, spec, prefix)
        return PackedScales(own, spec)
    own = stored.replace("{i}", number)
    return Stack(own, spec) if "{e}" in own else Form(own, spec)


def blocks(form: Form, copy: Copy, row_bytes: int) -> Iterator[Copy]:
    """A copy as several of about `BLOCK_BYTES` each."""
    native_axis, logical_axis = form.rows
    rows, start = copy.source[native_axis], copy.target[logical_axis].start
    for block in row_blocks(rows, row_bytes):
        source, target = list(copy.source), list(copy.target)
        source[native_axis] = block
        shift = start - rows.start
        target[logical_axis] = slice(block.start + shift, block.stop + shift)
        yield Copy(copy.native, tuple(source), tuple(target))


def _from_zero(part: slice) -> slice:
    return slice(0, part.stop - part.start)
