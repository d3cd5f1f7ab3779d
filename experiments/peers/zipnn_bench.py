"""ZipNN and zstd as measured peers: one process, JSON commands in, JSON answers out.

Runs in a virtual environment of its own (zipnn, zstandard) and imports nothing of this project.
Every line of stdin is a command, every line of stdout its answer, in order:

    {"op": "load", "path": PATH}
    {"op": "compress", "method": "zipnn", "threads": 2}
    {"op": "decompress", "method": "zipnn", "threads": 2}
    {"op": "compress_files", "method": "zipnn", "threads": 2, "source": PATH, "target": PATH}
    {"op": "decompress_files", "method": "zipnn", "threads": 2, "source": PATH, "target": PATH}
    {"op": "info"}

`compress` packs the whole file as one buffer and keeps the result, `decompress` unpacks what the
last `compress` of that method kept and compares it with the file.

Units: seconds on the monotonic clock. The first two work from memory to memory, and copies that
only this program needs are outside; the others read a file and write one.
"""

import importlib.metadata
import json
import pathlib
import platform
import sys
import time

import zipnn
import zstandard

ZSTD_LEVEL = 3


class Bench:
    """One file's bytes and what each method made of them."""

    def __init__(self) -> None:
        self.source = b""
        self.packed: dict[str, bytes] = {}

    def load(self, path: str) -> dict:
        self.source = pathlib.Path(path).read_bytes()
        self.packed = {}
        return {"bytes": len(self.source)}

    def compress(self, method: str, threads: int) -> dict:
        # ZipNN writes over its input.
        data = bytearray(self.source)
        codec = codec_of(method, threads)
        started = time.perf_counter()
        packed = codec.compress(data)
        seconds = time.perf_counter() - started
        self.packed[method] = bytes(packed)
        return {"seconds": seconds, "bytes": len(packed)}

    def decompress(self, method: str, threads: int) -> dict:
        data = bytearray(self.packed[method])
        codec = codec_of(method, threads)
        started = time.perf_counter()
        found = codec.decompress(data)
        seconds = time.perf_counter() - started
        return {"seconds": seconds, "identical": found == self.source}

    def compress_files(self, method: str, threads: int, source: str, target: str) -> dict:
        started = time.perf_counter()
        data = bytearray(pathlib.Path(source).read_bytes())
        pathlib.Path(target).write_bytes(codec_of(method, threads).compress(data))
        return {"seconds": time.perf_counter() - started}

    def decompress_files(self, method: str, threads: int, source: str, target: str) -> dict:
        started = time.perf_counter()
        data = bytearray(pathlib.Path(source).read_bytes())
        pathlib.Path(target).write_bytes(codec_of(method, threads).decompress(data))
        seconds = time.perf_counter() - started
        return {"seconds": seconds, "identical": pathlib.Path(target).read_bytes() == self.source}

    def info(self) -> dict:
        names = ("zipnn", "zstandard", "numpy")
        return {
            "system": "zipnn",
            "python": platform.python_version(),
            "zstd_level": ZSTD_LEVEL,
            **{name: importlib.metadata.version(name) for name in names},
        }


class Zstd:
    """zstd with the methods that ZipNN has."""

    def __init__(self, threads: int) -> None:
        # One thread is zstd's plain form (0): 1 would be a worker beside the caller's thread.
        self.compressor = zstandard.ZstdCompressor(
            level=ZSTD_LEVEL, threads=threads if threads > 1 else 0
        )

    def compress(self, data: bytearray) -> bytes:
        return self.compressor.compress(data)

    def decompress(self, data: bytearray) -> bytes:
        return zstandard.ZstdDecompressor().decompress(data)


def codec_of(method: str, threads: int):
    if method == "zipnn":
        return zipnn.ZipNN(input_format="byte", bytearray_dtype="bfloat16", threads=threads)
    return Zstd(threads)


def main() -> None:
    bench = Bench()
    for line in sys.stdin:
        command = json.loads(line)
        operation = getattr(bench, command.pop("op"))
        print(json.dumps(operation(**command)), flush=True)


if __name__ == "__main__":
    main()
