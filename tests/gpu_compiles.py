"""Small Mosaic kernels compiled in a process of their own: what is refused, what is seen.

gpu_compiles.py CASE -> one JSON document on standard output
"""

import json
import sys
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import KERNELS, WORKLOADS
from pallas_kernels.compiler import COMPILE_ERRORS, Compiler, Resources, Target, lower_for
from pallas_kernels.kernel import Kernel

ROWS, COLUMNS = 64, 64
DEVICE_BYTES = 60e9  # of 141 GB: two sets of arguments are there at a time


def copy_through_shared(x: jax.Array, slots: int) -> jax.Array:
    """`x` through one of `slots` buffers of 16 KB."""

    def body(x_ref, out_ref, buffers, barrier):
        plgpu.copy_gmem_to_smem(x_ref, buffers.at[0], barrier)
        plgpu.barrier_wait(barrier)
        plgpu.copy_smem_to_gmem(buffers.at[0], out_ref)
        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(3,),
        grid_names=("copies",),
        kernel_name="copy_through_shared",
        scratch_types=[plgpu.SMEM((slots, *x.shape), x.dtype), plgpu.Barrier()],
    )(x)


def centre_rows(x: jax.Array) -> jax.Array:
    """`x` less its rows' sums, all of it in the registers of one warpgroup at a time."""

    def body(x_ref, out_ref):
        x = plgpu.load(x_ref, (), layout=plgpu.Layout.WGMMA, optimized=False)
        sums = jax.lax.broadcast_in_dim(x.sum(axis=1), x.shape, [0])
        out_ref[...] = x - sums

    return plgpu.kernel(
        body, out_type=jax.ShapeDtypeStruct(x.shape, x.dtype), kernel_name="centre_rows"
    )(x)


TWICE = Kernel(
    name="twice",
    reference=lambda x: 2 * x,
    implementations={
        "xla": lambda x: x + x,
        "mosaic": lambda x: copy_through_shared(x, 1),
    },
    arg_specs=(),
    tolerance={},
    flops=lambda x: x.size,
    bytes=lambda x: 2 * x.size * 4,
    unsupported=lambda x: None if x.dtype == jnp.float32 else f"{x.dtype} data",
)


def report(found: Resources) -> dict:
    return {
        "calls": list(found.calls),
        "launches": [
            {
                "name": launch.name,
                "registers": launch.registers,
                "spill_bytes": launch.spill_bytes,
                "shared_bytes": launch.shared_bytes,
                "threads": launch.threads,
                "grid": launch.grid,
                "blocks_per_sm": launch.blocks_per_sm,
            }
            for launch in found.launches
        ],
    }


def compiled(function, dtype=jnp.float32, columns: int = COLUMNS) -> dict:
    """The same program for both chips; the second time, nothing is assembled."""
    compiler = Compiler()
    shape = jax.ShapeDtypeStruct((ROWS, columns), dtype)
    found = {
        name: report(compiler.compile(lower_for(function, [shape], Target.load(name))))
        for name in ("h100", "h200")
    }
    assert found["h100"] == found["h200"]
    return found["h200"]


CASES = {
    "fits": lambda: compiled(lambda x: copy_through_shared(x, 13)),
    "overflows": lambda: compiled(lambda x: copy_through_shared(x, 15)),
    "spills": lambda: compiled(centre_rows, columns=512),
    "dispatched": lambda: compiled(TWICE),
    "unsupported": lambda: compiled(TWICE, jnp.bfloat16),
}


def workload_problems() -> list[str]:
    """What `make gpu-check` will run on an H200 and either form of its kernel does not compile."""
    compiler, target, found = Compiler(), Target.load("h200"), []
    for workload in WORKLOADS:
        for form in ("mosaic", "xla"):
            call = partial(KERNELS[workload.kernel], implementation=form, **workload.static)
            name = f"{workload.kernel}, {workload.name}, {form}"
            try:
                resources = compiler.compile(
                    lower_for(call, list(workload.shapes().values()), target)
                )
            except COMPILE_ERRORS as error:
                found.append(f"{name}: {error}")
                continue
            memory = resources.argument_bytes + resources.temp_bytes
            if resources.spill_bytes or memory > DEVICE_BYTES:
                found.append(f"{name}: spills {resources.spill_bytes}, takes {memory} bytes")
    return found


def main(case: str) -> dict:
    try:
        return CASES[case]()
    except COMPILE_ERRORS as error:
        return {"error": str(error)}


if __name__ == "__main__":
    if sys.argv[1:] == ["workloads"]:
        print(json.dumps(workload_problems()))
    else:
        print(json.dumps({case: main(case) for case in CASES}))
