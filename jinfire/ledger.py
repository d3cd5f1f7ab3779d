"""The public face of every request: its text, log-probabilities, events and output."""

import dataclasses
import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from jinfire.metrics import EventLog, request_metrics
from jinfire.programs.sampler import Sampled
from jinfire.request import (
    FinishReason,
    Request,
    RequestOutput,
    SamplingParams,
    TokenEvent,
    TokenLogprobs,
)
from jinfire.sequence import Committed
from jinfire.sequence import Sequence as LiveSequence
from jinfire.text import Detokenizer
from jinfire.tokenizer import Tokenizer


@dataclasses.dataclass
class Live:
    """What is kept of an unfinished request beside its sequence."""

    request: Request
    sequence: LiveSequence
    detokenizer: Detokenizer | None
    logprobs: list[TokenLogprobs] | None
    started: bool = False


class Ledger:
    """Unfinished requests, the log of their events, and the outputs nobody has taken yet.

    The scheduler knows tokens; this knows what the caller sees of them. Where a stop string ends
    a request, the two differ, and this one is right.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int) -> None:
        self.events = EventLog()
        self.live: dict[str, Live] = {}
        self.outputs: dict[str, RequestOutput] = {}
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size

    def open(self, request: Request, sequence: LiveSequence) -> None:
        """Start the books of an accepted request."""
        detokenizer = None
        if self._tokenizer is not None:
            detokenizer = Detokenizer(self._tokenizer.decode, request.params.stop)
        logprobs = None if request.params.logprobs is None else []
        self.live[request.request_id] = Live(request, sequence, detokenizer, logprobs)
        self.events.record(request.request_id, "arrival", value=len(request.prompt_ids))

    def knows(self, request_id: str) -> bool:
        """Whether a request of that id is unfinished, or its output not taken."""
        return request_id in self.live or request_id in self.outputs

    def start(self, sequence: LiveSequence, now: float) -> None:
        """The first chunk of a sequence is issued."""
        live = self.live[sequence.request_id]
        if not live.started:
            live.started = True
            self.events.record(sequence.request_id, "admitted", now, sequence.cached)
            self.events.record(sequence.request_id, "prefill_start", now)

    def find(self, sequence: LiveSequence) -> Live | None:
        """The books of a sequence, None once its request has ended."""
        live = self.live.get(sequence.request_id)
        return live if live is not None and live.sequence is sequence else None

    def token(
        self, live: Live, taken: Committed, arrays: Any, where: tuple[int, int], now: float
    ) -> TokenEvent:
        """The public event of one committed token; closes the books when it was the last.

        `arrays` (`Sampled` or `DecodeTokens`) hold the token's log-probabilities at `where`.
        """
        request = live.request
        self.events.record(request.request_id, "token", now)
        logprobs = None
        if live.logprobs is not None:
            count = min(request.params.logprobs or 0, self._vocab_size)
            logprobs = _token_logprobs(arrays, where, taken.token, count)
            live.logprobs.append(logprobs)
        reason, text = taken.finish_reason, ""
        detokenizer = live.detokenizer
        if detokenizer is not None:
            if reason is not FinishReason.STOP:
                text = detokenizer.push(taken.token)
            if reason is not None and not detokenizer.stopped:
                text += detokenizer.flush()
            if detokenizer.stopped:
                reason = FinishReason.STOP
        if reason is None:
            return TokenEvent(
                request.request_id, taken.index, taken.token, text, None, logprobs, now
            )
        return self.close(live, taken.index, taken.token, text, reason, logprobs, now)

    def abort(self, live: Live) -> TokenEvent:
        """The last event of an aborted request."""
        text = live.detokenizer.flush() if live.detokenizer else ""
        return self.close(live, live.sequence.num_outputs, None, text, FinishReason.ABORT)

    def fail(self, live: Live, error: Exception) -> TokenEvent:
        """The last event of a request that the engine could not finish."""
        self.events.record(live.request.request_id, "status", value=describe(error))
        index = live.sequence.num_outputs
        event = self.close(live, index, None, "", FinishReason.ERROR)
        self.outputs[event.request_id].error = error
        return event

    def close(
        self,
        live: Live,
        index: int,
        token: int | None,
        text: str,
        reason: FinishReason,
        logprobs: TokenLogprobs | None = None,
        now: float | None = None,
    ) -> TokenEvent:
        """The last event of a request, whose output is ready now."""
        request_id = live.request.request_id
        now = time.perf_counter() if now is None else now
        self.events.record(request_id, "finish", now, reason.value)
        del self.live[request_id]
        tokens = live.sequence.output_ids
        self.outputs[request_id] = RequestOutput(
            request_id,
            live.request.prompt_ids,
            tokens if token is None else tokens[: index + 1],
            live.detokenizer.text if live.detokenizer else "",
            reason,
            live.logprobs,
            request_metrics(self.events.pop(request_id)),
        )
        return TokenEvent(request_id, index, token, text, reason, logprobs, now)

    def refused(
        self,
        request_id: str,
        prompt: str | Sequence[int],
        params: SamplingParams,
        error: ValueError,
    ) -> RequestOutput:
        """The output of a request that was never accepted."""
        self.events.record(request_id, "arrival")
        self.events.record(request_id, "finish", value=FinishReason.ERROR.value)
        self.events.record(request_id, "status", value=describe(error))
        metrics = request_metrics(self.events.pop(request_id))
        ids: tuple[int, ...] = ()
        if isinstance(prompt, Iterable) and not isinstance(prompt, str):
            ids = tuple(prompt)
        logprobs = None if params.logprobs is None else []
        return RequestOutput(request_id, ids, [], "", FinishReason.ERROR, logprobs, metrics, error)


def describe(error: BaseException) -> str:
    """An exception in one line, with its type."""
    return f"{type(error).__name__}: {error}"


def _token_logprobs(arrays: Any, where: tuple[int, int], token: int, count: int) -> TokenLogprobs:
    names = ("logprob", "top_ids", "top_logprobs")
    if isinstance(arrays, Sampled):
        names = ("logprob_B", "top_ids_BX", "top_logprobs_BX")
    logprob, ids, values = (np.asarray(getattr(arrays, name))[where] for name in names)
    top = tuple(zip(ids[:count].tolist(), values[:count].tolist(), strict=True))
    return TokenLogprobs(token, float(logprob), top)
