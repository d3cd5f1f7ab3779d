"""Latency metrics, all derived from one event log by one function."""

import dataclasses
import itertools
import math
import time
from collections.abc import Iterable, Sequence
from typing import ClassVar, NamedTuple

import numpy as np

KINDS = (
    "arrival",  # value: prompt tokens. Submitted, or the scheduled arrival in an open-loop run
    "admitted",  # value: prompt tokens found in the prefix cache
    "prefill_start",  # the first chunk is dispatched
    "prefill_end",  # the host saw that the last chunk is done
    "kv_sent",  # value: bytes of keys and values
    "kv_received",  # value: bytes in which they crossed, fewer with a codec
    "preempted",
    "token",  # value: tokens that arrived together (1 when None). `time_s`: the host saw them
    "finish",  # value: the finish reason
    "status",  # value: how the request failed, for requests that got no further
)

DEFINITIONS = {
    "ttft_s": "arrival to the first token seen by the host: queue, prefill and transfer included",
    "queue_s": "arrival to prefill_start (the first one)",
    "prefill_s": "prefill_start to prefill_end (the first ones)",
    "transfer_s": "kv_sent to kv_received (the first ones); missing when colocated",
    "first_decode_s": "kv_received, or prefill_end when colocated, to the second token",
    "kv_bytes": "bytes of keys and values handed over, without the padding of page buckets and "
    "copies of heads",
    "kv_bytes_sent": "bytes in which they crossed, counted alike: fewer with a codec",
    "tpot_s": "(last token - first token) / (output tokens - 1); missing below 2 output tokens",
    "itl_s": "gaps between consecutive tokens; n tokens that arrive together share the gap before "
    "them, and those that arrive with the first token have none",
    "e2e_s": "arrival to the last token",
    "normalized_latency_s": "e2e_s / output tokens (arXiv 2309.06180)",
    "percentile": "inverted CDF: the smallest value with at least p % of the values at or below it",
    "interval": "percentile bootstrap over requests; itl_s is token-weighted",
}


class Event(NamedTuple):
    """Something that happened to a request. Units: `time_s` of `time.perf_counter()`."""

    request_id: str
    kind: str
    time_s: float
    value: float | str | None = None


class EventLog:
    """The events of every request, in order of recording."""

    def __init__(self) -> None:
        self._events: dict[str, list[Event]] = {}

    def record(
        self,
        request_id: str,
        kind: str,
        time_s: float | None = None,
        value: float | str | None = None,
    ) -> None:
        """Appends an event, now unless `time_s` says otherwise."""
        if kind not in KINDS:
            raise ValueError(f"kind: expected one of {', '.join(KINDS)}, got {kind!r}")
        if time_s is None:
            time_s = time.perf_counter()
        self._events.setdefault(request_id, []).append(Event(request_id, kind, time_s, value))

    def events(self, request_id: str) -> list[Event]:
        return list(self._events.get(request_id, ()))

    def pop(self, request_id: str) -> list[Event]:
        """A request's events, which the log forgets: an engine may run for ever."""
        return self._events.pop(request_id, [])

    def __len__(self) -> int:
        return sum(map(len, self._events.values()))


@dataclasses.dataclass(frozen=True)
class RequestMetrics:
    """What one request cost; `definitions` says how each number is defined.

    A time that was not observed is NaN, never 0.
    """

    definitions: ClassVar[dict[str, str]] = DEFINITIONS

    request_id: str
    ttft_s: float
    queue_s: float
    prefill_s: float
    transfer_s: float
    first_decode_s: float
    tpot_s: float
    itl_s: tuple[float, ...]
    e2e_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    kv_bytes: int
    kv_bytes_sent: int
    preemptions: int
    finish_reason: str | None
    status: str | None = None

    @property
    def normalized_latency_s(self) -> float:
        return self.e2e_s / self.output_tokens if self.output_tokens else math.nan

    @property
    def completed(self) -> bool:
        """Whether the request ended by itself: a stop or its length."""
        return self.finish_reason in ("stop", "length")

    def meets(self, ttft_s: float = math.inf, tpot_s: float = math.inf) -> bool:
        """Whether the request is good under this objective.

        One that failed is not. One of a single token has no time per token to miss.
        """
        if not self.completed or not self.ttft_s <= ttft_s:
            return False
        return self.output_tokens < 2 or self.tpot_s <= tpot_s


def request_metrics(events: Iterable[Event]) -> RequestMetrics:
    """The metrics of one request from its events.

    Raises: ValueError on events of several requests or none.
    """
    events = list(events)
    ids = {event.request_id for event in events}
    if len(ids) != 1:
        raise ValueError(f"events: expected those of one request, got {sorted(ids)}")
    first: dict[str, Event] = {}
    for event in events:
        first.setdefault(event.kind, event)

    def gap(start: str, end: str) -> float:
        if start not in first or end not in first:
            return math.nan
        return first[end].time_s - first[start].time_s

    def value(kind: str, default: float | str | None) -> float | str | None:
        return default if kind not in first or first[kind].value is None else first[kind].value

    bursts = _token_bursts(events)
    num_tokens = sum(count for _, count in bursts)
    first_s, last_s = (bursts[0][0], bursts[-1][0]) if bursts else (math.nan, math.nan)
    ready = "kv_received" if "kv_received" in first else "prefill_end"
    arrival_s = first["arrival"].time_s if "arrival" in first else math.nan
    ready_s = first[ready].time_s if ready in first else math.nan
    return RequestMetrics(
        request_id=ids.pop(),
        ttft_s=first_s - arrival_s,
        queue_s=gap("arrival", "prefill_start"),
        prefill_s=gap("prefill_start", "prefill_end"),
        transfer_s=gap("kv_sent", "kv_received"),
        first_decode_s=_time_of_token(bursts, 2) - ready_s,
        tpot_s=(last_s - first_s) / (num_tokens - 1) if num_tokens > 1 else math.nan,
        itl_s=tuple(
            gap_s
            for (before_s, _), (now_s, count) in itertools.pairwise(bursts)
            for gap_s in [(now_s - before_s) / count] * count
        ),
        e2e_s=last_s - arrival_s,
        prompt_tokens=int(value("arrival", 0) or 0),
        cached_tokens=int(value("admitted", 0) or 0),
        output_tokens=num_tokens,
        kv_bytes=_total(events, "kv_sent"),
        kv_bytes_sent=_total(events, "kv_received"),
        preemptions=sum(event.kind == "preempted" for event in events),
        finish_reason=_text(value("finish", None)),
        status=_text(value("status", None)),
    )


def _token_bursts(events: Iterable[Event]) -> list[tuple[float, int]]:
    """(time, tokens) of tokens that arrived together."""
    bursts: list[tuple[float, int]] = []
    for event in events:
        if event.kind != "token":
            continue
        count = 1 if event.value is None else int(event.value)
        if bursts and bursts[-1][0] == event.time_s:
            bursts[-1] = (event.time_s, bursts[-1][1] + count)
        elif count:
            bursts.append((event.time_s, count))
    return bursts


def _time_of_token(bursts: list[tuple[float, int]], number: int) -> float:
    for time_s, count in bursts:
        number -= count
        if number <= 0:
            return time_s
    return math.nan


def _total(events: Iterable[Event], kind: str) -> int:
    return sum(int(event.value or 0) for event in events if event.kind == kind)


def _text(value: float | str | None) -> str | None:
    return None if value is None else str(value)


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A statistic with its bootstrap interval."""

    value: float
    low: float
    high: float


@dataclasses.dataclass(frozen=True)
class MetricSummary:
    """One metric over many requests.

    `n` counts the values, `requests` the requests they come from, `missing` those without one.
    """

    mean: Estimate
    percentiles: dict[float, Estimate]
    n: int
    requests: int
    missing: int
    definition: str


SUMMARIZED = (
    "ttft_s",
    "queue_s",
    "prefill_s",
    "transfer_s",
    "first_decode_s",
    "tpot_s",
    "itl_s",
    "e2e_s",
    "normalized_latency_s",
)


def summary(
    metrics: Sequence[RequestMetrics],
    percentiles: Sequence[float] = (50, 90, 99),
    confidence: float = 0.95,
    resamples: int = 1000,
    seed: int = 0,
) -> dict[str, MetricSummary]:
    """Mean and percentiles of every latency, with n and bootstrap intervals.

    Requests are resampled, not tokens: the gaps of one request are not independent.
    """
    rng = np.random.default_rng(seed)
    out = {}
    for name in SUMMARIZED:
        per_request = [np.atleast_1d(getattr(m, name)).astype(np.float64) for m in metrics]
        per_request = [values[~np.isnan(values)] for values in per_request]
        seen = [values for values in per_request if values.size]
        out[name] = _summarize(
            seen, len(metrics) - len(seen), percentiles, confidence, resamples, rng, name
        )
    return out


def _summarize(
    groups: list[np.ndarray],
    missing: int,
    percentiles: Sequence[float],
    confidence: float,
    resamples: int,
    rng: np.random.Generator,
    name: str,
) -> MetricSummary:
    if not groups:
        nothing = Estimate(math.nan, math.nan, math.nan)
        empty = dict.fromkeys(percentiles, nothing)
        return MetricSummary(nothing, empty, 0, 0, missing, DEFINITIONS[name])
    values = np.concatenate(groups)
    owner = np.repeat(np.arange(len(groups)), [group.size for group in groups])
    order = np.argsort(values, kind="stable")
    values, owner = values[order], owner[order]
    even = np.full(len(groups), 1 / len(groups))
    counts = [np.ones(len(groups), np.int64), *rng.multinomial(len(groups), even, size=resamples)]
    statistics = np.array([_statistics(values, count[owner], percentiles) for count in counts])
    tail = (1 - confidence) / 2
    low, high = np.quantile(statistics[1:], [tail, 1 - tail], axis=0)
    estimates = [
        Estimate(*map(float, column)) for column in zip(statistics[0], low, high, strict=True)
    ]
    return MetricSummary(
        mean=estimates[0],
        percentiles=dict(zip(percentiles, estimates[1:], strict=True)),
        n=values.size,
        requests=len(groups),
        missing=missing,
        definition=DEFINITIONS[name],
    )


def _statistics(
    values: np.ndarray, weights: np.ndarray, percentiles: Sequence[float]
) -> list[float]:
    """Mean and percentiles of sorted values that count `weights` times each."""
    cumulative = np.cumsum(weights)
    total = cumulative[-1]
    # The rank is rounded up, safe against 0.9 * 10 = 9.000000000000002.
    ranks = [max(1, math.ceil(round(p * float(total) / 100, 9))) for p in percentiles]
    picked = values[np.searchsorted(cumulative, ranks)]
    return [float(values @ weights) / float(total), *map(float, picked)]
