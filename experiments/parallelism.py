"""Layouts against each other: bounds of their times, what they compile to, and their tokens.

The bounds are those of the roofline, from the vendors' peaks, and run on no device. What a layout
compiles to is the whole step at full size for GPUs that are not there: its temporary memory, its
collectives. Tokens are those of small models of the same architectures on virtual devices, beside a
single device's.
"""

import dataclasses
import math
import sys
from collections.abc import Iterator, Sequence

from tqdm import tqdm

import jinfire as jf
from experiments.harness import Config, Experiment, Measured, Options, Row
from experiments.models import MODELS as SMALL_MODELS
from experiments.tables import Cell, Table, number, provenance
from experiments.workloads import random_prompts

GIB = 2**30
Layout = tuple[int, int, int]
BOUNDS, COMPILED, TOKENS = "bounds", "compiled", "tokens"


@dataclasses.dataclass(frozen=True)
class ParallelismConfig:
    """One layout (pipeline, tensor, expert), or one of prefill and one of decode for tokens.

    `gpus` is empty for tokens, which are those of float32 on virtual devices.
    """

    measure: str
    model: str
    layout: Layout
    gpus: str = ""
    decode: Layout | None = None
    rows: int = 8
    context: int = 8192
    chunk: int = 1024
    dtype: str = "bfloat16"


BOUND_MODELS = {
    ("kimi-k2.5", "8xH100"): (8, 64),
    ("llama-4-scout", "8xH100"): (8, 64),
    ("llama-3.1-8b", "4xH100"): (8, 64),
}


# At full size a layout takes minutes to compile: those that use each axis, and two together.
COMPILED_MODELS = {
    ("llama-3.1-8b", "4xH100"): ((1, 4, 1), (2, 2, 1), (4, 1, 1)),
    ("llama-4-scout", "8xH100"): ((1, 8, 1), (1, 1, 8), (2, 4, 1), (1, 2, 4)),
    ("kimi-k2.5", "8xH100"): ((1, 8, 1), (1, 1, 8), (2, 4, 1), (1, 4, 2)),
}

# Of four devices each side, so that every axis and every pair of them is split on either side.
FOUR = ((1, 1, 4), (1, 2, 2), (1, 4, 1), (2, 1, 2), (2, 2, 1), (4, 1, 1))
# 4-bit experts of width 32 are one group of values, which no tensor axis splits; Qwen3-MoE has
# three layers.
TOKEN_MODELS = {
    "golden_llama4": FOUR,
    "golden_kimi_k25": tuple(layout for layout in FOUR if layout[1] == 1),
    "golden_qwen3_moe": tuple(layout for layout in FOUR if layout[0] <= 3),
}


def layouts(count: int) -> list[Layout]:
    """Every (pipeline, tensor, expert) of so many devices."""
    sizes = [size for size in range(1, count + 1) if count % size == 0]
    return [(p, t, e) for p in sizes for t in sizes for e in sizes if p * t * e == count]


def configs(smoke: bool) -> list[ParallelismConfig]:
    if smoke:
        return [
            *_bounds({("llama-3.1-8b", "4xH100"): (8,)}),
            ParallelismConfig(TOKENS, "golden_qwen3_moe", (1, 1, 2), decode=(2, 1, 1)),
        ]
    compiled = [
        ParallelismConfig(COMPILED, model, layout, gpus)
        for (model, gpus), chosen in COMPILED_MODELS.items()
        for layout in chosen
    ]
    tokens = [
        ParallelismConfig(TOKENS, model, prefill, decode=decode, dtype="float32")
        for model, chosen in TOKEN_MODELS.items()
        for prefill, decode in zip(chosen, (*chosen[1:], chosen[0]), strict=True)
    ]
    return [*_bounds(BOUND_MODELS), *compiled, *tokens]


def _bounds(models: dict[tuple[str, str], tuple[int, ...]]) -> list[ParallelismConfig]:
    return [
        ParallelismConfig(BOUNDS, model, layout, gpus, rows=rows)
        for (model, gpus), batches in models.items()
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


COMPILED_DEFINITIONS = {
    "weights_bytes": "weights of one device, copies and padding included",
    "compile_s": "the longer of tracing and compiling the prefill and the decode step",
    **{
        f"{phase}_{name}": f"{text} of {what}"
        for phase, what in (
            ("prefill", "a prefill dispatch, a chunk for every stage"),
            ("decode", "a decode step of all rows, a dispatch's over its steps"),
        )
        for name, text in (
            ("temp_bytes", "temporary memory of one device"),
            ("collectives", "collectives that a device takes part in"),
            ("sent_bytes", "bytes that a device puts on its links, in a ring,"),
            ("by_kind", "the same bytes by kind of collective and devices of a group"),
            ("bound_sent_bytes", "those bytes as the roofline predicts them,"),
        )
    },
}
TOKEN_DEFINITIONS = {
    "identical": "token ids of all requests equal to those of the single-device engine",
    "compared_tokens": "output tokens compared",
    "compiled_after_warm_up": "programs compiled in a second round",
}


def run(todo: Sequence[ParallelismConfig], options: Options) -> Iterator[Measured]:
    measures = {BOUNDS: _bound, COMPILED: _compile}
    references: dict[str, list[list[int]]] = {}
    for config in tqdm(todo, desc="parallelism", unit="row", file=sys.stderr, disable=None):
        if config.measure == TOKENS:
            yield _compare_tokens(config, options, references)
        else:
            yield measures[config.measure](config)


def _plan(config: ParallelismConfig, verify: bool) -> jf.Plan:
    return jf.plan(
        config.model,
        config.gpus,
        layout=config.layout,
        dtype=config.dtype,
        verify=verify,
        rows=config.rows,
        context=config.context,
        chunk=config.chunk,
    )


def _bound(config: ParallelismConfig) -> Measured:
    plan = _plan(config, verify=False)
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
    return Measured(config, values, 1, DEFINITIONS, kind="analytic")


def _compile(config: ParallelismConfig) -> Measured:
    found = _plan(config, verify=True).chosen
    assert found is not None, "configs name layouts that the models can be split over"
    assert found.compiled is not None
    compiled, steps = found.compiled, found.load.steps
    values: dict[str, object] = {
        "weights_bytes": compiled.weights_bytes,
        "compile_s": max(compiled.prefill_s, compiled.decode_s),
    }
    for phase, temp, ran, dispatches, time in (
        ("prefill", compiled.prefill_temp_bytes, compiled.prefill_collectives, 1, found.prefill),
        ("decode", compiled.decode_temp_bytes, compiled.decode_collectives, steps, found.decode),
    ):
        values |= {
            f"{phase}_temp_bytes": temp,
            f"{phase}_collectives": sum(each.count for each in ran) / dispatches,
            f"{phase}_sent_bytes": sum(each.sent_bytes for each in ran) / dispatches,
            f"{phase}_by_kind": {
                f"{each.kind} of {each.devices}": each.sent_bytes / dispatches for each in ran
            },
            f"{phase}_bound_sent_bytes": time.tick.link_bytes * time.microbatches,
        }
    return Measured(config, values, 1, COMPILED_DEFINITIONS, kind="analytic")


LENGTHS = (1, 3, 4, 5, 9, 16, 17, 25, 33)
TOKENS_EACH = 8


def _compare_tokens(
    config: ParallelismConfig, options: Options, references: dict[str, list[list[int]]]
) -> Measured:
    """Tokens of one placement, twice: the second round finds the prefixes of the first."""
    if config.model not in references:
        single = _engine(config, options, jf.Placement.colocated((1, 1)))
        references[config.model] = _tokens(single, config)
    reference = references[config.model]
    engine = _engine(config, options, _placement(config))
    first = _tokens(engine, config)
    compiled = engine.stats()["compile_count"]
    identical = first == reference and _tokens(engine, config) == reference
    return Measured(
        config=config,
        values={
            "identical": identical,
            "compared_tokens": 2 * sum(map(len, reference)),
            "compiled_after_warm_up": engine.stats()["compile_count"] - compiled,
        },
        n=1,
        definitions=TOKEN_DEFINITIONS,
        placement=str(_placement(config)),
        model_sha256=SMALL_MODELS[config.model].sha256(options),
    )


def _placement(config: ParallelismConfig) -> jf.Placement:
    assert config.decode is not None
    return jf.Placement.disaggregated(prefill=config.layout, decode=config.decode)


def _engine(config: ParallelismConfig, options: Options, placement: jf.Placement) -> jf.Engine:
    return jf.Engine.from_pretrained(
        SMALL_MODELS[config.model].path(options),
        dtype="float32",
        placement=placement,
        config=jf.EngineConfig(
            page_size=4,
            max_rows=4,
            max_context=56,
            row_buckets=(),
            context_buckets=(),
            prefill_shapes=((2, 16),),
            decode_steps=3,
        ),
    )


def _tokens(engine: jf.Engine, config: ParallelismConfig) -> list[list[int]]:
    prompts = random_prompts(LENGTHS, 0, SMALL_MODELS[config.model].vocab_size)
    params = jf.SamplingParams(max_tokens=TOKENS_EACH, temperature=0.0, ignore_eos=True)
    return [list(out.token_ids) for out in engine.generate(prompts, params)]


def devices(config: Config) -> int:
    """Only tokens run on devices."""
    return _placement(config).num_devices if config.measure == TOKENS else 1


def _of(rows: Sequence[Row], measure: str) -> list[Row]:
    return [row for row in rows if row["config"]["measure"] == measure]


def bounds_table(rows: Sequence[Row]) -> Table:
    """The layouts over which the models can be split."""
    rows, lines = _of(rows, BOUNDS), []
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


def compiled_table(rows: Sequence[Row]) -> Table:
    """What the full-size steps of the layouts send, beside what the roofline says."""
    rows, lines = _of(rows, COMPILED), []
    for row in rows:
        config, values = row["config"], row["values"]
        cells = [config["model"], config["gpus"], "x".join(map(str, config["layout"]))]
        for phase in ("prefill", "decode"):
            cells += [
                number(values[f"{phase}_temp_bytes"] / 2**20),
                number(values[f"{phase}_collectives"]),
                number(values[f"{phase}_sent_bytes"] / 1e6),
                number(values[f"{phase}_bound_sent_bytes"] / 1e6),
            ]
        lines.append(tuple(Cell(cell, row["kind"]) for cell in cells))
    columns = ("temp, MiB", "collectives", "sent, MB", "of the roofline")
    return Table(
        caption="Layouts compiled at full size: memory beside weights and pages, and collectives.",
        columns=(
            *("model", "GPUs", "layout"),
            *(f"prefill {name}" for name in columns),
            *(f"decode {name}" for name in columns),
        ),
        rows=tuple(lines),
        notes=(
            "Of one device; a prefill dispatch is a chunk of 1,024 tokens for every stage, a "
            "decode step one of 8 rows. Bytes are those of ring algorithms.",
            *provenance(rows),
        ),
        numeric=frozenset(range(3, 11)),
    )


def tokens_table(rows: Sequence[Row]) -> Table:
    """Tokens of small models on unequal layouts of prefill and decode."""
    rows = _of(rows, TOKENS)
    lines = [
        tuple(
            Cell(cell, row["kind"])
            for cell in (
                row["config"]["model"],
                row["placement"],
                number(row["values"]["identical"]),
                number(row["values"]["compared_tokens"]),
                number(row["values"]["compiled_after_warm_up"]),
            )
        )
        for row in rows
    ]
    return Table(
        caption="Tokens on pipeline x tensor x expert layouts against a single device (float32).",
        columns=("model", "placement", "identical", "tokens compared", "compiled late"),
        rows=tuple(lines),
        notes=(
            "Random weights of the architectures at reduced size; prompts of 1 to 33 tokens.",
            *provenance(rows),
        ),
        numeric=frozenset((3, 4)),
    )


PARALLELISM = Experiment(
    name="parallelism",
    summary="layouts: bounds of their times, memory and collectives as compiled, and their tokens",
    configs=configs,
    run=run,
    devices=devices,
    sources=("jinfire", "sharding", "pallas_kernels", "experiments/parallelism.py"),
    tables={
        "parallelism": bounds_table,
        "parallelism_compiled": compiled_table,
        "parallelism_tokens": tokens_table,
    },
    compiles_for_gpus=True,
)
