"""`make gpu-check` at toy sizes: all rows, failures that lose none, the table, the processes."""

import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import baselines, kernels
from experiments.kernel_processes import (
    LOST,
    assembler_version,
    supervise,
    system_cuda,
    with_assembler,
)
from experiments.kernel_report import failed, newest, table
from experiments.kernels import main
from pallas_kernels import KERNELS, SMOKE_WORKLOADS

KERNEL = "int4_matmul"
OPTIONS = ("--smoke", "--commit", "0123-dirty", "--run", "now")


@pytest.fixture
def rows(tmp_path: Path):
    def read() -> list[dict]:
        (path,) = tmp_path.glob("kernels_*.jsonl")
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]

    return read


def in_process(folder: Path, *flags: str) -> None:
    """The rows of a kernel, measured in this process."""
    peaks = {"copy_bytes_per_s": 1e10, "dense_flops": 1e11}
    (folder / "device.json").write_text(json.dumps({"peaks": peaks}), encoding="utf-8")
    options = (*OPTIONS, "--part", KERNEL, "--handover", str(folder), "--results", str(folder))
    assert main([*options, *flags]) == 0


def speeds(rows: list[dict]) -> dict[str, dict]:
    return {row["implementation"]: row for row in rows if row["part"] == "speed"}


# -- rows


def test_whole_run(tmp_path: Path, rows, monkeypatch, capsys: pytest.CaptureFixture) -> None:
    """With its real processes, which must not look for a GPU here."""
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    arguments = ["--interpret", *OPTIONS, "--only", KERNEL, "--results", str(tmp_path)]
    assert main(arguments) == 0
    found = rows()
    assert {row["part"] for row in found} == {"peak", "check", "speed"}
    checks = {row["dtype"]: row for row in found if row["part"] == "check"}
    assert checks["bfloat16"]["implementation"] == "mosaic"
    assert all(row["right"] for row in checks.values())
    by_name = speeds(found)
    assert list(by_name) == ["mosaic", "xla", "bfloat16 matmul"]
    for row in by_name.values():
        assert row["seconds"]["value"] > 0
        assert row["dispatch_s"] > 0
        assert row["agrees"]
        assert row["compared_with"] == "mosaic"
        assert row["of_copy"] > 0
        assert row["bytes_per_s"] == pytest.approx(row["bytes"] / row["seconds"]["value"])
    assert all({"device", "versions", "time"} <= row.keys() for row in found)
    assert all((row["commit"], row["dirty"]) == ("0123", True) for row in found)
    (page,) = tmp_path.glob("kernels_*.md")
    assert "| int4_matmul | small | bfloat16 matmul |" in page.read_text(encoding="utf-8")
    out = capsys.readouterr().out
    assert out.startswith("ptxas: ")
    assert "2 argument sets checked against float64, 0 wrong" in out


def test_failing_baseline_loses_no_row(
    tmp_path: Path, rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(kernel, static, arrays):
        raise RuntimeError("no such instruction")

    def wrong(kernel, static, arrays):
        return lambda x: jnp.zeros((x.shape[0], 256), x.dtype), (arrays["x"],)

    monkeypatch.setitem(kernels.BASELINES, KERNEL, {"broken": broken, "wrong": wrong})
    in_process(tmp_path)
    by_name = speeds(rows())
    assert by_name["broken"]["error"] == "RuntimeError: no such instruction"
    assert by_name["wrong"]["agrees"] is False
    assert by_name["xla"]["seconds"]["value"] > 0
    assert not any(map(failed, rows()))


def test_failing_kernel_leaves_the_others_to_compare(
    tmp_path: Path, rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args, **options):
        raise RuntimeError("misaligned address")

    kernel = KERNELS[KERNEL]
    forms = {"xla": kernel.implementations["xla"], "mosaic": broken}
    monkeypatch.setitem(KERNELS, KERNEL, dataclasses.replace(kernel, implementations=forms))
    in_process(tmp_path, "--interpret")
    by_name = speeds(rows())
    assert by_name["mosaic"]["error"] == "RuntimeError: misaligned address"
    assert failed(by_name["mosaic"])
    for name in ("xla", "bfloat16 matmul"):
        assert by_name[name]["compared_with"] == "xla"
        assert by_name[name]["agrees"]


def test_wrong_kernel_fails_the_run(tmp_path: Path, rows, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = KERNELS[KERNEL]
    half = {"xla": lambda *args: kernel.implementations["xla"](*args) / 2}
    monkeypatch.setitem(KERNELS, KERNEL, dataclasses.replace(kernel, implementations=half))
    monkeypatch.setitem(kernels.BASELINES, KERNEL, {})
    in_process(tmp_path)
    checks = [row for row in rows() if row["part"] == "check"]
    assert checks
    assert all(failed(row) and not row["right"] for row in checks)
    assert set(speeds(rows())) == {"xla"}


@pytest.mark.parametrize(("value", "right"), [(0.0, True), (1e-6, False), (np.nan, False)])
def test_where_zeros_are_right_nothing_else_is(value: float, right: bool) -> None:
    """An argument set without a row that counts."""
    kernel = KERNELS["grouped_matmul"]
    form = {"xla": lambda x, *rest: jnp.full((x.shape[0], 8), value, x.dtype)}
    reference = lambda x, weights, group_sizes: np.zeros((len(x), 8))  # noqa: E731
    (spec,) = [s for s in kernel.arg_specs if not s.compile_only][:1]
    fake = dataclasses.replace(kernel, implementations=form, reference=reference)
    found = kernels._error(fake, spec, "float32", {"implementation": "xla"})
    assert found["right"] is right
    assert found["relative_error"] == 0 or not right


def test_no_time_left_is_written_down(tmp_path: Path, rows) -> None:
    in_process(tmp_path, "--until", "0")
    assert rows()
    assert all(row["skipped"] == "no time left" for row in rows())
    assert not any(map(failed, rows()))


def test_own_forms_of_all_workloads_come_first() -> None:
    args = kernels.parser().parse_args(["--interpret", "--smoke"])
    pair = [w for w in SMOKE_WORKLOADS if w.kernel == "prefill_attention"]
    assert len(pair) == 2
    order = [task.row["implementation"] for task in kernels.speeds(pair, {}, args)]
    assert order[:4] == ["mosaic", "mosaic", "xla", "xla"]
    assert len(order) == 8


def test_table_holds_the_newest_of_each() -> None:
    row = {"part": "speed", "kernel": "k", "workload": "w", "dtype": "d", "device": "GPU"}
    old = {**row, "implementation": "mosaic", "error": "broken"}
    new = {**row, "implementation": "mosaic", "seconds": {"value": 1e-3}, "dispatch_s": 2e-6}
    new |= {"bytes_per_s": 4e12, "of_copy": 0.9, "flops_per_s": 1e12, "of_dense": None}
    other = {**row, "implementation": "xla", "skipped": "no time left"}
    assert newest([old, other, new]) == [new, other]
    (first, second) = table([old, other, new]).rows
    assert [cell.text for cell in first][3:] == ["1,000", "2.00", "4,000", "90.0", "1.00", "–"]
    assert second[3].text == "no time left"


# -- baselines


def test_full_rows_go_without_lengths() -> None:
    kernel, call = KERNELS["prefill_attention"], baselines.BASELINES["prefill_attention"]
    (full,) = [w for w in SMOKE_WORKLOADS if (w.kernel, w.name) == (kernel.name, "small")]
    arrays = full.buffers(1)[0]
    make = call["dot_product_attention xla, no pages"]
    assert len(make(kernel, full.static, arrays)[1]) == 3
    arrays["lengths"] = arrays["lengths"] - 1
    assert len(make(kernel, full.static, arrays)[1]) == 4


# -- processes

PLAN = [
    {"part": "check", "kernel": KERNEL, "workload": name, "required": True}
    for name in ("first", "second", "third", "fourth")
]

# A part's process without JAX: as `child`, it hands its plan over and writes what is not written.
SCRIPT = """
import json, os, pathlib, sys, time
handover, rows, plan, second = sys.argv[1:]
path = pathlib.Path(rows)
pathlib.Path(handover).write_text(plan)
done = {json.loads(line)["workload"] for line in path.read_text().splitlines()}
for row in json.loads(plan):
    if row["workload"] in done:
        continue
    if row["workload"] == "second":
        exec(second)
    with path.open("a") as file:
        print(json.dumps({**row, "run": "now", "right": True}), file=file)
"""


@pytest.mark.parametrize(
    ("ending", "error"),
    [
        ("time.sleep(60)", "hangs: killed after 3 s without a result"),
        ("print('no memory', file=sys.stderr); os.abort()", "exit status -6\nno memory"),
        ("sys.exit(0)", "ended early"),
    ],
)
def test_what_ends_a_process_costs_its_own_row(
    tmp_path: Path, rows, monkeypatch: pytest.MonkeyPatch, ending: str, error: str
) -> None:
    check_part(tmp_path, monkeypatch, ending)
    by_name = {row["workload"]: row for row in rows()}
    assert [row["workload"] for row in rows()] == ["first", "second", "third", "fourth"]
    assert by_name["second"]["error"] == error
    assert all(by_name[name]["right"] for name in ("first", "third", "fourth"))


def test_a_lost_device_is_blamed_on_the_row_that_says_so(
    tmp_path: Path, rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = "path.open('a').write(json.dumps({**row, 'run': 'now', 'error': 'bad'}) + chr(10))"
    check_part(tmp_path, monkeypatch, f"{write}; sys.exit(3)")
    assert [row.get("error") for row in rows()] == [None, "bad", None, None]


def check_part(folder: Path, monkeypatch: pytest.MonkeyPatch, ending: str) -> None:
    path = folder / "kernels_gpu.jsonl"
    path.touch()
    args = kernels.parser().parse_args(["--results", str(folder), "--run", "now", "--stall-s", "3"])
    args.handover = folder
    report = kernels.Report(path, {"run": "now"})

    def command(args, part: str, until: float) -> list[str]:
        plan = json.dumps(PLAN)
        return [sys.executable, "-c", SCRIPT, str(folder / f"{part}.json"), str(path), plan, ending]

    monkeypatch.setattr(kernels, "child_command", command)
    kernels._run_part(args, KERNEL, report, time.time() + 90)


def test_a_process_has_its_time_and_no_more() -> None:
    start = time.perf_counter()
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    assert supervise(command, time.perf_counter, 1, 60) == "killed after its 1 s"
    assert time.perf_counter() - start < 10
    assert supervise([sys.executable, "-c", "raise SystemExit(3)"], int, 9, 9) == LOST
    assert supervise([sys.executable, "-c", ""], int, 9, 9) is None


def test_assembler_is_looked_for_beside_the_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    usual, on_path = tmp_path / "cuda", tmp_path
    assert system_cuda(usual) is None
    for root in (on_path, usual):
        (root / "bin").mkdir(parents=True)
        (root / "bin" / "ptxas").write_text("#!/bin/sh\necho release 13.0, V13.0.88\n")
        (root / "bin" / "ptxas").chmod(0o755)
        assert system_cuda(usual) == root
    assert assembler_version(usual) == "13.0.88"
    assert assembler_version(None) is None
    before, line = with_assembler(None, usual)
    assert before == ["env", f"CUDA_ROOT={usual}"]
    assert line == f"ptxas: the CUDA packages have none, taking {usual}/bin/ptxas"
    assert with_assembler(on_path, usual)[0] == []
    before, line = with_assembler(None, None)
    assert before == []
    assert line.startswith("ptxas: none")


def test_without_a_gpu_real_sizes_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def start(args, part: str, until: float) -> None:
        common = {"platform": jax.default_backend(), "device": "cpu"}
        found = {"common": common, "path": str(tmp_path / "kernels_cpu.jsonl")}
        (args.handover / f"{part}.json").write_text(json.dumps(found), encoding="utf-8")

    monkeypatch.setattr(kernels, "_start", start)
    assert main(["--results", str(tmp_path)]) == 1
    assert "failed: no GPU: JAX found cpu" in capsys.readouterr().err


def test_it_needs_nothing_but_jax_and_numpy() -> None:
    """A machine with a GPU has JAX's own image and no network."""
    absent = ("xxhash", "numba", "flax", "safetensors", "orbax", "tqdm", "gguf", "tokenizers")
    code = f"import sys; sys.modules.update(dict.fromkeys({absent})); import experiments.kernels"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.returncode, done.stderr
