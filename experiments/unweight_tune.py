"""The variant of every projection and row bucket, by coordinate descent on measured throughput.

    python -m experiments.unweight_tune --out policy.json --seconds 600
    jinfire inspect --unweight policy.json

A trial is an engine with one policy that runs one seeded workload: tokens of prompts and answers
per second, the median of a few repetitions after one that compiles. Coordinates come in a seeded
order; a move stays when it beats the policy that it started from, measured once more beside it.
"""

import argparse
import dataclasses
import itertools
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from tqdm import tqdm

import jinfire as jf

GAIN = 1.01  # what a move must bring: less is noise
# How a form reads its weights where another bucket has moved to it.
RECONSTRUCTED = {"huffman": "transcode", "palette": "direct", "compact": "compact"}
DECOMPRESSED = {"huffman": "full", "palette": "full_palette", "compact": "full_compact"}


@dataclasses.dataclass(frozen=True)
class Workload:
    """Requests of one length, all at once."""

    requests: int = 4
    prompt_tokens: int = 64
    new_tokens: int = 32
    repetitions: int = 3
    seed: int = 0

    def prompts(self, vocabulary: int) -> list[list[int]]:
        rng = np.random.default_rng(self.seed)
        return rng.integers(0, vocabulary, (self.requests, self.prompt_tokens)).tolist()

    @property
    def tokens(self) -> int:
        return self.requests * (self.prompt_tokens + self.new_tokens)

    @property
    def engine(self) -> jf.EngineConfig:
        """An engine with one program for each phase."""
        return jf.EngineConfig(
            max_rows=self.requests,
            max_context=self.prompt_tokens + self.new_tokens,
            row_buckets=(),
            context_buckets=(),
            prefill_shapes=((1, self.prompt_tokens),),
            decode_steps=8,
            prefix_caching=False,
        )


def make_engine(path: pathlib.Path, load: Workload, unweight: str | jf.UnweightPolicy) -> jf.Engine:
    return jf.Engine.from_pretrained(path, dtype="bfloat16", config=load.engine, unweight=unweight)


def throughput(engine: jf.Engine, load: Workload) -> float:
    """Tokens per second of an engine, compiled and warm."""
    prompts = load.prompts(engine.model_config.vocab_size)
    params = jf.SamplingParams(max_tokens=load.new_tokens, temperature=0, ignore_eos=True)
    engine.generate(prompts, params)
    times = []
    for _ in range(load.repetitions):
        start = time.perf_counter()
        engine.generate(prompts, params)
        times.append(time.perf_counter() - start)
    return load.tokens / statistics.median(times)


@dataclasses.dataclass(frozen=True)
class Trial:
    """One measured policy, and which coordinate it moved."""

    move: str
    tokens_per_s: float
    kept: bool


def tune(
    measure: Callable[[jf.UnweightPolicy], float],
    projections: Sequence[str],
    limits: Sequence[int | None],
    start: str,
    seconds: float,
    seed: int = 0,
) -> tuple[jf.UnweightPolicy, list[Trial]]:
    """The best policy found in about so many seconds, and all trials.

    `limits` are the row buckets' most rows, None last. The descent ends when a round over all
    coordinates keeps no move, or with the time; a trial that runs is finished.
    """
    deadline = time.perf_counter() + seconds
    choices = dict.fromkeys(projections, jf.Choice(tuple((limit, start) for limit in limits)))
    trials: list[Trial] = []
    coordinates = list(itertools.product(projections, range(len(limits))))
    rng = np.random.default_rng(seed)
    best = measure(policy_of(choices))
    trials.append(Trial(f"all {start}", best, True))
    moved = True
    with tqdm(desc="tune", unit="trial", disable=None) as bar:
        while moved:
            moved = False
            for index in rng.permutation(len(coordinates)):
                projection, bucket = coordinates[index]
                for choice in moves(choices[projection], bucket):
                    if time.perf_counter() > deadline:
                        return policy_of(choices), trials
                    candidate = {**choices, projection: choice}
                    found = measure(policy_of(candidate))
                    # The machine may have become faster or slower since the best was measured.
                    kept = found > best * GAIN and found > measure(policy_of(choices)) * GAIN
                    trials.append(Trial(f"{projection}: {choice}", found, kept))
                    bar.update()
                    if kept:
                        choices, best, moved = candidate, found, True
    return policy_of(choices), trials


def moves(choice: jf.Choice, bucket: int) -> Iterator[jf.Choice]:
    """Every other variant in one bucket; others follow into its form, in their own way."""
    for variant, kind in jf.VARIANTS.items():
        if variant == choice.buckets[bucket][1]:
            continue
        buckets = [
            (limit, variant if place == bucket else _in_form(other, kind.form))
            for place, (limit, other) in enumerate(choice.buckets)
        ]
        yield jf.Choice(tuple(buckets))


def _in_form(variant: str, form: str) -> str:
    kind = jf.VARIANTS[variant]
    if kind.form == form:
        return variant
    return (DECOMPRESSED if kind.decompressed else RECONSTRUCTED)[form]


def policy_of(choices: dict[str, jf.Choice]) -> jf.UnweightPolicy:
    return jf.UnweightPolicy(jf.Choice.always("dense"), tuple(choices.items()))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    load = Workload()
    parser.add_argument("--model", type=pathlib.Path, help="checkpoint (default: SmolLM2)")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="policy file to write")
    parser.add_argument("--seconds", type=float, default=600, help="about how long to search")
    parser.add_argument("--start", choices=jf.VARIANTS, default="compact")
    parser.add_argument("--bucket", type=int, default=32, help="most rows of the first row bucket")
    for field in dataclasses.fields(load):
        name = f"--{field.name.replace('_', '-')}"
        parser.add_argument(name, type=int, default=getattr(load, field.name))
    args = parser.parse_args(argv)
    load = Workload(**{f.name: getattr(args, f.name) for f in dataclasses.fields(load)})
    path = args.model or jf.fetch("smollm2")
    (coded,) = make_engine(path, load, args.start).stats()["unweight"]
    policy, trials = tune(
        lambda policy: throughput(make_engine(path, load, policy), load),
        list(coded),
        (args.bucket, None),
        args.start,
        args.seconds,
        load.seed,
    )
    jf.write_policies(args.out, jf.PhasePolicies(policy, policy))
    for trial in trials:
        print(json.dumps(dataclasses.asdict(trial)))
    print(f"{len(trials)} trials; policy in {args.out}", file=sys.stderr)


if __name__ == "__main__":
    main()
