"""Every Mosaic kernel in interpret mode against float64 NumPy: arithmetic, masks, NaN."""

from functools import partial

import jax
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import KERNELS
from pallas_kernels.kernel import ArgSpec, Kernel

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float32": np.float32}


def cases() -> list:
    """Every argument set that runs, in every dtype that the Mosaic form takes."""
    found = []
    for kernel in KERNELS.values():
        for spec in kernel.arg_specs:
            if spec.compile_only or "mosaic" not in kernel.implementations:
                continue
            for dtype in kernel.tolerance:
                shapes = spec.shapes(DTYPES[dtype])
                if kernel.refusal(*shapes.values(), **spec.static) is None:
                    label = f"{kernel.name}-{spec.name}-{dtype}".replace(" ", "_")
                    found.append(pytest.param(kernel, spec, dtype, id=label))
    return found


@pytest.mark.parametrize(("kernel", "spec", "dtype"), cases())
def test_matches_float64(kernel: Kernel, spec: ArgSpec, dtype: str) -> None:
    arrays = spec.make(11, DTYPES[dtype])
    want = kernel.reference(**arrays, **spec.static)
    call = jax.jit(partial(kernel, implementation="mosaic", interpret=True, **spec.static))
    got = np.asarray(call(*arrays.values()))
    assert kernel.exact or got.dtype == DTYPES[dtype]
    assert kernel.error(got, want) <= kernel.tolerance[dtype]


def test_every_kernel_runs_in_bfloat16() -> None:
    ran = {case.values[0].name for case in cases() if case.values[2] == "bfloat16"}
    assert ran == {k.name for k in KERNELS.values() if "mosaic" in k.implementations}
