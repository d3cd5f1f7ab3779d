"""How many tokens of keys and values large models leave room for, beside published figures.

Weights and activations come from the whole sharded steps, compiled at full size for GPUs that are
not there: the compiler says what every device holds.
"""

import dataclasses
import itertools
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from tqdm import tqdm

import jinfire as jf
from experiments.harness import Experiment, Measured, Options, Row
from experiments.tables import Cell, Table, number, provenance

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class KVCapacityConfig:
    """One model on one layout. `layout` None is what somebody else published of theirs.

    `latents` says whether every device of a stage holds all of the latents or a part of them.
    """

    model: str
    gpus: str
    layout: tuple[int, int, int] | None
    rows: int = 8
    context: int = 8192
    chunk: int = 1024
    dtype: str = "bfloat16"
    latents: str = "replicated"
    verify: bool = True


@dataclasses.dataclass(frozen=True)
class UnweightCapacityConfig:
    """One model with weights in a form of Unweight, by formula; the layout is the planner's."""

    model: str
    gpus: str
    unweight: str
    rows: int = 8
    context: int = 8192
    chunk: int = 1024
    dtype: str = "bfloat16"


AnyConfig = KVCapacityConfig | UnweightCapacityConfig

FORMS = ("none", "palette", "compact", "huffman")


# "More than" these. Source: the Cloudflare blog on large models on Workers AI; of the rows and the
# context that they hold for nothing is said.
PUBLISHED = {
    ("kimi-k2.5", "8xH100"): {"kv_bytes_left": 30 * GIB},
    ("llama-4-scout", "2xH200"): {"kv_bytes_left": 56 * GIB, "kv_tokens_left": 1_200_000},
}


def configs(smoke: bool) -> list[AnyConfig]:
    if smoke:
        small: dict[str, Any] = {"rows": 2, "context": 1024, "chunk": 128}
        return [
            KVCapacityConfig("smollm2-135m", "1xH100", (1, 1, 1), **small, verify=False),
            KVCapacityConfig("llama-4-scout", "2xH200", (1, 2, 1), **small, verify=False),
            *(
                KVCapacityConfig(
                    "kimi-k2.5", "8xH100", (1, 8, 1), **small, verify=False, latents=latents
                )
                for latents in ("replicated", "split")
            ),
            KVCapacityConfig("llama-4-scout", "2xH200", None),
            *(UnweightCapacityConfig("smollm2-135m", "1xH100", form, **small) for form in FORMS),
        ]
    layouts = {
        ("kimi-k2.5", "8xH100"): ((1, 8, 1), (2, 4, 1), (1, 1, 8), (1, 4, 2), (4, 2, 1)),
        ("kimi-k2.5", "7xH100"): ((7, 1, 1),),
        ("kimi-k2.5", "8xH200"): ((1, 8, 1), (2, 4, 1)),
        ("llama-4-scout", "2xH200"): ((1, 2, 1), (1, 1, 2), (2, 1, 1)),
        ("llama-4-scout", "4xH100"): ((1, 4, 1),),
    }
    own = [
        KVCapacityConfig(model, gpus, layout)
        for (model, gpus), choices in layouts.items()
        for layout in choices
    ]
    split = [
        KVCapacityConfig("kimi-k2.5", "8xH100", layout, latents="split")
        for layout in ((1, 8, 1), (2, 4, 1), (1, 1, 8))
    ]
    # Scout and DeepSeek-V3 are all bfloat16 here; of Kimi's 4-bit experts only "huffman" codes
    # the values and their scales.
    coded = [
        UnweightCapacityConfig(model, gpus, form)
        for model, gpus in (
            ("llama-4-scout", "2xH200"),
            ("llama-4-scout", "4xH100"),
            ("kimi-k2.5", "8xH100"),
            ("kimi-k2.5", "8xH200"),
            ("deepseek-v3", "8xH200"),
            ("deepseek-v3", "16xH200"),
            ("deepseek-v3", "16xH100"),
        )
        for form in FORMS
    ]
    return [*own, *split, *itertools.starmap(_published, PUBLISHED), *coded]


def _published(model: str, gpus: str) -> KVCapacityConfig:
    return KVCapacityConfig(model, gpus, None, verify=False)


DEFINITIONS = {
    "fits": "weights, activations and the pools of all rows fit into every device",
    "source": "where weights and activations come from: the compiler, or a formula",
    "weights_bytes": "weights of one device, copies and padding included",
    "temp_bytes": "largest temporary memory of the prefill and the decode step, one device",
    "decode_temp_bytes": "temporary memory of the decode step, one device",
    "kv_bytes_left": "bytes left for keys and values on all devices together",
    "kv_tokens_left": "tokens of all rows that these hold, copies of heads and latents paid",
    "compile_s": "the longer of tracing and compiling the prefill and the decode step",
    "host_bytes": "most memory of the compiling process",
    "min_gpus": "least number of GPUs of which some layout fits, by formula",
    "kv_tokens_more": "tokens more than the same layout holds with dense weights",
    "decode_ms": "least time of a decode step of all rows, from peaks; decoding included",
    "decoding_temp_bytes": "what decoding writes to memory at a time, one device",
    "coded_share": "bytes of weights over those of dense ones, one device",
}


def run(todo: Sequence[AnyConfig], options: Options) -> Iterator[Measured]:
    for config in tqdm(todo, desc="kv_capacity", unit="row", file=sys.stderr, disable=None):
        if isinstance(config, UnweightCapacityConfig):
            yield _unweight(config)
        elif config.layout is None:
            values = PUBLISHED[config.model, config.gpus]
            notes = {"source": "Cloudflare blog, Workers AI: more than these"}
            yield Measured(config, values, 1, DEFINITIONS, kind="cited", notes=notes)
        else:
            yield _plan(config)


def _plan(config: KVCapacityConfig) -> Measured:
    found = jf.plan(
        config.model,
        config.gpus,
        layout=config.layout,
        dtype=config.dtype,
        latents=config.latents,
        verify=config.verify,
        rows=config.rows,
        context=config.context,
        chunk=config.chunk,
    ).chosen
    assert found is not None, "configs name layouts that the models can be split over"
    compiled = found.compiled
    return Measured(
        config=config,
        values={
            "fits": found.fits,
            "source": found.source,
            "weights_bytes": found.weights_bytes,
            "temp_bytes": found.temp_bytes,
            "decode_temp_bytes": found.decode_temp_bytes,
            "kv_bytes_left": found.kv_bytes_left,
            "kv_tokens_left": found.kv_tokens_left,
            "compile_s": max(compiled.prefill_s, compiled.decode_s) if compiled else None,
            "host_bytes": compiled.host_bytes if compiled else None,
        },
        n=1,
        definitions=DEFINITIONS,
        kind="analytic",
        placement=str(found.mesh_spec),
    )


def _unweight(config: UnweightCapacityConfig) -> Measured:
    plan = jf.plan(
        config.model,
        config.gpus,
        dtype=config.dtype,
        unweight=config.unweight,
        rows=config.rows,
        context=config.context,
        chunk=config.chunk,
    )
    found = plan.chosen
    assert found is not None, "configs name numbers of GPUs that the models can be split over"
    dense = found.dense
    return Measured(
        config=config,
        values={
            "fits": found.fits,
            "source": found.source,
            "min_gpus": plan.min_gpus,
            "weights_bytes": found.weights_bytes,
            "coded_share": found.weights_bytes / dense.weights_bytes,
            "decoding_temp_bytes": found.footprint.decoding_temp,
            "kv_bytes_left": found.kv_bytes_left,
            "kv_tokens_left": found.kv_tokens_left,
            "kv_tokens_more": found.kv_tokens_left - dense.kv_tokens_left,
            "decode_ms": found.decode.total_s * 1e3,
        },
        n=1,
        definitions=DEFINITIONS,
        kind="analytic",
        placement=str(found.mesh_spec),
        notes={"variant": plan.unweight.variant},
    )


def table(rows: Sequence[Row]) -> Table:
    rows = [row for row in rows if "unweight" not in row["config"]]
    lines = []
    for row in rows:
        config, values = row["config"], row["values"]
        cited = row["kind"] == "cited"
        bound = "> " if cited else ""
        temp = values.get("decode_temp_bytes")
        tokens = values.get("kv_tokens_left")
        cells = (
            config["model"],
            config["gpus"],
            "Infire" if cited else _layout(row),
            "yes" if cited else number(values["fits"]),
            _gib(values.get("weights_bytes")),
            _gib(temp),
            bound + _gib(values["kv_bytes_left"]),
            (bound if tokens is not None else "") + number(tokens),
        )
        lines.append(tuple(Cell(cell, row["kind"]) for cell in cells))
    return Table(
        caption="Room for keys and values of large models, from compiled steps.",
        columns=(
            "model",
            "GPUs",
            "layout",
            "fits",
            "weights, GiB a device",
            "decode temp, GiB a device",
            "left for KV, GiB in all",
            "tokens",
        ),
        rows=tuple(lines),
        notes=(
            "Infire's figures are what Cloudflare published; the rows and contexts that they hold "
            "for are not known. Ours leave 1.5 GiB of every GPU free. Latents are whole on every "
            "device of a stage, or split over them where the layout says so.",
            *provenance(rows),
        ),
        numeric=frozenset(range(4, 8)),
    )


def _layout(row: Row) -> str:
    split = row["config"].get("latents") == "split"
    return row["placement"] + (", latents split" if split else "")


def unweight_table(rows: Sequence[Row]) -> Table:
    rows = [row for row in rows if "unweight" in row["config"]]
    lines = []
    for row in rows:
        config, values = row["config"], row["values"]
        form = config["unweight"]
        cells = (
            config["model"],
            config["gpus"],
            "dense" if form == "none" else f"{form}, {row['notes']['variant']}",
            row["placement"],
            number(values["fits"]),
            number(values["min_gpus"]),
            _gib(values["weights_bytes"]),
            _gib(values["decoding_temp_bytes"]),
            number(values["kv_tokens_left"]),
            number(values["kv_tokens_more"]),
            number(values["decode_ms"]),
        )
        lines.append(tuple(Cell(cell, row["kind"]) for cell in cells))
    return Table(
        caption="GPUs and room for keys and values with weights in the forms of Unweight.",
        columns=(
            "model",
            "GPUs",
            "weights, decoded by",
            "layout",
            "fits",
            "GPUs needed",
            "weights, GiB a device",
            "temp of decoding, GiB a device",
            "tokens",
            "tokens more than dense",
            "decode step at least, ms",
        ),
        rows=tuple(lines),
        notes=(
            "From bits per weight measured on small trained models. Tokens more are those of the "
            "same layout. DeepSeek-V3 is counted in bfloat16. Of 4-bit experts only huffman codes "
            "the values and scales, which no product takes coded: they are decoded in full at "
            "every use.",
            *provenance(rows),
        ),
        numeric=frozenset(range(5, 11)),
    )


def _gib(size_bytes: float | None) -> str:
    return number(None if size_bytes is None else size_bytes / GIB)


KV_CAPACITY = Experiment(
    name="kv_capacity",
    summary="tokens of keys and values that large models leave room for, from compiled steps",
    configs=configs,
    run=run,
    sources=("jinfire", "sharding", "pallas_kernels", "experiments/kv_capacity.py"),
    tables={"kv_capacity": table, "kv_capacity_unweight": unweight_table},
    compiles_for_gpus=True,
)
