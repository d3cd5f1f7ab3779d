"""Placements x prompts: are the tokens those of one device, and what does the handoff cost?

For every placement and prompt: token identity with the single-device engine, KV bytes handed over,
TTFT, time per token, and the gap between decode steps while other requests are prefilled. Times on
virtual CPU devices share a few cores: they show the order of things, not the speed of a mesh.
"""

import dataclasses
import itertools
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from tqdm import tqdm

import jinfire as jf
from experiments.harness import (
    Config,
    Estimate,
    Experiment,
    Measured,
    Options,
    Row,
    median,
    product,
)
from experiments.models import MODELS
from experiments.tables import Cell, Table, estimate, number, provenance
from experiments.workloads import random_prompts

Layout = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class DisaggregationConfig:
    """One placement and one prompt. `decode=None` is colocated on the prefill layout.

    `prompt` is a text, or None for `prompt_tokens` random ids. The gap is seen by one request that
    decodes `gap_tokens` tokens while `background` others of `background_tokens` tokens are
    prefilled one after another through the only other row; the placement's rows share that measure.
    """

    model: str
    prefill: Layout
    decode: Layout | None
    prompt: str | None = None
    prompt_tokens: int = 0
    max_tokens: int = 32
    dtype: str = "float32"
    gap_tokens: int = 96
    background: int = 6
    background_tokens: int = 448
    decode_steps: int = 4
    max_context: int = 1024
    rounds: int = 5
    seed: int = 0

    @property
    def placement(self) -> jf.Placement:
        if self.decode is None:
            return jf.Placement.colocated(self.prefill)
        return jf.Placement.disaggregated(prefill=self.prefill, decode=self.decode)


SINGLE_DEVICE = (1, 1)
TEXTS = (
    "The capital of France is",
    "A pipeline stage is idle until the first microbatch reaches it. Explain in three sentences "
    "why splitting a batch into more microbatches shortens that time, and what it costs.",
)

# SmolLM2 has 9 query heads and 3 kv heads, MLP 1536: tensor 1 or 3.
SMOLLM2_LAYOUTS = (
    (SINGLE_DEVICE, None),
    ((1, 3), None),
    (SINGLE_DEVICE, SINGLE_DEVICE),
    ((1, 3), (1, 1)),
    ((1, 1), (1, 3)),
    ((2, 1), (1, 3)),
    ((4, 1), (2, 1)),
    ((2, 3), (1, 3)),
)


def configs(smoke: bool) -> list[DisaggregationConfig]:
    if smoke:
        small = {
            "model": "golden_llama31",
            "prompt_tokens": [17, 33],
            "max_tokens": 8,
            "gap_tokens": 24,
            "background": 3,
            "background_tokens": 40,
            "max_context": 128,
            "rounds": 2,
        }
        layouts = ((SINGLE_DEVICE, None), ((2, 2), (1, 4)), ((1, 2), (2, 1)))
        return [
            config
            for prefill, decode in layouts
            for config in product(DisaggregationConfig, prefill=prefill, decode=decode, **small)
        ]
    return [
        config
        for prefill, decode in SMOLLM2_LAYOUTS
        for prompts in ({"prompt": list(TEXTS)}, {"prompt_tokens": [16, 33, 600]})
        for config in product(
            DisaggregationConfig, model="smollm2", prefill=prefill, decode=decode, **prompts
        )
    ]


DEFINITIONS = {
    "identical": "token ids equal to those of the single-device engine of the same dtype",
    "compared_tokens": "output tokens compared",
    "first_difference": "index of the first token that differs; missing when none does",
    "prompt_tokens": "prompt length in the engine's own tokens",
    "kv_bytes": "bytes of keys and values handed from the prefill to the decode mesh",
    "ttft_s": jf.RequestMetrics.definitions["ttft_s"],
    "tpot_s": jf.RequestMetrics.definitions["tpot_s"],
    "transfer_s": jf.RequestMetrics.definitions["transfer_s"],
    "gap_alone_s": "largest itl_s of a request that decodes with nothing else running",
    "gap_busy_s": "largest itl_s of that request while others are prefilled",
    "itl_alone_s": "median itl_s of a request that decodes with nothing else running",
    "itl_busy_s": "median itl_s of that request while others are prefilled",
    "bubble_fraction": "idle share of stage-ticks of the prefill and decode schedules",
    "compile_seconds": "time spent compiling, outside of every other number",
    "compiled_after_warm_up": "programs compiled after the warm-up round",
}


TIMES = ("ttft_s", "tpot_s", "transfer_s")


def run(todo: Sequence[DisaggregationConfig], options: Options) -> Iterator[Measured]:
    """One engine per placement, the single-device engine of each model and dtype first."""
    references: dict[tuple[Any, ...], list[int]] = {}
    groups = _by_engine(todo)
    with tqdm(
        total=len(todo), desc="disaggregation", unit="row", file=sys.stderr, disable=None
    ) as bar:
        for group in groups:
            _add_references(references, group, options)
        for group in groups:
            bar.set_postfix_str(str(group[0].placement))
            engine = _engine(group[0], options, group[0].placement)
            gaps = _measure_gaps(engine, group[0])
            for config in group:
                reference = references[_reference_key(config)]
                yield _measure(engine, config, reference, gaps, options)
                bar.update()
            del engine


def _by_engine(
    todo: Iterable[DisaggregationConfig],
) -> list[list[DisaggregationConfig]]:
    """Configs that can share an engine: equal but for their prompt."""

    def key(config: DisaggregationConfig) -> str:
        return repr(dataclasses.replace(config, prompt=None, prompt_tokens=0))

    ordered = sorted(todo, key=key)
    return [list(group) for _, group in itertools.groupby(ordered, key=key)]


def _engine(config: DisaggregationConfig, options: Options, placement: jf.Placement) -> jf.Engine:
    return jf.Engine.from_pretrained(
        MODELS[config.model].path(options),
        dtype=config.dtype,
        placement=placement,
        config=jf.EngineConfig(
            max_rows=2,
            max_context=config.max_context,
            decode_steps=config.decode_steps,
            prefix_caching=False,
            seed=config.seed,
        ),
    )


def _prompt(config: DisaggregationConfig) -> str | list[int]:
    if config.prompt is not None:
        return config.prompt
    vocab_size = MODELS[config.model].vocab_size
    return random_prompts([config.prompt_tokens], config.seed, vocab_size)[0]


def _greedy(max_tokens: int) -> jf.SamplingParams:
    return jf.SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


def _reference_key(config: DisaggregationConfig) -> tuple[Any, ...]:
    return (
        *(config.model, config.dtype, config.prompt, config.prompt_tokens),
        *(config.max_tokens, config.seed, config.max_context, config.decode_steps),
    )


def _add_references(
    references: dict[tuple[Any, ...], list[int]],
    group: Sequence[DisaggregationConfig],
    options: Options,
) -> None:
    wanted = {_reference_key(c): c for c in group if _reference_key(c) not in references}
    if not wanted:
        return
    engine = _engine(group[0], options, jf.Placement.colocated(SINGLE_DEVICE))
    for key, config in wanted.items():
        outs = engine.generate([_prompt(config)], _greedy(config.max_tokens))
        references[key] = list(outs[0].token_ids)


def _measure(
    engine: jf.Engine,
    config: DisaggregationConfig,
    reference: list[int],
    gaps: dict[str, Estimate],
    options: Options,
) -> Measured:
    prompt, params = _prompt(config), _greedy(config.max_tokens)
    # A first round compiles what is not compiled yet and is not measured.
    engine.generate([prompt], params)
    compiled = engine.stats()["compile_count"]
    rounds: list[dict[str, float]] = []
    tokens: list[int] = []
    kv_bytes = prompt_tokens = 0
    for _ in range(config.rounds):
        out = engine.generate([prompt], params)[0]
        tokens, kv_bytes = list(out.token_ids), out.metrics.kv_bytes
        prompt_tokens = out.metrics.prompt_tokens
        rounds.append({name: getattr(out.metrics, name) for name in TIMES})
        if tokens != reference:
            break
    stats = engine.stats()
    differing = [i for i, (a, b) in enumerate(zip(tokens, reference, strict=False)) if a != b]
    return Measured(
        config=config,
        values={
            "identical": tokens == reference,
            "compared_tokens": len(reference),
            "first_difference": differing[0] if differing else None,
            "prompt_tokens": prompt_tokens,
            "kv_bytes": kv_bytes,
            **{name: median([r[name] for r in rounds]) for name in TIMES},
            **gaps,
            "bubble_fraction": stats["bubble_fraction"],
            "compile_seconds": stats["compile_seconds"],
            "compiled_after_warm_up": stats["compile_count"] - compiled,
        },
        n=len(rounds),
        definitions=DEFINITIONS,
        placement=str(config.placement),
        model_sha256=MODELS[config.model].sha256(options),
    )


def _measure_gaps(engine: jf.Engine, config: DisaggregationConfig) -> dict[str, Estimate]:
    """Gaps between the tokens of one request: a matter of the placement, not of a prompt."""
    prompts, params = _gap_load(config)
    engine.generate(prompts, params)  # compiles
    rounds: list[dict[str, float]] = []
    for _ in range(config.rounds):
        alone = engine.generate(prompts[:1], params[:1])[0].metrics.itl_s
        busy = engine.generate(prompts, params)[0].metrics.itl_s
        rounds.append(
            {
                "gap_alone_s": max(alone),
                "gap_busy_s": max(busy),
                "itl_alone_s": median(alone).value,
                "itl_busy_s": median(busy).value,
            }
        )
    return {name: median([r[name] for r in rounds]) for name in rounds[0]}


def _gap_load(
    config: DisaggregationConfig,
) -> tuple[list[list[int]], list[jf.SamplingParams]]:
    """The watched request first; the others take turns in the second of the two rows."""
    lengths = [16, *[config.background_tokens] * config.background]
    prompts = random_prompts(lengths, config.seed + 1, MODELS[config.model].vocab_size)
    return prompts, [_greedy(config.gap_tokens), *[_greedy(2)] * config.background]


def devices(config: Config) -> int:
    """Devices that a config and its single-device reference need."""
    return config.placement.num_devices


def table(rows: Sequence[Row]) -> Table:
    lines = []
    for row in rows:
        config, values = row["config"], row["values"]
        text = config["prompt"]
        cells = (
            row["placement"],
            f"text, {values['prompt_tokens']}" if text else f"random, {values['prompt_tokens']}",
            number(values["identical"]),
            number(values["kv_bytes"]),
            estimate(values["ttft_s"], scale=1e3),
            estimate(values["tpot_s"], scale=1e3),
            estimate(values["gap_alone_s"], scale=1e3),
            estimate(values["gap_busy_s"], scale=1e3),
        )
        lines.append(tuple(Cell(cell, row["kind"]) for cell in cells))
    models = ", ".join(sorted({row["config"]["model"] for row in rows}))
    return Table(
        caption=f"Placements and prompts against the single-device engine ({models}, float32).",
        columns=(
            "placement",
            "prompt, tokens",
            "tokens identical",
            "KV bytes handed over",
            "TTFT, ms",
            "time per token, ms",
            "largest gap alone, ms",
            "largest gap under prefills, ms",
        ),
        rows=tuple(lines),
        notes=(
            "Virtual CPU devices share the cores of one machine: times compare placements only in "
            "kind. Prefix caching is off; compilation is outside of every time.",
            *provenance(rows),
        ),
        numeric=frozenset(range(3, 8)),
    )


DISAGGREGATION = Experiment(
    name="disaggregation",
    summary="placements x prompts: token identity, KV bytes, TTFT, time per token, decode gaps",
    configs=configs,
    run=run,
    devices=devices,
    sources=(
        *("jinfire", "sharding", "pallas_kernels"),
        *("experiments/disaggregation.py", "experiments/workloads.py", "experiments/models.py"),
    ),
    tables={"disaggregation": table},
)
