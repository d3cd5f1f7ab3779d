"""Execution of straight-line PTX in NumPy: the 128 threads of one warpgroup, global memory only.

Interpret mode says nothing of registers. For code whose point is which register holds what, this
runs what the compiler made of it. It knows the instructions that such code needs so far.
"""

import re

import ml_dtypes
import numpy as np

THREADS = 128
LANES = 32
# Do not change what a kernel without shared memory computes.
SKIPPED = ("bar.", "fence.", "elect.", "ret")


def _halves(operation, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """An operation on pairs of bfloat16, rounded to nearest."""
    a, b = (x.astype(np.uint32).view(ml_dtypes.bfloat16).astype(np.float32) for x in (a, b))
    result = operation(a, b).astype(ml_dtypes.bfloat16)
    return result.view(np.uint32).astype(np.uint64)


OPERATIONS = {
    "add.s64": np.add,
    "mul.wide.u32": np.multiply,
    "and.b32": np.bitwise_and,
    "or.b32": np.bitwise_or,
    "shl.b32": lambda a, b: a << b & np.uint64(0xFFFFFFFF),
    "shr.u32": np.right_shift,
    "bfe.u32": lambda a, start, count: a >> start & (np.uint64(1) << count) - np.uint64(1),
    "mov.b32": lambda a: a,
    "mov.u32": lambda a: a,
    "cvta.to.global.u64": lambda a: a,
    "add.bf16x2": lambda a, b: _halves(np.add, a, b),
    "mul.bf16x2": lambda a, b: _halves(np.multiply, a, b),
    "shfl.sync.idx.b32": lambda a, *_: np.repeat(a[::LANES], LANES),
}


def execute(code: str, arrays: list[np.ndarray]) -> list[bytes]:
    """Contents of the kernel's arrays, inputs and outputs in order, after its run.

    Raises: ValueError for an instruction that is not known here.
    """
    memory = [bytearray(array.tobytes()) for array in arrays]
    registers = {"%tid.x": np.arange(THREADS, dtype=np.uint64)}

    def value(text: str) -> np.ndarray:
        if text.startswith("{"):
            low, high = text.strip("{}").split(",")
            return value(low.strip()) | value(high.strip()) << np.uint64(16)
        if text in registers:
            return registers[text]
        return np.full(THREADS, int(text) & 0xFFFFFFFF, np.uint64)

    def places(text: str) -> list[tuple[int, int]]:
        """Array and offset of every thread: an array's address has its number in the high half."""
        base, _, offset = text.strip("[]").partition("+")
        return [divmod(int(x) + int(offset or 0), 2**32) for x in registers[base]]

    for line in code.splitlines():
        found = re.match(r"\t([a-z][\w.:]*)(?:\s+(.*))?;", line)
        if not found or found[1].startswith(SKIPPED):
            continue
        name, rest = found[1], found[2]
        target, *operands = re.split(r",\s*(?![^{]*})", rest)
        if name.startswith("ld.param"):
            parameter = re.search(r"param_(\d+)", operands[0])
            assert parameter is not None
            registers[target] = np.full(THREADS, int(parameter[1]) << 32, np.uint64)
        elif name.startswith("ld."):
            size = int(name[-2:]) // 8
            read = [memory[i][at : at + size] for i, at in places(operands[0])]
            registers[target] = np.asarray([int.from_bytes(x, "little") for x in read], np.uint64)
        elif name.startswith("st."):
            size = int(name[-2:]) // 8
            for (i, at), word in zip(places(target), value(operands[0]), strict=True):
                memory[i][at : at + size] = int(word).to_bytes(8, "little")[:size]
        elif name in OPERATIONS:
            registers[target] = OPERATIONS[name](*map(value, operands))
        else:
            raise ValueError(f"expected an instruction known to {__name__}, received {line!r}")
    return [bytes(x) for x in memory]
