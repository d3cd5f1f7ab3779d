"""The page pool against a model of it, and the cases that other systems got wrong."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jinfire.errors import OutOfPages
from jinfire.kvcache.page_table import NULL_PAGE, PagePool, pages_for


def test_pages_for_borders():
    assert [pages_for(n, 4) for n in (0, 1, 3, 4, 5, 8, 9)] == [0, 1, 1, 1, 2, 2, 3]


def test_null_page_is_never_handed_out():
    pool = PagePool(5, 4)
    assert pool.total == pool.free_pages == 4
    assert sorted(pool.allocate(4)) == [1, 2, 3, 4]


def test_out_of_pages_says_what_was_wanted_and_changes_nothing():
    pool = PagePool(5, 4)
    pool.allocate(3)
    with pytest.raises(OutOfPages, match="wanted 2 pages, 1 of 4"):
        pool.allocate(2)
    assert pool.free_pages == 1


def test_double_release_is_refused():
    pool = PagePool(5, 4)
    pages = pool.allocate(1)
    pool.release(pages)
    with pytest.raises(ValueError, match="without holder"):
        pool.release(pages)


@pytest.mark.parametrize(("num_pages", "page_size"), [(1, 4), (4, 0)])
def test_bad_sizes_are_refused(num_pages, page_size):
    with pytest.raises(ValueError, match="expected at least"):
        PagePool(num_pages, page_size)


@pytest.mark.parametrize(
    ("length", "hit_pages"), [(1, 0), (3, 0), (4, 0), (5, 1), (8, 1), (9, 2), (12, 2), (13, 3)]
)
def test_lookup_leaves_a_token_to_compute(length, hit_pages):
    pool = PagePool(10, 4)
    tokens = list(range(13))
    pages = pool.allocate(4)
    pool.register(tokens, pages, 13)
    assert pool.lookup(tokens[:length]) == pages[:hit_pages]


def test_only_computed_full_pages_are_found():
    pool = PagePool(10, 4)
    tokens = list(range(12))
    pages = pool.allocate(3)
    pool.register(tokens, pages, 7)
    assert pool.lookup([*tokens, 99]) == pages[:1]


def test_hit_needs_the_whole_prefix_not_only_the_page():
    pool = PagePool(10, 2)
    pool.register([1, 2, 3, 4], pool.allocate(2), 4)
    assert pool.match([9, 9, 3, 4, 5]) == []
    assert pool.match([3, 4, 5]) == []


def test_shared_page_stays_until_its_last_holder_leaves():
    pool = PagePool(4, 2)
    first = pool.allocate(1)
    pool.register([1, 2], first, 2)
    assert pool.lookup([1, 2, 3]) == first
    pool.release(first)
    assert pool.free_pages == 2
    assert first[0] not in pool.allocate(2)
    with pytest.raises(OutOfPages):
        pool.allocate(1)
    pool.release(first)
    assert pool.allocate(1) == first  # evicted now
    assert pool.match([1, 2, 3]) == []


def test_eviction_takes_the_least_recent_and_the_tail_first():
    pool = PagePool(5, 1)
    old = pool.allocate(2)
    pool.register([1, 2], old, 2)
    new = pool.allocate(2)
    pool.register([3, 4], new, 2)
    pool.release(old)
    pool.release(new)
    pool.release(pool.lookup([1, 2, 0]))  # now the most recent
    assert pool.allocate(1) == new[1:]
    assert pool.match([3, 4, 0]) == new[:1]
    assert pool.allocate(1) == new[:1]
    assert pool.match([1, 2, 0]) == old


def test_child_of_an_evicted_page_does_not_match_its_successor():
    # The second holder computed the same first page, so it holds the child, not the parent.
    pool = PagePool(6, 2)
    winner = pool.allocate(1)
    pool.register([1, 2], winner, 2)
    loser = pool.allocate(2)
    pool.register([1, 2, 3, 4], loser, 4)
    assert pool.match([1, 2, 3, 4, 5]) == [winner[0], loser[1]]
    pool.release(winner)
    others = pool.allocate(3)  # takes the free pages and evicts the winner
    assert winner[0] in others
    pool.register([7, 8], [winner[0]], 2)
    assert pool.match([7, 8, 3, 4, 5]) == [winner[0]]
    assert pool.match([1, 2, 3, 4, 5]) == []
    pool.register([1, 2, 3, 4], loser, 4)  # the chain is whole again
    assert pool.match([1, 2, 3, 4, 5]) == loser


def test_statistics_and_switching_off():
    pool = PagePool(10, 4)
    pages = pool.allocate(2)
    pool.register(list(range(8)), pages, 8)
    pool.lookup(list(range(9)))
    pool.lookup([5])
    assert (pool.hit_tokens, pool.lookup_tokens) == (8, 10)
    off = PagePool(10, 4, prefix_caching=False)
    off.register(list(range(8)), off.allocate(2), 8)
    assert off.lookup(list(range(9))) == []


class PoolMachine(RuleBasedStateMachine):
    """Holders with tokens from a tiny alphabet, so that prefixes meet, in a pool that runs out."""

    def __init__(self):
        super().__init__()
        self.pool = PagePool(9, 2)
        self.holders = []
        self.content = {}  # page -> the tokens from the start to the end of this page

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9))
    def admit(self, tokens):
        matched = self.pool.match(tokens)
        for depth, page in enumerate(matched):
            assert self.content[page] == tuple(tokens[: 2 * depth + 2]), "a wrong hit"
        needed = pages_for(len(tokens), 2) - len(matched)
        fits = self.pool.fits(needed, matched)
        pages = self.pool.lookup(tokens)
        assert pages == matched
        try:
            new = self.pool.allocate(needed)
        except OutOfPages:
            assert not fits
            self.pool.release(pages)
            return
        assert fits
        for depth, page in enumerate(new, start=len(pages)):
            self.content[page] = tuple(tokens[: 2 * depth + 2])
        self.holders.append((tokens, pages + new))

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def register(self, data):
        tokens, pages = data.draw(st.sampled_from(self.holders))
        self.pool.register(tokens, pages, data.draw(st.integers(0, len(tokens))))

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data):
        index = data.draw(st.integers(0, len(self.holders) - 1))
        self.pool.release(self.holders.pop(index)[1])

    @invariant()
    def every_page_is_in_one_place(self):
        held = {page for _, pages in self.holders for page in pages}
        assert NULL_PAGE not in held
        assert self.pool.free_pages == self.pool.total - len(held)
        for page in range(1, self.pool.num_pages):
            holders = sum(page in pages for _, pages in self.holders)
            assert self.pool._refs[page] == holders
            places = [page in held, page in self.pool._free, page in self.pool._evictable]
            assert sum(places) == 1
        assert len(self.pool._page_of) == sum(key is not None for key in self.pool._key)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
