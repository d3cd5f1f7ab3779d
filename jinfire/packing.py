"""How prompts are cut into the fixed shapes of the prefill program."""

from collections.abc import Iterable

# A prefill program reads all weights once per microbatch, which costs about as much time as the
# arithmetic of this many tokens. Less (about 20) on a CPU, more (about 300) on a GPU in bf16: it
# only weighs a few padded tokens against another pass.
WEIGHT_PASS_TOKENS = 64

Packing = list[list[tuple[int, int]]]


def choose_prefill_shape(
    remaining: list[int], microbatches: int, shapes: Iterable[tuple[int, int]]
) -> tuple[tuple[int, int], Packing]:
    """The (rows, chunk) of the next prefill program, and what goes into it.

    The rule: least computed tokens, padding and one weight pass per microbatch included, for this
    program and for a rough plan of what it leaves over; of equals, the one that leaves less over.
    """
    shapes = tuple(shapes)
    best = None
    for rows, chunk in shapes:
        packing = pack_chunks(remaining, microbatches, rows, chunk)
        left = list(remaining)
        for microbatch in packing:
            for index, length in microbatch:
                left[index] -= length
        left = [tokens for tokens in left if tokens]
        cost = microbatches * (rows * chunk + WEIGHT_PASS_TOKENS)
        cost += min(_cost_to_finish(left, microbatches, r, c) for r, c in shapes)
        if best is None or (cost, sum(left)) < best[0]:
            best = (cost, sum(left)), (rows, chunk), packing
    assert best is not None
    return best[1], best[2]


def pack_chunks(remaining: list[int], microbatches: int, rows: int, chunk: int) -> Packing:
    """First come, first served filling of M x R slots: [M][<= R] of (index, length).

    A sequence has at most one chunk in a microbatch, because a chunk reads the keys and values
    that the chunk before it wrote.
    """
    left = list(remaining)
    first = 0  # everything before it is used up
    packing = []
    for _ in range(microbatches):
        while first < len(left) and left[first] == 0:
            first += 1
        slots = []
        for index in range(first, len(left)):
            if len(slots) == rows:
                break
            if left[index]:
                slots.append((index, min(chunk, left[index])))
        for index, length in slots:
            left[index] -= length
        packing.append(slots)
    return packing


def _cost_to_finish(remaining: list[int], microbatches: int, rows: int, chunk: int) -> int:
    if not remaining:
        return 0
    chunks = [-(-tokens // chunk) for tokens in remaining]
    needed = max(*chunks, -(-sum(chunks) // rows))
    programs = -(-needed // microbatches)
    return programs * microbatches * (rows * chunk + WEIGHT_PASS_TOKENS)
