"""Decode steps with compressed weights, compiled for GPUs that are not there, from shapes alone.

gpu_unweight_steps.py VARIANT...    # in a process that compiles for GPUs: one JSON document
"""

import collections
import dataclasses
import json
import math
import sys

import jax.numpy as jnp
from gpu_steps import LLAMA_3_1_8B, SIZES, TARGET

from jinfire.config import LayerSpec
from jinfire.models.spec import abstract_tree
from jinfire.programs.abstract import AbstractPrograms
from jinfire.unweight.policy import UnweightPolicy
from pallas_kernels import Compiler, Target
from sharding import MeshSpec

LAYERS = 2
PROJECTIONS = 7  # of a layer
MESH = MeshSpec(tensor=2)
# Small activations beside the weights: a decompressed weight would show.
MODEL = dataclasses.replace(
    LLAMA_3_1_8B,
    layers=(LayerSpec(),) * LAYERS,
    width=1024,
    mlp_width=4096,
    num_heads=8,
    vocab_size=8192,
)
STEP = dataclasses.replace(SIZES, rows=8, steps=4, num_pages={"full": 65}, table_width=8)


def programs(variant: str) -> AbstractPrograms:
    devices = Target.load(TARGET).devices(MESH.size)
    policy = UnweightPolicy.uniform(variant)
    return AbstractPrograms(MODEL, MESH, devices, jnp.dtype(jnp.bfloat16), STEP, policy)


def weight_bytes(variant: str) -> dict[str, int]:
    """What a device would hold of each compressed weight, were it decompressed."""
    layout, specs = programs(variant).model.layout, abstract_tree(MODEL)
    return {
        name: 2 * math.prod(layout.shard_shape(specs[next(filter(None, tensor.sources))]))
        for name, tensor in layout.tensors.items()
        if tensor.coded is not None
    }


def measure(variant: str, compiler: Compiler) -> dict:
    """Memory of one device, and the kernels inside, of the decode step."""
    step = compiler.compile(programs(variant).lower_decode())
    return {
        "argument_bytes": step.argument_bytes,
        "temp_bytes": step.temp_bytes,
        "spill_bytes": step.spill_bytes,
        "kernels": dict(sorted(collections.Counter(step.calls).items())),
        "weights": weight_bytes(variant),
    }


if __name__ == "__main__":
    one_compiler = Compiler()
    print(json.dumps({variant: measure(variant, one_compiler) for variant in sys.argv[1:]}))
