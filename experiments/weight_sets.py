"""Trained weights as BF16, by tensor and kind of tensor: what the Unweight experiments measure."""

import dataclasses
import functools
import os
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping

import ml_dtypes
import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

import jinfire as jf
from experiments.ctranslate2 import read_variables
from experiments.harness import ROOT, Options, file_sha256

MLP, ATTENTION, EMBEDDING, OTHER = "mlp", "attention", "embedding", "other"
ALL = "all"

Tensors = Iterator[tuple[str, np.ndarray]]


def read_safetensors(path: pathlib.Path) -> Tensors:
    """Every tensor of one file."""
    with safe_open(path, framework="numpy") as file:
        for name in file.keys():  # noqa: SIM118
            yield name, file.get_tensor(name)


def read_checkpoint(path: pathlib.Path) -> Tensors:
    """Every tensor of a model that the engine runs, by logical name; quantised ones dequantised."""
    source = jf.open_checkpoint(path)
    try:
        for name in sorted(source.names()):
            yield name, source.read(name, ())
    finally:
        source.close()


# First match wins; a tensor with one axis is "other" whatever its name.
KINDS = (
    (re.compile(r"(^|[./_])(attention|self_attention|self_attn)[./]"), ATTENTION),
    (re.compile(r"embed|position_encodings|(^|[._])head[.]"), EMBEDDING),
    (re.compile(r"(^|[./])(ffn|mlp|intermediate|output)[./]"), MLP),
)


def kind_of(name: str, shape: tuple[int, ...]) -> str:
    """MLP, attention, embedding (with the head) or other, by the names that the formats use."""
    if len(shape) < 2:
        return OTHER
    return next((kind for pattern, kind in KINDS if pattern.search(name)), OTHER)


@dataclasses.dataclass(frozen=True)
class WeightSet:
    """Weights by name. `stored` is what the file holds before the cast to BF16.

    `file` is one of the repository, None one that `jinfire fetch` gets.
    """

    name: str
    stored: str
    read: Callable[[pathlib.Path], Tensors]
    file: str | None = None

    def path(self, options: Options) -> pathlib.Path:
        if self.file is not None:
            return ROOT / self.file
        if self.name == "smollm2" and options.model is not None:
            return options.model
        return jf.fetch(self.name)

    def sha256(self, options: Options) -> str:
        return file_sha256(self.path(options))


WEIGHT_SETS: Mapping[str, WeightSet] = {
    weights.name: weights
    for weights in (
        WeightSet("whisper-base", "float16", read_variables),
        WeightSet("whisper-tiny.en", "float16", read_variables),
        WeightSet("minilm-l6", "float32", read_safetensors),
        WeightSet("wordllama", "float16", read_safetensors),
        WeightSet("smollm2", "Q4_1, dequantised", read_checkpoint),
        # Random weights, for smoke runs.
        WeightSet(
            "golden_llama31",
            "float32, random",
            read_safetensors,
            "tests/golden/llama31_f32/model.safetensors",
        ),
    )
}


def bfloat16_words(values: np.ndarray) -> np.ndarray | None:
    """The values cast to BF16, as uint16 words; None where they are no floats."""
    if values.dtype.name not in ("float32", "float16", "bfloat16"):
        return None
    return values.astype(np.float32).astype(ml_dtypes.bfloat16).view(np.uint16)


def words_of(weights: WeightSet, options: Options) -> dict[str, np.ndarray]:
    """Every float tensor of a set as BF16 words, by name."""
    found = {}
    for name, values in weights.read(weights.path(options)):
        words = bfloat16_words(values)
        if words is not None:
            found[name] = words
    return found


def bfloat16_folder(weights: WeightSet, options: Options) -> pathlib.Path:
    """A folder with one safetensors file of the set in BF16, made once and kept in the cache."""
    source = weights.path(options)
    stamp = _stamp(source, source.stat().st_size, source.stat().st_mtime_ns)
    folder = options.cache / "bfloat16" / f"{weights.name}-{stamp}"
    target = folder / "model.safetensors"
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / f"{os.getpid()}.partial"
        tensors = {
            name: words.view(ml_dtypes.bfloat16)
            for name, words in words_of(weights, options).items()
        }
        save_file(tensors, partial)
        partial.replace(target)
    return folder


@functools.cache
def _stamp(source: pathlib.Path, size_bytes: int, changed_ns: int) -> str:
    return file_sha256(source)[:16]
