"""Layers over pipeline stages, and microbatches over ticks."""

import bisect
import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp

# Intervals (start, stop) of the layers of a stage, counted from its first layer.
Cuts = tuple[tuple[int, int], ...]


def stage_counts(num_layers: int, stages: int) -> tuple[int, ...]:
    """Number of consecutive layers on each stage, the remainder on the first stages.

    Raises: ValueError when a stage would be left without a layer.
    """
    if not 1 <= stages <= num_layers:
        raise ValueError(
            f"{num_layers} layers cannot be split over pipeline={stages}; "
            f"valid sizes: 1 to {num_layers}"
        )
    each, extra = divmod(num_layers, stages)
    return tuple(each + (stage < extra) for stage in range(stages))


def align_cuts(
    source_counts: tuple[int, ...], target_counts: tuple[int, ...]
) -> tuple[tuple[Cuts, Cuts], tuple[tuple[int, int, int, int], ...]]:
    """Fewest cuts that fall alike on every stage of each side, and the pieces between them.

    A program sees one shape on all stages, so a cut on one stage is a cut on all of that side,
    which in turn cuts the other side: repeated until nothing changes. A piece is (source cut,
    source stage, target cut, target stage), the same layers on both sides.
    """
    sides = (source_counts, target_counts)
    starts = [list(itertools.accumulate(counts, initial=0)) for counts in sides]
    cuts = {0}
    offsets: list[set[int]] = [{0, *counts} for counts in sides]
    while True:
        before = len(cuts)
        for side, counts in enumerate(sides):
            for start, count in zip(starts[side], counts, strict=False):
                offsets[side] |= {cut - start for cut in cuts if start <= cut <= start + count}
            for start, count in zip(starts[side], counts, strict=False):
                cuts |= {start + offset for offset in offsets[side] if offset <= count}
        if len(cuts) == before:
            break

    source_cuts, target_cuts = (tuple(itertools.pairwise(sorted(each))) for each in offsets)
    target_index = {start: index for index, (start, _) in enumerate(target_cuts)}
    pieces = []
    for stage, count in enumerate(source_counts):
        for index, (start, stop) in enumerate(source_cuts):
            if stop <= count:
                layer = starts[0][stage] + start
                target_stage = bisect.bisect_right(starts[1], layer) - 1
                target_cut = target_index[layer - starts[1][target_stage]]
                pieces.append((index, stage, target_cut, target_stage))
    return (source_cuts, target_cuts), tuple(pieces)


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Which microbatch and step each stage works on at each tick.

    Stage s works at tick t on what entered stage 0 at tick t - s. Microbatches enter round robin,
    one per tick; `steps` is the number of rounds, where each round of a microbatch needs the
    result of the one before (decode). A round takes `period` ticks: with fewer microbatches than
    stages, stage 0 waits until the last stage has handed the first microbatch back.
    Units: ticks, one stage's work on one microbatch.
    Raises: ValueError for a size below 1.
    """

    stages: int
    microbatches: int
    steps: int = 1

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value < 1:
                raise ValueError(f"Schedule.{field.name}: expected an integer >= 1, got {value!r}")

    @property
    def period(self) -> int:
        """Ticks from one step of a microbatch to its next."""
        return max(self.stages, self.microbatches)

    @property
    def ticks(self) -> int:
        """Ticks until the last stage is done with the last microbatch of the last step."""
        return (self.steps - 1) * self.period + self.microbatches + self.stages - 1

    @property
    def bubble_fraction(self) -> float:
        """Share of a stage's ticks without work."""
        return 1 - self.microbatches * self.steps / self.ticks

    def index(self, tick: Any, stage: Any) -> tuple[Any, Any, Any]:
        """(microbatch, step, valid) of a stage at a tick; Python integers or traced int32.

        Where `valid` is false the stage idles, and microbatch and step are clipped into range so
        that they can index arrays.
        """
        entered = tick - stage
        step = entered // self.period
        microbatch = entered % self.period
        valid = (entered >= 0) & (step < self.steps) & (microbatch < self.microbatches)
        return (
            _clip(microbatch, self.microbatches - 1),
            _clip(step, self.steps - 1),
            valid,
        )


def _clip(value: Any, highest: int) -> Any:
    if isinstance(value, jax.Array):
        return jnp.clip(value, 0, highest)
    return min(max(value, 0), highest)
