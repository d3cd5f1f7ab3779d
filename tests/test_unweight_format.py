"""The Unweight format by its oracle: nothing is lost, damage is found, sizes are as specified."""

import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from unweight_words import FORMS, SHAPES, forged, gaussian, nibble_words

from pallas_kernels import (
    Corrupt,
    TileOrder,
    UnweightHeader,
    UnweightOptions,
    canonical_codes,
    check_blob,
    code_lengths,
    decode_table,
    unweight_decode,
    unweight_encode,
)

HEADER = 64


def round_trip(words: np.ndarray, form: str, options: UnweightOptions | None = None) -> np.ndarray:
    blob = unweight_encode(words, form, options)
    decoded = unweight_decode(blob, words.shape)
    assert decoded.dtype == words.dtype
    assert decoded.shape == words.shape
    np.testing.assert_array_equal(decoded, words)
    assert blob.size <= HEADER + words.nbytes
    return blob


@pytest.mark.parametrize("form", FORMS)
def test_every_pattern_comes_back(form: str) -> None:
    patterns = np.arange(65536, dtype=np.uint16)
    round_trip(patterns, form)
    round_trip(patterns.reshape(256, 256), form)
    # Rows of one exponent each, so that rows are coded and verbatim side by side.
    round_trip(np.sort(patterns << 1 | patterns >> 15).reshape(512, 128), form)


@pytest.mark.parametrize("form", FORMS)
def test_every_length_comes_back(form: str) -> None:
    for length in range(258):
        round_trip(gaussian((length,)), form)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_shape_comes_back(form: str, shape: tuple[int, ...]) -> None:
    round_trip(gaussian(shape), form)
    round_trip(gaussian(shape, "F32"), form)
    if form in ("raw", "huffman"):
        round_trip(nibble_words(shape), form)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("word", [0x0000, 0x8000, 0x3F80, 0x7F80, 0xFFFF])
def test_constant_tensors(form: str, word: int) -> None:
    blob = round_trip(np.full((96, 128), word, np.uint16), form)
    header = UnweightHeader.parse(blob)
    assert header.form == form
    if form == "huffman":
        assert header.lengths == (1,)  # one symbol alone takes a bit
        assert blob.size == HEADER + 2 * 12 + 96 * 128 + 96 * 128 // 8


@pytest.mark.parametrize("form", FORMS)
def test_random_bits_do_not_grow(form: str) -> None:
    rng = np.random.default_rng(1)
    for dtype in (np.uint16, np.uint32):
        words = rng.integers(0, 1 << 8 * np.dtype(dtype).itemsize, (128, 128), dtype=dtype)
        blob = round_trip(words, form)
        assert UnweightHeader.parse(blob).form == "raw"
        assert blob.size == HEADER + words.nbytes


def test_rows_outside_the_palette_are_verbatim() -> None:
    words = gaussian((512, 512))
    usual = UnweightHeader.parse(unweight_encode(words))
    assert usual.verbatim_rows
    zero = usual.palette[0] << 7
    words[[3, 64, 127]] = zero
    usual = UnweightHeader.parse(unweight_encode(words))
    words[[3, 64, 127], [0, 63, 500]] = 0x7F80  # infinities
    for form in ("huffman", "palette"):
        header = UnweightHeader.parse(round_trip(words, form))
        assert header.verbatim_rows == usual.verbatim_rows + 3
        assert 255 not in header.palette
    assert UnweightHeader.parse(round_trip(words, "compact")).verbatim_rows == 0


@pytest.mark.parametrize(
    ("form", "bits"), [("huffman", 10.80), ("compact", 11.5), ("palette", 12.1)]
)
def test_bits_per_normal_weight(form: str, bits: float) -> None:
    words = gaussian((1024, 512))
    assert round_trip(words, form).size * 8 / words.size <= bits


def test_four_bit_values_and_float32_shrink() -> None:
    words = nibble_words((256, 64))
    assert round_trip(words, "huffman").size < 0.86 * words.nbytes
    words = gaussian((256, 256), "F32")
    assert round_trip(words, "huffman").size < 0.84 * words.nbytes


@pytest.mark.parametrize("form", FORMS)
def test_every_flipped_bit_is_found(form: str) -> None:
    words = gaussian((20, 64))
    blob = unweight_encode(words, form)
    assert UnweightHeader.parse(blob).form == form
    for bit in range(8 * blob.size):
        damaged = blob.copy()
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(Corrupt):
            check_blob(damaged)


@pytest.mark.parametrize("form", FORMS)
def test_every_truncation_is_found(form: str) -> None:
    words = gaussian((20, 64))
    blob = unweight_encode(words, form)
    for size in range(blob.size):
        with pytest.raises(Corrupt):
            unweight_decode(blob[:size].tobytes(), words.shape)
    with pytest.raises(Corrupt):
        unweight_decode(np.append(blob, np.uint8(0)), words.shape)


@pytest.mark.parametrize(
    ("field", "change", "message"),
    [
        ("magic", {"at0": b"GGUF"}, "magic"),
        ("version", {"at4": b"\2"}, "version: expected 1, got 2"),
        ("form", {"at5": b"\7"}, "form"),
        ("chunk rows", {"at6": b"\5"}, "rows of a chunk"),
        ("entries", {"at7": b"\21"}, "palette: expected at most 16"),
        ("count", {"at8": (10**15).to_bytes(8, "little")}, "shape"),
        ("palette twice", {"at16": b"\x10\x10"}, "palette: expected distinct"),
        ("code", {"at32": b"\x11"}, "code lengths"),
        ("verbatim rows", {"at40": b"\xff\xff"}, "verbatim rows|bytes"),
        ("dtype", {"at44": b"\5"}, "dtype"),
        ("row", {"at45": b"\3"}, "row size"),
        ("tile", {"at46": b"\5"}, "tile rows"),
        ("tiled", {"at47": b"\0"}, "tiled"),
        ("source hash", {"at48": b"12345678"}, "hash of the weights"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_forged_header_is_refused(field: str, change: dict[str, bytes], message: str) -> None:
    words = gaussian((64, 64))
    blob = forged(unweight_encode(words), **change)
    with pytest.raises(Corrupt, match=message):
        unweight_decode(blob, words.shape)


def test_another_shape_is_refused() -> None:
    blob = unweight_encode(gaussian((64, 128)))
    for shape in ((64, 64), (64, 128, 2), (8193,), (8192,)):
        with pytest.raises(Corrupt, match=r"shape|tiled"):
            unweight_decode(blob, shape)
    # The same order of weights is the same matrix.
    assert unweight_decode(blob, (2, 32, 128)).shape == (2, 32, 128)


def test_what_the_format_does_not_have() -> None:
    with pytest.raises(ValueError, match="expected uint16"):
        unweight_encode(np.zeros(4, np.float32))
    with pytest.raises(ValueError, match="form: expected one of"):
        unweight_encode(np.zeros(4, np.uint16), "zip")
    with pytest.raises(ValueError, match="4-bit values have raw and huffman"):
        unweight_encode(np.zeros(4, np.int32), "compact")
    with pytest.raises(ValueError, match=r"UnweightOptions\.row"):
        UnweightOptions(row=4096)


@pytest.mark.parametrize(
    "options",
    [
        UnweightOptions(row=16),
        UnweightOptions(row=128),
        UnweightOptions(palette=4),
        UnweightOptions(chunk_rows=1),
        UnweightOptions(chunk_rows=64),
        UnweightOptions(max_code_bits=5),
        UnweightOptions(max_code_bits=15),
    ],
    ids=repr,
)
def test_options_of_an_ablation(options: UnweightOptions) -> None:
    for form in ("huffman", "palette", "compact"):
        round_trip(gaussian((130, 256)), form, options)
        round_trip(gaussian((777,)), form, options)


def test_tile_order_keeps_parts_whole() -> None:
    F, D = 150, 256
    order = TileOrder.of((F, D))
    rows = order.to_rows(np.arange(F * D)).reshape(-1, 64)
    np.testing.assert_array_equal(order.from_rows(rows), np.arange(F * D))
    assert (order.tiles, order.rows, order.chunks) == (12, 600, 4 * (4 + 4 + 2))
    assert order.parts(16).tolist() == [16] * 32 + [16, 6] * 4
    # The second tile of the second band is rows 64 to 127, columns 64 to 127.
    tile = rows[64 * 5 : 64 * 6]
    np.testing.assert_array_equal(tile, np.arange(F * D).reshape(F, D)[64:128, 64:128])


def test_byte_order_is_explicit() -> None:
    words = gaussian((64, 64))
    for other in (words.astype(">u2"), words.astype("<u2")):
        np.testing.assert_array_equal(unweight_encode(other), unweight_encode(words))
    transposed = np.asfortranarray(words)
    np.testing.assert_array_equal(unweight_encode(transposed), unweight_encode(words))


def test_the_example_of_the_specification() -> None:
    page = (Path(__file__).parent.parent / "docs" / "unweight.md").read_text(encoding="utf-8")
    [block] = re.findall(r"^```unweight\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    lines = [line.split() for line in block.splitlines()]
    assert [int(line[0], 16) for line in lines] == list(range(0, 16 * len(lines), 16))
    expected = bytes(int(byte, 16) for line in lines for byte in line[1:])
    j = np.arange(64)
    exponents = np.stack([np.array([127, 127, 126, 128])[j % 4], 100 + j])
    words = (j % 2 << 15 | exponents << 7 | j).astype(np.uint16)
    assert unweight_encode(words).tobytes() == expected
    np.testing.assert_array_equal(unweight_decode(expected, (2, 64)), words)


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=16), st.integers(4, 15))
def test_codes_are_prefix_free_and_short(counts: list[int], max_bits: int) -> None:
    lengths = code_lengths(counts, max_bits)
    used = [n for n in lengths if n]
    assert [n > 0 for n in lengths] == [count > 0 for count in counts]
    assert all(n <= max_bits for n in used)
    if len(used) > 1:
        assert sum(2.0**-n for n in used) == 1.0
        entropy = sum(c * np.log2(sum(counts) / c) for c in counts if c)
        cost = sum(c * n for c, n in zip(counts, lengths, strict=True))
        assert cost >= entropy - 1e-6 * cost
        if max_bits == 15:  # unlimited for 16 symbols: less than a bit over the entropy
            assert cost <= entropy + sum(counts)
    symbol, length = decode_table(lengths, max_bits)
    for s, (code, n) in enumerate(zip(canonical_codes(lengths), lengths, strict=True)):
        if n:
            assert code < 1 << n
            assert (symbol[code], length[code]) == (s, n)


def test_limited_codes_are_optimal() -> None:
    """Against every code that the limit allows."""
    counts = [1, 1, 2, 4, 9, 30]
    limit = 3

    def best(left: int, room: float) -> float:
        if left == len(counts):
            return 0.0
        return min(
            (counts[left] * n + best(left + 1, room - 2.0**-n))
            for n in range(1, limit + 1)
            if room - 2.0**-n >= (len(counts) - left - 1) * 2.0**-limit
        )

    lengths = code_lengths(counts, limit)
    assert sum(c * n for c, n in zip(counts, lengths, strict=True)) == best(0, 1.0)


@given(
    hnp.arrays(
        np.uint16,
        hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=70),
        elements=st.integers(0, 65535),
        fill=st.sampled_from([0, 0x3C12, 0xBC55]),
    ),
    st.sampled_from(FORMS),
)
def test_anything_comes_back(words: np.ndarray, form: str) -> None:
    round_trip(words, form)
