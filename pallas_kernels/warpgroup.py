"""Operands of WGMMA whose registers a program of `pallas_kernels/threads.py` fills, one thread of a
warpgroup at a time.

Lane 4g + q of warp w has the rows 16w + g and 16w + g + 8 of an operand [64, 64], and the columns
8i + 2q and 8i + 2q + 1 of each, i = 0..7, as pairs in a word.

In interpret mode NumPy carries out the program, all threads at a time. It is called many times in
one kernel, and compiling it each time would take longer than everything else.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import vector

from pallas_kernels.threads import THREADS, WARP, GpuThread, Word, Words

ROWS = COLUMNS = 64
HALVES = 2  # rows of a lane
PAIRS = 8  # pairs of columns that a lane has of a row

Program = Callable[..., Words]


class WarpgroupThread(GpuThread):
    """Machine that writes the instructions of a thread of one warpgroup among several."""

    def __init__(self, memory: Mapping[str, ir.Value], written: tuple[str, ...]) -> None:
        super().__init__(memory, written)
        self.thread = self.thread % THREADS

    def any(self, flag: Word) -> Word:
        """Whether the flag of any thread of the warp is set. All of them must be there."""
        return Word(
            mgpu_utils.inline_ptx(
                "vote.sync.any.pred $0, $1, 0xffffffff;",
                flag.value,
                result_types=ir.IntegerType.get_signless(1),
                convergent=True,
            )
        )


class NumpyWarpgroup:
    """Machine that carries out a program for all threads of a warpgroup.

    A load from outside an array gives a pattern that shows.
    """

    def __init__(self, memory: Mapping[str, np.ndarray]) -> None:
        self._memory = {name: _words_of(x) for name, x in memory.items()}
        self.thread = np.arange(THREADS, dtype=np.uint32)

    def word(self, number: int) -> np.ndarray:
        return np.full(THREADS, number, np.uint32)

    def _at(self, name: str, place: np.ndarray) -> np.ndarray:
        words = self._memory[name]
        found = words[np.minimum(place, len(words) - 1)]
        return np.where(place < len(words), found, np.uint32(0xDEADBEEF))

    def load(self, name: str, offset: np.ndarray, count: int = 1) -> Words:
        assert not (offset % (4 * count)).any(), "vectors are aligned"
        return [self._at(name, offset // 4 + i) for i in range(count)]

    def load_half(self, name: str, offset: np.ndarray) -> np.ndarray:
        return self._at(name, offset // 4) >> offset % 4 * 8 & 0xFFFF

    def where(self, flag: np.ndarray, yes: np.ndarray, no: np.ndarray) -> np.ndarray:
        return np.where(flag, yes, no)

    def minimum(self, one: np.ndarray, other: np.ndarray) -> np.ndarray:
        return np.minimum(one, other)

    def permute(self, low: np.ndarray, high: np.ndarray, selectors: Any) -> np.ndarray:
        chosen = np.zeros_like(low)
        for i in range(4):
            selector = (selectors + np.zeros_like(low)) >> 4 * i & 15
            assert (selector < 8).all(), "the highest bit of a selector is 0"
            source = np.where(selector < 4, low, high) >> selector % 4 * 8
            chosen |= (source & 0xFF) << 8 * i
        return chosen

    def funnel(self, low: np.ndarray, high: np.ndarray, shift: np.ndarray) -> np.ndarray:
        both = low.astype(np.uint64) | high.astype(np.uint64) << np.uint64(32)
        return (both >> (shift % 32).astype(np.uint64)).astype(np.uint32)

    def popcount(self, word: np.ndarray) -> np.ndarray:
        return np.bitwise_count(word).astype(np.uint32)

    def shuffle_up(self, word: np.ndarray, distance: int, width: int) -> np.ndarray:
        return np.where(self.thread % width >= distance, np.roll(word, distance), word)

    def any(self, flag: np.ndarray) -> np.ndarray:
        return np.repeat(flag.reshape(-1, WARP).any(axis=1), WARP)

    def loop(self, bound: np.ndarray, carry: Words, body: Callable[..., Words]) -> Words:
        for i in range(int(bound[0])):
            carry = body(self.word(i), carry)
        return carry

    def when(self, flag: np.ndarray, then: Callable[[], Words], otherwise: Words) -> Words:
        if not flag.any():
            return otherwise
        return [np.where(flag, x, y) for x, y in zip(then(), otherwise, strict=True)]


def _words_of(array: np.ndarray) -> np.ndarray:
    """The bytes of an array as words, the last filled with zeros."""
    found = array.tobytes()
    return np.frombuffer(found + bytes(-len(found) % 4), np.uint32)


def operand(
    program: Program,
    refs: Mapping[str, Any],
    shared: tuple[str, ...],
    scalars: Mapping[str, Any],
    interpret: Any,
) -> jax.Array:
    """Operand [64, 64] whose registers a program gives, as words: those of the lane's first row in
    order, then those of its second.

    The program gets a machine, on which the arrays `refs` have their names, and the scalars (a
    tuple of them too) as words. What lies in the arrays named in `shared` changes between calls.
    """
    if interpret:
        return _carry_out(program, refs, scalars)
    values, tree = jax.tree.flatten(dict(scalars))
    splat = plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(
        arg_types=(*[plgpu.RefType()] * len(refs), *[splat] * len(values)),
        return_type=plgpu.ShapeDtypeStruct(
            (ROWS, COLUMNS), jnp.bfloat16, layout=plgpu.Layout.WGMMA
        ),
    )
    def put_together(_: Any, *arguments: Any) -> Any:
        memory = dict(zip(refs, arguments, strict=False))
        own = [Word(x.registers.flat[0]) for x in arguments[len(refs) :]]
        words = program(WarpgroupThread(memory, shared), **jax.tree.unflatten(tree, own))
        pair = ir.VectorType.get((2,), ir.BF16Type.get())
        registers = np.empty((1, PAIRS, 1, 1, HALVES, 1, 1, 1, 1), dtype=object)
        for number, word in enumerate(words):
            half, i = divmod(number, PAIRS)
            one = vector.broadcast(ir.VectorType.get((1,), word.value.type), word.value)
            registers[0, i, 0, 0, half, 0, 0, 0, 0] = vector.bitcast(pair, one)
        return mgpu.FragmentedArray(
            _registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None
        )

    return put_together(*refs.values(), *values)


def _carry_out(program: Program, refs: Mapping[str, Any], scalars: Mapping[str, Any]) -> jax.Array:
    def run(memory: Mapping[str, Any], scalars: Mapping[str, Any]) -> np.ndarray:
        machine = NumpyWarpgroup({name: np.asarray(x) for name, x in memory.items()})
        own = jax.tree.map(lambda x: machine.word(int(x) & 0xFFFFFFFF), scalars)
        return np.stack(program(machine, **own), axis=1)

    shape = jax.ShapeDtypeStruct((THREADS, HALVES * PAIRS), jnp.uint32)
    memory = {name: ref[...] for name, ref in refs.items()}
    words = jax.pure_callback(run, shape, memory, dict(scalars), vmap_method="sequential")
    pairs = jax.lax.bitcast_convert_type(words, jnp.bfloat16)
    # Warp, g, q, half, i, e -> row 16w + 8 half + g, column 8i + 2q + e.
    axes = pairs.reshape(4, 8, 4, HALVES, PAIRS, 2)
    return axes.transpose(0, 3, 1, 4, 2, 5).reshape(ROWS, COLUMNS)


def load_words(ref: Any, row: Any, count: int, interpret: Any) -> Words:
    """The first words, up to four, of a row of an array uint8 [E, 16], as scalars."""
    if interpret:
        words = jax.lax.bitcast_convert_type(ref[row].reshape(4, 4), jnp.uint32)
        return list(words[:count])
    splat = plgpu.Layout.WG_SPLAT(())
    scalar = plgpu.ShapeDtypeStruct((), jnp.int32, layout=splat)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), splat), return_type=[scalar] * count)
    def load(*arguments: Any) -> list[Any]:
        _, array, row = arguments
        thread = WarpgroupThread({"array": array}, ())
        words = thread.load("array", Word(row.registers.flat[0]) * 16, 4)
        return [mgpu.FragmentedArray.splat(w.value, (), is_signed=True) for w in words[:count]]

    return load(ref, jnp.asarray(row, jnp.int32))
