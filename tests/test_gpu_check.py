"""`make gpu-check` tried at toy sizes: all rows, one failure that loses none, the table."""

import dataclasses
import json
from pathlib import Path

import jax.numpy as jnp
import pytest

from experiments import kernels
from experiments.kernels import main, newest, table
from pallas_kernels import KERNELS

KERNEL = "int4_matmul"
COMMAND = ("--smoke", "--only", KERNEL, "--results")


@pytest.fixture
def rows(tmp_path: Path):
    def read() -> list[dict]:
        (path,) = tmp_path.glob("kernels_*.jsonl")
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]

    return read


def speeds(rows: list[dict]) -> dict[str, dict]:
    return {row["implementation"]: row for row in rows if row["part"] == "speed"}


def test_interpreted_run(tmp_path: Path, rows, capsys: pytest.CaptureFixture) -> None:
    assert main(["--interpret", *COMMAND, str(tmp_path)]) == 0
    found = rows()
    assert {row["part"] for row in found} == {"peak", "check", "speed"}
    checks = {row["dtype"]: row for row in found if row["part"] == "check"}
    assert checks["bfloat16"]["implementation"] == "mosaic"
    assert all(row["right"] for row in checks.values())
    by_name = speeds(found)
    assert set(by_name) == {"mosaic", "xla", "bfloat16 matmul"}
    for row in by_name.values():
        assert row["seconds"]["value"] > 0
        assert row["agrees"]
        assert row["of_copy"] > 0
        assert row["bytes_per_s"] == pytest.approx(row["bytes"] / row["seconds"]["value"])
    assert all({"commit", "dirty", "device", "versions", "time"} <= row.keys() for row in found)
    (page,) = tmp_path.glob("kernels_*.md")
    assert "| int4_matmul | small | bfloat16 matmul |" in page.read_text(encoding="utf-8")
    assert "2 argument sets checked against float64, 0 wrong" in capsys.readouterr().out


def test_failing_baseline_loses_no_row(
    tmp_path: Path, rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(kernel, static, arrays):
        raise RuntimeError("no such instruction")

    def wrong(kernel, static, arrays):
        return lambda x: jnp.zeros((x.shape[0], 256), x.dtype), (arrays["x"],)

    monkeypatch.setitem(kernels.BASELINES, KERNEL, {"broken": broken, "wrong": wrong})
    assert main([*COMMAND, str(tmp_path)]) == 0
    by_name = speeds(rows())
    assert by_name["broken"]["error"] == "RuntimeError: no such instruction"
    assert by_name["wrong"]["agrees"] is False
    assert by_name["xla"]["seconds"]["value"] > 0


def test_wrong_kernel_fails_the_run(
    tmp_path: Path, rows, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    kernel = KERNELS[KERNEL]
    half = {"xla": lambda *args: kernel.implementations["xla"](*args) / 2}
    monkeypatch.setitem(KERNELS, KERNEL, dataclasses.replace(kernel, implementations=half))
    monkeypatch.setitem(kernels.BASELINES, KERNEL, {})
    assert main([*COMMAND, str(tmp_path)]) == 1
    assert not any(row["right"] for row in rows() if row["part"] == "check")
    assert "failed: check / int4_matmul / one row / bfloat16" in capsys.readouterr().err
    assert set(speeds(rows())) == {"xla"}


def test_no_time_left_is_written_down(tmp_path: Path, rows) -> None:
    assert main([*COMMAND, str(tmp_path), "--budget-s", "0"]) == 0
    left = [row for row in rows() if row["part"] != "peak"]
    assert left
    assert all(row["skipped"] == "no time left" for row in left)


def test_table_holds_the_newest_of_each() -> None:
    row = {"part": "speed", "kernel": "k", "workload": "w", "dtype": "d", "device": "GPU"}
    old = {**row, "implementation": "mosaic", "error": "broken"}
    new = {**row, "implementation": "mosaic", "seconds": {"value": 1e-3}}
    new |= {"bytes_per_s": 4e12, "of_copy": 0.9, "flops_per_s": 1e12, "of_dense": None}
    other = {**row, "implementation": "xla", "skipped": "no time left"}
    assert newest([old, other, new]) == [new, other]
    (first, second) = table([old, other, new]).rows
    assert [cell.text for cell in first][3:] == ["1,000", "4,000", "90.0", "1.00", "–"]
    assert second[3].text == "no time left"
