"""Rows of `experiments/kernels.py`: on disk, on the terminal, and as a table."""

import argparse
import datetime as dt
import json
import pathlib
import platform
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from experiments.harness import git_state, plain, read_rows
from experiments.kernel_processes import assembler_version, packages_cuda, system_cuda
from experiments.tables import Cell, Table, number

Row = dict[str, Any]

# A table of every row is made anew, so older rows of the same thing drop out of it.
IDENTITY = ("part", "kernel", "workload", "dtype", "implementation")

NO_TIME = "no time left"


def identity(row: Row) -> tuple[Any, ...]:
    return tuple(row.get(key) for key in IDENTITY)


def title(row: Row) -> str:
    return " / ".join(str(row[key]) for key in IDENTITY if key in row)


def failed(row: Row) -> bool:
    """Whether the run fails with this row.

    Two forms of our own must agree; what others compute is only written down.
    """
    disagrees = row.get("implementation") == "xla" and row.get("agrees") is False
    broken = "error" in row and bool(row.get("required"))
    return row.get("right") is False or disagrees or broken


def run_rows(path: pathlib.Path, run: str) -> list[Row]:
    """The rows that one run has written so far, whichever of its processes did."""
    return [row for row in read_rows(path) if row.get("run") == run]


def described_commit() -> str:
    commit, dirty = git_state()
    return f"{commit}-dirty" if dirty else commit


def provenance(args: argparse.Namespace) -> Row:
    """What every row says of the code, the device and the run."""
    return {
        "experiment": "kernels",
        "kind": "measured",
        "device": jax.devices()[0].device_kind,
        "platform": jax.default_backend(),
        "commit": args.commit.removesuffix("-dirty"),
        "dirty": args.commit.endswith("-dirty"),
        "smoke": args.smoke,
        "interpret": args.interpret,
        "run": args.run,
        "versions": {
            "python": platform.python_version(),
            "jax": jax.__version__,
            "numpy": np.__version__,
            "ptxas": assembler_version(packages_cuda() or system_cuda()),
        },
        "time": now(),
    }


def now() -> str:
    return dt.datetime.now(dt.UTC).isoformat(timespec="seconds")


class Report:
    """Rows appended to a file, each as soon as it is known."""

    def __init__(self, path: pathlib.Path, common: Row) -> None:
        self.path = path
        self._common = common
        path.parent.mkdir(parents=True, exist_ok=True)

    def add(self, row: Row) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(plain({**self._common, **row}), sort_keys=True) + "\n")
        shown = {k: v for k, v in row.items() if k != "trace"}
        print(json.dumps(plain(shown)), flush=True)

    def attempt(self, row: Row, measure: Callable[[], Row]) -> bool:
        """Adds `row` with what `measure` returns, or with its error. Whether it went well."""
        start = time.perf_counter()
        try:
            row = {**row, **measure()}
        except Exception as error:  # noqa: BLE001 - one failure must not lose the other rows
            text = f"{type(error).__name__}: {error}"[:500]
            row = {**row, "error": text, "trace": traceback.format_exc()[-2000:]}
        self.add({**row, "wall_s": time.perf_counter() - start})
        return "error" not in row


def newest(rows: Sequence[Row]) -> list[Row]:
    """The last row of each thing measured, in the order in which they first came."""
    found: dict[tuple, Row] = {}
    for row in rows:
        found[identity(row)] = row
    return list(found.values())


def table(rows: Sequence[Row]) -> Table:
    """Speeds; what was not measured says why."""
    rows = newest(rows)
    lines = []
    for row in rows:
        if row["part"] != "speed":
            continue
        texts = [row["kernel"], row.get("workload", ""), row.get("implementation", "")]
        if "seconds" in row:
            scaled = (
                row["seconds"]["value"] * 1e6,
                row["dispatch_s"] * 1e6,
                row["bytes_per_s"] / 1e9,
                100 * row["of_copy"] if row["of_copy"] is not None else None,
                row["flops_per_s"] / 1e12,
                100 * row["of_dense"] if row["of_dense"] is not None else None,
            )
            texts += [number(value) for value in scaled]
        else:
            reason = row.get("skipped") or row.get("error", "")
            texts += [reason.splitlines()[0][:60] if reason else "–", *("–",) * 5]
        lines.append(tuple(map(Cell, texts)))
    checks = [row for row in rows if row["part"] == "check" and "right" in row]
    wrong = sum(not row["right"] for row in checks)
    device = rows[-1]["device"] if rows else "no device"
    return Table(
        caption=f"Kernels on {device}",
        columns=(
            *("Kernel", "Workload", "Implementation", "µs", "host µs", "GB/s", "% of copy"),
            *("TFLOP/s", "% of dense"),
        ),
        rows=tuple(lines),
        notes=(
            f"{len(checks)} argument sets checked against float64, {wrong} wrong.",
            "Median of the repeats; least bytes and operations of the operation over its time.",
            "Host: time to start a call. Where that is nearly all of it, the device waits.",
        ),
        numeric=frozenset(range(3, 9)),
    )
