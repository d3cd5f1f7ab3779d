"""Speed of the Unweight codec on trained BF16 weights, beside ZipNN and zstd in the same run.

Every round runs every system once, one after another; ratios are paired by round. Each system is a
process of its own and works from memory to memory, or from files to files.
"""

import contextlib
import dataclasses
import itertools
import os
import pathlib
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

from tqdm import tqdm

from experiments.harness import (
    Experiment,
    Measured,
    Options,
    Row,
    median,
    paired_ratio,
    product,
)
from experiments.systems import System, codec_process, zipnn_process
from experiments.tables import Cell, Table, estimate, number, provenance
from experiments.weight_sets import WEIGHT_SETS, bfloat16_folder

COMPRESS, DECOMPRESS = "compress", "decompress"
MEGA = 1e6

# Bars with 2 jobs, MB/s of BF16; the aim is to be no slower than ZipNN.
FLOORS = {COMPRESS: 250, DECOMPRESS: 400}


@dataclasses.dataclass(frozen=True)
class UnweightSpeedConfig:
    """Both directions with so many jobs, in memory or with `files` read and written.

    Peers run with one thread and with as many as the machine has cores.
    """

    files: bool = False
    weights: str = "whisper-base"
    form: str = "huffman"
    jobs: int = 1
    peers: tuple[str, ...] = ("zipnn", "zstd")
    rounds: int = 7


def configs(smoke: bool) -> list[UnweightSpeedConfig]:
    common: dict[str, Any] = {"files": [False, True], "jobs": [1, 2]}
    if smoke:
        small: dict[str, Any] = {"weights": "golden_llama31", "peers": (), "rounds": 2}
        return product(UnweightSpeedConfig, **common, **small)
    return [
        *product(UnweightSpeedConfig, **common),
        *product(UnweightSpeedConfig, jobs=[1, 2], form=["compact", "palette"], peers=()),
    ]


MEANING = {
    "jinfire": "tensors to blobs or back, or folder to folder; hashes included",
    "zipnn": "ZipNN, one buffer to another or file to file, one thread",
    "zipnn_threads": "ZipNN with as many threads as the machine has cores",
    "zstd": "zstd, level 3, one thread",
    "zstd_threads": "zstd, level 3, with as many threads as the machine has cores",
}
DEFINITIONS = {
    "ratio": "stored bytes over source bytes; what comes back is compared in every round",
    **{
        f"{name}_{way}_mb_s": f"10⁶ source bytes a second, {way}: {text}"
        for name, text in MEANING.items()
        for way in (COMPRESS, DECOMPRESS)
    },
    **{
        f"over_{name}_{way}": f"jinfire_{way}_mb_s / {name}_{way}_mb_s, median over rounds of the "
        "ratio of one round"
        for name in ("zipnn", "zipnn_threads")
        for way in (COMPRESS, DECOMPRESS)
    },
}


def run(todo: Sequence[UnweightSpeedConfig], options: Options) -> Iterator[Measured]:
    for config in tqdm(todo, desc="unweight_speed", unit="row", file=sys.stderr, disable=None):
        yield _measure(config, options)


def _measure(config: UnweightSpeedConfig, options: Options) -> Measured:
    path = bfloat16_folder(WEIGHT_SETS[config.weights], options) / "model.safetensors"
    with contextlib.ExitStack() as stack:
        systems = {"jinfire": stack.enter_context(codec_process())}
        if config.peers:
            systems["zipnn"] = stack.enter_context(zipnn_process(options))
        size_bytes = max(s.ask("load", path=str(path))["bytes"] for s in systems.values())
        made = stack.enter_context(tempfile.TemporaryDirectory(dir=options.cache))
        return _rounds(config, options, systems, path, pathlib.Path(made), size_bytes)


def _once(
    system: System, config: UnweightSpeedConfig, path: pathlib.Path, made: pathlib.Path, **how: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Answers of both directions; folders where the system is ours, files where it is a peer."""
    if not config.files:
        return system.ask(COMPRESS, **how), system.ask(DECOMPRESS, **how)
    ours = system.name == "jinfire"
    packed, opened = made / "packed", made / "opened"
    source = path.parent if ours else path
    answers = (
        system.ask(f"{COMPRESS}_files", **how, source=str(source), target=str(packed)),
        system.ask(f"{DECOMPRESS}_files", **how, source=str(packed), target=str(opened)),
    )
    for left in (packed, opened):
        if left.is_dir():
            shutil.rmtree(left)
        else:
            left.unlink()
    return answers


def _rounds(
    config: UnweightSpeedConfig,
    options: Options,
    systems: dict[str, System],
    path: pathlib.Path,
    made: pathlib.Path,
    size_bytes: int,
) -> Measured:
    cores = os.cpu_count() or 1
    runs = [("jinfire", "jinfire", {"form": config.form, "jobs": config.jobs})]
    for method in config.peers:
        runs.append((method, "zipnn", {"method": method, "threads": 1}))
        runs.append((f"{method}_threads", "zipnn", {"method": method, "threads": cores}))
    speeds: dict[str, list[float]] = {
        f"{name}_{way}": [] for name, _, _ in runs for way in (COMPRESS, DECOMPRESS)
    }
    stored_bytes = 0
    # The first round compiles and is not counted.
    for index in tqdm(
        range(-1, config.rounds), desc="rounds", file=sys.stderr, disable=None, leave=False
    ):
        for name, system, how in runs:
            packed, opened = _once(systems[system], config, path, made, **how)
            if not opened["identical"]:
                raise ValueError(f"{name}: expected the weights back, got others")
            if name == "jinfire":
                stored_bytes = packed["bytes"]
            if index >= 0:
                for way, answer in ((COMPRESS, packed), (DECOMPRESS, opened)):
                    speeds[f"{name}_{way}"].append(size_bytes / answer["seconds"] / MEGA)
    values: dict[str, Any] = {f"{name}_mb_s": median(found) for name, found in speeds.items()}
    for way in (COMPRESS, DECOMPRESS):
        for name in (f"zipnn_{way}", f"zipnn_threads_{way}"):
            if name in speeds:
                values[f"over_{name}"] = paired_ratio(speeds[f"jinfire_{way}"], speeds[name])
    values["ratio"] = stored_bytes / size_bytes
    return Measured(
        config=config,
        values=values,
        n=config.rounds,
        definitions={name: DEFINITIONS[name] for name in values},
        model_sha256=WEIGHT_SETS[config.weights].sha256(options),
        notes={
            "source_bytes": size_bytes,
            "rounds": speeds,
            "systems": {name: system.ask("info") for name, system in systems.items()},
        },
    )


def table(rows: Sequence[Row]) -> Table:
    lines = []
    for row, way in itertools.product(rows, (COMPRESS, DECOMPRESS)):
        config, values = row["config"], row["values"]
        barred = config["jobs"] == 2 and config["form"] == "huffman"
        cells = (
            way,
            "files" if config["files"] else "memory",
            config["form"],
            number(config["jobs"]),
            estimate(values[f"jinfire_{way}_mb_s"]) + (f" (≥ {FLOORS[way]})" if barred else ""),
            *(estimate(values.get(f"{name}_{way}_mb_s")) for name in MEANING if name != "jinfire"),
            *(estimate(values.get(f"over_{name}_{way}")) for name in ("zipnn", "zipnn_threads")),
        )
        lines.append(tuple(Cell(cell, row["kind"]) for cell in cells))
    names = ", ".join(sorted({row["config"]["weights"] for row in rows}))
    return Table(
        caption=f"MB/s of BF16 weights ({names}), same run.",
        columns=(
            "direction",
            "from and to",
            "form",
            "jobs",
            "jinfire (bar)",
            "ZipNN, 1 thread",
            "ZipNN, all cores",
            "zstd -3, 1 thread",
            "zstd -3, all cores",
            "× ZipNN, 1 thread",
            "× ZipNN, all cores",
        ),
        rows=tuple(lines),
        notes=provenance(rows),
        numeric=frozenset(range(3, 11)),
    )


UNWEIGHT_SPEED = Experiment(
    name="unweight_speed",
    summary="speed of compressing and decompressing weights beside ZipNN and zstd",
    configs=configs,
    run=run,
    sources=(
        *("jinfire/unweight", "pallas_kernels/unweight_blob.py"),
        "pallas_kernels/unweight_huffman.py",
        *("experiments/unweight_speed.py", "experiments/unweight_worker.py"),
        *("experiments/systems.py", "experiments/weight_sets.py", "experiments/ctranslate2.py"),
        "experiments/peers/zipnn_bench.py",
    ),
    tables={"unweight_speed": table},
)
