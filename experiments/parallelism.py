"""Layouts of a number of GPUs against each other: room for tokens and predicted times.

This part runs on no device: the times are bounds of the roofline, from the vendors' peaks.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence

import jinfire as jf
from experiments.harness import Config, Experiment, Measured, Options, Row
from experiments.tables import Cell, Table, number, provenance

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class ParallelismConfig:
    """One layout (pipeline, tensor, expert) for a number of decode rows."""

    model: str
    gpus: str
    layout: tuple[int, int, int]
    rows: int
    context: int = 8192
    chunk: int = 1024
    dtype: str = "bfloat16"


MODELS = {
    ("kimi-k2.5", "8xH100"): (8, 64),
    ("llama-4-scout", "8xH100"): (8, 64),
    ("llama-3.1-8b", "4xH100"): (8, 64),
}


def layouts(count: int) -> list[tuple[int, int, int]]:
    """Every (pipeline, tensor, expert) of so many devices."""
    sizes = [size for size in range(1, count + 1) if count % size == 0]
    return [(p, t, e) for p in sizes for t in sizes for e in sizes if p * t * e == count]


def configs(smoke: bool) -> list[ParallelismConfig]:
    chosen = {("llama-3.1-8b", "4xH100"): (8,)} if smoke else MODELS
    return [
        ParallelismConfig(model, gpus, layout, rows)
        for (model, gpus), batches in chosen.items()
        for layout in layouts(int(gpus.partition("x")[0]))
        for rows in batches
    ]


TERMS = ("weights_s", "kv_s", "flops_s", "link_s", "bubble_s", "total_s")
DEFINITIONS = {
    "fits": "weights, activations and the pools of all rows fit into every device",
    "refusal": "why the layout does not fit; missing where it does",
    "weights_bytes": "weights of one device, copies and padding included",
    "kv_tokens_left": "tokens of all rows that fit beside weights and activations",
    "prefill_tokens": "tokens of the prefill dispatch: a chunk for every stage",
    "prefill_tokens_per_s": "tokens of the prefill dispatch over its least time",
    **{
        f"{phase}_{term}": f"{text} of {what}, from the vendors' peaks"
        for phase, what in (
            ("prefill", "one dispatch, a chunk for every stage"),
            ("decode", "one decode step of all rows"),
        )
        for term, text in zip(
            TERMS,
            (
                "reading weights",
                "reading keys and values",
                "arithmetic",
                "collectives",
                "waiting for other stages",
                "least time",
            ),
            strict=True,
        )
    },
}


def run(todo: Sequence[ParallelismConfig], options: Options) -> Iterator[Measured]:
    for config in todo:
        plan = jf.plan(
            config.model,
            config.gpus,
            layout=config.layout,
            dtype=config.dtype,
            rows=config.rows,
            context=config.context,
            chunk=config.chunk,
        )
        (found,) = plan.candidates
        values = dict.fromkeys(DEFINITIONS, math.nan) | {
            "fits": plan.fits,
            "refusal": found.refusal,
        }
        if isinstance(found, jf.Fitting):
            values["weights_bytes"] = found.weights_bytes
            values["kv_tokens_left"] = found.kv_tokens_left
            values["prefill_tokens"] = found.prefill.tokens
            values["prefill_tokens_per_s"] = found.prefill.tokens_per_s
            for phase, time in (("prefill", found.prefill), ("decode", found.decode)):
                values |= {f"{phase}_{term}": getattr(time, term) for term in TERMS}
        yield Measured(config, values, 1, DEFINITIONS, kind="analytic")


def devices(config: Config) -> int:
    """Nothing runs on a device."""
    return 1


def table(rows: Sequence[Row]) -> Table:
    """The layouts over which the models can be split."""
    lines = []
    for row in rows:
        config, values = row["config"], row["values"]
        if values["weights_bytes"] is None:
            continue
        cells = (
            config["model"],
            config["gpus"],
            "x".join(map(str, config["layout"])),
            number(config["rows"]),
            number(values["fits"]),
            number(values["weights_bytes"] / GIB),
            number(values["kv_tokens_left"]),
            number(values["prefill_tokens_per_s"]),
            number(values["decode_total_s"] * 1e3),
            number(values["decode_bubble_s"] * 1e3),
        )
        lines.append(tuple(Cell(cell, row["kind"]) for cell in cells))
    return Table(
        caption="Layouts (pipeline x tensor x expert): room for tokens and least times.",
        columns=(
            *("model", "GPUs", "layout", "rows", "fits", "weights, GiB a device", "tokens left"),
            *("prefill, tokens/s", "decode step, ms", "of it bubble, ms"),
        ),
        rows=tuple(lines),
        notes=(
            "Roofline of the vendors' peaks, experts taken evenly, no latency: real steps are "
            "longer, those with many collectives most.",
            *provenance(rows),
        ),
        numeric=frozenset(range(3, 10)),
    )


PARALLELISM = Experiment(
    name="parallelism",
    summary="layouts of a number of GPUs: room for tokens and predicted times, on no device",
    configs=configs,
    run=run,
    devices=devices,
    sources=("jinfire", "sharding", "experiments/parallelism.py"),
    tables={"parallelism": table},
)
