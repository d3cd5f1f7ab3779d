"""Compressed folders: read as if they were plain, given back byte for byte."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from compressing import INDEX, any_words, files_of, trained_like, write_shards
from editing import edit_json, edit_tensors
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


def change_dtype(tensors: dict) -> None:
    tensors[CHANGED] = tensors[CHANGED].astype(np.float32).astype(np.int32)


def change_shape(tensors: dict) -> None:
    tensors[CHANGED] = tensors[CHANGED][:, :32].copy()


CHANGED = "model.layers.3.mlp.gate_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop(CHANGED), "missing tensors"),
        (lambda tensors: tensors.update(more=tensors[CHANGED].copy()), "unexpected tensors: more"),
        (change_shape, "tensors of another shape"),
        (change_dtype, "expected dtypes"),
        (
            lambda tensors: tensors.update({"lm_head.weight": trained_like((384, 64), 5)}),
            r"lm_head\.weight differs from model\.embed",
        ),
    ],
    ids=["missing", "more", "shape", "dtype", "tied head"],
)
def test_a_compressed_folder_is_checked_as_a_plain_one(golden, tmp_path, change, message):
    """Word for word: what is refused there is refused here."""
    plain = Path(shutil.copytree(golden(TIED), tmp_path / "plain"))
    edit_tensors(max(plain.glob("*.safetensors")), change)
    stored = {p.name: load_file(p) for p in sorted(plain.glob("*.safetensors"))}
    weight_map = {name: shard for shard, tensors in stored.items() for name in tensors}
    edit_json(plain / INDEX, lambda index: index.update(weight_map=weight_map))
    compress(plain, tmp_path / "coded", jobs=1)
    said = []
    for folder in (plain, tmp_path / "coded"):
        with pytest.raises(CheckpointMismatch, match=message) as refusal:
            open_checkpoint(folder)
        said.append(str(refusal.value).replace(str(folder), "folder"))
    assert said[0] == said[1]


def test_constants_of_int4_are_checked_as_in_a_plain_folder(golden, tmp_path):
    plain = Path(shutil.copytree(golden(INT4), tmp_path / "plain"))
    name = "language_model.model.layers.3.mlp.experts.0.up_proj.weight_shape"

    def change(tensors: dict) -> None:
        tensors[name] = tensors[name] + 1

    edit_tensors(max(plain.glob("*.safetensors")), change)
    compress(plain, tmp_path / "coded", jobs=1)
    with pytest.raises(CheckpointMismatch, match=name.replace(".", r"\.") + ": expected"):
        open_checkpoint(tmp_path / "coded").read("layers.3.mlp.experts.up.packed", ())


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
    'é "\n': (70, 64),
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
        assert coded == {'é "\n', "odd", "flat", "stack", "thin"}
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
