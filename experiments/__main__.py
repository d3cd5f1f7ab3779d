"""`python -m experiments list | run NAME | tables`: the command line of the experiments.

`python -m experiments NAME` is `run NAME`.
"""

import argparse
import json
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax

import jinfire as jf
from experiments import tables
from experiments.disaggregation import DISAGGREGATION
from experiments.engine_speed import ENGINE_SPEED
from experiments.harness import (
    RESULTS,
    SMOKE_RESULTS,
    SMOKE_TABLES,
    Experiment,
    Options,
    make_row,
    read_rows,
    results_path,
    select,
    unfinished,
    write_row,
)
from experiments.kv_capacity import KV_CAPACITY
from experiments.kv_codec import KV_CODEC
from experiments.parallelism import PARALLELISM
from experiments.train_tiny import TRAIN_TINY
from experiments.unweight_ablation import UNWEIGHT_ABLATION
from experiments.unweight_exactness import UNWEIGHT_EXACTNESS
from experiments.unweight_ratio import UNWEIGHT_RATIO
from experiments.unweight_speed import UNWEIGHT_SPEED

EXPERIMENTS: dict[str, Experiment] = {
    e.name: e
    for e in (
        *(DISAGGREGATION, ENGINE_SPEED, KV_CAPACITY, KV_CODEC, PARALLELISM, TRAIN_TINY),
        *(UNWEIGHT_ABLATION, UNWEIGHT_EXACTNESS, UNWEIGHT_RATIO, UNWEIGHT_SPEED),
    )
}

EXIT_OK, EXIT_FAILED, EXIT_USAGE = 0, 1, 2


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="python -m experiments",
        description="Runs named experiments, keeps their rows, makes the paper's tables from them. "
        "The last line of stdout is one JSON document.",
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("list", help="the experiments, their configs and how many rows stand")

    run = commands.add_parser("run", help="measure what has no row yet")
    run.add_argument("name", choices=sorted(EXPERIMENTS), metavar="NAME", help="see `list`")
    run.add_argument("--smoke", action="store_true", help="toy size, rows kept apart")
    run.add_argument(
        "--only",
        nargs="+",
        action="extend",
        default=[],
        metavar="FIELD=VALUE",
        help="configs with these values; one field several times gives alternatives",
    )
    run.add_argument("--force", action="store_true", help="measure again what has a row")
    run.add_argument("--results", type=pathlib.Path, help="folder of the rows")
    run.add_argument("--devices", type=int, metavar="N", help="virtual CPU devices (default: need)")
    defaults = Options()
    run.add_argument("--model", type=pathlib.Path, help="SmolLM2's GGUF, else it is fetched")
    run.add_argument("--trace", type=pathlib.Path, help="a Mooncake trace for the request lengths")
    run.add_argument("--hf-python", type=pathlib.Path, default=defaults.hf_python)
    run.add_argument("--llama-python", type=pathlib.Path, default=defaults.llama_python)
    run.add_argument("--zipnn-python", type=pathlib.Path, default=defaults.zipnn_python)

    paper = commands.add_parser("tables", help="write paper/tables from the rows")
    paper.add_argument(
        "--check",
        action="store_true",
        help="write nothing; fail on a missing, stale or dirty row or an outdated table",
    )
    paper.add_argument("--smoke", action="store_true", help="from the rows of smoke runs")
    paper.add_argument("--results", type=pathlib.Path, help="folder of the rows")
    paper.add_argument("--out", type=pathlib.Path, help="folder of the tables")
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0, 1 when a check or a run failed, 2 for a wrong command or what it lacks."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if arguments and arguments[0] in EXPERIMENTS:
        arguments = ["run", *arguments]
    args = parser().parse_args(arguments)
    try:
        code, document = COMMANDS[args.command](args)
    except (ValueError, FileNotFoundError, jf.ToolchainMissing) as error:
        print(f"experiments: {error}", file=sys.stderr)
        code, document = EXIT_USAGE, {"error": str(error)}
    print(json.dumps(document))
    return code


def _list(args: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    document = {}
    for experiment in EXPERIMENTS.values():
        configs = experiment.configs(False)
        rows = read_rows(results_path(RESULTS, experiment.name))
        standing = len(configs) - len(unfinished(experiment, configs, rows))
        print(f"{experiment.name:16} {standing}/{len(configs)} rows  {experiment.summary}")
        document[experiment.name] = {
            "summary": experiment.summary,
            "configs": len(configs),
            "smoke_configs": len(experiment.configs(True)),
            "standing_rows": standing,
            "tables": sorted(experiment.tables),
        }
    return EXIT_OK, {"experiments": document}


def _run(args: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    experiment = EXPERIMENTS[args.name]
    options = Options(
        model=args.model,
        trace=args.trace,
        hf_python=args.hf_python,
        llama_python=args.llama_python,
        zipnn_python=args.zipnn_python,
    )
    if args.trace and not args.results:
        raise ValueError("--trace: expected --results too; rows of your own trace are kept apart")
    configs = select(experiment.configs(args.smoke), args.only)
    configs = [experiment.adapt(config, options) for config in configs]
    path = results_path(args.results or _results(args.smoke), experiment.name)
    outputs = [experiment.output(config, options) for config in configs]
    todo = configs if args.force else unfinished(experiment, configs, read_rows(path))
    todo = [
        config
        for config, output in zip(configs, outputs, strict=True)
        if config in todo or (output is not None and not output.exists())
    ]
    need = max((experiment.devices(config) for config in todo), default=1)
    if todo:
        _provide_devices(args.devices or need)
    rows = []
    if todo:
        started = time.perf_counter()
        for measured in experiment.run(todo, options):
            now = time.perf_counter()
            row = make_row(experiment, measured, now - started, args.smoke)
            started = now
            write_row(path, row)
            rows.append({k: row[k] for k in ("config", "config_hash", "values", "dirty")})
    document = {
        "experiment": experiment.name,
        "smoke": args.smoke,
        "results": str(path),
        "written": len(rows),
        "skipped": len(configs) - len(todo),
        "rows": rows,
    }
    if any(outputs):
        document["outputs"] = [str(output) for output in outputs]
    return EXIT_OK, document


def _provide_devices(count: int) -> None:
    """Virtual CPU devices, where the process has not started its devices yet."""
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        # Too late to choose; what is there may be enough.
        if len(jax.devices()) < count:
            raise ValueError(
                f"devices: expected {count}, this process has {len(jax.devices())}"
            ) from None


def _tables(args: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    results = args.results or _results(args.smoke)
    out = args.out or (SMOKE_TABLES if args.smoke else tables.TABLES)
    if args.check:
        found = tables.check(EXPERIMENTS, results, out, args.smoke)
        for problem in found:
            print(problem, file=sys.stderr)
        return (EXIT_FAILED if found else EXIT_OK), {"check": not found, "problems": found}
    written = tables.write(EXPERIMENTS, results, out, args.smoke)
    return EXIT_OK, {"tables": [str(path) for path in written]}


def _results(smoke: bool) -> pathlib.Path:
    return SMOKE_RESULTS if smoke else RESULTS


COMMANDS = {"list": _list, "run": _run, "tables": _tables}

if __name__ == "__main__":
    sys.exit(main())
