"""Registers, spills and shared memory of every kernel, compiled without a GPU.

`pallas_kernels/compiler.py` compiles; this is the table of what it says, and its record.

    python -m pallas_kernels.aot                     # the table; fails where it got worse
    python -m pallas_kernels.aot --update            # writes resources.jsonl
    python -m pallas_kernels.aot --kernel NAME --target h200
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from pallas_kernels import KERNELS
from pallas_kernels.compiler import (
    COMPILE_ERRORS,
    SHARED_BYTES_PER_BLOCK,
    TARGET_NAMES,
    Compiler,
    Launch,
    Target,
)
from pallas_kernels.kernel import Kernel
from pallas_kernels.toolchain import run_python

RECORD = Path(__file__).resolve().parent / "resources.jsonl"

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float32": np.float32}

Row = dict[str, Any]


def rows_of(kernel: Kernel, targets: Sequence[Target], compiler: Compiler) -> Iterator[Row]:
    """Compiles every argument set that the Mosaic form takes, for every target."""
    for spec in kernel.arg_specs:
        for dtype in DTYPES:
            if dtype not in kernel.tolerance:
                continue
            shapes = spec.shapes(DTYPES[dtype])
            if kernel.refusal(*shapes.values(), **spec.static) is not None:
                continue
            for target in targets:
                row: Row = {"kernel": kernel.name, "spec": spec.name, "dtype": dtype}
                row["target"] = target.name
                try:
                    found = compiler.compile_kernel(kernel, spec, DTYPES[dtype], target)
                except COMPILE_ERRORS as error:
                    row["error"] = f"{type(error).__name__}: {error}"[:500]
                else:
                    row["launches"] = [_launch_row(launch) for launch in found.launches]
                    row["temp_bytes"] = found.temp_bytes
                yield row


def _launch_row(launch: Launch) -> Row:
    return {
        **dataclasses.asdict(launch),
        "grid": list(launch.grid),
        "blocks_per_sm": launch.blocks_per_sm,
    }


def measure(kernels: Sequence[str], targets: Sequence[str] = TARGET_NAMES) -> list[Row]:
    """Rows of kernels, compiled in a child process."""
    chosen = [flag for name in kernels for flag in ("--kernel", name)]
    chosen += [flag for name in targets for flag in ("--target", name)]
    text = run_python("-m", "pallas_kernels.aot", "--in-child", *chosen)
    return [json.loads(line) for line in text.splitlines()]


def recorded(path: Path = RECORD) -> list[Row]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write_record(rows: Sequence[Row], path: Path = RECORD) -> None:
    """The rows, and beside them the same for readers."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    path.with_suffix(".md").write_text(markdown(rows), encoding="utf-8")


def markdown(rows: Sequence[Row]) -> str:
    """The record as a table, a line for every launch; targets that agree share it."""
    targets: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        for launch in row.get("launches", ()):
            columns = ("registers", "spill_bytes", "shared_bytes", "threads", "blocks_per_sm")
            figures = (f"{launch[name]:,}" for name in columns)
            key = (row["kernel"], row["spec"], row["dtype"], launch["name"], *figures)
            targets.setdefault(key, []).append(row["target"])
    head = ("operation", "argument set", "dtype", "kernel", "registers", "spilled bytes")
    head += ("shared bytes", "threads", "blocks an SM", "targets")
    lines = [head, ("---",) * 4 + ("---:",) * 5 + ("---",)]
    lines += [(*key, ", ".join(names)) for key, names in targets.items()]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"Written by `python -m pallas_kernels.aot --update`.\n\n{table}\n"


def problems(rows: Sequence[Row], record: Sequence[Row]) -> list[str]:
    """What is wrong with freshly compiled rows: failures, spills, and any difference to the record.

    A kernel that takes more than recorded got worse; one that takes less wants a new record.
    """
    known = {_key(row): row for row in record}
    found = []
    for row in rows:
        name = " / ".join(_key(row))
        old = known.pop(_key(row), None)
        if "error" in row:
            found.append(f"{name}: does not compile: {row['error']}")
            continue
        for launch in row["launches"]:
            if launch["spill_bytes"]:
                found.append(f"{name}: {launch['name']} spills {launch['spill_bytes']} bytes")
            if launch["shared_bytes"] > SHARED_BYTES_PER_BLOCK:
                found.append(
                    f"{name}: {launch['name']} takes {launch['shared_bytes']} shared bytes"
                )
        if old is None:
            found.append(f"{name}: not recorded")
        elif old != row:
            found.append(f"{name}: recorded {_brief(old)}, compiled {_brief(row)}")
    return found + [f"{' / '.join(key)}: recorded, and no longer compiled" for key in known]


def _key(row: Row) -> tuple[str, str, str, str]:
    return row["kernel"], row["spec"], row["dtype"], row["target"]


def _brief(row: Row) -> str:
    launches = "; ".join(
        f"{x['name']} {x['registers']} registers, {x['shared_bytes']} shared bytes, "
        f"{x['threads']} threads x {'x'.join(map(str, x['grid']))}, {x['blocks_per_sm']} an SM"
        for x in row.get("launches", ())
    )
    return f"{launches}; {row.get('temp_bytes')} temporary bytes"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pallas_kernels.aot",
        description="Compiles every kernel over every argument set for GPUs that are not there, "
        "and compares registers, spills and shared memory with the record.",
    )
    parser.add_argument("--kernel", action="append", choices=sorted(KERNELS))
    parser.add_argument("--target", action="append", choices=TARGET_NAMES)
    parser.add_argument("--update", action="store_true", help="write the record")
    parser.add_argument("--json", action="store_true", help="print rows as JSON lines")
    parser.add_argument("--in-child", action="store_true", help=argparse.SUPPRESS)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 1 where a kernel fails, spills or differs from the record."""
    args = _parser().parse_args(arguments)
    names = args.kernel or list(KERNELS)
    targets = args.target or list(TARGET_NAMES)
    if args.in_child:
        compiler = Compiler()
        loaded = [Target.load(name) for name in targets]
        for name in names:
            for row in rows_of(KERNELS[name], loaded, compiler):
                print(json.dumps(row), flush=True)
        return 0
    rows = measure(names, targets)
    here = [r for r in recorded() if r["kernel"] in names and r["target"] in targets]
    for row in rows:
        print(json.dumps(row) if args.json else f"{' / '.join(_key(row))}: {_brief(row)}")
    if args.update:
        chosen = {(name, target) for name in names for target in targets}
        rest = [r for r in recorded() if (r["kernel"], r["target"]) not in chosen]
        order = {name: place for place, name in enumerate(KERNELS)}
        write_record(sorted([*rest, *rows], key=lambda r: order.get(r["kernel"], len(order))))
        here = rows
    found = problems(rows, here)
    for problem in found:
        print(problem, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
