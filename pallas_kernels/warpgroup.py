"""Operands of WGMMA whose registers a program of `pallas_kernels/threads.py` fills, one thread of a
warpgroup at a time.

Lane 4g + q of warp w has the rows 16w + g and 16w + g + 8 of an operand [64, 64], and the columns
8i + 2q and 8i + 2q + 1 of each, i = 0..7, as pairs in a word.
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

from pallas_kernels.threads import (
    THREADS,
    WARP,
    GpuThread,
    NumpyThreads,
    Word,
    Words,
    _to_words,
)

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


class NumpyWarpgroup(NumpyThreads):
    """Machine that carries out a program for all threads of a warpgroup."""

    def __init__(self, memory: Mapping[str, Any]) -> None:
        super().__init__({name: _to_words(np.asarray(x)) for name, x in memory.items()}, 0)

    def any(self, flag: np.ndarray) -> np.ndarray:
        return np.repeat(flag.reshape(-1, WARP).any(axis=1), WARP)


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
        machine = NumpyWarpgroup(memory)
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
