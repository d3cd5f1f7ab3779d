"""Programs of single GPU threads: what Pallas has no operation for, such as a load at an index of
each thread's own.

A *program* is a Python function of a machine. On a GPU the machine writes the instructions of one
thread into a Pallas kernel. In interpret mode another one carries out the same program with JAX,
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
from jax.experimental import pallas as pl
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

    __hash__ = None


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
        loop = scf.WhileOp(kinds, [word.value for word in carry])
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
        with ir.InsertionPoint(choice.else_block):
            scf.YieldOp([word.value for word in otherwise])
        return [Word(value) for value in choice.results]


class JaxThreads:
    """Machine that carries out a program for all threads of a block with JAX.

    Memory is a dict of arrays of words, which a store replaces. A load from outside an array gives
    a pattern that shows.
    """

    def __init__(self, memory: Mapping[str, jax.Array], block: jax.Array) -> None:
        self.memory = dict(memory)
        self.thread = jnp.arange(THREADS, dtype=jnp.uint32)
        self.block = jnp.broadcast_to(block.astype(jnp.uint32), (THREADS,))
        self._active = jnp.ones(THREADS, bool)

    def word(self, number: int) -> jax.Array:
        return jnp.full(THREADS, number, jnp.uint32)

    def _at(self, name: str, place: jax.Array) -> jax.Array:
        return self.memory[name].at[place].get(mode="fill", fill_value=0xDEADBEEF)

    def load(self, name: str, offset: jax.Array, count: int = 1) -> Words:
        return [self._at(name, offset // 4 + i) for i in range(count)]

    def load_byte(self, name: str, offset: jax.Array) -> jax.Array:
        return self._at(name, offset // 4) >> offset % 4 * 8 & 0xFF

    def load_half(self, name: str, offset: jax.Array) -> jax.Array:
        return self._at(name, offset // 4) >> offset % 4 * 8 & 0xFFFF

    def store(self, name: str, offset: jax.Array, words: Words) -> None:
        size = self.memory[name].size
        for i, word in enumerate(words):
            place = jnp.where(self._active, offset // 4 + i, size)
            self.memory[name] = self.memory[name].at[place].set(word, mode="drop")

    def where(self, flag: jax.Array, yes: jax.Array, no: jax.Array) -> jax.Array:
        return jnp.where(flag, yes, no)

    def permute(self, low: jax.Array, high: jax.Array, selectors: Any) -> jax.Array:
        chosen = jnp.zeros_like(low)
        for i in range(4):
            selector = (jnp.uint32(selectors) >> 4 * i) & 15
            source = jnp.where(selector < 4, low, high) >> selector % 4 * 8
            chosen |= (source & 0xFF) << 8 * i
        return chosen

    def funnel(self, low: jax.Array, high: jax.Array, shift: jax.Array) -> jax.Array:
        by = shift % 32
        return jnp.where(by == 0, low, low >> by | high << (32 - by) % 32)

    def popcount(self, word: jax.Array) -> jax.Array:
        return jax.lax.population_count(word)

    def lowest_bit(self, word: jax.Array) -> jax.Array:
        return jax.lax.population_count((word & (~word + 1)) - 1)

    def shuffle_up(self, word: jax.Array, distance: int, width: int) -> jax.Array:
        return jnp.where(self.thread % width >= distance, jnp.roll(word, distance), word)

    def barrier(self) -> None:
        """All threads are at the same place anyway."""

    def loop(self, bound: Any, carry: Words, body: Callable[[Any, Words], Words]) -> Words:
        def step(i: jax.Array, state: tuple[Any, Words]) -> tuple[Any, Words]:
            self.memory, inner = dict(state[0]), state[1]
            after = body(jnp.broadcast_to(i.astype(jnp.uint32), (THREADS,)), inner)
            return self.memory, after

        bound = bound if isinstance(bound, int) else bound[0].astype(jnp.int32)
        self.memory, carry = jax.lax.fori_loop(0, bound, step, (self.memory, carry))
        return carry

    def repeat(
        self, carry: Words, test: Callable[[Words], Any], body: Callable[[Words], Words]
    ) -> Words:
        def step(state: Words) -> Words:
            flag = test(state)
            return [jnp.where(flag, x, y) for x, y in zip(body(state), state, strict=True)]

        return jax.lax.while_loop(lambda state: test(state).any(), step, carry)

    def when(self, flag: jax.Array, then: Callable[[], Words], otherwise: Words) -> Words:
        outer = self._active
        self._active = outer & flag
        values = then()
        self._active = outer
        return [jnp.where(flag, x, y) for x, y in zip(values, otherwise, strict=True)]


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
    constant = {name: _to_words(x) for name, x in inputs.items()}
    size = pl.cdiv(math.prod(output.shape) * np.dtype(output.dtype).itemsize, 4)
    untouched = 0xAAAAAAAA

    def step(block: jax.Array, out: jax.Array) -> jax.Array:
        memory = {**constant, "out": out}
        if shared_words:
            memory["shared"] = jnp.full(shared_words, untouched, jnp.uint32)
        threads = JaxThreads(memory, block)
        program(threads)
        return threads.memory["out"]

    words = jax.lax.fori_loop(0, blocks, step, jnp.full(size, untouched, jnp.uint32))
    narrow = jnp.dtype(f"uint{8 * np.dtype(output.dtype).itemsize}")
    flat = jax.lax.bitcast_convert_type(words, narrow).reshape(-1)[: math.prod(output.shape)]
    return jax.lax.bitcast_convert_type(flat, output.dtype).reshape(output.shape)


def _to_words(x: jax.Array) -> jax.Array:
    """The bytes of an array as words, the last filled with zeros."""
    narrow = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}")).reshape(-1)
    each = 4 // x.dtype.itemsize
    padded = jnp.pad(narrow, (0, -narrow.size % each)).reshape(-1, each)
    return jax.lax.bitcast_convert_type(padded if each > 1 else narrow, jnp.uint32).reshape(-1)
