"""Weights and temp of a layout as the compiler counts them."""

import dataclasses
import json
import tempfile
from pathlib import Path

from jinfire.checkpoints.config_json import config_to_json
from jinfire.planner.gpus import GPUS
from jinfire.planner.layouts import Compiled, Fitting
from pallas_kernels import run_python
from sharding import Collective


def verified(found: Fitting, show_progress: bool = False) -> Fitting:
    """The layout with weights and temp as the compiler counts them.

    Raises: ValueError for a GPU that nothing is compiled for; ToolchainMissing.
    """
    name = found.gpu.name
    if found.gpu.target is None:
        kinds = ", ".join(gpu.name for gpu in GPUS.values() if gpu.target)
        raise ValueError(f"verify: expected one of {kinds}, for which kernels compile, got {name}")
    document = {
        "config": config_to_json(found.footprint.config),
        "mesh": dataclasses.asdict(found.mesh_spec),
        "latents": found.latents,
        "target": found.gpu.target,
        "dtype": found.footprint.dtype,
        "load": dataclasses.asdict(found.load),
        "num_pages": found.footprint.pool_pages(found.load),
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "steps.json"
        path.write_text(json.dumps(document), encoding="utf-8")
        text = run_python("-m", "jinfire.planner.steps", str(path), show_progress=show_progress)
    figures = json.loads(text)
    for phase in ("prefill", "decode"):
        key = f"{phase}_collectives"
        figures[key] = tuple(Collective(**each) for each in figures[key])
    return dataclasses.replace(found, compiled=Compiled(**figures))
