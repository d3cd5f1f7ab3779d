"""Training of a tiny model on bytes: optimiser, steps, checkpoints that continue bit for bit."""

import dataclasses
import json
import pathlib
import shutil
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

import jinfire as jf
from experiments.byte_text import Corpus, even_rows, random_rows
from experiments.tiny_models import TINY_MODELS

Params = dict[str, jax.Array]

STEPS_NAME = "steps"
RUN_NAME = "run.json"


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """One training run.

    `model` is a name in `TINY_MODELS`; rows are of its whole context. The learning rate rises
    over `warm_up` steps and falls as a cosine to a tenth. `balance_weight` is that of the load
    balance loss, `bias_rate` how far selection biases move in a step. Every `save_every` steps
    the state is written.
    """

    model: str
    steps: int = 600
    batch: int = 8
    learning_rate: float = 3e-3
    warm_up: int = 50
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    balance_weight: float = 0.0
    bias_rate: float = 0.0
    save_every: int = 200
    held_out_rows: int = 256
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class Step:
    """What a step saw. `loss` in nats a byte; `load` are tokens by layer and expert."""

    number: int
    loss: float
    load: np.ndarray


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """Loss in nats a byte, and the tokens that every layer's experts had, on held-out files."""

    loss: float
    load: np.ndarray

    @property
    def imbalance(self) -> np.ndarray:
        """The largest load over the mean, by layer."""
        return self.load.max(axis=1) / self.load.mean(axis=1)


class Trainer:
    """A training run: its state after some steps, in memory and in a folder.

    A run that was broken off continues from its last checkpoint to the same weights, bit for bit.
    `identity` is what else the weights depend on; checkpoints of another one are thrown away.
    """

    def __init__(
        self,
        config: TrainConfig,
        corpus: Corpus,
        folder: pathlib.Path,
        identity: dict[str, Any],
    ) -> None:
        self.config, self.corpus = config, corpus
        self.model = jf.TrainableModel(TINY_MODELS[config.model])
        self._optimiser = optimiser(config)
        self.compilations = 0
        self._update = jax.jit(
            self._updated, donate_argnums=(0, 1), out_shardings=self.model.sharding
        )
        self._loss = jax.jit(self.model.loss)
        _discard_others(folder, {**identity, "config": dataclasses.asdict(config)})
        options = ocp.CheckpointManagerOptions(max_to_keep=1, enable_async_checkpointing=False)
        self._checkpoints = ocp.CheckpointManager((folder / STEPS_NAME).absolute(), options=options)
        self.params = self.model.init(config.seed)
        self._state = jax.device_put(self._optimiser.init(self.params), self.model.sharding)
        self.done = self._checkpoints.latest_step() or 0
        if self.done:
            restored = self._checkpoints.restore(
                self.done, args=ocp.args.StandardRestore(self._saved())
            )
            self.params, self._state = restored["params"], restored["state"]

    def steps(self) -> Iterator[Step]:
        """The steps that are left. The random choices of a step follow from seed and number."""
        config = self.config
        for number in range(self.done, config.steps):
            ids_BT = random_rows(
                self.corpus.training,
                config.batch,
                self.model.config.max_position,
                (config.seed, number),
            )
            self.params, self._state, loss, load = self._update(self.params, self._state, ids_BT)
            self.done = number + 1
            if self.done % config.save_every == 0 or self.done == config.steps:
                self._checkpoints.save(self.done, args=ocp.args.StandardSave(self._saved()))
            yield Step(self.done, float(loss), np.asarray(load))

    def held_out(self, params: Params) -> HeldOut:
        """The loss of weights on rows at even distances of the held-out stream."""
        config = self.config
        rows = even_rows(self.corpus.held_out, config.held_out_rows, self.model.config.max_position)
        losses, loads = [], []
        for ids_BT in np.split(rows, config.held_out_rows // config.batch):
            loss, routing = self._loss(params, ids_BT)
            losses.append(float(loss))
            loads.append(np.asarray(routing.load))
        return HeldOut(float(np.mean(losses)), np.sum(loads, axis=0))

    def close(self) -> None:
        self._checkpoints.close()

    def _saved(self) -> dict[str, Any]:
        return {"params": self.params, "state": self._state}

    def _updated(
        self, params: Params, state: optax.OptState, ids_BT: jax.Array
    ) -> tuple[Params, optax.OptState, jax.Array, jax.Array]:
        self.compilations += 1  # jit traces what it compiles

        def objective(params: Params) -> tuple[jax.Array, tuple[jax.Array, jf.Routing]]:
            loss, routing = self.model.loss(params, ids_BT)
            return loss + self.config.balance_weight * routing.balance_loss, (loss, routing)

        gradients, (loss, routing) = jax.grad(objective, has_aux=True)(params)
        # optax raises a float to an integer power.
        with jax.numpy_dtype_promotion("standard"):
            changes, state = self._optimiser.update(gradients, state, params)
        params = jax.tree.map(jnp.add, params, changes)
        params = self.model.balanced(params, routing, self.config.bias_rate)
        return params, state, loss, routing.load


def optimiser(config: TrainConfig) -> optax.GradientTransformation:
    """AdamW with clipped gradients; norm scales and biases do not decay."""
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=config.learning_rate,
        warmup_steps=config.warm_up,
        decay_steps=config.steps,
        end_value=config.learning_rate / 10,
    )
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(
            schedule,
            b2=0.95,
            weight_decay=config.weight_decay,
            mask=lambda params: jax.tree.map(lambda x: x.ndim > 1, params),
        ),
    )


def _discard_others(folder: pathlib.Path, identity: dict[str, Any]) -> None:
    """Removes checkpoints in the folder that are of another run."""
    path = folder / RUN_NAME
    text = json.dumps(identity, sort_keys=True)
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return
    shutil.rmtree(folder / STEPS_NAME, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
