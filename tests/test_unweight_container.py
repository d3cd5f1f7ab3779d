"""Compressed folders: read as if they were plain, given back byte for byte, damage named."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import xxhash
from compressing import INDEX, any_words, files_of, trained_like, write_shards
from editing import edit_json, stored_tensors
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from jinfire import Model
from jinfire.checkpoints import open_checkpoint
from jinfire.errors import CheckpointMismatch
from jinfire.unweight.compress import compress
from jinfire.unweight.container import SUFFIX, Coded, Raw, TensorFile
from jinfire.unweight.decompress import decompress
from jinfire.unweight.describe import describe_compressed
from jinfire.unweight.files import read_header
from jinfire.unweight.verify import verify_compressed

TIED = "llama32_tied_sharded_bf16"
INT4 = "kimi_k25_int4_sharded"
FUSED = "llama4_step2_bf16"
GOLDEN = (TIED, INT4, FUSED, "llama31_f32", "kimi_k2_int4", "mixtral_bf16", "qwen3_moe_f32")
SINGLE = "model.safetensors"
ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def compressed(golden, tmp_path_factory):
    """`compressed(case, form)`: a golden checkpoint, compressed once."""
    made: dict[tuple[str, str], Path] = {}

    def folder(case: str, form: str = "huffman") -> Path:
        if (case, form) not in made:
            made[case, form] = tmp_path_factory.mktemp(f"{case}_{form}")
            compress(golden(case), made[case, form], form, jobs=1)
        return made[case, form]

    return folder


@pytest.fixture
def damaged(compressed, tmp_path):
    """A copy of a compressed golden checkpoint, to be damaged."""

    def copied(case: str, form: str = "huffman") -> Path:
        return Path(shutil.copytree(compressed(case, form), tmp_path / case))

    return copied


# --- the same to every reader


@pytest.mark.parametrize("case", GOLDEN)
def test_everything_reads_as_from_the_plain_folder(golden, compressed, case):
    plain, coded = open_checkpoint(golden(case)), open_checkpoint(compressed(case))
    assert coded.config == plain.config
    assert coded.names() == plain.names()
    for name in plain.names():
        assert coded.shape(name) == plain.shape(name)
        whole = plain.read(name, ())
        read = coded.read(name, ())
        assert read.dtype == whole.dtype
        assert read.tobytes() == whole.tobytes()
        # Borders that are none of a tile; words of int4 are cut in groups of four.
        cut = tuple(slice(size // 8 * 4, size - size // 12 * 4) for size in whole.shape)
        assert coded.read(name, cut).tobytes() == plain.read(name, cut).tobytes()
    files = [TensorFile(path) for path in sorted(compressed(case).glob("*.safetensors"))]
    entries = [file.entry(name) for file in files for name in file.names]
    assert any(isinstance(entry, Coded) for entry in entries)
    assert any(isinstance(entry, Raw) for entry in entries)
    coded.close()


@pytest.mark.parametrize("case", [TIED, INT4])
def test_logits_are_identical(golden, compressed, case):
    with np.load(golden(case) / "golden.npz") as arrays:
        input_ids = arrays["input_ids"]
    plain, coded = (
        Model.from_pretrained(path, dtype="float32").logits(input_ids)
        for path in (golden(case), compressed(case))
    )
    assert coded.tobytes() == plain.tobytes()


@pytest.mark.parametrize("form", ["huffman", "palette", "compact"])
@pytest.mark.parametrize("case", [TIED, INT4, FUSED, "llama31_f32"])
def test_decompression_gives_every_file_back(golden, compressed, tmp_path, case, form):
    assert verify_compressed(compressed(case, form), golden(case)).damage == ()
    decompress(compressed(case, form), tmp_path / "again")
    assert files_of(tmp_path / "again") == files_of(golden(case))


def test_int4_words_and_their_scales_are_coded(compressed, tmp_path):
    rng = np.random.default_rng(0)
    nibbles = np.clip(np.round(rng.normal(8, 2.5, (256, 512, 8))), 0, 15).astype(np.uint32)
    words = (nibbles << (4 * np.arange(8, dtype=np.uint32))).sum(-1, dtype=np.uint32)
    tensors = {
        "experts.0.up_proj.weight_packed": words.view(np.int32),
        "experts.0.up_proj.weight_scale": trained_like((256, 128)),
        "experts.0.up_proj.weight_shape": np.array([256, 4096], np.int32),
    }
    save_file(tensors, tmp_path / SINGLE)
    compress(tmp_path / SINGLE, tmp_path / "coded", "palette")
    sizes = {size.name: size for size in describe_compressed(tmp_path / "coded").tensors}
    packed, scale, shape = (sizes[name] for name in tensors)
    assert (packed.form, scale.form, shape.form) == ("huffman", "palette", "raw")
    assert packed.weights == nibbles.size
    assert packed.entropy is not None
    assert packed.entropy < packed.bits_per_weight < packed.entropy + 0.1
    decompress(tmp_path / "coded", tmp_path / "again")
    assert files_of(tmp_path / "again") == {SINGLE: (tmp_path / SINGLE).read_bytes()}


def test_tied_head_is_compared(damaged):
    """The check of a config's claim, on a compressed folder: its head is another matrix."""
    folder = damaged(TIED)
    decompress(folder, folder.parent / "plain")
    plain = folder.parent / "plain"
    embed = stored_tensors(plain)["model.embed_tokens.weight"]
    save_file({"lm_head.weight": embed * embed.dtype.type(2)}, plain / "head.safetensors")
    edit_json(
        plain / INDEX,
        lambda index: index["weight_map"].update({"lm_head.weight": "head.safetensors"}),
    )
    compress(plain, folder.parent / "coded")
    with pytest.raises(CheckpointMismatch, match=r"lm_head\.weight differs from model\.embed"):
        open_checkpoint(folder.parent / "coded")


# --- files


def test_ordinary_safetensors(compressed):
    """Any reader of the format opens it; coded tensors are bytes under names of their own."""
    for path in sorted(compressed(TIED).glob("*.safetensors")):
        with safe_open(path, framework="numpy") as file:
            record = json.loads(file.metadata()["unweight"])
            assert file.metadata()["format"] == "pt"
            stored = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
        assert record["version"] == 1
        for name, entry in record["tensors"].items():
            if "form" in entry:
                assert stored.pop(name + SUFFIX) == "U8"
                assert entry["dtype"] == "BF16"
            else:
                assert stored.pop(name) == "BF16"
                assert len(entry["xxh3"]) == 16
        assert stored == {}


@pytest.mark.parametrize(
    "rewrite",
    [
        lambda content: json.dumps(content, indent=1),
        lambda content: json.dumps(dict(reversed(content.items()))),
        lambda content: json.dumps(
            {**content, "__metadata__": {"é": "\n", "a": '"', "format": ""}}
        ),
        lambda content: json.dumps({n: e for n, e in content.items() if n != "__metadata__"}),
        lambda content: json.dumps({"__metadata__": {}, **content, "empty": empty(content)}),
    ],
    ids=["indented", "reversed", "metadata", "none", "empty"],
)
def test_headers_of_other_writers_come_back(tmp_path, rewrite):
    """Byte for byte, whatever they look like."""
    source = tmp_path / SINGLE
    save_file({"b": trained_like((64, 128)), "a": trained_like((3,))}, source, {"format": "pt"})
    octets = source.read_bytes()
    size = int.from_bytes(octets[:8], "little")
    header = rewrite(json.loads(octets[8 : 8 + size])).encode()
    source.write_bytes(len(header).to_bytes(8, "little") + header + octets[8 + size :])
    compress(source, tmp_path / "coded")
    assert verify_compressed(tmp_path / "coded", source).damage == ()
    decompress(tmp_path / "coded", tmp_path / "again")
    assert (tmp_path / "again" / SINGLE).read_bytes() == source.read_bytes()


def empty(content: dict) -> dict:
    end = max(e["data_offsets"][1] for n, e in content.items() if n != "__metadata__")
    return {"dtype": "BF16", "shape": [0, 64], "data_offsets": [end, end]}


@pytest.mark.parametrize("indent", [None, 4])
def test_indexes_of_other_writers_come_back(tmp_path, indent):
    source = write_shards(tmp_path / "source", [{"b": trained_like((64, 64))}, {"a": any_words(9)}])
    content = json.loads((source / INDEX).read_text())
    del content["metadata"]
    (source / INDEX).write_text(json.dumps(content, indent=indent))
    compress(source, tmp_path / "coded")
    names = json.loads((tmp_path / "coded" / INDEX).read_text())["weight_map"]
    assert names.keys() == {"a", "b.unweight"}
    decompress(tmp_path / "coded", tmp_path / "again")
    assert files_of(tmp_path / "again") == files_of(source)


# --- what is coded


SHAPES = {
    "scalar": (),
    "one": (1,),
    "empty": (0, 64),
    "odd": (67, 129),
    "flat": (9001,),
    "stack": (3, 70, 128),
    "thin": (4096, 1),
}


@pytest.mark.parametrize("form", ["huffman", "palette", "compact"])
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32, np.float16, np.int64, np.bool_])
def test_any_shape_and_dtype_comes_back(tmp_path, form, dtype):
    tensors = {name: np.asarray(trained_like(shape, 1, dtype)) for name, shape in SHAPES.items()}
    source = tmp_path / SINGLE
    save_file(tensors, source)
    compress(source, tmp_path / "coded", form)
    file = TensorFile(tmp_path / "coded" / SINGLE)
    for name, tensor in tensors.items():
        assert file.shape(name) == tensor.shape
        with file.reading() as read:
            if tensor.size and tensor.shape:
                assert read(name, ()).tobytes() == tensor.tobytes()
                index = tuple(slice(size // 3, size - size // 5) for size in tensor.shape)
                assert read(name, index).tobytes() == tensor[index].tobytes()
    assert verify_compressed(tmp_path / "coded", source).damage == ()
    decompress(tmp_path / "coded", tmp_path / "again")
    assert (tmp_path / "again" / SINGLE).read_bytes() == source.read_bytes()
    description = describe_compressed(tmp_path / "coded")
    coded = {size.name for size in description.tensors if size.form != "raw"}
    if dtype in (ml_dtypes.bfloat16, np.float32):
        assert coded == {"odd", "flat", "stack", "thin"}
    else:
        assert coded == set()
        assert description.left_raw().keys() == {TensorFile(source).dtype("odd")}


@pytest.mark.parametrize("form", ["huffman", "palette", "compact"])
@pytest.mark.parametrize("case", ["even bits", "all verbatim", "zeros", "nan payloads"])
def test_no_tensor_grows(tmp_path, form, case):
    words = any_words(64 * 640).view(np.uint16)
    if case == "all verbatim":
        words = (words & 0x807F) | (np.arange(words.size, dtype=np.uint16) % 64 * 3) << 7
    elif case == "zeros":
        words[:] = 0
    elif case == "nan payloads":
        words |= 0x7F80
    tensors = {"weight": words.view(ml_dtypes.bfloat16).reshape(640, 64)}
    source = tmp_path / SINGLE
    save_file(tensors, source)
    compress(source, tmp_path / "coded", form)
    [size] = describe_compressed(tmp_path / "coded").tensors
    assert size.stored_bytes <= 1.01 * size.source_bytes + 64
    assert (size.form == "raw") == (case in ("even bits", "all verbatim"))
    decompress(tmp_path / "coded", tmp_path / "again")
    assert (tmp_path / "again" / SINGLE).read_bytes() == source.read_bytes()


@settings(max_examples=30)
@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 140), st.sampled_from([64, 128, 130])),
    data=st.data(),
)
def test_any_slice_is_that_slice(tmp_path_factory, shape, data):
    folder = tmp_path_factory.mktemp("slices")
    tensor = trained_like(shape)
    save_file({"weight": tensor}, folder / SINGLE)
    compress(folder / SINGLE, folder / "coded", jobs=1)
    with TensorFile(folder / "coded" / SINGLE).reading() as read:
        for _ in range(3):
            index = tuple(data.draw(slices(size)) for size in shape)
            assert read("weight", index).tobytes() == tensor[index].tobytes()
    shutil.rmtree(folder)


def slices(size: int) -> st.SearchStrategy[slice]:
    """Runs of an axis that are not empty."""
    ends = st.tuples(st.integers(0, size - 1), st.integers(0, size - 1))
    return ends.map(lambda pair: slice(min(pair), max(pair) + 1))


def test_shares_of_a_known_tensor(tmp_path):
    """Two exponents, each as often: one bit. One row in four has another 16 of them."""
    words = np.full((256, 64), 0x3F80, np.uint16)
    words[:, ::2] = 0x4000
    words[::4, :18] = (np.arange(18, dtype=np.uint16) + 90) << 7
    save_file({"weight": words.view(ml_dtypes.bfloat16)}, tmp_path / SINGLE)
    compress(tmp_path / SINGLE, tmp_path / "coded")
    [size] = describe_compressed(tmp_path / "coded").tensors
    assert size.verbatim_share == 0.25
    share = np.unique(words >> 7, return_counts=True)[1] / words.size
    assert size.entropy == pytest.approx(-(share * np.log2(share)).sum(), abs=1e-4)
    header = read_header(tmp_path / "coded" / SINGLE)
    assert size.stored_bytes == header.tensors["weight.unweight"].num_bytes
    assert size.bits_per_weight == 8 * size.stored_bytes / words.size


# --- damage


@pytest.mark.parametrize("form", ["huffman", "palette", "compact"])
def test_a_flipped_bit_is_found_and_named(damaged, form):
    folder = damaged(TIED, form)
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


def test_a_flipped_bit_of_a_header_is_found(damaged):
    """It says nothing about tensors, or about others, or what the source was."""
    folder = damaged(TIED)
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


def test_truncation_names_what_is_lost(damaged):
    folder = damaged(TIED)
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


def test_exchanged_tensors_are_found(damaged, tmp_path):
    """Intact bytes, of another tensor of the same shape; only the whole file's hash tells."""
    folder = damaged(TIED)
    path = max(folder.glob("*.safetensors"))
    tensors = load_file(path)
    one, other = (f"model.layers.3.mlp.{part}_proj.weight{SUFFIX}" for part in ("gate", "up"))
    tensors[one], tensors[other] = tensors[other], tensors[one]
    with safe_open(path, framework="numpy") as file:
        save_file(tensors, path, file.metadata())
    assert [(d.file, d.tensor) for d in verify_compressed(folder).damage] == [(path.name, None)]


def test_shards_of_an_index_that_lack_a_tensor(damaged):
    folder = damaged(TIED)
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


def test_metadata_that_is_not_ours(damaged):
    folder = damaged(TIED)
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


def test_source_that_differs_is_named(golden, compressed, tmp_path):
    source = Path(shutil.copytree(golden(TIED), tmp_path / "source"))
    path = max(source.glob("*.safetensors"))
    tensors = load_file(path)
    name = "model.layers.3.mlp.gate_proj.weight"
    tensors[name] = tensors[name].copy()
    tensors[name].view(np.uint16)[0, 0] ^= 1
    tensors["more"] = tensors[name]
    save_file(tensors, path)
    found = {(d.tensor, d.problem) for d in verify_compressed(compressed(TIED), source).damage}
    assert found == {
        (name, "differs from the source from byte 0"),
        ("more", "missing, the source has it"),
    }


# --- memory

MEASURE = """
import sys
from jinfire.unweight.compress import compress
from jinfire.unweight.decompress import decompress


def status(key):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


small, large, folder, form = sys.argv[1:]
for name, path in ("small", small), ("large", large):
    coded, again, peaks = f"{folder}/coded_{name}", f"{folder}/again_{name}", []
    for work in (lambda: compress(path, coded, form, jobs=2), lambda: decompress(coded, again)):
        before = status("VmRSS")
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
        work()
        peaks.append(status("VmHWM") - before)
print(*peaks)
"""


@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(),
    reason="the peak of a process's memory can be reset and read on Linux only (/proc)",
)
@pytest.mark.parametrize("form", ["huffman", "compact"])
def test_peak_memory_is_three_times_the_largest_tensor(tmp_path, form):
    """Of a file with several of them. What is loaded for the first file is not the tensors'."""
    large = {f"layer.{n}.weight": np.tile(trained_like((1024, 4096), n), (8, 1)) for n in range(2)}
    small = {"weight": trained_like((256, 256))}
    for name, tensors in (("small", small), ("large", large)):
        save_file(tensors, tmp_path / f"{name}.safetensors")
    paths = [str(tmp_path / f"{name}.safetensors") for name in ("small", "large")]
    command = [sys.executable, "-c", MEASURE, *paths, str(tmp_path), form]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    for path in tmp_path.glob("*large*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert done.returncode == 0, done.stderr
    largest = max(tensor.nbytes for tensor in large.values())
    peaks = [int(peak) / largest for peak in done.stdout.split()]
    assert len(peaks) == 2
    assert max(peaks) <= 3
