"""Keys and values coded without loss, in messages of one size: what a handoff sends.

A value is a word of 16 bits, bfloat16's or the upper half of a float32. Its sign and mantissa are
nearly random and go as they are; its exponent is one of a few, so it goes as a code of 3 bits: its
rank among the exponents, if it is one of the 7 most frequent, or 7 for an *escape*. Escapes follow
in a list of 4-bit codes, for the next 15 exponents or 15 for a *rare* one, and rare exponents in a
list of bytes. Arrays under XLA have fixed shapes, so both lists have room for a fixed share of the
values. Where one does not do, the message is *overfull*, and all its exponents have to be sent
behind it: then too nothing is lost, it only takes more bytes.

The values of one KV head of one layer in all pages of a request make a message, which splits by
heads as the pages do. Its bytes, for N values padded to a multiple of 32:

    palette        24     the 22 most frequent exponents, most frequent first (ties: the smaller
                          first), and two zeros
    codes          3N/8   three planes of little-endian 32-bit words: bit i of word u of plane j is
                          bit j of the code of value 32u + i
    escapes        N/16   4-bit codes of the first N/8 escapes, in order: four planes like those
                          above; zeros behind them
    rare           N/128  exponents of the first N/128 rare escapes, in order, then zeros
    sign_mantissa  N      sign in bit 7, mantissa below
    low halves     2N     of float32 alone, little-endian

N/8 is rounded up to a multiple of 32, N/128 to one of 16. Exponents are counted in a sample of
tokens, evenly spaced. What is not used (the padding of a bucket of pages) is neither counted nor an
escape, and comes out as anything.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

CODE_BITS, ESCAPE_BITS = 3, 4
ESCAPE, RARE = 7, 15  # the last code of each
RANKS = ESCAPE + RARE
SAMPLE = 2048  # values that exponents are counted in, about
WORD = 32
HEAD_BYTES = 24


class Coded(NamedTuple):
    """Messages, and what has to be sent behind those that are overfull.

    Shapes: message [..., M] and exponents [..., N], uint8; overfull [...], bool.
    """

    message: jax.Array
    exponents: jax.Array
    overfull: jax.Array


class Layout(NamedTuple):
    """Sizes of a message: values, and the most escapes and rare ones among them."""

    values: int
    escapes: int
    rare: int
    low_bytes: int

    @classmethod
    def of(cls, tokens: int, width: int, itemsize: int) -> "Layout":
        values = _ceil(tokens * width, WORD)
        # Keys and values of trained models have 2 to 10 % of escapes, and of rare ones 0.1 %.
        return cls(
            values,
            _ceil(-(-values // 8), WORD),
            _ceil(-(-values // 128), 16),
            values * (itemsize - 2),
        )

    @property
    def sections(self) -> tuple[int, ...]:
        """Bytes of palette, codes, escapes, rare exponents, sign_mantissa and low halves."""
        codes = CODE_BITS * self.values // 8
        escapes = ESCAPE_BITS * self.escapes // 8
        return (HEAD_BYTES, codes, escapes, self.rare, self.values, self.low_bytes)

    @property
    def message_bytes(self) -> int:
        return sum(self.sections)


def _ceil(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def encode_kv(words_TH: jax.Array, used_tokens: jax.Array | int) -> Coded:
    """Messages of the first `used_tokens` tokens.

    Shapes: words [..., T, H], uint16, or uint32 of float32.
    """
    *rest, T, H = words_TH.shape
    layout = Layout.of(T, H, words_TH.dtype.itemsize)
    used_tokens = jnp.asarray(used_tokens, jnp.int32)
    palette_R = _palette(_exponents(_sampled(words_TH, used_tokens)))

    words_N = words_TH.reshape(*rest, T * H)
    words_N = jnp.pad(words_N, [(0, 0)] * len(rest) + [(0, layout.values - T * H)])
    exponents_N = _exponents(words_N)
    codes_N = _codes(exponents_N, palette_R[..., :ESCAPE])
    is_used_N = _like(jnp.arange(layout.values) < used_tokens * H, codes_N.ndim)
    codes_N = jnp.where(is_used_N, codes_N, jnp.zeros_like(codes_N))
    planes = _planes(codes_N, CODE_BITS)

    position_X, num_escapes = _positions(_all_set(planes), layout.escapes)
    escapes_X = _take(exponents_N, position_X)
    codes_X = _codes(escapes_X, palette_R[..., ESCAPE:])
    is_used_X = _like(jnp.arange(layout.escapes), codes_X.ndim) < num_escapes[..., None]
    codes_X = jnp.where(is_used_X, codes_X, jnp.zeros_like(codes_X))
    escape_planes = _planes(codes_X, ESCAPE_BITS)

    position_Y, num_rare = _positions(_all_set(escape_planes), layout.rare)
    head = jnp.pad(palette_R, [(0, 0)] * len(rest) + [(0, HEAD_BYTES - RANKS)])
    sections = [
        head,
        *map(_as_bytes, (*planes, *escape_planes)),
        _take(escapes_X, position_Y),
        _sign_mantissa(words_N),
    ]
    if layout.low_bytes:
        sections.append(_as_bytes(_low(words_N)))
    overfull = (num_escapes > layout.escapes) | (num_rare > layout.rare)
    return Coded(jnp.concatenate(sections, axis=-1), exponents_N, overfull)


def decode_kv(message_M: jax.Array, tokens: int, width: int, itemsize: int) -> jax.Array:
    """Words [..., T, H] of messages that are not overfull: uint16, or uint32 for `itemsize` 4."""
    layout = Layout.of(tokens, width, itemsize)
    palette_R, codes, escape_codes, rare_Y, *_ = _split(message_M, layout)
    escape_planes = _planes_of(escape_codes, ESCAPE_BITS)
    escapes_X = _looked_up(escape_planes, palette_R[..., ESCAPE:RANKS])
    position_Y, _ = _positions(_all_set(escape_planes), layout.rare)
    escapes_X = _put(escapes_X, position_Y, rare_Y)

    planes = _planes_of(codes, CODE_BITS)
    exponents_N = _looked_up(planes, palette_R[..., :ESCAPE])
    position_X, _ = _positions(_all_set(planes), layout.escapes)
    exponents_N = _put(exponents_N, position_X, escapes_X)
    return _joined(message_M, exponents_N, layout, tokens, width)


def merge_kv(
    message_M: jax.Array, exponents_N: jax.Array, tokens: int, width: int, itemsize: int
) -> jax.Array:
    """Words [..., T, H] of any messages, with all their exponents beside them."""
    layout = Layout.of(tokens, width, itemsize)
    return _joined(message_M, exponents_N, layout, tokens, width)


# Words and their parts.


def _high(words: jax.Array) -> jax.Array:
    return words if words.dtype == jnp.uint16 else (words >> 16).astype(jnp.uint16)


def _low(words: jax.Array) -> jax.Array:
    return (words & 0xFFFF).astype(jnp.uint16)


def _exponents(words: jax.Array) -> jax.Array:
    return (_high(words) >> 7 & 0xFF).astype(jnp.uint8)


def _sign_mantissa(words: jax.Array) -> jax.Array:
    high = _high(words)
    return (high >> 8 & 0x80 | high & 0x7F).astype(jnp.uint8)


def _joined(
    message_M: jax.Array, exponents_N: jax.Array, layout: Layout, tokens: int, width: int
) -> jax.Array:
    *_, sign_mantissa_N, low = _split(message_M, layout)
    sign_mantissa_N = sign_mantissa_N.astype(jnp.uint16)
    words_N = (sign_mantissa_N & 0x80) << 8 | sign_mantissa_N & 0x7F
    words_N |= exponents_N.astype(jnp.uint16) << 7
    if layout.low_bytes:
        low_N = jax.lax.bitcast_convert_type(
            low.reshape(*low.shape[:-1], layout.values, 2), jnp.uint16
        )
        words_N = words_N.astype(jnp.uint32) << 16 | low_N.astype(jnp.uint32)
    return words_N[..., : tokens * width].reshape(*words_N.shape[:-1], tokens, width)


def _split(message_M: jax.Array, layout: Layout) -> list[jax.Array]:
    if message_M.shape[-1] != layout.message_bytes:
        raise ValueError(
            f"kv message: expected {layout.message_bytes} bytes for {layout.values} values, "
            f"got {message_M.shape[-1]}"
        )
    return jnp.split(message_M, np.cumsum(layout.sections)[:-1].tolist(), axis=-1)


def _as_bytes(words: jax.Array) -> jax.Array:
    """Little-endian bytes along the last axis."""
    return jax.lax.bitcast_convert_type(words, jnp.uint8).reshape(*words.shape[:-1], -1)


# Codes.


def _sampled(words_TH: jax.Array, used_tokens: jax.Array) -> jax.Array:
    """Whole tokens, since the channels of a head differ, evenly spaced: [..., S * H]."""
    *rest, T, H = words_TH.shape
    count = min(T, max(1, SAMPLE // H))
    token_S = jnp.arange(count, dtype=jnp.int32) * used_tokens // count
    return jnp.take(words_TH, token_S, axis=-2).reshape(*rest, count * H)


def _palette(exponents_N: jax.Array) -> jax.Array:
    """The most frequent exponents, most frequent first: [..., RANKS]."""
    *rest, N = exponents_N.shape
    counted = jax.vmap(lambda own: jnp.zeros(256, jnp.int32).at[own].add(1))
    count_E = counted(exponents_N.reshape(-1, N).astype(jnp.int32)).reshape(*rest, 256)
    # Of equal counts the smaller exponent has the larger key; no two keys are equal.
    keys_R, _ = jax.lax.top_k(count_E * 256 + _like(255 - jnp.arange(256), count_E.ndim), RANKS)
    return (255 - keys_R % 256).astype(jnp.uint8)


def _like(x: jax.Array, ndim: int) -> jax.Array:
    """The array with leading axes of size 1."""
    return x.reshape((1,) * (ndim - x.ndim) + x.shape)


def _codes(exponents: jax.Array, palette: jax.Array) -> jax.Array:
    """Places in a palette [..., ranks], or the number of its ranks."""
    codes = jnp.full(exponents.shape, palette.shape[-1], jnp.uint8)
    for rank in range(palette.shape[-1]):
        found = exponents == palette[..., rank, None]
        codes = jnp.where(found, jnp.asarray(rank, jnp.uint8), codes)
    return codes


def _looked_up(planes: list[jax.Array], palette: jax.Array) -> jax.Array:
    """Inverse of `_codes`; 0 for what is in no palette."""
    codes = sum(_lanes(plane) << bit for bit, plane in enumerate(planes))
    exponents = jnp.zeros_like(codes)
    for rank in range(palette.shape[-1]):
        exponents = jnp.where(codes == rank, palette[..., rank, None], exponents)
    return exponents


def _planes(codes: jax.Array, bits: int) -> list[jax.Array]:
    """One bit of every code, 32 to a word, for each of its bits."""
    codes = codes.reshape(*codes.shape[:-1], -1, WORD)
    lanes = _like(jnp.arange(WORD, dtype=jnp.uint32), codes.ndim)
    return [
        jnp.sum((codes >> bit & 1).astype(jnp.uint32) << lanes, axis=-1, dtype=jnp.uint32)
        for bit in range(bits)
    ]


def _lanes(plane: jax.Array) -> jax.Array:
    """A 0 or 1 for each bit of a plane's words."""
    lanes = _like(jnp.arange(WORD, dtype=jnp.uint32), plane.ndim + 1)
    bits = (plane[..., None] >> lanes & 1).astype(jnp.uint8)
    return bits.reshape(*plane.shape[:-1], -1)


def _planes_of(data: jax.Array, bits: int) -> list[jax.Array]:
    """Planes from their bytes."""
    data = data.reshape(*data.shape[:-1], bits, -1, 4)
    words = jax.lax.bitcast_convert_type(data, jnp.uint32)
    return [words[..., bit, :] for bit in range(bits)]


def _all_set(planes: list[jax.Array]) -> jax.Array:
    """Which values have the last code, whose bits are all set."""
    return functools.reduce(jnp.bitwise_and, planes)


# Escapes.


def _positions(mask_U: jax.Array, room: int) -> tuple[jax.Array, jax.Array]:
    """Where the first `room` set bits are, and how many there are: [..., room], [...].

    Places that are not taken point behind the values, each to another.
    """
    count_U = jax.lax.population_count(mask_U).astype(jnp.int32)
    end_U = jnp.cumsum(count_U, axis=-1)
    slot_X = jnp.arange(room, dtype=jnp.int32)
    flat = end_U.reshape(-1, end_U.shape[-1])
    unit_X = jax.vmap(lambda ends: jnp.searchsorted(ends, slot_X, side="right"))(flat)
    unit_X = jnp.minimum(unit_X.reshape(*end_U.shape[:-1], room), end_U.shape[-1] - 1)
    first_X = jnp.take_along_axis(end_U - count_U, unit_X, axis=-1)
    slots = _like(slot_X, end_U.ndim)
    lane_X = _nth_bit(jnp.take_along_axis(mask_U, unit_X, axis=-1), slots - first_X)
    total = end_U[..., -1]
    position_X = jnp.where(
        slots < total[..., None], unit_X * WORD + lane_X, WORD * mask_U.shape[-1] + slots
    )
    return position_X, total


def _nth_bit(word: jax.Array, n: jax.Array) -> jax.Array:
    """Index of the set bit that has n set bits below it."""
    index = jnp.zeros_like(n)
    for width in (16, 8, 4, 2, 1):
        low = word >> index.astype(jnp.uint32) & ((1 << width) - 1)
        below = jax.lax.population_count(low).astype(jnp.int32)
        above = n >= below
        n = jnp.where(above, n - below, n)
        index = jnp.where(above, index + width, index)
    return index


def _take(values_N: jax.Array, position_X: jax.Array) -> jax.Array:
    """Values at some positions, 0 for those behind the end."""
    return jnp.take_along_axis(values_N, position_X, axis=-1, mode="fill", fill_value=0)


def _put(values_N: jax.Array, position_X: jax.Array, new_X: jax.Array) -> jax.Array:
    """Values with those at some positions replaced; positions behind the end are dropped."""
    N, X = values_N.shape[-1], new_X.shape[-1]

    def one(values: jax.Array, position: jax.Array, new: jax.Array) -> jax.Array:
        return values.at[position].set(
            new, mode="drop", unique_indices=True, indices_are_sorted=True
        )

    flat = jax.vmap(one)(values_N.reshape(-1, N), position_X.reshape(-1, X), new_X.reshape(-1, X))
    return flat.reshape(values_N.shape)


# The same in NumPy, one message at a time and written another way.


def encode_kv_reference(words_TH: np.ndarray, used_tokens: int) -> tuple[np.ndarray, bool]:
    """A message and whether it is overfull, of words [T, H]."""
    T, H = words_TH.shape
    layout = Layout.of(T, H, words_TH.dtype.itemsize)
    count = min(T, max(1, SAMPLE // H))
    sample = words_TH[[i * used_tokens // count for i in range(count)]]
    counts = np.bincount(_high_reference(sample).ravel() >> 7 & 0xFF, minlength=256)
    palette = np.argsort(-counts, kind="stable")[:RANKS]

    words = np.zeros(layout.values, words_TH.dtype)
    words[: T * H] = words_TH.ravel()
    high = _high_reference(words)
    exponents = high >> 7 & 0xFF
    codes = _codes_reference(exponents, palette[:ESCAPE])
    codes[used_tokens * H :] = 0
    escapes = exponents[codes == ESCAPE]
    list_of_escapes = np.zeros(layout.escapes, np.uint8)
    kept = escapes[: layout.escapes]
    list_of_escapes[: len(kept)] = _codes_reference(kept, palette[ESCAPE:])
    rare = kept[list_of_escapes[: len(kept)] == RARE]
    list_of_rare = np.zeros(layout.rare, np.uint8)
    list_of_rare[: len(rare)] = rare[: layout.rare]
    sections = [
        np.array([*palette, *[0] * (HEAD_BYTES - RANKS)], np.uint8),
        *(np.packbits(codes >> bit & 1, bitorder="little") for bit in range(CODE_BITS)),
        *(np.packbits(list_of_escapes >> bit & 1, bitorder="little") for bit in range(ESCAPE_BITS)),
        list_of_rare,
        (high >> 8 & 0x80 | high & 0x7F).astype(np.uint8),
    ]
    if layout.low_bytes:
        sections.append((words & 0xFFFF).astype("<u2").view(np.uint8))
    overfull = len(escapes) > layout.escapes or len(rare) > layout.rare
    return np.concatenate(sections), overfull


def decode_kv_reference(message: np.ndarray, tokens: int, width: int, itemsize: int) -> np.ndarray:
    """Words [T, H] of a message that is not overfull."""
    layout = Layout.of(tokens, width, itemsize)
    palette, planes, escape_planes, rare, sign_mantissa, low = np.split(
        message, np.cumsum(layout.sections)[:-1]
    )
    codes = _codes_of_reference(escape_planes, ESCAPE_BITS)
    escapes = palette[ESCAPE + np.minimum(codes, RARE - 1)]
    escapes[codes == RARE] = rare[: np.count_nonzero(codes == RARE)]
    codes = _codes_of_reference(planes, CODE_BITS)
    exponents = palette[codes].astype(np.uint32)
    exponents[codes == ESCAPE] = escapes[: np.count_nonzero(codes == ESCAPE)]
    own = sign_mantissa.astype(np.uint32)
    words = (own & 0x80) << 8 | exponents << 7 | own & 0x7F
    if itemsize == 4:
        words = words << 16 | low.view("<u2")
    dtype = np.uint16 if itemsize == 2 else np.uint32
    return words[: tokens * width].astype(dtype).reshape(tokens, width)


def _high_reference(words: np.ndarray) -> np.ndarray:
    return words if words.dtype == np.uint16 else words >> 16


def _codes_reference(exponents: np.ndarray, palette: np.ndarray) -> np.ndarray:
    rank_of = np.full(256, len(palette))
    rank_of[palette] = range(len(palette))
    return rank_of[exponents]


def _codes_of_reference(planes: np.ndarray, bits: int) -> np.ndarray:
    planes = np.unpackbits(planes.reshape(bits, -1), axis=1, bitorder="little")
    return (planes.astype(int) << np.arange(bits)[:, None]).sum(axis=0)
