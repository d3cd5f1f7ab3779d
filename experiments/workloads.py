"""Workloads: request lengths and prompts, deterministic by seed.

*Units*: every length is in tokens.
"""

import dataclasses
import gzip
import json
import pathlib
from collections.abc import Sequence

import numpy as np

Lengths = list[tuple[int, int]]


@dataclasses.dataclass(frozen=True)
class LengthMix:
    """Input and output lengths of a trace as quantiles of the two marginals.

    A request is drawn by interpolating the logarithms between the quantiles, the two lengths
    independently (their logarithms correlate by 0.05 in the conversation trace).
    """

    name: str
    percentiles: tuple[float, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    def draw(self, count: int, seed: int) -> Lengths:
        """`count` requests whose lengths sit at evenly spaced quantiles, paired at random.

        Stratified, so that 64 requests already have the mix's mean and tail; the seed decides who
        is paired with whom and in which order they come.
        """
        rng = np.random.default_rng(seed)
        levels = (np.arange(count) + 0.5) / count * 100

        def column(values: tuple[int, ...]) -> np.ndarray:
            lengths = np.exp(np.interp(levels, self.percentiles, np.log(values)))
            return rng.permutation(np.rint(lengths).astype(int))

        return list(zip(column(self.inputs).tolist(), column(self.outputs).tolist(), strict=True))

    def top(self, which: str, percentile: float) -> int:
        """One of the stated quantiles of "inputs" or "outputs"."""
        return getattr(self, which)[self.percentiles.index(percentile)]


# Quantiles of the 12,031 requests of the Mooncake conversation trace (FAST'25, Apache-2.0).
MOONCAKE_CONVERSATION = LengthMix(
    name="mooncake_conversation",
    percentiles=(0, 1, 5, 10, 20, 30, 40, 50, 60, 70, 80, 90, 95, 99, 100),
    inputs=(
        *(891, 894, 901, 964, 1662, 3263, 4993, 6909, 9570),
        *(13196, 17869, 27367, 39550, 85400, 126195),
    ),
    outputs=(1, 3, 10, 24, 100, 213, 291, 350, 399, 447, 504, 597, 698, 1119, 2000),
)


def read_mooncake(path: str | pathlib.Path) -> Lengths:
    """(input_length, output_length) of every request of a Mooncake trace (.jsonl or .jsonl.gz)."""
    path = pathlib.Path(path)
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt") as lines:
        rows = [json.loads(line) for line in lines if line.strip()]
    return [(int(row["input_length"]), int(row["output_length"])) for row in rows]


def scale_lengths(
    lengths: Sequence[tuple[int, int]],
    context: int,
    input_top: int,
    output_top: int,
    input_share: float = 0.75,
) -> Lengths:
    """Lengths scaled so that each request fits `context`.

    `input_top` tokens of input become `input_share` of the context and `output_top` tokens of
    output the rest; what lies above is cut there. The two marginals keep their shape, their ratio
    does not: under one common factor the conversation trace (35 input tokens to one of output)
    would leave 3 output tokens a request and measure nothing but prefill.
    """
    most_in = int(context * input_share)
    most_out = context - most_in
    return [
        (
            min(max(round(i * most_in / input_top), 1), most_in),
            min(max(round(o * most_out / output_top), 1), most_out),
        )
        for i, o in lengths
    ]


def mooncake_mix(
    count: int, context: int, seed: int, trace: str | pathlib.Path | None = None
) -> Lengths:
    """`count` conversation requests scaled to `context` (99th percentiles at 3/4 and 1/4 of it).

    From the quantile table that ships with the project, or from a downloaded `trace`: then
    `count` of its requests, drawn without replacement by the seed, in trace order.
    """
    if trace is None:
        mix = MOONCAKE_CONVERSATION
        pairs = mix.draw(count, seed)
        tops = mix.top("inputs", 99), mix.top("outputs", 99)
    else:
        rows = read_mooncake(trace)
        if len(rows) < count:
            raise ValueError(f"{trace}: expected at least {count} requests, got {len(rows)}")
        chosen = np.random.default_rng(seed).choice(len(rows), size=count, replace=False)
        pairs = [rows[i] for i in sorted(chosen)]
        tops = tuple(int(np.percentile(column, 99)) for column in zip(*rows, strict=True))
    return scale_lengths(pairs, context, *tops)


def random_prompts(
    lengths: Sequence[int], seed: int, vocab_size: int, low: int = 100
) -> list[list[int]]:
    """Prompts of random ids in [low, vocab_size): no two share a page, so no prefix cache hits."""
    if vocab_size <= low:
        raise ValueError(f"vocab_size: expected more than low={low}, got {vocab_size}")
    rng = np.random.default_rng(seed)
    return [rng.integers(low, vocab_size, size=n).tolist() for n in lengths]
