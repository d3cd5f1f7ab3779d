"""Weights on their way to devices: memory, dtypes, and checkpoints stored on another layout."""

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from helpers import small_engine_config, tiny_config
from jax.sharding import NamedSharding
from safetensors.numpy import save_file

from jinfire import Engine, Placement, SamplingParams
from jinfire.checkpoints import open_checkpoint, restore, save
from jinfire.checkpoints.stored import stored_forms
from jinfire.config import ExpertsConfig, LatentConfig, LayerSpec
from jinfire.layout import RULES, StageLayout
from jinfire.loading import RandomSource, load_params
from jinfire.models import MODELS
from jinfire.models.spec import abstract_tree
from pallas_kernels import unpack_from_device
from sharding import MeshSpec, make_mesh, partition_spec

# A quarter of it is one tensor: room for a loader to be wasteful, and for the bound to see it.
LARGE = tiny_config(
    layers=3,
    vocab_size=16_000,
    width=1024,
    mlp_width=2816,
    num_heads=8,
    num_kv_heads=2,
    head_dim=128,
    tie_embeddings=True,
)
LARGEST_BYTES = 4 * LARGE.vocab_size * LARGE.width

# The peak is reset when all imports and the devices are there, so that only loading counts.
MEASURE = """
import sys
import jax
import numpy as np

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)

from jinfire.checkpoints import open_checkpoint
from jinfire.layout import StageLayout
from jinfire.models.spec import abstract_tree
from jinfire.programs.runtime import CompileLog, MeshModel
from sharding import MeshSpec


def status(key):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


path, dtype, pipeline, tensor = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
spec = MeshSpec(pipeline=pipeline, tensor=tensor)
devices = jax.devices()[: spec.size]
source = open_checkpoint(path)
jax.block_until_ready(jax.device_put([np.zeros(4, np.float32)] * len(devices), devices))
before = status("VmRSS")
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")
layout = StageLayout(source.config, spec)
model = MeshModel.load(source, layout, devices, jax.numpy.dtype(dtype), CompileLog())
jax.block_until_ready(model.params)
peak = status("VmHWM")
resident = sum(s.data.nbytes for a in model.params.values() for s in a.addressable_shards)
print(peak - before, resident)
"""


@pytest.fixture(scope="module")
def large_checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("large")
    generator = np.random.default_rng(0)
    tensors = {
        form.name: generator.standard_normal(form.shape, np.float32)
        for form in stored_forms(LARGE, MODELS["llama"].tensor_names).values()
    }
    save_file(tensors, folder / "model.safetensors")
    config = {
        "model_type": "llama",
        "vocab_size": LARGE.vocab_size,
        "hidden_size": LARGE.width,
        "intermediate_size": LARGE.mlp_width,
        "num_hidden_layers": LARGE.num_layers,
        "num_attention_heads": LARGE.num_heads,
        "num_key_value_heads": LARGE.num_kv_heads,
        "head_dim": LARGE.head_dim,
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(config))
    yield folder
    shutil.rmtree(folder)  # pytest would keep it for three more runs


@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(),
    reason="the peak of a process's memory can be reset and read on Linux only (/proc)",
)
@pytest.mark.parametrize(
    ("dtype", "layout"), [("float32", (1, 1)), ("float32", (2, 2)), ("bfloat16", (1, 1))], ids=str
)
def test_peak_memory_is_one_tensor_beyond_the_weights(large_checkpoint, dtype, layout):
    assert (large_checkpoint / "model.safetensors").stat().st_size >= 200e6
    command = [sys.executable, "-c", MEASURE, str(large_checkpoint), dtype, *map(str, layout)]
    root = Path(__file__).parent.parent
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    peak_bytes, resident_bytes = map(int, done.stdout.split())
    itemsize = jax.numpy.dtype(dtype).itemsize
    assert resident_bytes >= 50e6 * itemsize
    assert peak_bytes <= resident_bytes + 1.3 * LARGEST_BYTES


def placed(source, layout: tuple[int, int], dtype) -> dict[str, jax.Array]:
    spec = MeshSpec(pipeline=layout[0], tensor=layout[1])
    mesh = make_mesh(spec, jax.devices()[: spec.size])
    return load_params(source, StageLayout(source.config, spec), mesh, np.dtype(dtype))


@pytest.mark.parametrize("layout", [(1, 1), (2, 2)], ids=str)
@pytest.mark.parametrize(
    ("case", "stored", "wanted"),
    [
        ("llama32_tied_sharded_bf16", ml_dtypes.bfloat16, np.float32),
        ("llama31_f32", np.float32, ml_dtypes.bfloat16),
    ],
    ids=["bfloat16 to float32", "float32 to bfloat16"],
)
def test_stored_dtype_is_no_limit(golden, case, stored, wanted, layout):
    """Widened exactly, or rounded to nearest even, on the way."""
    source = open_checkpoint(golden(case))
    embed = source.read("embed.weight", (slice(None), slice(None)))
    assert embed.dtype == stored
    params = placed(source, layout, wanted)
    assert {array.dtype for array in params.values()} == {np.dtype(wanted)}
    loaded = np.asarray(params["embed.weight"])[: source.config.vocab_size]
    assert loaded.tobytes() == embed.astype(wanted).tobytes()

    exact = placed(source, layout, stored)
    for name, array in params.items():
        expected = np.asarray(exact[name]).astype(wanted)
        assert np.asarray(array).tobytes() == expected.tobytes(), name
    source.close()


@pytest.fixture(scope="module", params=["llama31_f32", "llama32_tied_sharded_bf16"])
def stored(request, golden, tmp_path_factory):
    """(the original, the folder it was stored in from a mesh of pipeline 2 x tensor 2)."""
    source = open_checkpoint(golden(request.param))
    arrays = {
        name: jax.device_put(source.read(name, (slice(None),) * len(source.shape(name))), sharding)
        for name, sharding in shardings(source.config, (2, 2)).items()
    }
    folder = tmp_path_factory.mktemp("store") / request.param
    save(folder, source.config, arrays)
    return source, folder


def shardings(config, layout: tuple[int, int]) -> dict[str, NamedSharding]:
    """Of whole logical tensors, on the last devices."""
    spec = MeshSpec(pipeline=layout[0], tensor=layout[1])
    mesh = make_mesh(spec, jax.devices()[-spec.size :])
    return {
        name: NamedSharding(mesh, partition_spec(param.axes, RULES))
        for name, param in abstract_tree(config).items()
    }


@pytest.mark.parametrize("layout", [(1, 4), (2, 1), (1, 1)], ids=str)
def test_stored_weights_come_back_on_another_layout(stored, layout):
    source, folder = stored
    targets = shardings(source.config, layout)
    restored = restore(folder, targets)
    for name, array in restored.items():
        original = source.read(name, (slice(None),) * array.ndim)
        assert array.sharding == targets[name]
        assert array.dtype == original.dtype
        assert np.asarray(array).tobytes() == original.tobytes(), name

    # And as a checkpoint, with the engine's own layout of stages and slots.
    dtype = original.dtype
    one, other = (placed(s, layout, dtype) for s in (source, open_checkpoint(folder)))
    assert one.keys() == other.keys()
    for name, array in one.items():
        assert np.asarray(array).tobytes() == np.asarray(other[name]).tobytes(), name


def test_engine_from_a_store_continues_alike(stored, golden):
    source, folder = stored
    with np.load(golden(folder.name) / "golden.npz") as arrays:
        prompts, expected = arrays["pad_input_ids"], arrays["pad_gen_ids"]
        lengths = arrays["pad_lengths"]
    engine = Engine.from_pretrained(
        folder,
        placement=Placement.colocated((1, 2)),
        config=small_engine_config(max_context=64),
    )
    assert engine.model_config == source.config
    params = SamplingParams(max_tokens=expected.shape[1], temperature=0)
    rows = [row[:length].tolist() for row, length in zip(prompts, lengths, strict=True)]
    outputs = engine.generate(rows, params)
    assert [output.token_ids for output in outputs] == expected.tolist()


# --- experts

INT4 = tiny_config(
    family="kimi_k2",
    width=64,
    num_heads=4,
    num_kv_heads=4,
    head_dim=16,
    latent=LatentConfig(query_rank=24, rank=16, nope_dim=8, rope_dim=8, value_dim=8),
    experts=ExpertsConfig(
        count=4, per_token=2, width=32, router="sigmoid", shared_width=32, int4=True
    ),
)
INT4 = dataclasses.replace(INT4, layers=(LayerSpec(attention="latent", mlp="experts"),) * 3)


def test_tensors_with_a_dtype_of_their_own_keep_it():
    """Where a stage has no layer, too: its zeros are as wide as the others' values."""
    source = RandomSource(INT4)
    params = placed(source, (2, 1), ml_dtypes.bfloat16)
    kinds = {
        "mlp.router.weight": ml_dtypes.bfloat16,
        "mlp.router.bias": np.float32,
        "mlp.experts.gate.packed": np.int32,
        "mlp.experts.down.scale": ml_dtypes.bfloat16,
        "mlp.shared.up.weight": ml_dtypes.bfloat16,
    }
    wide = placed(source, (2, 1), np.float32)
    for name, dtype in kinds.items():
        array = params[f"layers.1.{name}"]
        assert array.dtype == dtype
        assert not np.any(np.asarray(array[1])), "the second stage has one layer"
        stored = source.read(f"layers.1.{name}", ())
        assert np.asarray(array[0]).tobytes() == stored.astype(dtype).tobytes()
        own = abstract_tree(INT4)[f"layers.1.{name}"].dtype
        assert wide[f"layers.1.{name}"].dtype == np.dtype(own or np.float32)


def test_random_experts_are_drawn_one_by_one():
    source = RandomSource(INT4, seed=3)
    for name, spec in abstract_tree(INT4).items():
        whole = source.read(name, ())
        assert whole.shape == spec.shape
        if len(spec.shape) == 3:
            index = (slice(1, 3), slice(2, 5), slice(1, 2))
            assert source.read(name, index).tobytes() == whole[index].tobytes()
            assert source.read(name, (slice(2, 2),)).shape == (0, *spec.shape[1:])
            assert len({expert.tobytes() for expert in whole}) == spec.shape[0]
    assert np.any(source.read("embed.weight", ()) != RandomSource(INT4, 4).read("embed.weight", ()))


@pytest.mark.parametrize("int4", [True, False])
def test_random_experts_keep_the_size_of_what_they_multiply(int4):
    assert INT4.experts is not None
    config = dataclasses.replace(
        INT4, width=256, experts=dataclasses.replace(INT4.experts, width=128, int4=int4)
    )
    source = RandomSource(config)
    for name, columns in (("gate", 256), ("down", 128)):
        prefix = f"layers.0.mlp.experts.{name}"
        if int4:
            packed, scales = (source.read(f"{prefix}.{kind}", ()) for kind in ("packed", "scale"))
            assert np.all(scales > 0)
            weights = dequantise(packed, scales).astype(np.float32)
        else:
            weights = source.read(f"{prefix}.weight", ())
        assert weights.shape[-1] == columns
        assert abs(float(np.sqrt(np.mean(weights**2))) * columns**0.5 - 1) < 0.05
    bias = source.read("layers.0.mlp.router.bias", ())
    assert bias.dtype == np.float32
    assert 0 < np.abs(bias).max() < 0.1


def dequantise(packed: np.ndarray, scales: np.ndarray) -> np.ndarray:
    words, turned = map(np.asarray, unpack_from_device(jnp.asarray(packed), jnp.asarray(scales)))
    nibbles = words.view(np.uint32)[..., None] >> np.arange(0, 32, 4, dtype=np.uint32) & 15
    values = nibbles.reshape(*words.shape[:-1], -1).astype(np.float32) - 8
    return values * np.repeat(turned.astype(np.float32), 32, axis=-1)
