"""What a caller of the engine sees: outputs, events, sampling, endings, refusals, metrics."""

import dataclasses
import math
from itertools import pairwise

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
    prompts_of,
    same,
    seeded,
    tiny_engine,
)
from helpers import Oracle

from jinfire import (
    EmptyPrompt,
    Engine,
    EngineConfig,
    FinishReason,
    Placement,
    RequestTooLong,
    SamplingParams,
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
    engine = tiny_engine(request.param)
    yield engine
    check_idle(engine)


@pytest.fixture(scope="module")
def oracle():
    return Oracle(RandomSource(MODEL))


# Prompts in, outputs and events out.


def test_generate_takes_texts_ids_and_lists_of_them(engine):
    text = engine.tokenizer.decode(PROMPT)
    (want,) = engine.generate(PROMPT, greedy())
    assert want.prompt_ids == tuple(PROMPT)
    for prompts in (text, [text], [PROMPT], np.array(PROMPT), np.array([PROMPT]), tuple(PROMPT)):
        (output,) = engine.generate(prompts, greedy())
        same(output, want)
        assert output.prompt_ids == tuple(PROMPT)
    both = engine.generate([text, [1, 2, 3], PROMPT], [greedy(), greedy(2), greedy(3)])
    same(both[0], want)
    assert [len(output.token_ids) for output in both] == [8, 2, 3]
    assert both[2].token_ids == want.token_ids[:3]
    assert len({output.request_id for output in both}) == 3
    assert engine.generate([], greedy()) == []


def test_output_fields(engine):
    (output,) = engine.generate([PROMPT], greedy(5, logprobs=2))
    assert len(output.token_ids) == 5
    assert all(type(token) is int for token in output.token_ids)
    assert output.text == engine.tokenizer.decode(output.token_ids)
    assert output.finish_reason is LENGTH
    assert output.finish_reason == "length"
    assert output.error is None
    assert output.logprobs is not None
    assert [step.token_id for step in output.logprobs] == output.token_ids
    assert all(len(step.top) == 2 for step in output.logprobs)
    assert output.metrics.output_tokens == 5
    assert output.metrics.prompt_tokens == 6
    (plain,) = engine.generate([PROMPT], SamplingParams())
    assert plain.logprobs is None
    assert len(plain.token_ids) == 16


def test_stream_gives_what_generate_gives(engine):
    (want,) = engine.generate([PROMPT], seeded(3, 9, logprobs=1))
    events = list(engine.stream(PROMPT, seeded(3, 9, logprobs=1)))
    assert [event.token_id for event in events] == want.token_ids
    assert [event.index for event in events] == list(range(9))
    assert "".join(event.text for event in events) == want.text
    assert [event.finish_reason for event in events] == [None] * 8 + [LENGTH]
    assert [event.logprobs.token_id for event in events] == want.token_ids
    assert len({event.request_id for event in events}) == 1


def test_events_of_many_requests_tell_their_outputs(engine):
    sampled = [seeded(i, 1 + i % 9, logprobs=[None, 0, 3][i % 3]) for i in range(12)]
    for i, prompt in enumerate(prompts_of([1 + 3 * i for i in range(12)], seed=1)):
        engine.submit(prompt, sampled[i], request_id=f"mine {i}")
    outputs = collect(engine, drain(engine))
    assert sorted(outputs) == sorted(f"mine {i}" for i in range(12))
    for i, params in enumerate(sampled):
        assert len(outputs[f"mine {i}"].token_ids) == params.max_tokens


def test_output_is_handed_out_once(engine):
    request_id = engine.submit(PROMPT, greedy(2))
    with pytest.raises(KeyError):
        engine.pop_output(request_id)
    drain(engine)
    assert engine.pop_output(request_id).request_id == request_id
    with pytest.raises(KeyError):
        engine.pop_output(request_id)


# Sampling.


def test_logprobs_are_the_models(engine, oracle):
    """Of every token, the first one included, before and after the temperature."""
    cases = [
        (greedy(6, logprobs=20), 1.0),
        (seeded(1, 6, temperature=0.7, logprobs=5), 1.0),
        (seeded(1, 6, temperature=0.7, logprobs=5, logprobs_after_temperature=True), 0.7),
        # Greedy has no temperature to report after.
        (greedy(6, logprobs=5, logprobs_after_temperature=True), 1.0),
        (seeded(2, 6, top_k=2, top_p=0.5, logprobs=5), 1.0),  # before truncation
    ]
    outputs = engine.generate([PROMPT] * len(cases), [params for params, _ in cases])
    for output, (params, temperature) in zip(outputs, cases, strict=True):
        logits = oracle.logits([*PROMPT, *output.token_ids])[len(PROMPT) - 1 : -1] / temperature
        peak = logits.max(axis=1, keepdims=True)
        want = logits - peak - np.log(np.exp(logits - peak).sum(axis=1, keepdims=True))
        for step, row, token in zip(output.logprobs, want, output.token_ids, strict=True):
            assert step.token_id == token
            assert step.logprob == pytest.approx(row[token], abs=1e-4)
            assert len(step.top) == params.logprobs
            ids, values = zip(*step.top, strict=True)
            assert len(set(ids)) == len(ids)
            assert list(values) == sorted(values, reverse=True)
            np.testing.assert_allclose(values, np.sort(row)[::-1][: len(ids)], atol=1e-4)
            np.testing.assert_allclose(values, row[list(ids)], atol=1e-4)


def test_greedy_is_the_models_best_token(engine, oracle):
    want, margin = oracle.greedy(PROMPT, 8)
    assert margin > 1e-3, "choose another prompt"
    (output,) = engine.generate([PROMPT], greedy())
    assert output.token_ids == want


@pytest.mark.parametrize(
    "params",
    [
        seeded(5, top_k=1),
        seeded(5, min_p=1.0),
        seeded(5, top_p=1e-9),
        seeded(5, top_p=1e-45),
        seeded(5, temperature=1e-6),
        seeded(5, temperature=1e-40),
        seeded(5, temperature=1e-300),
    ],
    ids=str,
)
def test_limits_of_sampling_are_greedy(engine, params):
    (want,) = engine.generate([PROMPT], greedy())
    (output,) = engine.generate([PROMPT], dataclasses.replace(params, logprobs=1))
    same(output, want)
    assert all(math.isfinite(step.logprob) for step in output.logprobs)


def test_filters_that_are_off_change_nothing(engine):
    (want,) = engine.generate([PROMPT], seeded(7))
    for changes in ({"top_k": VOCAB}, {"top_k": 10**12}, {"top_p": 1.0}, {"min_p": 0.0}):
        (output,) = engine.generate([PROMPT], seeded(7, **changes))
        same(output, want)


def test_filters_keep_what_they_say(engine):
    """Every token lies in the set that its parameters allow."""
    cases = [
        seeded(1, 12, top_k=3, logprobs=20),
        seeded(2, 12, top_p=0.3, logprobs=20),
        seeded(3, 12, min_p=0.5, logprobs=20),
        seeded(4, 12, temperature=3.0, top_k=5, top_p=0.8, min_p=0.1, logprobs=20),
    ]
    for output, params in zip(engine.generate([PROMPT] * 4, cases), cases, strict=True):
        assert len(set(output.token_ids)) > 1
        for step in output.logprobs:
            ids, values = zip(*step.top, strict=True)
            if params.top_k:
                ids = ids[: params.top_k]
            elif params.top_p < 1:
                ids = ids[: int(np.searchsorted(np.cumsum(np.exp(values)), params.top_p)) + 1]
            elif params.min_p:
                ids = [i for i, v in step.top if v >= values[0] + math.log(params.min_p) - 1e-5]
            assert step.token_id in ids


def test_requests_without_a_seed_differ_and_the_engines_seed_repeats_them():
    def run():
        fresh = Engine(
            RandomSource(MODEL),
            placement=PLACEMENTS["colocated"],
            config=engine_config(seed=11),
        )
        outputs = fresh.generate([PROMPT] * 3, SamplingParams(max_tokens=6))
        return [output.token_ids for output in outputs]

    first = run()
    assert len(set(map(tuple, first))) == 3
    assert run() == first


# Endings.


def test_stop_token_ends_the_request_and_stays_out_of_the_text(engine):
    (whole,) = engine.generate([PROMPT], seeded(2, 12))
    for index in range(len(whole.token_ids)):
        token = whole.token_ids[index]
        first = whole.token_ids.index(token)
        (output,) = engine.generate([PROMPT], seeded(2, 12, stop_token_ids=(token,), logprobs=0))
        assert output.token_ids == whole.token_ids[: first + 1]
        assert output.text == engine.tokenizer.decode(whole.token_ids[:first])
        assert output.finish_reason is STOP
        assert len(output.logprobs) == output.metrics.output_tokens == first + 1


def test_more_stop_tokens_than_a_row_carries(engine):
    (whole,) = engine.generate([PROMPT], seeded(2, 12))
    stop = max(whole.token_ids)
    others = [token for token in range(stop) if token not in whole.token_ids][:20]
    assert len(others) == 20, "the device knows only the lowest of them"
    params = seeded(2, 12, stop_token_ids=(*others, stop))
    (output,) = engine.generate([PROMPT], params)
    assert output.token_ids == whole.token_ids[: whole.token_ids.index(stop) + 1]
    assert output.finish_reason is STOP


def test_first_token_may_end_the_request(engine):
    (whole,) = engine.generate([PROMPT], greedy())
    text = engine.tokenizer.decode(whole.token_ids[:1])
    for params in (
        greedy(stop_token_ids=(whole.token_ids[0],)),
        greedy(stop=text),
        greedy(stop=text[0]),
        greedy(1, stop_token_ids=(whole.token_ids[0],)),
    ):
        (output,) = engine.generate([PROMPT], params)
        assert output.token_ids == whole.token_ids[:1]
        assert output.text == ""
        assert output.finish_reason is STOP
        assert output.metrics.output_tokens == 1


def test_stop_strings_at_every_place_and_length(engine):
    """Whole tokens, halves of them, and over their borders; inside and across dispatches."""
    (whole,) = engine.generate([PROMPT], seeded(4, 12))
    text = whole.text
    stops = [text[i : i + n] for i in range(len(text)) for n in (1, 2, 3, 5) if i + n <= len(text)]
    for stop in stops:
        engine.submit(PROMPT, seeded(4, 12, stop=("never", stop)), request_id=stop + str(len(stop)))
        if engine.scheduler.num_waiting > 30:
            break
    outputs = collect(engine, drain(engine))
    assert len(outputs) > 30
    for name, output in outputs.items():
        cut = text.index(name[:-1])
        assert output.text == text[:cut]
        assert output.finish_reason is STOP
        # The token in which the stop string ends is the last one.
        assert len(output.token_ids) == -(-(cut + int(name[-1])) // 2)
        assert output.token_ids == whole.token_ids[: len(output.token_ids)]


def test_text_that_may_begin_a_stop_string_is_held_back(engine):
    (whole,) = engine.generate([PROMPT], seeded(4, 6))
    stop = whole.text[1:9] + "zz!"  # begins, and never ends
    events = list(engine.stream(PROMPT, seeded(4, 6, stop=stop)))
    assert [event.text for event in events[:4]] == [whole.text[0], "", "", ""]
    assert "".join(event.text for event in events) == whole.text
    assert events[-1].finish_reason is LENGTH


def test_stop_string_in_the_last_token_wins_over_its_length(engine):
    (whole,) = engine.generate([PROMPT], seeded(4, 5))
    (output,) = engine.generate([PROMPT], seeded(4, 5, stop=whole.text[-3:]))
    assert output.finish_reason is STOP
    assert output.text == whole.text[:-3]
    assert output.token_ids == whole.token_ids


def test_every_max_tokens_gives_a_prefix(engine):
    (whole,) = engine.generate([PROMPT], seeded(6, 11))
    outputs = engine.generate([PROMPT] * 11, [seeded(6, n) for n in range(1, 12)])
    for n, output in enumerate(outputs, 1):
        assert output.token_ids == whole.token_ids[:n]
        assert output.finish_reason is LENGTH


def test_end_of_the_context(engine):
    context = engine.config.max_context
    for length in (context - 1, context - 2, context - 7):
        (output,) = engine.generate(prompts_of([length], seed=length), greedy(1000))
        assert len(output.token_ids) == context - length
        assert output.finish_reason is LENGTH


def test_end_tokens_are_those_of_model_and_tokenizer(engine, monkeypatch):
    (whole,) = engine.generate([PROMPT], seeded(2, 10))
    in_model, in_tokenizer = whole.token_ids[5], whole.token_ids[3]
    assert in_model not in whole.token_ids[:5]
    assert in_tokenizer not in whole.token_ids[:3]
    monkeypatch.setattr(
        engine, "model_config", dataclasses.replace(MODEL, eos_ids=frozenset({in_model}))
    )
    (output,) = engine.generate([PROMPT], seeded(2, 10))
    assert output.token_ids == whole.token_ids[:6]
    monkeypatch.setattr(engine.tokenizer, "eos_ids", frozenset({in_tokenizer}))
    (output,) = engine.generate([PROMPT], seeded(2, 10))
    assert (output.token_ids, output.finish_reason) == (whole.token_ids[:4], STOP)
    (output,) = engine.generate([PROMPT], seeded(2, 10, ignore_eos=True))
    assert (output.token_ids, output.finish_reason) == (whole.token_ids, LENGTH)
    # What the caller names stops all the same.
    (output,) = engine.generate(
        [PROMPT], seeded(2, 10, ignore_eos=True, stop_token_ids=(in_tokenizer,))
    )
    assert (output.token_ids, output.finish_reason) == (whole.token_ids[:4], STOP)


def test_one_token_needs_no_transfer():
    engine = tiny_engine("disaggregated")
    before = engine.stats()["kv_bytes_transferred"]
    outputs = engine.generate(prompts_of([1, 9, 40]), greedy(1))
    assert [len(output.token_ids) for output in outputs] == [1, 1, 1]
    assert [output.metrics.kv_bytes for output in outputs] == [0, 0, 0]
    assert engine.stats()["kv_bytes_transferred"] == before
    check_idle(engine)


@pytest.mark.parametrize("length", [1, 3, 4, 5, 9, 16, 17])
def test_every_page_with_a_token_is_sent_once(length):
    """Prompts shorter than a page, and the partial last page, included."""
    engine = tiny_engine("disaggregated")
    (output,) = engine.generate(prompts_of([length]), greedy(3))
    pages = -(-length // engine.config.page_size)
    per_token = kv_bytes_per_token(MODEL, 4)
    assert output.metrics.kv_bytes == pages * engine.config.page_size * per_token
    check_idle(engine)


def test_usage_is_that_of_colocated():
    prompts = prompts_of([1, 4, 7, 8, 15, 16, 17, 33, 40])
    params = [seeded(i, 1 + i, logprobs=1, stop_token_ids=(3, 5, 8)) for i in range(9)]
    runs = []
    for placement in BOTH:
        engine = tiny_engine(placement)
        forget_prefixes(engine)
        runs.append(engine.generate(prompts, params))
        check_idle(engine)
    for here, there in zip(*runs, strict=True):
        same(here, there)
        assert [step.token_id for step in here.logprobs] == here.token_ids
        for name in ("prompt_tokens", "cached_tokens", "output_tokens", "finish_reason"):
            assert getattr(here.metrics, name) == getattr(there.metrics, name)
        assert here.metrics.output_tokens == len(here.token_ids)


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
    with pytest.raises(ValueError, match="4 .* 3|3 .* 4"):
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


def test_first_come_first_served(engine):
    """First tokens come in the order of arrival, though later prompts are shorter."""
    prompts = prompts_of([40, 3, 30, 1, 20, 2, 10, 1, 5], seed=4)
    names = [engine.submit(prompt, greedy(5)) for prompt in prompts]
    events = drain(engine)
    first = [event.request_id for event in events if event.index == 0]
    assert sorted(first, key=names.index) == first or first[0] == names[0]
    admitted = [engine.pop_output(name).metrics for name in names]
    queued = [metrics.queue_s for metrics in admitted]
    assert all(math.isfinite(value) for value in queued)
    assert all(later >= earlier - 1e-3 for earlier, later in pairwise(queued))


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
