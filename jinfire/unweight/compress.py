"""Compression of a Hugging Face folder: the same files, their large tensors coded."""

import dataclasses
from collections.abc import Sequence, Set
from pathlib import Path
from typing import Any

import xxhash
from tqdm import tqdm

from jinfire.checkpoints.source import listing, read_json
from jinfire.checkpoints.stored import stored_forms
from jinfire.errors import CheckpointMismatch
from jinfire.models import MODELS, parse_config
from jinfire.progress import bytes_bar
from jinfire.unweight import codec
from jinfire.unweight.container import (
    CODED_DTYPES,
    SUFFIX,
    BlockReader,
    Coded,
    Options,
    Raw,
    Record,
    TensorFile,
)
from jinfire.unweight.files import (
    Header,
    Stored,
    Writer,
    compact_json,
    file_blocks,
    head_bytes,
    header_entry,
    header_text,
    read_header,
    replaced,
)
from jinfire.unweight.folder import Written, compressed_index, convert, find_folder
from pallas_kernels import UnweightHeader

FORMS = ("huffman", "palette", "compact")
TENSORS = ("all", "mlp")
# A smaller tensor cannot save more than what says that it is coded.
LEAST_BYTES = 4096
# Bytes of header and metadata that a coded tensor takes beyond one that is stored as it is.
CODED_EXTRA_BYTES = 128
# Digits of an entropy that is kept.
ENTROPY_DIGITS = 4
# Least bits of a coded exponent with all that belongs to it, to tell what surely does not fit.
LEAST_EXPONENT_BITS = {"huffman": 2.0, "palette": 4.0, "compact": 3.0}


def compress(
    source: str | Path,
    target: str | Path,
    form: str = "huffman",
    tensors: str = "all",
    jobs: int | None = None,
    force: bool = False,
) -> Written:
    """Writes a Hugging Face folder, or a safetensors file, losslessly compressed to a folder.

    Each safetensors file becomes one of the same name, in which large tensors of bfloat16,
    float32 and packed 4-bit values are coded where that makes them smaller (`tensors` "all"), or
    those of MLPs and experts alone ("mlp"); other tensors are as they were, files beside them are
    copied. One tensor is in memory at a time, on which `jobs` threads work.

    A folder that an interrupted run left is gone on with: complete files that were made of the
    same source in the same way are kept.

    Raises: ValueError for a target that cannot be written to; CheckpointMismatch for damaged
    sources; UnsupportedConfig where MLPs are asked for and the model is not known.
    """
    if form not in FORMS:
        raise ValueError(f"form: expected one of {list(FORMS)}, got {form!r}")
    if tensors not in TENSORS:
        raise ValueError(f"tensors: expected one of {list(TENSORS)}, got {tensors!r}")
    if jobs is not None and jobs < 1:
        raise ValueError(f"jobs: expected an integer >= 1, got {jobs}")
    path = Path(source)
    folder = find_folder(path)
    names = mlp_tensors(folder.root) if tensors == "mlp" else None
    total_bytes = sum(shard.stat().st_size for shard in folder.shards)
    with bytes_bar(f"compress {path.name}", total_bytes) as bar:
        work = _Compression(Options(form, tensors), names, jobs, bar)
        return convert(folder, Path(target), work, force)


def mlp_tensors(folder: Path) -> set[str]:
    """Names of the matrices of all MLPs: dense ones, shared and routed experts; no routers.

    Raises: CheckpointMismatch without a config; UnsupportedConfig for a model that is not known.
    """
    content = read_json(folder / "config.json")
    generation = folder / "generation_config.json"
    config = parse_config(content, read_json(generation) if generation.exists() else None)
    forms = stored_forms(config, MODELS[content["model_type"]].tensor_names)
    return {
        native
        for name, form in forms.items()
        if ".mlp." in name and ".mlp.router." not in name
        for native, _ in form.natives()
    }


@dataclasses.dataclass(frozen=True)
class _Compression:
    """The `Conversion` of plain files to compressed ones."""

    options: Options
    names: Set[str] | None
    jobs: int | None
    bar: tqdm

    def difference(self, shard: Path, existing: Path) -> str | None:
        try:
            record = TensorFile(existing).record
        except CheckpointMismatch as error:
            return f"cannot be read ({error})"
        if record is None:
            return "is not compressed"
        if record.options != self.options:
            return f"was made with {_flags(record.options)}, expected {_flags(self.options)}"
        same = record.source_bytes == shard.stat().st_size
        if not same or record.source_xxh3_128 != self._file_hash(shard):
            return "was made from another file"
        return None

    def _file_hash(self, path: Path) -> str:
        digest = xxhash.xxh3_128()
        for block in file_blocks(path):
            digest.update(block)
            self.bar.update(len(block))
        return digest.hexdigest()

    def most_bytes(self, shard: Path) -> int:
        header = _source_header(shard)
        return sum(
            int(_least_share(stored, self.options.form) * stored.num_bytes)
            if self._is_chosen(name, stored)
            else stored.num_bytes
            for name, stored in header.tensors.items()
        )

    def write(self, shard: Path, target: Path) -> None:
        header = _source_header(shard)
        before = head_bytes(header.text)
        digest = xxhash.xxh3_128(before)
        self.bar.update(len(before))
        source_bytes = shard.stat().st_size
        own = header_text(header.metadata or None, header.tensors)
        kept_text = None if own == header.text else header.text
        record = Record(self.options, source_bytes, digest.hexdigest(), {}, kept_text)
        with BlockReader(shard) as reader, replaced(target) as file:
            writer = Writer(file, _header_room(header, record))
            entries: dict[str, Coded | Raw] = {}
            for name, stored in header.tensors.items():
                entries[name] = self._add(writer, name, stored, reader, digest)
                self.bar.update(stored.num_bytes)
            record = dataclasses.replace(
                record, source_xxh3_128=digest.hexdigest(), tensors=entries
            )
            writer.finish(record.to_metadata(header.metadata))

    def _add(
        self,
        writer: Writer,
        name: str,
        stored: Stored,
        reader: BlockReader,
        digest: xxhash.xxh3_128,
    ) -> Coded | Raw:
        """Writes one tensor in the smaller of two ways; nothing of it stays in memory."""
        data = reader.read(name)
        digest.update(data)
        if self._is_chosen(name, stored):
            words = data.view(CODED_DTYPES[stored.dtype][0]).reshape(stored.shape)
            # 4-bit values have no other form.
            form = "huffman" if stored.dtype == "I32" else self.options.form
            blob = codec.encode(words, form, self.jobs)
            if blob.nbytes + CODED_EXTRA_BYTES <= data.nbytes:
                writer.add(name + SUFFIX, "U8", blob.shape, blob)
                form = UnweightHeader.parse(blob).form
                del blob
                entropy = round(codec.exponent_entropy(words, self.jobs), ENTROPY_DIGITS)
                return Coded(stored.dtype, stored.shape, form, entropy)
        writer.add(name, stored.dtype, stored.shape, data)
        return Raw(xxhash.xxh3_64(data).hexdigest())

    def _is_chosen(self, name: str, stored: Stored) -> bool:
        return (
            stored.dtype in CODED_DTYPES
            and stored.num_bytes >= LEAST_BYTES
            and (self.names is None or name in self.names)
        )

    def index_text(self, text: str, written: Sequence[Path]) -> str:
        coded, stored_bytes = set(), 0
        for path in written:
            header = read_header(path)
            coded |= {name.removesuffix(SUFFIX) for name in header.tensors if name.endswith(SUFFIX)}
            stored_bytes += sum(stored.num_bytes for stored in header.tensors.values())
        return compressed_index(text, coded, stored_bytes)


def _source_header(shard: Path) -> Header:
    """The header of a source, once the library has found the file whole.

    Raises: CheckpointMismatch where it is not, is compressed already, or cannot be read.
    """
    file = TensorFile(shard)
    if file.record is not None:
        raise CheckpointMismatch(
            f"{shard}: expected plain tensors, this file is compressed already "
            "(`jinfire decompress` gives the source back)"
        )
    try:
        header = read_header(shard)
    except ValueError as error:
        raise CheckpointMismatch(f"{shard}: {error}") from error
    unreadable = [
        f"{name} ({stored.dtype})"
        for name, stored in header.tensors.items()
        if stored.dtype.startswith(("F8", "F6", "F4"))
    ]
    if unreadable:
        raise CheckpointMismatch(
            f"{shard}: tensors of 4 to 8 bit floats are not read: {listing(unreadable)}"
        )
    return header


def _flags(options: Options) -> str:
    return f"--form {options.form} --tensors {options.tensors}"


def _least_share(stored: Stored, form: str) -> float:
    if stored.dtype == "I32":
        return 0.0
    whole = CODED_DTYPES[stored.dtype][0].itemsize * 8
    return (whole - 8 + LEAST_EXPONENT_BITS[form]) / whole


def _header_room(header: Header, record: Record) -> int:
    """Most bytes of a compressed file's header: of each tensor the longer of both ways."""
    end = max((stored.end for stored in header.tensors.values()), default=0)
    room = len(header_text(record.to_metadata(header.metadata), {}).encode())
    for name, stored in header.tensors.items():
        most = dataclasses.replace(stored, begin=end, end=end)
        blob = Stored("U8", (stored.num_bytes,), end, end)
        shape, entropy = stored.shape, 10 - 10.0**-ENTROPY_DIGITS
        raw, coded = Raw("0" * 16), Coded(stored.dtype, shape, max(FORMS, key=len), entropy)
        room += max(
            _bytes_of({name: header_entry(most)}) + _escaped_bytes({name: raw}),
            _bytes_of({name + SUFFIX: header_entry(blob)}) + _escaped_bytes({name: coded}),
        )
    return room


def _bytes_of(content: Any) -> int:
    """Bytes of a member of an object, its comma for one of the braces."""
    return len(compact_json(content).encode()) - 1


def _escaped_bytes(entries: dict[str, Coded | Raw]) -> int:
    """The same in JSON that is a text within JSON."""
    text = Record(Options("", ""), 0, "", dict(entries)).to_json()
    empty = Record(Options("", ""), 0, "", {}).to_json()
    return len(compact_json(text).encode()) - len(compact_json(empty).encode()) + 1
