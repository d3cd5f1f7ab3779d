"""One request's life in the scheduler, and the records of one plan."""

import dataclasses
import enum
from typing import NamedTuple

from jinfire.kvcache.page_set import HeldPages
from jinfire.request import FinishReason, Request


class SequenceState(enum.Enum):
    """Where a sequence stands. A preempted one is WAITING again."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    HANDOFF = "handoff"  # last chunk issued, row not installed yet (or never, see needs_handoff)
    RUNNING = "running"
    FINISHED = "finished"


class Sequence:
    """One request's life in the scheduler.

    `tokens` is the prompt and the committed outputs. `computed` counts tokens whose keys and values
    the prefill pool holds once the issued programs have run, `kv_bound` bounds them in the decode
    pool from above. `limit` is the token count that ends the sequence; the last token's keys and
    values are never needed. `in_flight` counts issued dispatches whose tokens are not committed.
    """

    def __init__(self, request: Request, arrival: int, limit: int) -> None:
        self.request = request
        self.request_id = request.request_id
        self.arrival = arrival
        self.tokens = list(request.prompt_ids)
        self.num_prompt = len(request.prompt_ids)
        self.limit = limit
        self.stop_ids = request.stop_ids
        self.state = SequenceState.WAITING
        self.finish_reason: FinishReason | None = None
        self.row: int | None = None
        self.prefill_pages = HeldPages()
        self.decode_pages = HeldPages()
        self.computed = 0
        self.cached = 0
        self.kv_bound = 0
        self.in_flight = 0
        self.awaits_first_token = False
        self.preemptions = 0
        self.admissions = 0

    @property
    def num_outputs(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def output_ids(self) -> list[int]:
        return self.tokens[self.num_prompt :]

    @property
    def remaining(self) -> int:
        """Tokens this sequence may still get."""
        return self.limit - len(self.tokens)

    @property
    def kv_limit(self) -> int:
        """Tokens whose keys and values can ever be needed: all but the last."""
        return self.limit - 1

    def __repr__(self) -> str:
        return (
            f"Sequence({self.request_id!r}, {self.state.value}, row={self.row}, "
            f"tokens={self.num_prompt}+{self.num_outputs}/{self.limit})"
        )


class ScheduledChunk(NamedTuple):
    """Tokens [start, start + length) of a sequence in one microbatch row.

    The last chunk samples the sequence's next token. Without `needs_handoff` that token is its
    last: there is no row and no decode page for it.
    """

    sequence: Sequence
    start: int
    length: int
    is_last: bool
    needs_handoff: bool


Grants = dict[str, list[tuple[int, int, int]]]
"""By KV group: (row, column, page) additions to page tables."""


class PrefillPlan(NamedTuple):
    """One prefill program. Shapes: `shape` (M, R, C); `chunks` [M][<= R]; `width` in pages."""

    shape: tuple[int, int, int]
    width: int
    chunks: list[list[ScheduledChunk]]

    @property
    def last_chunks(self) -> list[ScheduledChunk]:
        return [chunk for row in self.chunks for chunk in row if chunk.is_last]


class DecodePlan(NamedTuple):
    """One decode program of `steps` steps over the rows below `row_bucket`.

    `rows` are the rows that still have something to decode, as of this dispatch: keep the plan
    with the dispatch, `commit_decode` needs it. `grants` are for page tables installed by earlier
    plans. Units: `width` in pages.
    """

    rows: dict[int, Sequence]
    row_bucket: int
    width: int
    steps: int
    grants: Grants


class Plan(NamedTuple):
    """What to run in one step, in this order: halt, prefill, install, decode (with its grants).

    `install` are the sequences whose whole `decode_pages` go into their row now. `halt` are rows
    that may still be active on the device and must not write any more.
    """

    halt: list[int]
    prefill: PrefillPlan | None
    install: list[Sequence]
    decode: DecodePlan | None
    preempted: list[Sequence]


class Committed(NamedTuple):
    """One token taken in. `row` and `step` locate it in the arrays it came from."""

    sequence: Sequence
    token: int
    index: int
    finish_reason: FinishReason | None
    row: int | None = None
    step: int = 0


@dataclasses.dataclass
class SchedulerStats:
    """Counters since the start. Units: tokens, except `preemptions`.

    `prompt_tokens` and `cached_tokens` are those of requests admitted for the first time, so their
    ratio is the prefix-cache hit rate; `recomputed_tokens` are the price of preemption.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    prefill_tokens: int = 0
    prefill_padded_tokens: int = 0
    recomputed_tokens: int = 0
    preemptions: int = 0
