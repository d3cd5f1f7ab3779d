"""`jinfire compress`, `decompress`, `verify` and `inspect`: results, refusals, interruptions."""

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from commands import GREEDY, SMALL, errors, last_json, make_chat_model, run
from compressing import INDEX, any_words, files_of, trained_like, write_shards
from safetensors.numpy import save_file

from jinfire.unweight.compress import mlp_tensors
from jinfire.unweight.container import TensorFile

ROOT = Path(__file__).parent.parent
SHARDED = "llama32_tied_sharded_bf16"
INT4 = "kimi_k25_int4_sharded"


@pytest.fixture
def source(golden) -> Path:
    return golden(SHARDED)


def stored_sizes(folder: Path) -> int:
    """Bytes of the files that hold tensors, and of the index."""
    paths = [*folder.glob("*.safetensors"), *folder.glob(INDEX)]
    return sum(path.stat().st_size for path in paths)


def partials(folder: Path) -> list[str]:
    return [path.name for path in folder.glob("*.partial")]


# --- what they do


@pytest.mark.parametrize("form", ["huffman", "palette", "compact"])
def test_there_and_back(source, tmp_path, capsys, form):
    coded, again = tmp_path / "coded", tmp_path / "again"
    assert run("compress", source, coded, "--form", form, "--jobs", 2, "--json") == 0
    document = last_json(capsys.readouterr().out)
    assert document["command"] == "compress"
    assert (document["form"], document["selection"], document["files"]) == (form, "all", 3)
    assert document["stored_bytes"] == stored_sizes(coded)
    assert document["source_bytes"] == stored_sizes(source)
    assert document["ratio"] == document["stored_bytes"] / document["source_bytes"] < 0.95
    assert document["weights"] == 205_376
    assert document["bits_per_weight"] == 8 * document["stored_bytes"] / 205_376
    assert document["kept"] == document["left_out"] == []
    assert document["elapsed_s"] > 0

    assert run("verify", coded, "--source", source, "--json") == 0
    document = last_json(capsys.readouterr().out)
    assert (document["intact"], document["tensors"], document["damage"]) == (True, 38, [])

    assert run("decompress", coded, again) == 0
    assert capsys.readouterr().out == f"{again}\n"
    assert files_of(again) == files_of(source)


def test_inspect_shows_what_is_saved(source, tmp_path, capsys):
    assert run("compress", source, tmp_path / "coded") == 0
    summary = capsys.readouterr().out
    assert run("inspect", "--model", tmp_path / "coded", "--json") == 0
    document = last_json(capsys.readouterr().out)
    assert run("inspect", "--model", source, "--json") == 0
    plain = last_json(capsys.readouterr().out)
    assert "unweight" not in plain
    assert document["config"] == plain["config"]
    unweight = document["unweight"]
    assert unweight["stored_bytes"] == stored_sizes(tmp_path / "coded")
    tensors = {tensor["name"]: tensor for tensor in unweight["tensors"]}
    assert len(tensors) == 38
    assert sum(tensor["weights"] for tensor in tensors.values()) == unweight["weights"]
    coded = [tensor for tensor in tensors.values() if tensor["form"] != "raw"]
    assert unweight["coded"]["tensors"] == len(coded)
    for tensor in coded:
        assert tensor["form"] == "huffman"
        assert 2 < tensor["entropy"] < 3
        assert 0 <= tensor["verbatim_share"] < 0.2
        assert tensor["entropy"] + 8 < tensor["bits_per_weight"] < 16
        assert tensor["bits_per_weight"] == 8 * tensor["stored_bytes"] / tensor["weights"]
    norm = tensors["model.norm.weight"]
    assert (norm["form"], norm["entropy"], norm["verbatim_share"]) == ("raw", None, None)
    assert (norm["bits_per_weight"], norm["shape"]) == (16, [64])

    assert run("inspect", "--model", tmp_path / "coded") == 0
    text = capsys.readouterr().out
    assert "model.layers.*.mlp.gate_proj.weight" in text
    assert [line for line in summary.splitlines() if line.startswith("  ")] == [
        line for line in text[text.index("Unweight\n") :].splitlines()[1:6] if line.strip()
    ]
    assert run("inspect", "--model", tmp_path / "coded", "--tensors") == 0
    assert "model.layers.3.mlp.gate_proj.weight" in capsys.readouterr().out


def test_a_file_alone(tmp_path, capsys):
    """No config, no model that is known: it is compressed, described, verified and given back."""
    tensors = {
        "encoder.weight": trained_like((256, 256)),
        "half": trained_like((256, 256), 1, np.float16),
        "wide": trained_like((256, 256), 2, np.float32),
    }
    save_file(tensors, tmp_path / "encoder.safetensors")
    assert run("compress", tmp_path / "encoder.safetensors", tmp_path / "coded") == 0
    out = capsys.readouterr().out
    assert "F16 as it was" in out
    assert "float16 has no coded form" in out
    for path in (tmp_path / "coded", tmp_path / "coded" / "encoder.safetensors"):
        assert run("inspect", "--model", path, "--json") == 0
        document = last_json(capsys.readouterr().out)
        forms = {t["name"]: t["form"] for t in document["unweight"]["tensors"]}
        assert forms == {"encoder.weight": "huffman", "half": "raw", "wide": "huffman"}
        raw = document["unweight"]["raw"]
        assert raw.keys() == {"F16"}
        assert raw["F16"]["stored_bytes"] == 2 * 256 * 256
        assert run("inspect", "--model", path) == 0
        assert "encoder.weight" in capsys.readouterr().out
        assert run("verify", path, "--source", tmp_path / "encoder.safetensors") == 0
    assert run("decompress", tmp_path / "coded", tmp_path / "again") == 0
    assert files_of(tmp_path / "again") == {
        "encoder.safetensors": (tmp_path / "encoder.safetensors").read_bytes()
    }


def test_a_model_that_is_not_known(tmp_path, capsys):
    source = write_shards(tmp_path / "source", [{"weight": trained_like((64, 64))}])
    assert run("compress", source, tmp_path / "coded") == 0
    assert run("inspect", "--model", tmp_path / "coded", "--json") == 0
    document = last_json(capsys.readouterr().out)
    assert "model_type" in document["error"]
    assert document["unweight"]["files"] == 1
    assert run("compress", source, tmp_path / "mlp", "--tensors", "mlp") == 2
    assert "model_type: expected one of" in capsys.readouterr().err


def test_generate_reads_a_compressed_folder(tmp_path, capsys):
    (tmp_path / "plain").mkdir()
    plain = make_chat_model(tmp_path / "plain")
    assert run("compress", plain, tmp_path / "coded") == 0
    capsys.readouterr()
    tokens = []
    for path in (plain, tmp_path / "coded"):
        command = ("generate", "Once", "--model", path, "--max-tokens", 4, "--json")
        assert run(*command, *GREEDY, *SMALL) == 0
        tokens.append(last_json(capsys.readouterr().out)["outputs"][0]["token_ids"])
    assert tokens[0] == tokens[1]
    assert len(tokens[0]) == 4


@pytest.mark.parametrize(
    ("case", "some"),
    [
        (SHARDED, "model.layers.2.mlp.up_proj.weight"),
        (INT4, "language_model.model.layers.2.mlp.experts.3.up_proj.weight_packed"),
        (INT4, "language_model.model.layers.2.mlp.experts.3.up_proj.weight_scale"),
        (INT4, "language_model.model.layers.2.mlp.shared_experts.down_proj.weight"),
        ("llama4_step2_bf16", "model.layers.1.feed_forward.experts.gate_up_proj"),
        ("mixtral_bf16", "model.layers.0.block_sparse_moe.experts.2.w3.weight"),
    ],
)
def test_mlp_alone(golden, tmp_path, capsys, case, some):
    """Dense ones, experts and shared experts; attention, embeddings and routers stay."""
    marks = (".mlp.", ".feed_forward.", ".block_sparse_moe.")
    others = (".gate.weight", ".router.weight", "_bias", "_shape")
    plain = list(map(TensorFile, sorted(golden(case).glob("*.safetensors"))))
    expected = {
        name
        for file in plain
        for name in file.names
        if any(mark in name for mark in marks)
        and not name.endswith(others)
        and not name.startswith("vision_tower.")
    }
    assert some in expected == mlp_tensors(golden(case))

    assert run("compress", golden(case), tmp_path / "coded", "--tensors", "mlp") == 0
    capsys.readouterr()
    files = list(map(TensorFile, sorted((tmp_path / "coded").glob("*.safetensors"))))
    coded = {name for file in files for name in file.names if file.stored_name(name) != name}
    large = {
        name
        for file in plain
        for name in file.names & expected
        if file.dtype(name) == "BF16" and np.prod(file.shape(name)) * 2 >= 8192
    }
    assert large
    assert large <= coded <= expected
    assert run("decompress", tmp_path / "coded", tmp_path / "again") == 0
    assert files_of(tmp_path / "again") == files_of(golden(case))


def test_what_is_not_copied_is_said(source, tmp_path, capsys):
    folder = Path(shutil.copytree(source, tmp_path / "source"))
    (folder / "original").mkdir()
    (folder / "consolidated.pth").write_bytes(b"weights")
    assert run("compress", folder, tmp_path / "coded", "--json") == 0
    out, err = capsys.readouterr()
    assert last_json(out)["left_out"] == ["consolidated.pth", "original"]
    assert errors(err) == ["jinfire: not copied: consolidated.pth, original"]


# --- refusals


def refused(capsys, *argv: object) -> str:
    assert run(*argv) == 2
    [line] = errors(capsys.readouterr().err)
    return line


def test_flags(source, tmp_path, capsys):
    target = tmp_path / "coded"
    for flags, message in (
        (("--form", "zip"), "argument --form: invalid choice"),
        (("--tensors", "some"), "argument --tensors: invalid choice"),
        (("--jobs", "0"), "argument --jobs: expected an integer >= 1"),
    ):
        assert message in refused(capsys, "compress", source, target, *flags)
    assert not target.exists()


def test_sources_that_cannot_be_compressed(source, tmp_path, capsys):
    target = tmp_path / "coded"
    gguf = tmp_path / "gguf"
    gguf.mkdir()
    (gguf / "model.gguf").write_bytes(b"GGUF" + bytes(100))
    (tmp_path / "text").write_text("text")
    (tmp_path / "empty").mkdir()
    fp8 = tmp_path / "fp8.safetensors"
    save_file({"weight": np.zeros((64, 64), ml_dtypes.float8_e4m3fn)}, fp8)
    for path, message in (
        (tmp_path / "nowhere", "no such checkpoint"),
        (gguf, "hf download"),
        (gguf / "model.gguf", "hf download"),
        (tmp_path / "text", "expected a folder or a safetensors file"),
        (tmp_path / "empty", "no safetensors file"),
        (fp8, "weight (F8_E4M3)"),
    ):
        assert message in refused(capsys, "compress", path, target)
    assert run("compress", source, target) == 0
    capsys.readouterr()
    assert "compressed already" in refused(capsys, "compress", target, tmp_path / "twice")
    assert "got a plain one" in refused(capsys, "verify", source)
    assert "got a plain one" in refused(capsys, "decompress", source, tmp_path / "plain")
    assert "it is compressed too" in refused(capsys, "verify", target, "--source", target)


def test_targets_that_are_something_else(source, tmp_path, capsys):
    target = tmp_path / "target"
    target.mkdir()
    (target / "thesis.tex").write_text("years of work")
    (target / "thesis.tex.partial").write_text("the last hour of it")
    (target / "config.json.partial").write_text("left by an earlier run")
    line = refused(capsys, "compress", source, target)
    assert "it holds thesis.tex, thesis.tex.partial (" in line
    assert run("compress", source, target, "--force") == 0  # only files of the same name go
    assert (target / "thesis.tex").read_text() == "years of work"
    assert partials(target) == ["thesis.tex.partial"]
    capsys.readouterr()

    assert "expected another folder" in refused(capsys, "compress", source, source)
    assert "expected another folder" in refused(capsys, "compress", source, source, "--force")
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text("{}")
    assert "config.json is another" in refused(capsys, "compress", source, other)
    assert (other / "config.json").read_text() == "{}"
    (tmp_path / "file").write_text("")
    assert "got a file" in refused(capsys, "compress", source, tmp_path / "file")


def test_a_target_of_other_options_or_another_source(golden, source, tmp_path, capsys):
    target = tmp_path / "coded"
    assert run("compress", source, target) == 0
    capsys.readouterr()
    before = files_of(target)
    line = refused(capsys, "compress", source, target, "--form", "palette")
    assert "made with --form huffman --tensors all, expected --form palette --tensors all" in line
    changed = Path(shutil.copytree(source, tmp_path / "changed"))
    path = max(changed.glob("*.safetensors"))
    octets = bytearray(path.read_bytes())
    octets[-1] ^= 1
    path.write_bytes(octets)
    line = refused(capsys, "compress", changed, target)
    assert f"{path.name} was made from another file" in line
    assert files_of(target) == before
    assert run("compress", changed, target, "--force", "--json") == 0
    kept = last_json(capsys.readouterr().out)["kept"]
    assert kept == [p.name for p in sorted(source.glob("*.safetensors"))[:2]]
    assert run("verify", target, "--source", changed) == 0


def test_no_room(source, tmp_path, capsys, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9, 1000))
    assert "GB are free" in refused(capsys, "compress", source, tmp_path / "coded")
    assert not list((tmp_path / "coded").iterdir())


def test_one_command_at_a_time(source, tmp_path, capsys):
    target = tmp_path / "coded"
    target.mkdir()
    descriptor = os.open(target, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        assert "another command is writing" in refused(capsys, "compress", source, target)
    finally:
        os.close(descriptor)
    assert run("compress", source, target) == 0


def test_verify_names_what_is_damaged(source, tmp_path, capsys):
    target = tmp_path / "coded"
    assert run("compress", source, target) == 0
    path = max(target.glob("*.safetensors"))
    octets = bytearray(path.read_bytes())
    octets[-1] ^= 1
    path.write_bytes(octets)
    capsys.readouterr()
    assert run("verify", target) == 1
    out, err = capsys.readouterr()
    [line] = out.splitlines()
    assert line.startswith(f"{path.name}: model.")
    assert "damaged" in line
    [error] = errors(err)
    assert "1 damaged" in error
    assert run("verify", target, "--json") == 1
    document = last_json(capsys.readouterr().out)
    assert document["intact"] is False
    [damage] = document["damage"]
    assert damage["file"] == path.name
    assert damage["tensor"].startswith("model.")
    assert run("decompress", target, tmp_path / "again") == 2
    assert damage["tensor"] in capsys.readouterr().err
    assert partials(tmp_path / "again") == []


# --- interruptions


def begun(command: list[str], until: Path) -> int:
    """Starts a command and kills it as soon as a file is there; its exit code."""
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 120
        while not until.exists():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.0005)
        process.send_signal(signal.SIGKILL)
        return process.wait()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()


@pytest.mark.parametrize("command", ["compress", "decompress"])
def test_a_killed_run_leaves_whole_files_and_is_gone_on_with(tmp_path, capsys, command):
    shards = [{f"layers.{n}.weight": trained_like((2048, 2048), n)} for n in range(4)]
    source = write_shards(tmp_path / "source", shards)
    if command == "decompress":
        assert run("compress", source, tmp_path / "coded") == 0
        source = tmp_path / "coded"
    target, clean = tmp_path / "target", tmp_path / "clean"
    assert run(command, source, clean) == 0
    capsys.readouterr()

    names = [path.name for path in sorted(source.glob("*.safetensors"))]
    program = [sys.executable, "-m", "jinfire", command, str(source), str(target)]
    assert begun(program, target / f"{names[1]}.partial") == -signal.SIGKILL
    left = {path.name for path in target.iterdir()} - set(partials(target))
    assert names[0] in left <= set(names[:2])
    assert all((target / name).read_bytes() == (clean / name).read_bytes() for name in left)

    assert run(command, source, target, "--json") == 0
    assert last_json(capsys.readouterr().out)["kept"] == sorted(left)
    assert files_of(target) == files_of(clean)
    before = {path.name: path.stat().st_mtime_ns for path in target.glob("*.safetensors")}
    assert run(command, source, target, "--json") == 0
    assert last_json(capsys.readouterr().out)["kept"] == names
    after = {path.name: path.stat().st_mtime_ns for path in target.glob("*.safetensors")}
    assert after == before


def test_a_full_disk_leaves_nothing_half_written(tmp_path, capsys):
    """A limit on the size of files is what a full disk is: a write that fails half way."""
    source = write_shards(tmp_path / "source", [{"weight": any_words(2**20).reshape(1024, 1024)}])
    limit = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20)); "
        "from jinfire.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", limit, "compress", str(source), str(tmp_path / "coded")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert len(errors(done.stderr)) == 1
    assert list((tmp_path / "coded").iterdir()) == []
    assert run("compress", source, tmp_path / "coded") == 0
    assert json.loads((tmp_path / "coded" / INDEX).read_text())["weight_map"]
