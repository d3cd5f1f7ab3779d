"""Checkpoints with experts: every stored form read and written, refusals by name, full sizes."""

import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from editing import edit_json, edit_tensors, stored_tensors

from jinfire.checkpoints import open_checkpoint, restore, save, save_hugging_face
from jinfire.checkpoints.config_json import config_from_json, config_to_json
from jinfire.checkpoints.int4 import device_words, published_words
from jinfire.checkpoints.source import BLOCK_BYTES
from jinfire.checkpoints.stored import FusedPart, natives_of, stored_forms
from jinfire.errors import CheckpointMismatch, UnsupportedConfig
from jinfire.models import MODELS, parse_architecture
from jinfire.models.family import Fused, Packed
from jinfire.models.presets import preset
from jinfire.models.spec import abstract_tree
from pallas_kernels import pack_for_device

# Each with the tensors in it that belong to parts that are not read.
CASES = {
    "deepseek_v3_mtp_mscale_f32": r"model\.layers\.3\.",
    "deepseek_v3_noqlora_bf16": None,
    "kimi_k2_int4": None,
    "kimi_k25_int4_sharded": r"vision_tower\.|mm_projector\.",
    "llama4_nested_scout_f32": r"vision_model\.|multi_modal_projector\.",
    "llama4_step2_bf16": None,
    "mixtral_bf16": None,
    "qwen3_moe_f32": None,
}
INT4 = "kimi_k2_int4"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
GATE = "model.layers.1.mlp.experts.{}.gate_proj"


@pytest.fixture
def copy(golden, tmp_path) -> Callable[[str], Path]:
    """A copy of a golden checkpoint, to be damaged."""

    def copied(case: str) -> Path:
        return Path(shutil.copytree(golden(case), tmp_path / case))

    return copied


def arrays_of(source) -> dict[str, np.ndarray]:
    return {name: source.read(name, ()) for name in source.names()}


def expected_value(name: str, config, stored: dict[str, np.ndarray]) -> np.ndarray:
    """A logical tensor put together from the file, whole, without the code that reads it."""
    layer = re.match(r"layers\.(\d+)\.", name)
    number = layer.group(1) if layer else ""
    pattern = re.sub(r"^layers\.\d+\.", "layers.{i}.", name)
    form = MODELS[config.family].tensor_names[pattern]
    experts = range(config.experts.count)
    if isinstance(form, Fused):
        tensor = stored[form.name.replace("{i}", number)].transpose(0, 2, 1)
        return np.split(tensor, form.parts, axis=1)[form.part]
    if isinstance(form, Packed):
        each = [form.prefix.replace("{i}", number).replace("{e}", str(e)) for e in experts]
        words = np.stack([stored[f"{own}.weight_packed"] for own in each])
        scales = np.stack([stored[f"{own}.weight_scale"] for own in each])
        packed, turned = pack_for_device(words, scales)
        return np.asarray(packed if form.suffix == "weight_packed" else turned)
    native = form.replace("{i}", number)
    if "{e}" in native:
        return np.stack([stored[native.replace("{e}", str(e))] for e in experts])
    return stored[native]


@pytest.mark.parametrize("case", CASES)
def test_every_form_reads_back_bit_for_bit(golden, case):
    stored = stored_tensors(golden(case))
    source = open_checkpoint(golden(case))
    tree = abstract_tree(source.config)
    assert source.names() == tree.keys()
    for name, spec in tree.items():
        expected = expected_value(name, source.config, stored)
        assert source.shape(name) == spec.shape == expected.shape
        read = source.read(name, ())
        assert read.dtype == expected.dtype
        assert read.tobytes() == expected.tobytes(), name


@pytest.mark.parametrize("case", CASES)
def test_slices_are_slices(golden, case):
    """Of every axis of every stack; words only in whole groups."""
    source = open_checkpoint(golden(case))
    for name in source.names():
        shape = source.shape(name)
        if len(shape) != 3:
            continue
        experts, rows, columns = shape
        group = columns if name.endswith(".packed") else 1
        whole = source.read(name, ())
        for index in [
            (slice(1, 3), slice(2, rows - 1)),
            (slice(experts - 1, experts), slice(None), slice(0, group)),
            (slice(None), slice(rows // 2, rows), slice(0, columns // 2 // 4 * 4)),
            (slice(2, 2),),
        ]:
            assert source.read(name, index).tobytes() == whole[index].tobytes(), (name, index)


def test_words_are_read_in_whole_groups(golden):
    source = open_checkpoint(golden(INT4))
    name = "layers.1.mlp.experts.gate.packed"
    whole = source.read(name, ())
    second = (slice(None), slice(None), slice(4, 8))
    assert whole.shape == (8, 64, 8)
    assert source.read(name, second).tobytes() == whole[second].tobytes()
    with pytest.raises(ValueError, match="whole groups of 32 values, 4 words"):
        source.read(name, (slice(None), slice(None), slice(2, 6)))


def test_host_and_device_order_words_alike():
    words = np.random.default_rng(0).integers(-(2**31), 2**31, (3, 7, 24), np.int32)
    scales = np.ones((3, 7, 6), ml_dtypes.bfloat16)
    expected = np.asarray(pack_for_device(words, scales)[0])
    before = words.tobytes()
    np.testing.assert_array_equal(device_words(words), expected)
    np.testing.assert_array_equal(published_words(expected), words)
    assert words.tobytes() == before
    part = words[:, ::2, 8:16]  # not contiguous
    np.testing.assert_array_equal(device_words(part), expected[:, ::2, 8:16])
    np.testing.assert_array_equal(published_words(device_words(part)), part)


# --- writing


@pytest.mark.parametrize("case", [*CASES, "qwen3_tied_f32"])
@pytest.mark.parametrize("shard_bytes", [10**9, 100_000])
def test_what_was_read_is_written_bit_for_bit(golden, tmp_path, case, shard_bytes):
    source, before = open_checkpoint(golden(case)), stored_tensors(golden(case))
    config = json.loads((golden(case) / "config.json").read_text())
    generation = json.loads((golden(case) / "generation_config.json").read_text())
    save_hugging_face(
        tmp_path / "out", config, source.config, arrays_of(source), generation, shard_bytes
    )
    after = stored_tensors(tmp_path / "out")
    skipped = re.compile(CASES.get(case) or "(?!)")
    assert after.keys() == {name for name in before if not skipped.match(name)}
    for name, tensor in after.items():
        if name.endswith("weight_shape"):  # published as int32 and as int64
            np.testing.assert_array_equal(tensor, before[name])
        else:
            assert tensor.dtype == before[name].dtype
            assert tensor.tobytes() == before[name].tobytes(), name

    files = {path.name for path in (tmp_path / "out").iterdir()}
    if shard_bytes == 10**9:
        assert files == {SINGLE, "config.json", "generation_config.json"}
    else:
        index = json.loads((tmp_path / "out" / INDEX).read_text())
        shards = set(index["weight_map"].values())
        assert len(shards) > 2
        assert files == shards | {INDEX, "config.json", "generation_config.json"}
        assert index["metadata"]["total_size"] == sum(t.nbytes for t in after.values())
    again = open_checkpoint(tmp_path / "out")
    assert again.config == source.config
    for name, array in arrays_of(source).items():
        assert again.read(name, ()).tobytes() == array.tobytes()


def test_writing_refuses_by_name(golden, tmp_path):
    source = open_checkpoint(golden(INT4))
    config = json.loads((golden(INT4) / "config.json").read_text())
    generation = json.loads((golden(INT4) / "generation_config.json").read_text())
    arrays, out = arrays_of(source), tmp_path / "out"
    packed = "layers.2.mlp.experts.down.packed"

    def write(arrays, config=config):
        save_hugging_face(out, config, source.config, arrays, generation)

    with pytest.raises(CheckpointMismatch, match=f"missing tensors: {packed}"):
        write({name: array for name, array in arrays.items() if name != packed})
    with pytest.raises(CheckpointMismatch, match=rf"another shape: {packed} \(expected"):
        write({**arrays, packed: arrays[packed][1:]})
    with pytest.raises(CheckpointMismatch, match=rf"expected dtypes int32, got {packed} \(int64"):
        write({**arrays, packed: arrays[packed].astype(np.int64)})
    with pytest.raises(ValueError, match="config_json: expected that of the model"):
        write(arrays, {**config, "routed_scaling_factor": 1.0})
    assert not out.exists()
    write(arrays)
    with pytest.raises(ValueError, match="holds a checkpoint already"):
        write(arrays)


class Failure(Exception):
    pass


class Failing(dict):
    """Arrays of which one cannot be had."""

    def __getitem__(self, name):
        if name == "final_norm.scale":
            raise Failure
        return super().__getitem__(name)


def test_a_failed_write_leaves_no_checkpoint(golden, tmp_path):
    source = open_checkpoint(golden(INT4))
    config = json.loads((golden(INT4) / "config.json").read_text())
    generation = json.loads((golden(INT4) / "generation_config.json").read_text())
    arrays = Failing(arrays_of(source))
    with pytest.raises(Failure):
        save_hugging_face(tmp_path, config, source.config, arrays, generation, 10_000)
    assert not list(tmp_path.iterdir())


# --- refusals


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(GATE.format(5) + ".weight_packed"), r"missing tensors: .*experts\.5\.g"),
        (lambda t: t.pop(GATE.format(5) + ".weight_scale"), r"missing tensors: .*weight_scale"),
        (lambda t: t.pop(GATE.format(5) + ".weight_shape"), r"missing tensors: .*weight_shape"),
        (
            lambda t: t.update({GATE.format(8) + ".weight_scale": np.ones(1, np.float32)}),
            r"unexpected tensors: model\.layers\.1\.mlp\.experts\.8\.gate_proj\.weight_scale",
        ),
        (
            lambda t: t.update({GATE.format("01") + ".weight_scale": np.ones(1, np.float32)}),
            r"unexpected tensors: .*experts\.01\.",
        ),
        (
            lambda t: t.update({GATE.format(0) + ".weight": np.ones((64, 64), np.float32)}),
            r"unexpected tensors: .*experts\.0\.gate_proj\.weight$",
        ),
        (
            lambda t: t.update({GATE.format(3) + ".weight_packed": np.ones((64, 4), np.int32)}),
            r"experts\.3\.gate_proj\.weight_packed \(expected \(64, 8\), got \(64, 4\)\)",
        ),
        (
            lambda t: t.update({GATE.format(3) + ".weight_packed": np.ones((64, 8), np.int64)}),
            r"expected dtypes int32, got .*experts\.3\.gate_proj\.weight_packed \(int64\)",
        ),
        (
            lambda t: t.update({GATE.format(3) + ".weight_scale": np.ones((64, 2), np.float32)}),
            r"expected dtypes bfloat16, got .*experts\.3\.gate_proj\.weight_scale \(float32\)",
        ),
        (
            lambda t: t.update({"model.norm.weight": np.ones(64, np.int32)}),
            r"expected dtypes float32, float16, bfloat16, got model\.norm\.weight \(int32\)",
        ),
        (
            lambda t: t.update({"model.layers.3.enorm.weight": np.ones(64, np.float32)}),
            r"unexpected tensors: model\.layers\.3\.enorm",
        ),
        (
            lambda t: t.update({"vision_tower.weight": np.ones(64, np.float32)}),
            r"unexpected tensors: vision_tower",
        ),
    ],
)
def test_wrong_tensors_are_named(copy, change, message):
    folder = copy(INT4)
    edit_tensors(folder / SINGLE, change)
    with pytest.raises(CheckpointMismatch, match=message):
        open_checkpoint(folder)


def test_a_published_shape_that_contradicts_is_refused(copy):
    folder, name = copy(INT4), GATE.format(6) + ".weight_shape"
    wrong = {name: np.array([64, 72], np.int64)}
    edit_tensors(folder / SINGLE, lambda t: t.update(wrong))
    source = open_checkpoint(folder)
    logical = "layers.1.mlp.experts.gate.packed"
    assert source.read(logical, (slice(0, 6),)).shape == (6, 64, 8)
    with pytest.raises(CheckpointMismatch, match=rf"{name}: expected \[64, 64\], got \[64, 72\]"):
        source.read(logical, ())


def test_experts_of_several_dtypes_are_refused(copy):
    folder, name = copy("mixtral_bf16"), "model.layers.1.block_sparse_moe.experts.2.w3.weight"
    edit_tensors(folder / SINGLE, lambda t: t.__setitem__(name, t[name].astype(np.float32)))
    with pytest.raises(
        CheckpointMismatch, match=r"layers\.1\.mlp\.experts\.up\.weight \(BF16, F32"
    ):
        open_checkpoint(folder)


def test_layers_of_further_tokens_are_as_many_as_the_config_says(copy):
    folder = copy("deepseek_v3_mtp_mscale_f32")
    assert open_checkpoint(folder).config.num_layers == 3
    beyond = {"model.layers.4.enorm.weight": np.ones(64, np.float32)}
    edit_tensors(folder / SINGLE, lambda t: t.update(beyond))
    with pytest.raises(CheckpointMismatch, match=r"unexpected tensors: model\.layers\.4\.enorm"):
        open_checkpoint(folder)
    edit_json(folder / "config.json", lambda c: c.update(num_nextn_predict_layers=2))
    assert open_checkpoint(folder).config.num_layers == 3
    edit_json(folder / "config.json", lambda c: c.update(num_nextn_predict_layers=0))
    with pytest.raises(CheckpointMismatch, match=r"unexpected tensors: model\.layers\.3\."):
        open_checkpoint(folder)


def test_missing_shard_names_the_experts_in_it(copy):
    folder = copy("kimi_k25_int4_sharded")
    lost = "model-00002-of-00003.safetensors"
    (folder / lost).unlink()
    with pytest.raises(CheckpointMismatch, match=rf"{lost} with tensors .*experts\.\d\."):
        open_checkpoint(folder)


def test_truncated_file_names_its_experts(copy):
    folder = copy("qwen3_moe_f32")
    path = folder / SINGLE
    path.write_bytes(path.read_bytes()[: -(10**5)])
    with pytest.raises(CheckpointMismatch, match=r"truncated tensors: .*experts\.\d\."):
        open_checkpoint(folder)


# --- memory

READ = """
import sys
from jinfire.checkpoints import open_checkpoint


def status(key):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


source = open_checkpoint(sys.argv[1])
before = status("VmRSS")
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")
read = source.read("layers.0.mlp.experts.up.weight", (slice(3, 5),))
print(status("VmHWM") - before, read.nbytes)
"""


@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(),
    reason="the peak of a process's memory can be reset and read on Linux only (/proc)",
)
@pytest.mark.parametrize("case", ["mixtral_bf16", "llama4_text_f32"])
def test_a_part_of_the_experts_costs_that_part(golden, tmp_path, case):
    """Of a stack of many tensors, and of one tensor for all of them."""
    config = json.loads((golden(case) / "config.json").read_text())
    config |= {"hidden_size": 1024, "intermediate_size": 1024, "num_local_experts": 16}
    config |= {"num_hidden_layers": 1}
    parsed = parse_architecture(config)
    arrays = {
        name: np.zeros(spec.shape, np.float32) for name, spec in abstract_tree(parsed).items()
    }
    save_hugging_face(tmp_path / "large", config, parsed, arrays)
    root = Path(__file__).parent.parent
    command = [sys.executable, "-c", READ, str(tmp_path / "large")]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    shutil.rmtree(tmp_path / "large")
    assert done.returncode == 0, done.stderr
    peak_bytes, read_bytes = map(int, done.stdout.split())
    assert read_bytes == 2 * 4 * 1024 * 1024
    # All experts are 64 MiB. Beside the result: a block, mapped and copied.
    assert peak_bytes < read_bytes + 3 * BLOCK_BYTES


# --- full size


@pytest.mark.parametrize(
    ("name", "count", "examples"),
    [
        (
            "kimi-k2.5",
            # 60 layers of 384 experts with 3 matrices of 3 tensors.
            60 * 384 * 9 + 61 * 9 + 3 + 60 * 5 + 3,
            (
                "language_model.model.layers.60.mlp.experts.383.down_proj.weight_packed",
                "language_model.model.layers.1.mlp.experts.0.up_proj.weight_shape",
                "language_model.model.layers.1.mlp.gate.e_score_correction_bias",
                "language_model.model.layers.0.mlp.gate_proj.weight",
                "language_model.lm_head.weight",
            ),
        ),
        (
            "deepseek-v3",
            58 * 256 * 3 + 61 * 9 + 3 * 3 + 58 * 5 + 3,
            (
                "model.layers.60.mlp.experts.255.gate_proj.weight",
                "model.layers.3.mlp.shared_experts.down_proj.weight",
                "model.layers.2.mlp.down_proj.weight",
                "model.layers.0.self_attn.kv_a_proj_with_mqa.weight",
            ),
        ),
        (
            "llama-4-scout",
            48 * (2 + 1 + 3 + 4 + 2) + 3,
            (
                "language_model.model.layers.47.feed_forward.experts.gate_up_proj",
                "language_model.model.layers.0.feed_forward.shared_expert.up_proj.weight",
            ),
        ),
    ],
)
def test_full_size_models_name_every_tensor_once(name, count, examples):
    config = parse_architecture(preset(name))
    forms = stored_forms(config, MODELS[config.family].tensor_names)
    assert forms.keys() == abstract_tree(config).keys()
    owners: Counter[str] = Counter()
    parts: dict[str, set[tuple[int, int]]] = {}
    for form in forms.values():
        for native, _ in natives_of(form):
            owners[native] += 1
            assert not re.search(r"[{}]", native)
            if isinstance(form, FusedPart):
                parts.setdefault(native, set()).add((form.part, form.parts))
    assert len(owners) == count
    assert set(examples) <= owners.keys()
    for native, number in owners.items():
        if number > 1:
            assert parts[native] == {(part, number) for part in range(number)}, native


# --- this project's own format


@pytest.mark.parametrize("case", [INT4, "llama4_step2_bf16", "deepseek_v3_noqlora_bf16"])
def test_store_keeps_words_and_biases(golden, tmp_path, case):
    source = open_checkpoint(golden(case))
    arrays = {name: jax.device_put(value) for name, value in arrays_of(source).items()}
    save(tmp_path / "store", source.config, arrays)
    back = open_checkpoint(tmp_path / "store")
    assert back.config == source.config
    for name, array in arrays_of(source).items():
        read = back.read(name, ())
        assert (read.dtype, read.tobytes()) == (array.dtype, array.tobytes()), name

    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    specs = abstract_tree(source.config)
    cast = restore(tmp_path / "store", dict.fromkeys(arrays, one), dtype=np.float16)
    for name, array in cast.items():
        assert array.dtype == np.dtype(specs[name].dtype or np.float16), name
        if specs[name].dtype is not None:
            assert np.asarray(array).tobytes() == np.asarray(arrays[name]).tobytes()

    packed = [name for name in arrays if name.endswith(".packed")]
    if packed:
        wrong = {**arrays, packed[0]: arrays[packed[0]].astype(np.float32)}
        with pytest.raises(CheckpointMismatch, match=rf"int32, got {packed[0]} \(float32\)"):
            save(tmp_path / "other", source.config, wrong)


@pytest.mark.parametrize("case", CASES)
def test_config_survives_json(golden, case):
    config = open_checkpoint(golden(case)).config
    assert config_from_json(json.loads(json.dumps(config_to_json(config)))) == config


@pytest.mark.parametrize(
    ("case", "part", "change", "message"),
    [
        (INT4, "experts", {"router": "hash"}, "router: expected one of"),
        (INT4, "experts", {"per_token": 9}, "num_experts_per_tok"),
        (INT4, "experts", {"groups": 3}, "expert groups"),
        (INT4, "experts", {"int4": 1}, "int4"),
        (INT4, "experts", {"count": 0}, "count"),
        (INT4, "experts", {"scaling": "2"}, "scaling"),
        (INT4, "experts", {"more": 2}, "ExpertsConfig: expected fields"),
        (INT4, "latent", {"rank": None}, "rank"),
        (INT4, "latent", {"rope_dim": 8}, "head_dim"),
        (INT4, "latent", {"query_rank": 0}, "query_rank"),
        (INT4, "rope", {"scaling": "linear"}, "scaling"),
        (INT4, "rope", {"factor": float("inf")}, "factor"),
        ("llama4_text_f32", "temperature", {"floor": 0}, "floor"),
        ("llama4_text_f32", "temperature", {"floor": 1.5}, "floor"),
        (INT4, None, {"latent": None}, "latent: expected a value"),
        (INT4, None, {"experts": None}, "experts: expected a value"),
        (INT4, None, {"experts": []}, "ExpertsConfig"),
        ("llama4_text_f32", None, {"attention_chunk": None}, "attention_chunk: expected a value"),
        ("llama4_text_f32", None, {"attention_chunk": True}, "attention_chunk"),
    ],
)
def test_stored_config_is_checked(golden, case, part, change, message):
    fields = config_to_json(open_checkpoint(golden(case)).config)
    fields = {**fields, **(change if part is None else {part: {**fields[part], **change}})}
    with pytest.raises(UnsupportedConfig, match=message):
        config_from_json(fields)
