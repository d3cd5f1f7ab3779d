"""What compressed weights change in a model's outputs, variant by variant: nothing, or sums' order.

Tokens of an engine with compressed weights beside those of plain weights on the same placement, and
the most likely next token at every position of a text. Rows without compression give the scale:
another placement, another order of the same sums, and float32 arithmetic on the same weights.
"""

import dataclasses
import hashlib
import itertools
import pydoc_data.topics
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import ml_dtypes
import numpy as np
from tqdm import tqdm

import jinfire as jf
from experiments.harness import Config, Experiment, Measured, Options, Row
from experiments.models import MODELS
from experiments.tables import Cell, Table, number, provenance

TOKENS, POSITIONS = "tokens", "positions"
PLAIN, REORDERED, FLOAT32 = "plain", "reordered", "float32"

Layout = tuple[int, int]
SINGLE_DEVICE: Layout = (1, 1)
DISAGGREGATED: tuple[Layout, Layout] = ((2, 1), (1, 3))

PROMPTS = (
    "The capital of France is",
    "Write one sentence about the sea.",
    "A list of the first ten prime numbers:",
    "def fibonacci(n):",
    "Explain why the sky is blue.",
    "In the year 1815,",
    "Translate to German: Good morning, how are you?",
    "The difference between a stack and a queue is that",
)


@dataclasses.dataclass(frozen=True)
class UnweightExactnessConfig:
    """One variant on one placement, or one scale without compression.

    `decode` None is colocated on the prefill layout. PLAIN is compared with one device, every
    variant with plain weights on its own placement. Positions are looked at on one device, in
    `windows` runs of `window` tokens.
    """

    measure: str
    variant: str
    model: str = "smollm2"
    prefill: Layout = SINGLE_DEVICE
    decode: Layout | None = None
    max_tokens: int = 32
    windows: int = 10
    window: int = 512
    dtype: str = "bfloat16"

    @property
    def placement(self) -> jf.Placement:
        if self.decode is None:
            return jf.Placement.colocated(self.prefill)
        return jf.Placement.disaggregated(prefill=self.prefill, decode=self.decode)


def configs(smoke: bool) -> list[UnweightExactnessConfig]:
    variants = list(jf.VARIANTS)
    small: dict[str, Any] = {}
    placements: list[tuple[Layout, Layout | None]] = [(SINGLE_DEVICE, None), DISAGGREGATED]
    if smoke:
        small = {"model": "golden_llama31", "max_tokens": 6, "windows": 2, "window": 24}
        variants, placements = ["full", "direct"], placements[:1]

    def config(measure: str, variant: str, *layouts: Any) -> UnweightExactnessConfig:
        return UnweightExactnessConfig(
            measure, variant, **small, **dict(zip(("prefill", "decode"), layouts, strict=False))
        )

    return [
        *(config(TOKENS, v, *place) for place, v in itertools.product(placements, variants)),
        *(config(TOKENS, PLAIN, *place) for place in placements[1:]),
        *(config(POSITIONS, v) for v in (*variants, REORDERED, FLOAT32)),
    ]


DEFINITIONS = {
    "identical": "token ids of all prompts equal to the reference's",
    "prompts": "number of prompts",
    "identical_prompts": "prompts with every token id equal",
    "compared_tokens": "output tokens compared",
    "weight_bytes": "bytes of the weights on the devices",
    "plain_weight_bytes": "the same of the reference",
    "positions": "positions of the text compared",
    "argmax_differs": "positions whose most likely next token is not the reference's",
    "argmax_differs_share": "argmax_differs / positions",
    "logits_identical_share": "positions with every logit equal to the last bit, over positions",
    "largest_difference": "largest difference of one logit",
}


def run(todo: Sequence[UnweightExactnessConfig], options: Options) -> Iterator[Measured]:
    """Groups that share a reference, one reference alive at a time."""

    def key(config: UnweightExactnessConfig) -> str:
        return repr(dataclasses.replace(config, variant=""))

    with tqdm(
        total=len(todo), desc="unweight_exactness", unit="row", file=sys.stderr, disable=None
    ) as bar:
        for _, group in itertools.groupby(sorted(todo, key=key), key=key):
            chosen = list(group)
            measure = _tokens if chosen[0].measure == TOKENS else _positions
            for measured in measure(chosen, options):
                yield measured
                bar.update()


# -- tokens of an engine


def _tokens(group: Sequence[UnweightExactnessConfig], options: Options) -> Iterator[Measured]:
    references: dict[str, tuple[list[list[int]], int]] = {}
    for config in group:
        placement = config.placement
        if config.variant == PLAIN:
            placement = jf.Placement.colocated(SINGLE_DEVICE)
        if str(placement) not in references:
            references[str(placement)] = _generate(config, options, placement, None)
        expected, plain_bytes = references[str(placement)]
        variant = None if config.variant == PLAIN else config.variant
        found, weight_bytes = _generate(config, options, config.placement, variant)
        same = [a == b for a, b in zip(found, expected, strict=True)]
        values = {
            "identical": all(same),
            "prompts": len(same),
            "identical_prompts": sum(same),
            "compared_tokens": sum(map(len, expected)),
            "weight_bytes": weight_bytes,
            "plain_weight_bytes": plain_bytes,
        }
        yield _measured(config, options, values, len(same), {"token_ids": found})


def _generate(
    config: UnweightExactnessConfig,
    options: Options,
    placement: jf.Placement,
    variant: str | None,
) -> tuple[list[list[int]], int]:
    """Tokens of every prompt, greedy, and the bytes of the weights on the devices."""
    engine = jf.Engine.from_pretrained(
        MODELS[config.model].path(options),
        dtype=config.dtype,
        placement=placement,
        # One program a phase: what differs is the weights alone.
        config=jf.EngineConfig(
            max_rows=len(PROMPTS),
            max_context=128,
            prefill_shapes=((len(PROMPTS), 32),),
            row_buckets=(),
            context_buckets=(),
            prefix_caching=False,
        ),
        unweight=variant,
    )
    params = jf.SamplingParams(max_tokens=config.max_tokens, temperature=0.0, ignore_eos=True)
    outputs = engine.generate(_prompts(config), params)
    return [list(out.token_ids) for out in outputs], engine.stats()["weight_bytes"]


def _prompts(config: UnweightExactnessConfig) -> list[Any]:
    """Texts, or ids where the model has no tokenizer."""
    if MODELS[config.model].folder is None:
        return list(PROMPTS)
    size = MODELS[config.model].vocab_size
    return [[ord(character) % size for character in prompt] for prompt in PROMPTS]


# -- logits at every position


def _positions(group: Sequence[UnweightExactnessConfig], options: Options) -> Iterator[Measured]:
    """Every model beside the reference's logits, which are held: a GB of SmolLM2's."""
    ids, sha256 = _text(group[0], options)
    plain = _model(dataclasses.replace(group[0], variant=PLAIN), options)
    reference = [plain.logits(row[None])[0] for row in _windows(ids)]
    del plain
    for config in group:
        model = _model(config, options)
        differs, same, largest = 0, 0, 0.0
        for row, expected in zip(_windows(ids), reference, strict=True):
            found = model.logits(row[None])[0]
            differs += int((expected.argmax(axis=-1) != found.argmax(axis=-1)).sum())
            same += int((expected == found).all(axis=-1).sum())
            largest = max(largest, float(np.abs(expected - found).max()))
        values = {
            "positions": ids.size,
            "argmax_differs": differs,
            "argmax_differs_share": differs / ids.size,
            "logits_identical_share": same / ids.size,
            "largest_difference": largest,
        }
        yield _measured(config, options, values, ids.size, {"text_sha256": sha256})


def _windows(ids: np.ndarray) -> Iterable[np.ndarray]:
    return tqdm(ids, desc="windows", file=sys.stderr, disable=None, leave=False)


def _text(config: UnweightExactnessConfig, options: Options) -> tuple[np.ndarray, str]:
    """Ids [windows, window] of the running Python's own help texts, and the texts' hash."""
    topics = pydoc_data.topics.topics
    text = "\n\n".join(topics[name] for name in sorted(topics))
    count = config.windows * config.window
    # No token is longer than a few dozen characters, and most have three or more.
    text = text[: 16 * count]
    tokenizer = jf.load_tokenizer(MODELS[config.model].path(options))
    if tokenizer is None:
        ids = [byte % MODELS[config.model].vocab_size for byte in text.encode()]
    else:
        ids = tokenizer.encode(text)
    if len(ids) < count:
        raise ValueError(f"text: expected {count} tokens, got {len(ids)}")
    chosen = np.array(ids[:count], np.int32).reshape(config.windows, config.window)
    return chosen, hashlib.sha256(text.encode()).hexdigest()


def _model(config: UnweightExactnessConfig, options: Options) -> jf.Model:
    path = MODELS[config.model].path(options)
    if config.variant == PLAIN:
        return jf.Model.from_pretrained(path, dtype=config.dtype)
    if config.variant not in (REORDERED, FLOAT32):
        return jf.Model.from_pretrained(path, dtype=config.dtype, unweight=config.variant)
    source = jf.open_checkpoint(path)
    try:
        if config.variant == REORDERED:
            return jf.Model(Reordered(source), dtype=config.dtype)
        return jf.Model(Rounded(source), dtype="float32")
    finally:
        source.close()


class Rounded:
    """A checkpoint with its weights rounded to BF16 and held in float32."""

    def __init__(self, inner: Any) -> None:
        self.config = inner.config
        self._inner = inner

    def names(self) -> set[str]:
        return self._inner.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._inner.shape(name)

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        return self._inner.read(name, index).astype(ml_dtypes.bfloat16).astype(np.float32)

    def close(self) -> None:
        self._inner.close()


class Reordered(Rounded):
    """The same function with the channels of stream and MLP in another order.

    Every product sums the same terms, in another order: as valid, and not the same bits.
    """

    def __init__(self, inner: Any, seed: int = 0) -> None:
        super().__init__(inner)
        rng = np.random.default_rng(seed)
        self._orders = {
            "stream": rng.permutation(self.config.width),
            "mlp": rng.permutation(self.config.mlp_width),
        }

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        values = super().read(name, ())
        for axis, channels in enumerate(channels_of(name, values.ndim)):
            if channels:
                values = np.take(values, self._orders[channels], axis=axis)
        return values[index]


# Channels of the two axes (out, in) of every matrix, by the end of its name.
CHANNELS = {
    "embed.weight": (None, "stream"),
    "head.weight": (None, "stream"),
    "attention.query.weight": (None, "stream"),
    "attention.key.weight": (None, "stream"),
    "attention.value.weight": (None, "stream"),
    "attention.output.weight": ("stream", None),
    "mlp.gate.weight": ("mlp", "stream"),
    "mlp.up.weight": ("mlp", "stream"),
    "mlp.down.weight": ("stream", "mlp"),
}


def channels_of(name: str, num_axes: int) -> tuple[str | None, ...]:
    """What each axis of a Llama's tensor counts; vectors are the norms' weights."""
    if num_axes == 1:
        return ("stream",)
    found = [axes for end, axes in CHANNELS.items() if name.endswith(end)]
    if not found:
        raise ValueError(f"{name}: expected a matrix of a Llama, one of {', '.join(CHANNELS)}")
    return found[0]


def _measured(
    config: UnweightExactnessConfig,
    options: Options,
    values: dict[str, Any],
    n: int,
    notes: dict[str, Any],
) -> Measured:
    return Measured(
        config=config,
        values=values,
        n=n,
        definitions={name: DEFINITIONS[name] for name in values},
        placement=str(config.placement),
        model_sha256=MODELS[config.model].sha256(options),
        notes=notes,
    )


def devices(config: Config) -> int:
    return config.placement.num_devices


SCALES = {
    PLAIN: "no compression, this placement against one device",
    REORDERED: "no compression, channels reordered",
    FLOAT32: "no compression, float32 arithmetic",
}


def tokens_table(rows: Sequence[Row]) -> Table:
    """Tokens of the engine."""
    rows = [row for row in rows if row["config"]["measure"] == TOKENS]
    lines = []
    for row in rows:
        config, values = row["config"], row["values"]
        cells = (
            SCALES.get(config["variant"]) or config["variant"],
            row["placement"],
            number(values["identical"]),
            f"{values['identical_prompts']} of {values['prompts']}",
            number(values["compared_tokens"]),
            number(values["weight_bytes"] / values["plain_weight_bytes"]),
        )
        lines.append(tuple(Cell(cell, row["kind"]) for cell in cells))
    models = ", ".join(sorted({row["config"]["model"] for row in rows}))
    return Table(
        caption=f"Greedy tokens with compressed weights against plain ones ({models}, bfloat16).",
        columns=(
            "variant",
            "placement",
            "tokens identical",
            "prompts identical",
            "tokens",
            "weight bytes / plain",
        ),
        rows=tuple(lines),
        notes=provenance(rows),
        numeric=frozenset(range(3, 6)),
    )


def positions_table(rows: Sequence[Row]) -> Table:
    """Most likely tokens at every position."""
    rows = [row for row in rows if row["config"]["measure"] == POSITIONS]
    lines = []
    for row in rows:
        config, values = row["config"], row["values"]
        cells = (
            SCALES.get(config["variant"]) or config["variant"],
            number(values["positions"]),
            number(values["argmax_differs"]),
            number(values["argmax_differs_share"] * 100),
            number(values["logits_identical_share"] * 100),
            number(values["largest_difference"]),
        )
        lines.append(tuple(Cell(cell, row["kind"]) for cell in cells))
    return Table(
        caption="Most likely next token at every position of a text against plain weights.",
        columns=(
            "variant",
            "positions",
            "argmax differs",
            "argmax differs, %",
            "logits identical, %",
            "largest difference",
        ),
        rows=tuple(lines),
        notes=(
            "Where there are no GPU kernels every variant decompresses and multiplies as plain "
            "weights do; with them a reconstructive product sums in an order of its own.",
            *provenance(rows),
        ),
        numeric=frozenset(range(1, 6)),
    )


UNWEIGHT_EXACTNESS = Experiment(
    name="unweight_exactness",
    summary="tokens and logits with compressed weights against plain ones, variant by variant",
    configs=configs,
    run=run,
    devices=devices,
    sources=(
        *("jinfire", "sharding", "pallas_kernels"),
        *("experiments/unweight_exactness.py", "experiments/models.py"),
    ),
    tables={"unweight_tokens": tokens_table, "unweight_positions": positions_table},
)
