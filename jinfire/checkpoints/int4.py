"""The words of 4-bit weights between their published order and that of the device, on the host.

`pallas_kernels.pack_for_device` says what the orders are; this is the same permutation for parts of
a checkpoint that must not pass through a device. Seen as bytes, the four words of a group are a
matrix [4, 4] that is transposed; then the low halves of a word's bytes come first and the high
ones after them, which are two exchanges within the word.
"""

import numpy as np

from pallas_kernels import INT4_GROUP, INT4_PER_WORD

# Words of a group, whose values share a scale.
WORDS = INT4_GROUP // INT4_PER_WORD


def device_words(published_FW: np.ndarray) -> np.ndarray:
    """Device form of int32 words [F, D / 8], whole groups of four."""
    words_FW = _turned(published_FW)
    _exchange(words_FW, 4, 0x00F000F0)
    _exchange(words_FW, 8, 0x0000FF00)
    return words_FW.view(np.int32)


def published_words(device_FW: np.ndarray) -> np.ndarray:
    """The inverse of `device_words`."""
    words_FW = np.array(device_FW, "<u4")
    _exchange(words_FW, 8, 0x0000FF00)
    _exchange(words_FW, 4, 0x00F000F0)
    return _turned(words_FW).view(np.int32)


def _turned(words_FW: np.ndarray) -> np.ndarray:
    """A copy in which byte t of word i of every group is byte i of word t."""
    octets = np.ascontiguousarray(words_FW).view(np.uint8).reshape(-1, WORDS, 4)
    return np.ascontiguousarray(octets.swapaxes(1, 2)).view("<u4").reshape(words_FW.shape)


def _exchange(words_FW: np.ndarray, distance: int, mask: int) -> None:
    """Exchange, in place, of the bits under `mask` with those `distance` above them."""
    changed = words_FW >> np.uint32(distance)
    changed ^= words_FW
    changed &= np.uint32(mask)
    words_FW ^= changed
    changed <<= np.uint32(distance)
    words_FW ^= changed
