"""Trained tiny models: mixtures of experts and latent attention whose weights learnt something.

No trained model of these kinds can be had without a network, so two byte-level ones are trained on
Python's own sources, which are always there. `trained_model` is where later experiments find them.
"""

import dataclasses
import math
import pathlib
import shutil
import sys
import time
from collections.abc import Iterator, Sequence

import jax
import numpy as np
from tqdm import tqdm

from experiments.byte_text import byte_tokenizer, standard_library
from experiments.harness import (
    Experiment,
    Measured,
    Options,
    Row,
    config_hash,
    file_sha256,
    median,
    sources_of,
    versions,
)
from experiments.tables import Cell, Table, estimate, number, provenance
from experiments.trainer import STEPS_NAME, TrainConfig, Trainer

# Losses that the last training loss is a mean of, and steps in an interval of the speed.
LAST = 50
INTERVAL = 20


def configs(smoke: bool) -> list[TrainConfig]:
    """Llama 4's routers balance by a loss, DeepSeek-V3's by their selection biases."""
    size, changes = "tiny", {}
    if smoke:
        size = "smoke"
        changes = {"steps": 6, "warm_up": 2, "save_every": 3, "held_out_rows": 16}
    both = [
        TrainConfig(model=f"llama4-{size}", balance_weight=0.01),
        TrainConfig(model=f"kimi-{size}", bias_rate=1e-2),
    ]
    return [dataclasses.replace(config, **changes) for config in both]


DEFINITIONS = {
    "parameters": "weights of the model",
    "active_parameters": "weights that one token meets",
    "training_tokens": "bytes and file ends that the loss was taken on, all steps together",
    "training_loss": f"mean cross entropy of the last {LAST} steps, nats a byte",
    "held_out_bits_per_byte": "mean cross entropy on files kept from training over ln 2; the "
    "context is the row's, from one byte up to the model's whole context",
    "untrained_bits_per_byte": "the same before the first step",
    "tokens_per_s": f"training tokens a second, median of intervals of {INTERVAL} steps without "
    "the first, which compiles",
    "imbalance": "tokens of an expert layer's busiest expert over the mean of its experts, on the "
    "held-out files, mean of the layers",
    "largest_imbalance": "the same, of the worst layer",
    "unused_experts": "experts that no held-out token took, all layers together",
}


def run(todo: Sequence[TrainConfig], options: Options) -> Iterator[Measured]:
    for config in todo:
        yield _train(config, options)


def trained_model(name: str, options: Options, dtype: str = "bfloat16") -> pathlib.Path:
    """The Hugging Face folder of a trained model, "llama4-tiny" or "kimi-tiny".

    Raises: FileNotFoundError, with the command that makes it.
    """
    named = {config.model: config for smoke in (False, True) for config in configs(smoke)}
    folder = folder_of(named[name], options) / dtype
    if not (folder / "config.json").exists():
        raise FileNotFoundError(
            f"{folder}: not trained yet; run `python -m experiments train_tiny`"
        )
    return folder


def folder_of(config: TrainConfig, options: Options) -> pathlib.Path:
    """Where a run leaves its weights, as Hugging Face folders `bfloat16` and `float32`."""
    key = config_hash(TRAIN_TINY.name, config)[:12]
    return options.cache / TRAIN_TINY.name / f"{config.model}-{key}"


def _train(config: TrainConfig, options: Options) -> Measured:
    folder, corpus = folder_of(config, options), standard_library()
    identity = {
        "sources": sources_of(TRAIN_TINY, jax.devices()[0].device_kind),
        "versions": versions(),
        "corpus": corpus.sha256,
    }
    trainer = Trainer(config, corpus, folder, identity)
    try:
        untrained = trainer.held_out(trainer.model.init(config.seed)).loss
        losses, tokens_per_s = _run_steps(trainer)
        held_out = trainer.held_out(trainer.params)
    finally:
        trainer.close()
    for dtype in ("bfloat16", "float32"):
        shutil.rmtree(folder / dtype, ignore_errors=True)
        trainer.model.save(folder / dtype, trainer.params, dtype, byte_tokenizer())
    # What is complete is not continued, but trained anew.
    shutil.rmtree(folder / STEPS_NAME)
    return Measured(
        config=config,
        values={
            "parameters": trainer.model.num_parameters,
            "active_parameters": trainer.model.num_active_parameters,
            "training_tokens": config.steps * config.batch * trainer.model.config.max_position,
            "training_loss": float(np.mean(losses[-LAST:])) if losses else math.nan,
            "held_out_bits_per_byte": held_out.loss / math.log(2),
            "untrained_bits_per_byte": untrained / math.log(2),
            "tokens_per_s": median(tokens_per_s),
            "imbalance": float(held_out.imbalance.mean()),
            "largest_imbalance": float(held_out.imbalance.max()),
            "unused_experts": int((held_out.load == 0).sum()),
        },
        n=config.steps,
        definitions=DEFINITIONS,
        placement="one device",
        model_sha256=file_sha256(folder / "bfloat16"),
        notes={"corpus_sha256": corpus.sha256, "held_out_load": held_out.load.tolist()},
    )


def _run_steps(trainer: Trainer) -> tuple[list[float], list[float]]:
    """Losses of the steps that were left, and tokens a second of intervals after the first."""
    config = trainer.config
    tokens = INTERVAL * config.batch * trainer.model.config.max_position
    losses, speeds = [], []
    with tqdm(
        total=config.steps,
        initial=trainer.done,
        desc=f"train {config.model}",
        unit="step",
        file=sys.stderr,
        disable=None,
    ) as bar:
        started = time.perf_counter()
        for step in trainer.steps():
            losses.append(step.loss)
            bar.update()
            busiest = (step.load.max(axis=1) / step.load.mean(axis=1)).max()
            bar.set_postfix_str(f"loss {np.mean(losses[-INTERVAL:]):.3f}, imbalance {busiest:.1f}")
            if len(losses) % INTERVAL == 0:
                now = time.perf_counter()
                speeds.append(tokens / (now - started))
                started = now
    return losses, speeds[1:]


def table(rows: Sequence[Row]) -> Table:
    lines = []
    for row in rows:
        values = row["values"]
        cells = (
            row["config"]["model"],
            number(values["parameters"]),
            number(values["active_parameters"]),
            number(values["training_tokens"]),
            number(values["untrained_bits_per_byte"]),
            number(values["held_out_bits_per_byte"]),
            number(values["imbalance"]),
            number(values["unused_experts"]),
            estimate(values["tokens_per_s"]),
        )
        lines.append(tuple(Cell(cell, row["kind"]) for cell in cells))
    corpora = sorted({row["notes"]["corpus_sha256"][:12] for row in rows})
    pythons = sorted({row["versions"]["python"] for row in rows})
    return Table(
        caption="Byte-level models trained on the sources of Python's standard library.",
        columns=(
            "model",
            "parameters",
            "active",
            "training tokens",
            "bits per byte, untrained",
            "bits per byte, held out",
            "load, busiest over mean",
            "unused experts",
            "tokens per second",
        ),
        rows=tuple(lines),
        notes=(
            f"Python {', '.join(pythons)}, every 20th file held out; corpus "
            f"{', '.join(corpora)}. Trained in float32.",
            *provenance(rows),
        ),
        numeric=frozenset(range(1, 9)),
    )


TRAIN_TINY = Experiment(
    name="train_tiny",
    summary="trains a tiny Llama-4-style and a tiny Kimi-style byte-level model",
    configs=configs,
    run=run,
    devices=lambda config: 1,
    sources=(
        *("jinfire/training.py", "jinfire/models", "jinfire/layers", "jinfire/config.py"),
        *("jinfire/weights.py", "jinfire/loading.py", "jinfire/programs/forward.py"),
        *("pallas_kernels/grouped_matmul.py", "pallas_kernels/grouped_matmul_grad.py"),
        "pallas_kernels/grouped_matmul_xla.py",
        *("experiments/train_tiny.py", "experiments/trainer.py"),
        *("experiments/tiny_models.py", "experiments/byte_text.py"),
    ),
    tables={"train_tiny": table},
    output=lambda config, options: folder_of(config, options) / "bfloat16",
)
