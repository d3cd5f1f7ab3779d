"""Size of trained BF16 weights in every Unweight form, beside ZipNN, zstd and published figures.

One row a weight set and kind of tensor; one for its whole file, where the peers pack the same file
in the same run; one for each figure that others published, cited and not measured.
"""

import dataclasses
import math
import pathlib
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from tqdm import tqdm

import jinfire as jf
from experiments.harness import Experiment, Measured, Options, Row
from experiments.systems import zipnn_process
from experiments.tables import Cell, Table, number, provenance
from experiments.weight_sets import (
    ALL,
    ATTENTION,
    EMBEDDING,
    MLP,
    OTHER,
    WEIGHT_SETS,
    WeightSet,
    bfloat16_folder,
    kind_of,
    words_of,
)

FILE, CITED = "file", "cited"
FORMS = ("huffman", "palette", "compact")
PEERS = ("zipnn", "zstd")
ROW = 64

# Bars of this project: bits per weight of MLPs, stored bytes over source bytes of a whole file.
MLP_BARS = {"huffman": 10.80, "palette": 12.1, "compact": 11.5}
MLP_BAR_SETS = ("whisper-base", "minilm-l6", "smollm2")
FILE_BAR = 0.685
ZIPNN_BAR = 0.01


@dataclasses.dataclass(frozen=True)
class UnweightRatioConfig:
    """A kind of tensors of a weight set, its whole file, or what a system published.

    `weights` names the set, or the system of a cited row. `peers` pack the whole file too.
    """

    part: str
    weights: str
    peers: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Published:
    """What a system's authors say. Bits per weight from `low` to `high`."""

    low: float
    high: float
    tensors: str
    speed: str
    source: str


# Bits of ZipNN and SplitZip follow from the ratios that they publish, 66.3 % and 1.324.
PUBLISHED: Mapping[str, Published] = {
    "DFloat11": Published(
        *(10.81, 10.91),
        "all linear layers",
        "about 2x slower than BF16 at batch 1",
        "arXiv 2504.11651",
    ),
    "ZipServ": Published(
        *(11.3, 11.46), "linear layers", "0.7 to 2.2x of cuBLAS", "arXiv 2603.17435"
    ),
    "Unweight": Published(
        *(10.9, 11.0),
        "MLP",
        "30 to 40 % slower end to end",
        "Cloudflare Cf-TR-2026.04.v1 and its reports",
    ),
    "Binade, Huffman": Published(
        *(10.648, 10.648), "", "CUDA decode 1.01 to 1.10x of BF16", "Binade, results of 2026-10"
    ),
    "Binade, ZipServ layout": Published(11.455, 11.455, "", "", "Binade, results of 2026-10"),
    "Binade, palette": Published(12.044, 12.044, "", "", "Binade, results of 2026-10"),
    "Glyd": Published(
        *(10.80, 10.80),
        "",
        "0.89 to 0.93x of BF16, vLLM on GH200, saturated",
        "Glyd, README and logs",
    ),
    "ZipNN": Published(
        *(10.61, 10.61),
        "whole files",
        "CPU, one thread: 1.12 GB/s in, 1.66 GB/s out",
        "arXiv 2411.05239",
    ),
    "SplitZip": Published(
        *(12.08, 12.08),
        "KV pages",
        "613 GB/s in, 2,182 GB/s out; TTFT 1.30x",
        "arXiv 2605.01708",
    ),
}


def configs(smoke: bool) -> list[UnweightRatioConfig]:
    parts = (MLP, ATTENTION, EMBEDDING, ALL)
    sets: dict[str, tuple[str, ...]]
    if smoke:
        sets = {"golden_llama31": parts}
        cited = ["DFloat11", "Unweight"]
    else:
        sets = {name: parts for name in WEIGHT_SETS if not WEIGHT_SETS[name].file}
        sets["wordllama"] = (EMBEDDING,)
        cited = list(PUBLISHED)
    return [
        *(UnweightRatioConfig(part, name) for name in sets for part in sets[name]),
        *(UnweightRatioConfig(FILE, name, () if smoke else PEERS) for name in sets),
        *(UnweightRatioConfig(CITED, name) for name in cited),
    ]


DEFINITIONS = {
    "weights": "number of weights, cast to BF16 where they were stored otherwise",
    "tensors": "number of tensors",
    "exponent_entropy_bits": "entropy of the exponent byte of each tensor, mean over weights",
    "bound_bits": "exponent_entropy_bits + 8: what no code of single exponents goes below",
    **{
        f"{form}_bits": f"8 x bytes / weights, {form} form: header, tables, index, rows kept "
        "verbatim, padding and all"
        for form in FORMS
    },
    "verbatim_share": "rows of 64 weights with an exponent outside of the tensor's palette",
    "source_bytes": "bytes of the BF16 safetensors file",
    **{
        f"{form}_ratio": f"bytes of all files of the compressed folder, {form} form, over those "
        "of the source's"
        for form in FORMS
    },
    "zipnn_ratio": "bytes that ZipNN makes of the file over source_bytes",
    "zstd_ratio": "bytes that zstd, level 3, makes of the file over source_bytes",
    "over_zipnn": "huffman_ratio - zipnn_ratio",
    "bits_low": "bits per weight that are published, or the least of them",
    "bits_high": "bits per weight that are published, or the most of them",
    "tensors_meant": "the tensors that the published figure is for",
    "speed": "speed that is published",
}


@dataclasses.dataclass(frozen=True)
class Costs:
    """One tensor: its weights, its exponents' entropy and its bytes in every form."""

    kind: str
    weights: int
    entropy_bits: float
    form_bytes: Mapping[str, int]
    rows: int
    verbatim_rows: int


def run(todo: Sequence[UnweightRatioConfig], options: Options) -> Iterator[Measured]:
    costs: dict[str, list[Costs]] = {}
    for config in tqdm(todo, desc="unweight_ratio", unit="row", file=sys.stderr, disable=None):
        if config.part == CITED:
            yield _cited(config)
            continue
        weights = WEIGHT_SETS[config.weights]
        if config.part == FILE:
            values, notes = _file(config, weights, options)
        else:
            if config.weights not in costs:
                costs = {config.weights: _costs(words_of(weights, options))}
            values, notes = _part(config, costs[config.weights]), {}
        yield _measured(config, values, weights, options, notes)


def _measured(
    config: UnweightRatioConfig,
    values: Mapping[str, Any],
    weights: WeightSet,
    options: Options,
    notes: Mapping[str, Any],
) -> Measured:
    return Measured(
        config=config,
        values=values,
        n=1,
        definitions={name: DEFINITIONS[name] for name in values},
        model_sha256=weights.sha256(options),
        notes={"stored": f"{weights.stored}, cast to BF16", **notes},
    )


def _cited(config: UnweightRatioConfig) -> Measured:
    said = PUBLISHED[config.weights]
    values = {
        "bits_low": said.low,
        "bits_high": said.high,
        "tensors_meant": said.tensors,
        "speed": said.speed,
    }
    definitions = {name: DEFINITIONS[name] for name in values}
    return Measured(config, values, 1, definitions, "cited", notes={"source": said.source})


def _costs(tensors: Mapping[str, np.ndarray]) -> list[Costs]:
    found = []
    for name, words in tqdm(
        tensors.items(), desc="tensors", file=sys.stderr, disable=None, leave=False
    ):
        blobs = {form: jf.unweight_encode(words, form) for form in FORMS}
        rows = math.ceil(words.size / ROW)
        found.append(
            Costs(
                kind=kind_of(name, words.shape),
                weights=words.size,
                entropy_bits=entropy_bits(words),
                form_bytes={form: blob.size for form, blob in blobs.items()},
                rows=rows,
                verbatim_rows=verbatim_rows(words),
            )
        )
    return found


def entropy_bits(words: np.ndarray) -> float:
    """Entropy of the exponent byte of uint16 words."""
    counts = np.bincount(exponents(words).ravel(), minlength=256)
    shares = counts[counts > 0] / words.size
    return float(-(shares * np.log2(shares)).sum()) if words.size else 0.0


def verbatim_rows(words: np.ndarray) -> int:
    """Rows of 64 weights with an exponent that is not among the tensor's 16 commonest.

    Ties go to the smaller exponent. Rows of a matrix whose width is a multiple of 64 do not cross
    its own rows, those of other tensors run on to the tail.
    """
    found = exponents(words).ravel()
    counts = np.bincount(found, minlength=256)
    palette = np.argsort(-counts, kind="stable")[:16]
    outside = ~np.isin(found, palette)
    padded = np.pad(outside, (0, -outside.size % ROW))
    return int(padded.reshape(-1, ROW).any(axis=1).sum())


def exponents(words: np.ndarray) -> np.ndarray:
    return (words >> 7) & np.uint16(0xFF)


def _part(config: UnweightRatioConfig, costs: Sequence[Costs]) -> dict[str, Any]:
    chosen = [cost for cost in costs if config.part in (ALL, cost.kind)]
    if not chosen:
        raise ValueError(f"{config.weights}: no tensor of kind {config.part!r}")
    weights = sum(cost.weights for cost in chosen)
    entropy = sum(cost.weights * cost.entropy_bits for cost in chosen) / weights
    return {
        "weights": weights,
        "tensors": len(chosen),
        "exponent_entropy_bits": entropy,
        "bound_bits": entropy + 8,
        **{
            f"{form}_bits": 8 * sum(cost.form_bytes[form] for cost in chosen) / weights
            for form in FORMS
        },
        "verbatim_share": sum(c.verbatim_rows for c in chosen) / sum(c.rows for c in chosen),
    }


def _file(
    config: UnweightRatioConfig, weights: WeightSet, options: Options
) -> tuple[dict[str, Any], dict[str, Any]]:
    source = bfloat16_folder(weights, options)
    size_bytes = folder_bytes(source)
    values: dict[str, Any] = {"source_bytes": size_bytes}
    with tempfile.TemporaryDirectory(dir=options.cache) as made:
        for form in FORMS:
            target = pathlib.Path(made) / form
            jf.compress(source, target, form=form)
            values[f"{form}_ratio"] = folder_bytes(target) / size_bytes
            shutil.rmtree(target)
    notes: dict[str, Any] = {}
    if config.peers:
        with zipnn_process(options) as peer:
            peer.ask("load", path=str(source / "model.safetensors"))
            for method in config.peers:
                packed = peer.ask("compress", method=method, threads=1)
                opened = peer.ask("decompress", method=method, threads=1)
                if not opened["identical"]:
                    raise ValueError(f"{method}: expected the file back, got other bytes")
                values[f"{method}_ratio"] = packed["bytes"] / size_bytes
            notes["peers"] = peer.ask("info")
        values["over_zipnn"] = values["huffman_ratio"] - values["zipnn_ratio"]
    return values, notes


def folder_bytes(folder: pathlib.Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def parts_table(rows: Sequence[Row]) -> Table:
    """Bits per weight by weight set and kind of tensor."""
    rows = [row for row in rows if row["config"]["part"] in (MLP, ATTENTION, EMBEDDING, ALL, OTHER)]
    lines = []
    for row in rows:
        config, values = row["config"], row["values"]
        barred = config["part"] == MLP and config["weights"] in MLP_BAR_SETS
        cells = (
            config["weights"],
            config["part"],
            number(values["weights"]),
            number(values["exponent_entropy_bits"], 4),
            number(values["bound_bits"], 5),
            *(
                number(values[f"{form}_bits"], 5) + (f" (≤ {MLP_BARS[form]:.2f})" if barred else "")
                for form in FORMS
            ),
            number(values["verbatim_share"] * 100),
        )
        lines.append(tuple(Cell(cell, row["kind"]) for cell in cells))
    stored = {row["config"]["weights"]: row["notes"]["stored"] for row in rows}
    return Table(
        caption="Bits per BF16 weight by kind of tensor, everything counted.",
        columns=(
            "weights",
            "tensors",
            "number",
            "H(exponent)",
            "H + 8",
            "huffman (bar)",
            "palette (bar)",
            "compact (bar)",
            "verbatim rows, %",
        ),
        rows=tuple(lines),
        notes=(
            "Stored as: " + "; ".join(f"{name}: {text}" for name, text in stored.items()) + ".",
            *provenance(rows),
        ),
        numeric=frozenset(range(2, 9)),
    )


def file_table(rows: Sequence[Row]) -> Table:
    """Whole files beside the peers."""
    rows = [row for row in rows if row["config"]["part"] == FILE]
    lines = []
    for row in rows:
        values = row["values"]
        cells = (
            row["config"]["weights"],
            number(values["source_bytes"]),
            f"{_percent(values['huffman_ratio'])} (≤ {FILE_BAR:.1%})",
            _percent(values["compact_ratio"]),
            _percent(values["palette_ratio"]),
            _percent(values.get("zipnn_ratio")),
            _percent(values.get("zstd_ratio")),
            number(values.get("over_zipnn"), 2) + f" (≤ {ZIPNN_BAR})",
        )
        lines.append(tuple(Cell(cell, row["kind"]) for cell in cells))
    return Table(
        caption="Stored bytes over source bytes of whole BF16 safetensors files, %, same run.",
        columns=(
            "weights",
            "source bytes",
            "huffman (bar)",
            "compact",
            "palette",
            "ZipNN",
            "zstd -3",
            "huffman - ZipNN (bar)",
        ),
        rows=tuple(lines),
        notes=(
            "Every chunk of ours decodes on its own; ZipNN and zstd pack the file as one buffer.",
            *provenance(rows),
        ),
        numeric=frozenset(range(1, 8)),
    )


def _percent(ratio: float | None) -> str:
    return number(None if ratio is None else ratio * 100, 4)


def published_table(rows: Sequence[Row]) -> Table:
    """What others say of theirs."""
    rows = [row for row in rows if row["config"]["part"] == CITED]
    lines = []
    for row in rows:
        values = row["values"]
        low, high = (f"{values[name]:g}" for name in ("bits_low", "bits_high"))
        cells = (
            row["config"]["weights"],
            low if low == high else f"{low} to {high}",
            values["tensors_meant"] or "–",
            values["speed"] or "–",
            row["notes"]["source"],
        )
        lines.append(tuple(Cell(cell, row["kind"]) for cell in cells))
    return Table(
        caption="Published figures of lossless compression of BF16.",
        columns=("system", "bits per weight", "tensors", "speed", "source"),
        rows=tuple(lines),
        notes=("Other models, other machines: not comparable beyond their order.",),
    )


UNWEIGHT_RATIO = Experiment(
    name="unweight_ratio",
    summary="bits per weight by kind of tensor, whole files beside ZipNN and zstd",
    configs=configs,
    run=run,
    sources=(
        *("jinfire/unweight", "jinfire/checkpoints", "pallas_kernels/unweight_blob.py"),
        "pallas_kernels/unweight_huffman.py",
        *("experiments/unweight_ratio.py", "experiments/weight_sets.py"),
        *("experiments/ctranslate2.py", "experiments/peers/zipnn_bench.py"),
    ),
    tables={
        "unweight_ratio": parts_table,
        "unweight_file": file_table,
        "unweight_published": published_table,
    },
)
