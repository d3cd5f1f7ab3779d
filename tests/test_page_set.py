"""Pages of several KV groups: rings that hold what is seen, and books that always balance."""

import dataclasses
import itertools
import random

import pytest
from fake_device import FakeEngine, make_request, model_pages
from helpers import tiny_config

from jinfire.config import EngineConfig, LayerSpec
from jinfire.errors import OutOfPages
from jinfire.kvcache.page_set import FULL, LOCAL, KVGroup, PageSet, kv_groups, ring_pages
from jinfire.kvcache.page_table import NULL_PAGE, pages_for

LOCAL_LAYER = LayerSpec("chunked", kv_group=LOCAL)
FULL_LAYER = LayerSpec("unrotated")


def model(*layers: LayerSpec, attention_chunk: int | None = 8):
    return dataclasses.replace(tiny_config(), layers=layers, attention_chunk=attention_chunk)


def config(**changes) -> EngineConfig:
    defaults = {
        "page_size": 4,
        "max_rows": 3,
        "max_context": 64,
        "prefill_shapes": ((1, 4), (2, 8)),
        "row_buckets": (),
        "context_buckets": (),
        "decode_steps": 3,
    }
    return EngineConfig(**(defaults | changes))


def test_a_ring_holds_whatever_new_tokens_may_see():
    for chunk, span, size in itertools.product(range(1, 14), range(1, 10), range(1, 7)):
        ring = ring_pages(chunk, span, size)
        most = 0
        for start in range(2 * chunk * size):
            first = start // chunk * chunk // size
            columns = range(first, (start + span - 1) // size + 1)
            assert len({column % ring for column in columns}) == len(columns)
            most = max(most, len(columns))
        assert ring - most <= 2  # and hardly more


def test_sizes_of_groups():
    ring = ring_pages(8, 8, 4)
    assert ring == 5
    full, local = kv_groups(model(FULL_LAYER, LOCAL_LAYER), config())
    assert full == KVGroup(FULL, ring=16, pool_pages=3 * 16 + 1, hit_pages=2)
    assert local == KVGroup(LOCAL, ring, pool_pages=3 * ring + 1, hit_pages=0)
    # A size that is given bounds every group; one request of the whole pool fits all of them.
    full, local = kv_groups(model(FULL_LAYER, LOCAL_LAYER), config(num_pages=9))
    assert (full.pool_pages, local.pool_pages) == (9, 9)
    full, local = kv_groups(model(FULL_LAYER, LOCAL_LAYER), config(num_pages=40))
    assert (full.pool_pages, local.pool_pages) == (40, 3 * ring + 1)
    # In the order of the model's layers; no ring is wider than the page table.
    local, full = kv_groups(model(LOCAL_LAYER, FULL_LAYER, attention_chunk=60), config())
    assert (local.name, local.ring, full.ring) == (LOCAL, 16, 16)
    assert full.hit_pages == 15
    (only,) = kv_groups(model(LOCAL_LAYER), config())
    assert (only.name, only.ring, only.hit_pages) == (LOCAL, ring, 0)
    (only,) = kv_groups(tiny_config(), config())
    assert only == KVGroup(FULL, 16, 49, 1)


def test_groups_refuse():
    with pytest.raises(ValueError, match=r"got \('local',\) with attention_chunk=None"):
        kv_groups(model(LOCAL_LAYER, attention_chunk=None), config())
    with pytest.raises(ValueError, match="expected 'full', or 'local'"):
        kv_groups(model(LayerSpec(kv_group="window")), config())


@pytest.mark.parametrize(
    ("cached", "hit"), [(7, 0), (11, 0), (12, 12), (23, 12), (24, 24), (28, 24), (40, 36)]
)
def test_hits_end_where_an_attention_chunk_begins(cached, hit):
    """Multiples of the chunk of 6 tokens that are whole pages of 4."""
    pages = model_pages(config(), attention_chunk=6)
    tokens = list(range(41))
    held, found = pages.allocate(pages_for(cached, 4), tokens[:cached])
    assert found == 0
    pages.register(tokens, held, cached)
    pages.release(held)
    assert len(pages.match(tokens)) * 4 == hit
    again, found = pages.allocate(11, tokens)
    assert found == hit
    assert pages.pools[LOCAL].cached_pages == 0
    pages.release(again)
    assert pages.free == pages.totals


def test_a_local_group_alone_finds_nothing():
    pages = PageSet(kv_groups(model(LOCAL_LAYER), config()), 4)
    held, _ = pages.allocate(3, range(12))
    pages.register(range(12), held, 12)
    pages.release(held)
    assert pages.match(range(20)) == []
    assert pages.allocate(5, range(20))[1] == 0


@pytest.mark.parametrize("seed", range(20))
def test_books_balance(seed):
    rng = random.Random(seed)
    groups = [KVGroup(FULL, 12, rng.randrange(14, 40), 1), KVGroup(LOCAL, 3, 12, 0)]
    rng.shuffle(groups)
    pages = PageSet(groups, 4)
    live = []
    for _ in range(300):
        columns = rng.randrange(1, 13)
        kind = rng.random()
        if kind < 0.4:
            tokens = [rng.randrange(2) for _ in range(4 * columns)]
            if not pages.fits(columns, pages.match(tokens)):
                before = pages.free
                with pytest.raises(OutOfPages):
                    pages.allocate(columns, tokens)
                assert pages.free == before  # in every group
                continue
            held, hits = pages.allocate(columns, tokens)
            assert hits < len(tokens)
            live.append((tokens, held))
        elif live and kind < 0.7:
            _, held = rng.choice(live)
            columns = max(columns, held.columns)
            before = {name: list(own) for name, own in held.by_group.items()}
            if pages.can_grow({held: columns}):
                pages.grow(held, columns)
                for name, old in before.items():
                    assert held.by_group[name][: len(old)] == old
            else:
                with pytest.raises(OutOfPages):
                    pages.allocate(columns)
        elif live:
            tokens, held = live.pop(rng.randrange(len(live)))
            pages.register(tokens, held, rng.randrange(len(tokens) + 1))
            pages.release(held)
        for group in groups:
            lists = [held.by_group[group.name] for _, held in live]
            owned = [page for pages_ in lists for page in pages_]
            assert NULL_PAGE not in owned
            pool = pages.pools[group.name]
            assert pool.free_pages == pool.total - len(set(owned))
            if group.name == LOCAL:
                assert len(set(owned)) == len(owned)
            for (_, held), own in zip(live, lists, strict=True):
                assert len(own) == min(held.columns, group.ring)
                expected = [own[c % group.ring] for c in range(held.columns)]
                assert held.table(group.name, 0, held.columns) == expected
                start = rng.randrange(held.columns)
                assert held.table(group.name, start, held.columns) == expected[start:]
    for _, held in live:
        pages.release(held)
    assert pages.free == pages.totals


# Whole requests, over a fake device that reads all that an attention chunk shows.

CHUNK = 6
RING = ring_pages(CHUNK, 8, 4)
BORDERS = sorted({CHUNK, 2 * CHUNK, RING * 4, 2 * RING * 4 - CHUNK, 8, 24})


@pytest.mark.parametrize("colocated", [True, False], ids=["colocated", "disaggregated"])
@pytest.mark.parametrize("steps", [1, 3, 9])
def test_rings_at_every_border(colocated, steps):
    engine = FakeEngine(
        config(decode_steps=steps), colocated, latency=lambda _: 2, attention_chunk=CHUNK
    )
    lengths = sorted({max(1, border + off) for border in BORDERS for off in (-1, 0, 1)})
    requests = [
        make_request(f"{length} {count}", range(length, 2 * length), count)
        for length, count in itertools.product(lengths, (1, 2, 4 * RING))
    ]
    for request in requests:
        engine.add(request)
    held = 0
    while engine.scheduler.has_work:
        engine.step()
        for sequence in engine.scheduler._running.values():
            local = len(sequence.decode_pages.by_group[LOCAL])
            assert local == min(sequence.decode_pages.columns, RING)
            held = max(held, sequence.decode_pages.columns)
    engine.drain()
    engine.check_idle()
    engine.check_outputs(requests)
    assert held > 2 * RING


@pytest.mark.parametrize("colocated", [True, False], ids=["colocated", "disaggregated"])
def test_hits_and_preemption_with_a_ring(colocated):
    engine = FakeEngine(
        config(num_pages=23, max_rows=5, decode_steps=2), colocated, attention_chunk=CHUNK
    )
    requests = [make_request(i, [*range(25), i], 30) for i in range(8)]
    for request in requests:
        engine.add(request)
    engine.drain()
    engine.check_idle()
    engine.check_outputs(requests)
    stats = engine.scheduler.stats
    assert stats.preemptions > 0
    assert stats.cached_tokens > 0
    assert stats.cached_tokens % 12 == 0
