"""A device and an engine without arithmetic, to test the scheduler's decisions.

The "keys and values" of a position are a hash of all tokens up to it, and the next token follows
from the hash. A program computes them from what the pages hold, so a page that was reused, shared
or granted wrongly changes tokens, as it would on a real device. Programs run in issue order; the
host sees their results one step late.
"""

import dataclasses
import random

import numpy as np

from jinfire.config import EngineConfig
from jinfire.kvcache.page_table import NULL_PAGE, PagePool
from jinfire.request import FinishReason, Request, SamplingParams
from jinfire.scheduler import Scheduler
from jinfire.sequence import DecodePlan, Plan, PrefillPlan, Sequence, SequenceState

VOCAB = 50
POISON = -1


def extend(prefix_hash: int, token: int) -> int:
    return (prefix_hash * 1_000_003 + token + 1) % (2**61 - 1)


def next_token(prefix_hash: int) -> int:
    return prefix_hash % VOCAB


def expected_outputs(request: Request, max_context: int) -> tuple[list[int], FinishReason]:
    """The tokens of a request on its own."""
    prefix_hash = 0
    for token in request.prompt_ids:
        prefix_hash = extend(prefix_hash, token)
    limit = min(request.params.max_tokens, max_context - len(request.prompt_ids))
    out: list[int] = []
    while True:
        out.append(next_token(prefix_hash))
        if out[-1] in request.stop_ids:
            return out, FinishReason.STOP
        if len(out) == limit:
            return out, FinishReason.LENGTH
        prefix_hash = extend(prefix_hash, out[-1])


def make_request(name, prompt, max_tokens=4, stop=()) -> Request:
    params = SamplingParams(max_tokens=max_tokens, stop_token_ids=tuple(stop))
    return Request(str(name), tuple(prompt), params, seed=0)


@dataclasses.dataclass
class Row:
    table: list[int]
    position: int  # of `token`, whose keys and values are not written yet
    token: int
    limit: int
    stop_ids: frozenset[int]
    active: bool


class Mesh:
    def __init__(self, pool: PagePool):
        self.size = pool.page_size
        self.pages = [[POISON] * pool.page_size for _ in range(pool.num_pages)]

    def read(self, table, position):
        if position < 0:
            return 0
        return self.pages[table[position // self.size]][position % self.size]

    def write(self, table, position, value):
        page = table[position // self.size]
        assert page != NULL_PAGE
        self.pages[page][position % self.size] = value


class FakeEngine:
    """Plan, run, commit with the programs above.

    `latency` is the steps that a handoff takes (a function of the sequence); `device_stops=False`
    is a device that does not know the stop ids, so that only the host can end a row.
    """

    def __init__(
        self, config, colocated, microbatches=1, latency=lambda sequence: 1, device_stops=True
    ):
        self.config: EngineConfig = config
        pools = [
            PagePool(config.pool_pages, config.page_size, config.prefix_caching) for _ in range(2)
        ]
        self.prefill_pool, self.decode_pool = (pools[0], pools[0]) if colocated else pools
        self.scheduler = Scheduler(config, self.prefill_pool, self.decode_pool, microbatches)
        self.prefill_mesh = Mesh(self.prefill_pool)
        self.decode_mesh = self.prefill_mesh if colocated else Mesh(self.decode_pool)
        self.colocated, self.latency, self.device_stops = colocated, latency, device_stops
        self.rows: dict[int, Row] = {}
        self.copies: list[tuple[int, Sequence, list[int], int]] = []
        self.first_tokens: list[tuple[Sequence, int]] = []
        self.previous: tuple[DecodePlan, np.ndarray, np.ndarray] | None = None
        self.steps = 0
        self.outputs: dict[str, list[int]] = {}
        self.finished: dict[str, FinishReason] = {}
        self.plans: list[Plan] = []

    def add(self, request: Request) -> Sequence:
        self.outputs[request.request_id] = []
        return self.scheduler.add(request)

    def abort(self, request_id: str) -> bool:
        done = self.scheduler.abort(request_id)
        if done:
            self.end(request_id, FinishReason.ABORT)
        return done

    def end(self, request_id, reason):
        assert request_id not in self.finished, "a request ended twice"
        self.finished[request_id] = reason

    def step(self) -> Plan:
        self.steps += 1
        ready = [copy for copy in self.copies if copy[0] <= self.steps]
        self.copies = [copy for copy in self.copies if copy[0] > self.steps]
        plan = self.scheduler.plan([copy[1] for copy in ready])
        self.plans.append(plan)
        arrivals = [sequence.arrival for sequence in self.scheduler._waiting.values()]
        assert arrivals == sorted(arrivals)
        for row in plan.halt:
            if row in self.rows:
                self.rows[row].active = False
        issued_first = self.prefill(plan.prefill) if plan.prefill else []
        self.install(plan, ready, dict(issued_first))
        record = self.decode(plan.decode) if plan.decode else None
        if not self.colocated:
            # With their copy, or from the prefill mesh when there is none.
            last = plan.prefill.last_chunks if plan.prefill else []
            no_copy = {chunk.sequence for chunk in last if not chunk.needs_handoff}
            issued_first = [first for first in issued_first if first[0] in no_copy]
            self.first_tokens += [(copy[1], copy[3]) for copy in ready]
        self.commit()
        self.first_tokens = issued_first
        self.previous = record
        return plan

    def commit(self):
        taken = [self.scheduler.commit_first(*first) for first in self.first_tokens]
        if self.previous is not None:
            taken += self.scheduler.commit_decode(*self.previous)
        for item in filter(None, taken):
            outputs = self.outputs[item.sequence.request_id]
            assert item.index == len(outputs)
            outputs.append(item.token)
            if item.finish_reason is not None:
                self.end(item.sequence.request_id, item.finish_reason)

    def prefill(self, plan: PrefillPlan) -> list[tuple[Sequence, int]]:
        microbatches, rows, chunk_size = plan.shape
        assert (rows, chunk_size) in self.config.prefill_shapes
        assert len(plan.chunks) == microbatches
        assert plan.width in self.config.context_widths()
        first_tokens = []
        for microbatch in plan.chunks:
            assert len(microbatch) <= rows
            sequences = [chunk.sequence for chunk in microbatch]
            assert len(set(sequences)) == len(sequences), "two chunks in one microbatch"
            for chunk in microbatch:
                sequence, stop = chunk.sequence, chunk.start + chunk.length
                assert 1 <= chunk.length <= chunk_size
                assert stop <= plan.width * self.config.page_size
                table = sequence.prefill_pages
                value = self.prefill_mesh.read(table, chunk.start - 1)
                for position in range(chunk.start, stop):
                    value = extend(value, sequence.tokens[position])
                    self.prefill_mesh.write(table, position, value)
                if chunk.is_last:
                    assert stop == len(sequence.tokens)
                    first_tokens.append((sequence, next_token(value)))
                    if not self.colocated and chunk.needs_handoff:
                        copy = [self.prefill_mesh.read(table, p) for p in range(stop)]
                        at = self.steps + self.latency(sequence)
                        self.copies.append((at, sequence, copy, next_token(value)))
                        self.scheduler.handoff_sent(sequence)
        return first_tokens

    def install(self, plan: Plan, ready, first_tokens: dict[Sequence, int]):
        copies = {sequence: (copy, token) for _, sequence, copy, token in ready}
        for sequence in plan.install:
            assert sequence.state is SequenceState.RUNNING
            table = list(sequence.decode_pages)
            if self.colocated:
                position, token = sequence.computed, first_tokens[sequence]
            else:
                copy, token = copies[sequence]
                position = len(copy)
                for p, value in enumerate(copy):
                    self.decode_mesh.write(table, p, value)
            active = not (self.device_stops and token in sequence.stop_ids)
            old = self.rows.get(sequence.row)
            assert old is None or not old.active, "a row was installed over an active one"
            limit, stop_ids = sequence.limit, sequence.stop_ids
            self.rows[sequence.row] = Row(table, position, token, limit, stop_ids, active)

    def decode(self, plan: DecodePlan):
        assert plan.row_bucket in self.config.decode_rows()
        assert max(plan.rows) < plan.row_bucket
        for row, column, page in plan.grants:
            assert column == len(self.rows[row].table)
            self.rows[row].table.append(page)
        for row, state in self.rows.items():
            assert not state.active or row in plan.rows, "an active row without a plan"
        shape = (plan.steps, plan.row_bucket)
        tokens, valid = np.full(shape, VOCAB + 7, np.int32), np.zeros(shape, bool)
        for step in range(plan.steps):
            for row in plan.rows:
                state = self.rows[row]
                if not state.active:
                    continue
                assert state.position < plan.width * self.config.page_size
                value = extend(self.decode_mesh.read(state.table, state.position - 1), state.token)
                self.decode_mesh.write(state.table, state.position, value)
                state.token = next_token(value)
                state.position += 1
                tokens[step, row], valid[step, row] = state.token, True
                stopped = self.device_stops and state.token in state.stop_ids
                state.active = not stopped and state.position + 1 < state.limit
        return plan, tokens, valid

    def drain(self, max_steps=20_000):
        while self.scheduler.has_work:
            self.step()
            assert self.steps < max_steps, "no progress"
        for _ in range(2):  # what was under way when the last request ended
            self.step()

    def check_idle(self):
        scheduler = self.scheduler
        assert not scheduler.has_work
        assert scheduler.num_running == scheduler.num_waiting == 0
        for pool in (self.prefill_pool, self.decode_pool):
            assert pool.free_pages == pool.total
        assert sorted(scheduler._free_rows) == list(range(self.config.max_rows))
        assert set(self.outputs) == set(self.finished)
        assert not any(state.active for state in self.rows.values())

    def check_outputs(self, requests):
        for request in requests:
            outputs, reason = expected_outputs(request, self.config.max_context)
            got = self.outputs[request.request_id]
            if self.finished[request.request_id] is FinishReason.ABORT:
                assert got == outputs[: len(got)]
            else:
                assert (got, self.finished[request.request_id]) == (outputs, reason)


def random_requests(rng: random.Random, count: int, longest: int) -> list[Request]:
    """Prompts that share prefixes, some one-token answers, some early stops."""
    stems = [[rng.randrange(VOCAB) for _ in range(longest)] for _ in range(3)]
    requests = []
    for i in range(count):
        shared = rng.randrange(longest) if rng.random() < 0.5 else 0
        tail = rng.randrange(1, max(2, (longest - shared) // 2))
        prompt = rng.choice(stems)[:shared] + [rng.randrange(VOCAB) for _ in range(tail)]
        stop = rng.sample(range(VOCAB), rng.choice([0, 0, 3]))
        requests.append(make_request(i, prompt[:longest], rng.choice([1, 2, 5, 30, 200]), stop))
    return requests
