"""A device and an engine without arithmetic, to test the scheduler's decisions.

The "keys and values" of a position are a hash of all tokens up to it, and the next token follows
from the hash. A program computes them from what the pages hold, so a page that was reused, shared
or granted wrongly changes tokens, as it would on a real device. With an attention chunk there is a
local group too, whose values are read over the whole chunk for every token. Programs run in issue
order; the host sees their results one step late.
"""

import dataclasses
import random

import numpy as np
from helpers import tiny_config

from jinfire.config import EngineConfig, LayerSpec
from jinfire.kvcache.page_set import FULL, LOCAL, HeldPages, KVGroup, PageSet, kv_groups
from jinfire.kvcache.page_table import NULL_PAGE, pages_for
from jinfire.request import FinishReason, Request, SamplingParams
from jinfire.scheduler import Scheduler
from jinfire.sequence import DecodePlan, Plan, PrefillPlan, Sequence, SequenceState

VOCAB = 50
POISON = -1


def extend(prefix_hash: int, token: int) -> int:
    return (prefix_hash * 1_000_003 + token + 1) % (2**61 - 1)


def next_token(prefix_hash: int) -> int:
    return prefix_hash % VOCAB


def local_value(position: int, token: int) -> int:
    return position * 1_000 + token


def page_set(num_pages: int, page_size: int = 4, prefix_caching: bool = True) -> PageSet:
    """The page set of a model whose layers all keep everything."""
    return PageSet([KVGroup(FULL, num_pages, num_pages)], page_size, prefix_caching)


def model_pages(config: EngineConfig, attention_chunk: int | None) -> PageSet:
    """The page set of a model with or without chunked layers."""
    model = tiny_config(2)
    if attention_chunk is not None:
        layers = (LayerSpec("chunked", kv_group=LOCAL), LayerSpec("unrotated"))
        model = dataclasses.replace(model, layers=layers, attention_chunk=attention_chunk)
    return PageSet(kv_groups(model, config), config.page_size, config.prefix_caching)


def expected_outputs(
    request: Request, max_context: int, attention_chunk: int | None = None
) -> tuple[list[int], FinishReason]:
    """The tokens of a request on its own."""
    prefix_hash = 0
    tokens = list(request.prompt_ids)
    for token in tokens:
        prefix_hash = extend(prefix_hash, token)
    limit = min(request.params.max_tokens, max_context - len(request.prompt_ids))
    out: list[int] = []
    while True:
        seen = prefix_hash
        if attention_chunk is not None:
            begin = (len(tokens) - 1) // attention_chunk * attention_chunk
            for position in range(begin, len(tokens)):
                seen = extend(seen, local_value(position, tokens[position]))
        out.append(next_token(seen))
        if out[-1] in request.stop_ids:
            return out, FinishReason.STOP
        if len(out) == limit:
            return out, FinishReason.LENGTH
        tokens.append(out[-1])
        prefix_hash = extend(prefix_hash, out[-1])


def make_request(name, prompt, max_tokens=4, stop=()) -> Request:
    params = SamplingParams(max_tokens=max_tokens, stop_token_ids=tuple(stop))
    return Request(str(name), tuple(prompt), params, seed=0)


Tables = dict[str, list[int]]


@dataclasses.dataclass
class Row:
    tables: Tables
    position: int  # of `token`, whose keys and values are not written yet
    token: int
    limit: int
    stop_ids: frozenset[int]
    active: bool


class Mesh:
    def __init__(self, pages: PageSet, attention_chunk: int | None):
        self.size, self.attention_chunk = pages.page_size, attention_chunk
        self.pages = {
            name: [[POISON] * self.size for _ in range(pool.num_pages)]
            for name, pool in pages.pools.items()
        }

    def at(self, group: str, tables: Tables, position: int) -> tuple[list[int], int]:
        page = tables[group][position // self.size]
        assert page != NULL_PAGE
        return self.pages[group][page], position % self.size

    def write(self, tables: Tables, start: int, tokens: list[int]) -> None:
        """The keys and values of `tokens`, all before any of them attends."""
        page, slot = self.at(FULL, tables, start - 1) if start else ([0], 0)
        value = page[slot]
        for position, token in enumerate(tokens, start):
            value = extend(value, token)
            page, slot = self.at(FULL, tables, position)
            page[slot] = value
            if self.attention_chunk is not None:
                page, slot = self.at(LOCAL, tables, position)
                page[slot] = local_value(position, token)

    def attend(self, tables: Tables, position: int) -> int:
        """What the token at `position` sees of itself and of those before it."""
        page, slot = self.at(FULL, tables, position)
        value = page[slot]
        if self.attention_chunk is not None:
            for other in range(
                position // self.attention_chunk * self.attention_chunk, position + 1
            ):
                page, slot = self.at(LOCAL, tables, other)
                value = extend(value, page[slot])
        return value

    def copy(self, held: HeldPages, columns: int) -> dict[str, list[list[int]]]:
        return {
            group: [list(self.pages[group][page]) for page in pages]
            for group, pages in held.first(columns).items()
        }

    def put(self, held: HeldPages, copy: dict[str, list[list[int]]]) -> None:
        for group, contents in copy.items():
            for page, content in zip(held.by_group[group], contents, strict=False):
                self.pages[group][page] = list(content)


class FakeEngine:
    """Plan, run, commit with the programs above.

    `latency` is the steps that a handoff takes (a function of the sequence); `device_stops=False`
    is a device that does not know the stop ids, so that only the host can end a row.
    """

    def __init__(
        self,
        config,
        colocated,
        microbatches=1,
        latency=lambda sequence: 1,
        device_stops=True,
        attention_chunk=None,
    ):
        self.config: EngineConfig = config
        self.attention_chunk = attention_chunk
        sets = [model_pages(config, attention_chunk) for _ in range(2)]
        self.prefill_pools, self.decode_pools = (sets[0], sets[0]) if colocated else sets
        self.scheduler = Scheduler(config, self.prefill_pools, self.decode_pools, microbatches)
        self.prefill_mesh = Mesh(self.prefill_pools, attention_chunk)
        self.decode_mesh = self.prefill_mesh
        if not colocated:
            self.decode_mesh = Mesh(self.decode_pools, attention_chunk)
        self.colocated, self.latency, self.device_stops = colocated, latency, device_stops
        self.rows: dict[int, Row] = {}
        self.copies: list[tuple[int, Sequence, dict[str, list[list[int]]], int]] = []
        self.first_tokens: list[tuple[Sequence, int]] = []
        self.previous: tuple[DecodePlan, np.ndarray, np.ndarray] | None = None
        self.steps = 0
        self.outputs: dict[str, list[int]] = {}
        self.finished: dict[str, FinishReason] = {}
        self.plans: list[Plan] = []

    @property
    def prefill_pool(self):
        return self.prefill_pools.pools[FULL]

    @property
    def decode_pool(self):
        return self.decode_pools.pools[FULL]

    def tables(self, held: HeldPages, columns: int) -> Tables:
        return {group: held.table(group, 0, columns) for group in held.by_group}

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
                mesh, held = self.prefill_mesh, sequence.prefill_pages
                columns = pages_for(stop, self.config.page_size)
                tables = self.tables(held, columns)
                mesh.write(tables, chunk.start, sequence.tokens[chunk.start : stop])
                seen = [mesh.attend(tables, p) for p in range(chunk.start, stop)]
                if chunk.is_last:
                    assert stop == len(sequence.tokens)
                    token = next_token(seen[-1])
                    first_tokens.append((sequence, token))
                    if not self.colocated and chunk.needs_handoff:
                        at = self.steps + self.latency(sequence)
                        self.copies.append((at, sequence, mesh.copy(held, columns), token))
                        self.scheduler.handoff_sent(sequence)
        return first_tokens

    def install(self, plan: Plan, ready, first_tokens: dict[Sequence, int]):
        copies = {sequence: (copy, token) for _, sequence, copy, token in ready}
        for sequence in plan.install:
            assert sequence.state is SequenceState.RUNNING
            held = sequence.decode_pages
            tables = self.tables(held, held.columns)
            if self.colocated:
                token = first_tokens[sequence]
            else:
                copy, token = copies[sequence]
                self.decode_mesh.put(held, copy)
            active = not (self.device_stops and token in sequence.stop_ids)
            old = self.rows.get(sequence.row)
            assert old is None or not old.active, "a row was installed over an active one"
            limit, stop_ids = sequence.limit, sequence.stop_ids
            self.rows[sequence.row] = Row(tables, sequence.computed, token, limit, stop_ids, active)

    def decode(self, plan: DecodePlan):
        assert plan.row_bucket in self.config.decode_rows()
        assert max(plan.rows) < plan.row_bucket
        for group, grants in plan.grants.items():
            for row, column, page in grants:
                table = self.rows[row].tables[group]
                assert column == len(table)
                table.append(page)
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
                self.decode_mesh.write(state.tables, state.position, [state.token])
                state.token = next_token(self.decode_mesh.attend(state.tables, state.position))
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
        for pools in (self.prefill_pools, self.decode_pools):
            assert pools.free == pools.totals
        assert sorted(scheduler._free_rows) == list(range(self.config.max_rows))
        assert set(self.outputs) == set(self.finished)
        assert not any(state.active for state in self.rows.values())

    def check_outputs(self, requests):
        for request in requests:
            outputs, reason = expected_outputs(
                request, self.config.max_context, self.attention_chunk
            )
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
