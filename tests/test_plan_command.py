"""`jinfire plan` and the experiments that plan."""

import dataclasses
import json

import jax
import pytest
from commands import errors, last_json, run

from experiments.__main__ import main as experiments_main
from experiments.harness import Options, as_dict, make_row
from experiments.kv_capacity import KV_CAPACITY
from experiments.parallelism import COMPILED, PARALLELISM, TOKENS, ParallelismConfig
from jinfire.models.presets import PRESETS, preset
from pallas_kernels import toolchain

# Experiments.


@pytest.mark.parametrize("experiment", [KV_CAPACITY, PARALLELISM], ids=lambda e: e.name)
def test_experiments_of_plans(experiment) -> None:
    configs = experiment.configs(True)
    rows = [
        make_row(experiment, measured, 0.0, smoke=True)
        for measured in experiment.run(configs, Options())
    ]
    assert [row["config"] for row in rows] == [as_dict(config) for config in configs]
    for row in rows:
        tokens = row["config"].get("measure") == TOKENS
        assert row["kind"] in (("measured",) if tokens else ("analytic", "cited"))
        assert row["values"].get("identical", True)
    for name, table in experiment.tables.items():
        # Nothing is compiled for a smoke run.
        assert bool(table(rows).rows) is (name != "parallelism_compiled")


@pytest.mark.long
def test_layouts_as_compiled() -> None:
    configs = [
        ParallelismConfig(COMPILED, "smollm2-135m", layout, "2xH100", chunk=128, context=1024)
        for layout in ((2, 1, 1), (1, 1, 1))
    ]
    configs[1] = dataclasses.replace(configs[1], gpus="1xH100")
    rows = [
        make_row(PARALLELISM, measured, 0.0, smoke=True)
        for measured in PARALLELISM.run(configs, Options())
    ]
    two, one = (row["values"] for row in rows)
    # Two stages hand hidden values on, and sum the embedding and the logits' rows over both.
    assert two["decode_sent_bytes"] > 0
    assert set(two["decode_by_kind"]) == {
        "all-reduce of 2",
        "all-gather of 2",
        "collective-permute of 2",
    }
    assert one["decode_sent_bytes"] == one["prefill_collectives"] == 0
    assert len(PARALLELISM.tables["parallelism_compiled"](rows).rows) == 2


def test_experiment_without_the_compiler_is_one_line(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(toolchain, "WHEELS", tmp_path)
    one = ("--only", "model=kimi-k2.5", "gpus=7xH100", "--results", str(tmp_path))
    # The devices of this process stay what they are.
    devices = ("--devices", str(len(jax.devices())))
    assert experiments_main(["kv_capacity", *one, *devices]) == 2
    captured = capsys.readouterr()
    assert "make install-aot" in last_json(captured.out)["error"]
    (line,) = [text for text in captured.err.splitlines() if "experiments:" in text]
    assert "make install-aot" in line
    assert "Traceback" not in captured.err


# The command.


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_plans(name, capsys) -> None:
    assert run("plan", "--model", name, "--gpus", "8xH200", "--json") == 0
    assert last_json(capsys.readouterr().out)["parameters"] > 1e8


def test_json_document(capsys) -> None:
    argv = ("--context", "4096", "--rows", "8", "--json")
    assert run("plan", "--model", "kimi-k2.5", "--gpus", "8xH100", "--layout", "2x4", *argv) == 0
    document = last_json(capsys.readouterr().out)
    assert document["fits"] is True
    assert document["min_gpus"] == 8
    assert document["layout"] == [2, 4, 1]
    assert document["source"] == document["min_gpus_source"] == "analytic"
    parts = document["bytes_per_device"]
    assert parts["total"] == parts["weights"] + parts["kv"] + parts["temp"]
    assert parts["weights"] == sum(document["weights_by_kind"].values())
    assert parts["weights"] * 8 >= document["model_bytes"]
    free = document["usable_bytes"] - parts["weights"] - parts["temp"]
    assert document["kv_bytes_left"] == 8 * free
    per_token = document["kv_bytes_per_token"]["full"]
    assert 0 <= free - document["kv_tokens_left"] * per_token < 2 * 64 * per_token
    assert document["gpu"]["kind"] == "cited"
    prefill, (layout,) = document["prefill"], document["layouts"]
    assert prefill["tokens"] == layout["prefill_tokens"] == 2 * 1024
    assert layout["prefill_tokens_per_s"] == prefill["tokens_per_s"]
    assert prefill["tokens_per_s"] == pytest.approx(2 * 1024 / prefill["total_s"])


def test_text_names_terms_and_layouts(tmp_path, capsys) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(preset("llama-3.1-8b")), encoding="utf-8")
    for model in (path, tmp_path):
        assert run("plan", "--model", model, "--gpus", "2xH100", "--layout", "auto") == 0
        out = capsys.readouterr().out
        for text in ("on 2 x H100: fits", "8.0 B", "dense_mlp", "left for KV", "bubble", "NVLink"):
            assert text in out
        assert "1x1x2    refused: expert axis" in out
    assert "prefill of 1,024 tokens" in out
    assert run("plan", "--model", path, "--gpus", "2xH100", "--layout", "2x1") == 0
    assert "prefill of 2,048 tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--model", "kimi-k9", "--gpus", "H100"), "one of deepseek-v3, kimi-k2, kimi-k2.5"),
        (("--model", "kimi-k2.5", "--gpus", "8xTPU"), "--gpus: expected COUNTxKIND"),
        (("--model", "kimi-k2.5", "--gpus", "8xH100", "--layout", "2x2"), "product is 8, got 4"),
        (("--model", "llama-3.1-8b", "--gpus", "A100", "--verify"), "expected one of H100"),
        (("--model", "smollm2-135m", "--gpus", "H100", "--context", "8193"), "8192 positions, got"),
        (("--model", "kimi-k2.5", "--gpus", "9999999xH100"), "--gpus: expected at most 4096"),
    ],
)
def test_bad_input_is_one_line(argv, message, capsys) -> None:
    assert run("plan", *argv) == 2
    (line,) = errors(capsys.readouterr().err)
    assert message in line
