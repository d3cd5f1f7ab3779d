"""Speed and memory of the engine on one CPU device, beside its peers in the same run.

Every round runs every system once, one after another (A B C A B C ...); ratios are paired by
round. The peers run at their best setting, found before the rounds: threads for one request and
for prefill, batch size or parallel slots for many.
"""

import dataclasses
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tqdm import tqdm

from experiments.harness import (
    Config,
    Experiment,
    Measured,
    Options,
    Row,
    file_sha256,
    median,
    paired_ratio,
    product,
)
from experiments.models import MODELS
from experiments.systems import System, bf16_gguf, running
from experiments.tables import Cell, Table, estimate, number, provenance
from experiments.workloads import mooncake_mix, random_prompts

DECODE, PREFILL, RAGGED, HOST, MEMORY = "decode", "prefill", "ragged", "host", "memory"
MANY = (8, 16, 32)
SHORT_TOKENS = 8


@dataclasses.dataclass(frozen=True)
class SpeedConfig:
    """One measure at one dtype. Peers: "hf" in the same dtype, "llama" always bfloat16.

    `context` and `tokens` are the prompt and output lengths of one request, `requests` the number
    of ragged ones, `rows` the engine's decode rows, `mix` where ragged lengths come from.
    """

    measure: str
    dtype: str
    model: str = "smollm2"
    context: int = 128
    tokens: int = 65
    requests: int = 1
    rows: int = 1
    max_context: int = 1024
    decode_steps: int = 4
    mix: str = ""
    peers: tuple[str, ...] = ("hf", "llama")
    rounds: int = 5
    seed: int = 0


def configs(smoke: bool) -> list[SpeedConfig]:
    dtypes = ["float32"] if smoke else ["bfloat16", "float32"]
    common: dict[str, Any] = {"dtype": dtypes}
    if smoke:
        common |= {"model": "golden_llama31", "max_context": 128, "rounds": 2, "peers": ()}
    one = {"context": 24, "tokens": 9} if smoke else {}
    prompt = {"context": 64 if smoke else 512, "tokens": 1}
    many = {"requests": 8 if smoke else 64, "rows": 4 if smoke else 32, "mix": "mooncake"}
    eight = {"rows": 8, "requests": 8, "context": 32, "tokens": 24 if smoke else 136}
    alone = common | {"peers": ()}
    resident = [4] if smoke else [8, 64]  # decode rows that the page pools are sized for
    return [
        *product(SpeedConfig, measure=DECODE, **common, **one),
        *product(SpeedConfig, measure=PREFILL, **common, **prompt),
        *product(SpeedConfig, measure=RAGGED, **(common | {"dtype": dtypes[:1]}), **many),
        *product(SpeedConfig, measure=HOST, **alone, **eight),
        *product(SpeedConfig, measure=MEMORY, **alone, rows=resident, **(one or {"tokens": 33})),
    ]


def adapt(config: SpeedConfig, options: Options) -> SpeedConfig:
    """Lengths from the caller's own trace are another config."""
    if config.measure != RAGGED or options.trace is None:
        return config
    return dataclasses.replace(config, mix=f"trace {file_sha256(options.trace)[:16]}")


DEFINITIONS = {
    "jinfire_tok_s": "tokens per second of this engine, one device",
    "hf_tok_s": "tokens per second of Hugging Face transformers, same dtype, best setting",
    "llama_tok_s": "tokens per second of llama.cpp, bfloat16 GGUF, best setting",
    "ratio_hf": "jinfire_tok_s / hf_tok_s, median over rounds of the ratio of one round",
    "ratio_llama": "jinfire_tok_s / llama_tok_s, median over rounds of the ratio of one round",
    "step_s": "wall time of one decode step of all rows",
    "host_share": "time of the engine's loop outside waits for the device, over wall time; "
    "difference of a long and a short run, so that only decode steps are left",
    "thread_share": "processor time of the engine's thread over wall time, same difference",
    "peak_rss_bytes": "largest resident size of the process, load and compilation included",
    "import_rss_bytes": "resident size after importing, before loading",
    "weight_bytes": "bytes of the weights on the device",
    "kv_pool_bytes": "bytes of the page pools on the device",
    "rss_ratio": "peak_rss_bytes / (weight_bytes + kv_pool_bytes)",
    "compiled_after_warm_up": "programs compiled during the measured rounds",
}
MEANING = {
    DECODE: "(output tokens - 1) / time from the first output token to the last, one request",
    PREFILL: "prompt tokens / time from prompt to first token, one request",
    RAGGED: "output tokens of all requests / time from the first to the end of the last",
}

# The bars of the project: at least this many times the peer, at most this share.
TARGETS = {
    (DECODE, "hf"): 1.5,
    (DECODE, "llama"): 0.8,
    (RAGGED, "hf"): 2.0,
    (RAGGED, "llama"): 1.0,
    (PREFILL, "hf"): 0.5,
    (PREFILL, "llama"): 2.0,
}
HOST_TARGET, RSS_TARGET = 0.05, 1.5


def run(todo: Sequence[SpeedConfig], options: Options) -> Iterator[Measured]:
    """One comparison after another; each has processes of its own."""
    with tqdm(
        total=len(todo), desc="engine_speed", unit="row", file=sys.stderr, disable=None
    ) as bar:
        for config in todo:
            bar.set_postfix_str(f"{config.measure} {config.dtype}")
            with running(config.peers, options) as systems:
                _load(systems, config, options)
                yield MEASURES[config.measure](systems, config, options)
            bar.update()


def _load(systems: Mapping[str, System], config: SpeedConfig, options: Options) -> None:
    path = MODELS[config.model].path(options)
    cores = os.cpu_count() or 1
    systems["jinfire"].ask(
        "load",
        model=str(path),
        dtype=config.dtype,
        config={
            "max_rows": config.rows,
            "max_context": config.max_context,
            "decode_steps": config.decode_steps,
        },
        # Which shapes a ragged run meets depends on timing, so all are compiled before it.
        warmup=config.measure == RAGGED,
    )
    if "hf" in systems:
        systems["hf"].ask("load", model=str(path), dtype=config.dtype, threads=cores)
    if "llama" in systems:
        gguf = bf16_gguf(path, options)
        systems["llama"].ask("load", model=str(gguf), threads=cores, context=config.max_context)


def _prompts(config: SpeedConfig, lengths: Sequence[int], round_index: int) -> list[list[int]]:
    """Prompts that no other round has seen."""
    seed = config.seed * 1_000_003 + round_index + 1
    return random_prompts(lengths, seed, MODELS[config.model].vocab_size)


def _one_request(systems: Mapping[str, System], config: SpeedConfig, options: Options) -> Measured:
    arguments = {"tokens": config.tokens} if config.measure == DECODE else {}
    prompt = _prompts(config, [config.context], -1)[0]

    def speed(system: System, prompt: list[int]) -> tuple[float, dict[str, Any]]:
        answer = system.ask(config.measure, prompt=prompt, **arguments)
        if config.measure == DECODE:
            return answer["steps"] / answer["decode_s"], answer
        return len(prompt) / answer["prefill_s"], answer

    settings = {}
    for name, system in systems.items():
        speed(system, prompt)
        if name == "jinfire":
            continue
        tried = {}
        for threads in range(1, (os.cpu_count() or 1) + 1):
            system.ask("threads", threads=threads)
            tried[threads] = max(speed(system, prompt)[0] for _ in range(3))
        best = max(tried, key=tried.__getitem__)
        system.ask("threads", threads=best)
        settings[name] = {"threads": best, "tried": tried}
    answers: list[dict[str, dict[str, Any]]] = []
    speeds: dict[str, list[float]] = {name: [] for name in systems}
    compiled = systems["jinfire"].ask("info")["compile_count"]
    for index in tqdm(
        range(config.rounds), desc="rounds", file=sys.stderr, disable=None, leave=False
    ):
        prompt = _prompts(config, [config.context], index)[0]
        answers.append({})
        for name, system in systems.items():
            tok_s, answers[-1][name] = speed(system, prompt)
            speeds[name].append(tok_s)
    agree = {
        name: [_leading(r["jinfire"]["token_ids"], r[name]["token_ids"]) for r in answers]
        for name in systems
        if name != "jinfire"
    }
    return _compared(
        systems, config, options, speeds, compiled, {"settings": settings, "leading_equal": agree}
    )


def _leading(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """How many leading tokens are equal."""
    for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if a != b:
            return index
    return len(ours)


def _ragged(systems: Mapping[str, System], config: SpeedConfig, options: Options) -> Measured:
    trace = options.trace if config.mix.startswith("trace") else None
    lengths = mooncake_mix(config.requests, config.max_context, config.seed, trace)
    inputs, outputs = [i for i, _ in lengths], [o for _, o in lengths]
    setting_name = {"hf": "batch", "llama": "slots"}

    # Settings are searched on all prompts with a quarter of each answer.
    quarter = [max(1, length // 4) for length in outputs]

    def speed(system: System, index: int, wanted: list[int] = outputs, **setting: int) -> float:
        prompts = _prompts(config, inputs, index)
        answer = system.ask(RAGGED, prompts=prompts, outputs=wanted, **setting)
        counts = [len(ids) for ids in answer["token_ids"]]
        if counts != wanted:
            raise ValueError(f"{system.name}: expected {wanted} output tokens, got {counts}")
        return sum(wanted) / answer["wall_s"]

    settings: dict[str, dict[str, Any]] = {}
    speed(systems["jinfire"], -1)
    for name, system in systems.items():
        if name == "jinfire":
            continue
        tried = {}
        for size in tqdm(
            MANY, desc=f"best setting of {name}", file=sys.stderr, disable=None, leave=False
        ):
            tried[size] = speed(system, -1, quarter, **{setting_name[name]: size})
        best = max(tried, key=tried.__getitem__)
        settings[name] = {"threads": os.cpu_count(), setting_name[name]: best, "tried": tried}
    speeds: dict[str, list[float]] = {name: [] for name in systems}
    compiled = systems["jinfire"].ask("info")["compile_count"]
    for index in tqdm(
        range(config.rounds), desc="rounds", file=sys.stderr, disable=None, leave=False
    ):
        for name, system in systems.items():
            setting = setting_name.get(name)
            chosen = {setting: settings[name][setting]} if setting else {}
            speeds[name].append(speed(system, index, **chosen))
    workload = {"input_tokens": sum(inputs), "output_tokens": sum(outputs), "lengths": lengths}
    return _compared(
        systems, config, options, speeds, compiled, {"settings": settings, "workload": workload}
    )


def _compared(
    systems: Mapping[str, System],
    config: SpeedConfig,
    options: Options,
    speeds: Mapping[str, Sequence[float]],
    compiled: int,
    notes: Mapping[str, Any],
) -> Measured:
    info = {name: system.ask("info") for name, system in systems.items()}
    values: dict[str, Any] = {f"{name}_tok_s": median(rounds) for name, rounds in speeds.items()}
    for name in config.peers:
        values[f"ratio_{name}"] = paired_ratio(speeds["jinfire"], speeds[name])
    values["compiled_after_warm_up"] = info["jinfire"]["compile_count"] - compiled
    meaning = MEANING[config.measure]
    definitions = {
        name: f"{text}: {meaning}" if name.endswith("_tok_s") else text
        for name, text in DEFINITIONS.items()
        if name in values
    }
    return _measured(
        config, options, values, definitions, {**notes, "systems": info, "rounds": speeds}
    )


def _host(systems: Mapping[str, System], config: SpeedConfig, options: Options) -> Measured:
    engine = systems["jinfire"]
    arguments = {"short": SHORT_TOKENS, "long": config.tokens}
    lengths = [config.context] * config.requests
    engine.ask(HOST, prompts=_prompts(config, lengths, -1), **arguments)
    compiled = engine.ask("info")["compile_count"]
    answers = [
        engine.ask(HOST, prompts=_prompts(config, lengths, index), **arguments)
        for index in tqdm(
            range(config.rounds), desc="rounds", file=sys.stderr, disable=None, leave=False
        )
    ]
    info = engine.ask("info")
    values = {
        "step_s": median([a["wall_s"] / a["steps"] for a in answers]),
        "host_share": median([a["host_s"] / a["wall_s"] for a in answers]),
        "thread_share": median([a["thread_s"] / a["wall_s"] for a in answers]),
        "compiled_after_warm_up": info["compile_count"] - compiled,
    }
    return _measured(config, options, values, DEFINITIONS, {"systems": {"jinfire": info}})


def _memory(systems: Mapping[str, System], config: SpeedConfig, options: Options) -> Measured:
    """A fresh process that loads, compiles, prefills and decodes; `rounds` do not matter."""
    engine = systems["jinfire"]
    for index in range(2):
        prompts = _prompts(config, [config.context] * config.rows, index)
        engine.ask(RAGGED, prompts=prompts, outputs=[config.tokens] * config.rows)
    info = engine.ask("info")
    names = ("peak_rss_bytes", "import_rss_bytes", "weight_bytes", "kv_pool_bytes")
    values = {name: info[name] for name in names}
    resident = info["weight_bytes"] + info["kv_pool_bytes"]
    values["rss_ratio"] = info["peak_rss_bytes"] / resident if resident else math.nan
    return dataclasses.replace(
        _measured(config, options, values, DEFINITIONS, {"systems": {"jinfire": info}}), n=1
    )


def _measured(
    config: SpeedConfig,
    options: Options,
    values: Mapping[str, Any],
    definitions: Mapping[str, str],
    notes: Mapping[str, Any],
) -> Measured:
    return Measured(
        config=config,
        values=values,
        n=config.rounds,
        definitions={name: definitions[name] for name in values},
        placement="colocated pipeline 1 x tensor 1",
        model_sha256=MODELS[config.model].sha256(options),
        notes=notes,
    )


MEASURES = {
    DECODE: _one_request,
    PREFILL: _one_request,
    RAGGED: _ragged,
    HOST: _host,
    MEMORY: _memory,
}
TITLES = {
    DECODE: "decode, one request, context {context}",
    PREFILL: "prefill, {context} tokens",
    RAGGED: "{requests} ragged requests, output",
}


def speed_table(rows: Sequence[Row]) -> Table:
    """Tokens per second and ratios, one line a measure and dtype."""
    rows = [row for row in rows if row["config"]["measure"] in TITLES]
    lines = []
    for row in rows:
        config, values = row["config"], row["values"]
        measure = config["measure"]
        cells = [TITLES[measure].format(**config), config["dtype"]]
        cells += [estimate(values.get(f"{name}_tok_s")) for name in ("jinfire", "hf", "llama")]
        for peer in ("hf", "llama"):
            bar = f" (≥ {TARGETS[measure, peer]})" if f"ratio_{peer}" in values else ""
            cells.append(estimate(values.get(f"ratio_{peer}")) + bar)
        lines.append(tuple(Cell(cell, row["kind"]) for cell in cells))
    return Table(
        caption="Tokens per second beside Hugging Face transformers and llama.cpp, same run.",
        columns=(
            "measure",
            "dtype",
            "jinfire, tok/s",
            "transformers, tok/s",
            "llama.cpp bf16, tok/s",
            "× transformers (bar)",
            "× llama.cpp (bar)",
        ),
        rows=tuple(lines),
        notes=(
            "Peers at their best number of threads, batch size or parallel slots; prompts are "
            "unique, prefix caching is off, output lengths are fixed, compilation is outside.",
            *provenance(rows),
        ),
        numeric=frozenset(range(2, 7)),
    )


def cost_table(rows: Sequence[Row]) -> Table:
    """Host share of a decode step, and peak memory."""
    rows = [row for row in rows if row["config"]["measure"] in (HOST, MEMORY)]
    lines = []
    for row in rows:
        config, values = row["config"], row["values"]
        if config["measure"] == HOST:
            entries = (
                (f"decode step of {config['rows']} rows, ms", estimate(values["step_s"], 3, 1e3)),
                (f"host share, % (≤ {HOST_TARGET:.0%})", estimate(values["host_share"], 3, 100)),
            )
        else:
            size = f"{config['rows']} rows of {config['max_context']} tokens"
            entries = (
                (f"{size}: peak resident, GB", number(values["peak_rss_bytes"] / 1e9)),
                (f"{size}: resident after imports, GB", number(values["import_rss_bytes"] / 1e9)),
                (f"{size}: weights, GB", number(values["weight_bytes"] / 1e9)),
                (f"{size}: page pools, GB", number(values["kv_pool_bytes"] / 1e9)),
                (f"{size}: peak / (weights + pools) (≤ {RSS_TARGET})", number(values["rss_ratio"])),
            )
        for name, text in entries:
            cells = (name, config["dtype"], text)
            lines.append(tuple(Cell(cell, row["kind"]) for cell in cells))
    return Table(
        caption="Work outside the device program, and memory.",
        columns=("measure", "dtype", "value"),
        rows=tuple(lines),
        notes=provenance(rows),
        numeric=frozenset({2}),
    )


def devices(config: Config) -> int:
    """The engine runs in a process of its own, on one device."""
    return 1


ENGINE_SPEED = Experiment(
    name="engine_speed",
    summary="one request, ragged requests, prefill, host work, memory; beside HF and llama.cpp",
    configs=configs,
    run=run,
    devices=devices,
    adapt=adapt,
    sources=(
        *("jinfire", "sharding", "pallas_kernels", "experiments/peers"),
        *("experiments/engine_speed.py", "experiments/engine_worker.py", "experiments/systems.py"),
        *("experiments/workloads.py", "experiments/models.py"),
    ),
    tables={"engine_speed": speed_table, "engine_cost": cost_table},
)
