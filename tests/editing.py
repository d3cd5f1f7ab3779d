"""Changes to the files of a checkpoint, for tests that damage or extend one."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file


def edit_json(path: Path, change: Callable[[dict], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def edit_tensors(path: Path, change: Callable[[dict], object]) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def stored_tensors(folder: Path) -> dict[str, np.ndarray]:
    """All tensors of a Hugging Face folder by their own names."""
    tensors: dict[str, np.ndarray] = {}
    for path in folder.glob("*.safetensors"):
        tensors |= load_file(path)
    return tensors
