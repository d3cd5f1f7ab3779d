"""Checkpoints of any known format behind one interface."""

from pathlib import Path

from jinfire.checkpoints.gguf import GGUFSource, read_metadata
from jinfire.checkpoints.hugging_face import HuggingFaceSource
from jinfire.checkpoints.hugging_face_writer import save_hugging_face, write_hugging_face
from jinfire.checkpoints.source import Index, TensorSource
from jinfire.checkpoints.store import CONFIG_NAME, Store, restore, save
from jinfire.errors import CheckpointMismatch
from jinfire.tokenizer import Tokenizer

__all__ = [
    "GGUFSource",
    "HuggingFaceSource",
    "Index",
    "Store",
    "TensorSource",
    "load_tokenizer",
    "open_checkpoint",
    "restore",
    "save",
    "save_hugging_face",
    "write_hugging_face",
]

GGUF_MAGIC = b"GGUF"


def open_checkpoint(path: str | Path) -> TensorSource:
    """A checkpoint: a Hugging Face folder, a GGUF file or a folder of `save`.

    Raises: CheckpointMismatch naming files or tensors; UnsupportedConfig naming the field;
    FileNotFoundError where there is nothing.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such checkpoint file or folder")
    if path.is_file():
        return GGUFSource(_gguf_file(path))
    if (path / CONFIG_NAME).exists():
        return Store(path)
    if (path / "config.json").exists():
        return HuggingFaceSource(path)
    return GGUFSource(_gguf_file(path))


def load_tokenizer(path: str | Path) -> Tokenizer | None:
    """The tokenizer of a checkpoint, None where it has none.

    Raises: UnsupportedConfig naming a kind of tokenizer that is not implemented;
    CheckpointMismatch for damaged files.
    """
    path = Path(path)
    if path.is_dir() and ((path / CONFIG_NAME).exists() or (path / "config.json").exists()):
        return Tokenizer.from_folder(path) if (path / "tokenizer.json").exists() else None
    metadata = read_metadata(_gguf_file(path))
    return Tokenizer.from_gguf(metadata) if "tokenizer.ggml.model" in metadata else None


def _gguf_file(path: Path) -> Path:
    """The file itself, or the only GGUF file of a folder."""
    if path.is_dir():
        found = sorted(path.glob("*.gguf"))
        if len(found) != 1:
            raise CheckpointMismatch(
                f"{path}: expected config.json, {CONFIG_NAME} or one GGUF file, found "
                f"{', '.join(p.name for p in found) or 'none of them'}"
            )
        return found[0]
    with path.open("rb") as file:
        if file.read(4) != GGUF_MAGIC:
            raise CheckpointMismatch(f"{path}: expected a GGUF file or a checkpoint folder")
    return path
