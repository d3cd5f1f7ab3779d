"""Which request gets which row, pages and chunk: the host arithmetic between two dispatches.

One step is plan, run, commit. `Scheduler.plan` decides and reserves, the engine runs the programs
in the order halt, prefill, install, grants, decode, and the `commit_*` methods take the tokens in,
one step late. Nothing here touches a device. Pages and rows of a finished or aborted sequence are
free at once: every program on a mesh runs in issue order, so a page's next owner writes after its
last owner did.
"""

import collections
import heapq
from collections.abc import Iterable
from typing import Any

import numpy as np

from jinfire.config import EngineConfig
from jinfire.errors import EmptyPrompt, RequestTooLong
from jinfire.kvcache.page_set import HeldPages, PageSet
from jinfire.kvcache.page_table import pages_for
from jinfire.packing import choose_prefill_shape
from jinfire.request import FinishReason, Request
from jinfire.sequence import (
    Committed,
    DecodePlan,
    Grants,
    Plan,
    PrefillPlan,
    ScheduledChunk,
    SchedulerStats,
    Sequence,
    SequenceState,
)


class Scheduler:
    """Rows, pages and chunks for every request; first come, first served.

    One page set for both phases (the same object twice) means colocated: a sequence has one set of
    pages and its row is installed in the plan that issues its last chunk. With two it is installed
    when its handoff has arrived. Both are reserved, in all KV groups, when a sequence is admitted,
    for all known tokens and the first decode dispatch. When running rows outgrow a pool, the
    youngest one is preempted: it waits at the front and is prefilled again with the tokens it has.
    """

    def __init__(
        self,
        config: EngineConfig,
        prefill_pools: PageSet,
        decode_pools: PageSet,
        microbatches: int = 1,
    ) -> None:
        for pools in (prefill_pools, decode_pools):
            if pools.page_size != config.page_size:
                raise ValueError(
                    f"page_size: expected {config.page_size} (EngineConfig), got {pools.page_size}"
                )
        self.config = config
        self.prefill_pools = prefill_pools
        self.decode_pools = decode_pools
        self.is_colocated = prefill_pools is decode_pools
        self.microbatches = microbatches
        self.stats = SchedulerStats()
        self._sequences: dict[str, Sequence] = {}
        self._waiting: collections.OrderedDict[str, Sequence] = collections.OrderedDict()
        self._prefilling: dict[str, Sequence] = {}
        self._running: dict[int, Sequence] = {}
        self._free_rows = list(range(config.max_rows))  # a heap: the lowest row first
        self._halt: set[int] = set()
        self._arrivals = 0
        self._blocked: tuple[Sequence, tuple[int, ...]] | None = None
        self._row_buckets = config.decode_rows()
        self._widths = config.context_widths()
        self._slot_budget = microbatches * max(
            rows * chunk for rows, chunk in config.prefill_shapes
        )
        self._sequence_budget = microbatches * max(chunk for _, chunk in config.prefill_shapes)

    @property
    def _sides(self) -> list[tuple[str, PageSet]]:
        return [("prefill", self.prefill_pools), ("decode", self.decode_pools)]

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._sequences)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def get(self, request_id: str) -> Sequence | None:
        """The unfinished sequence of that id."""
        return self._sequences.get(request_id)

    def describe(self) -> dict[str, Any]:
        """Counters since the start, and pages free now."""
        counts = self.stats
        return {
            "prefix_hit_rate": counts.cached_tokens / max(counts.prompt_tokens, 1),
            "preemptions": counts.preemptions,
            "prefill_tokens": counts.prefill_tokens,
            "prefill_padded_tokens": counts.prefill_padded_tokens,
            "free_pages": {
                phase: {name: pool.free_pages for name, pool in pools.pools.items()}
                for phase, pools in self._sides
            },
        }

    # Coming and going.

    def add(self, request: Request) -> Sequence:
        """A new sequence at the end of the queue.

        Raises: EmptyPrompt; RequestTooLong when no empty engine could hold it; ValueError when an
        unfinished request has the same id.
        """
        config, num_prompt = self.config, len(request.prompt_ids)
        if request.request_id in self._sequences:
            raise ValueError(
                f"request_id: expected one not in use, got {request.request_id!r}, unfinished"
            )
        if num_prompt == 0:
            raise EmptyPrompt(f"request {request.request_id!r}: expected at least one prompt token")
        if num_prompt + 1 > config.max_context:
            raise RequestTooLong(
                f"request {request.request_id!r}: {num_prompt} prompt tokens and one new token "
                f"exceed max_context={config.max_context}"
            )
        limit = min(num_prompt + request.params.max_tokens, config.max_context)
        sequence = Sequence(request, self._arrivals, limit)
        pages = pages_for(sequence.kv_limit, config.page_size)
        for name, pools in self._sides[: 1 if sequence.remaining == 1 else 2]:
            for needed, total in zip(pools.demand(pages), pools.totals, strict=True):
                if needed > total:
                    raise RequestTooLong(
                        f"request {request.request_id!r}: {num_prompt} prompt tokens and "
                        f"max_tokens={request.params.max_tokens} need {needed} pages of "
                        f"{config.page_size} tokens, the {name} pool has {total}"
                    )
        self._arrivals += 1
        self._sequences[request.request_id] = sequence
        self._waiting[request.request_id] = sequence
        return sequence

    def abort(self, request_id: str) -> bool:
        """Ends a request in any state; False when none of that id is unfinished."""
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return False
        self.finish(sequence, FinishReason.ABORT)
        return True

    def finish(
        self, sequence: Sequence, reason: FinishReason, *, row_stopped: bool = False
    ) -> None:
        """Ends a sequence now; its pages and row are free. Does nothing the second time.

        A running row goes to the next plan's `halt`, unless `row_stopped` says that the device has
        stopped it by itself.
        """
        if sequence.state is SequenceState.FINISHED:
            return
        # After a failed program the content of the pages is unknown: never offer it for reuse.
        self._vacate(sequence, reusable=reason is not FinishReason.ERROR, row_stopped=row_stopped)
        self._waiting.pop(sequence.request_id, None)
        self._prefilling.pop(sequence.request_id, None)
        del self._sequences[sequence.request_id]
        sequence.state = SequenceState.FINISHED
        sequence.finish_reason = reason

    def handoff_sent(self, sequence: Sequence) -> None:
        """The gather of a sequence's pages is issued: the prefill pool may reuse them."""
        if not self.is_colocated and sequence.state is not SequenceState.FINISHED:
            self.prefill_pools.release(sequence.prefill_pages)
            sequence.prefill_pages = HeldPages()

    # Plan.

    def plan(self, arrived: Iterable[Sequence] = (), prefill: bool = True) -> Plan:
        """The next step. `arrived` are the sequences whose handoff copies are ready.

        Sequences that finished while their copy was under way are skipped. `prefill=False` holds
        chunks back, because enough of them are under way.
        """
        install = []
        for sequence in arrived:
            if sequence.state is SequenceState.HANDOFF and sequence.row is not None:
                self._start_running(sequence)
                install.append(sequence)
        # Rows that run come first: only what they leave can be promised to new ones.
        grants, preempted = self._grow()
        self._admit()
        prefill_plan = self._plan_prefill() if prefill else None
        install = [sequence for sequence in install if sequence.state is SequenceState.RUNNING]
        if prefill_plan is not None:
            for chunk in prefill_plan.last_chunks:
                if self.is_colocated and chunk.needs_handoff:
                    self._start_running(chunk.sequence)
                    install.append(chunk.sequence)
        decode = self._plan_decode(grants)
        halt = sorted(self._halt)
        self._halt.clear()
        return Plan(halt, prefill_plan, install, decode, preempted)

    def _start_running(self, sequence: Sequence) -> None:
        assert sequence.row is not None
        sequence.state = SequenceState.RUNNING
        sequence.kv_bound = sequence.computed
        self._running[sequence.row] = sequence

    def _grow(self) -> tuple[Grants, list[Sequence]]:
        """Pages for the next dispatch of every running row; preempts the youngest while short.

        A row that is installed in this plan never needs any: its first dispatch was reserved.
        """
        size, steps, pools = self.config.page_size, self.config.decode_steps, self.decode_pools
        wants: dict[HeldPages, int] = {}
        for sequence in self._running.values():
            columns = pages_for(min(sequence.kv_bound + steps, sequence.kv_limit), size)
            if columns > sequence.decode_pages.columns:
                wants[sequence.decode_pages] = columns
        preempted: list[Sequence] = []
        grants: Grants = {}
        if not wants:
            return grants, preempted
        if not pools.can_grow(wants):
            victims = sorted(self._running.values(), key=lambda sequence: sequence.arrival)
            while not pools.can_grow(wants):
                victim = victims.pop()
                wants.pop(victim.decode_pages, None)
                self._preempt(victim)
                preempted.append(victim)
        grants = {group.name: [] for group in pools.groups}
        for row, sequence in self._running.items():
            held = sequence.decode_pages
            columns = wants.get(held)
            if columns is None:
                continue
            first = held.columns
            pools.grow(held, columns)
            for group, granted in grants.items():
                pages = held.table(group, first, columns)
                granted += [(row, first + i, page) for i, page in enumerate(pages)]
        return grants, preempted

    def _preempt(self, sequence: Sequence) -> None:
        self._vacate(sequence, reusable=True, row_stopped=False)
        sequence.state = SequenceState.WAITING
        sequence.computed = sequence.kv_bound = 0
        sequence.preemptions += 1
        self.stats.preemptions += 1
        # To the front, but behind older ones that were preempted before.
        older = []
        for other in self._waiting.values():
            if other.arrival > sequence.arrival:
                break
            older.append(other)
        for other in reversed([*older, sequence]):
            self._waiting[other.request_id] = other
            self._waiting.move_to_end(other.request_id, last=False)

    def _vacate(self, sequence: Sequence, *, reusable: bool, row_stopped: bool) -> None:
        """Frees row and pages, and keeps the pages' content findable when it is valid."""
        row = sequence.row
        if row is not None:
            if sequence.state is SequenceState.RUNNING:
                del self._running[row]
                if not row_stopped:
                    self._halt.add(row)
            heapq.heappush(self._free_rows, row)
            sequence.row = None
        valid = sequence.computed
        if self.is_colocated and sequence.state is SequenceState.RUNNING:
            valid = max(valid, len(sequence.tokens) - 1)  # the newest token's KV is not written yet
        if reusable:
            self.prefill_pools.register(sequence.tokens, sequence.prefill_pages, valid)
        self.prefill_pools.release(sequence.prefill_pages)
        if not self.is_colocated:
            self.decode_pools.release(sequence.decode_pages)
        sequence.prefill_pages = HeldPages()
        sequence.decode_pages = HeldPages()

    def _admit(self) -> None:
        """Moves sequences from the queue's head to prefill while they fit; never skips one."""
        # No more than one program can take: who is admitted later finds more cached pages.
        backlog = sum(map(self._prefill_demand, self._prefilling.values()))
        while self._waiting and backlog < self._slot_budget:
            sequence = next(iter(self._waiting.values()))
            # A preempted sequence first takes in the tokens that are still on their way.
            if sequence.in_flight or sequence.awaits_first_token:
                return
            if not self._reserve(sequence):
                idle = not self._running and len(self._sequences) == len(self._waiting)
                assert not idle, f"{sequence} does not fit an empty engine"
                return
            backlog += self._prefill_demand(sequence)

    def _prefill_demand(self, sequence: Sequence) -> int:
        return min(len(sequence.tokens) - sequence.computed, self._sequence_budget)

    def _reserve(self, sequence: Sequence) -> bool:
        """Row and pages for the head of the queue, or nothing and False."""
        prefill_pools, decode_pools = self.prefill_pools, self.decode_pools
        needs_row = sequence.remaining > 1
        if needs_row and not self._free_rows:
            return False
        free = prefill_pools.free + decode_pools.free
        if self._running and self._blocked is not None and self._blocked[0] is sequence:
            nothing_freed = all(
                now <= then for now, then in zip(free, self._blocked[1], strict=True)
            )
            if nothing_freed:
                return False  # do not walk its prefix again
        size, known = self.config.page_size, len(sequence.tokens)
        decode_columns = pages_for(min(known + self.config.decode_steps, sequence.kv_limit), size)
        prefill_columns = decode_columns if self.is_colocated else pages_for(known, size)
        fits = prefill_pools.fits(prefill_columns, prefill_pools.match(sequence.tokens))
        if not self.is_colocated and needs_row:
            fits = fits and decode_pools.fits(decode_columns)
        if not fits:
            self._blocked = (sequence, free)
            return False
        self._blocked = None
        held, computed = prefill_pools.allocate(prefill_columns, sequence.tokens)
        sequence.prefill_pages = held
        if self.is_colocated:
            sequence.decode_pages = held
        elif needs_row:
            sequence.decode_pages, _ = decode_pools.allocate(decode_columns)
        if needs_row:
            sequence.row = heapq.heappop(self._free_rows)
        sequence.computed = computed
        if sequence.admissions == 0:
            sequence.cached = sequence.computed
            self.stats.prompt_tokens += known
            self.stats.cached_tokens += sequence.cached
        else:
            self.stats.recomputed_tokens += known - sequence.computed
        sequence.admissions += 1
        sequence.state = SequenceState.PREFILLING
        del self._waiting[sequence.request_id]
        self._prefilling[sequence.request_id] = sequence
        return True

    def _plan_prefill(self) -> PrefillPlan | None:
        if not self._prefilling:
            return None
        sequences = list(self._prefilling.values())
        remaining = [len(sequence.tokens) - sequence.computed for sequence in sequences]
        (rows, chunk), packing = choose_prefill_shape(
            remaining, self.microbatches, self.config.prefill_shapes
        )
        chunks, longest = [], 0
        for microbatch in packing:
            scheduled = []
            for index, length in microbatch:
                sequence = sequences[index]
                start = sequence.computed
                sequence.computed += length
                longest = max(longest, sequence.computed)
                is_last = sequence.computed == len(sequence.tokens)
                needs_handoff = sequence.row is not None
                scheduled.append(ScheduledChunk(sequence, start, length, is_last, needs_handoff))
                if is_last:
                    self._end_prefill(sequence)
            chunks.append(scheduled)
        useful = sum(length for microbatch in packing for _, length in microbatch)
        self.stats.prefill_tokens += useful
        self.stats.prefill_padded_tokens += self.microbatches * rows * chunk - useful
        width = _bucket(self._widths, pages_for(longest, self.config.page_size))
        return PrefillPlan((self.microbatches, rows, chunk), width, chunks)

    def _end_prefill(self, sequence: Sequence) -> None:
        del self._prefilling[sequence.request_id]
        sequence.state = SequenceState.HANDOFF
        sequence.awaits_first_token = True
        self.prefill_pools.register(sequence.tokens, sequence.prefill_pages, sequence.computed)

    def _plan_decode(self, grants: Grants) -> DecodePlan | None:
        steps = self.config.decode_steps
        rows, longest = {}, 0
        for row, sequence in self._running.items():
            bound, kv_limit = sequence.kv_bound, sequence.kv_limit
            if bound < kv_limit:  # else its last token is already on its way
                sequence.kv_bound = bound = min(bound + steps, kv_limit)
                sequence.in_flight += 1
                rows[row] = sequence
                longest = max(longest, bound)
        if not rows:
            return None
        width = _bucket(self._widths, pages_for(longest, self.config.page_size))
        return DecodePlan(rows, _bucket(self._row_buckets, max(rows) + 1), width, steps, grants)

    # Commit.

    def commit_first(self, sequence: Sequence, token: int) -> Committed | None:
        """Takes in the token that a sequence's last chunk sampled; None when it is finished.

        Comes before the `commit_decode` of the row's first dispatch.
        """
        sequence.awaits_first_token = False
        if sequence.state is SequenceState.FINISHED:
            return None
        return self._append(sequence, token, None, 0, row_stopped=False)

    def commit_decode(
        self, issued: DecodePlan, tokens_JB: np.ndarray, valid_JB: np.ndarray
    ) -> list[Committed]:
        """Takes in the tokens of one dispatch, row by row.

        `valid_JB` marks the steps at which a row was active when it began. Rows whose sequence has
        finished since are dropped; a preempted sequence's tokens are right and kept.

        Shapes: tokens [J, B] int, valid [J, B] bool, B at least the highest issued row + 1.
        """
        committed = []
        token_rows, valid_rows = tokens_JB.T.tolist(), valid_JB.T.tolist()
        for row, sequence in issued.rows.items():
            sequence.in_flight -= 1
            if sequence.state is SequenceState.FINISHED:
                continue
            assert not sequence.awaits_first_token, f"{sequence}: commit_first comes first"
            valid = valid_rows[row]
            for step, token in enumerate(token_rows[row]):
                if not valid[step]:
                    break
                stopped = step + 1 < len(valid) and not valid[step + 1]
                taken = self._append(sequence, token, row, step, row_stopped=stopped)
                committed.append(taken)
                if taken.finish_reason is not None:
                    break
        return committed

    def _append(
        self, sequence: Sequence, token: int, row: int | None, step: int, row_stopped: bool
    ) -> Committed:
        sequence.tokens.append(token)
        reason = None
        if token in sequence.stop_ids:
            reason = FinishReason.STOP
        elif len(sequence.tokens) >= sequence.limit:
            reason = FinishReason.LENGTH
        index = sequence.num_outputs - 1
        if reason is not None:
            self.finish(sequence, reason, row_stopped=row_stopped)
        return Committed(sequence, token, index, reason, row, step)


def _bucket(sizes: tuple[int, ...], needed: int) -> int:
    for size in sizes:
        if size >= needed:
            return size
    raise ValueError(f"expected a bucket of at least {needed}, got {sizes}")
