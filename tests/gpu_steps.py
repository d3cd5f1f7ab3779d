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
from jax.sharding import PartitionSpec

from jinfire.config import LayerSpec, ModelConfig, RopeConfig
from jinfire.kvcache.pages import PagePair, Pools, pool_specs
from jinfire.layout import StageLayout
from jinfire.programs.batch import DecodeControl, DecodeRows, PrefillBatch, sampling_arrays
from jinfire.programs.decode import decode_program
from jinfire.programs.prefill import prefill_program
from jinfire.programs.runtime import REPLICATED, CompileLog, MeshModel
from pallas_kernels import KERNELS, Compiler, Target, run_python
from sharding import MeshSpec, make_mesh

RECORD = Path(__file__).with_suffix(".json")
FORMS = ("xla", "mosaic")
TARGET = "h200"
MESH = MeshSpec(pipeline=2, tensor=4)
DTYPE = jnp.bfloat16
LAYERS = 4  # of 32: a stage repeats its layers
PAGE_SIZE, TABLE_WIDTH = 64, 128  # rows of up to 8,192 tokens
DECODE_ROWS, DECODE_STEPS, GRANTS, STOP_IDS = 64, 8, 64, 8
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


class Shapes:
    """Arguments of the programs of one mesh, as shapes with shardings."""

    def __init__(self, devices: list, dtype=DTYPE) -> None:
        self.dtype = jnp.dtype(dtype)
        layout = StageLayout(LLAMA_3_1_8B, MESH)
        self.model = MeshModel(layout, make_mesh(MESH, devices), {}, CompileLog(), self.dtype)

    def shape(self, shape: tuple[int, ...], dtype, spec: PartitionSpec = REPLICATED):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self.model.sharding(spec))

    def params(self) -> dict:
        tensors = self.model.layout.tensors
        return {name: self.shape(x.shape, self.dtype, x.spec) for name, x in tensors.items()}

    def pools(self) -> Pools:
        layout = self.model.layout
        heads = (layout.kv_heads, layout.config.head_dim)
        size = (MESH.pipeline, NUM_PAGES, PAGE_SIZE, *heads)
        return {
            group: tuple(
                PagePair(*(self.shape(size, self.dtype, spec) for spec in pair)) for pair in pairs
            )
            for group, pairs in pool_specs(layout).items()
        }

    def tables(self, *rows: int) -> dict:
        groups = self.model.layout.config.kv_groups
        return {group: self.shape((*rows, TABLE_WIDTH), jnp.int32) for group in groups}

    def sampling(self, *rows: int):
        return jax.tree.map(lambda x: self.shape(x.shape, x.dtype), sampling_arrays(rows))

    def prefill(self) -> jax.stages.Lowered:
        rows = (MESH.pipeline, PREFILL_ROWS)
        batch = PrefillBatch(
            token_ids=self.shape((*rows, CHUNK), jnp.int32),
            starts=self.shape(rows, jnp.int32),
            lengths=self.shape(rows, jnp.int32),
            wants_token=self.shape(rows, jnp.bool_),
            page_tables=self.tables(*rows),
            sampling=self.sampling(*rows),
        )
        return prefill_program(self.model).lower(self.params(), self.pools(), batch)

    def decode(self) -> jax.stages.Lowered:
        rows = (DECODE_ROWS,)
        state = DecodeRows(
            token=self.shape(rows, jnp.int32),
            position=self.shape(rows, jnp.int32),
            remaining=self.shape(rows, jnp.int32),
            active=self.shape(rows, jnp.bool_),
            page_tables=self.tables(*rows),
            stop_ids=self.shape((*rows, STOP_IDS), jnp.int32),
            sampling=self.sampling(*rows),
        )
        groups = self.model.layout.config.kv_groups
        grants = {group: self.shape((GRANTS, 3), jnp.int32) for group in groups}
        control = DecodeControl(halt=self.shape(rows, jnp.bool_), grants=grants)
        program = decode_program(self.model, DECODE_STEPS, DECODE_ROWS, TABLE_WIDTH)
        return program.lower(self.params(), self.pools(), state, control)


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
    compiler, shapes = Compiler(), Shapes(Target.load(TARGET).devices(MESH.size))
    return {
        "prefill": report(shapes.prefill(), compiler),
        "decode": report(shapes.decode(), compiler),
    }


def count_precisions() -> dict:
    """How many products the steps of a float32 model ask for, by precision of their operands."""
    shapes = Shapes(Target.load(TARGET).devices(MESH.size), jnp.float32)
    text = shapes.prefill().as_text() + shapes.decode().as_text()
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
