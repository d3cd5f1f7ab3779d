"""Compressed folders that are not as they were written: found, and the tensors named."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import xxhash
from compressing import INDEX
from editing import edit_json
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from jinfire.checkpoints import open_checkpoint
from jinfire.errors import CheckpointMismatch
from jinfire.unweight.compress import compress
from jinfire.unweight.container import SUFFIX
from jinfire.unweight.decompress import decompress
from jinfire.unweight.files import read_header
from jinfire.unweight.verify import verify_compressed

SHARDED = "llama32_tied_sharded_bf16"


@pytest.fixture
def coded(golden, tmp_path):
    """`coded(form)`: a compressed golden checkpoint, to be damaged."""

    def made(form: str = "huffman") -> Path:
        compress(golden(SHARDED), tmp_path / "coded", form, jobs=1)
        return tmp_path / "coded"

    return made


@pytest.mark.parametrize("form", ["huffman", "palette", "compact"])
def test_a_flipped_bit_is_found_and_named(coded, form):
    folder = coded(form)
    rng = np.random.default_rng(0)
    for path in sorted(folder.glob("*.safetensors")):
        octets = path.read_bytes()
        start = 8 + int.from_bytes(octets[:8], "little")
        tensors = read_header(path).tensors
        for place in rng.integers(start, len(octets), 8):
            [hit] = [
                name.removesuffix(SUFFIX)
                for name, stored in tensors.items()
                if stored.begin <= place - start < stored.end
            ]
            flipped = bytearray(octets)
            flipped[place] ^= 1 << rng.integers(8)
            path.write_bytes(flipped)
            result = verify_compressed(folder)
            assert [(d.file, d.tensor) for d in result.damage] == [(path.name, hit)]
            with pytest.raises(CheckpointMismatch, match=hit.replace(".", r"\.") + ": the stored"):
                read_all(folder)
            with pytest.raises(CheckpointMismatch, match=hit):
                decompress(folder, folder.parent / "again")
            shutil.rmtree(folder.parent / "again")
        path.write_bytes(octets)
    assert verify_compressed(folder).damage == ()


def read_all(folder: Path) -> None:
    source = open_checkpoint(folder)
    for name in source.names():
        source.read(name, (slice(0, 1),))


def test_a_flipped_bit_of_a_header_is_found(coded):
    """It says nothing about tensors, or about others, or what the source was."""
    folder = coded()
    path = min(folder.glob("*.safetensors"))
    octets = path.read_bytes()
    rng = np.random.default_rng(1)
    end = 8 + int.from_bytes(octets[:8], "little")
    for place in rng.integers(0, end, 60):
        flipped = bytearray(octets)
        flipped[place] ^= 1 << rng.integers(8)
        path.write_bytes(flipped)
        assert problems(folder) != []


def problems(folder: Path) -> list[object]:
    try:
        return list(verify_compressed(folder).damage)
    except CheckpointMismatch as error:
        return [error]


def test_truncation_names_what_is_lost(coded):
    folder = coded()
    path = max(folder.glob("*.safetensors"))
    octets = path.read_bytes()
    tensors = read_header(path).tensors
    last = list(tensors)[-1].removesuffix(SUFFIX)
    for lost in (1, tensors[list(tensors)[-1]].num_bytes // 2):
        path.write_bytes(octets[:-lost])
        assert [d.tensor for d in verify_compressed(folder).damage] == [last]
        with pytest.raises(CheckpointMismatch, match=f"truncated tensors: {last}"):
            open_checkpoint(folder)
    for kept in (0, 7, 8, 100):
        path.write_bytes(octets[:kept])
        assert [d.file for d in verify_compressed(folder).damage] == [path.name]
        with pytest.raises(CheckpointMismatch, match=path.name):
            open_checkpoint(folder)


def test_exchanged_tensors_are_found(coded):
    """Intact bytes, of another tensor of the same shape; only the whole file's hash tells."""
    folder = coded()
    path = max(folder.glob("*.safetensors"))
    tensors = load_file(path)
    one, other = (f"model.layers.3.mlp.{part}_proj.weight{SUFFIX}" for part in ("gate", "up"))
    tensors[one], tensors[other] = tensors[other], tensors[one]
    with safe_open(path, framework="numpy") as file:
        save_file(tensors, path, file.metadata())
    assert [(d.file, d.tensor) for d in verify_compressed(folder).damage] == [(path.name, None)]


def test_shards_of_an_index_that_lack_a_tensor(coded):
    folder = coded()
    edit_json(
        folder / INDEX,
        lambda index: index["weight_map"].update({"more": "model-00001-of-00003.safetensors"}),
    )
    assert [(d.tensor, d.problem) for d in verify_compressed(folder).damage] == [
        ("more", "missing, the index names it")
    ]
    with pytest.raises(CheckpointMismatch, match=r"the index is stale, this file lacks more"):
        open_checkpoint(folder)
    min(folder.glob("*.safetensors")).unlink()
    with pytest.raises(CheckpointMismatch, match="missing shards"):
        verify_compressed(folder)


def test_metadata_that_is_not_ours(coded):
    folder = coded()
    path = max(folder.glob("*.safetensors"))
    tensors = load_file(path)
    for text, message in (
        (None, "coded, but the file's metadata does not say how"),
        ("{}", "damaged"),
        ('{"version": 2}', "expected version 1, got 2"),
        ("[", "damaged"),
    ):
        metadata = {} if text is None else {"unweight": text, "unweight_xxh3": xxh3(text)}
        save_file(tensors, path, metadata)
        with pytest.raises(CheckpointMismatch, match=message):
            open_checkpoint(folder)
        assert [d.tensor for d in verify_compressed(folder).damage] == [None]


def xxh3(text: str) -> str:
    return xxhash.xxh3_64(text.encode()).hexdigest()


def test_source_that_differs_is_named(golden, coded, tmp_path):
    source = Path(shutil.copytree(golden(SHARDED), tmp_path / "source"))
    path = max(source.glob("*.safetensors"))
    tensors = load_file(path)
    name = "model.layers.3.mlp.gate_proj.weight"
    tensors[name] = tensors[name].copy()
    tensors[name].view(np.uint16)[0, 0] ^= 1
    tensors["more"] = tensors[name]
    save_file(tensors, path)
    found = {(d.tensor, d.problem) for d in verify_compressed(coded(), source).damage}
    assert found == {
        (name, "differs from the source from byte 0"),
        ("more", "missing, the source has it"),
    }
