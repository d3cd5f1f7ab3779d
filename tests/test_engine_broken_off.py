"""The engine itself fails, or is broken off: requests end as errors, later ones are right."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest
from engines import (
    BOTH,
    alone,
    check_idle,
    drain,
    forget_prefixes,
    greedy,
    prompts_of,
    same,
    tiny_engine,
)

from jinfire import EngineFailed, FinishReason, TransferFailed


def submit_two(engine):
    return [engine.submit(prompt, greedy(9)) for prompt in prompts_of([6, 30], seed=4)]


@pytest.mark.parametrize("placement", BOTH)
def test_tokens_that_never_come_end_the_requests_as_errors(placement, monkeypatch):
    """A device that stops a row too early may not keep the caller waiting for ever."""
    engine = tiny_engine(placement)
    decode = engine._runner.decode

    def silent(plan):
        tokens = decode(plan)
        return dataclasses.replace(tokens, token=np.full(tokens.token.shape, -1, np.int32))

    with monkeypatch.context() as patch:
        patch.setattr(engine._runner, "decode", silent)
        names = submit_two(engine)
        drain(engine, most_steps=200)
    for name in names:
        output = engine.pop_output(name)
        assert output.finish_reason is FinishReason.ERROR
        assert isinstance(output.error, EngineFailed)
        assert len(output.token_ids) == 1  # the first one, from the prefill
        assert "no progress" in output.metrics.status
    check_idle(engine)


@pytest.mark.parametrize("fault", [KeyboardInterrupt, jax.errors.JaxRuntimeError, RuntimeError])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("call", ["prefill", "send", "install", "decode", "_wait"])
@pytest.mark.parametrize("placement", BOTH)
def test_a_step_broken_off_ends_all_requests_and_the_next_ones_are_right(
    placement, call, after, fault, monkeypatch
):
    """Before or after a program is issued: no page without content is ever found again."""
    engine = tiny_engine(placement)
    want = [engine.generate(prompt, greedy(9))[0] for prompt in prompts_of([6, 30], seed=4)]
    for moment in (0, 1):
        forget_prefixes(engine)
        owner = engine if call == "_wait" else engine._runner
        real, calls = getattr(owner, call), itertools.count()

        def broken(*args, real=real, calls=calls, moment=moment):
            hit = next(calls) == moment
            if hit and not after:
                raise fault("broken off")
            result = real(*args)
            if hit:
                raise fault("broken off")
            return result

        with monkeypatch.context() as patch:
            patch.setattr(owner, call, broken)
            names = submit_two(engine)
            raised = None
            try:
                drain(engine, most_steps=200)
            except fault as error:
                raised = error
        # Where the engine makes no such call at that moment, nothing can break.
        assert (raised is not None) == (next(calls) > moment)
        ends = {event.request_id: event.finish_reason for event in drain(engine)}
        for name in names:
            output = engine.pop_output(name)
            if output.finish_reason is FinishReason.ERROR:
                assert ends[name] is FinishReason.ERROR
                assert "broken off" in str(output.error)
        check_idle(engine)
        again = engine.generate(prompts_of([6, 30], seed=4), greedy(9))
        for one, other in zip(again, want, strict=True):
            same(one, other)


def test_a_transfer_that_does_not_arrive_fails_alone(monkeypatch):
    engine = tiny_engine("disaggregated")
    prompts = prompts_of([6, 9], seed=4)
    want = alone(engine, prompts[1], greedy(9))
    send = engine._runner.send
    lost = engine.submit(prompts[0], greedy(9))

    def stuck(sequence, sampled):
        transit = send(sequence, sampled)
        if sequence.request_id == lost:
            monkeypatch.setattr(transit, "is_ready", lambda: False)
        return transit

    with monkeypatch.context() as patch:
        patch.setattr(engine._runner, "send", stuck)
        other = engine.submit(prompts[1], greedy(9))
        # The other one decodes, however slow this machine is; then the deadline comes.
        events = []
        while not any(e.request_id == other and e.index == 1 for e in events):
            events += engine.step()
        assert not any(e.request_id == lost and e.finish_reason for e in events)
        hasty = dataclasses.replace(engine.config, transfer_timeout_s=1e-6)
        patch.setattr(engine, "config", hasty)
        events += drain(engine)
    assert [e.finish_reason for e in events if e.request_id == lost][-1] is FinishReason.ERROR
    output = engine.pop_output(lost)
    assert output.finish_reason is FinishReason.ERROR
    assert isinstance(output.error, TransferFailed)
    same(engine.pop_output(other), want)
    check_idle(engine)


def test_the_deadline_of_a_transfer_starts_with_its_prefill_done(monkeypatch):
    """A prefill that queues or compiles for long is no lost transfer."""
    engine = tiny_engine("disaggregated")
    prompt = prompts_of([6], seed=4)[0]
    want = alone(engine, prompt, greedy(9))
    prefill, transit_ready = engine._runner.prefill, []

    class Late:
        """A first token that is not there for its first hundred questions."""

        def __init__(self, token_B):
            self._token_B, self._questions = token_B, 0

        def is_ready(self):
            self._questions += 1
            return self._questions > 100

        def __array__(self, dtype=None, copy=None):
            return np.asarray(self._token_B)

    send = engine._runner.send

    def late_prefill(plan):
        sampled = prefill(plan)
        return sampled._replace(token_B=Late(sampled.token_B))

    def late_send(sequence, sampled):
        transit = send(sequence, sampled._replace(token_B=sampled.token_B._token_B))
        monkeypatch.setattr(transit, "is_ready", sampled.token_B.is_ready)
        transit_ready.append(sampled)
        return transit

    with monkeypatch.context() as patch:
        patch.setattr(engine, "config", dataclasses.replace(engine.config, transfer_timeout_s=1e-6))
        patch.setattr(engine._runner, "prefill", late_prefill)
        patch.setattr(engine._runner, "send", late_send)
        same(alone(engine, prompt, greedy(9)), want)
    assert transit_ready
    check_idle(engine)
