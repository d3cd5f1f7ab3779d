"""Compilation for GPUs that are not there: the targets, and what a compiled program takes.

XLA's CUDA plugin compiles for a *target*, the description of a chip, on any Linux machine. It must
be told so before JAX starts, so `Compiler` works in a process that
`pallas_kernels/toolchain.py:run_python` started.
"""

import contextlib
import dataclasses
import hashlib
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxlib.mlir import ir

from pallas_kernels.kernel import ArgSpec, Kernel

TARGETS = Path(__file__).resolve().parent / "targets"
TARGET_NAMES = tuple(sorted(path.stem for path in TARGETS.glob("*.textproto")))

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
    # The optimised program as XLA prints it.
    text: str = dataclasses.field(repr=False)

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
            text=text,
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
