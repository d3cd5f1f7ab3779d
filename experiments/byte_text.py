"""Text as bytes: the sources of Python's standard library, and a tokenizer with a token a byte."""

import dataclasses
import functools
import hashlib
import pathlib
import sysconfig
from collections.abc import Sequence

import numpy as np
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

import jinfire as jf

EOS, BOS = 256, 257
VOCAB_SIZE = 258
SPECIAL = {EOS: "<eos>", BOS: "<bos>"}

# Of every so many files, one is kept from training.
HELD_OUT_EVERY = 20

# Folders of the standard library's that belong to others, or that some distributions leave out.
# fmt: off
OTHER_FOLDERS = frozenset(
    (
        "site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "idlelib",
        "tkinter", "turtledemo", "lib2to3", "ensurepip", "distutils",
    )
)
# fmt: on


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Files as streams of ids, each file ended by EOS. `sha256` is that of both streams.

    Shapes: `training` and `held_out` are uint16 vectors.
    """

    training: np.ndarray
    held_out: np.ndarray
    sha256: str


@functools.cache
def standard_library() -> Corpus:
    """The running Python's own sources, sorted by name; every 20th file is held out."""
    return corpus(pathlib.Path(sysconfig.get_path("stdlib")))


def corpus(folder: pathlib.Path) -> Corpus:
    """The Python sources below a folder, but for tests and what was installed beside them.

    Raises: ValueError where the folder holds too few files.
    """
    found = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*.py")}
    names = sorted(
        name
        for name, path in found.items()
        # Build settings of one machine.
        if not OTHER_FOLDERS & set(name.split("/")) and not path.name.startswith("_sysconfigdata")
    )
    if len(names) < HELD_OUT_EVERY:
        raise ValueError(f"{folder}: expected {HELD_OUT_EVERY} Python files, got {len(names)}")
    held_out = names[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
    training = sorted(set(names) - set(held_out))
    streams = [_stream([found[name] for name in part]) for part in (training, held_out)]
    digest = hashlib.sha256(b"".join(stream.astype("<u2").tobytes() for stream in streams))
    return Corpus(streams[0], streams[1], digest.hexdigest())


def _stream(paths: Sequence[pathlib.Path]) -> np.ndarray:
    parts = []
    for path in paths:
        parts.append(np.frombuffer(path.read_bytes(), np.uint8).astype(np.uint16))
        parts.append(np.array([EOS], np.uint16))
    return np.concatenate(parts)


def random_rows(stream: np.ndarray, num_rows: int, length: int, key: Sequence[int]) -> np.ndarray:
    """Runs of a stream from random places, each behind BOS: int32 [rows, length + 1].

    They depend on the stream and the key alone.
    """
    starts = np.random.default_rng(key).integers(0, stream.size - length + 1, num_rows)
    return _rows(stream, starts, length)


def even_rows(stream: np.ndarray, num_rows: int, length: int) -> np.ndarray:
    """Runs at even distances, as `random_rows`."""
    starts = np.linspace(0, stream.size - length, num_rows).astype(np.int64)
    return _rows(stream, starts, length)


def _rows(stream: np.ndarray, starts: np.ndarray, length: int) -> np.ndarray:
    rows = stream[starts[:, None] + np.arange(length)]
    return np.pad(rows, ((0, 0), (1, 0)), constant_values=BOS).astype(np.int32)


def byte_tokenizer() -> jf.Tokenizer:
    """A tokenizer whose id of a byte is the byte; prompts begin with BOS."""
    characters = byte_characters()
    vocab = {character: byte for byte, character in enumerate(characters)}
    vocab |= {text: token for token, text in SPECIAL.items()}
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL.values()])
    inner.post_processor = processors.TemplateProcessing(
        single=f"{SPECIAL[BOS]} $A", pair=None, special_tokens=[(SPECIAL[BOS], BOS)]
    )
    return jf.Tokenizer(inner, bos_id=BOS, eos_ids=frozenset({EOS}))


def byte_characters() -> list[str]:
    """The character that byte-level tokenizers write for each byte.

    Printable ones stand for themselves, the others for what follows U+0100 in order.
    Source: GPT-2 `encoder.py`.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]
