"""Requests that are refused, the order of the others, and what is measured of them."""

import itertools
import math

import numpy as np
import pytest
from engines import (
    BOTH,
    MODEL,
    PLACEMENTS,
    VOCAB,
    check_idle,
    collect,
    drain,
    engine_config,
    forget_prefixes,
    greedy,
    idle_after,
    prompts_of,
    same,
    tiny_engine,
)

from jinfire import (
    EmptyPrompt,
    Engine,
    EngineConfig,
    FinishReason,
    Placement,
    RequestTooLong,
    SamplingParams,
    TokenLogprobs,
    UnknownToken,
)
from jinfire.loading import RandomSource
from jinfire.models.spec import kv_bytes_per_token

STOP, LENGTH, ABORT, ERROR = (
    FinishReason.STOP,
    FinishReason.LENGTH,
    FinishReason.ABORT,
    FinishReason.ERROR,
)
PROMPT = prompts_of([6])[0]


@pytest.fixture(params=BOTH)
def engine(request):
    with idle_after(tiny_engine(request.param)) as engine:
        yield engine


# Refusals.

REFUSED = {
    "no token": ([], EmptyPrompt, "at least one prompt token"),
    "empty text": ("", EmptyPrompt, "at least one prompt token"),
    "context": ([1] * 64, RequestTooLong, r"64 prompt tokens .* max_context=64"),
    "huge": ([1] * 10_000, RequestTooLong, "10000 prompt tokens"),
    "id past the vocabulary": ([1, VOCAB], UnknownToken, rf"in \[0, {VOCAB}\), got {VOCAB}"),
    "negative id": ([-1, 1], UnknownToken, "got -1"),
    "huge id": ([2**40], UnknownToken, f"got {2**40}"),
    "not encodable": ("A", ValueError, "pairs of letters"),
    "no ids": ([1.5, 2.5], ValueError, "expected text or token ids"),
    "NaN": ([math.nan], ValueError, "expected text or token ids"),
    "texts in ids": ([["aa"]], ValueError, "expected text or token ids"),
    "nothing": (None, ValueError, "expected text or token ids"),
    "nested": ([[1, 2]], ValueError, "expected text or token ids"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_prompt_fails_alone(engine, name):
    prompt, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        engine.submit(prompt, greedy())
    with pytest.raises(error, match=message):
        engine.stream(prompt, greedy())
    (alone,) = engine.generate([PROMPT], greedy())
    good, bad, also = engine.generate([PROMPT, prompt, PROMPT], greedy(logprobs=0))
    for output in (good, also):
        same(output, alone)
    assert bad.finish_reason is ERROR
    assert isinstance(bad.error, error)
    assert (bad.token_ids, bad.text, bad.logprobs) == ([], "", [])
    assert math.isnan(bad.metrics.ttft_s)
    assert type(bad.error).__name__ in bad.metrics.status


def test_bad_stop_token_fails_alone(engine):
    with pytest.raises(UnknownToken, match=rf"stop_token_ids .* got {VOCAB}"):
        engine.submit(PROMPT, greedy(stop_token_ids=(1, VOCAB)))


def test_only_refused_prompts_raise_the_first_error(engine):
    with pytest.raises(EmptyPrompt):
        engine.generate([[], [VOCAB]], greedy())
    with pytest.raises(ValueError, match="expected one or 2"):
        engine.generate([PROMPT, PROMPT], [greedy()])


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"temperature": -1.0},
        {"top_p": math.nan},
        {"top_p": 0.0},
        {"min_p": math.nan},
        {"min_p": 1.5},
        {"top_k": -1},
        {"max_tokens": 0},
        {"max_tokens": 1.5},
        {"seed": 2**32},
        {"logprobs": 21},
        {"stop": ("",)},
        {"stop_token_ids": (-1,)},
    ],
    ids=str,
)
def test_bad_parameters_name_the_field(changes):
    (name,) = changes
    with pytest.raises(ValueError, match=rf"SamplingParams\.{name}: expected"):
        SamplingParams(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"page_size": 0},
        {"max_rows": 0},
        {"decode_steps": 0},
        {"max_context": 0},
        {"num_pages": 1},
        {"num_pages": 0},
        {"microbatches": 0},
        {"prefill_shapes": ()},
        {"prefill_shapes": ((0, 16),)},
        {"prefill_shapes": ((1, 0),)},
        {"row_buckets": (0,)},
        {"context_buckets": (-1,)},
    ],
    ids=str,
)
def test_bad_engine_configs_name_the_field(changes):
    (name,) = changes
    with pytest.raises(ValueError, match=rf"EngineConfig\.{name}: expected"):
        EngineConfig(**changes)


def test_request_ids_are_the_callers_and_unique(engine):
    engine.submit(PROMPT, greedy(2), request_id="mine")
    with pytest.raises(ValueError, match=r"not in use, got 'mine'"):
        engine.submit(PROMPT, greedy(2), request_id="mine")
    drain(engine)
    with pytest.raises(ValueError, match=r"not in use, got 'mine', whose output nobody took"):
        engine.submit(PROMPT, greedy(2), request_id="mine")
    assert len(engine.pop_output("mine").token_ids) == 2
    engine.submit(PROMPT, greedy(2), request_id="mine")
    drain(engine)
    engine.pop_output("mine")


def test_own_names_avoid_the_callers(engine):
    taken = [f"request-{engine._counter + i}" for i in range(3)]
    for name in taken:
        engine.submit(PROMPT, greedy(2), request_id=name)
    outputs = engine.generate([PROMPT] * 4, greedy(2))
    assert not {output.request_id for output in outputs} & set(taken)
    drain(engine)
    for name in taken:
        engine.pop_output(name)


def test_text_needs_a_tokenizer():
    engine = Engine(RandomSource(MODEL), placement=PLACEMENTS["colocated"], config=engine_config())
    with pytest.raises(ValueError, match="got text, and this checkpoint has no tokenizer"):
        engine.generate("aa", greedy())
    with pytest.raises(ValueError, match=r"stop: .* no tokenizer"):
        engine.submit(PROMPT, greedy(stop="aa"))
    check_idle(engine)


def test_impossible_placements_are_named():
    source = RandomSource(MODEL)
    with pytest.raises(ValueError, match="valid"):
        Engine(source, placement=Placement.colocated((1, 3)), config=engine_config())
    with pytest.raises(ValueError, match="3 layers cannot be split over pipeline=4"):
        Engine(source, placement=Placement.colocated((4, 1)), config=engine_config())
    with pytest.raises(ValueError, match="16"):
        Engine(
            source,
            placement=Placement.disaggregated(prefill=(2, 4), decode=(2, 4)),
            config=engine_config(),
        )
    with pytest.raises(ValueError, match="dtype"):
        Engine(source, placement=PLACEMENTS["colocated"], dtype="float16")


# Order and metrics.


def test_first_come_first_served(engine, monkeypatch):
    """Prefill starts in the order of arrival, though later prompts are shorter."""
    started = {}
    prefill = engine._runner.prefill

    def watched(plan):
        for chunk in itertools.chain(*plan.chunks):
            started.setdefault(chunk.sequence.request_id)
        return prefill(plan)

    monkeypatch.setattr(engine._runner, "prefill", watched)
    prompts = prompts_of([40, 3, 30, 1, 20, 2, 10, 1, 5], seed=4)
    names = [engine.submit(prompt, greedy(5)) for prompt in prompts]
    outputs = collect(engine, drain(engine))
    assert list(started) == names
    queued = [outputs[name].metrics.queue_s for name in names]
    assert all(math.isfinite(value) for value in queued)


def test_metrics_of_a_request(engine):
    forget_prefixes(engine)
    (output,) = engine.generate(prompts_of([21], seed=9), greedy(9))
    metrics = output.metrics
    assert metrics.request_id == output.request_id
    assert (metrics.prompt_tokens, metrics.output_tokens, metrics.cached_tokens) == (21, 9, 0)
    assert (metrics.preemptions, metrics.finish_reason, metrics.status) == (0, "length", None)
    for name in ("ttft_s", "queue_s", "prefill_s", "first_decode_s", "tpot_s", "e2e_s"):
        assert math.isfinite(getattr(metrics, name)), name
        assert getattr(metrics, name) >= 0
    assert metrics.ttft_s <= metrics.e2e_s
    assert metrics.queue_s + metrics.prefill_s <= metrics.ttft_s + 1e-9
    assert len(metrics.itl_s) <= 8
    if engine.placement.is_colocated:
        assert math.isnan(metrics.transfer_s)
        assert metrics.kv_bytes == 0
    else:
        assert math.isfinite(metrics.transfer_s)
        assert metrics.kv_bytes > 0


def test_metrics_that_do_not_exist_are_missing(engine):
    (one,) = engine.generate([PROMPT], greedy(1))
    for name in ("tpot_s", "transfer_s", "first_decode_s"):
        assert math.isnan(getattr(one.metrics, name)), name
    assert one.metrics.itl_s == ()
    assert math.isfinite(one.metrics.ttft_s)
    assert one.metrics.e2e_s == one.metrics.ttft_s
    name = engine.submit(PROMPT, greedy())
    engine.abort(name)
    aborted = engine.pop_output(name)
    assert aborted.finish_reason is ABORT
    assert aborted.metrics.finish_reason == "abort"
    for missing in ("ttft_s", "queue_s", "prefill_s", "transfer_s", "tpot_s", "e2e_s"):
        assert math.isnan(getattr(aborted.metrics, missing)), missing


def test_stats_count_what_happened(engine):
    forget_prefixes(engine)
    before = engine.stats()
    prompt = prompts_of([20], seed=21)[0]
    (first,) = engine.generate([prompt], greedy(4))
    (again,) = engine.generate([prompt], greedy(4))
    stats = engine.stats()
    same(first, again)
    assert (first.metrics.cached_tokens, again.metrics.cached_tokens) == (0, 16)
    assert stats["prefill_tokens"] - before["prefill_tokens"] == 20 + 4
    moved = stats["kv_bytes_transferred"] - before["kv_bytes_transferred"]
    assert moved == first.metrics.kv_bytes + again.metrics.kv_bytes
    assert stats["free_pages"] == before["free_pages"]
    assert stats["steps"] > before["steps"]
    assert stats["decode_dispatches"] > before["decode_dispatches"]
    assert stats["placement"] == str(engine.placement)
    assert stats["kv_bytes_per_token"] == kv_bytes_per_token(MODEL, 4)
    assert set(stats["bubble_fraction"]) == {"prefill", "decode"}
    assert 0 <= stats["bubble_fraction"]["prefill"] < 1
    assert stats["definitions"]["ttft_s"]
    assert stats["weight_bytes"] > 0
    assert stats["kv_pool_bytes"] > 0


def test_logprobs_may_be_asked_for_as_a_flag():
    """As in the OpenAI chat interface: True is the chosen token's alone."""
    assert SamplingParams(logprobs=True).logprobs == 0
    assert SamplingParams(logprobs=False).logprobs is None


def test_logprobs_are_numbers():
    steps = [TokenLogprobs(3, -0.5), TokenLogprobs(4, -2.25, ((1, -0.1),))]
    np.testing.assert_array_equal(np.array(steps, float), [-0.5, -2.25])
