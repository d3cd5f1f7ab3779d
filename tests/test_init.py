"""Architectures at a smaller size, and `jinfire init`, which gives them random weights."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from commands import errors, last_json, run
from editing import stored_tensors

from jinfire import Model
from jinfire.checkpoints import open_checkpoint
from jinfire.cli import console
from jinfire.models import parse_architecture, parse_config
from jinfire.models.presets import PRESETS, preset
from jinfire.models.reduction import reduced
from jinfire.models.spec import parameter_count

TINY = {"layers": 4, "hidden": 64, "heads": 4, "mlp": 96, "vocab": 300}
LATENT = {"query_rank": 32, "latent_rank": 24, "nope_dim": 16, "rope_dim": 8, "value_dim": 12}
SIZES = {
    "deepseek-v3": {**TINY, **LATENT, "experts": 12, "expert_mlp": 32},
    "kimi-k2": {**TINY, **LATENT, "experts": 4, "expert_mlp": 32},
    "kimi-k2.5": {**TINY, **LATENT, "experts": 8, "expert_mlp": 32},
    "llama-3.1-8b": TINY,
    "llama-4-scout": {**TINY, "experts": 3, "expert_mlp": 32, "head_dim": 16},
    "smollm2-135m": {**TINY, "heads": 6, "head_dim": 16},
}


def flags(sizes: dict[str, int]) -> list[object]:
    return [part for name, n in sizes.items() for part in (f"--{name.replace('_', '-')}", n)]


# --- presets


@pytest.mark.parametrize(
    ("name", "billions"),
    # As published: Kimi K2 says 1T, Scout 109B with its vision tower.
    [
        ("deepseek-v3", (670.5, 671.5)),
        ("kimi-k2", (1020, 1030)),
        ("kimi-k2.5", (1020, 1030)),
        ("llama-3.1-8b", (8.03, 8.04)),
        ("llama-4-scout", (107, 109)),
        ("smollm2-135m", (0.1345, 0.135)),
    ],
)
def test_presets_have_the_published_sizes(name, billions):
    low, high = billions
    assert low * 1e9 <= parameter_count(parse_architecture(preset(name))) <= high * 1e9


def test_presets_are_copies():
    preset("kimi-k2.5")["text_config"]["hidden_size"] = 1
    assert PRESETS["kimi-k2.5"]["text_config"]["hidden_size"] == 7168
    with pytest.raises(ValueError, match=r"one of \['deepseek-v3'.*got 'gpt'"):
        preset("gpt")


# --- reduction


@pytest.mark.parametrize("name", SIZES)
def test_the_architecture_stays(name):
    whole = parse_architecture(preset(name))
    small = parse_config(reduced(preset(name), SIZES[name]))
    assert (small.num_layers, small.width, small.vocab_size) == (4, 64, 300)
    assert small.num_heads == SIZES[name]["heads"]
    for field in ("family", "rope", "norm_eps", "tie_embeddings", "temperature", "max_position"):
        assert getattr(small, field) == getattr(whole, field), field
    if whole.latent is None:
        assert small.layers == whole.layers[:4]
    else:
        assert {layer.attention for layer in small.layers} == {"latent"}
        assert small.layers[-1].mlp == "experts"
        assert small.layers[0].mlp == "dense"
    if whole.experts is not None:
        assert small.experts is not None
        assert small.experts.router == whole.experts.router
        assert small.experts.int4 == whole.experts.int4
        assert small.experts.count == SIZES[name]["experts"]


@pytest.mark.parametrize("experts", [2, 3, 4, 6, 7, 8, 12, 16, 64, 256])
def test_groups_fit_any_number_of_experts(experts):
    small = parse_config(reduced(preset("deepseek-v3"), {"experts": experts})).experts
    assert small is not None
    assert (small.count, small.per_token) == (experts, min(8, experts))
    assert small.groups == max(n for n in range(1, 9) if experts % n == 0 and experts // n >= 2)
    if experts == 256:
        assert (small.groups, small.groups_per_token) == (8, 4)


@pytest.mark.parametrize("layers", [1, 2, 3, 5])
def test_lists_of_layers_are_cut(layers):
    scout = preset("llama-4-scout")
    scout["text_config"] |= {
        "no_rope_layers": [1, 0] * 24,
        "moe_layers": [0, 2, 4],
        "layer_types": ["chunked_attention", "full_attention"] * 24,
    }
    small = parse_config(reduced(scout, {"layers": layers}))
    assert small.layers == parse_config(scout).layers[:layers]
    deepseek = parse_config(reduced(preset("deepseek-v3"), {"layers": layers}))
    dense = min(3, layers - 1)
    kinds = ["dense"] * dense + ["experts"] * (layers - dense)
    assert [layer.mlp for layer in deepseek.layers] == kinds


def test_kv_heads_keep_their_proportion():
    sizes = {8: 2, 4: 1, 12: 3, 6: 1, 2: 1, 64: 16}
    for heads, kv_heads in sizes.items():
        small = parse_config(reduced(preset("llama-3.1-8b"), {"heads": heads, "head_dim": 16}))
        assert (small.num_heads, small.num_kv_heads) == (heads, kv_heads)


def test_what_random_weights_cannot_have_goes():
    config = preset("deepseek-v3")
    small = reduced({**config, "_source": "a note"}, {})
    assert config["quantization_config"]["quant_method"] == "fp8"
    assert "quantization_config" not in small
    assert "_source" not in small
    assert small["num_nextn_predict_layers"] == 0


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("llama-3.1-8b", "experts"),
        ("llama-3.1-8b", "expert_mlp"),
        ("llama-3.1-8b", "latent_rank"),
        ("kimi-k2", "head_dim"),
    ],
)
def test_sizes_of_another_architecture_are_refused(name, size):
    with pytest.raises(ValueError, match=rf"^{size}: expected a size that the architecture"):
        reduced(preset(name), {size: 8})


# --- the command


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.long] if name in ("kimi-k2", "deepseek-v3") else [])
        for name in SIZES
    ],
)
def test_every_architecture_runs_at_a_small_size(name, tmp_path, capsys):
    folder = tmp_path / "model"
    assert run("init", "--like", name, folder, *flags(SIZES[name]), "--json") == 0
    document = last_json(capsys.readouterr().out)
    source = open_checkpoint(folder)
    assert document["path"] == str(folder)
    assert document["config"]["family"] == source.config.family
    assert document["bytes"] == sum(source.read(n, ()).nbytes for n in source.names())
    if document["config"]["experts"]:
        bias = [name for name in source.names() if name.endswith("router.bias")]
        assert all(source.read(name, ()).dtype == np.float32 for name in bias)

    ids = np.arange(40).reshape(2, 20)
    logits = Model.from_pretrained(folder).logits(ids)
    assert logits.shape == (2, 20, 300)
    assert 0.3 < logits.std() < 3
    # Positions and predecessors count, so the layers do something.
    assert np.abs(logits[0, -1] - Model.from_pretrained(folder).logits(ids[:1, -1:])).max() > 0.1


def init(folder: Path, *more: object) -> dict[str, np.ndarray]:
    assert run("init", "--like", "llama-3.1-8b", folder, *flags(TINY), *more) == 0
    return stored_tensors(folder)


def test_weights_are_those_of_the_seed(tmp_path, capsys):
    one = init(tmp_path / "1")
    assert capsys.readouterr().out == f"{tmp_path / '1'}\n"
    same, other = init(tmp_path / "2", "--seed", 0), init(tmp_path / "3", "--seed", 1)
    wide = init(tmp_path / "4", "--dtype", "float32")
    for name, tensor in one.items():
        assert tensor.dtype == ml_dtypes.bfloat16
        assert tensor.tobytes() == same[name].tobytes()
        assert wide[name].dtype == np.float32
        assert wide[name].astype(ml_dtypes.bfloat16).tobytes() == tensor.tobytes()
        assert name.endswith("norm.weight") or np.any(tensor != other[name])
    said = [json.loads((tmp_path / n / "config.json").read_text())["torch_dtype"] for n in "14"]
    assert said == ["bfloat16", "float32"]


def test_like_a_folder_or_its_config(golden, tmp_path):
    like = golden("llama31_f32")
    assert run("init", "--like", like, tmp_path / "a", "--layers", 1, "--vocab", 50) == 0
    assert run("init", "--like", like / "config.json", tmp_path / "b", "--layers", 1) == 0
    small, whole = (open_checkpoint(tmp_path / n).config for n in "ab")
    original = open_checkpoint(like).config
    assert (small.num_layers, small.vocab_size) == (1, 50)
    assert small.eos_ids == {token % 50 for token in original.eos_ids}
    assert whole.eos_ids == original.eos_ids


@pytest.mark.parametrize(
    ("like", "more", "message"),
    [
        ("gpt", (), "--like: expected a config.json, a folder with one or one of"),
        ("kimi-k2", ("--head-dim", 8), "head_dim: expected a size that the architecture"),
        ("kimi-k2.5", ("--expert-mlp", 40), "multiple of 32"),
        ("llama-3.1-8b", ("--heads", 7), "multiple of num_attention_heads 7"),
        ("llama-3.1-8b", ("--seed", -1), "--seed: expected an integer >= 0"),
        ("llama-3.1-8b", ("--hidden", 2**20, "--vocab", 2**24), "free: expected smaller sizes"),
    ],
)
def test_what_cannot_be_made_is_one_line(like, more, message, tmp_path, capsys):
    assert run("init", "--like", like, tmp_path / "model", *more) == console.USAGE
    (line,) = errors(capsys.readouterr().err)
    assert message in line
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize(
    ("content", "more", "message"),
    [
        ([], (), "config: expected a JSON object"),
        (None, (), "config: expected a JSON object"),
        ("llama", (), "config: expected a JSON object"),
        ({}, (), "model_type: expected one of"),
        ({"num_hidden_layers": "4"}, (), "num_hidden_layers: expected an integer"),
        ({"num_attention_heads": "4"}, ("--heads", 2), "num_attention_heads: expected an integer"),
        ({"first_k_dense_replace": "1"}, ("--layers", 2), "first_k_dense_replace: expected an int"),
        ({"first_k_dense_replace": None}, ("--layers", 2), "first_k_dense_replace: expected a num"),
        ({"num_attention_heads": None}, ("--heads", 2), "heads: expected a size that the arch"),
        ({"n_group": "8"}, ("--experts", 8), "n_group: expected an integer"),
        ({"topk_group": None}, ("--experts", 8), "topk_group: expected a number"),
        ({"num_experts_per_tok": None}, ("--experts", 8), "num_experts_per_tok: expected a number"),
        ({"qk_rope_head_dim": None, "head_dim": 64}, (), "qk_rope_head_dim: expected a number"),
        ({"text_config": 3, "model_type": "kimi_k25"}, (), "text_config: expected a JSON object"),
    ],
)
def test_a_malformed_config_is_one_line(content, more, message, tmp_path, capsys):
    if isinstance(content, dict) and content:
        changed = {**preset("deepseek-v3"), **content}
        if changed["model_type"] == "kimi_k25":
            changed["architectures"] = None
        content = changed
    (tmp_path / "config.json").write_text(json.dumps(content))
    assert run("init", "--like", tmp_path, tmp_path / "model", *more) == console.USAGE
    (line,) = errors(capsys.readouterr().err)
    assert message in line
    assert not (tmp_path / "model").exists()


def test_a_missing_field_is_as_good_as_null(tmp_path, capsys):
    content = preset("deepseek-v3")
    del content["topk_group"]
    (tmp_path / "config.json").write_text(json.dumps(content))
    command = ("init", "--like", tmp_path, tmp_path / "model", "--experts", 8)
    assert run(*command) == console.USAGE
    (line,) = errors(capsys.readouterr().err)
    assert "topk_group: expected a number, as a size that is set depends on it" in line


def test_two_names_of_one_size(golden):
    content = json.loads((golden("mixtral_bf16") / "config.json").read_text())
    for size in ("mlp", "expert_mlp"):
        assert reduced(content, {size: 32})["intermediate_size"] == 32
    with pytest.raises(ValueError, match=r"mlp: expected one of .*both are intermediate_size"):
        reduced(content, {"mlp": 32, "expert_mlp": 32})


def test_a_checkpoint_is_not_overwritten(tmp_path, capsys):
    before = init(tmp_path)
    args = ("init", "--like", "llama-3.1-8b", tmp_path, *flags(TINY), "--seed", 1)
    assert run(*args) == console.USAGE
    assert "holds a checkpoint already" in errors(capsys.readouterr().err)[0]
    assert all(t.tobytes() == before[n].tobytes() for n, t in stored_tensors(tmp_path).items())
