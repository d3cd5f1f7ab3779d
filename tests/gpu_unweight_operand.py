"""PTX of kernels that store the operands which `unweight_operand.py` puts together in registers.

gpu_unweight_operand.py FORM -> the PTX on standard output; for a process of `toolchain.run_python`

All arrays are in global memory, the copies of a step too, a block of threads for every tile.
"""

import os
import sys
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.compiler import Target, lower_for
from pallas_kernels.unweight_matmul_mosaic import LINES, PAIRS
from pallas_kernels.unweight_operand import (
    AHEAD,
    WINDOW,
    compact_program,
    exponent_program,
    palette_program,
)
from pallas_kernels.warpgroup import load_words, operand

# Of the test's matrix.
TILES = 6
VERBATIM = 96
ESCAPES = 3000

PROGRAMS = {
    "exponent": exponent_program,
    "palette": partial(palette_program, has_verbatim=True),
    "compact": partial(compact_program, count=ESCAPES, matrices=1),
}


def shapes(form: str) -> dict[str, jax.ShapeDtypeStruct]:
    """Arrays by name, in order: what a step copies has an axis of tiles and comes first, then the
    result, then what is read where it is stored. The compiler has parameters in this order."""
    tile: dict[str, tuple[tuple[int, ...], Any]] = {"sign_mantissa": ((64, 64), jnp.uint8)}
    whole: dict[str, tuple[tuple[int, ...], Any]] = {"palette": ((1, 16), jnp.uint8)}
    if form == "exponent":
        tile["exponents"] = ((64, 64), jnp.uint8)
        whole = {}
    elif form == "palette":
        tile["codes"] = ((64, 32), jnp.uint8)
        tile["row_ahead"] = ((AHEAD,), jnp.int32)
        tile["ahead"] = ((AHEAD, 64), jnp.uint8)
        whole["verbatim_row"] = ((VERBATIM,), jnp.int32)
        whole["verbatim"] = ((VERBATIM, 64), jnp.uint8)
        whole["verbatim_first"] = ((TILES + 1,), jnp.int32)
    else:
        tile["codes"] = ((LINES, 32), jnp.uint32)
        tile["pair_first"] = ((PAIRS,), jnp.uint16)
        tile["ahead"] = ((WINDOW,), jnp.uint8)
        whole["tile_first"] = ((TILES + 1,), jnp.uint32)
        whole["escapes"] = ((ESCAPES,), jnp.uint8)
    tile["out"] = ((64, 64), jnp.bfloat16)
    tiles = {name: ((TILES, *shape), dtype) for name, (shape, dtype) in tile.items()}
    return {name: jax.ShapeDtypeStruct(*x) for name, x in {**tiles, **whole}.items()}


def inputs(form: str) -> dict[str, jax.ShapeDtypeStruct]:
    return {name: x for name, x in shapes(form).items() if name != "out"}


def body(form: str, *refs) -> None:
    *arrays, out_ref = refs
    tile = jax.lax.axis_index("tile")
    own = {
        name: ref.at[tile] if x.shape[0] == TILES else ref
        for (name, x), ref in zip(inputs(form).items(), arrays, strict=True)
    }
    scalars = {}
    if form != "exponent":
        palette = load_words(own.pop("palette"), 0, 4 if form == "palette" else 2, False)
        scalars = {"tile": tile, "offset": tile * 0, "palette": palette}
    if form == "palette":
        scalars["first_row"] = tile * 64
    if form == "compact":
        scalars["step_tile"] = tile
    out_ref[tile] = operand(PROGRAMS[form], own, (), scalars, False)


if __name__ == "__main__":
    os.environ["MOSAIC_GPU_DUMP_PTX"] = "1"
    chosen = sys.argv[1]
    kernel = plgpu.kernel(
        partial(body, chosen),
        out_type=shapes(chosen)["out"],
        grid=(TILES,),
        grid_names=("tile",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
    lower_for(kernel, list(inputs(chosen).values()), Target.load("h200")).compile()
