"""How prompts are cut into prefill programs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jinfire.config import EngineConfig
from jinfire.packing import choose_prefill_shape, pack_chunks

SHAPES = EngineConfig().prefill_shapes


@given(
    remaining=st.lists(st.integers(1, 40), min_size=1, max_size=8),
    microbatches=st.integers(1, 4),
    rows=st.integers(1, 4),
    chunk=st.integers(1, 16),
)
def test_packing_rules(remaining, microbatches, rows, chunk):
    packing = pack_chunks(remaining, microbatches, rows, chunk)
    left = list(remaining)
    assert len(packing) == microbatches
    for slots in packing:
        indices = [index for index, _ in slots]
        assert indices == sorted(set(indices)), "two chunks of a sequence, or out of order"
        assert len(slots) == min(rows, sum(tokens > 0 for tokens in left)), "a slot was wasted"
        if indices:  # first come, first served
            assert indices == [i for i, tokens in enumerate(left) if tokens][: len(indices)]
        for index, length in slots:
            assert length == min(chunk, left[index])
            left[index] -= length


def test_successive_chunks_sit_in_successive_microbatches():
    packing = pack_chunks([20, 5], microbatches=3, rows=2, chunk=8)
    assert packing == [[(0, 8), (1, 5)], [(0, 8)], [(0, 4)]]


@pytest.mark.parametrize(
    ("remaining", "shape"),
    [
        ([1], (1, 32)),
        ([32], (1, 32)),
        ([10, 10, 10], (4, 32)),
        ([100], (1, 128)),
        ([512], (1, 512)),
        ([1000, 10, 10, 10], (4, 32)),  # the short ones together, the long one later
        ([40, 90], (1, 128)),
    ],
)
def test_shape_that_wastes_least(remaining, shape):
    chosen, packing = choose_prefill_shape(remaining, 1, SHAPES)
    assert chosen == shape
    assert packing == pack_chunks(remaining, 1, *shape)


@given(
    remaining=st.lists(st.integers(1, 2000), min_size=1, max_size=20),
    microbatches=st.integers(1, 4),
)
def test_every_backlog_is_worked_off(remaining, microbatches):
    programs = 0
    while remaining:
        _, packing = choose_prefill_shape(remaining, microbatches, SHAPES)
        for slots in packing:
            for index, length in slots:
                remaining[index] -= length
        remaining = [tokens for tokens in remaining if tokens]
        programs += 1
    assert programs < 2000
