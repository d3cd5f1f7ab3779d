"""The engine: requests in, token events out. One thread issues all device work.

`Engine.step` is the whole loop: plan, prefill and send, install, decode, commit. Decode tokens are
read one step late, while the next dispatch runs.
"""

import collections
import dataclasses
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np

from jinfire.admission import Admission
from jinfire.checkpoints import TensorSource, load_tokenizer, open_checkpoint
from jinfire.config import EngineConfig, Placement
from jinfire.errors import EngineFailed, TransferFailed
from jinfire.ledger import Ledger, Live, describe
from jinfire.metrics import DEFINITIONS, EventLog
from jinfire.models.spec import kv_bytes_per_token, parameter_count
from jinfire.programs.handoff import Transit
from jinfire.programs.sampler import Sampled
from jinfire.progress import items_bar
from jinfire.request import (
    FinishReason,
    Prompt,
    RequestOutput,
    SamplingParams,
    TokenEvent,
    as_batch,
    as_params,
)
from jinfire.runner import Issued, Runner
from jinfire.scheduler import Scheduler
from jinfire.sequence import Committed
from jinfire.sequence import Sequence as LiveSequence
from jinfire.tokenizer import Tokenizer
from jinfire.unweight.policy import Unweight
from jinfire.weights import parse_dtype
from sharding import Device

MAX_PREFILLS_AHEAD = 2
"""Prefill dispatches under way at once: enough to keep the mesh busy, few enough to react."""


@dataclasses.dataclass
class _Handover:
    """A sequence whose last chunk is issued: where its first token is, and its copies."""

    sequence: LiveSequence
    sampled: Sampled
    source: tuple[int, int]
    transit: Transit | None = None
    waiting_since_s: float | None = None  # the pages are written, their copies may be under way


class Engine:
    """Continuous batching over a placement.

    Not thread-safe: one thread calls `submit`, `abort`, `step`, `generate` and `stream`.
    """

    def __init__(
        self,
        source: TensorSource,
        tokenizer: Tokenizer | None = None,
        *,
        placement: Placement | None = None,
        config: EngineConfig | None = None,
        dtype: str = "float32",
        devices: Sequence[Device] | None = None,
        unweight: Unweight = None,
    ) -> None:
        self.model_config = source.config
        self.tokenizer = tokenizer
        self.placement = placement or Placement.colocated()
        self.config = (config or EngineConfig()).fitted(source.config.max_position)
        self.dtype = parse_dtype(dtype)
        self._ledger = Ledger(tokenizer, source.config.vocab_size)
        self._runner = Runner(source, self.placement, self.config, self.dtype, devices, unweight)
        self.scheduler = self._new_scheduler()
        self._first_tokens: collections.deque[_Handover] = collections.deque()
        self._transits: dict[LiveSequence, _Handover] = {}
        self._issued: collections.deque[Issued] = collections.deque()
        self._prefills: collections.deque[Sampled] = collections.deque()
        self._pending_events: list[TokenEvent] = []
        self._streams: dict[str, collections.deque[TokenEvent]] = {}
        self._admission = Admission(source.config, tokenizer, self.config.seed)
        self._counter = 0
        self._kv_bytes = 0
        self._host_s = self._wait_s = 0.0
        self._steps = self._decode_dispatches = self._stalled = 0

    def _new_scheduler(self) -> Scheduler:
        microbatches = self._runner.prefill_microbatches
        return Scheduler(self.config, *self._runner.page_sets(), microbatches)

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        dtype: str = "float32",
        placement: Placement | None = None,
        config: EngineConfig | None = None,
        devices: Sequence[Device] | None = None,
        unweight: Unweight = None,
        warmup: bool = False,
    ) -> Self:
        """An engine on a checkpoint: a Hugging Face folder, a GGUF file or a stored folder.

        `devices` default to all that JAX has. `unweight` holds bfloat16 weights compressed: a
        variant for all of them, a policy, or one for each phase (docs/unweight.md). `warmup`
        compiles every program before returning, otherwise each compiles at its first use.
        Raises: CheckpointMismatch, UnsupportedConfig, or ValueError for an impossible placement.
        """
        tokenizer = load_tokenizer(path)
        source = open_checkpoint(path)
        try:
            engine = cls(
                source,
                tokenizer,
                placement=placement,
                config=config,
                dtype=dtype,
                devices=devices,
                unweight=unweight,
            )
        finally:
            source.close()
        if warmup:
            engine.warmup()
        return engine

    def warmup(self) -> None:
        """Compile all programs; afterwards no request compiles anything."""
        if self.scheduler.has_work:
            raise ValueError("warmup: expected an idle engine, got unfinished requests")
        self._runner.warmup()

    # Requests in.

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
    ) -> str:
        """Queue one request and return its id.

        Raises: EmptyPrompt, RequestTooLong, UnknownToken or another ValueError; other requests
        are not affected.
        """
        params = SamplingParams() if params is None else params
        if request_id is None:
            # The caller may have used such a name.
            while self._ledger.knows(request_id := f"request-{self._counter}"):
                self._counter += 1
        elif request_id in self._ledger.outputs:
            raise ValueError(
                f"request_id: expected one not in use, got {request_id!r}, whose output nobody took"
            )
        self._counter += 1
        request = self._admission.request(prompt, params, request_id)
        sequence = self.scheduler.add(request)
        self._ledger.open(request, sequence)
        return request_id

    def abort(self, request_id: str) -> bool:
        """End a request in any state; its pages are free at once. False when it is not running."""
        live = self._ledger.live.get(request_id)
        if live is None or not self.scheduler.abort(request_id):
            return False
        self._pending_events.append(self._ledger.abort(live))
        return True

    # Tokens out.

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Outputs of all prompts, in their order.

        `prompts` is a text, a list of token ids, or a list of either. A prompt that is refused
        yields an output with finish_reason "error" and the exception in `error`, and the others
        run; only when all are refused is the first exception raised.
        """
        batch = as_batch(prompts)
        all_params = as_params(params, len(batch))
        ids: list[str | None] = []
        refused: dict[int, RequestOutput] = {}
        try:
            for index, (prompt, one) in enumerate(zip(batch, all_params, strict=True)):
                try:
                    ids.append(self.submit(prompt, one))
                except ValueError as error:
                    ids.append(None)
                    name = f"refused-{self._counter}-{index}"
                    refused[index] = self._ledger.refused(name, prompt, one, error)
            if refused and len(refused) == len(batch):
                error = next(iter(refused.values())).error
                assert error is not None
                raise error
            self._finish({name for name in ids if name is not None}, progress)
            return [
                refused[index] if request_id is None else self.pop_output(request_id)
                for index, request_id in enumerate(ids)
            ]
        finally:
            # An interrupted call leaves nothing behind.
            for request_id in ids:
                self._discard(request_id)

    def _finish(self, left: set[str], progress: bool) -> None:
        """Steps until the requests have ended."""
        bar = items_bar("generate", len(left), "request") if progress else None
        while left:
            for event in self.step():
                if event.finish_reason is not None and event.request_id in left:
                    left.discard(event.request_id)
                    if bar:
                        bar.update()
        if bar:
            bar.close()

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None
    ) -> Generator[TokenEvent, None, None]:
        """Events of one request as they come; closing the iterator early aborts the request.

        Other streams, `generate` and `step` may go on in between.
        Raises: as `submit`, before the first event.
        """
        events = self._stream(self.submit(prompt, params))
        next(events)  # from here on, closing or dropping the iterator ends the request
        return events

    def _stream(self, request_id: str) -> Generator[TokenEvent, None, None]:
        # Whoever steps the engine, the events of this request come here too.
        arrived = self._streams[request_id] = collections.deque()
        try:
            yield TokenEvent(request_id, -1, None, "")  # taken by `stream`
            finished = False
            while not finished:
                while not arrived:
                    if not self.has_work:
                        return
                    self.step()
                event = arrived.popleft()
                finished = event.finish_reason is not None
                yield event
        finally:
            del self._streams[request_id]
            self._discard(request_id)

    def _discard(self, request_id: str | None) -> None:
        """Ends a request that nobody waits for, and forgets its output."""
        if request_id is not None:
            self.abort(request_id)
            self._ledger.outputs.pop(request_id, None)

    def pop_output(self, request_id: str) -> RequestOutput:
        """The output of a finished request, which the engine then forgets.

        Raises: KeyError when there is none (unknown, unfinished, or taken before).
        """
        return self._ledger.outputs.pop(request_id)

    @property
    def events(self) -> EventLog:
        """The events of unfinished requests."""
        return self._ledger.events

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._pending_events)

    # The loop.

    def step(self) -> list[TokenEvent]:
        """One round of plan, run and commit; the events it brought, in order.

        When a step is broken off (a device program fails, Ctrl-C), all unfinished requests end as
        "error", the engine starts over with empty pools, and the exception goes on to the caller.
        """
        start, waited = time.perf_counter(), self._wait_s
        events, self._pending_events = self._pending_events, []
        if self.scheduler.has_work:
            try:
                events += self._step()
            except BaseException as error:
                # Also an interrupt: between a plan and its programs nothing can be trusted.
                self._start_over(EngineFailed(f"a step was broken off by {describe(error)}"))
                raise
        if not self.scheduler.has_work:
            # What is still under way belongs to requests that have ended.
            for leftovers in (self._first_tokens, self._transits, self._issued, self._prefills):
                leftovers.clear()
        for event in events:
            if event.request_id in self._streams:
                self._streams[event.request_id].append(event)
        self._steps += 1
        self._host_s += time.perf_counter() - start - (self._wait_s - waited)
        return events

    def _step(self) -> list[TokenEvent]:
        arrived, late = self._arrivals()
        while self._prefills and self._prefills[0].token_B.is_ready():
            self._prefills.popleft()
        plan = self.scheduler.plan(arrived, prefill=len(self._prefills) < MAX_PREFILLS_AHEAD)
        self._runner.halt(plan.halt)
        for sequence in plan.preempted:
            self.events.record(sequence.request_id, "preempted")
            self._transits.pop(sequence, None)  # it will be prefilled and sent again
        if plan.prefill is not None:
            self._prefill(plan.prefill)
        for sequence in plan.install:
            self._install(sequence)
        for sequence in [s for s in self._transits if self.scheduler.get(s.request_id) is not s]:
            del self._transits[sequence]  # aborted on the way: the copies are dropped
        if plan.decode is not None:
            self._issued.append(Issued(plan.decode, self._runner.decode(plan.decode)))
            self._decode_dispatches += 1
        under_way = self._issued or self._first_tokens or self._transits or self._prefills
        events = late + self._commit(
            issued=plan.decode is not None, prefilled=plan.prefill is not None
        )
        self._stalled = 0 if under_way or events else self._stalled + 1
        if self._stalled > 1:
            # Twice nothing to issue and nothing to wait for: better an error than a loop.
            unfinished = len(self._ledger.live)
            self._start_over(EngineFailed(f"no progress with {unfinished} unfinished requests"))
        return events

    def _start_over(self, error: EngineFailed) -> None:
        """Ends every request as "error" and forgets all pages, their content included."""
        self._pending_events += [
            self._ledger.fail(live, error) for live in list(self._ledger.live.values())
        ]
        stats = self.scheduler.stats
        self.scheduler = self._new_scheduler()
        self.scheduler.stats = stats
        self._runner.reset()
        for leftovers in (self._first_tokens, self._transits, self._issued, self._prefills):
            leftovers.clear()

    def _arrivals(self) -> tuple[list[LiveSequence], list[TokenEvent]]:
        """Sequences whose copies are there, and the ends of those that waited too long.

        A late copy harms nobody: it lands in arrays of its own, never in pages.
        """
        arrived, events, now = [], [], time.perf_counter()
        for sequence, handover in list(self._transits.items()):
            assert handover.transit is not None
            if handover.transit.is_ready():
                arrived.append(sequence)
            elif handover.waiting_since_s is None:
                # Time in which the prefill queues, runs or compiles is not the transfer's.
                if handover.sampled.token_B.is_ready():
                    handover.waiting_since_s = now
            elif (waited_s := now - handover.waiting_since_s) > self.config.transfer_timeout_s:
                events += self._fail(sequence, TransferFailed(f"not there after {waited_s:.1f} s"))
        return arrived, events

    def _fail(self, sequence: LiveSequence, error: Exception) -> list[TokenEvent]:
        self.scheduler.finish(sequence, FinishReason.ERROR)
        live = self._ledger.find(sequence)
        return [] if live is None else [self._ledger.fail(live, error)]

    def _prefill(self, plan: Any) -> None:
        now = time.perf_counter()
        for chunks in plan.chunks:
            for chunk in chunks:
                self._ledger.start(chunk.sequence, now)
        sampled = self._runner.prefill(plan)
        self._prefills.append(sampled)
        for m, chunks in enumerate(plan.chunks):
            for r, chunk in enumerate(chunks):
                if not chunk.is_last:
                    continue
                sequence = chunk.sequence
                handover = _Handover(sequence, sampled, (m, r))
                self._first_tokens.append(handover)
                if chunk.needs_handoff:
                    handover.transit = self._runner.send(sequence, sampled)
                    self._kv_bytes += handover.transit.bytes
                    self._transits[sequence] = handover
                    if not self.placement.is_colocated:
                        self.events.record(
                            sequence.request_id, "kv_sent", value=handover.transit.bytes
                        )
                    self.scheduler.handoff_sent(sequence)

    def _install(self, sequence: LiveSequence) -> None:
        handover = self._transits.pop(sequence)
        assert handover.transit is not None
        self._runner.install(sequence, handover.transit, handover.source)
        if not self.placement.is_colocated:
            self.events.record(sequence.request_id, "kv_received")

    def _commit(self, issued: bool, prefilled: bool) -> list[TokenEvent]:
        """Take in what is done: first tokens that are there, and all but the newest decode."""
        events = []
        behind = 1 if issued else 0
        while len(self._issued) > behind:
            events += self._commit_decode(self._issued.popleft())
        while self._first_tokens and self._first_tokens[0].sampled.token_B.is_ready():
            events += self._commit_first(self._first_tokens.popleft())
        if not events and not issued and not prefilled:
            # Nothing to issue until something under way is done: wait for the oldest of it.
            if self._first_tokens:
                events += self._commit_first(self._first_tokens.popleft())
            elif self._transits:
                self._wait(next(iter(self._transits.values())).sampled.token_B)
                time.sleep(0.0005)  # the copies behind that token
            elif self._prefills:
                self._wait(self._prefills[0].token_B)
        return events

    def _commit_first(self, handover: _Handover) -> list[TokenEvent]:
        tokens = self._wait(handover.sampled.token_B)
        now = time.perf_counter()
        sequence = handover.sequence
        taken = self.scheduler.commit_first(sequence, int(tokens[handover.source]))
        live = self._ledger.find(sequence)
        if taken is None or live is None:
            return []
        self.events.record(sequence.request_id, "prefill_end", now)
        return [self._event(live, taken, handover.sampled, handover.source, now)]

    def _commit_decode(self, issued: Issued) -> list[TokenEvent]:
        while any(h.sequence.awaits_first_token for h in self._waiting_for(issued)):
            # A row's first token comes before those that its decode made of it.
            yielded = self._commit_first(self._first_tokens.popleft())
            self._pending_events += yielded
        events, self._pending_events = self._pending_events, []
        tokens = self._wait(issued.tokens.token)
        now = time.perf_counter()
        for taken in self.scheduler.commit_decode(issued.plan, tokens, tokens >= 0):
            live = self._ledger.find(taken.sequence)
            if live is None:
                continue  # a stop string ended it at an earlier token of this dispatch
            assert taken.row is not None
            events.append(self._event(live, taken, issued.tokens, (taken.step, taken.row), now))
        return events

    def _waiting_for(self, issued: Issued) -> list[_Handover]:
        if not self._first_tokens:
            return []
        rows = set(issued.plan.rows.values())
        return [handover for handover in self._first_tokens if handover.sequence in rows]

    def _event(
        self, live: Live, taken: Committed, arrays: Any, where: tuple[int, int], now: float
    ) -> TokenEvent:
        event = self._ledger.token(live, taken, arrays, where, now)
        if event.finish_reason is not None:
            # The scheduler has ended it by itself, unless a stop string did.
            self.scheduler.finish(taken.sequence, event.finish_reason)
        return event

    def _wait(self, array: jax.Array) -> np.ndarray:
        """A device array on the host; the time spent waiting for it is not host work."""
        start = time.perf_counter()
        result = np.asarray(array)
        self._wait_s += time.perf_counter() - start
        return result

    def stats(self) -> dict[str, Any]:
        """Counters since the start. Units are in the names."""
        return {
            **self._runner.stats(),
            **self.scheduler.describe(),
            "parameters": parameter_count(self.model_config),
            "kv_bytes_per_token": kv_bytes_per_token(self.model_config, self.dtype.itemsize),
            "kv_bytes_transferred": self._kv_bytes,
            "steps": self._steps,
            "decode_dispatches": self._decode_dispatches,
            "host_seconds": self._host_s,
            "wait_seconds": self._wait_s,
            "definitions": dict(DEFINITIONS),
        }
