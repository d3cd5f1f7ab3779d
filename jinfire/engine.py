"""The engine: requests in, token events out. One thread issues all device work.

`Engine.step` is the whole loop: plan, prefill and send, install, decode, commit. Decode tokens are
read one step late, while the next dispatch runs.
"""

import collections
import dataclasses
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np

from jinfire import request as requests
from jinfire.checkpoints import load_tokenizer, open_checkpoint
from jinfire.config import EngineConfig, Placement
from jinfire.errors import EmptyPrompt, UnknownToken
from jinfire.kvcache.page_table import PagePool
from jinfire.loading import TensorSource
from jinfire.metrics import DEFINITIONS, EventLog, request_metrics
from jinfire.models.spec import kv_bytes_per_token, parameter_count
from jinfire.programs.handoff import Transit
from jinfire.programs.sampler import Sampled
from jinfire.progress import items_bar
from jinfire.request import FinishReason, Request, RequestOutput, SamplingParams, TokenEvent
from jinfire.runner import Issued, Runner
from jinfire.scheduler import Scheduler
from jinfire.sequence import Committed
from jinfire.sequence import Sequence as LiveSequence
from jinfire.text import Detokenizer
from jinfire.tokenizer import Tokenizer

MAX_PREFILLS_AHEAD = 2
"""Prefill dispatches under way at once: enough to keep the mesh busy, few enough to react."""

Prompt = str | Sequence[int]


@dataclasses.dataclass
class _Live:
    """What the engine keeps of an unfinished request beside its sequence."""

    request: Request
    sequence: LiveSequence
    detokenizer: Detokenizer | None
    logprobs: list[requests.TokenLogprobs] | None
    started: bool = False


@dataclasses.dataclass
class _Handover:
    """A sequence whose last chunk is issued: where its first token is, and its copies."""

    sequence: LiveSequence
    sampled: Sampled
    source: tuple[int, int]
    transit: Transit | None


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
        devices: list[jax.Device] | None = None,
    ) -> None:
        self.model_config = source.config
        self.tokenizer = tokenizer
        self.placement = placement or Placement.colocated()
        self.config = _fit_context(config or EngineConfig(), source.config.max_position)
        self.dtype = parse_dtype(dtype)
        self.events = EventLog()
        self._runner = Runner(source, self.placement, self.config, self.dtype, devices)
        pages, caching = self.config.pool_pages, self.config.prefix_caching
        prefill_pool = PagePool(pages, self.config.page_size, caching)
        decode_pool = prefill_pool
        if not self.placement.is_colocated:
            decode_pool = PagePool(pages, self.config.page_size, caching)
        self.scheduler = Scheduler(
            self.config, prefill_pool, decode_pool, self._runner.prefill_microbatches
        )
        self._live: dict[str, _Live] = {}
        self._outputs: dict[str, RequestOutput] = {}
        self._first_tokens: collections.deque[_Handover] = collections.deque()
        self._transits: dict[LiveSequence, _Handover] = {}
        self._issued: collections.deque[Issued] = collections.deque()
        self._prefills: collections.deque[Sampled] = collections.deque()
        self._pending_events: list[TokenEvent] = []
        self._seeds = np.random.default_rng(self.config.seed)
        self._counter = 0
        self._kv_bytes = 0
        self._host_s = self._wait_s = 0.0
        self._steps = self._decode_dispatches = 0

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        dtype: str = "float32",
        placement: Placement | None = None,
        config: EngineConfig | None = None,
        devices: list[jax.Device] | None = None,
        warmup: bool = False,
    ) -> Self:
        """An engine on a checkpoint: a Hugging Face folder, a GGUF file or a stored folder.

        `devices` default to all that JAX has. `warmup` compiles every program before returning,
        otherwise each compiles at its first use.
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
        params = params or SamplingParams()
        if request_id is None:
            request_id = f"request-{self._counter}"
        self._counter += 1
        request = self._request(prompt, params, request_id)
        sequence = self.scheduler.add(request)
        detokenizer = None
        if self.tokenizer is not None:
            detokenizer = Detokenizer(self.tokenizer.decode, params.stop)
        logprobs = None if params.logprobs is None else []
        self._live[request_id] = _Live(request, sequence, detokenizer, logprobs)
        self.events.record(request_id, "arrival", value=len(request.prompt_ids))
        return request_id

    def _request(self, prompt: Prompt, params: SamplingParams, request_id: str) -> Request:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError(
                    "prompt: expected token ids, got text, and this checkpoint has no tokenizer"
                )
            prompt = self.tokenizer.encode(prompt)
        if params.stop and self.tokenizer is None:
            raise ValueError("stop: expected none, because this checkpoint has no tokenizer")
        ids = tuple(int(token) for token in prompt)
        if not ids:
            raise EmptyPrompt(f"request {request_id!r}: expected at least one prompt token")
        vocab = self.model_config.vocab_size
        for name, values in (("prompt", ids), ("stop_token_ids", params.stop_token_ids)):
            unknown = next((token for token in values if not 0 <= token < vocab), None)
            if unknown is not None:
                raise UnknownToken(
                    f"request {request_id!r}: {name} expected token ids in [0, {vocab}), "
                    f"got {unknown}"
                )
        seed = params.seed
        if seed is None:
            seed = int(self._seeds.integers(2**32))
        eos_ids = self.model_config.eos_ids
        if self.tokenizer is not None:
            eos_ids = eos_ids | frozenset(self.tokenizer.eos_ids)
        if params.ignore_eos:
            eos_ids = frozenset()
        return Request(request_id, ids, params, seed, eos_ids)

    def abort(self, request_id: str) -> bool:
        """End a request in any state; its pages are free at once. False when it is not running."""
        live = self._live.get(request_id)
        if live is None or not self.scheduler.abort(request_id):
            return False
        text = live.detokenizer.flush() if live.detokenizer else ""
        index = live.sequence.num_outputs
        self._pending_events.append(self._end(live, index, None, text, FinishReason.ABORT))
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
        batch = _as_batch(prompts)
        all_params = _as_params(params, len(batch))
        ids: list[str | None] = []
        refused: dict[int, RequestOutput] = {}
        for index, (prompt, one) in enumerate(zip(batch, all_params, strict=True)):
            try:
                ids.append(self.submit(prompt, one))
            except ValueError as error:
                ids.append(None)
                refused[index] = self._refused(index, prompt, one, error)
        if refused and len(refused) == len(batch):
            error = next(iter(refused.values())).error
            assert error is not None
            raise error
        wanted = {request_id for request_id in ids if request_id is not None}
        bar = items_bar("generate", len(wanted), "request") if progress else None
        left = set(wanted)
        while left:
            for event in self.step():
                if event.finish_reason is not None and event.request_id in left:
                    left.discard(event.request_id)
                    if bar:
                        bar.update()
        if bar:
            bar.close()
        return [
            refused[index] if request_id is None else self.pop_output(request_id)
            for index, request_id in enumerate(ids)
        ]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[TokenEvent]:
        """Events of one request as they come; closing the iterator early aborts the request.

        Raises: as `submit`, before the first event.
        """
        return self._stream(self.submit(prompt, params))

    def _stream(self, request_id: str) -> Iterator[TokenEvent]:
        try:
            finished = False
            while not finished:
                for event in self.step():
                    if event.request_id == request_id:
                        finished = event.finish_reason is not None
                        yield event
        finally:
            self.abort(request_id)
            self._outputs.pop(request_id, None)

    def pop_output(self, request_id: str) -> RequestOutput:
        """The output of a finished request, which the engine then forgets.

        Raises: KeyError when there is none (unknown, unfinished, or taken before).
        """
        return self._outputs.pop(request_id)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._pending_events)

    # The loop.

    def step(self) -> list[TokenEvent]:
        """One round of plan, run and commit; the events it brought, in order."""
        start, waited = time.perf_counter(), self._wait_s
        events, self._pending_events = self._pending_events, []
        if self.scheduler.has_work:
            events += self._step()
        self._steps += 1
        self._host_s += time.perf_counter() - start - (self._wait_s - waited)
        return events

    def _step(self) -> list[TokenEvent]:
        arrived = [s for s, handover in self._transits.items() if handover.transit.is_ready()]  # type: ignore[union-attr]
        while self._prefills and self._prefills[0].token_B.is_ready():
            self._prefills.popleft()
        plan = self.scheduler.plan(arrived, prefill=len(self._prefills) < MAX_PREFILLS_AHEAD)
        self._runner.halt(plan.halt)
        for sequence in plan.preempted:
            self.events.record(sequence.request_id, "preempted")
        if plan.prefill is not None:
            self._prefill(plan.prefill)
        for sequence in plan.install:
            self._install(sequence)
        for sequence in [s for s in self._transits if self.scheduler.get(s.request_id) is not s]:
            del self._transits[sequence]  # aborted on the way: the copies are dropped
        if plan.decode is not None:
            self._issued.append(Issued(plan.decode, self._runner.decode(plan.decode)))
            self._decode_dispatches += 1
        return self._commit(issued=plan.decode is not None, prefilled=plan.prefill is not None)

    def _prefill(self, plan: Any) -> None:
        now = time.perf_counter()
        for chunks in plan.chunks:
            for chunk in chunks:
                live = self._live[chunk.sequence.request_id]
                if not live.started:
                    live.started = True
                    name = chunk.sequence.request_id
                    self.events.record(name, "admitted", now, chunk.sequence.cached)
                    self.events.record(name, "prefill_start", now)
        sampled = self._runner.prefill(plan)
        self._prefills.append(sampled)
        for m, chunks in enumerate(plan.chunks):
            for r, chunk in enumerate(chunks):
                if not chunk.is_last:
                    continue
                sequence = chunk.sequence
                handover = _Handover(sequence, sampled, (m, r), None)
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
        return events

    def _commit_first(self, handover: _Handover) -> list[TokenEvent]:
        tokens = self._wait(handover.sampled.token_B)
        now = time.perf_counter()
        sequence = handover.sequence
        live = self._live.get(sequence.request_id)
        taken = self.scheduler.commit_first(sequence, int(tokens[handover.source]))
        if taken is None or live is None or live.sequence is not sequence:
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
            live = self._live.get(taken.sequence.request_id)
            if live is None or live.sequence is not taken.sequence:
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
        self, live: _Live, taken: Committed, arrays: Any, where: tuple[int, int], now: float
    ) -> TokenEvent:
        """The public event of one committed token; ends the request when it was the last."""
        request = live.request
        self.events.record(request.request_id, "token", now)
        logprobs = None
        if live.logprobs is not None:
            logprobs = _token_logprobs(arrays, where, taken.token, request.params.logprobs or 0)
            live.logprobs.append(logprobs)
        reason, text = taken.finish_reason, ""
        detokenizer = live.detokenizer
        if detokenizer is not None:
            if reason is not FinishReason.STOP:
                text = detokenizer.push(taken.token)
            if detokenizer.stopped:
                reason = FinishReason.STOP
                self.scheduler.finish(taken.sequence, reason)
            elif reason is not None:
                text += detokenizer.flush()
        if reason is None:
            return TokenEvent(
                request.request_id, taken.index, taken.token, text, None, logprobs, now
            )
        return self._end(live, taken.index, taken.token, text, reason, logprobs, now)

    def _end(
        self,
        live: _Live,
        index: int,
        token: int | None,
        text: str,
        reason: FinishReason,
        logprobs: requests.TokenLogprobs | None = None,
        now: float | None = None,
    ) -> TokenEvent:
        request_id = live.request.request_id
        now = time.perf_counter() if now is None else now
        self.events.record(request_id, "finish", now, reason.value)
        del self._live[request_id]
        outputs = live.sequence.output_ids
        self._outputs[request_id] = RequestOutput(
            request_id,
            live.request.prompt_ids,
            outputs[: index + 1] if token is not None else outputs,
            live.detokenizer.text if live.detokenizer else "",
            reason,
            live.logprobs,
            request_metrics(self.events.pop(request_id)),
        )
        return TokenEvent(request_id, index, token, text, reason, logprobs, now)

    def _refused(
        self, index: int, prompt: Prompt, params: SamplingParams, error: ValueError
    ) -> RequestOutput:
        request_id = f"refused-{self._counter}-{index}"
        self.events.record(request_id, "arrival")
        self.events.record(request_id, "finish", value=FinishReason.ERROR.value)
        self.events.record(request_id, "status", value=f"{type(error).__name__}: {error}")
        metrics = request_metrics(self.events.pop(request_id))
        ids = () if isinstance(prompt, str) else tuple(prompt)
        logprobs = None if params.logprobs is None else []
        return RequestOutput(request_id, ids, [], "", FinishReason.ERROR, logprobs, metrics, error)

    def _wait(self, array: jax.Array) -> np.ndarray:
        """A device array on the host; the time spent waiting for it is not host work."""
        start = time.perf_counter()
        result = np.asarray(array)
        self._wait_s += time.perf_counter() - start
        return result

    def stats(self) -> dict[str, Any]:
        """Counters since the start. Units are in the names."""
        scheduler, runner = self.scheduler, self._runner
        counts = scheduler.stats
        return {
            "placement": str(self.placement),
            "parameters": parameter_count(self.model_config),
            "weight_bytes": runner.weight_bytes(),
            "kv_pool_bytes": runner.kv_pool_bytes(),
            "kv_bytes_per_token": kv_bytes_per_token(self.model_config, self.dtype.itemsize),
            "kv_bytes_transferred": self._kv_bytes,
            "compile_count": runner.log.count,
            "compile_seconds": runner.log.seconds,
            "bubble_fraction": runner.bubble_fractions(),
            "prefix_hit_rate": counts.cached_tokens / max(counts.prompt_tokens, 1),
            "preemptions": counts.preemptions,
            "prefill_tokens": counts.prefill_tokens,
            "prefill_padded_tokens": counts.prefill_padded_tokens,
            "free_pages": {
                "prefill": scheduler.prefill_pool.free_pages,
                "decode": scheduler.decode_pool.free_pages,
            },
            "steps": self._steps,
            "decode_dispatches": self._decode_dispatches,
            "host_seconds": self._host_s,
            "wait_seconds": self._wait_s,
            "definitions": dict(DEFINITIONS),
        }


def parse_dtype(name: str) -> np.dtype:
    """A data type that weights and KV may have."""
    if name not in ("float32", "bfloat16"):
        raise ValueError(f"dtype: expected 'float32' or 'bfloat16', got {name!r}")
    return jax.numpy.dtype(name)


def _fit_context(config: EngineConfig, max_position: int) -> EngineConfig:
    if config.max_context <= max_position:
        return config
    return dataclasses.replace(config, max_context=max_position)


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    batch = list(prompts)
    if batch and all(isinstance(token, int | np.integer) for token in batch):
        return [batch]  # type: ignore[list-item]
    return batch  # type: ignore[return-value]


def _as_params(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    listed = list(params)
    if len(listed) != count:
        raise ValueError(f"params: expected one or {count} (one a prompt), got {len(listed)}")
    return listed


def _token_logprobs(
    arrays: Any, where: tuple[int, int], token: int, count: int
) -> requests.TokenLogprobs:
    names = ("logprob_B", "top_ids_BX", "top_logprobs_BX")
    if not isinstance(arrays, Sampled):
        names = ("logprob", "top_ids", "top_logprobs")
    logprob, ids, values = (np.asarray(getattr(arrays, name))[where] for name in names)
    top = tuple(zip(ids[:count].tolist(), values[:count].tolist(), strict=True))
    return requests.TokenLogprobs(token, float(logprob), top)
