"""The shortest common supersequence against its definition, and of two against its recurrence."""

import functools
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jinfire import supersequence
from jinfire.supersequence import common_supersequence

KINDS = st.lists(st.sampled_from("abc"), max_size=7).map(tuple)


def is_part(one, other) -> bool:
    rest = iter(other)
    return all(item in rest for item in one)


def shortest_of_two(one, other) -> int:
    @functools.cache
    def length(i: int, j: int) -> int:
        if i == len(one) or j == len(other):
            return len(one) - i + len(other) - j
        if one[i] == other[j]:
            return 1 + length(i + 1, j + 1)
        return 1 + min(length(i + 1, j), length(i, j + 1))

    return length(0, 0)


@given(KINDS, KINDS)
def test_of_two_it_is_the_shortest(one, other) -> None:
    found = common_supersequence([one, other])
    assert is_part(one, found)
    assert is_part(other, found)
    assert len(found) == shortest_of_two(one, other)


@given(st.lists(st.lists(st.sampled_from("ab"), max_size=4).map(tuple), max_size=4))
def test_of_several_nothing_shorter_holds_them(sequences) -> None:
    found = common_supersequence(sequences)
    assert all(is_part(one, found) for one in sequences)
    for shorter in itertools.product("ab", repeat=max(0, len(found) - 1)):
        assert not found or not all(is_part(one, shorter) for one in sequences)


def test_none_and_equal_ones() -> None:
    assert common_supersequence([]) == common_supersequence([(), ()]) == ()
    assert common_supersequence([("a", "b")] * 3) == ("a", "b")
    assert common_supersequence([("a",), ("a", "b"), ("b",)]) == ("a", "b")


def test_beyond_the_limit_it_holds_them_still(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supersequence, "MAX_STATES", 3)
    sequences = [tuple("abcabc"), tuple("cbacba"), tuple("bbaacc")]
    found = common_supersequence(sequences)
    assert all(is_part(one, found) for one in sequences)
