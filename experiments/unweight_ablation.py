"""Choices of the Unweight format, one changed at a time: what each costs in bits per weight.

Encoded by the format's NumPy oracle, the only one that knows other choices than the format's own.
"""

import dataclasses
import sys
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from tqdm import tqdm

import jinfire as jf
from experiments.harness import Experiment, Measured, Options, Row
from experiments.tables import Cell, Table, number, provenance
from experiments.weight_sets import ALL, MLP, WEIGHT_SETS, kind_of, words_of


@dataclasses.dataclass(frozen=True)
class UnweightAblationConfig:
    """One set of choices. The defaults are the format's."""

    weights: str
    form: str = "huffman"
    tensors: str = MLP
    row_weights: int = 64
    palette_entries: int = 16
    chunk_rows: int = 16
    max_code_bits: int = 12


# Changes of one choice: field, values besides the default, forms that have it.
CHANGES = (
    ("row_weights", (32, 128), ("huffman", "palette")),
    ("palette_entries", (8, 12), ("huffman", "palette")),
    ("chunk_rows", (4, 8, 32), ("huffman",)),
    ("max_code_bits", (6, 8, 15), ("huffman",)),
    ("tensors", (ALL,), ("huffman", "palette", "compact")),
)
SETS = ("minilm-l6", "whisper-tiny.en")


def configs(smoke: bool) -> list[UnweightAblationConfig]:
    found = []
    for name in ("golden_llama31",) if smoke else SETS:
        bases = [
            UnweightAblationConfig(name, form)
            for form in (("huffman",) if smoke else ("huffman", "palette", "compact"))
        ]
        found += bases
        for field, values, forms in CHANGES:
            found += [
                dataclasses.replace(base, **{field: value})
                for base in bases
                if base.form in forms
                for value in (values[:1] if smoke else values)
            ]
    return found


DEFINITIONS = {
    "bits_per_weight": "8 x bytes of all tensors' blobs / weights, everything counted",
    "over_default_bits": "bits_per_weight less those of MLPs in the same form by the format's own "
    "choices",
}


def run(todo: Sequence[UnweightAblationConfig], options: Options) -> Iterator[Measured]:
    tensors: dict[str, dict[str, np.ndarray]] = {}
    defaults: dict[UnweightAblationConfig, float] = {}
    for config in tqdm(todo, desc="unweight_ablation", unit="row", file=sys.stderr, disable=None):
        if config.weights not in tensors:
            tensors = {config.weights: words_of(WEIGHT_SETS[config.weights], options)}
        own = UnweightAblationConfig(config.weights, config.form)
        if own not in defaults:
            defaults[own] = encoded_bits(tensors[config.weights], own)
        bits = defaults[own] if config == own else encoded_bits(tensors[config.weights], config)
        yield Measured(
            config=config,
            values={
                "bits_per_weight": bits,
                "over_default_bits": bits - defaults[own],
            },
            n=1,
            definitions=DEFINITIONS,
            model_sha256=WEIGHT_SETS[config.weights].sha256(options),
            notes={"stored": f"{WEIGHT_SETS[config.weights].stored}, cast to BF16"},
        )


def encoded_bits(tensors: Mapping[str, np.ndarray], config: UnweightAblationConfig) -> float:
    """Bits per weight of the tensors that the config means."""
    chosen = [
        words
        for name, words in tensors.items()
        if config.tensors in (ALL, kind_of(name, words.shape))
    ]
    choices = jf.UnweightOptions(
        row=config.row_weights,
        palette=config.palette_entries,
        chunk_rows=config.chunk_rows,
        max_code_bits=config.max_code_bits,
    )
    size_bytes = sum(
        jf.unweight_reference_encode(words, config.form, choices).size
        for words in tqdm(chosen, desc="tensors", file=sys.stderr, disable=None, leave=False)
    )
    return 8 * size_bytes / sum(words.size for words in chosen)


CHOICES = {
    "row_weights": "weights in a row",
    "palette_entries": "entries of the palette",
    "chunk_rows": "rows in a chunk",
    "max_code_bits": "most bits of a code",
    "tensors": "tensors",
}


def table(rows: Sequence[Row]) -> Table:
    """A line a choice and form, a column a weight set."""
    names = list(dict.fromkeys(row["config"]["weights"] for row in rows))
    found: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        config = row["config"]
        own = dataclasses.asdict(UnweightAblationConfig(config["weights"], config["form"]))
        changed = [f"{CHOICES[k]}: {config[k]}" for k in CHOICES if config[k] != own[k]]
        key = (config["form"], ", ".join(changed) or "the format's own, MLP")
        found.setdefault(key, {})[config["weights"]] = row
    lines = []
    for (form, change), by_name in found.items():
        cells = [Cell(form), Cell(change)]
        for name in names:
            values = by_name[name]["values"] if name in by_name else {}
            over = values.get("over_default_bits")
            cells.append(Cell(number(values.get("bits_per_weight"), 5)))
            cells.append(Cell("–" if over is None else f"{over:+.3f}"))
        lines.append(tuple(cells))
    columns = [text for name in names for text in (f"{name}, bits", "against own choices")]
    return Table(
        caption="Bits per BF16 weight when one choice of the format is another.",
        columns=("form", "choice", *columns),
        rows=tuple(lines),
        notes=(
            "A palette of fewer entries keeps codes of 4 bits; the rows that it does not cover are "
            "verbatim.",
            *provenance(rows),
        ),
        numeric=frozenset(range(2, 2 + len(columns))),
    )


UNWEIGHT_ABLATION = Experiment(
    name="unweight_ablation",
    summary="bits per weight by row, palette, chunk, code length, tensors and form",
    configs=configs,
    run=run,
    sources=(
        *("pallas_kernels/unweight_format.py", "pallas_kernels/unweight_blob.py"),
        *("pallas_kernels/unweight_huffman.py", "experiments/unweight_ablation.py"),
        *("experiments/weight_sets.py", "experiments/ctranslate2.py", "jinfire/checkpoints"),
    ),
    tables={"unweight_ablation": table},
)
