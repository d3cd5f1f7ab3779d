"""PTX of the kernels that decompress, for argument sets that run.

gpu_unweight.py KERNEL SPEC [KERNEL SPEC ...] -> the PTX of each on standard output, in order, with
a line `// blocks N` after each; for a process of `toolchain.run_python`
"""

import os
import sys
from functools import partial

from pallas_kernels import KERNELS
from pallas_kernels.compiler import Target, lower_for, mosaic_modules

if __name__ == "__main__":
    os.environ["MOSAIC_GPU_DUMP_PTX"] = "1"
    for name, chosen in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
        kernel = KERNELS[name]
        spec = next(spec for spec in kernel.arg_specs if spec.name == chosen)
        call = partial(kernel, implementation="mosaic", **spec.static)
        lowered = lower_for(call, list(spec.shapes().values()), Target.load("h200"))
        ((_, _, _, grid),) = mosaic_modules(lowered).values()
        lowered.compile()
        print(f"\n// blocks {grid[0]}", flush=True)
