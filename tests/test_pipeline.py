"""Layers over stages, and the microbatch schedule, by enumeration."""

import itertools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sharding import Schedule, spread_layers, stage_counts
from sharding.pipeline import align_cuts


@pytest.mark.parametrize(
    ("layers", "stages", "counts"),
    [
        (30, 4, (8, 8, 7, 7)),
        (61, 8, (8, 8, 8, 8, 8, 7, 7, 7)),
        (5, 5, (1,) * 5),
        (7, 1, (7,)),
    ],
)
def test_stage_counts(layers, stages, counts):
    assert stage_counts(layers, stages) == counts


@pytest.mark.parametrize("stages", [4, 0])
def test_stage_counts_refuses(stages):
    with pytest.raises(ValueError, match=f"3 layers cannot be split over pipeline={stages}"):
        stage_counts(3, stages)


SIZES = list(itertools.product((1, 2, 3, 4, 8), (1, 2, 3, 4, 7), (1, 2, 5)))


@pytest.mark.parametrize(("stages", "microbatches", "steps"), SIZES)
def test_schedule_visits_every_stage_once_in_order(stages, microbatches, steps):
    schedule = Schedule(stages, microbatches, steps)
    visits: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for tick, stage in itertools.product(range(schedule.ticks), range(stages)):
        microbatch, step, valid = schedule.index(tick, stage)
        assert 0 <= microbatch < microbatches
        assert 0 <= step < steps
        if valid:
            visits.setdefault((microbatch, step), []).append((tick, stage))
    assert set(visits) == set(itertools.product(range(microbatches), range(steps)))
    for (microbatch, step), seen in visits.items():
        # One stage per tick, on the heels of the one before: what a ring of sends delivers.
        first = seen[0][0]
        assert seen == [(first + stage, stage) for stage in range(stages)]
        if step:
            assert first > visits[microbatch, step - 1][-1][0]
    work = sum(map(len, visits.values()))
    assert schedule.bubble_fraction == pytest.approx(1 - work / (schedule.ticks * stages))
    # No tick at either end is idle on all stages.
    assert any(schedule.index(0, s)[2] for s in range(stages))
    assert any(schedule.index(schedule.ticks - 1, s)[2] for s in range(stages))


def test_schedule_numbers():
    assert (Schedule(4, 4).ticks, Schedule(4, 4).bubble_fraction) == (7, pytest.approx(3 / 7))
    assert Schedule(1, 5, 3).bubble_fraction == 0
    assert (Schedule(4, 2, 8).period, Schedule(4, 2, 8).ticks) == (4, 33)
    with pytest.raises(ValueError, match=r"Schedule.microbatches: expected an integer >= 1, got 0"):
        Schedule(2, 0)


@pytest.mark.parametrize(("stages", "microbatches", "steps"), [(4, 2, 3), (2, 3, 2), (1, 1, 1)])
def test_schedule_traced_equals_python(stages, microbatches, steps):
    schedule = Schedule(stages, microbatches, steps)
    ticks = jnp.arange(schedule.ticks + 2, dtype=jnp.int32)
    for stage in range(stages):
        traced = jax.jit(jax.vmap(lambda tick, stage=stage: schedule.index(tick, jnp.int32(stage))))
        expected = [schedule.index(tick, stage) for tick in range(schedule.ticks + 2)]
        result = traced(ticks)
        assert result[0].dtype == jnp.int32
        np.testing.assert_array_equal(np.stack(result, axis=1), np.array(expected, dtype=int))


@pytest.mark.parametrize(
    ("layers", "source", "target"),
    [
        *itertools.product((5, 7, 30), (1, 2, 3, 4), (1, 2, 3, 4)),
        (61, 8, 2),
        (61, 4, 8),
        (32, 4, 8),
    ],
)
def test_cuts_cover_every_layer_once_on_both_sides(layers, source, target):
    check_cuts(spread_layers(layers, source), spread_layers(layers, target))


def check_cuts(*sides):
    """Every layer is in one piece, whose cuts hold the same layers on both sides."""
    cuts, pieces = align_cuts(*sides)
    for side, stage_column, cut_column in ((0, 1, 0), (1, 3, 2)):
        assert cuts[side][0][0] == 0
        assert cuts[side][-1][1] == len(sides[side][0])
        assert all(a[1] == b[0] for a, b in itertools.pairwise(cuts[side]))
        # Exactly the intervals that a stage fills; no stage fills a part of one.
        filled = []
        for stage, layers in enumerate(sides[side]):
            for cut, ends in enumerate(cuts[side]):
                there = {layer is not None for layer in layers[slice(*ends)]}
                assert len(there) == 1
                if there == {True}:
                    filled.append((stage, cut))
        assert sorted((p[stage_column], p[cut_column]) for p in pieces) == filled
    for source_cut, source_stage, target_cut, target_stage in pieces:
        source_layers = sides[0][source_stage][slice(*cuts[0][source_cut])]
        assert source_layers == sides[1][target_stage][slice(*cuts[1][target_cut])]


def test_cuts_are_no_finer_than_needed():
    even = align_cuts(spread_layers(8, 2), spread_layers(8, 4))[0]
    assert even == (((0, 2), (2, 4)), ((0, 2),))
    alike = align_cuts(spread_layers(30, 4), spread_layers(30, 4))[0]
    assert alike == (((0, 7), (7, 8)),) * 2
    assert align_cuts(spread_layers(7, 1), spread_layers(7, 1))[0] == (((0, 7),),) * 2


def random_side(rng, layers, stages):
    """Layers in order over stages, with empty slots anywhere."""
    counts = [0] * stages
    for _ in layers:
        counts[rng.randrange(stages)] += 1
    slots = max(counts) + rng.randrange(3)
    left, side = iter(layers), []
    for count in counts:
        at = set(rng.sample(range(slots), count))
        side.append(tuple(next(left) if slot in at else None for slot in range(slots)))
    return tuple(side)


def test_cuts_between_sides_with_empty_slots():
    rng = random.Random(0)
    for _ in range(300):
        layers = sorted(rng.sample(range(30), rng.randrange(1, 12)))
        check_cuts(*(random_side(rng, layers, rng.randrange(1, 5)) for _ in range(2)))


def test_cuts_around_an_empty_slot():
    side = ((0, 1, 2), (3, None, 4))
    assert align_cuts(side, side)[0] == (((0, 1), (1, 2), (2, 3)),) * 2
    cuts, pieces = align_cuts(((0, 1, 2, 3, 4),), side)
    assert cuts == (((0, 1), (1, 2), (2, 3), (3, 4), (4, 5)), ((0, 1), (1, 2), (2, 3)))
    assert pieces == ((0, 0, 0, 0), (1, 0, 1, 0), (2, 0, 2, 0), (3, 0, 0, 1), (4, 0, 2, 1))


def test_cuts_refuse_sides_of_other_layers():
    for other in (((0, 1),), ((0, 1, 2, 3),), ((0, 1, 1),)):
        with pytest.raises(ValueError, match="each layer once on both sides"):
            align_cuts(((0, 1, 2),), other)
    with pytest.raises(ValueError, match="each layer once on both sides"):
        align_cuts(((0, 1, 1),), ((0, 1, 1),))
