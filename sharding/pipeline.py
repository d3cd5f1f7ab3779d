"""Layers over pipeline stages, and microbatches over ticks."""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp

# The layer in every slot of every stage, None where a slot of that stage is empty.
Placed = tuple[tuple[int | None, ...], ...]

# Intervals (start, stop) of the slots of a stage.
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


def spread_layers(num_layers: int, stages: int) -> Placed:
    """The layers of every stage in its first slots, spread by `stage_counts`."""
    counts = stage_counts(num_layers, stages)
    starts = itertools.accumulate(counts, initial=0)
    return tuple(
        tuple(start + slot if slot < count else None for slot in range(max(counts)))
        for start, count in zip(starts, counts, strict=False)
    )


def align_cuts(
    source: Placed, target: Placed
) -> tuple[tuple[Cuts, Cuts], tuple[tuple[int, int, int, int], ...]]:
    """Fewest cuts that fall alike on every stage of each side, and the pieces between them.

    A program sees one shape on all stages, so a cut on one stage is a cut on all of that side.
    There is one wherever a run of layers ends on any stage: at an empty slot, and between two
    layers that the other side does not keep side by side in one piece. That in turn cuts the other
    side: repeated until nothing changes. A piece is (source cut, source stage, target cut, target
    stage), the same layers on both sides.
    Raises: ValueError unless both sides hold the same layers, each once.
    """
    sides = (source, target)
    where = [
        {layer: (s, slot) for s, stage in enumerate(side) for slot, layer in _layers(stage)}
        for side in sides
    ]
    held = [[layer for stage in side for _, layer in _layers(stage)] for side in sides]
    if sorted(held[0]) != sorted(held[1]) or len(where[0]) != len(held[0]):
        raise ValueError(f"expected each layer once on both sides, got {held[0]} and {held[1]}")
    cuts: list[set[int]] = [{0, len(side[0])} for side in sides]
    before = 0
    while before < (before := len(cuts[0]) + len(cuts[1])):
        for side, here, there, place_there in (
            (source, cuts[0], cuts[1], where[1]),
            (target, cuts[1], cuts[0], where[0]),
        ):
            for stage in side:
                for slot, (layer, following) in enumerate(itertools.pairwise(stage), 1):
                    if layer is None and following is None:
                        continue
                    if layer is None or following is None:
                        here.add(slot)
                        continue
                    stage_there, slot_there = place_there[layer]
                    beside = place_there[following] == (stage_there, slot_there + 1)
                    if not beside or slot_there + 1 in there:
                        here.add(slot)

    source_cuts, target_cuts = (tuple(itertools.pairwise(sorted(each))) for each in cuts)
    target_index = {start: index for index, (start, _) in enumerate(target_cuts)}
    pieces = []
    for stage, layers in enumerate(source):
        for index, (start, _) in enumerate(source_cuts):
            first = layers[start]
            if first is not None:
                target_stage, slot = where[1][first]
                pieces.append((index, stage, target_index[slot], target_stage))
    return (source_cuts, target_cuts), tuple(pieces)


def _layers(stage: tuple[int | None, ...]) -> list[tuple[int, int]]:
    """(slot, layer) of the slots that hold one."""
    return [(slot, layer) for slot, layer in enumerate(stage) if layer is not None]


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
