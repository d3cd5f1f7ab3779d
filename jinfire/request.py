"""What goes into the engine and what comes out: parameters, requests, events and outputs."""

import dataclasses
import enum
import math
import numbers
from collections.abc import Sequence
from typing import Any

import numpy as np

from jinfire.checks import as_flag, as_items, convert_field, integer_in, number_where

MAX_LOGPROBS = 20
# The device computes in float32, and may take what is under the smallest normal number for 0.
_MAX_FLOAT32 = float(np.finfo(np.float32).max)
_MIN_FLOAT32 = float(np.finfo(np.float32).tiny)

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

    `temperature=0` is greedy, and so is `top_k=1`. A temperature under float32's smallest normal
    number (1.2e-38) is stored as 0 and means the same, also for `logprobs_after_temperature`.
    `top_k=0`, `top_p=1` and `min_p=0` are off.
    `seed=None` lets the engine draw a seed; with a seed, tokens depend on the prompt and the
    parameters alone. `logprobs=n` returns the chosen token's log-probability and the n best
    alternatives (0 to 20; True is 0, False is None), of the raw distribution before temperature
    and truncation, or after the temperature (still before truncation) with
    `logprobs_after_temperature`.
    `stop` strings are matched over token borders and cut from the text; `ignore_eos` ignores
    the model's end tokens, not `stop_token_ids` or `stop` (None is none of them). NumPy numbers
    are taken like Python's, and stored as those.

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
        convert_field(self, "max_tokens", "an integer >= 1", integer_in(1))
        convert_field(self, "temperature", f"a number from 0 to {_MAX_FLOAT32:.3g}", _temperature)
        convert_field(self, "top_k", "an integer >= 0 (0 is off)", integer_in(0))
        convert_field(self, "top_p", "a number in (0, 1]", number_where(lambda p: 0 < p <= 1))
        convert_field(self, "min_p", "a number in [0, 1]", number_where(lambda p: 0 <= p <= 1))
        if self.seed is not None:
            convert_field(
                self, "seed", "None or an integer in [0, 2**32)", integer_in(0, 2**32 - 1)
            )
        if isinstance(self.logprobs, bool):
            object.__setattr__(self, "logprobs", 0 if self.logprobs else None)
        if self.logprobs is not None:
            expected = f"None or an integer from 0 to {MAX_LOGPROBS}"
            convert_field(self, "logprobs", expected, integer_in(0, MAX_LOGPROBS))
        convert_field(self, "stop", "non-empty strings", _stop_strings)
        convert_field(self, "stop_token_ids", "token ids >= 0", _stop_ids)
        convert_field(self, "ignore_eos", "True or False", as_flag)
        convert_field(self, "logprobs_after_temperature", "True or False", as_flag)

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
    """The prompts of one call: a text, token ids, or a list of either.

    What is none of these is one prompt, for admission to refuse.
    """
    try:
        batch = as_items(prompts)
    except TypeError:
        return [prompts]  # type: ignore[list-item]
    if batch and all(isinstance(token, numbers.Integral) for token in batch):
        return [batch]
    return batch


def as_params(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    """Parameters of each of `count` prompts.

    Raises: ValueError for another number of them, or for anything else.
    """
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    listed: list[Any]
    try:
        listed = as_items(params)
    except TypeError:
        listed = [params]
    if not all(isinstance(one, SamplingParams) for one in listed):
        raise ValueError(f"params: expected SamplingParams or a list of them, got {params!r:.80}")
    if len(listed) != count:
        raise ValueError(f"params: expected one or {count} (one a prompt), got {len(listed)}")
    return listed


def _temperature(value: Any) -> float:
    number = number_where(lambda t: 0 <= t <= _MAX_FLOAT32)(value)
    return number if number >= _MIN_FLOAT32 else 0.0


def _stop_strings(value: Any) -> tuple[str, ...]:
    strings = (value,) if isinstance(value, str) else tuple(() if value is None else value)
    if not all(isinstance(string, str) and string for string in strings):
        raise ValueError
    return strings


def _stop_ids(value: Any) -> tuple[int, ...]:
    return tuple(map(integer_in(0), () if value is None else as_items(value)))
