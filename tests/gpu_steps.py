"""Whole sharded prefill and decode steps of a Llama 3.1 8B, compiled for 8 GPUs from shapes alone.

python tests/gpu_steps.py           # writes gpu_steps.json: both forms of the kernels inside
python tests/gpu_steps.py FORM      # in a process that compiles for GPUs: one form, printed
python tests/gpu_steps.py float32   # there too: products of a float32 model, by their precision
"""

import collections
import json
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp

from jinfire.config import LayerSpec, ModelConfig, RopeConfig
from jinfire.programs.abstract import AbstractPrograms, Sizes
from pallas_kernels import KERNELS, Compiler, Target, run_python
from sharding import MeshSpec

RECORD = Path(__file__).with_suffix(".json")
FORMS = ("xla", "mosaic")
TARGET = "h200"
MESH = MeshSpec(pipeline=2, tensor=4)
DTYPE = jnp.bfloat16
LAYERS = 4  # of 32: a stage repeats its layers
PAGE_SIZE, TABLE_WIDTH = 64, 128  # rows of up to 8,192 tokens
DECODE_ROWS, DECODE_STEPS = 64, 8
PREFILL_ROWS, CHUNK = 2, 1024
NUM_PAGES = DECODE_ROWS * TABLE_WIDTH // 2 + 1

LLAMA_3_1_8B = ModelConfig(
    family="llama",
    vocab_size=128256,
    width=4096,
    mlp_width=14336,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    layers=(LayerSpec(),) * LAYERS,
    norm_eps=1e-5,
    rope=RopeConfig(500_000.0, "llama3", 8.0, 1.0, 4.0, 8192),
    tie_embeddings=False,
    qk_norm=False,
    max_position=131072,
)


SIZES = Sizes(
    num_pages={"full": NUM_PAGES},
    page_size=PAGE_SIZE,
    table_width=TABLE_WIDTH,
    rows=DECODE_ROWS,
    steps=DECODE_STEPS,
    prefill_rows=PREFILL_ROWS,
    chunk=CHUNK,
)


def programs(dtype=DTYPE) -> AbstractPrograms:
    devices = Target.load(TARGET).devices(MESH.size)
    return AbstractPrograms(LLAMA_3_1_8B, MESH, devices, jnp.dtype(dtype), SIZES)


def report(lowered: jax.stages.Lowered, compiler: Compiler) -> dict:
    """Memory of one device, and the kernels inside. A scan's body counts once."""
    found = compiler.compile(lowered)
    return {
        "argument_bytes": found.argument_bytes,
        "alias_bytes": found.alias_bytes,
        "temp_bytes": found.temp_bytes,
        "kernels": dict(sorted(collections.Counter(found.calls).items())),
        "spill_bytes": found.spill_bytes,
    }


def compile_steps(form: str) -> dict:
    """What `report` says of the prefill and the decode step with this form of the kernels."""
    if form == "xla":
        for kernel in KERNELS.values():
            kernel.implementations.pop("mosaic", None)
    compiler, steps = Compiler(), programs()
    return {
        "prefill": report(steps.lower_prefill(), compiler),
        "decode": report(steps.lower_decode(), compiler),
    }


def count_precisions() -> dict:
    """How many products the steps of a float32 model ask for, by precision of their operands."""
    steps = programs(jnp.float32)
    text = steps.lower_prefill().as_text() + steps.lower_decode().as_text()
    products = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    found = (re.search(r"precision = \[(\w+), (\w+)\]", line) for line in products)
    return collections.Counter(match.group(1) if match else "DEFAULT" for match in found)


def measure(form: str) -> dict:
    """`compile_steps` in a process that can."""
    return json.loads(run_python(__file__, form))


if __name__ == "__main__":
    if len(sys.argv) == 2:
        form = sys.argv[1]
        print(json.dumps(count_precisions() if form == "float32" else compile_steps(form)))
    else:
        document = {form: measure(form) for form in FORMS}
        RECORD.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
