"""Callers that misbehave, slow devices and odd sizes."""

import gc
import itertools

import numpy as np
import pytest
from engines import (
    BOTH,
    MODEL,
    ODD,
    PLACEMENTS,
    PairTokenizer,
    alone,
    check_idle,
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
from helpers import tiny_config

from jinfire import Engine, FinishReason, RequestTooLong
from jinfire.loading import RandomSource
from jinfire.sequence import SequenceState

PROMPT = prompts_of([6])[0]


@pytest.fixture(params=BOTH)
def engine(request):
    with idle_after(tiny_engine(request.param)) as engine:
        yield engine


# Streams and callers.


def test_closed_stream_aborts_at_every_token(engine):
    want = alone(engine, PROMPT, seeded(3, 9))
    for count in range(1, 9):
        stream = engine.stream(PROMPT, seeded(3, 9))
        events = list(itertools.islice(stream, count))
        assert [event.token_id for event in events] == want.token_ids[:count]
        stream.close()
        check_idle(engine)


def test_stream_that_nobody_reads_is_no_leak(engine):
    stream = engine.stream(PROMPT, seeded(3, 9))
    assert engine.has_work
    stream.close()
    check_idle(engine)
    stream = engine.stream(PROMPT, seeded(3, 9))
    next(stream)
    del stream
    gc.collect()
    check_idle(engine)


def test_streams_and_generate_take_turns(engine):
    """Whoever steps the engine, every stream gets all its own events, in order."""
    prompts = prompts_of([5, 17, 2], seed=6)
    want = [alone(engine, prompt, seeded(i, 9)) for i, prompt in enumerate(prompts)]
    streams = [engine.stream(prompts[i], seeded(i, 9)) for i in range(2)]
    got = [[], []]
    for turn in range(9):
        got[0].append(next(streams[0]))
        if turn % 3 == 1:
            same(engine.generate([prompts[2]], seeded(2, 9))[0], want[2])
        got[1].append(next(streams[1]))
    for stream, events, output in zip(streams, got, want, strict=False):
        assert list(stream) == []
        assert [event.token_id for event in events] == output.token_ids
        assert [event.index for event in events] == list(range(9))
        assert "".join(event.text for event in events) == output.text


def test_stream_that_finished_while_others_stepped(engine):
    want = alone(engine, PROMPT, seeded(3, 5))
    stream = engine.stream(PROMPT, seeded(3, 5))
    engine.generate(prompts_of([9, 9], seed=8), greedy(30))
    assert not engine.scheduler.has_work
    assert [event.token_id for event in stream] == want.token_ids
    # The same when somebody takes its events by stepping.
    stream = engine.stream(PROMPT, seeded(3, 5))
    drain(engine)
    assert [event.token_id for event in stream] == want.token_ids


def test_stream_sees_an_abort_from_elsewhere(engine):
    stream = engine.stream(PROMPT, seeded(3, 30))
    first = next(stream)
    engine.abort(first.request_id)
    *_, last = stream
    assert last.finish_reason is FinishReason.ABORT
    assert last.token_id is None


class Mistake(Exception):
    pass


def test_exception_in_the_callers_loop_ends_its_request_only(engine):
    want = alone(engine, PROMPT, seeded(3, 20))
    name = engine.submit(PROMPT, seeded(3, 20))

    def careless():
        for event in engine.stream(prompts_of([7], 1)[0], seeded(1, 20)):
            if event.index == 3:
                raise Mistake

    with pytest.raises(Mistake):
        careless()
    stream = engine.stream(PROMPT, seeded(3, 20))
    next(stream)
    with pytest.raises(Mistake):
        stream.throw(Mistake())
    gc.collect()
    drain(engine)
    same(engine.pop_output(name), want)


@pytest.mark.parametrize("moment", [0, 1, 3, 6])
def test_interrupted_generate_leaves_nothing(engine, monkeypatch, moment):
    mine = engine.submit(PROMPT, seeded(3, 50))
    calls = itertools.count()
    step = engine.step

    def interrupted():
        if next(calls) == moment:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(prompts_of([3, 30, 9], 5), greedy(20))
    monkeypatch.undo()
    assert engine.scheduler.get(mine) is not None
    drain(engine)
    same(engine.pop_output(mine), alone(engine, PROMPT, seeded(3, 50)))


# The order of device work.


class Late:
    """A token array that is not there before the gate opens; using it earlier is an error.

    With `may wait`, using it opens the gate, and so do a thousand looks.
    """

    def __init__(self, array, gate):
        self.array, self.gate = array, gate

    def is_ready(self):
        self.gate["looks"] += 1
        self.gate["open"] |= self.gate["may wait"] and self.gate["looks"] > 1000
        return self.gate["open"]

    def __array__(self, dtype=None, copy=None):
        assert self.gate["open"] or self.gate["may wait"], "waited for a prefill"
        self.gate["open"] = True
        return np.asarray(self.array)


def slow_prefills(engine, monkeypatch, gate):
    """Prefills issued from now on, and their copies, arrive when the gate opens."""
    prefill, send = engine._runner.prefill, engine._runner.send

    def late_prefill(plan):
        sampled = prefill(plan)
        return sampled._replace(token_B=Late(sampled.token_B, gate))

    def late_send(sequence, sampled):
        transit = send(sequence, sampled._replace(token_B=sampled.token_B.array))
        arrived = transit.is_ready
        transit.is_ready = lambda: gate["open"] and arrived()
        return transit

    monkeypatch.setattr(engine._runner, "prefill", late_prefill)
    monkeypatch.setattr(engine._runner, "send", late_send)


def test_decode_never_waits_for_a_prefill(monkeypatch):
    """Rows go on at full speed while a prefill issued beside them takes for ever."""
    with idle_after(tiny_engine("disaggregated")) as engine:
        long, short = prompts_of([40, 5], seed=15)
        want = [alone(engine, long, seeded(0, 6)), alone(engine, short, seeded(1, 50))]
        running = engine.submit(short, seeded(1, 50))
        while engine.scheduler.num_running == 0:
            engine.step()
        gate = {"open": False, "may wait": False, "looks": 0}
        slow_prefills(engine, monkeypatch, gate)
        late = engine.submit(long, seeded(0, 6))
        events = []
        dispatches = engine.stats()["decode_dispatches"]
        for _ in range(10):
            events += engine.step()
        assert engine.stats()["decode_dispatches"] == dispatches + 10
        assert {event.request_id for event in events} == {running}
        assert len(events) >= 4 * 8
        assert engine.scheduler.get(late).state is not SequenceState.RUNNING
        gate["open"] = True
        drain(engine)
        same(engine.pop_output(late), want[0])
        same(engine.pop_output(running), want[1])
    monkeypatch.undo()


def test_host_waits_instead_of_spinning(engine, monkeypatch):
    """With nothing to issue until a prefill is done, a step waits for it."""
    prompt = prompts_of([63], seed=16)[0]
    want = alone(engine, prompt, greedy(1))
    forget_prefixes(engine)
    steps = engine.stats()["steps"]
    gate = {"open": False, "may wait": True, "looks": 0}
    slow_prefills(engine, monkeypatch, gate)
    same(alone(engine, prompt, greedy(1)), want)
    assert engine.stats()["steps"] - steps <= 10
    monkeypatch.undo()


# Odd sizes.


@pytest.mark.parametrize("name", ODD)
def test_odd_sizes(name):
    placement, changes = ODD[name]
    with idle_after(tiny_engine(placement, **changes)) as engine:
        context, page = engine.config.max_context, engine.config.page_size
        lengths = {1, 2, page - 1, page, page + 1, 2 * page + 1, context - 1, 16, 17}
        lengths = sorted(n for n in lengths if 1 <= n < context)
        params = [seeded(n, 1 + n % 4) for n in lengths]
        reference = tiny_engine("colocated")
        prompts = prompts_of(lengths, seed=20)
        outputs = engine.generate(prompts, params)
        for prompt, one, output in zip(prompts, params, outputs, strict=True):
            most = min(one.max_tokens, context - len(prompt))
            (want,) = reference.generate([prompt[:63]], one)
            assert len(output.token_ids) == most
            if len(prompt) < 64:
                assert output.token_ids == want.token_ids[:most]


def test_two_tokens_are_a_vocabulary():
    """Fewer tokens than log-probabilities asked for."""
    source = RandomSource(tiny_config(layers=3, vocab_size=2, num_heads=4))
    engine = Engine(
        source,
        PairTokenizer(),  # type: ignore[arg-type]
        placement=PLACEMENTS["disaggregated"],
        config=engine_config(),
    )
    with idle_after(engine):
        params = [seeded(1, 9, logprobs=20), greedy(9, logprobs=1), seeded(2, 9, top_k=50)]
        outputs = engine.generate([[0, 1, 1]] * 3, params)
        assert {len(step.top) for step in outputs[0].logprobs} == {2}
        assert {len(step.top) for step in outputs[1].logprobs} == {1}
        for step in outputs[0].logprobs:
            assert sorted(token for token, _ in step.top) == [0, 1]
            assert sum(np.exp(value) for _, value in step.top) == pytest.approx(1, abs=1e-5)
        assert set(outputs[2].token_ids) <= {0, 1}


def test_model_shorter_than_the_configured_context():
    config = engine_config(max_context=10_000, num_pages=200)
    engine = Engine(RandomSource(MODEL), placement=PLACEMENTS["colocated"], config=config)
    assert engine.config.max_context == MODEL.max_position
    with pytest.raises(RequestTooLong, match=f"max_context={MODEL.max_position}"):
        engine.submit([1] * MODEL.max_position, greedy(1))
