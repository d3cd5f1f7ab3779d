"""The handoff with and without the KV codec, on keys and values of a trained model.

Of every prompt: are the tokens the same, how many bytes cross, and how many would an ideal code of
the exponents need. Times on virtual CPU devices, whose copies are memory copies, are no measure of
a link: they say what coding costs on a processor.
"""

import dataclasses
import sys
from collections.abc import Iterator, Sequence

import numpy as np
from tqdm import tqdm

import jinfire as jf
from experiments.harness import (
    ROOT,
    Config,
    Experiment,
    Measured,
    Options,
    Row,
    median,
    product,
)
from experiments.models import MODELS
from experiments.tables import Cell, Table, estimate, number, provenance

Layout = tuple[int, int]

# SplitZip codes bfloat16 keys and values between a prefill and a decode GPU: 16 bits in so many.
CITED = "SplitZip"
CITED_RATIO = 1.324


@dataclasses.dataclass(frozen=True)
class KVCodecConfig:
    """One pair of layouts and a prompt: the first tokens of this project's licence.

    `model` SplitZip is what others published.
    """

    model: str
    prefill: Layout
    decode: Layout
    dtype: str = "bfloat16"
    prompt_tokens: int = 512
    max_tokens: int = 32
    rounds: int = 5


def configs(smoke: bool) -> list[KVCodecConfig]:
    if smoke:
        return product(
            KVCodecConfig,
            model="golden_llama31",
            prefill=(2, 2),
            decode=(1, 4),
            dtype=["float32", "bfloat16"],
            prompt_tokens=64,
            max_tokens=8,
            rounds=2,
        )
    return [
        *product(
            KVCodecConfig,
            model="smollm2",
            prefill=(1, 1),
            decode=(1, 1),
            prompt_tokens=[16, 64, 512],
        ),
        *product(
            KVCodecConfig,
            model="smollm2",
            prefill=(2, 1),
            decode=(1, 3),
            dtype=["bfloat16", "float32"],
        ),
        KVCodecConfig(CITED, (1, 1), (1, 1), prompt_tokens=0, max_tokens=0),
    ]


DEFINITIONS = {
    "identical": "token ids with the codec equal those without",
    "kv_bytes": jf.DEFINITIONS["kv_bytes"],
    "kv_bytes_sent": jf.DEFINITIONS["kv_bytes_sent"],
    "bits_per_value": "bits in which a value crosses",
    "ideal_bits_per_value": "entropy of the exponents, each head of each layer by itself, and the "
    "other bits as they are",
    "escape_share": "values whose exponent is none of the 7 most frequent of their head and layer",
    "overfull": "handoffs that had to send all exponents",
    "transfer_s": f"{jf.DEFINITIONS['transfer_s']}; with the codec",
    "plain_transfer_s": "transfer_s without the codec",
}


def run(todo: Sequence[KVCodecConfig], options: Options) -> Iterator[Measured]:
    for config in tqdm(todo, desc="kv_codec", unit="row", file=sys.stderr, disable=None):
        if config.model == CITED:
            values = {"bits_per_value": 16 / CITED_RATIO}
            yield Measured(config, values, 1, DEFINITIONS, kind="cited")
        else:
            yield _measure(config, options)


def _measure(config: KVCodecConfig, options: Options) -> Measured:
    runs = []
    for codec in ("none", "unweight"):
        engine = _engine(config, options, codec)
        prompt = _prompt(config, engine)
        params = jf.SamplingParams(max_tokens=config.max_tokens, temperature=0.0, ignore_eos=True)
        engine.generate([prompt], params)  # compiles
        outputs = [engine.generate([prompt], params)[0] for _ in range(config.rounds)]
        runs.append((engine, outputs))
    (plain_engine, plain), (engine, coded) = runs
    metrics = coded[-1].metrics
    entropy, escapes = _exponents(plain_engine.pages())
    value_bits = {"bfloat16": 16, "float32": 32}[config.dtype]
    return Measured(
        config=config,
        values={
            "identical": {tuple(each.token_ids) for each in coded}
            == {tuple(each.token_ids) for each in plain},
            "kv_bytes": metrics.kv_bytes,
            "kv_bytes_sent": metrics.kv_bytes_sent,
            "bits_per_value": value_bits * metrics.kv_bytes_sent / metrics.kv_bytes,
            "ideal_bits_per_value": value_bits - 8 + entropy,
            "escape_share": escapes,
            "overfull": engine.stats()["kv_overfull"],
            "transfer_s": median([each.metrics.transfer_s for each in coded]),
            "plain_transfer_s": median([each.metrics.transfer_s for each in plain]),
        },
        n=config.rounds,
        definitions=DEFINITIONS,
        placement=str(engine.placement),
        model_sha256=MODELS[config.model].sha256(options),
    )


def _engine(config: KVCodecConfig, options: Options, codec: str) -> jf.Engine:
    return jf.Engine.from_pretrained(
        MODELS[config.model].path(options),
        dtype=config.dtype,
        placement=jf.Placement.disaggregated(config.prefill, config.decode, codec),
        config=jf.EngineConfig(
            max_rows=1,
            max_context=max(64, config.prompt_tokens + config.max_tokens),
            prefill_shapes=((1, config.prompt_tokens),),
            row_buckets=(),
            context_buckets=(),
            prefix_caching=False,
        ),
    )


def _prompt(config: KVCodecConfig, engine: jf.Engine) -> list[int]:
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    if engine.tokenizer is not None:
        ids = engine.tokenizer.encode(text)
    else:
        ids = [byte % MODELS[config.model].vocab_size for byte in text.encode()]
    return list(ids[: config.prompt_tokens])


def _exponents(pools: dict[str, list[tuple[np.ndarray, ...]]]) -> tuple[float, float]:
    """Mean entropy of the exponents, in bits, and share of those that are not among the first 7.

    The pages that one prompt has filled: all others but the null page are zeros.
    """
    entropies, escapes = [], []
    for slots in pools.values():
        for array in (array for slot in slots for array in slot):
            stages, _, _, heads, width = array.shape
            high = array.view(np.uint16 if array.itemsize == 2 else np.uint32)
            high = high >> 8 * (array.itemsize - 2)
            for stage, head in np.ndindex(stages, heads):
                tokens = high[stage, 1:, :, head].reshape(-1, width)
                exponents = tokens[tokens.any(axis=1)] >> 7 & 0xFF
                if not exponents.size:
                    continue  # a slot without a layer on this stage
                shares = np.bincount(exponents.ravel(), minlength=256) / exponents.size
                present = shares[shares > 0]
                entropies.append(-(present * np.log2(present)).sum())
                escapes.append(1 - np.sort(shares)[-7:].sum())
    return float(np.mean(entropies)), float(np.mean(escapes))


def devices(config: Config) -> int:
    return sum(pipeline * tensor for pipeline, tensor in (config.prefill, config.decode))


def table(rows: Sequence[Row]) -> Table:
    lines = []
    for row in rows:
        config, values = row["config"], row["values"]
        cited = row["kind"] == "cited"
        sent, raw = values.get("kv_bytes_sent"), values.get("kv_bytes")
        saved = None if sent is None else f"{100 * (1 - sent / raw):.1f} %"
        cells = (
            CITED if cited else config["model"],
            "" if cited else row["placement"],
            config["dtype"],
            number(config["prompt_tokens"] or None),
            number(values.get("identical")),
            number(raw),
            number(sent),
            saved or "–",
            number(values["bits_per_value"], 4),
            number(values.get("ideal_bits_per_value"), 4),
            number(values.get("overfull")),
            estimate(values.get("plain_transfer_s"), scale=1e3),
            estimate(values.get("transfer_s"), scale=1e3),
        )
        lines.append(tuple(Cell(cell, row["kind"]) for cell in cells))
    return Table(
        caption="Keys and values handed over with the KV codec.",
        columns=(
            "model",
            "placement",
            "dtype",
            "prompt, tokens",
            "tokens identical",
            "KV bytes",
            "bytes sent",
            "saved",
            "bits a value",
            "bits a value, ideal",
            "overfull handoffs",
            "transfer without, ms",
            "transfer with, ms",
        ),
        rows=tuple(lines),
        notes=(
            "Times are those of virtual CPU devices: copies in memory, and coding on a processor.",
            *provenance(rows),
        ),
        numeric=frozenset(range(5, 13)),
    )


KV_CODEC = Experiment(
    name="kv_codec",
    summary="bytes of keys and values that a handoff sends with and without the KV codec",
    configs=configs,
    run=run,
    devices=devices,
    sources=(
        *("jinfire", "sharding", "pallas_kernels"),
        *("experiments/kv_codec.py", "experiments/models.py"),
    ),
    tables={"kv_codec": table},
)
