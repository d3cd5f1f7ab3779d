"""The shortest sequence that holds several sequences, each in its own order."""

from collections.abc import Sequence

# Positions that the search may look at: models have few kinds of layers in a repeating order, so
# that stages are nearly alike; what goes beyond gets a sequence that may not be the shortest.
MAX_STATES = 200_000


def common_supersequence[T](sequences: Sequence[tuple[T, ...]]) -> tuple[T, ...]:
    """A sequence of which every given one is a part, in order; the shortest where that is found.

    A breadth-first search over how far each sequence has come. Sequences that are a part of
    another one cost nothing: whatever holds that one holds them.
    """
    distinct = list(dict.fromkeys(sequences))
    needed = [
        one
        for one in distinct
        if not any(one is not other and _is_part(one, other) for other in distinct)
    ]
    return _shortest(needed) or _greedy(needed)


def _is_part[T](one: tuple[T, ...], other: tuple[T, ...]) -> bool:
    rest = iter(other)
    return all(item in rest for item in one)


def _shortest[T](sequences: Sequence[tuple[T, ...]]) -> tuple[T, ...] | None:
    """None where the search would look at more than `MAX_STATES` positions."""
    start = (0,) * len(sequences)
    end = tuple(map(len, sequences))
    # The state before each, and the item between them.
    before: dict[tuple[int, ...], tuple[tuple[int, ...], T] | None] = {start: None}
    level = [start]
    while end not in before:
        reached = []
        for state in level:
            # The sequence that has most left comes first: of equal answers, the greedy one.
            order = sorted(range(len(state)), key=lambda i: state[i] - end[i])
            nexts = dict.fromkeys(sequences[i][state[i]] for i in order if state[i] < end[i])
            for item in nexts:
                step = _advanced(sequences, state, item)
                if step not in before:
                    before[step] = (state, item)
                    reached.append(step)
        if len(before) > MAX_STATES:
            return None
        level = reached
    items: list[T] = []
    state = end
    while (link := before[state]) is not None:
        state, item = link
        items.append(item)
    return tuple(reversed(items))


def _greedy[T](sequences: Sequence[tuple[T, ...]]) -> tuple[T, ...]:
    """Always what the sequence with most left needs next."""
    state, items = (0,) * len(sequences), []
    while any(position < len(own) for position, own in zip(state, sequences, strict=True)):
        most = max(range(len(state)), key=lambda i: len(sequences[i]) - state[i])
        items.append(sequences[most][state[most]])
        state = _advanced(sequences, state, items[-1])
    return tuple(items)


def _advanced[T](
    sequences: Sequence[tuple[T, ...]], state: tuple[int, ...], item: T
) -> tuple[int, ...]:
    """The positions behind `item`, in every sequence that needs it next."""
    return tuple(
        position + (position < len(own) and own[position] == item)
        for position, own in zip(state, sequences, strict=True)
    )
