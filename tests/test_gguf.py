"""GGUF files, written tiny: dequantised, unpermuted, and refused by name where not understood."""

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from jinfire.checkpoints import load_tokenizer, open_checkpoint
from jinfire.checkpoints.source import NameMap
from jinfire.errors import CheckpointMismatch, UnsupportedConfig
from jinfire.models import MODELS
from jinfire.models.spec import abstract_tree

ALL = (slice(None),)
WIDTH, HEADS, KV_HEADS, HEAD_DIM, MLP, VOCAB = 64, 4, 2, 32, 96, 40
KINDS = {
    "F32": 0.0,
    "F16": 1e-3,
    "BF16": 1e-2,
    "Q8_0": 2e-2,
    "Q5_1": 0.1,
    "Q5_0": 0.2,
    "Q4_1": 0.3,
    "Q4_0": 0.3,
}


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's row order, as its converter writes it."""
    out, width = weight.shape
    return weight.reshape(heads, 2, out // heads // 2, width).swapaxes(1, 2).reshape(out, width)


def write_gguf(
    path: Path,
    *,
    architecture: str = "llama",
    kind: Kind = Kind.F32,
    tied: bool = True,
    metadata: dict | None = None,
    tensors: dict | None = None,
) -> dict[str, np.ndarray]:
    """A tiny GGUF; returns its tensors by logical name, before quantisation.

    `metadata` and `tensors` are added, or removed where None.
    """
    random = np.random.default_rng(0)
    shapes = {"token_embd": (VOCAB, WIDTH)}
    shapes |= {} if tied else {"output": (VOCAB, WIDTH)}
    per_layer = {
        "attn_q": (HEADS * HEAD_DIM, WIDTH),
        "attn_k": (KV_HEADS * HEAD_DIM, WIDTH),
        "attn_v": (KV_HEADS * HEAD_DIM, WIDTH),
        "attn_output": (WIDTH, HEADS * HEAD_DIM),
        "ffn_gate": (MLP, WIDTH),
        "ffn_up": (MLP, WIDTH),
        "ffn_down": (WIDTH, MLP),
        "attn_norm": (WIDTH,),
        "ffn_norm": (WIDTH,),
    }
    if architecture == "qwen3":
        per_layer |= {"attn_q_norm": (HEAD_DIM,), "attn_k_norm": (HEAD_DIM,)}
    shapes |= {f"blk.{i}.{name}": shape for i in range(2) for name, shape in per_layer.items()}
    shapes["output_norm"] = (WIDTH,)

    fields = {
        "block_count": 2,
        "context_length": 128,
        "embedding_length": WIDTH,
        "feed_forward_length": MLP,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.key_length": HEAD_DIM,
        "attention.value_length": HEAD_DIM,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 1e4,
        "vocab_size": VOCAB,
    }
    fields = {f"{architecture}.{key}": value for key, value in fields.items()}
    fields |= {"tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.eot_token_id": 3}
    fields |= metadata or {}

    writer = gguf.GGUFWriter(path, architecture)
    for key, value in fields.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
    originals = {}
    for name, shape in shapes.items():
        native = f"{name}.weight"
        value = random.standard_normal(shape, np.float32)
        originals[native] = value
        if architecture == "llama" and name.endswith(("attn_q", "attn_k")):
            value = permute(value, HEADS if name.endswith("q") else KV_HEADS)
        if tensors is not None and native in tensors:
            continue
        if len(shape) == 1 or kind == Kind.F32:
            writer.add_tensor(native, value)
        else:
            writer.add_tensor(native, gguf.quantize(value, kind), raw_dtype=kind)
    for native, value in (tensors or {}).items():
        if value is not None:
            writer.add_tensor(native, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return originals


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_gguf_is_dequantised_and_unpermuted(tmp_path, kind, architecture):
    path = tmp_path / "model.gguf"
    originals = write_gguf(path, kind=Kind[kind], architecture=architecture, tied=kind != "Q8_0")
    source = open_checkpoint(path)
    assert source.names() == abstract_tree(source.config).keys()
    form = MODELS[architecture].gguf
    assert form is not None
    names = NameMap(form.tensor_names)
    for name in source.names():
        expected = originals[names.native(name)]
        read = source.read(name, ALL)
        assert read.dtype == np.float32
        assert source.shape(name) == read.shape == expected.shape
        tolerance = 0 if read.ndim == 1 else KINDS[kind]
        np.testing.assert_allclose(read, expected, rtol=tolerance, atol=tolerance)
        if read.ndim == 2:
            for index in [
                (slice(8, 24),),
                (slice(None), slice(1, 33)),
                (slice(3, 5), slice(7, 9)),
                (slice(4, 4),),
            ]:
                np.testing.assert_array_equal(source.read(name, index), read[index])
    source.close()


def test_gguf_config(tmp_path):
    path = tmp_path / "model.gguf"
    write_gguf(path)
    config = open_checkpoint(tmp_path).config
    assert (config.width, config.num_heads, config.num_kv_heads) == (WIDTH, HEADS, KV_HEADS)
    assert (config.head_dim, config.mlp_width, config.vocab_size) == (HEAD_DIM, MLP, VOCAB)
    assert (config.norm_eps, config.rope.theta, config.max_position) == (1e-5, 1e4, 128)
    assert (config.tie_embeddings, config.eos_ids, config.bos_id) == (True, {2, 3}, None)
    assert load_tokenizer(path) is None


def llama3_divisors(factor: float, original: int = 8192) -> np.ndarray:
    waves = 2 * np.pi * 1e4 ** (np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    smooth = (original / waves - 1) / 3
    middle = 1 / ((1 - smooth) / factor + smooth)
    divisors = np.where(waves < original / 4, 1, np.where(waves > original, factor, middle))
    return divisors.astype(np.float32)


def test_gguf_llama3_rope_is_recognised(tmp_path):
    path = tmp_path / "model.gguf"
    write_gguf(path, tensors={"rope_freqs.weight": llama3_divisors(32)})
    rope = open_checkpoint(path).config.rope
    assert (rope.scaling, rope.factor, rope.original_max_position) == ("llama3", 32, 8192)
    for wrong in (llama3_divisors(32, original=4096), llama3_divisors(8)[::-1].copy()):
        write_gguf(path, tensors={"rope_freqs.weight": wrong})
        with pytest.raises(UnsupportedConfig, match=r"rope_freqs\.weight"):
            open_checkpoint(path)
    for wrong in (np.full(HEAD_DIM // 2, np.nan, np.float32), np.zeros(HEAD_DIM // 2, np.float32)):
        write_gguf(path, tensors={"rope_freqs.weight": wrong})
        with pytest.raises(CheckpointMismatch, match=r"rope_freqs\.weight"):
            open_checkpoint(path)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"llama.rope.scaling.type": "linear"}, "llama.rope.scaling.type"),
        ({"llama.rope.scaling.factor": 2.0}, "llama.rope.scaling.factor"),
        ({"llama.expert_count": 8}, "llama.expert_count"),
        ({"llama.attention.sliding_window": 64}, "llama.attention.sliding_window"),
        ({"llama.something_new": 1}, "llama.something_new"),
        ({"llama.rope.dimension_count": 16}, "llama.rope.dimension_count.*32, got 16"),
        ({"llama.attention.value_length": 16}, "llama.attention.value_length"),
        ({"llama.block_count": None}, "missing llama.block_count"),
        ({"llama.attention.head_count": 0}, "num_attention_heads"),
        ({"llama.attention.head_count": [4, 4]}, "num_attention_heads"),
        ({"llama.embedding_length": 2**30}, "hidden_size"),
        ({"split.count": 2}, "split.count"),
    ],
)
def test_gguf_of_other_models_is_refused_by_name(tmp_path, metadata, message):
    path = tmp_path / "model.gguf"
    write_gguf(path, metadata=metadata)
    with pytest.raises(UnsupportedConfig, match=message):
        open_checkpoint(path)


def test_gguf_architecture_is_refused_by_name(tmp_path):
    path = tmp_path / "model.gguf"
    write_gguf(path, architecture="gemma")
    with pytest.raises(UnsupportedConfig, match=r"general\.architecture.*'gemma'"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"blk.1.ffn_up.weight": None}, "missing tensors: blk.1.ffn_up.weight"),
        ({"token_embd.weight": None}, "missing tensors: token_embd.weight"),
        ({"blk.0.attn_q.bias": np.zeros(4, np.float32)}, "unexpected tensors: blk.0.attn_q.bias"),
        ({"blk.1.ffn_up.weight": np.zeros((4, 32), np.float32)}, r"\(96, 64\), got \(4, 32\)"),
    ],
)
def test_gguf_wrong_tensors_are_named(tmp_path, tensors, message):
    path = tmp_path / "model.gguf"
    write_gguf(path, tensors=tensors)
    with pytest.raises(CheckpointMismatch, match=message):
        open_checkpoint(path)


def test_gguf_integer_tensors_are_refused_by_name(tmp_path):
    path = tmp_path / "model.gguf"
    write_gguf(path, tensors={"output_norm.weight": np.zeros(WIDTH, np.int32)})
    with pytest.raises(UnsupportedConfig, match=r"I32 \(output_norm.weight\)"):
        open_checkpoint(path)


def test_truncated_gguf_is_refused_at_any_length(tmp_path):
    path = tmp_path / "model.gguf"
    write_gguf(path, metadata={"tokenizer.ggml.tokens": ["a", "bc"], "x.numbers": [1, 2, 3]})
    whole = path.read_bytes()
    ends = [*range(4, 1500, 37), len(whole) // 2, len(whole) - 1]
    for end in ends:
        path.write_bytes(whole[:end])
        with pytest.raises(CheckpointMismatch, match="not a complete GGUF file"):
            open_checkpoint(path)


def test_hostile_gguf_lengths_end_at_once(tmp_path):
    path = tmp_path / "model.gguf"
    head = b"GGUF" + struct.pack("<I", 3)
    key = struct.pack("<Q", 1) + b"k"
    array = struct.pack("<I", 9)
    huge = struct.pack("<Q", 2**60)
    for body in (
        struct.pack("<QQ", 2**60, 0),
        struct.pack("<QQ", 0, 2**60),
        struct.pack("<QQ", 0, 1) + key + array + struct.pack("<I", 4) + huge,
        struct.pack("<QQ", 0, 1) + key + array + struct.pack("<I", 8) + huge,
        struct.pack("<QQ", 0, 1) + key + array + struct.pack("<I", 9) + huge,
        struct.pack("<QQ", 0, 1) + key + struct.pack("<I", 8) + huge,
        struct.pack("<QQ", 0, 1) + key + struct.pack("<I", 99),
    ):
        path.write_bytes(head + body)
        with pytest.raises(CheckpointMismatch, match="not a complete GGUF file"):
            open_checkpoint(path)
    path.write_bytes(b"GGUF" + struct.pack(">I", 3) + struct.pack(">QQ", 0, 0))
    with pytest.raises(CheckpointMismatch, match="byte order"):
        open_checkpoint(path)
