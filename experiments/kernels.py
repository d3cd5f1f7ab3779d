"""Kernels on this machine's device: whether they are right, how fast they are, how fast others are.

    python -m experiments.kernels                        # on a GPU (make gpu-check)
    python -m experiments.kernels --interpret --smoke    # toy sizes on a CPU, to try this program

Needs nothing but Python, JAX, NumPy and this checkout: no network, no installation. Every row is
written as soon as it is measured, and one that fails holds the error: nothing measured is lost.
Rows append to kernels_<device>.jsonl, and the table beside it is made from the newest of each.
"""

import argparse
import datetime as dt
import itertools
import json
import math
import pathlib
import platform
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.experimental import serialize_executable, topologies

from experiments.baselines import BASELINES, Arrays, Call
from experiments.harness import RESULTS, SMOKE_RESULTS, git_state, median, plain, read_rows
from experiments.tables import Cell, Table, markdown, number
from pallas_kernels import (
    KERNELS,
    SMOKE_WORKLOADS,
    WORKLOADS,
    Kernel,
    Workload,
    counted,
    seconds_per_call,
)

Row = dict[str, Any]

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float32": np.float32}
REPEATS = 20

# Of the largest value: two bfloat16 results, each within its kernel's tolerance of the true one.
AGREEMENT = 4e-2

# A table of every row is made anew, so older rows of the same thing drop out of it.
IDENTITY = ("part", "kernel", "workload", "dtype", "implementation")


class Report:
    """Rows on disk and on the terminal."""

    def __init__(self, path: pathlib.Path, common: Row) -> None:
        self.path = path
        self.failures: list[str] = []
        self._common = common
        path.parent.mkdir(parents=True, exist_ok=True)

    def add(self, row: Row) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(plain({**self._common, **row}), sort_keys=True) + "\n")
        shown = {k: v for k, v in row.items() if k != "trace"}
        print(json.dumps(plain(shown)), flush=True)

    def attempt(self, row: Row, measure: Callable[[], Row], required: bool) -> None:
        """`row` with what `measure` returns, or with its error; a required one fails the run."""
        start = time.perf_counter()
        try:
            row = {**row, **measure()}
        except Exception as error:  # noqa: BLE001 - one failure must not lose the other rows
            text = f"{type(error).__name__}: {error}"[:500]
            row = {**row, "error": text, "trace": traceback.format_exc()[-2000:]}
        # Two forms of our own must agree; what others compute is only written down.
        wrong = row.get("right") is False or (
            row.get("implementation") == "xla" and row.get("agrees") is False
        )
        if wrong or (required and "error" in row):
            self.failures.append(" / ".join(str(row[k]) for k in IDENTITY if k in row))
        self.add({**row, "wall_s": time.perf_counter() - start})


# -- right or not


def check(report: Report, kernels: Sequence[Kernel], interpret: bool, deadline: float) -> None:
    """Every kernel over every argument set that runs, against its float64 reference.

    Kernels take turns, so that little time is enough to see something of each.
    """
    for dtype in DTYPES:
        sets = [[s for s in kernel.arg_specs if not s.compile_only] for kernel in kernels]
        turns = itertools.zip_longest(*sets)
        for kernel, spec in ((k, s) for turn in turns for k, s in zip(kernels, turn, strict=True)):
            if spec is None:
                continue
            row = {"part": "check", "kernel": kernel.name, "workload": spec.name, "dtype": dtype}
            if time.perf_counter() > deadline:
                report.add({**row, "skipped": "no time left"})
            else:
                report.attempt(row, partial(_error, kernel, spec, dtype, interpret), True)


def _error(kernel: Kernel, spec: Any, dtype: str, interpret: bool) -> Row:
    arrays = spec.make(7, DTYPES[dtype])
    want = kernel.reference(**arrays, **spec.static)
    options = _own(kernel, arrays.values(), spec.static, interpret)
    call = jax.jit(lambda *args: kernel(*args, **options, **spec.static))
    # By default a GPU rounds float32 to TF32 before it multiplies.
    with jax.default_matmul_precision("highest" if dtype == "float32" else None):
        got = np.asarray(call(*arrays.values())).astype(np.float64)
    error = float(np.abs(got - want).max() / np.abs(want).max())
    right = error <= kernel.tolerance[dtype] and not got[want == 0].any()
    used = options.get("implementation") or _dispatched(kernel, arrays.values(), spec.static)
    return {"implementation": used, "relative_error": error, "right": bool(right)}


def _own(kernel: Kernel, arguments: Any, static: Any, interpret: bool) -> dict[str, Any]:
    """How the own kernel is called: by dispatch, or interpreted where a CPU has to do."""
    if interpret and kernel.refusal(*arguments, **static) is None:
        return {"implementation": "mosaic", "interpret": True}
    return {}


def _dispatched(kernel: Kernel, arguments: Any, static: Any) -> str:
    on_gpu = jax.default_backend() == "gpu"
    return "mosaic" if on_gpu and kernel.refusal(*arguments, **static) is None else "xla"


# -- how fast


def peaks(report: Report, smoke: bool) -> Row:
    """Copy bandwidth and dense bfloat16 rate of this device, measured as the kernels are."""
    found: Row = {}
    size, width = (2**20, 256) if smoke else (2**30, 8192)
    limit = 2 if smoke else REPEATS

    def copy() -> Row:
        buffers = [(jnp.full(size // 2, i, jnp.bfloat16),) for i in range(3)]
        seconds = median(seconds_per_call(lambda x: x + x, buffers, limit))
        found["copy_bytes_per_s"] = 2 * size / seconds.value
        return {"seconds": seconds, "bytes_per_s": found["copy_bytes_per_s"]}

    def multiply() -> Row:
        keys = jax.random.split(jax.random.key(0), 4)
        sides = [jax.random.normal(k, (width, width), jnp.bfloat16) for k in keys]
        buffers = [(sides[0], sides[1]), (sides[2], sides[3])]
        seconds = median(seconds_per_call(_dot, buffers, limit))
        found["dense_flops"] = 2 * width**3 / seconds.value
        return {"seconds": seconds, "flops_per_s": found["dense_flops"]}

    report.attempt({"part": "peak", "workload": "copy"}, copy, True)
    report.attempt({"part": "peak", "workload": "bfloat16 matmul"}, multiply, True)
    return found


def _dot(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.dot(x, y, preferred_element_type=jnp.float32).astype(jnp.bfloat16)


def measure(
    report: Report, workloads: Sequence[Workload], device: Row, args: argparse.Namespace
) -> None:
    """Every workload through the own kernel, its XLA form, and what else JAX has."""
    repeats = 2 if args.smoke else REPEATS
    deadline = args.started + args.budget_s
    for workload in workloads:
        row = {"part": "speed", "kernel": workload.kernel, "workload": workload.name}
        row["dtype"] = "bfloat16"
        try:
            buffers = workload.buffers(1 if args.interpret else 8)
            counts = _counts(workload, buffers[0])
            calls = list(contenders(workload, buffers[0], args.interpret))
            answer = _answer(calls[0][1](buffers[0]))
        except Exception as error:  # noqa: BLE001 - as above
            report.attempt(row, partial(_raise, error), True)
            continue
        for name, make, required in calls:
            row["implementation"] = name
            if time.perf_counter() > deadline:
                report.add({**row, "skipped": "no time left"})
            else:
                report.attempt(
                    row, partial(_speed, make, buffers, answer, counts, device, repeats), required
                )


def _raise(error: Exception) -> Row:
    raise error


def _answer(call: Call) -> np.ndarray:
    return np.asarray(jax.jit(call[0])(*call[1])).astype(np.float32)


def _counts(workload: Workload, arrays: Arrays) -> tuple[int, int]:
    """Least bytes and operations."""
    kernel, arguments = KERNELS[workload.kernel], counted(arrays)
    return (
        kernel.bytes(**arguments, **workload.static),
        kernel.flops(**arguments, **workload.static),
    )


def _speed(
    make: Callable[[Arrays], Call],
    buffers: Sequence[Arrays],
    answer: np.ndarray,
    counts: tuple[int, int],
    device: Row,
    repeats: int,
) -> Row:
    calls = [make(arrays) for arrays in buffers]
    function = calls[0][0]
    difference = np.abs(_answer(calls[0]).reshape(answer.shape) - answer).max()
    relative = float(difference / np.abs(answer).max())
    seconds = median(seconds_per_call(function, [tuple(c[1]) for c in calls], repeats))
    num_bytes, flops = counts
    copy = device.get("copy_bytes_per_s", math.nan)
    dense = device.get("dense_flops", math.nan)
    return {
        "seconds": seconds,
        "difference": relative,
        "agrees": relative <= AGREEMENT,
        "repeats": repeats,
        "buffers": len(buffers),
        "bytes": num_bytes,
        "flops": flops,
        "bytes_per_s": num_bytes / seconds.value,
        "flops_per_s": flops / seconds.value,
        "of_copy": num_bytes / seconds.value / copy,
        "of_dense": flops / seconds.value / dense,
    }


def contenders(
    workload: Workload, arrays: Arrays, interpret: bool
) -> Iterator[tuple[str, Callable[[Arrays], Call], bool]]:
    """Name, how to call it on arrays, and whether the run fails with it."""
    kernel, static = KERNELS[workload.kernel], workload.static
    options = _own(kernel, arrays.values(), static, interpret)
    refused = kernel.refusal(*arrays.values(), **static)
    own = options.get("implementation") or _dispatched(kernel, arrays.values(), static)

    def dispatch(arrays: Arrays) -> Call:
        return lambda *args: kernel(*args, **options, **static), tuple(arrays.values())

    def xla(arrays: Arrays) -> Call:
        return (
            lambda *args: kernel(*args, implementation="xla", **static),
            tuple(arrays.values()),
        )

    yield own, dispatch, True
    if own != "xla" and refused is None:
        yield "xla", xla, False
    for name, baseline in BASELINES.get(kernel.name, {}).items():
        yield name, partial(baseline, kernel, static), False


# -- an executable made without the device


def absent_executable(workload: Workload) -> Row:
    """Compiles for a chip like this one without using it, then loads and runs the result here."""
    kernel = KERNELS[workload.kernel]
    arrays = workload.buffers(1)[0]
    topology = topologies.get_topology_desc("", platform="cuda", topology="1x1x1")
    mesh = jax.sharding.Mesh(np.asarray(topology.devices[:1]), ("device",))
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere) for x in arrays.values()]
    call = jax.jit(lambda *args: kernel(*args, **workload.static))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        compiled = call.trace(*shapes).lower().compile()
    payload, inputs, outputs = serialize_executable.serialize(compiled)
    loaded = serialize_executable.deserialize_and_load(payload, inputs, outputs)
    got = np.asarray(loaded(*arrays.values()), np.float32)
    want = np.asarray(call(*arrays.values()), np.float32)
    return {"payload_bytes": len(payload), "right": bool(np.array_equal(got, want))}


# -- the table


def newest(rows: Sequence[Row]) -> list[Row]:
    """The last row of each thing measured, in the order in which they first came."""
    found: dict[tuple, Row] = {}
    for row in rows:
        found[tuple(row.get(key) for key in IDENTITY)] = row
    return list(found.values())


def table(rows: Sequence[Row]) -> Table:
    """Speeds; what was not measured says why."""
    rows = newest(rows)
    lines = []
    for row in rows:
        if row["part"] != "speed":
            continue
        texts = [row["kernel"], row["workload"], row.get("implementation", "")]
        if "seconds" in row:
            scaled = (
                row["seconds"]["value"] * 1e6,
                row["bytes_per_s"] / 1e9,
                100 * row["of_copy"] if row["of_copy"] is not None else None,
                row["flops_per_s"] / 1e12,
                100 * row["of_dense"] if row["of_dense"] is not None else None,
            )
            texts += [number(value) for value in scaled]
        else:
            reason = row.get("skipped") or row.get("error", "")
            texts += [reason.splitlines()[0][:60] if reason else "–", "–", "–", "–", "–"]
        lines.append(tuple(map(Cell, texts)))
    checks = [row for row in rows if row["part"] == "check" and "right" in row]
    wrong = sum(not row["right"] for row in checks)
    device = rows[-1]["device"] if rows else "no device"
    return Table(
        caption=f"Kernels on {device}",
        columns=(
            *("Kernel", "Workload", "Implementation", "µs", "GB/s", "% of copy"),
            *("TFLOP/s", "% of dense"),
        ),
        rows=tuple(lines),
        notes=(
            f"{len(checks)} argument sets checked against float64, {wrong} wrong.",
            "Median of the repeats; least bytes and operations of the operation over its time.",
        ),
        numeric=frozenset(range(3, 8)),
    )


# -- the command


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m experiments.kernels", description=__doc__)
    top.formatter_class = argparse.RawDescriptionHelpFormatter
    top.add_argument("--interpret", action="store_true", help="run the GPU kernels on a CPU")
    top.add_argument("--smoke", action="store_true", help="toy sizes, rows kept apart")
    top.add_argument("--only", action="append", choices=sorted(KERNELS), metavar="KERNEL")
    top.add_argument("--results", type=pathlib.Path, help="folder of the rows")
    top.add_argument("--budget-s", type=float, default=420, help="start nothing new after this")
    return top


def provenance(args: argparse.Namespace) -> Row:
    commit, dirty = git_state()
    return {
        "experiment": "kernels",
        "kind": "measured",
        "device": jax.devices()[0].device_kind,
        "platform": jax.default_backend(),
        "commit": commit,
        "dirty": dirty,
        "smoke": args.smoke,
        "interpret": args.interpret,
        "versions": {
            "python": platform.python_version(),
            "jax": jax.__version__,
            "numpy": np.__version__,
        },
        "time": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 1 where a kernel is wrong or does not run."""
    args = parser().parse_args(arguments)
    args.started = time.perf_counter()
    common = provenance(args)
    slug = "_".join(common["device"].lower().split())
    folder = args.results or (SMOKE_RESULTS if args.smoke else RESULTS)
    report = Report(folder / f"kernels_{slug}.jsonl", common)
    names = args.only or list(KERNELS)
    workloads = [w for w in (SMOKE_WORKLOADS if args.smoke else WORKLOADS) if w.kernel in names]
    device = peaks(report, args.smoke)
    # Half the time for being right: a kernel that is wrong needs no speed.
    half = args.started + args.budget_s / 2
    kernels = [KERNELS[name] for name in names]
    if args.smoke:
        kernels = [_first_specs(kernel) for kernel in kernels]
    check(report, kernels, args.interpret, half)
    measure(report, workloads, device, args)
    if common["platform"] == "gpu":
        for workload in workloads[:1]:
            row = {"part": "absent executable", "kernel": workload.kernel}
            row["workload"] = workload.name
            report.attempt(row, partial(absent_executable, workload), False)
    text = markdown(table(read_rows(report.path)))
    report.path.with_suffix(".md").write_text(text, encoding="utf-8")
    print(text)
    for failure in report.failures:
        print(f"failed: {failure}", file=sys.stderr)
    return 1 if report.failures else 0


def _first_specs(kernel: Kernel) -> Kernel:
    """The kernel with its first argument set alone."""
    runnable = [spec for spec in kernel.arg_specs if not spec.compile_only]
    return Kernel(**{**vars(kernel), "arg_specs": tuple(runnable[:1])})


if __name__ == "__main__":
    sys.exit(main())
