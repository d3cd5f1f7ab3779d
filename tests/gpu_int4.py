"""PTX of a kernel that stores the weights of two groups of columns as its registers hold them.

gpu_int4.py -> the PTX on standard output; for a process of `toolchain.run_python`
"""

import os

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.compiler import Target, lower_for
from pallas_kernels.int4_matmul import WORD_LAYOUT, weights_of_words

ROWS, GROUPS = 128, 2


def body(words_ref, scales_ref, out_ref) -> None:
    words = plgpu.load(words_ref, layout=WORD_LAYOUT, optimized=False)
    for group in range(GROUPS):
        layout = plgpu.Layout.WGMMA.reduce(1)
        scales = plgpu.load(scales_ref.at[group], layout=layout, optimized=False)
        own = words[:, 4 * group : 4 * group + 4]
        out_ref[group] = weights_of_words(own, scales, interpret=False)


if __name__ == "__main__":
    os.environ["MOSAIC_GPU_DUMP_PTX"] = "1"
    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((GROUPS, ROWS, 32), jnp.bfloat16),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
    shapes = [
        jax.ShapeDtypeStruct((ROWS, 4 * GROUPS), jnp.int32),
        jax.ShapeDtypeStruct((GROUPS, ROWS), jnp.bfloat16),
    ]
    lower_for(kernel, shapes, Target.load("h200")).compile()
