"""The scheduler's decisions, played on a device without arithmetic (fake_device.py)."""

import random

import numpy as np
import pytest
from fake_device import FakeEngine, expected_outputs, make_request, page_set, random_requests
from hypothesis import given, settings
from hypothesis import strategies as st

from jinfire.config import EngineConfig
from jinfire.errors import EmptyPrompt, RequestTooLong
from jinfire.kvcache.page_table import pages_for
from jinfire.request import FinishReason
from jinfire.scheduler import Scheduler
from jinfire.sequence import SequenceState

both = pytest.mark.parametrize("colocated", [True, False], ids=["colocated", "disaggregated"])


def small_config(**changes) -> EngineConfig:
    defaults = {
        "page_size": 4,
        "max_rows": 3,
        "max_context": 32,
        "prefill_shapes": ((1, 4), (2, 4), (1, 8)),
        "row_buckets": (1, 2),
        "context_buckets": (8, 16),
        "decode_steps": 2,
    }
    return EngineConfig(**(defaults | changes))


def play(engine, requests):
    for request in requests:
        engine.add(request)
    engine.drain()
    engine.check_idle()
    engine.check_outputs(requests)
    return engine


# Whole runs.


@settings(max_examples=100)
@given(
    seed=st.integers(0, 2**32 - 1),
    colocated=st.booleans(),
    caching=st.booleans(),
    device_stops=st.booleans(),
    steps=st.integers(1, 5),
    microbatches=st.integers(1, 3),
    spare_pages=st.integers(0, 20),
    page_size=st.sampled_from([1, 3, 4]),
    attention_chunk=st.sampled_from([None, 1, 3, 4, 6, 9, 40]),
)
def test_random_runs(
    seed,
    colocated,
    caching,
    device_stops,
    steps,
    microbatches,
    spare_pages,
    page_size,
    attention_chunk,
):
    rng = random.Random(seed)
    config = small_config(
        page_size=page_size,
        decode_steps=steps,
        prefix_caching=caching,
        num_pages=1 + pages_for(31, page_size) + spare_pages,
        max_rows=rng.choice([1, 3, 5]),
        prefill_shapes=rng.choice([((1, 4), (2, 4), (1, 8)), ((1, 3),), ((2, 1),)]),
    )
    latency = rng.choice([lambda _: 1, lambda _: rng.randrange(1, 6)])
    engine = FakeEngine(config, colocated, microbatches, latency, device_stops, attention_chunk)
    requests = random_requests(rng, 40, 25)
    todo = list(requests)
    while todo or engine.scheduler.has_work:
        for _ in range(min(len(todo), rng.choice([0, 0, 1, 8]))):
            engine.add(todo.pop(0))
        engine.step()
        if rng.random() < 0.1:
            engine.abort(str(rng.randrange(len(requests))))
        assert engine.steps < 5000, "no progress"
    engine.drain()
    engine.check_idle()
    engine.check_outputs(requests)


@both
def test_500_requests_with_aborts_leave_every_page_free(colocated):
    rng = random.Random(7)
    engine = FakeEngine(
        small_config(max_rows=8, num_pages=40), colocated, 2, lambda _: rng.randrange(1, 4)
    )
    requests = random_requests(rng, 500, 25)
    for request in requests:
        engine.add(request)
    while engine.scheduler.has_work:
        engine.step()
        if rng.random() < 0.2:
            engine.abort(str(rng.randrange(500)))
    engine.drain()
    engine.check_idle()
    engine.check_outputs(requests)
    assert len(engine.finished) == 500
    assert set(engine.finished.values()) == {
        FinishReason.STOP,
        FinishReason.LENGTH,
        FinishReason.ABORT,
    }
    assert engine.scheduler.stats.preemptions > 0
    assert engine.scheduler.stats.cached_tokens > 0


# Who is let in.


@both
def test_add_refuses_what_can_never_fit(colocated):
    engine = FakeEngine(small_config(num_pages=6), colocated)
    with pytest.raises(RequestTooLong, match=r"32 prompt tokens .* max_context=32"):
        engine.scheduler.add(make_request("context", range(32)))
    with pytest.raises(RequestTooLong, match=r"10 prompt tokens and max_tokens=12 need 6 .* has 5"):
        engine.scheduler.add(make_request("pool", range(10), 12))
    with pytest.raises(EmptyPrompt):
        engine.scheduler.add(make_request("empty", []))
    assert not engine.scheduler.has_work
    play(engine, [make_request("fits", range(10), 11)])  # 20 tokens need keys and values


def test_one_token_needs_no_decode_pages():
    config = small_config()
    scheduler = Scheduler(config, page_set(9), page_set(2))
    with pytest.raises(RequestTooLong, match="decode pool has 1"):
        scheduler.add(make_request("two", range(8), 2))
    sequence = scheduler.add(make_request("one", range(8), 1))
    plan = scheduler.plan()
    (chunk,) = plan.prefill.last_chunks
    assert not chunk.needs_handoff
    assert (sequence.row, sequence.decode_pages.columns) == (None, 0)


def test_request_ids_are_unique_while_unfinished():
    engine = FakeEngine(small_config(), colocated=True)
    engine.add(make_request("a", [1, 2]))
    with pytest.raises(ValueError, match="'a', unfinished"):
        engine.scheduler.add(make_request("a", [3]))
    assert engine.abort("a")
    assert not engine.scheduler.abort("a")
    assert not engine.scheduler.abort("never seen")
    engine.finished.clear()
    play(engine, [make_request("a", [3])])


@both
def test_first_come_first_served_without_skipping(colocated):
    engine = FakeEngine(small_config(num_pages=8, prefix_caching=False), colocated)
    engine.add(make_request("small", range(4), 12))
    engine.step()
    head = engine.add(make_request("large", range(10, 32), 3))
    tail = engine.add(make_request("tail", [40], 2))
    assert engine.step().prefill is None
    while head.admissions == 0:
        assert tail.admissions == 0
        engine.step()
    engine.drain()
    engine.check_idle()


def test_lowest_free_row():
    engine = FakeEngine(small_config(), colocated=True)
    sequences = [engine.add(make_request(i, [i], 20)) for i in range(3)]
    engine.step()
    engine.step()
    assert [sequence.row for sequence in sequences] == [0, 1, 2]
    engine.abort("1")
    engine.abort("0")
    assert engine.add(make_request("new", [9], 20)).row is None
    plan = engine.step()
    assert engine.scheduler.get("new").row == 0
    assert plan.halt == [0, 1]
    assert plan.decode.row_bucket == 3  # row 2 still runs


def test_blocked_head_does_not_walk_its_prefix_every_step(monkeypatch):
    engine = FakeEngine(small_config(num_pages=8), colocated=False)
    engine.add(make_request("runs", range(4), 24))
    engine.step()
    engine.step()
    engine.add(make_request("waits", range(10, 32), 3))
    walks = []
    monkeypatch.setattr(engine.prefill_pool, "match", lambda tokens: walks.append(tokens) or [])
    for _ in range(5):
        engine.step()
    assert walks == [list(range(10, 32))]


# The ends of a request.


@both
@pytest.mark.parametrize("device_stops", [True, False])
def test_first_token_ends_the_request(colocated, device_stops):
    request = make_request("a", [1, 2, 3], 8)
    token = expected_outputs(request, 32)[0][0]
    engine = FakeEngine(small_config(), colocated, device_stops=device_stops)
    play(engine, [make_request("a", [1, 2, 3], 8, stop=[token])])
    assert engine.outputs["a"] == [token]
    assert engine.finished["a"] is FinishReason.STOP


def test_first_token_known_before_the_copy_arrives_ends_the_request():
    engine = FakeEngine(small_config(), colocated=False, latency=lambda _: 3)
    request = make_request("a", [1, 2, 3], 8)
    token = expected_outputs(request, 32)[0][0]
    sequence = engine.add(make_request("a", [1, 2, 3], 8, stop=[token]))
    engine.step()
    taken = engine.scheduler.commit_first(sequence, token)
    assert taken.finish_reason is FinishReason.STOP
    engine.end("a", taken.finish_reason)
    for _ in range(4):
        plan = engine.step()
        assert (plan.install, plan.decode, plan.halt) == ([], None, [])
    engine.check_idle()


@both
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 8])
@pytest.mark.parametrize("prompt", [1, 3, 4, 5, 8, 9])
def test_max_tokens_at_page_borders(colocated, max_tokens, prompt):
    engine = play(
        FakeEngine(small_config(), colocated), [make_request("a", range(prompt), max_tokens)]
    )
    assert len(engine.outputs["a"]) == max_tokens
    rows = sum(len(plan.install) for plan in engine.plans)
    assert rows == (max_tokens > 1)
    dispatches = sum(plan.decode is not None for plan in engine.plans)
    assert dispatches == pages_for(max_tokens - 1, 2)  # 2 steps each, and none too many


@both
def test_end_of_the_context(colocated):
    engine = play(FakeEngine(small_config(), colocated), [make_request("a", range(20), 100)])
    assert len(engine.outputs["a"]) == 12
    assert engine.finished["a"] is FinishReason.LENGTH


def test_stop_wins_over_length():
    request = make_request("a", [1, 2, 3], 2)
    last = expected_outputs(request, 32)[0][1]
    engine = play(FakeEngine(small_config(), True), [make_request("a", [1, 2, 3], 2, [last])])
    assert engine.finished["a"] is FinishReason.STOP


@both
def test_abort_in_every_state(colocated):
    seen = set()
    for steps in range(12):
        engine = FakeEngine(small_config(max_rows=1), colocated, latency=lambda _: 2)
        requests = [make_request("a", range(18), 9), make_request("b", range(5), 3)]
        sequence, _ = [engine.add(request) for request in requests]
        for _ in range(steps):
            engine.step()
        seen.add(sequence.state)
        engine.abort("a")
        engine.drain()
        engine.check_idle()
        engine.check_outputs(requests)
        assert engine.finished["b"] is FinishReason.LENGTH
    assert seen >= set(SequenceState) - ({SequenceState.HANDOFF} if colocated else set())


@both
def test_finish_by_the_engine_halts_the_row_once(colocated):
    engine = FakeEngine(small_config(), colocated)
    sequence = engine.add(make_request("a", [1, 2], 25))
    while sequence.num_outputs < 3:
        engine.step()
    engine.scheduler.finish(sequence, FinishReason.STOP)
    engine.scheduler.finish(sequence, FinishReason.LENGTH)
    engine.end("a", sequence.finish_reason)
    assert sequence.finish_reason is FinishReason.STOP
    assert engine.step().halt == [0]
    assert engine.step().halt == []
    engine.check_idle()


def test_failed_pages_are_not_offered_again():
    for reason, cached in ((FinishReason.ABORT, 1), (FinishReason.ERROR, 0)):
        engine = FakeEngine(small_config(prefill_shapes=((1, 4),)), colocated=True)
        sequence = engine.add(make_request("a", range(10), 3))
        engine.step()
        engine.scheduler.finish(sequence, reason)
        assert len(engine.prefill_pool.match(range(10))) == cached


# Commit.


def commit_case(valid, tokens=((5, 6, 7),), max_tokens=9, stop=()):
    scheduler_config = small_config(decode_steps=3)
    pages = page_set(20)
    scheduler = Scheduler(scheduler_config, pages, pages)
    sequence = scheduler.add(make_request("a", [1, 2], max_tokens, stop))
    plan = scheduler.plan()
    scheduler.commit_first(sequence, 4)
    taken = scheduler.commit_decode(plan.decode, np.array(tokens).T, np.array([valid], bool).T)
    return scheduler, sequence, taken


def test_commit_takes_valid_tokens_in_order():
    _, sequence, taken = commit_case([1, 1, 0])
    assert [(t.token, t.index, t.row, t.step) for t in taken] == [(5, 1, 0, 0), (6, 2, 0, 1)]
    assert sequence.output_ids == [4, 5, 6]


@pytest.mark.parametrize(
    ("valid", "halt"), [([1, 1, 0], []), ([1, 1, 1], [0])], ids=["stopped", "ran on"]
)
def test_row_is_halted_unless_the_device_is_known_to_have_stopped_it(valid, halt):
    scheduler, sequence, taken = commit_case(valid, stop=[6])
    assert [t.token for t in taken] == [5, 6]
    assert taken[-1].finish_reason is sequence.finish_reason is FinishReason.STOP
    assert scheduler.plan().halt == halt


def test_commit_first_comes_before_its_dispatch():
    pages = page_set(20)
    scheduler = Scheduler(small_config(), pages, pages)
    scheduler.add(make_request("a", [1, 2]))
    plan = scheduler.plan()
    with pytest.raises(AssertionError, match="commit_first"):
        scheduler.commit_decode(plan.decode, np.zeros((2, 1), int), np.ones((2, 1), bool))


# Preemption.


@both
@pytest.mark.parametrize("steps", [1, 3])
def test_preempted_requests_get_the_same_tokens(colocated, steps):
    config = small_config(num_pages=14, decode_steps=steps, prefix_caching=False)
    requests = [make_request(i, [i, 1, 2, 3], 27) for i in range(6)]
    engine = play(FakeEngine(config, colocated, latency=lambda _: 2), requests)
    assert engine.scheduler.stats.preemptions > 0
    assert engine.scheduler.stats.recomputed_tokens > 0
    # A request that had to go does not come back to be thrown out at once, again and again.
    assert engine.scheduler.stats.preemptions <= 2 * len(requests)


def test_youngest_is_preempted_and_waits_at_the_front_for_its_tokens():
    config = small_config(num_pages=10, max_context=64)
    engine = FakeEngine(config, colocated=True)
    old, middle, young = (engine.add(make_request(i, [i, 1, 2], 29)) for i in range(3))
    last = engine.add(make_request("last", [9], 4))
    while not engine.plans or not engine.plans[-1].preempted:
        before = young.num_outputs
        plan = engine.step()
    assert plan.preempted == [young]
    assert young.state is SequenceState.WAITING
    assert plan.halt == [2]
    assert young.num_outputs == before + 2  # the dispatch under way still counts
    assert young.in_flight == 0
    assert list(engine.scheduler._waiting.values()) == [young, last]
    while not middle.preemptions:
        engine.step()
    assert list(engine.scheduler._waiting.values()) == [middle, young, last]
    assert old.preemptions == 0
    engine.drain()
    engine.check_idle()


def test_preempted_sequence_may_end_with_the_tokens_under_way():
    config = small_config(num_pages=7, max_context=64, decode_steps=4, prefix_caching=False)
    engine = FakeEngine(config, colocated=True)
    old = engine.add(make_request("old", [1, 2, 3, 4], 20))
    young = engine.add(make_request("young", [5], 9))
    while not young.preemptions:
        engine.step()
    assert young.state is SequenceState.FINISHED
    assert engine.scheduler.num_waiting == 0
    assert young.admissions == 1
    engine.drain()
    engine.check_idle()
    assert old.finish_reason is young.finish_reason is FinishReason.LENGTH


# Pages and buckets.


def test_pages_grow_with_the_dispatches_and_not_beyond_the_end():
    engine = FakeEngine(small_config(decode_steps=3), colocated=True)
    sequence = engine.add(make_request("a", [1, 2, 3], 9))  # keys and values for 11 tokens
    held, bounds = [], []
    for _ in range(3):
        engine.step()
        held.append(len(sequence.decode_pages.by_group["full"]))
        bounds.append(sequence.kv_bound)
    assert bounds == [6, 9, 11]
    assert held == [2, 3, 3]
    grants = [plan.decode.grants.get("full", []) for plan in engine.plans]
    assert [[grant[:2] for grant in step] for step in grants] == [[], [(0, 2)], []]
    assert [plan.decode.width for plan in engine.plans] == [2, 4, 4]
    assert engine.step().decode is None  # its last token is on its way


def test_handoff_frees_the_prefill_pool():
    engine = FakeEngine(small_config(), colocated=False, latency=lambda _: 4)
    sequence = engine.add(make_request("a", range(9), 5))
    engine.step()
    engine.step()
    assert sequence.state is SequenceState.HANDOFF
    assert engine.prefill_pool.free_pages == engine.prefill_pool.total
    assert engine.decode_pool.free_pages < engine.decode_pool.total
    assert engine.prefill_pool.cached_pages == 2
    engine.drain()
    engine.check_idle()


@both
def test_prefix_hits_are_counted_and_change_nothing(colocated):
    engine = FakeEngine(small_config(), colocated)
    requests = [make_request(i, [*range(12), i], 4) for i in range(3)]
    sequences = []
    for request in requests:
        sequences.append(engine.add(request))
        engine.drain()
    engine.check_outputs(requests)
    assert [sequence.cached for sequence in sequences] == [0, 12, 12]
    assert engine.scheduler.stats.cached_tokens == 24
    assert engine.scheduler.stats.prompt_tokens == 39
    assert engine.scheduler.stats.prefill_tokens == 15


def test_colocated_answers_are_found_by_the_next_turn():
    engine = FakeEngine(small_config(), colocated=True)
    play(engine, [make_request("a", range(6), 7)])
    conversation = [*range(6), *engine.outputs["a"]]
    sequence = engine.add(make_request("b", [*conversation, 1, 2], 2))
    engine.drain()
    assert sequence.cached == 12  # 12 of 13 tokens have keys and values


def test_page_size_must_agree():
    with pytest.raises(ValueError, match=r"expected 4 .* got 8"):
        Scheduler(small_config(), page_set(9, 8), page_set(9, 8))
