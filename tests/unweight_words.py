"""Tensors of words for tests of compressed weights, and blobs whose hash fits what they say."""

import ml_dtypes
import numpy as np

from pallas_kernels import hash_blob

FORMS = ("raw", "huffman", "palette", "compact")
SHAPES = (
    *((), (1,), (64,), (0, 64), (5, 0), (1, 64), (63, 64), (64, 64), (65, 64), (130, 192)),
    *((3, 5), (70, 100), (2, 3, 128), (4, 33, 64), (17, 1), (1, 257)),
)


def gaussian(shape: tuple[int, ...], dtype: str = "BF16", seed: int = 0) -> np.ndarray:
    """Words of normal weights, as trained ones mostly are."""
    values = np.random.default_rng(seed).normal(scale=0.02, size=shape).astype(np.float32)
    if dtype == "F32":
        return values.view(np.uint32)
    return values.astype(ml_dtypes.bfloat16).view(np.uint16)


def nibble_words(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Words of 4-bit values that are roughly normal around 8."""
    rng = np.random.default_rng(seed)
    values = np.clip(np.rint(rng.normal(8, 2.4, size=(*shape, 8))), 0, 15).astype(np.uint32)
    words = (values << np.arange(0, 32, 4, dtype=np.uint32)).sum(axis=-1, dtype=np.uint32)
    return np.asarray(words).view(np.int32)


def forged(blob: np.ndarray, **changes: object) -> np.ndarray:
    """The blob with bytes changed at places `at<offset>`, and a hash that fits them."""
    out = blob.copy()
    for name, value in changes.items():
        data = np.frombuffer(bytes(value), np.uint8)  # type: ignore[arg-type]
        out[int(name[2:]) : int(name[2:]) + data.size] = data
    out[56:64] = np.frombuffer(hash_blob(out).to_bytes(8, "little"), np.uint8)
    return out
