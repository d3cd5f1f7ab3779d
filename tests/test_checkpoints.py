"""Checkpoints read back bit for bit; damaged and contradictory ones are refused by name."""

import json
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from editing import edit_json, edit_tensors, stored_tensors
from jax.sharding import NamedSharding, PartitionSpec
from safetensors import safe_open
from safetensors.numpy import save_file

from jinfire.checkpoints import load_tokenizer, open_checkpoint, restore, save
from jinfire.checkpoints.config_json import config_from_json, config_to_json
from jinfire.checkpoints.source import BLOCK_BYTES
from jinfire.checkpoints.stored import stored_forms
from jinfire.errors import CheckpointMismatch, UnsupportedConfig
from jinfire.models import MODELS
from jinfire.models.spec import abstract_tree
from jinfire.tokenizer import Tokenizer

CASES = ("llama31_f32", "llama32_tied_sharded_bf16", "llama3_v5config_f32", "qwen3_tied_f32")
SHARDED = "llama32_tied_sharded_bf16"
INDEX = "model.safetensors.index.json"
ALL = (slice(None),)


@pytest.fixture
def copy(golden, tmp_path) -> Callable[[str], Path]:
    """A copy of a golden checkpoint, to be damaged."""

    def copied(case: str) -> Path:
        return Path(shutil.copytree(golden(case), tmp_path / case))

    return copied


# --- Hugging Face


@pytest.mark.parametrize("case", CASES)
def test_golden_checkpoints_read_back_bit_for_bit(golden, case):
    stored = stored_tensors(golden(case))
    source = open_checkpoint(golden(case))
    tree = abstract_tree(source.config)
    forms = stored_forms(source.config, MODELS[source.config.family].tensor_names)
    assert source.names() == tree.keys() == forms.keys()
    assert {form.name for form in forms.values()} == stored.keys()
    for name, spec in tree.items():
        expected = stored[forms[name].name]
        assert source.shape(name) == spec.shape == expected.shape
        read = source.read(name, ALL * len(spec.shape))
        assert read.dtype == expected.dtype
        assert read.tobytes() == expected.tobytes()
    source.close()


def test_slices_are_slices(golden):
    source = open_checkpoint(golden("llama31_f32"))
    whole = source.read("embed.weight", ALL)
    for index in [(slice(3, 9),), (slice(None), slice(1, 2)), (slice(-2, None), slice(0, 64))]:
        np.testing.assert_array_equal(source.read("embed.weight", index), whole[index])
    assert source.read("embed.weight", (slice(4, 4), slice(0, 3))).shape == (0, 3)
    assert source.read("embed.weight", (slice(0, 2), slice(5, 2))).shape == (2, 0)
    with pytest.raises(ValueError, match="steps of 1"):
        source.read("embed.weight", (slice(0, 4, 2),))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_reads_of_several_blocks_join(copy, dtype):
    """Rows beyond one copy block, in every stored dtype."""
    folder = copy("llama31_f32")
    rows = BLOCK_BYTES // (64 * np.dtype(dtype).itemsize) * 2 + 5
    table = (np.arange(rows * 64) % 2039).astype(dtype).reshape(rows, 64)
    edit_json(folder / "config.json", lambda c: c.update(vocab_size=rows))
    edit_tensors(
        folder / "model.safetensors",
        lambda t: t.update({"model.embed_tokens.weight": table, "lm_head.weight": table}),
    )
    source = open_checkpoint(folder)
    for index in [ALL, (slice(7, rows - 1), slice(3, 9))]:
        assert source.read("embed.weight", index).tobytes() == table[index].tobytes()


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
def test_memory_of_a_read_is_its_result(tmp_path, golden):
    """Mapped pages count too, so the file must not stay mapped."""
    script = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parent.parent)!r})
from jinfire.checkpoints.hugging_face import HuggingFaceSource
source = HuggingFaceSource(Path({str(tmp_path)!r}))
def peak(): return next(int(l.split()[1]) * 1024 for l in open("/proc/self/status") if "VmHWM" in l)
before = peak()
size = source.read("embed.weight", (slice(None),)).nbytes
print((peak() - before) / size)
"""
    shutil.copytree(golden("llama31_f32"), tmp_path, dirs_exist_ok=True)
    rows = 400_000
    table = np.ones((rows, 64), np.float32)
    edit_json(tmp_path / "config.json", lambda c: c.update(vocab_size=rows))
    edit_tensors(
        tmp_path / "model.safetensors",
        lambda t: t.update({"model.embed_tokens.weight": table, "lm_head.weight": table}),
    )
    completed = subprocess.run(
        [sys.executable, "-c", script], check=False, capture_output=True, text=True
    )
    assert completed.returncode == 0, completed.stderr
    assert float(completed.stdout) < 1.3


def test_index_is_the_truth(copy):
    folder = copy(SHARDED)
    save_file({"stray": np.zeros(1, np.float32)}, folder / "model-00009-of-00009.safetensors")
    with pytest.warns(UserWarning, match="model-00009-of-00009"):
        source = open_checkpoint(folder)
    assert source.names() == abstract_tree(source.config).keys()


def test_tensors_beside_the_index_are_not_read(copy):
    folder = copy(SHARDED)
    shard = folder / "model-00002-of-00003.safetensors"
    # A stale second copy of a tensor that the index places in the first shard.
    edit_tensors(
        shard,
        lambda t: t.update({"model.embed_tokens.weight": np.zeros((1, 1), np.float32)}),
    )
    with pytest.warns(UserWarning, match="model.embed_tokens.weight"):
        source = open_checkpoint(folder)
    assert np.any(source.read("embed.weight", ALL))


def test_single_file_of_another_name(copy):
    folder = copy("qwen3_tied_f32")
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    assert open_checkpoint(folder).names()
    shutil.copy(folder / "weights.safetensors", folder / "more.safetensors")
    with pytest.raises(CheckpointMismatch, match=r"more\.safetensors, weights\.safetensors"):
        open_checkpoint(folder)


def test_missing_shard_is_named_with_its_tensors(copy):
    folder = copy(SHARDED)
    (folder / "model-00003-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointMismatch, match=r"model-00003-of-00003.*model\.norm\.weight"):
        open_checkpoint(folder)


def test_stale_index_is_refused(copy):
    folder = copy(SHARDED)
    moved = {"model.norm.weight": "model-00001-of-00003.safetensors"}
    edit_json(folder / INDEX, lambda c: c["weight_map"].update(moved))
    with pytest.raises(CheckpointMismatch, match=r"00001-of-00003.*stale.*model\.norm\.weight"):
        open_checkpoint(folder)


@pytest.mark.filterwarnings("ignore:.*does not name:UserWarning")
def test_tensor_lost_from_the_index_is_missing(copy):
    folder = copy(SHARDED)
    edit_json(folder / INDEX, lambda c: c["weight_map"].pop("model.norm.weight"))
    with pytest.raises(CheckpointMismatch, match=r"missing tensors: model\.norm\.weight"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    "shard",
    ["../x.safetensors", "/etc/x.safetensors", "a/x.safetensors", "x.bin", "..", "a\\x.safetensors",
     "x\0.safetensors", 3],
)  # fmt: skip
def test_index_cannot_name_files_elsewhere(copy, shard):
    folder = copy(SHARDED)
    edit_json(folder / INDEX, lambda c: c["weight_map"].update({"model.norm.weight": shard}))
    with pytest.raises(CheckpointMismatch, match=r"model\.norm\.weight: expected the plain name"):
        open_checkpoint(folder)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"weight_map": {}}', "[" * 10**5])
def test_damaged_index_is_refused(copy, content):
    folder = copy(SHARDED)
    (folder / INDEX).write_text(content)
    with pytest.raises(CheckpointMismatch, match=r"index\.json"):
        open_checkpoint(folder)


@pytest.mark.parametrize("lost_bytes", [1, 1000, 10**5])
def test_truncated_file_names_the_tensors_it_lost(copy, lost_bytes):
    folder = copy("llama31_f32")
    path = folder / "model.safetensors"
    with safe_open(path, framework="numpy") as file:
        last = file.offset_keys()[-1]
    path.write_bytes(path.read_bytes()[:-lost_bytes])
    with pytest.raises(CheckpointMismatch, match=f"truncated tensors: .*{last}"):
        open_checkpoint(folder)


@pytest.mark.parametrize("content", [b"", b"x", b"\xff" * 64, struct.pack("<Q", 2**62) + b"{}"])
def test_garbage_is_refused(copy, content):
    folder = copy("llama31_f32")
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointMismatch, match=r"model\.safetensors"):
        open_checkpoint(folder)


def test_pickled_weights_are_not_read(copy):
    folder = copy("llama31_f32")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointMismatch, match="pickled weights are not read"):
        open_checkpoint(folder)


UP = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(UP), f"missing tensors: {UP}"),
        (lambda t: t.update({"model.extra": t[UP]}), "unexpected tensors: model.extra"),
        (lambda t: t.update({"model.layers.01.mlp.up_proj.weight": t[UP]}), r"layers\.01\."),
        (
            lambda t: t.update({f"model.layers.{'9' * 5000}.w": t[UP]}),
            r"unexpected tensors: .*99\.w",
        ),
        (lambda t: t.update({"model.layers.7.mlp.up_proj.weight": t[UP]}), r"layers\.7\."),
        (lambda t: t.update({UP: t[UP].T.copy()}), UP + r" \(expected \(160, 64\), got \(64, 160"),
        (lambda t: t.update({UP: t[UP].astype(np.int8)}), UP + r" \(I8\)"),
        (lambda t: t.update({UP: t[UP].astype(np.float64)}), UP + r" \(F64\)"),
        (lambda t: t.pop("lm_head.weight"), "missing tensors: lm_head.weight.*not tied"),
    ],
)
def test_wrong_tensors_are_named(copy, change, message):
    folder = copy("llama31_f32")
    edit_tensors(folder / "model.safetensors", change)
    with pytest.raises(CheckpointMismatch, match=message):
        open_checkpoint(folder)


def test_known_buffers_are_ignored(copy):
    folder = copy("llama31_f32")
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_tensors(folder / "model.safetensors", lambda t: t.update({name: np.zeros(4, np.float32)}))
    source = open_checkpoint(folder)
    assert source.names() == abstract_tree(source.config).keys()


def test_ties_hold_both_ways(copy):
    folder = copy("qwen3_tied_f32")
    path = folder / "model.safetensors"
    embed = "model.embed_tokens.weight"
    edit_tensors(path, lambda t: t.update({"lm_head.weight": t[embed]}))
    assert "head.weight" not in open_checkpoint(folder).names()
    edit_tensors(path, lambda t: t["lm_head.weight"].__setitem__((-1, -1), 7))
    with pytest.raises(CheckpointMismatch, match="lm_head.weight differs from " + embed):
        open_checkpoint(folder)
    edit_tensors(path, lambda t: t.update({"lm_head.weight": t[embed].astype(np.float16)}))
    with pytest.raises(CheckpointMismatch, match="lm_head.weight differs from " + embed):
        open_checkpoint(folder)


def test_what_is_not_a_checkpoint(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        open_checkpoint(tmp_path / "nowhere")
    with pytest.raises(CheckpointMismatch, match="found none of them"):
        open_checkpoint(tmp_path)
    (tmp_path / "file").write_bytes(b"PK\3\4")
    with pytest.raises(CheckpointMismatch, match="expected a GGUF file"):
        open_checkpoint(tmp_path / "file")


# --- Orbax


def arrays_of(source) -> dict[str, jax.Array]:
    return {name: jax.device_put(source.read(name, ALL)) for name in source.names()}


@pytest.mark.parametrize("case", ["qwen3_tied_f32", SHARDED])
def test_store_restores_onto_another_mesh_bit_for_bit(golden, tmp_path, case):
    source = open_checkpoint(golden(case))
    arrays = arrays_of(source)
    devices = np.array(jax.devices())
    wide = jax.sharding.Mesh(devices.reshape(8), ("a",))
    square = jax.sharding.Mesh(devices[:4].reshape(2, 2), ("a", "b"))

    def place(mesh, axes):
        rows, columns = (*axes, None)[:2]
        return {
            n: NamedSharding(mesh, PartitionSpec(*(rows, columns)[: len(source.shape(n))]))
            for n in arrays
        }

    save(tmp_path / "store", source.config, jax.device_put(arrays, place(wide, ("a",))))
    shardings = place(square, ("a", "b"))
    restored = restore(tmp_path / "store", shardings)
    assert restored.keys() == arrays.keys()
    for name, array in restored.items():
        assert array.sharding == shardings[name]
        assert array.dtype == arrays[name].dtype
        assert np.asarray(array).tobytes() == np.asarray(arrays[name]).tobytes()

    cast = restore(tmp_path / "store", shardings, dtype=np.float32)
    for name, array in cast.items():
        np.testing.assert_array_equal(array, np.asarray(arrays[name]).astype(np.float32))

    back = open_checkpoint(tmp_path / "store")
    assert back.config == source.config
    for name in back.names():
        index = ALL if len(back.shape(name)) == 1 else (slice(1, 5), slice(2, 9))
        assert back.read(name, index).tobytes() == source.read(name, index).tobytes()
    assert load_tokenizer(tmp_path / "store") is None


def test_store_holds_no_pickle_and_keeps_the_tokenizer(golden, tmp_path):
    source = open_checkpoint(golden("qwen3_tied_f32"))
    tokens = ["<|end|>", "a"]
    tokenizer = Tokenizer.from_gguf(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt-2",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [3, 1],
            "tokenizer.ggml.merges": [],
            "tokenizer.ggml.eos_token_id": 0,
        }
    )
    save(tmp_path, source.config, arrays_of(source), tokenizer)
    loaded = load_tokenizer(tmp_path)
    assert loaded is not None
    assert (loaded.encode("aa"), loaded.eos_ids) == ([1, 1], {0})
    for path in tmp_path.rglob("*"):
        assert path.suffix not in (".pkl", ".pickle")
        assert path.is_dir() or not path.read_bytes().startswith(b"\x80")


def test_store_refuses_by_name(golden, tmp_path):
    source = open_checkpoint(golden("qwen3_tied_f32"))
    arrays = arrays_of(source)
    store = tmp_path / "store"
    short = {n: a for n, a in arrays.items() if n != "final_norm.scale"}
    with pytest.raises(CheckpointMismatch, match=r"missing tensors: final_norm\.scale"):
        save(store, source.config, short)
    with pytest.raises(CheckpointMismatch, match="unexpected tensors: more"):
        save(store, source.config, {**arrays, "more": arrays["final_norm.scale"]})
    assert not store.exists()

    save(store, source.config, arrays)
    with pytest.raises(ValueError, match="holds a checkpoint already"):
        save(store, source.config, arrays)
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    with pytest.raises(CheckpointMismatch, match=r"missing final_norm\.scale"):
        restore(store, dict.fromkeys(short, one))

    def widen(content):
        content["config"]["mlp_width"] += 2

    edit_json(store / "jinfire.json", widen)
    with pytest.raises(CheckpointMismatch, match=r"layers\.0\.mlp\.up\.weight \(expected \(146"):
        open_checkpoint(store)


@pytest.mark.parametrize("damage", ["arrays/_METADATA", "arrays", "jinfire.json"])
@pytest.mark.parametrize("content", [None, "", "{}", "{"])
def test_damaged_store_is_refused(golden, tmp_path, damage, content):
    source = open_checkpoint(golden("qwen3_tied_f32"))
    save(tmp_path, source.config, arrays_of(source))
    path = tmp_path / damage
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    if content is not None:
        path.write_text(content)
    with pytest.raises(CheckpointMismatch, match=r"arrays|jinfire\.json"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("case", CASES)
def test_config_survives_json(golden, case):
    config = open_checkpoint(golden(case)).config
    assert config_from_json(json.loads(json.dumps(config_to_json(config)))) == config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"extra": 1}, "extra"),
        ({"width": "64"}, "width"),
        ({"num_heads": 3}, "num_key_value_heads"),
        ({"family": "gpt"}, "family"),
        ({"eos_ids": ["x"]}, "eos_ids"),
        ({"layers": {}}, "layers"),
        ({"layers": [{"attention": "chunked", "mlp": "dense", "kv_group": "full"}]}, "chunk"),
        ({"layers": [{"attention": "linear", "mlp": "dense", "kv_group": "full"}]}, "linear"),
        ({"layers": [{"attention": "causal", "mlp": "dense", "kv_group": "far"}]}, "far"),
        ({"layers": [{"attention": "causal", "mlp": "experts", "kv_group": "full"}]}, "experts"),
        ({"rope": None}, "RopeConfig"),
        ({"tie_embeddings": "yes"}, "tie_embeddings"),
        ({"norm_eps": 0}, "norm_eps"),
    ],
)
def test_stored_config_is_checked(golden, change, message):
    config = open_checkpoint(golden("qwen3_tied_f32")).config
    with pytest.raises(UnsupportedConfig, match=message):
        config_from_json({**config_to_json(config), **change})


FEW_EXPERTS = {"count": 4, "per_token": 2, "width": 32}
LAYER = {"attention": "causal", "mlp": "dense", "kv_group": "full"}


@pytest.mark.parametrize(
    ("case", "change", "message"),
    [
        ("llama31_f32", {"rope": {"low_freq_factor": 0}}, "rope low_freq_factor"),
        ("llama31_f32", {"rope": {"theta": 0}}, "rope theta"),
        ("llama31_f32", {"rope": {"theta": 1, "scaling": "yarn"}}, "rope_theta: .* > 1 .yarn."),
        ("deepseek_v3_f32", {"rope": {"beta_fast": 0}}, "rope beta_fast"),
        ("deepseek_v3_f32", {"rope": {"beta_slow": 1e-300}}, "rope beta_slow"),
        ("deepseek_v3_f32", {"layers": [LAYER] * 3}, "latent: expected null"),
        ("deepseek_v3_f32", {"layers": [{**LAYER, "attention": "latent"}] * 3}, "experts: .*null"),
        (
            "deepseek_v3_f32",
            {"layers": [{**LAYER, "attention": "latent", "mlp": "experts"}, LAYER]},
            "layers: expected latent attention in all or none, got none in 1",
        ),
        ("llama31_f32", {"experts": FEW_EXPERTS}, "experts: expected null"),
        ("llama31_f32", {"attention_chunk": 8}, "attention_chunk: expected null"),
        ("llama31_f32", {"temperature": {"scale": 0.1, "floor": 8}}, "temperature: expected null"),
        ("mixtral_bf16", {"experts": {"groups": 2}}, "router 'softmax': expected one group"),
        ("llama4_text_f32", {"experts": {"scaling": 2}}, "router 'scaled_input': expected weights"),
        ("llama4_text_f32", {"experts": {"normalise": True}}, "router 'scaled_input'"),
        ("kimi_k2_int4", {"width": 72}, "width: expected a multiple of 32"),
    ],
)
def test_stored_configs_that_would_fail_later_are_refused(golden, case, change, message):
    fields = config_to_json(open_checkpoint(golden(case)).config)
    for key, value in change.items():
        both = isinstance(value, dict) and isinstance(fields[key], dict)
        fields[key] = {**fields[key], **value} if both else value
    with pytest.raises(UnsupportedConfig, match=message):
        config_from_json(fields)
