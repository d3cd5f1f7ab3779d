"""Parameters of every kind: what is refused by name, and what NumPy numbers become."""

import math

import numpy as np
import pytest
from engines import MODEL, check_idle, greedy, prompts_of, same, tiny_engine

from jinfire import EngineConfig, Model, Placement, SamplingParams
from jinfire.loading import RandomSource

PROMPT = prompts_of([6])[0]


@pytest.fixture(scope="module")
def model():
    return Model(RandomSource(MODEL))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("stop_token_ids", value) for value in ([1.7], "12", b"12", 5, [True], {1}, [-1])),
        *(("stop", value) for value in (5, [1], b"a", [""])),
        *(("temperature", value) for value in (10**400, 1e39, True, "1", None)),
        *(("top_p", value) for value in (True, 0, 1.5)),
        *(("min_p", value) for value in (True, -0.5)),
        *(("max_tokens", value) for value in (True, 3.0, np.float64(3), np.int64(0))),
        *(("top_k", value) for value in (True, None)),
        *(("seed", value) for value in (True, 1.0, np.int64(-1))),
        *(("logprobs", value) for value in (1.0, np.int64(21), "1")),
        *(("ignore_eos", value) for value in (1, None, "no")),
        *(("logprobs_after_temperature", value) for value in (1, None, "no")),
    ],
)
def test_sampling_refuses_by_name(name, value):
    with pytest.raises(ValueError, match=rf"^SamplingParams\.{name}: expected .*, got "):
        SamplingParams(**{name: value})


def test_sampling_takes_numpy_and_none():
    params = SamplingParams(
        max_tokens=np.int64(3),  # pyright: ignore[reportArgumentType]
        temperature=np.float32(0.5),  # pyright: ignore[reportArgumentType]
        top_k=np.uint8(4),  # pyright: ignore[reportArgumentType]
        seed=np.uint32(1),  # pyright: ignore[reportArgumentType]
        stop=None,  # pyright: ignore[reportArgumentType]
        stop_token_ids=np.array([1, 2]),  # pyright: ignore[reportArgumentType]
    )
    assert params == SamplingParams(3, 0.5, 4, seed=1, stop_token_ids=(1, 2))
    assert type(params.max_tokens) is type(params.top_k) is type(params.seed) is int
    assert type(params.temperature) is float
    assert [type(token) for token in params.stop_token_ids] == [int, int]
    assert SamplingParams(stop_token_ids=None).stop_token_ids == ()  # pyright: ignore[reportArgumentType]
    assert SamplingParams(temperature=1).temperature == 1.0


@pytest.mark.parametrize("temperature", [1e-300, 1e-40])
def test_a_temperature_under_float32_is_greedy(temperature):
    assert SamplingParams(temperature=temperature) == SamplingParams(temperature=0.0)
    assert SamplingParams(temperature=temperature).is_greedy


@pytest.mark.parametrize("temperature", [1.2e-38, 3.4e38])
def test_extreme_temperatures_run(temperature):
    params = SamplingParams(4, temperature, seed=1, logprobs=2, logprobs_after_temperature=True)
    engine = tiny_engine()
    (output,) = engine.generate([PROMPT], params)
    assert len(output.token_ids) == 4
    assert not any(math.isnan(step.logprob) for step in output.logprobs or ())
    check_idle(engine)


@pytest.mark.parametrize("params", [{"max_tokens": 3}, 3, "greedy", [{"max_tokens": 3}]], ids=str)
def test_params_of_another_kind_are_refused(params):
    engine = tiny_engine()
    for call in (engine.generate, engine.submit):
        with pytest.raises(ValueError, match="params: expected SamplingParams or a list of them"):
            call(PROMPT, params)
    check_idle(engine)


@pytest.mark.parametrize("prompt", [b"ab", bytearray(b"ab"), {1: 2}, {1, 2}, [True, 1]], ids=str)
def test_prompts_of_another_kind_fail_alone(prompt):
    engine = tiny_engine()
    with pytest.raises(ValueError, match="prompt expected text or token ids"):
        engine.generate(prompt, greedy())
    good, bad = engine.generate([PROMPT, prompt], greedy())
    same(good, engine.generate([PROMPT], greedy())[0])
    assert isinstance(bad.error, ValueError)
    check_idle(engine)


@pytest.mark.parametrize("prompts", [None, 5])
def test_no_prompts_are_refused(prompts):
    with pytest.raises(ValueError, match="prompt expected text or token ids"):
        tiny_engine().generate(prompts, greedy())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(
            ("prefill_shapes", value)
            for value in ((8, 32), ((1, 1.5),), ((1, 2, 3),), ((1, True),))
        ),
        *(("row_buckets", value) for value in ((1.5,), 8, "8")),
        *(("context_buckets", value) for value in ((1.5,), None)),
        *((name, True) for name in ("page_size", "max_rows", "num_pages", "microbatches", "seed")),
        *(("transfer_timeout_s", value) for value in (0, -1.0, math.nan, True, None, 10**400)),
        ("prefix_caching", 1),
        ("seed", -1),
    ],
)
def test_engine_config_refuses_by_name(name, value):
    with pytest.raises(ValueError, match=rf"^EngineConfig\.{name}: expected .*, got "):
        EngineConfig(**{name: value})


def test_engine_config_takes_numpy():
    config = EngineConfig(
        page_size=np.int32(4),  # pyright: ignore[reportArgumentType]
        prefill_shapes=np.array([[1, 8]]),  # pyright: ignore[reportArgumentType]
        row_buckets=[np.int64(2)],  # pyright: ignore[reportArgumentType]
    )
    assert config == EngineConfig(page_size=4, prefill_shapes=((1, 8),), row_buckets=(2,))
    assert type(config.page_size) is type(config.prefill_shapes[0][1]) is int


@pytest.mark.parametrize("layout", [4, None, "11", (1,), (1, 1.0), (1, True), (1, 1, 1, 1)])
def test_placement_names_the_layout(layout):
    with pytest.raises(ValueError, match=r"layout: expected \(pipeline, tensor\)"):
        Placement.colocated(layout)


def test_placement_takes_numpy():
    assert Placement.colocated(np.array([1, 2])) == Placement.colocated((1, 2))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("ids", [[1.9, 2.9], [True, False], [1], [], 5, [[1, 2]], [1, 2**40]])
def test_perplexity_refuses(model, ids):
    with pytest.raises(ValueError, match=r"(perplexity|input_ids): expected"):
        model.perplexity(ids)


@pytest.mark.parametrize(
    "lengths", [[1.5, math.nan], [1.0, 1.0], [True, True], [1], [0, 1], [1, 4]]
)
def test_lengths_are_integers_within_the_row(model, lengths):
    with pytest.raises(ValueError, match=r"lengths: expected integers \[2\] in 1 to 3, got"):
        model.logits(np.ones((2, 3), int), lengths)


def test_positions_end_at_max_position(model):
    most = model.config.max_position
    with pytest.raises(ValueError, match=rf"max_position={most} tokens, got {most + 1}"):
        model.logits(np.ones((1, most + 1), int))
