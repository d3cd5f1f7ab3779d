"""Tiny engines that tests share, and what must hold of every engine when it is idle."""

import contextlib
import functools
import string
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from helpers import tiny_config

from jinfire import Engine, EngineConfig, Placement, RequestOutput, SamplingParams, TokenEvent
from jinfire.config import RopeConfig
from jinfire.kvcache.page_set import PageSet
from jinfire.kvcache.page_table import PagePool
from jinfire.loading import RandomSource

VOCAB = 97
LOGPROB_TOLERANCE = 1e-4  # far above the float32 difference of two layouts, which is about 1e-6
MODEL = tiny_config(layers=3, vocab_size=VOCAB, num_heads=4, rope=RopeConfig())

PLACEMENTS = {
    "colocated": Placement.colocated((1, 1)),
    "colocated 2x2": Placement.colocated((2, 2)),
    # Unequal on both axes.
    "disaggregated": Placement.disaggregated(prefill=(2, 1), decode=(1, 2)),
    "disaggregated 1x1": Placement.disaggregated(prefill=(1, 1), decode=(1, 1)),
    "disaggregated 2x2": Placement.disaggregated(prefill=(2, 2), decode=(1, 4)),
}
BOTH = ("colocated", "disaggregated")


# Engines of other shapes than `engine_config`: every number that a caller may turn.
ODD = {
    "pages of one token": ("colocated", {"page_size": 1, "decode_steps": 8, "max_rows": 1}),
    "pages of three": ("disaggregated 1x1", {"page_size": 3, "decode_steps": 1, "max_rows": 2}),
    "pages of seven": ("colocated", {"page_size": 7, "decode_steps": 5, "max_context": 50}),
    "pages longer than a request": ("disaggregated 1x1", {"page_size": 200, "max_rows": 3}),
    "chunks of one token": ("colocated", {"prefill_shapes": ((1, 1),), "max_context": 20}),
    "more microbatches than stages": ("colocated 2x2", {"microbatches": 3, "max_rows": 6}),
    "fewer microbatches than stages": ("colocated 2x2", {"microbatches": 1, "max_rows": 3}),
}
# Several buckets of everything, and a pool that running rows outgrow.
_BUCKETS = {"prefill_shapes": ((1, 8), (2, 16)), "num_pages": 17}
BUCKETED = {
    "colocated": {**_BUCKETS, "row_buckets": (2,), "context_buckets": (16,)},
    "colocated 2x2": {**_BUCKETS, "row_buckets": (2,)},
    "disaggregated": {**_BUCKETS, "context_buckets": (16,)},
}


class PairTokenizer:
    """A tokenizer whose every token is two letters, so that a stop string may cut tokens."""

    def __init__(self) -> None:
        self.eos_ids: frozenset[int] = frozenset()

    def encode(self, text: str) -> list[int]:
        if len(text) % 2 or not set(text) <= set(string.ascii_lowercase):
            raise ValueError(f"prompt: expected pairs of letters, got {text!r}")
        letters = [string.ascii_lowercase.index(letter) for letter in text]
        return [26 * high + low for high, low in zip(letters[::2], letters[1::2], strict=True)]

    def decode(self, ids: Sequence[int]) -> str:
        letters = string.ascii_lowercase
        return "".join(letters[token // 26] + letters[token % 26] for token in ids)


def engine_config(**changes) -> EngineConfig:
    """Four rows of 64 tokens; one prefill, one install and one decode program."""
    defaults = {
        "page_size": 4,
        "max_rows": 4,
        "max_context": 64,
        "prefill_shapes": ((2, 16),),
        "row_buckets": (),
        "context_buckets": (),
        "decode_steps": 4,
    }
    return EngineConfig(**(defaults | changes))


@functools.cache
def tiny_engine(placement: str = "colocated", dtype: str = "float32", **changes) -> Engine:
    """The engine of that name and configuration that all tests of a process share."""
    return Engine(
        RandomSource(MODEL),
        PairTokenizer(),  # type: ignore[arg-type]
        placement=PLACEMENTS[placement],
        config=engine_config(**changes),
        dtype=dtype,
    )


def page_sets(engine: Engine) -> list[PageSet]:
    """The page sets of a scheduler, one a mesh."""
    scheduler = engine.scheduler
    return list(dict.fromkeys((scheduler.prefill_pools, scheduler.decode_pools)))


def pools(engine: Engine) -> list[PagePool]:
    """All page pools, of every mesh and KV group."""
    return [pool for pages in page_sets(engine) for pool in pages.pools.values()]


def forget_prefixes(engine: Engine) -> None:
    """Empties the prefix cache of an idle engine."""
    for pool in pools(engine):
        pool.release(pool.allocate(pool.total))
        assert pool.cached_pages == 0


def check_idle(engine: Engine) -> None:
    """Nothing is left of any request, on either side."""
    engine.step()  # hands out the events of aborted requests
    assert not engine.has_work
    ledger, scheduler = engine._ledger, engine.scheduler
    for kept in (ledger.live, ledger.outputs, engine._streams, engine._pending_events):
        assert not kept
    for under_way in (engine._first_tokens, engine._transits, engine._issued, engine._prefills):
        assert not under_way
    assert len(engine.events) == 0
    assert scheduler.num_waiting == scheduler.num_running == 0
    assert not scheduler._prefilling
    assert sorted(scheduler._free_rows) == list(range(engine.config.max_rows))
    for pool in pools(engine):
        assert pool.free_pages == pool.total
        assert sum(pool._refs) == 0


@contextlib.contextmanager
def idle_after(engine: Engine) -> Iterator[Engine]:
    """An engine that must be idle at the end; after a failure later tests get new engines."""
    try:
        yield engine
        check_idle(engine)
    except BaseException:
        tiny_engine.cache_clear()
        raise


def unowned_pages(pool: PagePool) -> list[int]:
    """Pages that nobody holds and the prefix cache may not hand out, and the null page."""
    return [p for p in range(pool.num_pages) if not (pool._refs[p] or pool._node[p])]


def fill_nan(slots, pages: Sequence[int]):
    """The arrays of one KV group with NaN in some pages."""
    mask_P = np.zeros(jax.tree.leaves(slots)[0].shape[1], np.bool_)
    mask_P[list(pages)] = True
    return jax.tree.map(lambda leaf: jax.device_put(_with_nan(leaf, mask_P), leaf.sharding), slots)


@jax.jit
def _with_nan(leaf: jax.Array, mask_P: jax.Array) -> jax.Array:
    return jnp.where(mask_P[None, :, None, None, None], jnp.full((), jnp.nan, leaf.dtype), leaf)


def poison(engine: Engine) -> None:
    """Fills every page that nobody owns, and the null page, with NaN."""
    runner = engine._runner
    for index, (arrays, pages) in enumerate(zip(runner._pools, page_sets(engine), strict=True)):
        runner._pools[index] = {
            group: fill_nan(slots, unowned_pages(pages.pools[group]))
            for group, slots in arrays.items()
        }


def greedy(max_tokens: int = 8, **changes) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, **changes)


def seeded(seed: int, max_tokens: int = 8, **changes) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, seed=seed, **changes)


def prompts_of(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    return [generator.integers(0, VOCAB, length).tolist() for length in lengths]


def alone(engine: Engine, prompt: Sequence[int], params: SamplingParams) -> RequestOutput:
    """The output of a request without company (its prefix may be cached)."""
    return engine.generate([prompt], params)[0]


def drain(engine: Engine, most_steps: int = 100_000) -> list[TokenEvent]:
    """All events until nothing is left to do."""
    events = []
    for _ in range(most_steps):
        if not engine.has_work:
            return events
        events += engine.step()
    raise AssertionError(f"no end after {most_steps} steps")


def collect(engine: Engine, events: list[TokenEvent]) -> dict[str, RequestOutput]:
    """The outputs of all requests that the events end, each checked against its events."""
    by_request: dict[str, list[TokenEvent]] = {}
    for event in events:
        by_request.setdefault(event.request_id, []).append(event)
    outputs = {}
    for request_id, own in by_request.items():
        ends = [event.finish_reason is not None for event in own]
        assert ends == [False] * (len(own) - 1) + [True], "a request ends exactly once"
        output = outputs[request_id] = engine.pop_output(request_id)
        tokens = [event.token_id for event in own if event.token_id is not None]
        assert [event.index for event in own] == list(range(len(own)))
        assert tokens == output.token_ids
        assert "".join(event.text for event in own) == output.text
        assert own[-1].finish_reason is output.finish_reason
        times = [event.time_s for event in own]
        assert times == sorted(times)
        if output.logprobs is not None:
            shown = [event.logprobs for event in own if event.token_id is not None]
            assert shown == output.logprobs
    return outputs


def same(one: RequestOutput, other: RequestOutput) -> None:
    """Equal tokens, text and ending."""
    assert one.token_ids == other.token_ids
    assert one.text == other.text
    assert one.finish_reason is other.finish_reason


def assert_same_output(output: RequestOutput, expected: RequestOutput) -> None:
    """The same request run on two layouts: equal tokens, log-probabilities but for rounding."""
    assert output.token_ids == expected.token_ids
    assert output.finish_reason == expected.finish_reason
    assert (output.logprobs is None) == (expected.logprobs is None)
    for step, wanted in zip(output.logprobs or (), expected.logprobs or (), strict=True):
        assert step.token_id == wanted.token_id
        assert [token for token, _ in step.top] == [token for token, _ in wanted.top]
        values = [step.logprob, *(value for _, value in step.top)]
        wanted_values = [wanted.logprob, *(value for _, value in wanted.top)]
        np.testing.assert_allclose(values, wanted_values, rtol=0, atol=LOGPROB_TOLERANCE)
