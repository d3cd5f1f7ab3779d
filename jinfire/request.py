"""What goes into the engine and what comes out: parameters, requests, events and outputs."""

import dataclasses
import enum
import math
import numbers
from collections.abc import Sequence
from typing import Any

MAX_LOGPROBS = 20

Prompt = str | Sequence[int]


class FinishReason(enum.StrEnum):
    """The one terminal state of a request."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled and when it ends.

    `temperature=0` is greedy, and so is `top_k=1`. `top_k=0`, `top_p=1` and `min_p=0` are off.
    `seed=None` lets the engine draw a seed; with a seed, tokens depend on the prompt and the
    parameters alone. `logprobs=n` returns the chosen token's log-probability and the n best
    alternatives (0 to 20; True is 0, False is None), of the raw distribution before temperature
    and truncation, or after the temperature (still before truncation) with
    `logprobs_after_temperature`.
    `stop` strings are matched over token borders and cut from the text; `ignore_eos` ignores
    the model's end tokens, not `stop_token_ids` or `stop`.

    Raises: ValueError naming the field, what it allows and what came.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    logprobs_after_temperature: bool = False

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        object.__setattr__(self, "stop", stop)
        if isinstance(self.logprobs, bool):
            object.__setattr__(self, "logprobs", 0 if self.logprobs else None)
        object.__setattr__(self, "stop_token_ids", tuple(int(i) for i in self.stop_token_ids))
        _require("max_tokens", self.max_tokens, _is_int(self.max_tokens, 1), "an integer >= 1")
        _require(
            "temperature", self.temperature, _is_real(self.temperature, 0), "a finite number >= 0"
        )
        _require("top_k", self.top_k, _is_int(self.top_k, 0), "an integer >= 0 (0 is off)")
        _require(
            "top_p",
            self.top_p,
            _is_real(self.top_p, 0) and 0 < self.top_p <= 1,
            "a number in (0, 1]",
        )
        _require("min_p", self.min_p, _is_real(self.min_p, 0) and self.min_p <= 1, "in [0, 1]")
        seed_ok = self.seed is None or (_is_int(self.seed, 0) and self.seed < 2**32)
        _require("seed", self.seed, seed_ok, "None or an integer in [0, 2**32)")
        logprobs_ok = self.logprobs is None or (
            _is_int(self.logprobs, 0) and self.logprobs <= MAX_LOGPROBS
        )
        _require("logprobs", self.logprobs, logprobs_ok, f"None or 0 to {MAX_LOGPROBS}")
        stop_ok = all(isinstance(s, str) and s for s in stop)
        _require("stop", self.stop, stop_ok, "non-empty strings")
        _require(
            "stop_token_ids",
            self.stop_token_ids,
            all(i >= 0 for i in self.stop_token_ids),
            "token ids >= 0",
        )

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0 or self.top_k == 1


@dataclasses.dataclass(frozen=True)
class Request:
    """One prompt with its parameters, as the engine accepted it.

    `eos_ids` are the end tokens in force (empty with `ignore_eos`); `seed` is never None here.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    eos_ids: frozenset[int] = frozenset()

    @property
    def stop_ids(self) -> frozenset[int]:
        return self.eos_ids | frozenset(self.params.stop_token_ids)


@dataclasses.dataclass(frozen=True)
class TokenLogprobs:
    """Log-probability of the chosen token and of the best alternatives, best first.

    `float()` of it, and so `np.array(output.logprobs, float)`, is the chosen token's.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()

    def __float__(self) -> float:
        return self.logprob


@dataclasses.dataclass(frozen=True)
class TokenEvent:
    """One token of one request, or its end.

    `text` is what became printable with this token: text that may still turn out to be part of a
    stop string or of an unfinished character is held back. An aborted or failed request ends with
    `token_id=None`. `time_s` is `time.perf_counter()` when the host saw the token.
    """

    request_id: str
    index: int
    token_id: int | None
    text: str
    finish_reason: FinishReason | None = None
    logprobs: TokenLogprobs | None = None
    time_s: float = math.nan


@dataclasses.dataclass
class RequestOutput:
    """Everything one request produced.

    `token_ids` includes the stop token that ended it, `text` does not. `metrics` is a
    `jinfire.RequestMetrics`. `error` is set when `finish_reason` is "error".
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    token_ids: list[int]
    text: str
    finish_reason: FinishReason | None
    logprobs: list[TokenLogprobs] | None
    metrics: Any
    error: Exception | None = None


def as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """The prompts of one call: a text, token ids, or a list of either."""
    if isinstance(prompts, str):
        return [prompts]
    batch = list(prompts)
    if batch and all(isinstance(token, numbers.Integral) for token in batch):
        return [batch]  # type: ignore[list-item]
    return batch  # type: ignore[return-value]


def as_params(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    """Parameters of each of `count` prompts.

    Raises: ValueError for another number of them.
    """
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    listed = list(params)
    if len(listed) != count:
        raise ValueError(f"params: expected one or {count} (one a prompt), got {len(listed)}")
    return listed


def _require(name: str, value: object, ok: bool, expected: str) -> None:
    if not ok:
        raise ValueError(f"SamplingParams.{name}: expected {expected}, got {value!r}")


def _is_int(value: object, low: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= low


def _is_real(value: object, low: float) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and value >= low
