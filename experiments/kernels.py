"""Kernels on this machine's device: whether they are right, how fast they are, how fast others are.

    python -m experiments.kernels                        # on a GPU (make gpu-check)
    python -m experiments.kernels --interpret --smoke    # toy sizes on a CPU, to try this program

Needs nothing but Python, JAX, NumPy and this checkout: no network, no installation. Every kernel
runs in a process of its own, and every row is written as soon as it is measured: what hangs, fails
or spoils the device costs its own row and no other. Rows append to kernels_<device>.jsonl, and the
table beside it is made from the newest of each.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import math
import os
import pathlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.experimental import serialize_executable, topologies

from experiments import kernel_processes
from experiments.baselines import BASELINES, Arrays, Call
from experiments.harness import RESULTS, SMOKE_RESULTS, median, plain, read_rows
from experiments.kernel_report import (
    NO_TIME,
    Report,
    Row,
    described_commit,
    failed,
    identity,
    newest,
    now,
    provenance,
    run_rows,
    table,
    title,
)
from experiments.tables import markdown
from pallas_kernels import (
    KERNELS,
    SMOKE_WORKLOADS,
    WORKLOADS,
    Kernel,
    Workload,
    counted,
    seconds_per_call,
)

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float32": np.float32}
REPEATS = 20

# Of the largest value: two bfloat16 results, each within its kernel's tolerance of the true one.
AGREEMENT = 4e-2

# Processes for one kernel: another one goes on behind the row that ended the last.
PROCESSES = 4

# What a process may take beyond its time for the row that it is at; less is worth no start.
GRACE_S = 20

# Parts of a run that are no kernel.
DEVICE, ABSENT = "device", "absent"


@dataclasses.dataclass(frozen=True)
class Task:
    """One row to come: what identifies it, and how the rest is measured."""

    row: Row
    measure: Callable[[], Row]


# -- right or not


def checks(kernel: Kernel, args: argparse.Namespace) -> Iterator[Task]:
    """The kernel over every argument set that runs, against its float64 reference."""
    sets = [spec for spec in kernel.arg_specs if not spec.compile_only]
    for dtype, spec in itertools.product(kernel.tolerance, sets[:1] if args.smoke else sets):
        shapes = spec.shapes(DTYPES[dtype]).values()
        options = _own(kernel, shapes, spec.static, args.interpret)
        row = {"part": "check", "kernel": kernel.name, "workload": spec.name, "dtype": dtype}
        row["implementation"] = _own_name(kernel, shapes, spec.static, options)
        yield Task(row | {"required": True}, partial(_error, kernel, spec, dtype, options))


def _error(kernel: Kernel, spec: Any, dtype: str, options: Row) -> Row:
    arrays = spec.make(7, DTYPES[dtype])
    want = kernel.reference(**arrays, **spec.static)
    call = jax.jit(lambda *args: kernel(*args, **options, **spec.static))
    # By default a GPU rounds float32 to TF32 before it multiplies.
    with jax.default_matmul_precision("highest" if dtype == "float32" else None):
        error = kernel.error(call(*arrays.values()), want)
    return {"relative_error": error, "right": error <= kernel.tolerance[dtype]}


def _own(kernel: Kernel, arguments: Iterable[Any], static: Any, interpret: bool) -> Row:
    """How the own kernel is called: by dispatch, or interpreted where a CPU has to do."""
    if interpret and kernel.refusal(*arguments, **static) is None:
        return {"implementation": "mosaic", "interpret": True}
    return {}


def _own_name(kernel: Kernel, arguments: Iterable[Any], static: Any, options: Row) -> str:
    """The form that a call with these options takes."""
    on_gpu = jax.default_backend() == "gpu"
    dispatched = on_gpu and kernel.refusal(*arguments, **static) is None
    return options.get("implementation") or ("mosaic" if dispatched else "xla")


# -- how fast


def peaks(report: Report, smoke: bool) -> Iterator[Row]:
    """Copy bandwidth and dense bfloat16 rate of this device, as far as they are measured."""
    found: Row = {}
    size, width = (2**20, 256) if smoke else (2**30, 8192)
    timed = partial(seconds_per_call, repeats=2 if smoke else REPEATS, warm_s=0.2)

    def copy() -> Row:
        buffers = [(jnp.full(size // 2, i, jnp.bfloat16),) for i in range(3)]
        seconds = median(timed(lambda x: x + x, buffers).seconds)
        found["copy_bytes_per_s"] = 2 * size / seconds.value
        return {"seconds": seconds, "bytes_per_s": found["copy_bytes_per_s"]}

    def multiply() -> Row:
        keys = jax.random.split(jax.random.key(0, impl="rbg"), 4)
        sides = [jax.random.normal(k, (width, width), jnp.bfloat16) for k in keys]
        buffers = [(sides[0], sides[1]), (sides[2], sides[3])]
        seconds = median(timed(_dot, buffers).seconds)
        found["dense_flops"] = 2 * width**3 / seconds.value
        return {"seconds": seconds, "flops_per_s": found["dense_flops"]}

    for name, measure in (("copy", copy), ("bfloat16 matmul", multiply)):
        report.attempt({"part": "peak", "workload": name, "required": True}, measure)
        yield dict(found)


def _dot(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.dot(x, y, preferred_element_type=jnp.float32).astype(jnp.bfloat16)


@dataclasses.dataclass
class Bench:
    """A workload's data and the first answer that anything gave to it."""

    workload: Workload
    args: argparse.Namespace
    device: Row
    answer: np.ndarray | None = None
    answered_by: str = ""

    @functools.cached_property
    def buffers(self) -> list[Arrays]:
        return self.workload.buffers(1 if self.args.interpret else 8)

    @functools.cached_property
    def counts(self) -> tuple[int, int]:
        """Least bytes and operations."""
        kernel, arguments = KERNELS[self.workload.kernel], counted(self.buffers[0])
        static = self.workload.static
        return kernel.bytes(**arguments, **static), kernel.flops(**arguments, **static)

    def speed(self, name: str, make: Callable[[Arrays], Call]) -> Row:
        num_bytes, flops = self.counts
        calls = [make(arrays) for arrays in self.buffers]
        repeats = 2 if self.args.smoke else REPEATS
        timing = seconds_per_call(calls[0][0], [tuple(c[1]) for c in calls], repeats)
        kernel, got = KERNELS[self.workload.kernel], np.asarray(timing.result)
        got = got if kernel.exact else got.astype(np.float32)
        if self.answer is None:
            self.answer, self.answered_by = got, name
        if kernel.exact:
            relative = kernel.error(got, self.answer)
        else:
            difference = np.abs(got.reshape(self.answer.shape) - self.answer).max()
            largest = max(np.abs(self.answer).max(), np.finfo(np.float32).tiny)
            relative = float(difference / largest)
        seconds = median(timing.seconds)
        copy = self.device.get("copy_bytes_per_s", math.nan)
        dense = self.device.get("dense_flops", math.nan)
        return {
            "seconds": seconds,
            "dispatch_s": timing.dispatch_s,
            "compared_with": self.answered_by,
            "difference": relative,
            "agrees": relative <= (0 if kernel.exact else AGREEMENT),
            "repeats": repeats,
            "buffers": len(calls),
            "bytes": num_bytes,
            "flops": flops,
            "bytes_per_s": num_bytes / seconds.value,
            "flops_per_s": flops / seconds.value,
            "of_copy": num_bytes / seconds.value / copy,
            "of_dense": flops / seconds.value / dense,
        }


def speeds(workloads: Sequence[Workload], device: Row, args: argparse.Namespace) -> Iterator[Task]:
    """The own forms of all workloads, then their XLA forms, then what else JAX has."""
    benches = [Bench(workload, args, device) for workload in workloads]
    rounds = [list(contenders(bench, args.interpret)) for bench in benches]
    for place in range(max(map(len, rounds), default=0)):
        for bench, turns in zip(benches, rounds, strict=True):
            for name, make, required in turns[place : place + 1]:
                row = {"part": "speed", "kernel": bench.workload.kernel, "dtype": "bfloat16"}
                row |= {"workload": bench.workload.name, "implementation": name}
                yield Task(row | {"required": required}, partial(bench.speed, name, make))


def contenders(
    bench: Bench, interpret: bool
) -> Iterator[tuple[str, Callable[[Arrays], Call], bool]]:
    """Name, how to call it on arrays, and whether the run fails with it."""
    kernel, static = KERNELS[bench.workload.kernel], bench.workload.static
    shapes = bench.workload.shapes().values()
    options = _own(kernel, shapes, static, interpret)
    own = _own_name(kernel, shapes, static, options)

    def dispatch(arrays: Arrays) -> Call:
        return lambda *args: kernel(*args, **options, **static), tuple(arrays.values())

    def xla(arrays: Arrays) -> Call:
        return (
            lambda *args: kernel(*args, implementation="xla", **static),
            tuple(arrays.values()),
        )

    yield own, dispatch, True
    if own != "xla":
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


# -- the process of one part


def child(args: argparse.Namespace) -> int:
    """Exit status: 0 where every row was written, `DEVICE_LOST` where the device is no more."""
    # Half the time for being right: a kernel that is wrong needs no speed.
    half = (time.time() + args.until) / 2
    common = provenance(args)
    slug = "_".join(common["device"].lower().split())
    report = Report(_folder(args) / f"kernels_{slug}.jsonl", common)
    if args.part == DEVICE:
        _hand_over(args, DEVICE, {"common": common, "path": str(report.path)})
        for found in peaks(report, args.smoke):
            _hand_over(args, DEVICE, {"common": common, "path": str(report.path), "peaks": found})
        return 0
    tasks = list(_tasks(args))
    _hand_over(args, args.part, [task.row for task in tasks])
    done = {identity(row) for row in run_rows(report.path, args.run)}
    for task in tasks:
        if identity(task.row) in done:
            continue
        if time.time() >= (half if task.row["part"] == "check" else args.until):
            report.add({**task.row, "skipped": NO_TIME})
        elif not report.attempt(task.row, task.measure) and not _device_answers():
            # Nothing that this process does from here on can succeed, its own end included.
            sys.stdout.flush()
            os._exit(kernel_processes.DEVICE_LOST)
    return 0


def _tasks(args: argparse.Namespace) -> Iterator[Task]:
    workloads = SMOKE_WORKLOADS if args.smoke else WORKLOADS
    if args.part == ABSENT:
        workload = workloads[0]
        row = {"part": "absent executable", "kernel": workload.kernel, "workload": workload.name}
        yield Task(row, partial(absent_executable, workload))
        return
    device = json.loads(_handed(args, DEVICE).read_text(encoding="utf-8")).get("peaks", {})
    yield from checks(KERNELS[args.part], args)
    yield from speeds([w for w in workloads if w.kernel == args.part], device, args)


def _device_answers() -> bool:
    """Whether the device still computes: an illegal access is an error of all that follows."""
    try:
        jax.block_until_ready(jnp.ones(8) + 1)
    except RuntimeError:
        return False
    return True


def _handed(args: argparse.Namespace, part: str) -> pathlib.Path:
    return args.handover / f"{part}.json"


def _hand_over(args: argparse.Namespace, part: str, value: Any) -> None:
    new = _handed(args, part).with_suffix(".new")
    new.write_text(json.dumps(plain(value)), encoding="utf-8")
    new.replace(_handed(args, part))


# -- the process that starts the others


def parent(args: argparse.Namespace) -> int:
    """Exit status: 0, or 1 where a kernel is wrong or does not run.

    It leaves the device alone: the memory is the children's.
    """
    end = time.time() + args.budget_s
    args.before, assembler = kernel_processes.with_assembler(
        kernel_processes.packages_cuda(), kernel_processes.system_cuda()
    )
    print(assembler, flush=True)
    names = args.only or list(KERNELS)
    with tempfile.TemporaryDirectory() as folder:
        args.handover = pathlib.Path(folder)
        # The first to start reads all of JAX from a disk that nobody has read before.
        first = argparse.Namespace(**{**vars(args), "stall_s": 3 * args.stall_s})
        problem = _start(first, DEVICE, time.time() + 3 * args.stall_s)
        if not _handed(args, DEVICE).exists():
            print(f"failed: no device: {problem}", file=sys.stderr)
            return 1
        device = json.loads(_handed(args, DEVICE).read_text(encoding="utf-8"))
        if device["common"]["platform"] != "gpu" and not (args.interpret or args.smoke):
            print(f"failed: no GPU: JAX found {device['common']['device']}", file=sys.stderr)
            return 1
        report = Report(pathlib.Path(device["path"]), device["common"])
        if problem:
            report.add({"part": "peak", "required": True, "error": problem})
        shares = {name: _share(name, args) for name in names}
        for place, name in enumerate(names):
            now_s = time.time()
            share = shares[name] / sum(shares[n] for n in names[place:])
            _run_part(args, name, report, now_s + share * (end - now_s))
        if device["common"]["platform"] == "gpu":
            _run_part(args, ABSENT, report, end)
    text = markdown(table(read_rows(report.path)))
    report.path.with_suffix(".md").write_text(text, encoding="utf-8")
    print(text)
    failures = [row for row in newest(run_rows(report.path, args.run)) if failed(row)]
    for row in failures:
        print(f"failed: {title(row)}", file=sys.stderr)
    return 1 if failures else 0


def _share(name: str, args: argparse.Namespace) -> int:
    """How much of the time a kernel gets: rows of a workload take longer than argument sets."""
    specs = sum(not spec.compile_only for spec in KERNELS[name].arg_specs)
    workloads = SMOKE_WORKLOADS if args.smoke else WORKLOADS
    return len(DTYPES) * specs + 4 * sum(w.kernel == name for w in workloads)


def _run_part(args: argparse.Namespace, part: str, report: Report, until: float) -> None:
    """All rows of a part. What ends its process is an error; another one goes on behind it."""
    row = {"part": "check", "kernel": part, "required": part in KERNELS}
    if until - time.time() < GRACE_S:
        report.add({**row, "skipped": NO_TIME})
        return
    for attempt in range(1, PROCESSES + 1):
        problem = _start(args, part, until)
        if not _handed(args, part).exists():
            report.add({**row, "error": problem or "ended without a word"})
            return
        planned = json.loads(_handed(args, part).read_text(encoding="utf-8"))
        done = {identity(row) for row in run_rows(report.path, args.run)}
        missing = [row for row in planned if identity(row) not in done]
        if not missing:
            return
        # Where the device was lost, the row that lost it is written already.
        if problem != kernel_processes.LOST:
            report.add({**missing.pop(0), "error": problem or "ended early"})
        if attempt == PROCESSES or until - time.time() < GRACE_S:
            for row in missing:
                report.add({**row, "skipped": NO_TIME if attempt < PROCESSES else "given up"})
            return


def _start(args: argparse.Namespace, part: str, until: float) -> str | None:
    """Runs a part's process to its end, and says what was wrong with that."""
    folder = _folder(args)

    def progress() -> list[tuple[str, int]]:
        files = [*folder.glob("kernels_*.jsonl"), *args.handover.glob("*.json")]
        return sorted((path.name, path.stat().st_size) for path in files)

    limit_s = until - time.time() + GRACE_S
    command = child_command(args, part, until)
    return kernel_processes.supervise(command, progress, limit_s, args.stall_s)


def child_command(args: argparse.Namespace, part: str, until: float) -> list[str]:
    flags = [f"--{name}" for name in ("interpret", "smoke") if getattr(args, name)]
    options = {"part": part, "until": until, "handover": args.handover, "run": args.run}
    options |= {"commit": args.commit, "results": _folder(args).resolve()}
    texts = [f"--{name}={value}" for name, value in options.items()]
    return [*args.before, sys.executable, "-m", "experiments.kernels", *flags, *texts]


# -- the command

INTERPRETER_THREADS = 16


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m experiments.kernels", description=__doc__)
    top.formatter_class = argparse.RawDescriptionHelpFormatter
    top.add_argument("--interpret", action="store_true", help="run the GPU kernels on a CPU")
    top.add_argument("--smoke", action="store_true", help="toy sizes, rows kept apart")
    top.add_argument("--only", action="append", choices=sorted(KERNELS), metavar="KERNEL")
    top.add_argument("--results", type=pathlib.Path, help="folder of the rows")
    top.add_argument(
        "--commit",
        help="what `git describe --always --abbrev=40 --dirty` says, where .git did not come along",
    )
    top.add_argument("--budget-s", type=float, default=420, help="start nothing new after this")
    top.add_argument("--stall-s", type=float, help="longest wait for one row: 30, interpreted 300")
    # From the process that starts the others.
    top.add_argument("--part", help=argparse.SUPPRESS)
    top.add_argument("--until", type=float, default=math.inf, help=argparse.SUPPRESS)
    top.add_argument("--handover", type=pathlib.Path, help=argparse.SUPPRESS)
    top.add_argument("--run", help=argparse.SUPPRESS)
    return top


def _folder(args: argparse.Namespace) -> pathlib.Path:
    return args.results or (SMOKE_RESULTS if args.smoke else RESULTS)


def main(arguments: Sequence[str] | None = None) -> int:
    args = parser().parse_args(arguments)
    args.commit = args.commit or described_commit()
    args.run = args.run or now()
    args.stall_s = args.stall_s or (300 if args.interpret else 30)
    return child(args) if args.part else parent(args)


if __name__ == "__main__":
    if "--interpret" in sys.argv:
        # Warpgroups of an interpreted kernel wait for each other on threads of XLA's pool, which
        # has one for every core or device: with two of them they may wait for ever.
        jax.config.update("jax_num_cpu_devices", INTERPRETER_THREADS)
    sys.exit(main())
