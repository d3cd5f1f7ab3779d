"""Aborts, too little memory, reused and poisoned pages: nothing leaks and nothing lies."""

import itertools
import random

import numpy as np
import pytest
from engines import (
    BOTH,
    PLACEMENTS,
    alone,
    check_idle,
    collect,
    drain,
    forget_prefixes,
    greedy,
    idle_after,
    poison,
    pools,
    prompts_of,
    same,
    seeded,
    tiny_engine,
)

from jinfire import FinishReason, RequestTooLong, SamplingParams
from jinfire.kvcache.page_table import pages_for
from jinfire.sequence import SequenceState

SMALL = {"num_pages": 13}  # 12 pages of 4 tokens for 4 rows
PROMPT = prompts_of([6])[0]


@pytest.fixture(params=BOTH)
def engine(request):
    with idle_after(tiny_engine(request.param)) as engine:
        yield engine


@pytest.fixture(params=BOTH)
def small_engine(request):
    """Running rows outgrow its pool."""
    with idle_after(tiny_engine(request.param, **SMALL)) as engine:
        yield engine


# Abort.


def test_abort_at_every_moment(engine):
    """In the queue, between chunks, in transit, running with tokens under way: mates go on."""
    prompts = prompts_of([6, 40, 9, 3, 5], seed=1)
    params = [seeded(i, 14) for i in range(5)]
    want = [alone(engine, *case) for case in zip(prompts, params, strict=True)]
    seen = set()
    for victim, moment in itertools.product((1, 4), range(12)):
        forget_prefixes(engine)
        names = [engine.submit(*case) for case in zip(prompts, params, strict=True)]
        events = [event for _ in range(moment) for event in engine.step()]
        sequence = engine.scheduler.get(names[victim])
        state = (sequence.state, sequence.in_flight > 0) if sequence else None
        seen.add(state)
        assert engine.abort(names[victim]) is (state is not None)
        assert not engine.abort(names[victim])
        outputs = collect(engine, events + drain(engine))
        assert sorted(outputs) == sorted(names)
        for i, name in enumerate(names):
            if i != victim or state is None:
                same(outputs[name], want[i])
                continue
            got = outputs[name]
            assert got.finish_reason is FinishReason.ABORT
            assert got.token_ids == want[i].token_ids[: len(got.token_ids)]
            assert got.text == engine.tokenizer.decode(got.token_ids)
        check_idle(engine)
    wanted = {
        (SequenceState.WAITING, False),
        (SequenceState.PREFILLING, False),
        (SequenceState.RUNNING, True),
    }
    if not engine.placement.is_colocated:
        wanted.add((SequenceState.HANDOFF, False))
    assert wanted <= seen


def test_pages_of_an_aborted_handoff_serve_the_next_request_at_once():
    """The copy of an aborted request neither arrives nor disturbs the new owner of its pages."""
    with idle_after(tiny_engine("disaggregated", **SMALL)) as engine:
        victim, heir = prompts_of([30, 31], seed=3)
        want = alone(engine, heir, seeded(1, 10))
        for _ in range(5):
            forget_prefixes(engine)
            name = engine.submit(victim, seeded(0, 10))
            while engine.scheduler.get(name).state is not SequenceState.HANDOFF:
                engine.step()
            engine.abort(name)
            same(alone(engine, heir, seeded(1, 10)), want)
            engine.pop_output(name)


def test_abort_everything_and_go_on(engine):
    want = alone(engine, PROMPT, seeded(1))
    for moment in range(8):
        names = [engine.submit(p, seeded(2, 20)) for p in prompts_of([3, 20, 30, 7, 9, 40], 2)]
        for _ in range(moment):
            engine.step()
        for name in names:
            engine.abort(name)
        assert not engine.scheduler.has_work
        check_pages_free(engine)
        same(alone(engine, PROMPT, seeded(1)), want)
        for name in names:
            engine.pop_output(name)
        check_idle(engine)


def check_pages_free(engine):
    for pool in pools(engine):
        assert pool.free_pages == pool.total


def test_abort_of_what_is_not_running(engine):
    assert not engine.abort("never seen")
    output = alone(engine, PROMPT, greedy(2))
    assert not engine.abort(output.request_id)


def test_abort_between_tokens_and_their_copies(engine):
    """A request that ended with its first token while its pages were on their way."""
    first = alone(engine, PROMPT, greedy(1)).token_ids[0]
    for _ in range(3):
        output = alone(engine, PROMPT, greedy(20, stop_token_ids=(first,)))
        assert output.token_ids == [first]
        check_pages_free(engine)


# Too little memory.


def test_preemption_gives_the_same_tokens(small_engine):
    engine = small_engine
    prompts = prompts_of([9, 5, 13, 8, 2, 11], seed=2)
    params = [seeded(i, 24, logprobs=1) for i in range(6)]
    want = [alone(engine, *case) for case in zip(prompts, params, strict=True)]
    before = engine.stats()["preemptions"]
    names = [engine.submit(*case) for case in zip(prompts, params, strict=True)]
    outputs = collect(engine, drain(engine))
    for name, output in zip(names, want, strict=True):
        same(outputs[name], output)
        assert len(outputs[name].logprobs) == 24
        for here, there in zip(outputs[name].logprobs, output.logprobs, strict=True):
            assert here.token_id == there.token_id
            assert here.logprob == pytest.approx(there.logprob, abs=1e-4)
    preemptions = engine.stats()["preemptions"] - before
    assert preemptions > 0
    assert sum(outputs[name].metrics.preemptions for name in names) == preemptions
    assert outputs[names[0]].metrics.preemptions == 0, "the oldest is never preempted"


def test_abort_of_preempted_requests(small_engine):
    engine = small_engine
    prompts = prompts_of([9, 5, 13, 8], seed=2)
    want = [alone(engine, prompt, seeded(i, 24)) for i, prompt in enumerate(prompts)]
    for patience in range(3):
        names = [engine.submit(prompt, seeded(i, 24)) for i, prompt in enumerate(prompts)]
        events = []
        while not any(
            sequence.preemptions and sequence.state is SequenceState.WAITING
            for sequence in engine.scheduler._sequences.values()
        ):
            events += engine.step()
        for _ in range(patience):
            events += engine.step()
        victims = [s.request_id for s in engine.scheduler._sequences.values() if s.preemptions]
        for name in victims:
            engine.abort(name)
        outputs = collect(engine, events + drain(engine))
        for name, output in zip(names, want, strict=True):
            got = outputs[name]
            assert got.token_ids == output.token_ids[: len(got.token_ids)]
            if name not in victims:
                same(got, output)
        check_idle(engine)


def test_prompts_that_fill_the_pool(small_engine):
    """48 tokens fit 12 pages; one token more is refused, with the numbers."""
    engine = small_engine
    for length, max_tokens in [(48, 1), (47, 2), (46, 3), (40, 9), (1, 48)]:
        prompt = prompts_of([length], seed=length)[0]
        names = [engine.submit(prompt, seeded(1, max_tokens)) for _ in range(2)]
        names.append(engine.submit(PROMPT, seeded(2, 4)))
        outputs = collect(engine, drain(engine))
        assert [len(outputs[name].token_ids) for name in names] == [max_tokens, max_tokens, 4]
        same(outputs[names[0]], outputs[names[1]])
        with pytest.raises(RequestTooLong, match=r"need 13 pages of 4 tokens, the .* has 12"):
            engine.submit(prompt, seeded(1, max_tokens + 1))
        check_idle(engine)


def test_refused_requests_hold_nobody_up(small_engine):
    engine = small_engine
    prompts = [PROMPT, [1] * 49, PROMPT, [], [1] * 60, PROMPT]
    outputs = engine.generate(prompts, seeded(1, 5))
    reasons = [output.finish_reason.value for output in outputs]
    assert reasons == ["length", "error", "length", "error", "error", "length"]
    assert [type(output.error).__name__ for output in outputs if output.error] == [
        "RequestTooLong",
        "EmptyPrompt",
        "RequestTooLong",
    ]
    same(outputs[0], outputs[2])


# Prefix cache.


def test_prefix_hits_give_the_same_tokens_and_are_counted(engine):
    forget_prefixes(engine)
    stem = prompts_of([21], seed=11)[0]
    page = engine.config.page_size
    cases = [
        (stem, 0),
        (stem, 20),
        (stem[:20], 16),  # page-aligned: the last page is computed, for its logits
        (stem[:17], 16),
        (stem[:16], 12),
        (stem[:4], 0),
        (stem[:5], 4),
        ([*stem[:10], 7, 7], 8),
        ([7, *stem[1:]], 0),
    ]
    hits = []
    for i, (prompt, cached) in enumerate(cases):
        output = alone(engine, prompt, seeded(i, 6))
        assert output.metrics.cached_tokens == cached, prompt
        assert cached % page == 0
        hits.append(output)
    for i, (prompt, _) in enumerate(cases):
        forget_prefixes(engine)
        output = alone(engine, prompt, seeded(i, 6))
        assert output.metrics.cached_tokens == 0
        same(hits[i], output)


def test_answers_are_found_by_the_next_turn():
    """Colocated; a disaggregated prefill mesh never sees the answers' keys and values."""
    for placement, least in (("colocated", 16), ("disaggregated", 8)):
        with idle_after(tiny_engine(placement)) as engine:
            forget_prefixes(engine)
            prompt = prompts_of([9], seed=12)[0]
            first = alone(engine, prompt, seeded(1, 9))
            turn = [*prompt, *first.token_ids, 3, 4]
            second = alone(engine, turn, seeded(2, 5))
            assert second.metrics.cached_tokens == least
            forget_prefixes(engine)
            same(alone(engine, turn, seeded(2, 5)), second)


def test_least_recently_used_prefix_is_evicted(small_engine):
    engine = small_engine
    forget_prefixes(engine)
    old, recent, other = prompts_of([13, 13, 40], seed=14)
    for prompt in (old, recent, old, recent):
        alone(engine, prompt, greedy(1))
    # 12 pages; the long prompt takes 10, the recent one keeps its last holder's order.
    alone(engine, other[:25], greedy(1))
    kept = alone(engine, recent, greedy(1)).metrics.cached_tokens
    gone = alone(engine, old, greedy(1)).metrics.cached_tokens
    assert kept == 12
    assert gone < 12


def test_prefix_caching_can_be_off():
    with idle_after(tiny_engine("colocated", prefix_caching=False)) as engine:
        first, second = (alone(engine, PROMPT * 4, seeded(1)) for _ in range(2))
        same(first, second)
        assert second.metrics.cached_tokens == 0
        assert pools(engine)[0].cached_pages == 0


# Soak.


def random_cases(rng: random.Random, count: int):
    """Requests with shared prefixes, of all lengths and kinds of parameters."""
    stems = prompts_of([30, 30, 30], seed=rng.randrange(1000))
    cases = []
    for i in range(count):
        stem = rng.choice(stems)
        prompt = stem[: rng.randrange(1, 30)] + prompts_of([rng.randrange(0, 4)], seed=i)[0]
        params = SamplingParams(
            max_tokens=rng.choice([1, 2, 3, 5, 8, 13]),
            temperature=rng.choice([0.0, 0.7, 1.0]),
            top_k=rng.choice([0, 0, 5]),
            top_p=rng.choice([1.0, 1.0, 0.9]),
            seed=rng.randrange(2**32),
            stop_token_ids=rng.sample(range(97), rng.choice([0, 0, 4])),
            stop=rng.choice([(), ("a", "qz")]),
            logprobs=rng.choice([None, None, 2]),
        )
        cases.append((prompt, params))
    return cases


def late_copies(engine, rng, monkeypatch):
    """Copies take some steps more, and so overtake each other."""
    send = engine._runner.send

    def slow_send(sequence, sampled):
        transit = send(sequence, sampled)
        looks, arrived = itertools.count(), transit.is_ready
        patience = rng.choice([0, 0, 1, 5])
        transit.is_ready = lambda: next(looks) >= patience and arrived()
        return transit

    if not engine.placement.is_colocated:
        monkeypatch.setattr(engine._runner, "send", slow_send)


def random_run(engine, rng, cases, want, requests, poisoned=0.0):
    """Requests drawn from the cases arrive at random, and one in some is aborted."""
    chosen = [rng.randrange(len(cases)) for _ in range(requests)]
    names, events, aborted = [], [], set()
    while len(names) < requests or engine.has_work:
        for _ in range(rng.choice([0, 0, 1, 2, 6])):
            if len(names) < requests:
                names.append(engine.submit(*cases[chosen[len(names)]]))
        events += engine.step()
        if names and rng.random() < 0.15:
            name = rng.choice(names[-12:])
            if engine.abort(name):
                aborted.add(name)
        if rng.random() < poisoned:
            poison(engine)
    outputs = collect(engine, events)
    assert sorted(outputs) == sorted(names)
    for name, index in zip(names, chosen, strict=True):
        got = outputs[name]
        if name in aborted:
            assert got.finish_reason is FinishReason.ABORT
            assert got.token_ids == want[index].token_ids[: len(got.token_ids)]
        else:
            same(got, want[index])
    assert 0 < len(aborted) < requests


@pytest.mark.parametrize("requests", [500, pytest.param(5000, marks=pytest.mark.long)])
def test_random_requests_with_aborts(small_engine, requests, monkeypatch):
    engine, rng = small_engine, random.Random(requests)
    late_copies(engine, rng, monkeypatch)
    cases = random_cases(rng, 40)
    want = [alone(engine, *case) for case in cases]
    preempted = engine.stats()["preemptions"]
    random_run(engine, rng, cases, want, requests)
    assert engine.stats()["preemptions"] > preempted
    assert engine.stats()["prefix_hit_rate"] > 0


@pytest.mark.long
@pytest.mark.parametrize("seed", range(6))
def test_random_engines(seed, monkeypatch):
    """All sizes at once, with late copies, aborts and poison."""
    rng = random.Random(seed)
    placement, page_size = rng.choice(sorted(PLACEMENTS)), rng.choice([1, 2, 3, 5, 8, 16])
    changes = {
        "page_size": page_size,
        "max_rows": rng.choice([1, 2, 3, 6]),
        "max_context": rng.choice([48, 50, 64]),
        "num_pages": 1 + pages_for(48, page_size) + rng.choice([0, 1, 3, 20]),
        "prefill_shapes": rng.choice([((1, 5),), ((3, 8),), ((1, 4), (2, 12))]),
        "row_buckets": rng.choice([(), (1,), (2, 3)]),
        "context_buckets": rng.choice([(), (9, 20)]),
        "decode_steps": rng.choice([1, 2, 3, 8]),
        "microbatches": rng.choice([None, 1, 2, 3]),
        "prefix_caching": rng.random() < 0.8,
    }
    cases = random_cases(rng, 20)
    want = [alone(tiny_engine("colocated"), *case) for case in cases]
    with idle_after(tiny_engine(placement, **changes)) as engine:
        late_copies(engine, rng, monkeypatch)
        random_run(engine, rng, cases, want, 150, poisoned=0.1)


def test_nothing_grows_over_2000_requests(engine):
    prompts = prompts_of([1 + i % 11 for i in range(40)], seed=5)
    for round_ in range(10):
        for i in range(200):
            engine.submit(prompts[i % 40], seeded(i, 1 + i % 3), request_id=f"{round_} {i}")
        ended = [event for event in drain(engine) if event.finish_reason is not None]
        assert len(ended) == 200
        for event in ended:
            engine.pop_output(event.request_id)
        check_idle(engine)
    assert engine.scheduler._blocked is None
    assert not engine._runner._halt
    for pool in pools(engine):
        assert len(pool._page_of) <= pool.total


# Poison.


@pytest.mark.parametrize("where", BOTH)
def test_poisoned_memory_changes_nothing(where):
    """NaN in the null page, in pages nobody owns and in unwritten slots, before every step."""
    with idle_after(tiny_engine(where, **SMALL)) as engine:
        prompts = prompts_of([9, 3, 13, 8, 4, 17, 30, 12], seed=7)
        params = [seeded(i, 24 - 2 * i, logprobs=3) for i in range(8)]
        forget_prefixes(engine)
        want = [alone(engine, *case) for case in zip(prompts, params, strict=True)]
        forget_prefixes(engine)
        poison(engine)  # all of them: whatever is handed out next has NaN in its tail
        names = [engine.submit(*case) for case in zip(prompts, params, strict=True)]
        events = []
        while engine.has_work:
            events += engine.step()
            poison(engine)
        outputs = collect(engine, events)
        for name, output in zip(names, want, strict=True):
            same(outputs[name], output)
            for here, there in zip(outputs[name].logprobs, output.logprobs, strict=True):
                assert here.logprob == pytest.approx(there.logprob, abs=1e-4)
                assert np.isfinite([value for _, value in here.top]).all()
        assert any(outputs[name].metrics.preemptions for name in names)


def test_a_row_that_ran_into_poison_harms_nobody(engine):
    """An aborted row runs one dispatch more, over pages that are NaN by then."""
    want = alone(engine, PROMPT, seeded(1, 12))
    victim = engine.submit(prompts_of([9], 3)[0], seeded(0, 40))
    survivor = engine.submit(PROMPT, seeded(1, 12))
    for _ in range(4):
        engine.step()
    engine.abort(victim)
    poison(engine)
    drain(engine)
    same(engine.pop_output(survivor), want)
    engine.pop_output(victim)
    same(alone(engine, PROMPT, seeded(1, 12)), want)
