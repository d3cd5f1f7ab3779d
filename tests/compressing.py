"""Checkpoints to compress, for the tests of compressed ones."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

INDEX = "model.safetensors.index.json"


def trained_like(shape: tuple[int, ...], seed: int = 0, dtype: object = ml_dtypes.bfloat16):
    """Normal weights, whose exponents are distributed as those of trained ones."""
    values = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return (values * np.float32(0.02)).astype(dtype)


def any_words(count: int, seed: int = 0) -> np.ndarray:
    """bfloat16 weights of even bits, which no code makes smaller."""
    bits = np.random.default_rng(seed).integers(0, 2**16, count, np.uint16)
    return bits.view(ml_dtypes.bfloat16)


def write_shards(folder: Path, shards: list[dict[str, np.ndarray]]) -> Path:
    """A folder of several files with an index, as transformers write it."""
    folder.mkdir(parents=True)
    weight_map = {}
    for number, tensors in enumerate(shards, 1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file(tensors, folder / name, {"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
    size = sum(tensor.nbytes for tensors in shards for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    (folder / "config.json").write_text('{"model_type": "none that is known"}\n')
    (folder / "tokenizer.json").write_text("{}")
    return folder


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
