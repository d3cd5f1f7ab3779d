"""The fast codec: the oracle's bytes, parts of a tensor, threads, and blobs that lie."""

import itertools
import os
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numba.core import caching
from unweight_words import FORMS, SHAPES, forged, gaussian, nibble_words

from jinfire import open_checkpoint
from jinfire.fetch import cached
from jinfire.unweight import codec, kernels, tiles
from jinfire.unweight.device import device_form
from pallas_kernels import (
    Corrupt,
    TileOrder,
    UnweightHeader,
    UnweightOptions,
    decode_table,
    unweight_encode,
)

CODED = FORMS[1:]
MAKERS: dict[str, Callable[[tuple[int, ...]], np.ndarray]] = {
    "BF16": gaussian,
    "F32": lambda shape: gaussian(shape, "F32"),
    "I32": nibble_words,
}

kinds_and_forms = pytest.mark.parametrize(
    ("kind", "form"),
    [
        (kind, form)
        for kind in MAKERS
        for form in FORMS
        if kind != "I32" or form in ("raw", "huffman")  # 4-bit values have no other
    ],
)


@pytest.fixture
def many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads even for small tensors."""
    monkeypatch.setattr(tiles, "JOB_WEIGHTS", 1)


def same_bytes(words: np.ndarray, form: str, jobs: int = 1) -> np.ndarray:
    blob = codec.encode(words, form, jobs)
    np.testing.assert_array_equal(blob, unweight_encode(words, form))
    decoded = codec.decode(blob, words.shape, jobs)
    assert decoded.dtype == words.dtype
    assert decoded.flags.writeable
    np.testing.assert_array_equal(decoded, words)
    return blob


def with_odd_rows(words: np.ndarray) -> np.ndarray:
    """The words with an infinity in every seventh row."""
    words = words.copy()
    words.reshape(-1)[:: 7 * 64 + 1] = 0x7F80
    return words


@pytest.mark.parametrize("form", FORMS)
def test_every_pattern_as_the_oracle(form: str) -> None:
    patterns = np.arange(65536, dtype=np.uint16)
    same_bytes(patterns, form)
    same_bytes(np.sort(patterns << 1 | patterns >> 15).reshape(512, 128), form)


@kinds_and_forms
def test_every_shape_as_the_oracle(form: str, kind: str) -> None:
    for shape in SHAPES:
        same_bytes(MAKERS[kind](shape), form)
    if kind == "BF16":
        for length in range(258):
            same_bytes(gaussian((length,)), form)


@pytest.mark.parametrize("form", CODED)
@pytest.mark.parametrize("jobs", [1, 2, 5])
@pytest.mark.usefixtures("many_threads")
def test_threads_change_nothing(form: str, jobs: int) -> None:
    blob = same_bytes(with_odd_rows(gaussian((333, 192))), form, jobs)
    assert UnweightHeader.parse(blob).form == form
    same_bytes(with_odd_rows(gaussian((33, 1001))), form, jobs)


@kinds_and_forms
@pytest.mark.parametrize("shape", [(200, 256), (70, 520)], ids=str)
@pytest.mark.usefixtures("many_threads")
def test_parts_are_slices_of_the_whole(form: str, kind: str, shape: tuple[int, int]) -> None:
    words = MAKERS[kind](shape)
    if kind == "BF16":
        words = with_odd_rows(words)
    blob = unweight_encode(words, form)
    F, D = shape
    parts = [
        (slice(0, F), slice(0, D)),
        (slice(64, min(F, 128)), slice(64, 128)),
        (slice(0, F), slice(128, 192)),
        (slice(F - 3, F), slice(D - 5, D)),
        (slice(1, 66), slice(63, 130)),
        (slice(5, 5), slice(0, D)),
        (slice(7, 8), slice(9, 9)),
    ]
    for part in parts:
        for jobs in (1, 3):
            got = codec.decode_part(blob, shape, part, jobs)
            assert got.dtype == words.dtype
            np.testing.assert_array_equal(got, words[part])


def test_a_part_reads_no_other_tiles() -> None:
    words = gaussian((256, 256))
    blob = codec.encode(words)
    header = UnweightHeader.parse(blob)
    place = header.sections(header.order(words.shape), blob.size)["sign_mantissa"]
    # The sign and mantissa bytes of all but the first band.
    blob[place.start + 64 * 256 : place.stop] ^= 0xFF
    first = codec.decode_part(blob, (256, 256), (slice(0, 64), slice(0, 256)))
    np.testing.assert_array_equal(first, words[:64])
    with pytest.raises(Corrupt, match="hash"):
        codec.decode(blob, words.shape)


def test_a_part_lies_inside() -> None:
    blob = codec.encode(gaussian((64, 64)))
    for part in (
        (slice(0, 65), slice(0, 64)),
        (slice(-1, 3), slice(0, 64)),
        (slice(4, 2), slice(0)),
    ):
        with pytest.raises(ValueError, match="part: expected"):
            codec.decode_part(blob, (64, 64), part)


@pytest.mark.parametrize("form", CODED)
def test_files_have_the_sizes_of_this_version(form: str) -> None:
    words = gaussian((64, 128))
    for options in (UnweightOptions(row=32), UnweightOptions(chunk_rows=8)):
        blob = unweight_encode(words, form, options)
        with pytest.raises(Corrupt, match="in a file"):
            codec.decode(blob, words.shape)


def test_long_codes_are_refused() -> None:
    # Counts that grow by half and more give a code as long as there are symbols.
    counts = [64 * round(1.7**i) for i in range(16)]
    exponents = np.repeat(np.arange(100, 116, dtype=np.uint16), counts)
    words = (exponents << 7).reshape(-1, 64)
    blob = unweight_encode(words, "huffman", UnweightOptions(max_code_bits=15))
    assert max(UnweightHeader.parse(blob).lengths) > 12
    with pytest.raises(Corrupt, match="code lengths: expected at most 12"):
        codec.decode(blob, words.shape)
    assert max(UnweightHeader.parse(same_bytes(words, "huffman")).lengths) == 12


def test_without_a_folder_for_compiled_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caching.CacheImpl, "_locator_classes", [])
    triple = kernels.compiled(lambda x: 3 * x)
    assert triple(14) == 42


@pytest.mark.parametrize("form", FORMS)
def test_damage_is_found(form: str) -> None:
    words = gaussian((20, 64))
    blob = codec.encode(words, form)
    rng = np.random.default_rng(0)
    for bit in rng.integers(0, 8 * blob.size, 300):
        damaged = blob.copy()
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(Corrupt):
            codec.check(damaged)
        with pytest.raises(Corrupt):
            codec.decode(damaged, words.shape)
    for size in range(0, blob.size, 97):
        with pytest.raises(Corrupt):
            codec.decode(blob[:size].tobytes(), words.shape)


@pytest.mark.parametrize("form", CODED)
def test_a_lying_blob_stays_inside_its_arrays(form: str) -> None:
    """Random bytes with a hash that fits: refused, or decoded to something; never a crash.

    What is decoded is what the oracle decodes.
    """
    words = with_odd_rows(gaussian((150, 128)))
    blob = codec.encode(words, form)
    rng = np.random.default_rng(3)
    places = list(
        UnweightHeader.parse(blob).sections(TileOrder.of(words.shape), blob.size).values()
    )
    refused = 0
    for trial in range(200):
        damaged = blob.copy()
        place = places[trial % len(places)]
        at = rng.integers(place.start, place.stop, 1 + trial % 40)
        damaged[at] = rng.integers(0, 256, at.size)
        damaged = forged(damaged)
        try:
            got = codec.decode(damaged, words.shape)
        except Corrupt:
            refused += 1
            continue
        assert got.shape == words.shape
    assert refused


def test_a_lying_code_is_refused() -> None:
    words = gaussian((64, 64))
    blob = codec.encode(words)
    header = UnweightHeader.parse(blob)
    stream = header.sections(TileOrder.of(words.shape), blob.size)["stream"]
    for value in (0x00, 0xFF):
        damaged = blob.copy()
        damaged[stream] = value
        with pytest.raises(Corrupt, match="tile 0"):
            codec.decode(forged(damaged), words.shape)
    # No code at all, but rows that need one.
    with pytest.raises(Corrupt, match="code lengths: expected a code"):
        codec.decode(forged(blob, at32=bytes(8)), words.shape)
    # Chunks longer than any can be, and not as long as the stream.
    chunk = header.sections(TileOrder.of(words.shape), blob.size)["chunk_bytes"].start
    for index in (0, 1):
        with pytest.raises(Corrupt, match="chunks: expected"):
            codec.decode(forged(blob, **{f"at{chunk + index}": b"\xff"}), words.shape)


def test_escapes_that_do_not_fit_are_refused() -> None:
    words = with_odd_rows(gaussian((64, 64)))
    blob = codec.encode(words, "compact")
    sections = UnweightHeader.parse(blob).sections(TileOrder.of(words.shape), blob.size)
    for name in ("tile_first", "pair_first", "codes"):
        at = sections[name].start
        damaged = forged(blob, **{f"at{at}": bytes([blob[at] ^ 0xFF])})
        with pytest.raises(Corrupt, match="tile 0"):
            codec.decode(damaged, words.shape)


def test_blobs_of_any_buffer(tmp_path) -> None:
    words = gaussian((70, 64))
    blob = codec.encode(words)
    path = tmp_path / "blob"
    path.write_bytes(b"x" + blob.tobytes())
    mapped = np.memmap(path, np.uint8, "r")[1:]
    for other in (blob.tobytes(), memoryview(blob.tobytes()), bytearray(blob), mapped):
        np.testing.assert_array_equal(codec.decode(other, words.shape), words)
    for empty in (b"", np.empty(0, np.uint8)):
        with pytest.raises(Corrupt, match="header"):
            codec.decode(empty, words.shape)


def test_words_in_another_order_of_memory() -> None:
    words = gaussian((96, 128))
    expected = codec.encode(words)
    for other in (
        np.asfortranarray(words),
        np.repeat(words, 2, axis=1)[:, ::2],
        words.astype(">u2"),
    ):
        np.testing.assert_array_equal(codec.encode(other), expected)
    unaligned = np.frombuffer(b"x" + words.tobytes(), np.uint16, offset=1).reshape(words.shape)
    compiled = len(kernels.encode_huffman.signatures)
    np.testing.assert_array_equal(codec.encode(unaligned), expected)
    assert len(kernels.encode_huffman.signatures) == compiled == 1


def test_bits_per_trained_weight() -> None:
    """SmolLM2's MLPs, whose published 4-bit weights are cast to bfloat16."""
    path = cached("smollm2")
    if path is None:
        message = "SmolLM2 is not in the cache: run `jinfire fetch smollm2` (make test does)"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    source = open_checkpoint(path)
    num_bytes = dict.fromkeys(CODED, 0)
    num_weights = 0
    for layer, part in itertools.product((0, 13, 29), ("gate", "up", "down")):
        name = f"layers.{layer}.mlp.{part}.weight"
        weights = source.read(name, (slice(None), slice(None)))
        words = weights.astype(ml_dtypes.bfloat16).view(np.uint16)
        num_weights += words.size
        for form in CODED:
            blob = codec.encode(words, form)
            np.testing.assert_array_equal(codec.decode(blob, words.shape), words)
            num_bytes[form] += blob.size
    source.close()
    bits = {form: 8 * size / num_weights for form, size in num_bytes.items()}
    assert bits["huffman"] <= 10.80
    assert bits["compact"] <= 11.5
    assert bits["palette"] <= 12.1


def test_entropy() -> None:
    assert codec.exponent_entropy(np.empty(0, np.uint16)) == 0.0
    assert codec.exponent_entropy(np.full(1001, 0x3F80, np.uint16)) == 0.0
    assert codec.exponent_entropy(np.arange(65536, dtype=np.uint16)) == 8.0
    assert codec.exponent_entropy(np.array([0x76543210, 0xFEDCBA98], np.uint32).view(np.int32)) == 4
    words = gaussian((333, 77))
    share = np.unique(words >> 7 & 0xFF, return_counts=True)[1] / words.size
    expected = -(share * np.log2(share)).sum()
    assert codec.exponent_entropy(words) == pytest.approx(expected, abs=1e-12)
    wide = words.astype(np.uint32) << 16
    assert codec.exponent_entropy(wide) == pytest.approx(expected, abs=1e-12)


@settings(max_examples=60)
@given(
    hnp.arrays(
        np.uint16,
        hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=70),
        elements=st.integers(0, 65535),
        fill=st.sampled_from([0, 0x3C12, 0xBC55]),
    ),
    st.sampled_from(FORMS),
)
def test_anything_as_the_oracle(words: np.ndarray, form: str) -> None:
    same_bytes(words, form)


def test_compiled_kernels_are_those_of_the_source() -> None:
    source = (Path(kernels.__file__).parent / "vectors.py").read_bytes()
    assert xxhash.xxh3_64(source).hexdigest() == kernels.VECTORS


def from_device(matrix, words: np.ndarray) -> np.ndarray:
    """Words of a device form [F, D], by its arrays alone."""
    F, D = matrix.shape
    order = TileOrder.of((F, D))
    R = order.rows
    exponents = np.zeros((R, 64), np.uint8)
    if matrix.form == "huffman":
        symbol, length = decode_table(matrix.lengths.tolist(), 12)
        stream = matrix.stream.view(np.uint8)
        row = 0
        for c, rows in enumerate(order.parts(16)):
            bit = 8 * int(matrix.chunk_first[c])
            for i in range(rows):
                if matrix.coded[c] >> i & 1:
                    for j in range(64):
                        window = int.from_bytes(stream[bit // 8 : bit // 8 + 3].tobytes(), "little")
                        index = window >> bit % 8 & 0xFFF
                        exponents[row, j] = matrix.palette[symbol[index]]
                        bit += int(length[index])
                row += 1
    elif matrix.form == "palette":
        exponents[:, 0::2] = matrix.palette[matrix.codes & 15]
        exponents[:, 1::2] = matrix.palette[matrix.codes >> 4]
    else:
        planes = np.unpackbits(matrix.codes.view(np.uint8), axis=1, bitorder="little")
        planes = planes.reshape(R, 3, 64)
        codes = planes[:, 0] | planes[:, 1] << 1 | planes[:, 2] << 2
        exponents = matrix.palette[codes]
        escaped = codes == 7
        starts = np.concatenate([[0], np.cumsum(escaped.sum(1))])
        first = np.cumsum(order.parts(64)) - order.parts(64)
        np.testing.assert_array_equal(matrix.tile_first[:-1], starts[first])
        assert matrix.tile_first[-1] == starts[-1]
        pairs = np.cumsum(order.parts(2)) - order.parts(2)
        of_tile = np.repeat(starts[first], -(-order.parts(64) // 2))
        np.testing.assert_array_equal(matrix.pair_first, starts[pairs] - of_tile)
        exponents[escaped] = matrix.escapes[: starts[-1]]
    if matrix.form != "compact":
        rows = matrix.verbatim_row[matrix.verbatim_row < R]
        assert (np.diff(rows) > 0).all()
        exponents[rows] = matrix.verbatim[: rows.size]
        first = np.cumsum(order.parts(64)) - order.parts(64)
        before = [int((rows < r).sum()) for r in (*first, R)]
        np.testing.assert_array_equal(matrix.verbatim_first, before)
    wide = matrix.sign_mantissa.astype(np.uint16)
    joined = (wide & 0x80) << 8 | exponents.astype(np.uint16) << 7 | wide & 0x7F
    return order.from_rows(joined).reshape(F, D)


@pytest.mark.parametrize("form", CODED)
@pytest.mark.parametrize("shape", [(64, 64), (70, 128), (9, 192), (130, 64)], ids=str)
@pytest.mark.usefixtures("many_threads")
def test_device_form(form: str, shape: tuple[int, int]) -> None:
    random = np.random.default_rng(0).integers(0, 65536, shape).astype(np.uint16)
    for words in (gaussian(shape), with_odd_rows(gaussian(shape)), random):
        for jobs in (1, 3):
            matrix = device_form(words, form, jobs).check()
            np.testing.assert_array_equal(from_device(matrix, words), words)


@pytest.mark.parametrize("form", CODED)
def test_device_form_of_experts(form: str) -> None:
    words = np.stack([gaussian((70, 128), seed=e) for e in range(3)])
    words[1] = with_odd_rows(words[1])
    stack = device_form(words, form).check()
    assert stack.leading == (3,)
    for e in range(3):
        arrays = {name: array[e] for name, array in stack.arrays().items()}
        one = type(stack)(form, (70, 128), **arrays).check()
        np.testing.assert_array_equal(from_device(one, words[e]), words[e])


def test_device_form_of_other_arrays() -> None:
    with pytest.raises(ValueError, match="expected uint16"):
        device_form(np.zeros((64, 64), ml_dtypes.bfloat16), "palette")
    with pytest.raises(ValueError, match="multiple of 64"):
        device_form(np.zeros((64, 65), np.uint16), "palette")
    with pytest.raises(ValueError, match="form: expected one of"):
        device_form(np.zeros((64, 64), np.uint16), "raw")
