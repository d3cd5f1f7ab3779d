"""Search for block sizes: what does not fit is refused when compiled, the rest is timed.

    python -m pallas_kernels.tuning                     # on a GPU: writes tuned/<device>.json
    python -m pallas_kernels.tuning --out DIR           # the same, written elsewhere
    python -m pallas_kernels.tuning --target h200       # without one: says what fits

Block sizes are searched one field at a time from the defaults, over the `WORKLOADS` of a kernel.
"""

import argparse
import dataclasses
import datetime as dt
import json
import math
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pallas_kernels import KERNELS, WORKLOADS, Kernel, Workload, seconds_per_call
from pallas_kernels.bench import Timing
from pallas_kernels.compiler import (
    COMPILE_ERRORS,
    SHARED_BYTES_PER_BLOCK,
    TARGET_NAMES,
    Compiler,
    Resources,
    Target,
    _captured_output,
    lower_for,
)
from pallas_kernels.kernel import TUNED, device_slug, is_hopper
from pallas_kernels.toolchain import run_python

# Better by less than this is noise, and the block sizes stay.
WORTH = 0.02
PASSES = 2

# What the assembler says of products that it makes wait for each other.
SERIALISED = "C7511"


@dataclasses.dataclass(frozen=True)
class Trial:
    """One candidate: why it was refused, or its seconds (NaN where nothing could be timed)."""

    blocks: Any
    refused: str | None
    seconds: float = math.nan


class Heard:
    """A lowered program that keeps what the assembler says of it, and lets it be heard."""

    def __init__(self, lowered: jax.stages.Lowered) -> None:
        self._lowered = lowered
        self.compiler_ir = lowered.compiler_ir
        self.said = ""

    def compile(self) -> jax.stages.Compiled:
        with _captured_output() as output:
            compiled = self._lowered.compile()
        self.said = output[0]
        os.write(1, self.said.encode())
        return compiled


def refusal(candidate: str, compile_it: Callable[[], tuple[Resources, str]]) -> str | None:
    """Why a candidate may not run: it does not compile, takes too much, spills or serialises.

    `compile_it` returns what the candidate takes and what the assembler said.

    Raises: RuntimeError where the assembler said nothing: then nobody knows.
    """
    try:
        found, said = compile_it()
    except COMPILE_ERRORS as error:
        return _brief(error)
    except KeyError as error:
        raise RuntimeError(f"{candidate}: no report of the assembler (ptxas)") from error
    for launch in found.launches:
        if launch.spill_bytes:
            return f"{launch.name} spills {launch.spill_bytes} bytes"
        if launch.shared_bytes > SHARED_BYTES_PER_BLOCK:
            return f"{launch.name} takes {launch.shared_bytes} bytes of shared memory"
    if SERIALISED in said:
        return f"the assembler serialises products ({SERIALISED})"
    return None


def _brief(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


def assembled(compiler: Compiler, lowered: jax.stages.Lowered) -> tuple[Resources, str]:
    """What a program takes, and what the assembler said of it."""
    heard = Heard(lowered)
    found = compiler.compile(heard)  # type: ignore[arg-type] - all of it that is needed
    return found, heard.said


def neighbours(blocks: Any, space: dict[str, Sequence[Any]]) -> Iterator[Any]:
    """Candidates that differ in one field. Fields that exclude each other make none."""
    for name, values in space.items():
        for value in values:
            if value != getattr(blocks, name):
                try:
                    yield dataclasses.replace(blocks, **{name: value})
                except ValueError:
                    continue


def search(
    start: Any, space: dict[str, Sequence[Any]], trial: Callable[[Any], Trial]
) -> list[Trial]:
    """Trials from the defaults on, one field at a time; the best one that was not refused is last.

    Where the defaults are refused, the first candidate that is not takes their place.
    """
    trials = {start: trial(start)}
    best = start
    for _ in range(PASSES):
        before = best
        for name in space:
            for candidate in neighbours(best, {name: space[name]}):
                if candidate not in trials:
                    trials[candidate] = trial(candidate)
            fields = [t for t in trials.values() if t.refused is None]
            if fields:
                fastest = min(fields, key=lambda t: t.seconds)
                now = trials[best]
                if now.refused or fastest.seconds < (1 - WORTH) * now.seconds:
                    best = fastest.blocks
        if best == before:
            break
    return [*(t for b, t in trials.items() if b != best), trials[best]]


# -- without a GPU


def survey(kernel: Kernel, workload: Workload, target: Target, compiler: Compiler) -> list[Trial]:
    """The defaults and their neighbours, compiled for a target."""
    shapes = workload.shapes()

    def trial(blocks: Any) -> Trial:
        return Trial(
            blocks,
            refusal(
                _named(workload, blocks),
                lambda: assembled(
                    compiler,
                    lower_for(_call(kernel, workload, blocks), list(shapes.values()), target),
                ),
            ),
        )

    start = kernel.blocks()  # type: ignore[misc] - only kernels with blocks come here
    return [trial(blocks) for blocks in (start, *neighbours(start, dict(kernel.space)))]


def _call(kernel: Kernel, workload: Workload, blocks: Any) -> Callable[..., jax.Array]:
    return lambda *arguments: kernel(
        *arguments, implementation="mosaic", blocks=blocks, **workload.static
    )


def _named(workload: Workload, blocks: Any) -> str:
    return f"{workload.kernel}, {workload.name}, {blocks}"


# -- on a GPU


def tune(kernel: Kernel, workload: Workload, compiler: Compiler) -> dict[str, Any]:
    """The entry of one workload: the fastest block sizes, and how they were found.

    A candidate that fails or gives another answer than the defaults is refused.

    Raises: ValueError where every candidate was refused.
    """
    buffers = [tuple(arrays.values()) for arrays in workload.buffers()]
    start = kernel.blocks()  # type: ignore[misc] - only kernels with blocks come here
    expected: list[np.ndarray] = []

    def trial(blocks: Any) -> Trial:
        function = jax.jit(_call(kernel, workload, blocks))
        refused = refusal(
            _named(workload, blocks), lambda: assembled(compiler, function.lower(*buffers[0]))
        )
        if refused:
            return Trial(blocks, refused)
        try:
            timing = seconds_per_call(function, buffers)
            if not expected:
                expected.append(_expected(kernel, workload, buffers[0], blocks == start, timing))
        except COMPILE_ERRORS as error:
            return Trial(blocks, _brief(error))
        if refused := disagreement(timing.result, expected[0], kernel.tolerance):
            return Trial(blocks, refused)
        return Trial(blocks, None, statistics.median(timing.seconds))

    trials = search(start, dict(kernel.space), trial)
    best, default = trials[-1], next(t for t in trials if t.blocks == start)
    refused = [[dataclasses.asdict(t.blocks), t.refused] for t in trials if t.refused]
    if best.refused:
        raise ValueError(
            f"{kernel.name}, {workload.name}: every candidate was refused: {refused[0][1]}"
        )
    return {
        "workload": workload.name,
        "shapes": [[list(x.shape), np.dtype(x.dtype).name] for x in buffers[0]],
        "blocks": dataclasses.asdict(best.blocks),
        "seconds": best.seconds,
        "default_seconds": None if default.refused else default.seconds,
        "tried": len(trials),
        "refused": refused,
    }


def _expected(
    kernel: Kernel, workload: Workload, arguments: tuple, is_default: bool, timing: Timing
) -> np.ndarray:
    """The answer of the defaults; where they do not run, that of the XLA form."""
    if is_default:
        return np.asarray(timing.result)
    return np.asarray(kernel(*arguments, implementation="xla", **workload.static))


def disagreement(
    result: jax.Array, expected: np.ndarray, tolerance: Mapping[str, float]
) -> str | None:
    """How far a result is from another one, where that is more than both may be from the truth."""
    got, want = np.asarray(result).astype(np.float64), expected.astype(np.float64)
    difference = np.abs(got - want).max() / max(np.abs(want).max(), np.finfo(np.float32).tiny)
    allowed = 2 * tolerance[np.dtype(expected.dtype).name]
    return None if difference <= allowed else f"wrong by {difference:.1e} of the largest value"


def write_tuned(kind: str, found: dict[str, list[dict[str, Any]]], folder: Path = TUNED) -> Path:
    """Puts entries into a device's file; those of other kernels stay."""
    path = folder / f"{device_slug(kind)}.json"
    old = json.loads(path.read_text(encoding="utf-8"))["kernels"] if path.exists() else {}
    document = {
        "device": kind,
        "jax": jax.__version__,
        "made": dt.datetime.now(dt.UTC).date().isoformat(),
        "kernels": {**old, **found},
    }
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return path


# -- the command


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.tuning", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--kernel", action="append", choices=sorted(KERNELS))
    parser.add_argument("--target", choices=TARGET_NAMES, help="compile for it, time nothing")
    parser.add_argument("--workloads", type=int, help="at most so many of each kernel")
    parser.add_argument("--out", type=Path, default=TUNED, help="folder of <device>.json")
    parser.add_argument("--in-child", action="store_true", help=argparse.SUPPRESS)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 1 where a workload has no candidate that fits."""
    arguments = sys.argv[1:] if arguments is None else arguments
    args = _parser().parse_args(arguments)
    if not args.in_child:
        child = ("-m", "pallas_kernels.tuning", "--in-child", *arguments)
        print(run_python(*child, device=args.target is None), end="")
        return 0
    todo: dict[str, list[Workload]] = {}
    for workload in WORKLOADS:
        if KERNELS[workload.kernel].blocks and workload.kernel in (args.kernel or KERNELS):
            todo.setdefault(workload.kernel, []).append(workload)
    todo = {name: workloads[: args.workloads] for name, workloads in todo.items()}
    compiler = Compiler()
    if args.target:
        return _survey_all(todo, Target.load(args.target), compiler)
    kind = jax.devices()[0].device_kind
    if not is_hopper(kind):
        raise ValueError(f"device: expected a Hopper GPU, or --target, received {kind}")
    return _tune_all(todo, kind, args.out, compiler)


def _tune_all(todo: dict[str, list[Workload]], kind: str, folder: Path, compiler: Compiler) -> int:
    """What is found is written at once: a workload that cannot be tuned loses no other."""
    stuck = 0
    for name, workloads in todo.items():
        entries: list[dict[str, Any]] = []
        for workload in workloads:
            try:
                entry = tune(KERNELS[name], workload, compiler)
            except (ValueError, RuntimeError) as error:
                print(f"{name}, {workload.name}: {error}", file=sys.stderr, flush=True)
                stuck += 1
                continue
            entries.append(entry)
            print(json.dumps({"kernel": name, **entry}), flush=True)
            write_tuned(kind, {name: entries}, folder)
    return 1 if stuck else 0


def _survey_all(todo: dict[str, list[Workload]], target: Target, compiler: Compiler) -> int:
    stuck = 0
    for name, workloads in todo.items():
        for workload in workloads:
            trials = survey(KERNELS[name], workload, target, compiler)
            stuck += all(trial.refused for trial in trials)
            for trial in trials:
                row = {"kernel": name, "workload": workload.name, "target": target.name}
                row |= {"blocks": dataclasses.asdict(trial.blocks), "refused": trial.refused}
                print(json.dumps(row), flush=True)
    return 1 if stuck else 0


if __name__ == "__main__":
    sys.exit(main())
