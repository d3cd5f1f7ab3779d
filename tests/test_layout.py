"""A model's tensors on a mesh: what lies where, what is padded, and what is refused in words."""

import dataclasses
import re

import jax
import numpy as np
import pytest
from helpers import Oracle, random_prompts, small_engine_config, tiny_config, tiny_source

from jinfire import Engine, ModelConfig, Placement, SamplingParams
from jinfire.config import ExpertsConfig, LatentConfig, LayerSpec, RopeConfig
from jinfire.kvcache.pages import group_layers
from jinfire.layout import StageLayout
from jinfire.loading import RandomSource, load_params
from jinfire.models.spec import abstract_tree, parameter_count
from sharding import MeshSpec, make_mesh

MODEL = tiny_config(layers=5)
QWEN = tiny_config(layers=3, num_heads=4, head_dim=12, qk_norm=True, tie_embeddings=True)
LAYOUTS = [(1, 1), (1, 2), (2, 1), (2, 2), (1, 4), (4, 1), (5, 1), (1, 8), (2, 4), (4, 2), (3, 2)]


def load(source, pipeline: int, tensor: int) -> tuple[StageLayout, dict[str, jax.Array]]:
    spec = MeshSpec(pipeline=pipeline, tensor=tensor)
    layout = StageLayout(source.config, spec)
    mesh = make_mesh(spec, jax.devices()[: spec.size])
    return layout, load_params(source, layout, mesh, np.dtype(np.float32))


def logical(layout: StageLayout, params: dict[str, jax.Array]) -> dict[str, np.ndarray]:
    """The model's tensors put together again; what only pads must be zero, copies equal."""
    config, result = layout.config, {}
    for name, array in params.items():
        whole = np.asarray(array)
        parts = {name: whole}
        if name.startswith("layers."):
            _, slot, rest = name.split(".", 2)
            parts = {}
            for stage, part in enumerate(whole):
                layer = layout.layer_at(stage, int(slot))
                if layer is None:
                    assert not part.any()
                else:
                    parts[f"layers.{layer}.{rest}"] = part
        for key, part in parts.items():
            if key in ("embed.weight", "head.weight"):
                assert not part[config.vocab_size :].any()
                part = part[: config.vocab_size]
            if key.endswith(("attention.key.weight", "attention.value.weight")):
                copies = layout.kv_heads // config.num_kv_heads
                heads = part.reshape(config.num_kv_heads, copies, config.head_dim, -1)
                assert (heads == heads[:, :1]).all()
                part = heads[:, 0].reshape(-1, config.width)
            result[key] = part
    return result


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("model", [MODEL, QWEN], ids=["untied", "tied with qk norm"])
def test_parts_make_up_the_model_on_every_layout(model, layout):
    """The same weights wherever they are made, for they are random by name alone."""
    pipeline, tensor = layout
    if pipeline > model.num_layers or model.num_heads % tensor:
        with pytest.raises(ValueError, match="cannot be split"):
            StageLayout(model, MeshSpec(pipeline=pipeline, tensor=tensor))
        return
    source = tiny_source(model)
    stages, params = load(source, pipeline, tensor)
    tensors = logical(stages, params)
    assert tensors.keys() == source.names() == abstract_tree(model).keys()
    for name, values in tensors.items():
        index = (slice(None),) * values.ndim
        np.testing.assert_array_equal(values, source.read(name, index), err_msg=name)

    # Every matrix is really cut: its shard has the share of one device.
    for name, array in params.items():
        (shard,) = {shard.data.shape for shard in array.addressable_shards}
        parts = array.size // int(np.prod(shard))
        if name in ("embed.weight", "head.weight"):
            assert parts == pipeline * tensor
        else:
            matrix = name.endswith(".weight")
            stacked = name.startswith("layers.")
            assert parts == (tensor if matrix else 1) * (pipeline if stacked else 1)


def test_stages_are_runs_of_whole_layers():
    layout = StageLayout(tiny_config(layers=61), MeshSpec(pipeline=8))
    assert layout.counts == (8, 8, 8, 8, 8, 7, 7, 7)
    assert layout.slots == 8
    placed = [layout.layer_at(stage, slot) for stage in range(8) for slot in range(8)]
    assert [layer for layer in placed if layer is not None] == list(range(61))
    assert StageLayout(tiny_config(layers=30), MeshSpec(pipeline=4)).counts == (8, 8, 7, 7)


DENSE, EXPERTS = LayerSpec(), LayerSpec(mlp="experts")
CHUNKED = LayerSpec("chunked", "experts", "local")
UNROTATED = LayerSpec("unrotated", "experts")
PATTERNS = {
    "Kimi K2": (DENSE,) + (EXPERTS,) * 60,
    "DeepSeek-V3": (DENSE,) * 3 + (EXPERTS,) * 58,
    "Llama 4 Scout": (CHUNKED, CHUNKED, CHUNKED, UNROTATED) * 12,
    "Llama 4 Maverick": (
        dataclasses.replace(CHUNKED, mlp="dense"),
        CHUNKED,
        dataclasses.replace(CHUNKED, mlp="dense"),
        UNROTATED,
    )
    * 12,
}


@pytest.mark.parametrize(
    ("name", "pipeline", "slots"),
    [
        ("Kimi K2", 2, 31),
        ("Kimi K2", 4, 16),
        ("Kimi K2", 8, 9),  # the dense layer and 8 of experts, as on the second stage
        ("DeepSeek-V3", 2, 33),
        ("DeepSeek-V3", 4, 18),
        ("DeepSeek-V3", 8, 11),
        ("Llama 4 Scout", 2, 24),
        ("Llama 4 Scout", 3, 16),
        ("Llama 4 Scout", 4, 12),
        ("Llama 4 Scout", 8, 8),  # ccc u cc and c u ccc u
        ("Llama 4 Scout", 48, 2),
        ("Llama 4 Maverick", 4, 12),
        ("Llama 4 Maverick", 5, 12),
        ("Llama 4 Maverick", 7, 10),
        ("Llama 4 Maverick", 8, 8),
        ("Llama 4 Maverick", 9, 8),
    ],
)
def test_slots_of_mixed_layers(name, pipeline, slots):
    layers = PATTERNS[name]
    experts = ExpertsConfig(count=8, per_token=1, width=16)
    model = dataclasses.replace(tiny_config(), layers=layers, attention_chunk=8, experts=experts)
    layout = StageLayout(model, MeshSpec(pipeline=pipeline))
    assert layout.slots == len(layout.slot_specs) == slots
    assert layout.padded_slots == slots * pipeline - len(layers)
    placed = [[layout.layer_at(stage, slot) for slot in range(slots)] for stage in range(pipeline)]
    held = [[layer for layer in stage if layer is not None] for stage in placed]
    assert [layer for stage in held for layer in stage] == list(range(len(layers)))
    assert tuple(map(len, held)) == layout.counts
    for stage in placed:
        for slot, layer in enumerate(stage):
            assert layer is None or layers[layer] == layout.slot_specs[slot]
    assert all(any(stage[slot] is not None for stage in placed) for slot in range(slots))
    # What each KV group holds, slot by slot, is every layer of it once.
    for group, stages in group_layers(layout).items():
        held = [layer for stage in stages for layer in stage if layer is not None]
        assert held == [i for i, layer in enumerate(layers) if layer.kv_group == group]


# --- Refusals


class Unread(RandomSource):
    """A source of which nothing may be read, because the placement is refused first."""

    def read(self, name, index):
        raise AssertionError(f"{name} was read")


REFUSED = {
    "query heads": (
        tiny_config(num_heads=9, num_kv_heads=3, head_dim=4),
        (1, 2),
        "9 query heads and 3 kv heads, mlp_width 48 cannot be split over tensor=2; "
        "valid sizes: 1, 3",
    ),
    "kv heads": (
        tiny_config(num_heads=12, num_kv_heads=3),
        (1, 4),
        "12 query heads and 3 kv heads, mlp_width 48 cannot be split over tensor=4; "
        "valid sizes: 1, 3, 6, 12",
    ),
    "mlp": (
        tiny_config(mlp_width=50),
        (1, 4),
        "8 query heads and 2 kv heads, mlp_width 50 cannot be split over tensor=4; "
        "valid sizes: 1, 2",
    ),
    "stages": (
        MODEL,
        (6, 1),
        "5 layers cannot be split over pipeline=6; valid sizes: 1 to 5",
    ),
    "experts": (
        MODEL,
        (1, 1, 2),
        "expert axis: expected 1 for the dense model family 'llama', got 2",
    ),
}


@pytest.mark.parametrize("side", ["colocated", "prefill", "decode"])
@pytest.mark.parametrize("case", REFUSED)
def test_impossible_layouts_are_refused_before_any_weight_is_read(case, side):
    model, layout, message = REFUSED[case]
    placement = {
        "colocated": lambda: Placement.colocated(layout),
        "prefill": lambda: Placement.disaggregated(layout, (1, 1)),
        "decode": lambda: Placement.disaggregated((1, 1), layout),
    }[side]()
    with pytest.raises(ValueError, match=re.escape(message)):
        Engine(Unread(model), placement=placement, config=small_engine_config())


SPARSE = dataclasses.replace(
    tiny_config(),
    family="experts",
    layers=(EXPERTS,) * 5,
    mlp_width=49,  # of no layer
    experts=ExpertsConfig(count=6, per_token=2, width=10, shared_width=48),
)
REFUSED_EXPERTS = {
    "number": (
        {},
        (1, 1, 4),
        "6 experts cannot be split over expert=4; valid sizes: 1, 2, 3, 6",
    ),
    "insides": (
        {},
        (1, 4),
        "expert MLP width 10 cannot be split over tensor=4; valid sizes: 1, 2, 5, 10",
    ),
    "insides in int4": (
        {"width": 96, "int4": True},
        (1, 2),
        "expert MLP width 96 in units of 32 cannot be split over tensor=2; valid sizes: 1, 3",
    ),
    "heads over both axes": (
        {},
        (1, 2, 3),
        "8 query heads and 2 kv heads, shared_width 48 cannot be split over expert=3 x tensor=2; "
        "valid products: 1, 2, 4, 8",
    ),
}


@pytest.mark.parametrize("case", REFUSED_EXPERTS)
def test_impossible_layouts_of_experts_are_refused(case):
    changes, (pipeline, tensor, *expert), message = REFUSED_EXPERTS[case]
    experts = dataclasses.replace(SPARSE.experts, **changes)
    model = dataclasses.replace(SPARSE, experts=experts)
    spec = MeshSpec(pipeline=pipeline, tensor=tensor, expert=next(iter(expert), 1))
    with pytest.raises(ValueError, match=re.escape(message)):
        StageLayout(model, spec)
    StageLayout(model, MeshSpec(expert=2))  # what does divide is taken


def test_all_devices_of_a_stage_share_heads_and_vocabulary():
    layout = StageLayout(SPARSE, MeshSpec(pipeline=2, tensor=2, expert=2))
    assert (layout.shards, layout.kv_heads, layout.padded_vocab) == (4, 4, 64)
    latent = LatentConfig(query_rank=None, rank=16, nope_dim=8, rope_dim=4, value_dim=8)
    kinds = (LayerSpec("latent", "experts"),) * 5
    model = dataclasses.replace(SPARSE, layers=kinds, latent=latent, num_kv_heads=3)
    layout = StageLayout(model, MeshSpec(tensor=2, expert=2))
    assert layout.kv_heads == 4  # the latents, once on every device
    with pytest.raises(ValueError, match="8 query heads and 1 kv heads"):
        StageLayout(model, MeshSpec(tensor=1, expert=3))


def test_too_few_devices_says_how_to_get_more():
    placement = Placement.disaggregated((2, 4), (1, 2))
    with pytest.raises(ValueError, match="needs 10 devices, 8 present") as error:
        Engine(Unread(MODEL), placement=placement)
    assert 'jax.config.update("jax_num_cpu_devices", 10)' in str(error.value)
    assert "--devices 10" in str(error.value)
    with pytest.raises(ValueError, match="needs 2 devices, 1 present"):
        Engine(Unread(MODEL), placement=Placement.colocated((2, 1)), devices=jax.devices()[:1])


@pytest.mark.parametrize("layout", [(), (1,), (1, 1, 1, 1), (0, 1), (1, -2), (1.0, 1), "21"])
def test_layouts_are_pairs_or_triples(layout):
    with pytest.raises(ValueError, match=r"layout: expected \(pipeline, tensor\)"):
        Placement.colocated(layout)


# --- A vocabulary that the devices do not divide


def test_padded_vocabulary_is_never_sampled():
    """61 tokens on 4 devices, drawn nearly uniformly: a padded logit of 0 would win often."""
    assert StageLayout(MODEL, MeshSpec(pipeline=2, tensor=2)).padded_vocab == 64
    source = tiny_source(MODEL, seed=1)
    engine = Engine(source, placement=Placement.colocated((2, 2)), config=small_engine_config())
    prompts = random_prompts([4] * 24, MODEL.vocab_size)
    params = [
        SamplingParams(max_tokens=24, temperature=100.0, seed=n, logprobs=20) for n in range(24)
    ]
    drawn = {t for output in engine.generate(prompts, params) for t in output.token_ids}
    # 576 draws miss one of 61 tokens with probability 0.5 %, and 3 padded ones with 1e-12.
    assert drawn <= set(range(MODEL.vocab_size))
    assert len(drawn) > 55

    # The whole distribution is that of the model: 20 values at the start of each request.
    oracle = Oracle(source)
    for prompt in prompts[:3]:
        (output,) = engine.generate(
            prompt, SamplingParams(max_tokens=1, temperature=0, logprobs=20)
        )
        logits = oracle.logits(prompt)[-1]
        wanted = logits - np.log(np.exp(logits).sum())
        top = dict(output.logprobs[0].top)
        assert list(top) == np.argsort(-wanted)[:20].tolist()
        np.testing.assert_allclose(list(top.values()), np.sort(wanted)[::-1][:20], atol=1e-4)


# --- Counts


def real_config(**changes) -> ModelConfig:
    return tiny_config(head_dim=changes["width"] // changes["num_heads"], **changes)


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        (
            # SmolLM2-135M
            real_config(
                layers=30,
                vocab_size=49152,
                width=576,
                mlp_width=1536,
                num_heads=9,
                num_kv_heads=3,
                tie_embeddings=True,
            ),
            134_515_008,
        ),
        (
            # Llama 3.1 8B
            real_config(
                layers=32,
                vocab_size=128256,
                width=4096,
                mlp_width=14336,
                num_heads=32,
                num_kv_heads=8,
                rope=RopeConfig(500_000.0, "llama3", 8.0, 1.0, 4.0, 8192),
            ),
            8_030_261_248,
        ),
    ],
    ids=["SmolLM2-135M", "Llama-3.1-8B"],
)
def test_parameter_counts_of_published_models(config, parameters):
    tree = abstract_tree(config)
    assert sum(spec.size for spec in tree.values()) == parameters
    assert parameter_count(config) == parameters
    assert ("head.weight" in tree) != config.tie_embeddings
