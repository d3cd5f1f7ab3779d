"""Programs of single GPU threads: what Pallas has no operation for, such as a load at an index of
each thread's own.

A *program* is a Python function of a machine. On a GPU the machine writes the instructions of one
thread into a Pallas kernel. In interpret mode another one carries out the same program in NumPy,
all threads of a block at a time, so what is tested there is the program that the GPU runs, but for
the meaning of each instruction.

Words are unsigned 32-bit integers with Python's operators, flags are results of comparisons. Memory
is addressed by byte, little-endian; loads of several words are aligned to their size.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, nvvm, scf

THREADS = 128  # of a block
WARP = 32

Words = list[Any]
Shapes = Mapping[str, jax.ShapeDtypeStruct]


class Word:
    """Register of a GPU thread, or a flag where it has one bit."""

    def __init__(self, value: ir.Value) -> None:
        self.value = value

    def _apply(self, operation: Callable[..., Any], other: Any) -> "Word":
        return Word(operation(self.value, _value(other)))

    def _compare(self, predicate: arith.CmpIPredicate, other: Any) -> "Word":
        return Word(arith.cmpi(predicate, self.value, _value(other)))

    def __add__(self, other: Any) -> "Word":
        return self._apply(arith.addi, other)

    def __sub__(self, other: Any) -> "Word":
        return self._apply(arith.subi, other)

    def __mul__(self, other: Any) -> "Word":
        return self._apply(arith.muli, other)

    def __and__(self, other: Any) -> "Word":
        return self._apply(arith.andi, other)

    def __or__(self, other: Any) -> "Word":
        return self._apply(arith.ori, other)

    def __xor__(self, other: Any) -> "Word":
        return self._apply(arith.xori, other)

    def __lshift__(self, other: Any) -> "Word":
        return self._apply(arith.shli, other)

    def __rshift__(self, other: Any) -> "Word":
        return self._apply(arith.shrui, other)

    def __floordiv__(self, other: Any) -> "Word":
        return self._apply(arith.divui, other)

    def __mod__(self, other: Any) -> "Word":
        return self._apply(arith.remui, other)

    def __lt__(self, other: Any) -> "Word":
        return self._compare(arith.CmpIPredicate.ult, other)

    def __ge__(self, other: Any) -> "Word":
        return self._compare(arith.CmpIPredicate.uge, other)

    def __eq__(self, other: object) -> Any:
        return self._compare(arith.CmpIPredicate.eq, other)

    def __ne__(self, other: object) -> Any:
        return self._compare(arith.CmpIPredicate.ne, other)

    def __hash__(self) -> int:
        raise TypeError("a word has no value before its thread runs")


def _i32() -> ir.Type:
    return ir.IntegerType.get_signless(32)


def _value(word: Any) -> ir.Value:
    """A register, of a word or of a number."""
    if isinstance(word, Word):
        return word.value
    return arith.constant(_i32(), int(np.uint32(word).view(np.int32)))


class GpuThread:
    """Machine that writes the instructions of one thread of a block of 128.

    `memory` maps names to the kernel's arrays. Those in `written` may change while it runs.
    """

    def __init__(self, memory: Mapping[str, ir.Value], written: Sequence[str]) -> None:
        self._pointers = {name: mgpu_utils.memref_ptr(ref) for name, ref in memory.items()}
        self._written = frozenset(written)
        self.thread = self._index(gpu.thread_id(gpu.Dimension.x))
        self.block = self._index(gpu.block_id(gpu.Dimension.x))

    def _index(self, value: ir.Value) -> Word:
        return Word(arith.index_cast(_i32(), value))

    def word(self, number: int) -> Word:
        return Word(_value(number))

    def _place(self, name: str, offset: Word) -> ir.Value:
        wide = arith.extui(ir.IntegerType.get_signless(64), offset.value)
        byte = ir.IntegerType.get_signless(8)
        return mgpu_utils.getelementptr(self._pointers[name], [wide], byte)

    def _load(self, name: str, offset: Word, kind: ir.Type, size: int) -> Any:
        # What nothing writes may come through the cache for constants.
        constant = name not in self._written
        return llvm.load(kind, self._place(name, offset), alignment=size, invariant=constant)

    def load(self, name: str, offset: Word, count: int = 1) -> Words:
        """Words of an array, from a byte offset on."""
        if count == 1:
            return [Word(self._load(name, offset, _i32(), 4))]
        vector = self._load(name, offset, ir.VectorType.get((count,), _i32()), 4 * count)
        return [Word(llvm.extractelement(vector, _value(i))) for i in range(count)]

    def load_byte(self, name: str, offset: Word) -> Word:
        return self._load_narrow(name, offset, 8)

    def load_half(self, name: str, offset: Word) -> Word:
        return self._load_narrow(name, offset, 16)

    def _load_narrow(self, name: str, offset: Word, bits: int) -> Word:
        value = self._load(name, offset, ir.IntegerType.get_signless(bits), bits // 8)
        return Word(arith.extui(_i32(), value))

    def store(self, name: str, offset: Word, words: Words) -> None:
        assert name in self._written
        value = words[0].value
        if len(words) > 1:
            kind = ir.VectorType.get((len(words),), _i32())
            value = llvm.mlir_undef(kind)
            for i, word in enumerate(words):
                value = llvm.insertelement(value, word.value, _value(i))
        llvm.store(value, self._place(name, offset), alignment=4 * len(words))

    def where(self, flag: Word, yes: Word, no: Word) -> Word:
        return Word(arith.select(flag.value, yes.value, no.value))

    def minimum(self, one: Word, other: Word) -> Word:
        return Word(arith.minui(one.value, other.value))

    def permute(self, low: Word, high: Word, selectors: Any) -> Word:
        """Four of the eight bytes of two words: those that the lowest four nibbles name, of which
        the highest bit must be 0."""
        return Word(
            mgpu_utils.inline_ptx(
                "prmt.b32 $0, $1, $2, $3;",
                *(low.value, high.value, _value(selectors)),
                result_types=_i32(),
            )
        )

    def funnel(self, low: Word, high: Word, shift: Word) -> Word:
        """The low word of both after a shift to the right by `shift` modulo 32."""
        return Word(llvm.intr_fshr(high.value, low.value, shift.value))

    def popcount(self, word: Word) -> Word:
        return Word(llvm.intr_ctpop(word.value))

    def lowest_bit(self, word: Word) -> Word:
        """Position of the lowest bit that is set; of 0 anything."""
        return Word(llvm.intr_cttz(word.value, False))

    def shuffle_up(self, word: Word, distance: int, width: int) -> Word:
        """The word of the thread `distance` below, of `width` neighbours; the lowest get their own.

        All threads of a warp must be there.
        """
        value = nvvm.shfl_sync(
            _value(0xFFFFFFFF),
            word.value,
            _value(distance),
            _value((WARP - width) << 8),
            nvvm.ShflKind.up,
        )
        return Word(value)

    def barrier(self) -> None:
        """Waits for all threads of the block; what they wrote is there."""
        mgpu_utils.warpgroup_barrier()

    def loop(self, bound: Any, carry: Words, body: Callable[[Word, Words], Words]) -> Words:
        """`body` for 0 .. bound - 1, on words that it hands on. The bound is that of the block."""
        zero, one = _value(0), _value(1)
        loop = scf.ForOp(zero, _value(bound), one, [word.value for word in carry])
        with ir.InsertionPoint(loop.body):
            inner = [Word(value) for value in loop.inner_iter_args]
            after = body(Word(loop.induction_variable), inner)
            scf.YieldOp([word.value for word in after])
        return [Word(value) for value in loop.results]

    def repeat(
        self, carry: Words, test: Callable[[Words], Word], body: Callable[[Words], Words]
    ) -> Words:
        """`body` as long as the thread's own test holds. It writes no memory."""
        kinds = [word.value.type for word in carry]
        loop = scf.WhileOp(results_=kinds, inits=[word.value for word in carry])
        places = [ir.Location.unknown()] * len(kinds)
        before = loop.regions[0].blocks.append(*kinds, arg_locs=places)
        with ir.InsertionPoint(before):
            scf.ConditionOp(test([Word(x) for x in before.arguments]).value, before.arguments)
        after = loop.regions[1].blocks.append(*kinds, arg_locs=places)
        with ir.InsertionPoint(after):
            scf.YieldOp([word.value for word in body([Word(x) for x in after.arguments])])
        return [Word(value) for value in loop.results]

    def when(self, flag: Word, then: Callable[[], Words], otherwise: Words) -> Words:
        """What `then` gives where the thread's flag is set, else the other words."""
        choice = scf.IfOp(flag.value, [word.value.type for word in otherwise], has_else=True)
        with ir.InsertionPoint(choice.then_block):
            scf.YieldOp([word.value for word in then()])
        other = choice.else_block
        assert other is not None
        with ir.InsertionPoint(other):
            scf.YieldOp([word.value for word in otherwise])
        return [Word(value) for value in choice.results]


class NumpyThreads:
    """Machine that carries out a program for all threads of a block.

    Memory is a dict of arrays of words, which stores change. A load from outside an array gives a
    pattern that shows.
    """

    def __init__(self, memory: Mapping[str, np.ndarray], block: int) -> None:
        self._memory = memory
        self.thread = np.arange(THREADS, dtype=np.uint32)
        self.block = self.word(block)
        self._active = np.ones(THREADS, bool)

    def word(self, number: int) -> np.ndarray:
        return np.full(THREADS, number, np.uint32)

    def _at(self, name: str, place: np.ndarray) -> np.ndarray:
        words = self._memory[name]
        inside = place < len(words)
        return np.where(inside, words[np.where(inside, place, 0)], np.uint32(0xDEADBEEF))

    def load(self, name: str, offset: np.ndarray, count: int = 1) -> Words:
        assert not (offset[self._active] % (4 * count)).any()
        return [self._at(name, offset // 4 + i) for i in range(count)]

    def load_byte(self, name: str, offset: np.ndarray) -> np.ndarray:
        return self._at(name, offset // 4) >> offset % 4 * 8 & 0xFF

    def load_half(self, name: str, offset: np.ndarray) -> np.ndarray:
        assert not (offset[self._active] % 2).any()
        return self._at(name, offset // 4) >> offset % 4 * 8 & 0xFFFF

    def store(self, name: str, offset: np.ndarray, words: Words) -> None:
        own = offset[self._active]
        assert not (own % (4 * len(words))).any()
        for i, word in enumerate(words):
            self._memory[name][own // 4 + i] = word[self._active]

    def where(self, flag: np.ndarray, yes: np.ndarray, no: np.ndarray) -> np.ndarray:
        return np.where(flag, yes, no)

    def minimum(self, one: np.ndarray, other: np.ndarray) -> np.ndarray:
        return np.minimum(one, other)

    def permute(self, low: np.ndarray, high: np.ndarray, selectors: Any) -> np.ndarray:
        place = np.arange(4, dtype=np.uint32)[:, None]
        selector = np.broadcast_to(np.uint32(selectors), low.shape)[None] >> 4 * place & 15
        source = np.where(selector < 4, low[None], high[None]) >> selector % 4 * 8
        return np.bitwise_or.reduce((source & 0xFF) << 8 * place, axis=0)

    def funnel(self, low: np.ndarray, high: np.ndarray, shift: np.ndarray) -> np.ndarray:
        by = shift % 32
        # A shift by 32 bits is none.
        return low >> by | high << 1 << 31 - by

    def popcount(self, word: np.ndarray) -> np.ndarray:
        return np.bitwise_count(word).astype(np.uint32)

    def lowest_bit(self, word: np.ndarray) -> np.ndarray:
        return self.popcount((word & ~word + 1) - 1)

    def shuffle_up(self, word: np.ndarray, distance: int, width: int) -> np.ndarray:
        return np.where(self.thread % width >= distance, np.roll(word, distance), word)

    def barrier(self) -> None:
        """All threads are at the same place anyway."""

    def loop(self, bound: Any, carry: Words, body: Callable[[Any, Words], Words]) -> Words:
        for i in range(bound if isinstance(bound, int) else int(bound[0])):
            carry = body(self.word(i), carry)
        return carry

    def repeat(
        self, carry: Words, test: Callable[[Words], Any], body: Callable[[Words], Words]
    ) -> Words:
        while (flag := test(carry)).any():
            carry = [np.where(flag, x, y) for x, y in zip(body(carry), carry, strict=True)]
        return carry

    def when(self, flag: np.ndarray, then: Callable[[], Words], otherwise: Words) -> Words:
        outer = self._active
        self._active = outer & flag
        values = then() if self._active.any() else otherwise
        self._active = outer
        return [np.where(flag, x, y) for x, y in zip(values, otherwise, strict=True)]


def launch(
    program: Callable[[Any], None],
    inputs: Mapping[str, jax.Array],
    output: jax.ShapeDtypeStruct,
    *,
    blocks: int,
    shared_words: int = 0,
    name: str,
    interpret: Any = False,
) -> jax.Array:
    """The array `out` that blocks of 128 threads write, each with `shared_words` words `shared`."""
    # There are no empty buffers on a device; nothing reads these.
    inputs = {n: x if x.size else jnp.zeros(1, x.dtype) for n, x in inputs.items()}
    if interpret:
        return _interpret(program, inputs, output, blocks, shared_words)
    names = [*inputs, "out", *(["shared"] if shared_words else [])]

    def body(*refs: Any) -> None:
        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * len(refs))
        def write(_: Any, *memory: ir.Value) -> None:
            program(GpuThread(dict(zip(names, memory, strict=True)), ("out", "shared")))

        write(*refs)

    kernel = plgpu.kernel(
        body,
        out_type=output,
        grid=(blocks,),
        grid_names=("blocks",),
        scratch_types=[plgpu.SMEM((shared_words,), jnp.uint32)] if shared_words else [],
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
    return kernel(*inputs.values())


def _interpret(
    program: Callable[[Any], None],
    inputs: Mapping[str, jax.Array],
    output: jax.ShapeDtypeStruct,
    blocks: int,
    shared_words: int,
) -> jax.Array:
    size = math.prod(output.shape) * np.dtype(output.dtype).itemsize
    untouched = 0xAAAAAAAA

    def run(inputs: Mapping[str, Any]) -> np.ndarray:
        memory = {name: _to_words(np.asarray(x)) for name, x in inputs.items()}
        memory["out"] = np.full(-(-size // 4), untouched, np.uint32)
        for block in range(blocks):
            memory["shared"] = np.full(shared_words, untouched, np.uint32)
            program(NumpyThreads(memory, block))
        return memory["out"].view(np.uint8)[:size].view(output.dtype).reshape(output.shape)

    return jax.pure_callback(run, output, dict(inputs))


def _to_words(x: np.ndarray) -> np.ndarray:
    """The bytes of an array as words, the last filled with zeros."""
    data = np.ascontiguousarray(x).reshape(-1).view(np.uint8)
    return np.pad(data, (0, -len(data) % 4)).view(np.uint32)
