"""What training needs of a model: its loss as a function of its weights, on one device.

The layers are those of inference. Optimiser, data and schedule are the caller's.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jinfire.checkpoints import save_hugging_face
from jinfire.config import ModelConfig
from jinfire.layers.moe import MoE
from jinfire.layers.routing import expert_load
from jinfire.loading import RandomSource
from jinfire.models import parse_config
from jinfire.models.spec import active_parameter_count, parameter_count, skeleton
from jinfire.programs.forward import InBatchKV
from jinfire.tokenizer import Tokenizer
from jinfire.weights import contract, parse_dtype
from sharding import Device, MeshSpec, make_mesh

Params = dict[str, jax.Array]
SELECTION_BIAS = ".mlp.router.bias"


class Routing(NamedTuple):
    """What the routers of a batch did, for the layers with experts from the first on.

    `load` counts the tokens of each expert, int32 [layers, E]. `balance_loss` is, as a mean over
    layers, E times the sum over experts of load share and mean softmax of the router's logits:
    1 when balanced, and differentiable in the latter. Without experts it is 0.
    Source: Switch Transformer (arXiv 2101.03961) section 2.2.
    """

    load: jax.Array
    balance_loss: jax.Array


class TrainableModel:
    """A model whose loss can be differentiated with respect to its weights.

    `config_json` is what `config.json` of a Hugging Face folder holds. Weights are float32, by
    logical name, on one device; `sharding` is theirs, and keeps a step that is fed its own results
    from compiling twice.

    Raises: UnsupportedConfig naming the field; ValueError for 4-bit experts.
    """

    def __init__(self, config_json: Mapping[str, Any], device: Device | None = None) -> None:
        self.config_json = config_json
        self.config: ModelConfig = parse_config(config_json)
        if self.config.experts is not None and self.config.experts.int4:
            raise ValueError("training: expected experts of floating-point weights, got 4-bit ones")
        self.num_parameters = parameter_count(self.config)
        self.num_active_parameters = active_parameter_count(self.config)
        whole, mesh = PartitionSpec(), make_mesh(MeshSpec(), [device or jax.devices()[0]])
        self.sharding = NamedSharding(mesh, whole)
        self._mapped_loss = jax.shard_map(
            self._local_loss,
            mesh=mesh,
            in_specs=(whole, whole),
            out_specs=whole,
            check_vma=False,
        )

    def init(self, seed: int) -> Params:
        """Random weights: matrices of deviation 1/sqrt(in), norm scales one, selection biases 0."""
        source = RandomSource(self.config, seed)

        def initial(name: str) -> np.ndarray:
            shape = source.shape(name)
            if name.endswith(SELECTION_BIAS):
                return np.zeros(shape, np.float32)
            return source.read(name, (slice(None),) * len(shape))

        arrays = {name: initial(name) for name in sorted(source.names())}
        return jax.device_put(arrays, self.sharding)

    def loss(self, params: Params, ids_BT: jax.Array) -> tuple[jax.Array, Routing]:
        """Mean cross entropy, in nats, of every token but the first of each row.

        Routers learn through the weights of the experts that they choose. Selection biases have
        no gradient: see `balanced`.

        Shapes: ids int32 [B, T]; the loss is a float32 scalar.
        """
        return self._mapped_loss(params, ids_BT)

    def balanced(self, params: Params, routing: Routing, rate: float) -> Params:
        """The weights with each selection bias moved by `rate` towards an even load.

        Without biases, they are as they were.
        Source: DeepSeek-V3 (arXiv 2412.19437) section 2.1.2; arXiv 2408.15664.
        """
        load = routing.load.astype(jnp.float32)
        direction = jnp.sign(jnp.mean(load, axis=1, keepdims=True) - load)
        moved = {
            name: params[name] + rate * direction[place]
            for place, layer in enumerate(self._expert_layers)
            if (name := f"layers.{layer}{SELECTION_BIAS}") in params
        }
        return {**params, **moved}

    def save(
        self,
        path: str | Path,
        params: Mapping[str, jax.Array | np.ndarray],
        dtype: str = "bfloat16",
        tokenizer: Tokenizer | None = None,
    ) -> None:
        """A Hugging Face folder of the weights; selection biases stay float32.

        Raises: ValueError where the folder holds a checkpoint already.
        """
        stored, specs = parse_dtype(dtype), self._skeleton.specs
        arrays = {
            name: np.asarray(array).astype(specs[name].dtype or stored)
            for name, array in params.items()
        }
        config_json = {**self.config_json, "torch_dtype": dtype}
        save_hugging_face(path, config_json, self.config, arrays)
        if tokenizer is not None:
            tokenizer.save(Path(path))

    @property
    def _skeleton(self):
        return skeleton(self.config, self.config.layers)

    @property
    def _expert_layers(self) -> list[int]:
        return [i for i, layer in enumerate(self.config.layers) if layer.mlp == "experts"]

    def _local_loss(self, params: Params, ids_BT: jax.Array) -> tuple[jax.Array, Routing]:
        model = self._skeleton.bind(params)
        inputs_BT, targets_BT = ids_BT[:, :-1], ids_BT[:, 1:]
        positions_T = jnp.arange(inputs_BT.shape[1], dtype=jnp.int32)
        tables = model.tables(jnp.broadcast_to(positions_T[None], inputs_BT.shape))
        hidden_BTD = model.embed(inputs_BT)
        loads, balance = [], []
        for layer in model.layers:
            hidden_BTD, _ = layer.attended(hidden_BTD, tables, InBatchKV())
            normed_BTD = layer.mlp_norm(hidden_BTD)
            if isinstance(layer.mlp, MoE):
                load_E, loss = _routing(layer.mlp, normed_BTD)
                loads.append(load_E)
                balance.append(loss)
            hidden_BTD = hidden_BTD + layer.mlp(normed_BTD)
        log_probabilities = jax.nn.log_softmax(model.logits(model.final_norm(hidden_BTD)))
        chosen = jnp.take_along_axis(log_probabilities, targets_BT[..., None], axis=-1)
        if not loads:
            return -jnp.mean(chosen), Routing(jnp.zeros((0, 0), jnp.int32), jnp.float32(0))
        return -jnp.mean(chosen), Routing(jnp.stack(loads), jnp.mean(jnp.stack(balance)))


def _routing(moe: MoE, normed_BTD: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Load of each expert and the balance loss of one layer."""
    count = moe.config.count
    normed_TD = normed_BTD.reshape(-1, normed_BTD.shape[-1])
    ids_TX = moe.route(normed_BTD).reshape(normed_TD.shape[0], -1)
    load_E = expert_load(ids_TX, count, jnp.ones(ids_TX.shape[0], bool))
    probabilities_TE = jax.nn.softmax(contract(normed_TD, moe.router.weight.get_value()))
    share_E = load_E.astype(jnp.float32) / ids_TX.size
    return load_E, count * jnp.sum(share_E * jnp.mean(probabilities_TE, axis=0))
