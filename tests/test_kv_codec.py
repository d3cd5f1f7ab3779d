"""The KV codec: messages are those of the NumPy form, and every bit comes back."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import decode_kv, encode_kv, merge_kv
from pallas_kernels.kv_codec import Layout, decode_kv_reference, encode_kv_reference


@functools.cache
def programs(tokens: int, width: int, itemsize: int):
    """Compiled encode, decode and merge."""
    sizes = {"tokens": tokens, "width": width, "itemsize": itemsize}
    return (
        jax.jit(encode_kv),
        jax.jit(functools.partial(decode_kv, **sizes)),
        jax.jit(functools.partial(merge_kv, **sizes)),
    )


def check(words_TH: np.ndarray, used: int, overfull: bool | None = None) -> bool:
    """Messages are those of the reference, and give every used word back; whether overfull."""
    T, H = words_TH.shape
    itemsize = words_TH.dtype.itemsize
    encode, decode, merge = programs(T, H, itemsize)
    coded = encode(words_TH[None], used)
    message, is_overfull = encode_kv_reference(words_TH, used)
    np.testing.assert_array_equal(coded.message[0], message)
    assert coded.overfull.tolist() == [is_overfull]
    assert overfull in (None, is_overfull)
    whole = merge(coded.message, coded.exponents)[0]
    np.testing.assert_array_equal(whole, words_TH)
    if not is_overfull:
        for found in (decode(coded.message)[0], decode_kv_reference(message, T, H, itemsize)):
            assert found.dtype == words_TH.dtype
            np.testing.assert_array_equal(found[:used], words_TH[:used])
    return is_overfull


def gaussian(tokens: int, width: int, dtype=ml_dtypes.bfloat16, seed: int = 0) -> np.ndarray:
    values = np.random.default_rng(seed).normal(size=(tokens, width)).astype(dtype)
    return values.view(np.uint16 if values.itemsize == 2 else np.uint32)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        *((shape, ml_dtypes.bfloat16) for shape in ((1, 1), (3, 20), (64, 64), (9, 576))),
        *((shape, np.float32) for shape in ((3, 20), (64, 64))),
    ],
)
def test_ordinary_values(shape, dtype):
    words = gaussian(*shape, dtype)
    for used in {0, 1, shape[0] // 2, shape[0]}:
        assert not check(words, used)


def test_every_pattern():
    """Infinities, subnormals, both zeros and all NaN payloads."""
    every = np.arange(2**16, dtype=np.uint16)
    assert check(every.reshape(1024, 64), 1024, overfull=True)
    # As many rare ones as a message has room for at a time, in tokens that are not in the sample.
    layout = Layout.of(64, 64, 2)
    random = np.random.default_rng(0)
    exponents = random.integers(120, 127, 4096)
    exponents[random.permutation(4096)[:400]] = 130 + np.arange(400) % 15
    common = (exponents << 7).astype(np.uint16)
    for start in range(0, 2**16, layout.rare):
        words = common.copy()
        words[64 :: 4096 // layout.rare] = every[start : start + layout.rare]
        check(words.reshape(64, 64), 64, overfull=False)


def test_upper_and_lower_halves_of_float32():
    words = np.random.default_rng(0).integers(0, 2**32, (64, 64), dtype=np.uint32)
    assert check(words, 64, overfull=True)
    words = words & 0x807F_FFFF | 0x3F80_0000  # one exponent
    check(words, 64, overfull=False)


@pytest.mark.parametrize("kind", ["escapes", "rare"])
@pytest.mark.parametrize("where", ["first", "last", "spread"])
def test_lists_up_to_their_room(kind, where):
    """A list that is just full, and one too many."""
    layout = Layout.of(64, 64, 2)
    room = getattr(layout, kind)
    random = np.random.default_rng(1)
    for count in (room, room + 1):
        index = {
            "first": np.arange(count),
            "last": 4096 - 1 - np.arange(count),
            "spread": random.permutation(4096)[:count],
        }[where]
        exponents = random.integers(120, 127, 4096)
        others = random.permutation(np.setdiff1d(np.arange(4096), index))
        if kind == "escapes":  # of 15 exponents
            exponents[index] = 1 + np.arange(count) % 15
        else:  # hardly two alike, and behind them 15 exponents of other escapes
            exponents[index] = 1 + np.arange(count) % 100
            exponents[others[:450]] = 130 + np.arange(450) % 15
        words = gaussian(64, 64) & 0x807F | (exponents << 7).astype(np.uint16).reshape(64, 64)
        check(words, 64, overfull=count > room)


def test_unused_tokens_are_no_escapes():
    words = gaussian(64, 64)
    words[20:] = np.random.default_rng(2).integers(0, 2**16, (44, 64), dtype=np.uint16)
    assert check(words, 64)
    assert not check(words, 20)


def test_messages_of_many_heads_are_independent():
    words = np.stack([gaussian(16, 64, seed=seed) << seed % 2 for seed in range(6)])
    coded = jax.jit(encode_kv)(words.reshape(2, 3, 16, 64), 16)
    for message, own in zip(coded.message.reshape(6, -1), words, strict=True):
        np.testing.assert_array_equal(message, encode_kv_reference(own, 16)[0])


def test_sizes():
    """Of bfloat16 11.5625 bits a value and a head; of float32 the lower 16 bits more."""
    for tokens, width in ((32, 64), (512, 128), (64, 576)):
        values = tokens * width
        assert Layout.of(tokens, width, 2).message_bytes == 24 + values * 11.5625 / 8
        assert Layout.of(tokens, width, 4).message_bytes == 24 + values * 27.5625 / 8
    with pytest.raises(ValueError, match="kv message: expected 1512 bytes for 1024 values, got 8"):
        decode_kv(jnp.zeros((1, 8), jnp.uint8), 16, 64, 2)
