"""The Unweight codec in a process of its own, spoken to like its peers: JSON in, JSON out.

`python -m experiments.unweight_worker`, with the operations of `experiments/peers/zipnn_bench.py`:

    {"op": "load", "path": PATH}
    {"op": "compress", "form": "huffman", "jobs": 2}
    {"op": "decompress", "form": "huffman", "jobs": 2}
    {"op": "compress_files", "form": "huffman", "jobs": 2, "source": PATH, "target": PATH}
    {"op": "decompress_files", "form": "huffman", "jobs": 2, "source": PATH, "target": PATH}
    {"op": "info"}

Units: seconds on the monotonic clock. The first two are from memory to memory: tensors to blobs and
back, hashes included; the others read a folder and write one, as `jinfire compress` does.
"""

import importlib.metadata
import json
import pathlib
import platform
import sys
import time
from typing import Any

import numpy as np
from safetensors import safe_open

import jinfire as jf


class Worker:
    """One file's tensors and what the codec made of them."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.words: list[np.ndarray] = []
        self.blobs: dict[str, list[np.ndarray]] = {}

    def load(self, path: str) -> dict[str, Any]:
        with safe_open(path, framework="numpy") as file:
            self.names = sorted(file.keys())
            self.words = [file.get_tensor(name).view(np.uint16) for name in self.names]
        self.blobs = {}
        return {"bytes": pathlib.Path(path).stat().st_size}

    def compress(self, form: str, jobs: int) -> dict[str, Any]:
        started = time.perf_counter()
        self.blobs[form] = [jf.unweight_encode(words, form, jobs) for words in self.words]
        seconds = time.perf_counter() - started
        return {"seconds": seconds, "bytes": sum(blob.size for blob in self.blobs[form])}

    def decompress(self, form: str, jobs: int) -> dict[str, Any]:
        pairs = list(zip(self.blobs[form], self.words, strict=True))
        started = time.perf_counter()
        found = [jf.unweight_decode(blob, words.shape, jobs) for blob, words in pairs]
        seconds = time.perf_counter() - started
        same = all(np.array_equal(a, b) for a, b in zip(found, self.words, strict=True))
        return {"seconds": seconds, "identical": same}

    def compress_files(self, form: str, jobs: int, source: str, target: str) -> dict[str, Any]:
        started = time.perf_counter()
        jf.compress(source, target, form=form, jobs=jobs)
        seconds = time.perf_counter() - started
        return {"seconds": seconds, "bytes": file_bytes(target)}

    def decompress_files(self, form: str, jobs: int, source: str, target: str) -> dict[str, Any]:
        """The folder says what its form is; `form` is that of `compress_files`."""
        started = time.perf_counter()
        jf.decompress(source, target, jobs=jobs)
        seconds = time.perf_counter() - started
        return {"seconds": seconds, "identical": self._holds_the_words(pathlib.Path(target))}

    def _holds_the_words(self, folder: pathlib.Path) -> bool:
        """Whether the tensors of a folder, in any order of its file, are those that were loaded."""
        found = []
        for path in folder.glob("*.safetensors"):
            with safe_open(path, framework="numpy") as file:
                found += [file.get_tensor(name).view(np.uint16) for name in self.names]
        return all(np.array_equal(a, b) for a, b in zip(found, self.words, strict=True))

    def info(self) -> dict[str, Any]:
        return {
            "system": "jinfire",
            "version": jf.__version__,
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in ("numpy", "numba", "xxhash")},
        }


def file_bytes(folder: str) -> int:
    return sum(path.stat().st_size for path in pathlib.Path(folder).rglob("*") if path.is_file())


def main() -> None:
    worker = Worker()
    for line in sys.stdin:
        command = json.loads(line)
        operation = getattr(worker, command.pop("op"))
        print(json.dumps(operation(**command)), flush=True)


if __name__ == "__main__":
    main()
