"""Tokens of expert and latent models do not depend on the placement, expert axis included.

The models are the reference's tiny Llama 4, Kimi K2.5 with 4-bit experts and Qwen3-MoE, whose
single-device tokens test_golden.py compares with transformers. A size is (pipeline, tensor,
expert).
"""

import dataclasses
import itertools

import jax
import numpy as np
import pytest
from engines import assert_same_output, check_idle, greedy
from helpers import margins, random_prompts, tiny_source

from jinfire import Engine, EngineConfig, Placement, RequestOutput, SamplingParams
from jinfire.checkpoints import open_checkpoint
from jinfire.layers import moe

PAGE, CHUNK = 4, 16
CONFIG = EngineConfig(
    page_size=PAGE,
    max_rows=8,
    max_context=56,
    row_buckets=(),
    context_buckets=(),
    prefill_shapes=((2, CHUNK),),
    decode_steps=3,
)
# Borders of a page and of a prefill chunk, and past the attention chunk of 24 tokens.
LENGTHS = (1, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE + 1, CHUNK, CHUNK + 1, 25, 2 * CHUNK + 1)
MAX_TOKENS = (1, 2, 8)
SAFE_MARGIN = 1e-3

SIZES = ((1, 1, 1), (1, 2, 1), (2, 1, 1), (1, 1, 2), (2, 1, 2), (1, 2, 2), (1, 1, 4), (4, 1, 1))
# 4-bit experts of width 32 are one group of values, which no tensor axis splits.
MODELS = {
    "llama4_nested_scout_f32": SIZES,
    "kimi_k25_int4_sharded": tuple(size for size in SIZES if size[1] == 1),
    "qwen3_moe_f32": tuple(size for size in SIZES if size[0] <= 3),  # it has 3 layers
}
SHORT = {
    ("llama4_nested_scout_f32", (1, 1, 4), (2, 1, 1)),
    ("kimi_k25_int4_sharded", (4, 1, 1), (2, 1, 2)),
    ("qwen3_moe_f32", (1, 2, 2), (1, 1, 2)),
}
GRID = [
    (model, prefill, decode)
    for model, sizes in MODELS.items()
    for prefill, decode in [*itertools.product(sizes, sizes), *((size, None) for size in sizes)]
]

Requests = list[tuple[list[int], SamplingParams]]


def requests() -> Requests:
    """All lengths greedily, with token counts in turn, and a drawn one of each length."""
    prompts = random_prompts(LENGTHS, 250)
    made = [
        (prompt, greedy(count, logprobs=3))
        for prompt, count in zip(prompts, itertools.cycle(MAX_TOKENS), strict=False)
    ]
    return made + [(p, SamplingParams(max_tokens=8, seed=len(p), top_p=0.9)) for p in prompts]


def run(engine: Engine) -> list[RequestOutput]:
    prompts, params = zip(*requests(), strict=True)
    return engine.generate(prompts, params)


@pytest.fixture(scope="module")
def single_device(golden):
    """`single_device(model)`: outputs of one device."""
    made: dict[str, list[RequestOutput]] = {}

    def outputs(model: str) -> list[RequestOutput]:
        if model not in made:
            engine = Engine.from_pretrained(golden(model), dtype="float32", config=CONFIG)
            made[model] = run(engine)
            for output in made[model]:
                if output.logprobs:
                    assert min(margins(output)) > SAFE_MARGIN
        return made[model]

    return outputs


def name(model: str, prefill: tuple[int, ...], decode: tuple[int, ...] | None) -> str:
    sizes = ["x".join(map(str, size)) for size in (prefill, decode) if size]
    return f"{model.split('_')[0]}_" + ("_to_".join(sizes) if decode else f"on_{sizes[0]}")


@pytest.mark.parametrize(
    ("model", "prefill", "decode"),
    [
        pytest.param(*case, id=name(*case), marks=() if case in SHORT else pytest.mark.long)
        for case in GRID
    ],
)
def test_tokens_are_those_of_a_single_device(golden, single_device, model, prefill, decode):
    placement = (
        Placement.disaggregated(prefill=prefill, decode=decode)
        if decode
        else Placement.colocated(prefill)
    )
    engine = Engine.from_pretrained(
        golden(model), dtype="float32", placement=placement, config=CONFIG
    )
    # The second round finds the first one's prefixes.
    for _ in range(2):
        for output, expected in zip(run(engine), single_device(model), strict=True):
            assert_same_output(output, expected)
        check_idle(engine)


def test_slots_without_a_layer_take_no_expert(golden):
    """Zero weights would choose experts, all tokens the same; here these experts hold NaN."""
    model = "qwen3_moe_f32"  # 3 layers, so that the second of two stages has one
    engine = Engine.from_pretrained(
        golden(model), dtype="float32", placement=Placement.colocated((2, 1)), config=CONFIG
    )
    prompts = random_prompts((5, 2 * CHUNK + 1), 250)
    expected = engine.generate(prompts, greedy(4))
    params = engine._runner.prefill_model.params
    layer_of_stage = params["layers.1.mlp.experts.gate.weight"]
    assert not np.asarray(layer_of_stage[1]).any()
    for part in ("gate", "up", "down"):
        name = f"layers.1.mlp.experts.{part}.weight"
        poisoned = np.array(params[name])
        poisoned[1] = np.nan
        params[name] = jax.device_put(poisoned, params[name].sharding)
    found = engine.generate(prompts, greedy(4))
    assert [o.token_ids for o in found] == [o.token_ids for o in expected]


@pytest.fixture
def always_exchanged(monkeypatch):
    """Rows go to their experts' devices, also where there are too few for that to pay.

    A layer that was traced before is not traced again for the same shapes, so these are forgotten.
    """
    asked = []

    def forced(num_tokens: int, devices: int) -> bool:
        asked.append(devices)
        return devices > 1

    monkeypatch.setattr(moe, "exchanges_tokens", forced)
    jax.clear_caches()
    yield asked
    jax.clear_caches()


@pytest.mark.parametrize(
    "size",
    [(2, 1, 2), *(pytest.param(size, marks=pytest.mark.long) for size in ((2, 2, 2), (1, 2, 4)))],
)
def test_rows_are_exchanged_within_a_stage(golden, single_device, always_exchanged, size):
    model = "qwen3_moe_f32"  # 3 layers: the second of two stages has a slot without one
    expected = single_device(model)
    always_exchanged.clear()
    jax.clear_caches()
    engine = Engine.from_pretrained(
        golden(model), dtype="float32", placement=Placement.colocated(size), config=CONFIG
    )
    for output, other in zip(run(engine), expected, strict=True):
        assert_same_output(output, other)
    assert set(always_exchanged) == {size[2]}


@pytest.mark.long
def test_61_layers_over_8_stages(golden):
    """As many layers as Kimi K2.5 has, one dense: slots of two kinds, stages of 8 and 7 layers."""
    config = open_checkpoint(golden("kimi_k25_f32")).config
    first, *_, last = config.layers
    config = dataclasses.replace(config, layers=(first, *(last,) * 60))
    prompts = random_prompts((3, 2 * CHUNK + 1), 250)
    params = greedy(6, logprobs=3)
    outputs = [
        Engine(tiny_source(config), placement=placement, config=CONFIG).generate(prompts, params)
        for placement in (Placement.colocated((1, 1)), Placement.colocated((8, 1)))
    ]
    for output, expected in zip(outputs[1], outputs[0], strict=True):
        assert min(margins(expected)) > SAFE_MARGIN
        assert_same_output(output, expected)
