"""Readers of trained weights, and what the Unweight experiments count of them."""

import struct
from collections.abc import Sequence
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

import jinfire as jf
from experiments import unweight_exactness, unweight_ratio, weight_sets
from experiments.ctranslate2 import DTYPES, read_variables
from experiments.harness import Options

ROOT = Path(__file__).parent.parent


def text(value: str) -> bytes:
    return struct.pack("<H", len(value) + 1) + value.encode() + b"\0"


def variable(name: str, values: np.ndarray, **wrong: int) -> bytes:
    kind = wrong.get("kind", [dtype.name for dtype in DTYPES].index(values.dtype.name))
    size_bytes = wrong.get("size_bytes", values.nbytes)
    shape = b"".join(struct.pack("<I", size) for size in values.shape)
    return (
        text(name)
        + struct.pack("<B", wrong.get("rank", values.ndim))
        + shape
        + struct.pack("<BI", kind, size_bytes)
        + values.tobytes()
    )


def model_bin(variables: Sequence[bytes], version: int = 6, end: bytes = b"") -> bytes:
    head = struct.pack("<I", version) + text("WhisperSpec") + struct.pack("<II", 3, len(variables))
    aliases = struct.pack("<I", 1) + text("decoder/projection/weight") + text("a/weight")
    return head + b"".join(variables) + aliases + end


MATRIX = np.arange(12, dtype=np.float16).reshape(3, 4)


def read(tmp_path: Path, data: bytes) -> dict[str, np.ndarray]:
    path = tmp_path / "model.bin"
    path.write_bytes(data)
    return dict(read_variables(path))


def test_ctranslate2_variables_come_back(tmp_path: Path) -> None:
    arrays = {
        "a/weight": MATRIX,
        "b": np.array(7, np.int32),
        "c": np.linspace(-1, 1, 5, dtype=np.float32).astype(ml_dtypes.bfloat16),
        "empty": np.zeros((0, 3), np.int8),
    }
    found = read(tmp_path, model_bin([variable(*item) for item in arrays.items()]))
    assert list(found) == list(arrays)
    for name, values in arrays.items():
        assert found[name].dtype.name == values.dtype.name
        np.testing.assert_array_equal(found[name], values, strict=True)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (model_bin([variable("a", MATRIX)], version=5), "version 6, got 5"),
        (model_bin([variable("a", MATRIX, kind=6)]), "dtype below 6, got 6"),
        (model_bin([variable("a", MATRIX, rank=9)]), "at most 8 axes, got 9"),
        (model_bin([variable("a", MATRIX, size_bytes=22)]), r"float16 \[3, 4\], got 22 bytes"),
        (model_bin([variable("a", MATRIX)], end=b"x"), "1 bytes behind the end"),
        (b"", "empty"),
    ],
)
def test_ctranslate2_refuses(tmp_path: Path, data: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(tmp_path, data)


def test_ctranslate2_refuses_every_truncation(tmp_path: Path) -> None:
    whole = model_bin([variable("a", MATRIX)])
    for length in range(1, len(whole)):
        with pytest.raises(ValueError, match=r"model\.bin: expected"):
            read(tmp_path, whole[:length])


def test_ctranslate2_sizes_are_checked_before_anything_is_allocated(tmp_path: Path) -> None:
    """4 GiB x 4 GiB values in a file of a few bytes."""
    huge = text("a") + struct.pack("<BIIBI", 2, 2**32 - 1, 2**32 - 1, 0, 2**32 - 1)
    with pytest.raises(ValueError, match="got 4294967295 bytes"):
        read(tmp_path, model_bin([huge]))
    long = text("a") + struct.pack("<BIBI", 1, 2**32 - 1, 1, 2**32 - 1)
    with pytest.raises(ValueError, match="expected 4294967295 bytes of a"):
        read(tmp_path, model_bin([long]))


@pytest.mark.parametrize(
    ("name", "shape", "kind"),
    [
        ("encoder/layer_0/self_attention/linear_0/weight", (8, 8), "attention"),
        ("decoder/layer_1/attention/linear_2/weight", (8, 8), "attention"),
        ("decoder/layer_1/ffn/linear_1/weight", (8, 8), "mlp"),
        ("decoder/layer_1/ffn/linear_1/bias", (8,), "other"),
        ("decoder/embeddings/weight", (8, 8), "embedding"),
        ("decoder/position_encodings/encodings", (8, 8), "embedding"),
        ("encoder/conv1/weight", (8, 8, 3), "other"),
        ("encoder.layer.0.attention.output.dense.weight", (8, 8), "attention"),
        ("encoder.layer.0.attention.output.LayerNorm.weight", (8,), "other"),
        ("encoder.layer.0.intermediate.dense.weight", (8, 8), "mlp"),
        ("encoder.layer.0.output.dense.weight", (8, 8), "mlp"),
        ("embeddings.word_embeddings.weight", (8, 8), "embedding"),
        ("pooler.dense.weight", (8, 8), "other"),
        ("layers.0.attention.query.weight", (8, 8), "attention"),
        ("layers.0.mlp.down.weight", (8, 8), "mlp"),
        ("layers.0.mlp_norm.weight", (8,), "other"),
        ("model.layers.0.self_attn.q_proj.weight", (8, 8), "attention"),
        ("lm_head.weight", (8, 8), "embedding"),
        ("head.weight", (8, 8), "embedding"),
    ],
)
def test_kinds_of_tensors(name: str, shape: tuple[int, ...], kind: str) -> None:
    assert weight_sets.kind_of(name, shape) == kind


def test_words_are_the_nearest_bfloat16() -> None:
    values = np.array([1.0, 1 + 2**-9, 1 + 2**-7, -np.inf, 0.0], np.float32)
    words = weight_sets.bfloat16_words(values)
    assert words is not None
    assert words.tolist() == [0x3F80, 0x3F80, 0x3F81, 0xFF80, 0]
    half = weight_sets.bfloat16_words(values.astype(np.float16))
    assert half is not None
    assert half.tolist() == words.tolist()
    assert weight_sets.bfloat16_words(np.zeros(3, np.int8)) is None


def test_bfloat16_folder_holds_the_words(tmp_path: Path) -> None:
    weights, options = weight_sets.WEIGHT_SETS["golden_llama31"], Options(cache=tmp_path)
    folder = weight_sets.bfloat16_folder(weights, options)
    (path,) = folder.iterdir()
    assert path.name == "model.safetensors"
    words = weight_sets.words_of(weights, options)
    stored = load_file(path)
    assert stored.keys() == words.keys()
    assert sum(value.size for value in words.values()) > 100_000
    for name, values in stored.items():
        np.testing.assert_array_equal(values.view(np.uint16), words[name])
    before = path.stat().st_mtime_ns
    assert weight_sets.bfloat16_folder(weights, options) == folder
    assert path.stat().st_mtime_ns == before


def test_entropy_and_verbatim_rows() -> None:
    uniform = (np.arange(4096, dtype=np.uint16) % 16 + 100) << 7
    assert unweight_ratio.entropy_bits(uniform) == pytest.approx(4)
    assert unweight_ratio.entropy_bits(np.full(64, 0x8123, np.uint16)) == 0
    assert unweight_ratio.verbatim_rows(uniform) == 0
    rare = uniform.copy()
    rare[[5, 6, 700]] = 0x7F80  # two in one row of 64, one in another
    assert unweight_ratio.verbatim_rows(rare) == 2


def test_verbatim_rows_are_those_of_the_blobs() -> None:
    """The count of the experiment's own, and that in the header (docs/unweight.md, offset 40)."""
    words = weight_sets.words_of(weight_sets.WEIGHT_SETS["golden_llama31"], Options())
    counts = []
    for values in words.values():
        blob = jf.unweight_encode(values, "palette")
        if blob.size < 64 + values.nbytes:  # not in raw form
            counts.append(unweight_ratio.verbatim_rows(values))
            assert counts[-1] == struct.unpack_from("<I", blob.tobytes(), 40)[0]
    assert len(counts) > 10
    assert max(counts) > 0


def test_reordered_channels_are_the_same_function() -> None:
    """In float32 the sums agree closely, and not to the bit."""
    source = jf.open_checkpoint(ROOT / "tests" / "golden" / "llama31_f32")
    try:
        plain = jf.Model(source)
        other = jf.Model(unweight_exactness.Reordered(source))
        rounded = jf.Model(unweight_exactness.Rounded(source))
    finally:
        source.close()
    ids = np.arange(24, dtype=np.int32)[None] * 7 % 320
    expected, found = rounded.logits(ids), other.logits(ids)
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)
    assert not np.array_equal(found, expected)
    assert not np.array_equal(plain.logits(ids), expected)
