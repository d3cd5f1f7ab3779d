"""A GGUF file: config and tokenizer from its metadata, tensors dequantised to float32."""

import dataclasses
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, dequantize

from jinfire.checkpoints.source import Index, NameMap, check_tensors, listing, normalise, row_blocks
from jinfire.config import ModelConfig, RopeConfig
from jinfire.errors import CheckpointMismatch, UnsupportedConfig
from jinfire.models import MODELS, parse_config
from jinfire.models.spec import abstract_tree

ROPE_FACTORS = "rope_freqs.weight"

# Metadata of `<architecture>.`, by the field of a Hugging Face config that it fills.
CONFIG_KEYS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "head_dim",
    "rope.freq_base": "rope_theta",
}
REQUIRED_KEYS = set(CONFIG_KEYS) - {
    "attention.head_count_kv",  # as many as query heads
    "attention.key_length",  # width / heads
    "rope.freq_base",  # 10000
}
# Keys with the values that change nothing; the lengths are compared with the head dimension.
INERT_VALUES: dict[str, tuple[Any, ...]] = {
    "rope.scaling.type": ("none",),
    "attention.causal": (True,),
    "attention.sliding_window": (0,),
    "expert_count": (0,),
    "expert_used_count": (0,),
}
LENGTH_KEYS = ("attention.value_length", "rope.dimension_count")

# What the reader raises on bytes that are not a GGUF file.
READ_ERRORS = (ValueError, IndexError, KeyError, TypeError, OverflowError, MemoryError, OSError)


@dataclasses.dataclass(frozen=True)
class _Entry:
    """Where one tensor lies: shape as (out, in), quantised rows of `row_bytes`."""

    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset_bytes: int
    row_bytes: int


class _Reader(GGUFReader):
    """`GGUFReader` that refuses reads beyond the end and reads arrays at once.

    The library slices past the end without a word, which turns a hostile length into an endless
    loop, and makes three NumPy views per string of the vocabulary (2 s and 150 MB for SmolLM2).
    """

    def _get(
        self, offset: int, dtype: Any, count: int = 1, override_order: Any = None
    ) -> np.ndarray:
        if self.byte_order != "I":
            raise ValueError("the file has the other byte order")
        end = int(offset) + int(count) * np.dtype(dtype).itemsize
        if end > len(self.data):
            raise ValueError(f"the file ends at byte {len(self.data)}, byte {end} is needed")
        return super()._get(offset, dtype, count, override_order)

    def _get_field_parts(
        self, orig_offs: int, raw_type: int
    ) -> tuple[int, list[Any], list[int], list[GGUFValueType]]:
        if GGUFValueType(raw_type) != GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        item = GGUFValueType(self._get(orig_offs, np.uint32)[0])
        count = int(self._get(orig_offs + 4, np.uint64)[0])
        start = offset = int(orig_offs) + 12
        types = [GGUFValueType.ARRAY, item]
        if item in self.gguf_scalar_to_np:
            values = self._get(start, self.gguf_scalar_to_np[item], count)
            return 12 + values.nbytes, [values], [0], types
        if item != GGUFValueType.STRING:
            raise ValueError(f"arrays of {item.name} are not read")
        view = memoryview(self.data)
        strings: list[Any] = []
        for _ in range(count):
            if offset + 8 > len(view):
                raise ValueError("an array of strings is cut off")
            (length,) = struct.unpack_from("<Q", view, offset)
            text = view[offset + 8 : offset + 8 + length]
            if len(text) != length:
                raise ValueError("an array of strings is cut off")
            strings.append(text)
            offset += 8 + length
        return offset - int(orig_offs), strings, list(range(count)), types


class GGUFSource:
    """The tensors of a GGUF file, as float32.

    Raises: CheckpointMismatch for files that are no complete GGUF and for tensors that do not
    fit the model; UnsupportedConfig for models and tensor types that are not implemented.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._cached: tuple[str, np.ndarray] | None = None
        metadata, entries = _open(path)
        self.config = _config(metadata, entries, path)
        form = MODELS[self.config.family].gguf
        assert form is not None  # `_config` refuses the others
        self._is_permuted = form.has_paired_rope
        names = NameMap(form.tensor_names)
        self._entries: dict[str, _Entry] = {}
        unexpected = []
        for native, entry in entries.items():
            if logical := names.logical(native):
                self._entries[logical] = entry
            elif native != ROPE_FACTORS:
                unexpected.append(native)
        native = names.native
        expected = {native(name): spec.shape for name, spec in abstract_tree(self.config).items()}
        shapes = {native(name): entry.shape for name, entry in self._entries.items()}
        check_tensors(str(path), expected, shapes, unexpected, native("head.weight"))
        _check_types(path, self._entries, names)

    def names(self) -> set[str]:
        return set(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entries[name].shape

    def read(self, name: str, index: Index) -> np.ndarray:
        shape = self.shape(name)
        bounds = normalise(index, shape)
        if len(shape) == 1 or bounds[1] == slice(0, shape[1]):
            return self._dequantise(name, bounds[0])
        # Blocks run along rows, so parts of the columns cost whole rows: keep one tensor for the
        # other column slices that are about to be asked for.
        if self._cached is None or self._cached[0] != name:
            self._cached = None
            self._cached = (name, self._dequantise(name, slice(0, shape[0])))
        return self._cached[1][bounds].copy()

    def close(self) -> None:
        self._cached = None

    def _dequantise(self, name: str, rows: slice) -> np.ndarray:
        entry = self._entries[name]
        if len(entry.shape) == 1:
            return _load(self._path, entry, None).reshape(-1)[rows].copy()
        order = self._row_order(name)
        out = np.empty((rows.stop - rows.start, entry.shape[1]), np.float32)
        for block in row_blocks(rows, 4 * entry.shape[1]):
            chosen = block if order is None else order[block]
            out[block.start - rows.start : block.stop - rows.start] = _load(
                self._path, entry, chosen
            )
        return out

    def _row_order(self, name: str) -> np.ndarray | None:
        """Stored row of every row, None where they are the same."""
        heads = {"query": self.config.num_heads, "key": self.config.num_kv_heads}
        parts = name.split(".")
        if not self._is_permuted or parts[-1] != "weight" or parts[-2] not in heads:
            return None
        half = self.config.head_dim // 2
        stored = np.arange(self.shape(name)[0]).reshape(heads[parts[-2]], half, 2)
        return stored.swapaxes(1, 2).reshape(-1)


def read_metadata(path: Path) -> dict[str, Any]:
    """All metadata of a GGUF file, e.g. to build its tokenizer."""
    return _open(path)[0]


def _open(path: Path) -> tuple[dict[str, Any], dict[str, _Entry]]:
    """Metadata and tensor table; the reader, with its map of the whole file, is dropped."""
    try:
        reader = _Reader(path)
        metadata = {key: field.contents() for key, field in reader.fields.items()}
        entries = {}
        for tensor in reader.tensors:
            shape = tuple(int(n) for n in reversed(tensor.shape))
            entries[tensor.name] = _Entry(
                shape=shape,
                kind=tensor.tensor_type,
                offset_bytes=int(tensor.data_offset),
                row_bytes=int(tensor.n_bytes) // math.prod(shape[:-1]) if tensor.n_bytes else 0,
            )
    except READ_ERRORS as error:
        raise CheckpointMismatch(f"{path}: not a complete GGUF file ({error})") from error
    if metadata.get("split.count", 0) not in (0, 1):
        raise UnsupportedConfig(f"{path}: split.count: expected one file, got a split GGUF")
    return metadata, entries


def _load(path: Path, entry: _Entry, rows: slice | np.ndarray | None) -> np.ndarray:
    """Dequantised rows. The map lives for this call only: its pages count as memory."""
    count = math.prod(entry.shape[:-1])
    stored = np.memmap(
        path, np.uint8, "r", offset=entry.offset_bytes, shape=(count, entry.row_bytes)
    )
    raw = np.array(stored if rows is None else stored[rows])
    return dequantize(raw, entry.kind)


def _check_types(path: Path, entries: Mapping[str, _Entry], names: NameMap) -> None:
    unreadable = []
    for kind in sorted({entry.kind for entry in entries.values()}):
        sample = next(e for e in entries.values() if e.kind == kind)
        try:
            dequantize(np.zeros((1, sample.row_bytes), np.uint8), kind)
        except NotImplementedError:
            named = [names.native(n) for n, e in entries.items() if e.kind == kind]
            unreadable.append(f"{kind.name} ({listing(named)})")
    if unreadable:
        raise UnsupportedConfig(f"{path}: tensor types {', '.join(unreadable)} are not read")


def _config(metadata: Mapping[str, Any], entries: Mapping[str, _Entry], path: Path) -> ModelConfig:
    architecture = metadata.get("general.architecture")
    forms = {name: family.gguf for name, family in MODELS.items() if family.gguf is not None}
    if not isinstance(architecture, str) or architecture not in forms:
        raise UnsupportedConfig(
            f"{path}: general.architecture: expected one of {list(forms)}, got {architecture!r}"
        )
    prefix = f"{architecture}."
    own = {k.removeprefix(prefix): v for k, v in metadata.items() if k.startswith(prefix)}
    if missing := (REQUIRED_KEYS | forms[architecture].required_keys) - own.keys():
        raise UnsupportedConfig(f"{path}: missing {listing(prefix + key for key in missing)}")
    fields: dict[str, Any] = {"model_type": architecture}
    for key, value in own.items():
        if key in CONFIG_KEYS:
            fields[CONFIG_KEYS[key]] = _short(value)
        elif key in INERT_VALUES:
            if value not in INERT_VALUES[key]:
                raise UnsupportedConfig(
                    f"{prefix}{key}: expected {INERT_VALUES[key][0]!r}, got {value!r}"
                )
        elif key not in LENGTH_KEYS and key != "vocab_size":
            raise UnsupportedConfig(f"{prefix}{key}: unknown field with value {value!r}")

    embedding = entries.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointMismatch(f"{path}: missing tensors: token_embd.weight")
    fields["vocab_size"] = own.get("vocab_size", embedding.shape[0])
    fields["tie_word_embeddings"] = "output.weight" not in entries
    fields.setdefault("num_key_value_heads", fields["num_attention_heads"])
    ends = [metadata.get(f"tokenizer.ggml.{end}_token_id") for end in ("eos", "eot", "eom")]
    fields["eos_token_id"] = [token for token in ends if token is not None]
    fields["bos_token_id"] = metadata.get("tokenizer.ggml.bos_token_id")
    config = parse_config(fields)
    for key in LENGTH_KEYS:
        if own.get(key, config.head_dim) != config.head_dim:
            raise UnsupportedConfig(
                f"{prefix}{key}: expected the head dimension {config.head_dim}, got {own[key]!r}"
            )
    if ROPE_FACTORS in entries:
        config = dataclasses.replace(config, rope=_llama3_rope(path, config, entries))
    return config


def _short(value: Any) -> Any:
    """A float32 as the decimal its writer meant: 9.999999747378752e-06 is 1e-05."""
    if isinstance(value, float) and abs(value) < np.finfo(np.float32).max:
        return float(str(np.float32(value)))
    return value


def _llama3_rope(path: Path, config: ModelConfig, entries: Mapping[str, _Entry]) -> RopeConfig:
    """Llama 3 RoPE scaling, which GGUF stores as a tensor of divisors.

    The published Llama 3.1 and 3.2 models share all numbers but the factor, which is the largest
    divisor. Whatever these numbers do not reproduce is refused.
    Source: llama.cpp `convert_hf_to_gguf.py`, `generate_extra_tensors`.
    """
    entry, dim = entries[ROPE_FACTORS], config.head_dim
    if entry.shape != (dim // 2,) or entry.kind != GGMLQuantizationType.F32:
        raise CheckpointMismatch(
            f"{path}: {ROPE_FACTORS}: expected F32 of shape {(dim // 2,)}, got {entry.kind.name} "
            f"of shape {entry.shape}"
        )
    stored = _load(path, entry, None).reshape(-1)
    if not np.all(np.isfinite(stored) & (stored >= 1)):
        raise CheckpointMismatch(f"{path}: {ROPE_FACTORS}: expected finite divisors >= 1")
    rope = RopeConfig(config.rope.theta, "llama3", float(stored.max()), 1.0, 4.0, 8192)
    waves = 2 * math.pi * rope.theta ** (np.arange(0, dim, 2) / dim)
    smooth = (rope.original_max_position / waves - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    smooth = np.clip(smooth, 0, 1)
    divisors = 1 / ((1 - smooth) / rope.factor + smooth)
    if not np.allclose(stored, divisors, rtol=1e-4, atol=0):
        raise UnsupportedConfig(
            f"{path}: {ROPE_FACTORS}: RoPE divisors other than those of Llama 3.1 and 3.2"
        )
    return rope
