"""Experiment records: frozen configs, rows with full provenance, resumption, intervals.

A row is one JSON line of `experiments/results/<experiment>.jsonl`. It says what ran (the config
and its hash), which code ran it (commit, dirty flag, hash of the sources), on what (versions,
devices, processor, model file) and what came out (values with n and interval, and the definition
of each). A row *stands* while its config is still asked for and its sources are unchanged.
"""

import ast
import dataclasses
import datetime as dt
import fnmatch
import hashlib
import importlib.metadata
import itertools
import json
import math
import os
import pathlib
import platform
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "experiments" / "results"
SMOKE_RESULTS = ROOT / ".cache" / "experiments" / "smoke"
SMOKE_TABLES = ROOT / ".cache" / "experiments" / "smoke-tables"

KINDS = ("measured", "simulated", "analytic", "cited")
CONFIDENCE = 0.95
RESAMPLES = 2000

# No change of these moves a row: the command line, and how a model file comes to this machine.
NOT_SOURCES = ("jinfire/cli", "jinfire/cli.py", "jinfire/__main__.py", "jinfire/fetch.py")

# What only a GPU runs, and what only builds and measures kernels. A row measured on other devices
# stands whatever changes in it.
GPU_SOURCES = (
    "pallas_kernels/*_mosaic.py",
    "pallas_kernels/*_tiles.py",
    "pallas_kernels/*_plan.py",
    *(f"pallas_kernels/{name}.py" for name in ("aot", "bench", "compiler", "toolchain", "tuning")),
)

# Written by the harness itself: changes there do not make a tree dirty.
OUTPUTS = ("experiments/results", "paper/tables", "paper/figures")

Config = Any  # a frozen dataclass of plain values
Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Options:
    """What the caller of a run says about this machine; part of no config and no hash."""

    model: pathlib.Path | None = None
    trace: pathlib.Path | None = None
    hf_python: pathlib.Path = ROOT / ".peers" / "hf" / "bin" / "python"
    llama_python: pathlib.Path = ROOT / ".peers" / "llama" / "bin" / "python"
    zipnn_python: pathlib.Path = ROOT / ".peers" / "zipnn" / "bin" / "python"
    cache: pathlib.Path = ROOT / ".cache" / "experiments"


@dataclasses.dataclass(frozen=True)
class Measured:
    """The outcome of one config. `values` are numbers, `Estimate`s, texts, booleans or None."""

    config: Config
    values: Mapping[str, Any]
    n: int
    definitions: Mapping[str, str]
    kind: str = "measured"
    placement: str = ""
    model_sha256: str = ""
    notes: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Experiment:
    """A named sweep.

    `configs(smoke)` are all its configs; `run(todo, options)` yields a `Measured` for each of
    those it is given, in any order. `devices(config)` is how many devices one needs; `adapt` puts
    into a config what an option of the caller changes in it. `output` is a folder that a config
    leaves on this machine, for others to use: without it, a row that stands is measured again.
    `compiles_for_gpus`: its rows depend on GPU kernels, whatever device is there.
    """

    name: str
    summary: str
    configs: Callable[[bool], Sequence[Config]]
    run: Callable[[Sequence[Config], Options], Iterable[Measured]]
    sources: tuple[str, ...]
    tables: Mapping[str, Callable[[Sequence[Row]], Any]]
    devices: Callable[[Config], int] = lambda config: 1
    adapt: Callable[[Config, Options], Config] = lambda config, options: config
    compiles_for_gpus: bool = False
    output: Callable[[Config, Options], pathlib.Path | None] = lambda config, options: None


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A median with its bootstrap interval."""

    value: float
    low: float
    high: float
    n: int

    def as_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "confidence": CONFIDENCE}


# -- configs and sweeps


def product(cls: type, **axes: Any) -> list[Config]:
    """A config for every combination; a list is an axis, anything else a fixed value."""
    lists = {k: v if isinstance(v, list) else [v] for k, v in axes.items()}
    return [
        cls(**dict(zip(lists, values, strict=True)))
        for values in itertools.product(*lists.values())
    ]


def as_dict(config: Config) -> dict[str, Any]:
    """The config as JSON sees it: tuples are lists."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def config_hash(experiment: str, config: Config | Mapping[str, Any]) -> str:
    """Sha256 of the experiment's name and the whole config, keys sorted."""
    fields = dict(config) if isinstance(config, Mapping) else as_dict(config)
    text = json.dumps([experiment, fields], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def select(configs: Sequence[Config], only: Sequence[str]) -> list[Config]:
    """The configs whose fields have the values of every "name=value".

    A value is compared as JSON where it is JSON and as text otherwise; several values of one
    field are alternatives.

    Raises: ValueError for a field that no config has, or a filter that leaves nothing.
    """
    wanted: dict[str, list[Any]] = {}
    for item in only:
        name, equals, value = item.partition("=")
        if not equals:
            raise ValueError(f"--only: expected field=value, got {item!r}")
        wanted.setdefault(name, []).append(_parse(value))
    dicts = [as_dict(config) for config in configs]
    fields = sorted({name for fields in dicts for name in fields})
    for name in wanted:
        if name not in fields:
            raise ValueError(f"--only: expected one of {fields}, got {name!r}")
    kept = [
        config
        for config, fields in zip(configs, dicts, strict=True)
        if all(
            any(fields.get(name) == v or str(fields.get(name)) == str(v) for v in values)
            for name, values in wanted.items()
        )
    ]
    if not kept:
        raise ValueError(f"--only {' '.join(only)}: no config of {len(dicts)} matches")
    return kept


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


# -- statistics


def median(values: Sequence[float], seed: int = 0) -> Estimate:
    """Median and percentile bootstrap interval; values that are missing (NaN) do not count."""
    present = np.array([v for v in values if not math.isnan(v)], np.float64)
    if not present.size:
        return Estimate(math.nan, math.nan, math.nan, 0)
    rng = np.random.default_rng(seed)
    draws = rng.integers(0, present.size, size=(RESAMPLES, present.size))
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(np.median(present[draws], axis=1), [tail, 1 - tail])
    return Estimate(float(np.median(present)), float(low), float(high), int(present.size))


def paired_ratio(
    numerators: Sequence[float], denominators: Sequence[float], seed: int = 0
) -> Estimate:
    """Median of the ratios of one round each, with its interval.

    Paired, because what slows a machine for a minute slows both sides of a round.
    """
    if len(numerators) != len(denominators):
        raise ValueError(
            f"rounds: expected as many on both sides, got {len(numerators)} and {len(denominators)}"
        )
    return median([a / b for a, b in zip(numerators, denominators, strict=True)], seed)


# -- provenance


def sources_of(experiment: Experiment, device_kind: str) -> str:
    """Hash of what an experiment runs on a kind of device: a CPU runs no GPU kernel."""
    runs_none = device_kind == "cpu" and not experiment.compiles_for_gpus
    return source_hash(experiment.sources, skip=GPU_SOURCES if runs_none else ())


def source_hash(paths: Sequence[str], root: pathlib.Path = ROOT, skip: Sequence[str] = ()) -> str:
    """Sha256 of what Python sees of these files and folders: no comments, no docstrings.

    Files that match a pattern of `skip` are left out.
    """
    digest = hashlib.sha256()
    for path in sorted(_python_files(paths, root)):
        name = path.relative_to(root).as_posix()
        if any(name == other or name.startswith(f"{other}/") for other in NOT_SOURCES):
            continue
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in skip):
            continue
        digest.update(f"{name}\n{_code(path.read_text(encoding='utf-8'))}\n".encode())
    return digest.hexdigest()


def _python_files(paths: Sequence[str], root: pathlib.Path) -> Iterator[pathlib.Path]:
    for path in map(root.joinpath, paths):
        if path.is_dir():
            yield from path.rglob("*.py")
        elif path.exists():
            yield path
        else:
            raise ValueError(f"sources: {path} does not exist")


def _code(text: str) -> str:
    tree = ast.parse(text)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if (
            isinstance(body, list)
            and body
            and isinstance(body[0], ast.Expr)
            and isinstance(body[0].value, ast.Constant)
            and isinstance(body[0].value.value, str)
        ):
            del body[0]
    return ast.dump(tree)


def git_state(root: pathlib.Path = ROOT) -> tuple[str, bool]:
    """Commit and dirty flag. Without a repository: "unknown" and dirty."""
    try:
        commit = _git(root, "rev-parse", "HEAD")
        spare = [f":!{path}" for path in OUTPUTS]
        return commit, bool(_git(root, "status", "--porcelain", "--", ".", *spare))
    except (OSError, subprocess.CalledProcessError):
        return "unknown", True


def _git(root: pathlib.Path, *command: str) -> str:
    done = subprocess.run(["git", *command], cwd=root, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def file_sha256(path: pathlib.Path) -> str:
    """Sha256 of a file, or of a folder's names and files."""
    digest = hashlib.sha256()
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    for file in files:
        if path.is_dir():
            digest.update(file.relative_to(path).as_posix().encode())
        with file.open("rb") as data:
            while block := data.read(2**20):
                digest.update(block)
    return digest.hexdigest()


def cpu_model() -> str:
    """The processor's name as the kernel gives it."""
    try:
        for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    names = ("jax", "jaxlib", "flax", "numpy")
    return {"python": platform.python_version()} | {n: importlib.metadata.version(n) for n in names}


def make_row(experiment: Experiment, measured: Measured, wall_s: float, smoke: bool) -> Row:
    """The row of one outcome, with the provenance of this process."""
    if measured.kind not in KINDS:
        raise ValueError(f"kind: expected one of {', '.join(KINDS)}, got {measured.kind!r}")
    undefined = sorted(set(measured.values) - set(measured.definitions))
    if undefined:
        raise ValueError(f"{experiment.name}: no definition for {undefined}")
    config = as_dict(measured.config)
    commit, dirty = git_state()
    devices = jax.devices()
    return plain(
        {
            "experiment": experiment.name,
            "config": config,
            "config_hash": config_hash(experiment.name, config),
            "kind": measured.kind,
            "values": measured.values,
            "n": measured.n,
            "definitions": measured.definitions,
            "seed": config.get("seed"),
            "smoke": smoke,
            "placement": measured.placement,
            "model_sha256": measured.model_sha256,
            "notes": measured.notes,
            "commit": commit,
            "dirty": dirty,
            "source_hash": sources_of(experiment, devices[0].device_kind),
            "versions": versions(),
            "device": {"kind": devices[0].device_kind, "count": len(devices)},
            "cpu": {"model": cpu_model(), "cores": os.cpu_count()},
            "wall_s": wall_s,
            "time": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        }
    )


def plain(value: Any) -> Any:
    """The value as strict JSON holds it: a number that is missing (NaN) is null, never 0."""
    if isinstance(value, Estimate):
        return plain(value.as_json())
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


# -- rows on disk


def results_path(results: pathlib.Path, name: str) -> pathlib.Path:
    return results / f"{name}.jsonl"


def read_rows(path: pathlib.Path) -> list[Row]:
    """Every row of a file, in order; none where there is no file.

    Raises: ValueError naming the line that is no JSON object.
    """
    if not path.exists():
        return []
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}:{number}: expected a JSON row, got {line[:60]!r}") from error
        rows.append(row)
    return rows


def write_row(path: pathlib.Path, row: Row) -> None:
    """Puts the row in the place of an earlier one of the same config, else at the end.

    The file is replaced as a whole: a run that is killed leaves the old or the new one.
    """
    rows = read_rows(path)
    at = [i for i, old in enumerate(rows) if old["config_hash"] == row["config_hash"]]
    rows = [old for i, old in enumerate(rows) if i not in at[1:]]
    if at:
        rows[at[0]] = row
    else:
        rows.append(row)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    text = "".join(json.dumps(r, sort_keys=True, allow_nan=False) + "\n" for r in rows)
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def unfinished(
    experiment: Experiment, configs: Sequence[Config], rows: Sequence[Row]
) -> list[Config]:
    """The configs without a row that stands.

    A row of the same config and the same sources stands, and needs no new run. A dirty row stands
    only while the tree is dirty: the first clean run replaces it.
    """
    _, dirty = git_state()
    standing = {
        row["config_hash"] for row in _current(experiment, rows) if dirty or not row["dirty"]
    }
    return [c for c in configs if config_hash(experiment.name, c) not in standing]


def _current(experiment: Experiment, rows: Sequence[Row]) -> list[Row]:
    """The rows whose sources are unchanged."""
    kinds = {row["device"]["kind"] for row in rows}
    hashes = {kind: sources_of(experiment, kind) for kind in kinds}
    return [row for row in rows if row["source_hash"] == hashes[row["device"]["kind"]]]


def problems(
    experiment: Experiment, configs: Sequence[Config], rows: Sequence[Row], smoke: bool = False
) -> list[str]:
    """Why these rows may not go into a paper: missing, stale, dirty, doubled or of a smoke run."""
    by_hash: dict[str, list[Row]] = {}
    for row in rows:
        by_hash.setdefault(row["config_hash"], []).append(row)
    current = list(map(id, _current(experiment, rows)))
    found = []
    expected = {config_hash(experiment.name, config): as_dict(config) for config in configs}
    for key, fields in expected.items():
        name = f"{experiment.name} {key[:12]} {fields}"
        mine = by_hash.pop(key, [])
        if not mine:
            found.append(f"missing: {name}")
        if len(mine) > 1:
            found.append(f"doubled: {name}")
        for row in mine:
            if row["dirty"]:
                found.append(f"dirty: {name} (ran with uncommitted changes)")
            if id(row) not in current:
                found.append(f"stale: {name} (sources changed since {row['commit'][:12]})")
            if row["smoke"] != smoke:
                found.append(f"{'full' if smoke else 'smoke'} run: {name}")
            if config_hash(experiment.name, row["config"]) != key:
                found.append(f"edited: {name} (config and hash disagree)")
    for key, mine in by_hash.items():
        found += [
            f"stale: {experiment.name} {key[:12]} {r['config']} (no such config)" for r in mine
        ]
    return found
