"""What a caller of the engine sees: outputs, events, sampling and endings."""

import dataclasses
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
    seeded,
    tiny_engine,
)
from helpers import Oracle

from jinfire import (
    Engine,
    FinishReason,
    SamplingParams,
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
    stops = {text[i : i + n] for i in range(len(text)) for n in (1, 2, 3, 5)}
    for stop in stops:
        engine.submit(PROMPT, seeded(4, 12, stop=("NEVER", stop)), request_id=stop)
    outputs = collect(engine, drain(engine))
    assert len(outputs) == len(stops) > 30
    for stop, output in outputs.items():
        cut = text.index(stop)
        assert output.text == text[:cut]
        assert output.finish_reason is STOP
        # The token in which the stop string ends is the last one.
        assert len(output.token_ids) == -(-(cut + len(stop)) // 2)
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
    ids = whole.token_ids
    early, late = [i for i in range(1, 10) if ids[i] not in ids[:i]][1:3]
    in_tokenizer, in_model = ids[early], ids[late]
    with_eos = dataclasses.replace(MODEL, eos_ids=frozenset({in_model}))
    monkeypatch.setattr(engine._admission, "_config", with_eos)
    (output,) = engine.generate([PROMPT], seeded(2, 10))
    assert output.token_ids == ids[: late + 1]
    monkeypatch.setattr(engine.tokenizer, "eos_ids", frozenset({in_tokenizer}))
    (output,) = engine.generate([PROMPT], seeded(2, 10))
    assert (output.token_ids, output.finish_reason) == (ids[: early + 1], STOP)
    (output,) = engine.generate([PROMPT], seeded(2, 10, ignore_eos=True))
    assert (output.token_ids, output.finish_reason) == (ids, LENGTH)
    # What the caller names stops all the same.
    (output,) = engine.generate(
        [PROMPT], seeded(2, 10, ignore_eos=True, stop_token_ids=(in_tokenizer,))
    )
    assert (output.token_ids, output.finish_reason) == (ids[: early + 1], STOP)


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
