"""Execution of PTX with branches, shared memory and barriers in NumPy: whole blocks of 128 threads.

Interpret mode carries out a thread's program with JAX. This runs what the compiler made of it, so
that the meaning of every instruction is checked too. Threads go their own ways and wait for each
other at barriers; of those that are not waiting, the ones furthest behind go first.

`tests/ptx.py` does the same for straight-line code that has values of bfloat16.
"""

import re
from collections.abc import Callable

import numpy as np

THREADS = 128
LANES = 32
SHARED_BYTES = 1 << 17
ALIGN = 256

U64 = np.uint64
_INSTRUCTION = re.compile(r"(?:@(!?)(%p\d+)\s+)?([a-z][\w.:]*)\s*(.*)")


def _signed(x: np.ndarray, bits: int) -> np.ndarray:
    return (x << U64(64 - bits)).view(np.int64) >> np.int64(64 - bits)


def _funnel(low: np.ndarray, high: np.ndarray, shift: np.ndarray) -> np.ndarray:
    return (low | high << U64(32)) >> (shift & U64(31))


def _permute(low: np.ndarray, high: np.ndarray, selectors: np.ndarray) -> np.ndarray:
    both, chosen = low | high << U64(32), np.zeros_like(low)
    for i in range(4):
        selector = selectors >> U64(4 * i) & U64(15)
        assert (selector < 8).all(), "a selector that repeats a sign"
        chosen |= (both >> selector * U64(8) & U64(255)) << U64(8 * i)
    return chosen


def _shift(operation: Callable[..., np.ndarray], bits: int) -> Callable[..., np.ndarray]:
    """A shift by the width or more leaves nothing."""
    return lambda a, b: np.where(b < bits, operation(a, np.minimum(b, U64(63))), U64(0))


def _lut(a: np.ndarray, b: np.ndarray, c: np.ndarray, table: np.ndarray) -> np.ndarray:
    result = np.zeros_like(a)
    for i in range(8):
        terms = [x if i >> 2 - j & 1 else ~x for j, x in enumerate((a, b, c))]
        if int(table[0]) >> i & 1:
            result |= terms[0] & terms[1] & terms[2]
    return result


def _bits_from(a: np.ndarray, start: np.ndarray, count: np.ndarray) -> np.ndarray:
    return a >> start & (U64(1) << count) - U64(1)


def _signed_bits_from(a: np.ndarray, start: np.ndarray, count: np.ndarray) -> np.ndarray:
    found = _bits_from(a, start, count)
    return found - (found >> count - U64(1) << count)


# By the instruction's first word and, where there is one, what says which kind it is. Results are
# cut to the width of the type.
OPERATIONS: dict[str, Callable[..., np.ndarray]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul.lo": np.multiply,
    "mul.wide": np.multiply,
    "mul.hi": lambda a, b: a * b >> U64(32),
    "mad.lo": lambda a, b, c: a * b + c,
    "mad.wide": lambda a, b, c: a * b + c,
    "div": np.floor_divide,
    "rem": np.remainder,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.invert,
    "min": np.minimum,
    "max": np.maximum,
    "mov": lambda a: a,
    "cvta.to": lambda a: a,
    "cvt": lambda a: a,
    "popc": lambda a: np.bitwise_count(a).astype(U64),
    "brev": lambda a: np.array([int(f"{int(x):032b}"[::-1], 2) for x in a], U64),
    "clz": lambda a: np.array([32 - int(x).bit_length() for x in a], U64),
    "bfe.s32": _signed_bits_from,
    "bfe": _bits_from,
    "lop3": _lut,
    "shf.r.wrap": _funnel,
    "prmt.b32.f4e": lambda low, high, first: _funnel(low, high, (first & U64(3)) * U64(8)),
    "prmt": _permute,
    "selp": lambda a, b, flag: np.where(flag != 0, a, b),
}

COMPARE: dict[str, Callable[..., np.ndarray]] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lo": np.less,
    "ls": np.less_equal,
    "hi": np.greater,
    "hs": np.greater_equal,
}


class Machine:
    """All threads of a launch. `arrays` are the kernel's parameters, of which it writes some."""

    def __init__(self, code: str, arrays: list[np.ndarray], blocks: int) -> None:
        self.blocks = blocks
        self.count = blocks * THREADS
        self._read(code)
        sizes = [(-(-x.nbytes // ALIGN) + 1) * ALIGN for x in arrays]
        self.places = np.cumsum([ALIGN, *sizes]).tolist()
        self.shared = self.places[-1]
        self.memory = np.full(self.shared + blocks * SHARED_BYTES, 0xAA, np.uint8)
        for array, place in zip(arrays, self.places, strict=False):
            self.memory[place : place + array.nbytes] = np.frombuffer(array.tobytes(), np.uint8)
        thread = np.arange(self.count, dtype=U64)
        self.block = thread // U64(THREADS)
        self.registers: dict[str, np.ndarray] = {
            "%tid.x": thread % U64(THREADS),
            "%ctaid.x": self.block,
            "%laneid": thread % U64(LANES),
        }
        self.place = np.zeros(self.count, np.int64)
        self.waiting = np.zeros(self.count, bool)
        self.issued = 0  # instructions, those of a warp once for all its lanes

    def _read(self, code: str) -> None:
        """Instructions in order, and where labels point."""
        self.code: list[tuple[str, str, str, list[str]]] = []
        self.labels: dict[str, int] = {}
        body = code[code.index("{", code.index(".entry")) + 1 : code.rindex("}")]
        body = re.sub(r"//.*", "", body)
        for part in re.split(r"[;\n]", re.sub(r"(\$\w+):", r"\n\1:\n", body)):
            text = part.strip()
            if text.startswith("$"):
                self.labels[text.rstrip(":")] = len(self.code)
            elif (found := _INSTRUCTION.fullmatch(text)) and not text.startswith("."):
                negated, flag, name, rest = found.groups()
                operands = re.split(r",\s*(?![^{]*})", rest) if rest else []
                self.code.append(((negated or "") + (flag or ""), name, text, operands))

    def run(self, limit: int = 10_000_000) -> None:
        """Raises: ValueError for an instruction that is not known here."""
        end = len(self.code)
        for _ in range(limit):
            ready = (self.place < end) & ~self.waiting
            if not ready.any():
                if not self.waiting.any():
                    return
                raise ValueError("threads wait at a barrier that others never reach")
            at = int(self.place[ready].min())
            self._step(at, ready & (self.place == at))
        raise ValueError(f"expected an end within {limit} instructions")

    def _step(self, at: int, active: np.ndarray) -> None:
        flag, name, text, operands = self.code[at]
        self.issued += LANES * int(active.reshape(-1, LANES).any(axis=1).sum())
        self.place[active] += 1
        if flag:
            holds = self.registers[flag.lstrip("!")] != 0
            active = active & (holds ^ flag.startswith("!"))
        self.active = np.flatnonzero(active)
        if not self.active.size:
            return
        if name.startswith("bra"):
            self.place[active] = self.labels[operands[0]]
        elif name.startswith("ret"):
            self.place[active] = len(self.code)
        elif name.startswith("bar"):
            self._wait(active)
        elif name.startswith(("ld", "st")):
            self._move(name, operands)
        elif name.startswith("shfl"):
            self._shuffle(name, operands)
        elif name.startswith("vote.sync.any"):
            flags = self._warps(self._value(operands[1])).any(axis=1)
            self._write(operands[0], np.repeat(flags, LANES).astype(U64))
        elif name.startswith("elect"):
            self._write(operands[0].split("|")[-1], self.registers["%laneid"][self.active] == 0)
        elif not name.startswith(("fence", "mbarrier", "griddepcontrol")):
            self._compute(name, operands, text)

    def _wait(self, active: np.ndarray) -> None:
        self.waiting |= active
        for block in np.unique(self.block[self.active]):
            own = self.block == block
            there = own & (self.place < len(self.code))
            if self.waiting[there].all():
                self.waiting[own] = False

    def _value(self, text: str) -> np.ndarray:
        text = text.strip()
        if text.startswith("%"):
            if text == "%nctaid.x":
                return np.full(self.active.size, self.blocks, U64)
            # What was never written is whatever the register held.
            return self.registers.setdefault(text, np.zeros(self.count, U64))[self.active]
        if not re.fullmatch(r"-?(0x[\da-f]+|\d+)", text):
            return np.zeros(self.active.size, U64)  # the start of shared memory
        return np.full(self.active.size, int(text, 0) & (1 << 64) - 1, U64)

    def _write(self, name: str, value: np.ndarray) -> None:
        self.registers.setdefault(name, np.zeros(self.count, U64))[self.active] = value

    def _addresses(self, name: str, operand: str) -> np.ndarray:
        base, _, offset = operand.strip("[]").partition("+")
        found = self._value(base).astype(np.int64) + int(offset or 0)
        if ".shared" in name:
            found = (found & 0xFFFFFFFF) + self.shared
            found += self.block[self.active].astype(np.int64) * SHARED_BYTES
            assert (found < self.memory.size).all()
        else:
            inside = (found >= ALIGN) & (found < self.shared)
            assert inside.all(), f"{name} {operand} outside of all arrays"
        return found

    def _move(self, name: str, operands: list[str]) -> None:
        if name.startswith("ld.param"):
            parameter = re.search(r"param_(\d+)", operands[1])
            assert parameter is not None
            place = np.full(self.active.size, self.places[int(parameter[1])], U64)
            self._write(operands[0], place)
            return
        size = int(re.findall(r"\d+$", name)[0]) // 8
        load = name.startswith("ld")
        values, memory = operands if load else reversed(operands)
        places = self._addresses(name, memory)
        names = values.strip("{} ").split(",")
        assert not (places % (size * len(names))).any(), f"{name} at an odd address"
        for i, register in enumerate(names):
            bytes_at = (places + i * size)[:, None] + np.arange(size)
            if load:
                wide = np.zeros((self.active.size, 8), np.uint8)
                wide[:, :size] = self.memory[bytes_at]
                self._write(register.strip(), wide.view(U64)[:, 0])
            else:
                word = self._value(register)[:, None].copy().view(np.uint8)
                self.memory[bytes_at] = word[:, :size]

    def _warps(self, values: np.ndarray) -> np.ndarray:
        """Values of the active threads by warp."""
        warps = self.active // LANES
        whole = (np.bincount(warps)[np.unique(warps)] == LANES).all()
        assert whole, "part of a warp exchanges values"
        return values.reshape(-1, LANES)

    def _shuffle(self, name: str, operands: list[str]) -> None:
        source, by, clamp = (self._value(x) for x in operands[1:4])
        lane = self.registers["%laneid"][self.active]
        mode = name.split(".")[2]
        if mode == "idx":
            other = by
        elif mode == "bfly":
            other = lane ^ by
        else:
            assert mode == "up"
            lowest = lane & (clamp >> U64(8) & U64(31))
            other = np.where(lane >= lowest + by, lane - by, lane)
        first = np.arange(self.active.size) // LANES * LANES
        self._warps(source)
        self._write(operands[0].split("|")[0], source[first + other.astype(np.int64)])

    def _compute(self, name: str, operands: list[str], text: str) -> None:
        target, *rest = operands
        head, *kinds = name.split(".")
        kind = kinds[0] if head == "prmt" else kinds[-1]
        bits = int("".join(c for c in kind if c.isdigit())) if kind != "pred" else 1
        values = [self._value(x) for x in rest]
        signed = kinds[-1].startswith("s")
        if head == "setp":
            operation = COMPARE[kinds[0]]
            mask = U64((1 << bits) - 1)
            values = [_signed(x, bits) if signed else x & mask for x in values]
            self._write(target, operation(*values).astype(U64))
            return
        mask = U64((1 << bits) - 1) if bits < 64 else U64(2**64 - 1)
        if head in ("shl", "shr"):
            values[0] &= mask
            values[1] &= U64(0xFFFFFFFF)
            if head == "shr" and signed:
                moved = _signed(values[0], bits) >> np.minimum(values[1], U64(63)).astype(np.int64)
                self._write(target, moved.view(U64) & mask)
                return
            operation = _shift(np.left_shift if head == "shl" else np.right_shift, bits)
        else:
            key = next(
                (
                    k
                    for k in (".".join([head, *kinds[:2]]), f"{head}.{kinds[0]}", head)
                    if k in OPERATIONS
                ),
                None,
            )
            if key is None:
                raise ValueError(f"expected an instruction known to {__name__}, received {text!r}")
            operation = OPERATIONS[key]
            if signed and bits < 64 and (head == "cvt" or "wide" in name or head in ("min", "max")):
                values = [_signed(x, bits).view(U64) for x in values]
            elif head not in ("lop3", "selp", "bfe", "cvt", "prmt", "mad"):
                values = [x & mask for x in values]
            if head == "cvt":
                wide = int("".join(c for c in kinds[-2] if c.isdigit()))
                values = [x if signed else x & mask for x in values]
                mask = U64((1 << wide) - 1) if wide < 64 else U64(2**64 - 1)
            if "wide" in name:
                mask = U64(2**64 - 1)
        with np.errstate(over="ignore"):
            self._write(target, operation(*values) & mask)

    def array(self, index: int, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
        """Contents of a parameter."""
        place = self.places[index]
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return self.memory[place : place + size].copy().view(dtype).reshape(shape)
