"""Compilation for Hopper GPUs without one: registers, spills, shared memory, memory of whole steps.

XLA's CUDA plugin compiles for a *target*, the description of a chip, on any Linux machine. It must
be told so before JAX starts, so `Compiler` works in a process that
`pallas_kernels/toolchain.py:run_python` started; `measure` starts one.

    python -m pallas_kernels.aot                     # the table; fails where it got worse
    python -m pallas_kernels.aot --update            # writes resources.jsonl
    python -m pallas_kernels.aot --kernel NAME --target h200
"""

import argparse
import contextlib
import dataclasses
import hashlib
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxlib.mlir import ir

from pallas_kernels import KERNELS
from pallas_kernels.kernel import ArgSpec, Kernel
from pallas_kernels.toolchain import run_python

PACKAGE = Path(__file__).resolve().parent
TARGETS = PACKAGE / "targets"
TARGET_NAMES = tuple(sorted(path.stem for path in TARGETS.glob("*.textproto")))

RECORD = PACKAGE / "resources.jsonl"

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float32": np.float32}

# Of one SM of compute capability 9.0.
REGISTERS_PER_SM = 65536
THREADS_PER_SM = 2048
BLOCKS_PER_SM = 32
SHARED_BYTES_PER_SM = 228 * 1024
SHARED_BYTES_PER_BLOCK = 227 * 1024
SHARED_BYTES_RESERVED = 1024  # by the system, of every block

CUSTOM_CALL = "mosaic_gpu_v2"

# What tracing, Mosaic and XLA raise for a kernel that cannot be compiled.
COMPILE_ERRORS = (
    ValueError,
    TypeError,
    NotImplementedError,
    AssertionError,
    RuntimeError,
    ir.MLIRError,
)


# -- targets


@dataclasses.dataclass(frozen=True)
class Target:
    """A chip to compile for, as XLA's text format describes it."""

    name: str
    text: str

    @classmethod
    def load(cls, name: str) -> "Target":
        path = TARGETS / f"{name}.textproto"
        if not path.exists():
            raise ValueError(f"target: expected one of {TARGET_NAMES}, received {name!r}")
        return cls(name, path.read_text(encoding="utf-8"))

    @property
    def kind(self) -> str:
        """What JAX calls such a device."""
        return re.findall(r'^device_description_str: "(.*)"', self.text, re.MULTILINE)[0]

    def devices(self, count: int = 1) -> list[Any]:
        """Devices that programs compile for and that hold no data."""
        jax.devices()  # finds the plugins
        return list(
            topologies.get_topology_desc(
                "", platform="cuda", target_config=self.text, topology=f"1x1x{count}"
            ).devices
        )


# -- resources


@dataclasses.dataclass(frozen=True)
class Launch:
    """What one kernel launch takes of the chip."""

    name: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    threads: int
    grid: tuple[int, ...]

    @property
    def blocks_per_sm(self) -> int:
        """Thread blocks that fit on one SM at a time."""
        per_warp = -(-self.registers * 32 // 256) * 256  # registers are given out by 256
        return min(
            BLOCKS_PER_SM,
            THREADS_PER_SM // self.threads,
            REGISTERS_PER_SM // (per_warp * -(-self.threads // 32)),
            SHARED_BYTES_PER_SM // (self.shared_bytes + SHARED_BYTES_RESERVED),
        )


@dataclasses.dataclass(frozen=True)
class Resources:
    """Every kernel launch of a program, and its memory per device."""

    launches: tuple[Launch, ...]
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    # Names of the kernels that the optimised program calls, in order.
    calls: tuple[str, ...]

    @property
    def registers(self) -> int:
        return max((launch.registers for launch in self.launches), default=0)

    @property
    def shared_bytes(self) -> int:
        return max((launch.shared_bytes for launch in self.launches), default=0)

    @property
    def spill_bytes(self) -> int:
        return sum(launch.spill_bytes for launch in self.launches)


_ENTRY = re.compile(
    r"Compiling entry function '(?P<name>\w+)'.*?"
    r"(?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads.*?"
    r"Used (?P<registers>\d+) registers",
    re.DOTALL,
)


_CALL = re.compile(rf'custom_call_target="{CUSTOM_CALL}".*op_name="[^"]*/([^"/]+)/[^"/]+"')


class Compiler:
    """Compiles lowered programs and reads what the assembler says about their Mosaic kernels.

    A kernel that this process has compiled before is not assembled again, so what was said about
    it is kept.
    """

    def __init__(self) -> None:
        self._said: dict[str, tuple[int, int]] = {}

    def compile(self, lowered: jax.stages.Lowered) -> Resources:
        """Raises: what lowering or the compiler raises, a ValueError for too much shared memory."""
        modules = mosaic_modules(lowered)
        with _captured_output() as output:
            compiled = lowered.compile()
        said: dict[str, list[tuple[int, int]]] = {}
        for entry in _ENTRY.finditer(output[0]):
            figures = (int(entry["registers"]), int(entry["stores"]) + int(entry["loads"]))
            said.setdefault(entry["name"], []).append(figures)
        for key, (name, *_) in modules.items():
            if figures := said.get(name):
                self._said[key] = figures.pop(0)
        memory, text = compiled.memory_analysis(), compiled.as_text()
        assert memory is not None
        assert text is not None
        return Resources(
            launches=tuple(
                Launch(name.removesuffix("_mosaic_gpu_kernel"), *self._said[key], *rest)
                for key, (name, *rest) in modules.items()
            ),
            argument_bytes=memory.argument_size_in_bytes,
            output_bytes=memory.output_size_in_bytes,
            alias_bytes=memory.alias_size_in_bytes,
            temp_bytes=memory.temp_size_in_bytes,
            calls=tuple(_CALL.findall(text)),
        )

    def compile_kernel(
        self, kernel: Kernel, spec: ArgSpec, dtype: Any, target: Target, blocks: Any = None
    ) -> Resources:
        """The Mosaic form for one argument set, with the block sizes that dispatch would choose."""
        return self.compile(
            lower_for(
                lambda *args: kernel(*args, implementation="mosaic", blocks=blocks, **spec.static),
                list(spec.shapes(dtype).values()),
                target,
            )
        )


def lower_for(
    function: Callable[..., Any], shapes: Sequence[jax.ShapeDtypeStruct], target: Target
) -> jax.stages.Lowered:
    """A function of arrays, lowered for one device of a target."""
    mesh = Mesh(np.asarray(target.devices(1)), ("device",))
    everywhere = NamedSharding(mesh, PartitionSpec())
    placed = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere) for x in shapes]
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jax.jit(function).trace(*placed).lower()


def mosaic_modules(lowered: jax.stages.Lowered) -> dict[str, tuple]:
    """Name, shared memory, threads and grid of every different Mosaic kernel, by content hash."""
    found: dict[str, tuple] = {}
    program = lowered.compiler_ir()
    assert program is not None
    # Kernels are stored in dialects that only Mosaic knows.
    program.context.allow_unregistered_dialects = True
    for op in _operations(program.operation):
        if op.name != "stablehlo.custom_call":
            continue
        if ir.StringAttr(op.attributes["call_target_name"]).value != CUSTOM_CALL:
            continue
        config = ir.DictAttr(op.attributes["mhlo.backend_config"])
        code = ir.StringAttr(config["module"]).value_bytes
        found.setdefault(
            hashlib.sha256(code).hexdigest(), _launch_of(ir.Module.parse(code, program.context))
        )
    return found


def _launch_of(module: ir.Module) -> tuple[str, int, int, tuple[int, ...]]:
    """Name as the assembler says it, dynamic shared memory, threads of a block, and grid."""
    function = next(
        op
        for op in module.body.operations
        if op.operation.name.endswith("func.func") and "llvm.emit_c_interface" in op.attributes
    )
    launch = next(op for op in _operations(module.operation) if op.name.endswith("gpu.launch"))
    # Dependencies, grid, block, cluster where there is one, shared memory.
    counts = list(ir.DenseI32ArrayAttr(launch.attributes["operandSegmentSizes"]))
    sizes = [
        ir.IntegerAttr(value.owner.attributes["value"]).value
        for value in list(launch.operands)[counts[0] : sum(counts[:11])]
    ]
    name = ir.StringAttr(function.attributes["sym_name"]).value
    return f"{name}_kernel", sizes[-1], int(np.prod(sizes[3:6])), tuple(sizes[:3])


def _operations(operation: Any) -> Iterator[Any]:
    for region in operation.regions:
        for block in region:
            for inner in block:
                yield inner.operation
                yield from _operations(inner.operation)


@contextlib.contextmanager
def _captured_output() -> Iterator[list[str]]:
    """What the process writes to its output in the meantime, C++ code included, as one text."""
    sys.stdout.flush()
    sys.stderr.flush()
    saved = os.dup(1), os.dup(2)
    text: list[str] = []
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        try:
            yield text
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for number, copy in enumerate(saved, 1):
                os.dup2(copy, number)
                os.close(copy)
            file.seek(0)
            text.append(file.read().decode(errors="replace"))


# -- the table of all kernels

Row = dict[str, Any]


def rows_of(kernel: Kernel, targets: Sequence[Target], compiler: Compiler) -> Iterator[Row]:
    """Compiles every argument set that the Mosaic form takes, for every target."""
    for spec in kernel.arg_specs:
        for dtype in DTYPES:
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
