"""The whole steps of a layout, compiled at full size for GPUs that are not there.

    python -m jinfire.planner.steps FILE    # in a process that compiles for GPUs

`jinfire/planner/verify.py` starts that process. It prints what the compiler says as one JSON
document, and how far it is on stderr.
"""

import collections
import dataclasses
import json
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from jinfire.checkpoints.config_json import config_from_json
from jinfire.planner.footprint import Workload
from jinfire.planner.layouts import Compiled
from jinfire.programs.abstract import AbstractPrograms, Sizes
from jinfire.weights import parse_dtype
from pallas_kernels import Compiler, Target
from sharding import Collective, MeshSpec, collectives


def compile_steps(document: dict[str, Any]) -> Compiled:
    """What the compiler says, in a process that can."""
    load, mesh_spec = Workload(**document["load"]), MeshSpec(**document["mesh"])
    programs = AbstractPrograms(
        config_from_json(document["config"]),
        mesh_spec,
        Target.load(document["target"]).devices(mesh_spec.size),
        parse_dtype(document["dtype"]),
        Sizes(
            num_pages=document["num_pages"],
            page_size=load.page_size,
            table_width=load.engine.table_width,
            rows=load.rows,
            steps=load.steps,
            prefill_rows=load.prefill_rows,
            chunk=load.chunk,
        ),
        latents=document["latents"],
    )
    compiler = Compiler()
    kernels: collections.Counter[str] = collections.Counter()
    temp, seconds, weights = {}, {}, 0
    crossed: dict[str, tuple[Collective, ...]] = {}
    lowerings: dict[str, Callable[[], jax.stages.Lowered]] = {
        "prefill": programs.lower_prefill,
        "decode": programs.lower_decode,
    }
    for name, lower in lowerings.items():
        start = time.perf_counter()
        lowered = lower()
        _note(f"{name}: traced in {time.perf_counter() - start:.1f} s")
        found = compiler.compile(lowered)
        seconds[name] = time.perf_counter() - start
        # Results that are no argument in place live beside the temporary buffers.
        temp[name] = found.temp_bytes + found.output_bytes - found.alias_bytes
        weights = max(weights, found.argument_bytes - programs.pool_bytes())
        kernels.update(found.calls)
        crossed[name] = collectives(found.text)
        _note(f"{name}: compiled, {seconds[name]:.1f} s in all, {temp[name] / 2**20:.0f} MiB temp")
    return Compiled(
        weights_bytes=weights,
        prefill_temp_bytes=temp["prefill"],
        decode_temp_bytes=temp["decode"],
        prefill_s=seconds["prefill"],
        decode_s=seconds["decode"],
        host_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        kernels=dict(kernels),
        prefill_collectives=crossed["prefill"],
        decode_collectives=crossed["decode"],
    )


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    asked = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    print(json.dumps(dataclasses.asdict(compile_steps(asked))))
