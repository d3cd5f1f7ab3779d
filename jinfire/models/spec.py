"""The abstract tree of a model: every tensor's name, shape, logical axes and initialiser.

Random initialisation, shardings, restore targets, byte counts and FLOPs all derive from it.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jinfire.config import LayerSpec, ModelConfig
from jinfire.models.transformer import Transformer
from jinfire.weights import Weight

INT4_IN_A_WORD = 8


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """One tensor of a model, as its logical (unsharded) self.

    `dtype` None is the model's; a name is what the tensor has in every model.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    init: str
    dtype: str | None = None

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class Skeleton:
    """A `Transformer` without values: graph definition, tree definition and leaf names."""

    graphdef: nnx.GraphDef
    treedef: Any
    names: tuple[str, ...]
    specs: dict[str, ParamSpec]

    def bind(self, params: Mapping[str, Weight]) -> Transformer:
        """The module holding `params`, which may be tracers."""
        state = jax.tree.unflatten(self.treedef, [params[name] for name in self.names])
        return nnx.merge(self.graphdef, state)


@functools.lru_cache(maxsize=64)
def skeleton(config: ModelConfig, layers: tuple[LayerSpec, ...]) -> Skeleton:
    """The structure of a stack with these layers (all of a model's, or one stage's slots)."""
    build = functools.partial(Transformer, config, layers, jnp.dtype(jnp.float32))
    graphdef, state = nnx.split(nnx.eval_shape(build))
    specs = {}
    for path, variable in nnx.to_flat_state(state):
        meta = variable.get_metadata()
        shape = tuple(variable.get_value().shape)
        specs[".".join(map(str, path))] = ParamSpec(
            shape, meta["axes"], meta["init"], meta["dtype"]
        )
    # Leaf order is the tree's; the last path entry is the variable's own value.
    leaves, treedef = jax.tree_util.tree_flatten_with_path(state)
    names = tuple(".".join(str(key.key) for key in path[:-1]) for path, _ in leaves)
    return Skeleton(graphdef, treedef, names, specs)


def abstract_tree(config: ModelConfig) -> dict[str, ParamSpec]:
    """All tensors of a model by logical name, e.g. `layers.3.attention.query.weight`."""
    return dict(skeleton(config, config.layers).specs)


def parameter_count(config: ModelConfig) -> int:
    """Number of parameters; tied embeddings count once, int4 weights as the weights they are."""
    return sum(parameters_by_tensor(config).values())


def active_parameter_count(config: ModelConfig) -> int:
    """Number of parameters that one token meets: of the routed experts, those that it takes."""
    return sum(_met_by_a_token(config).values())


def flops_per_token(config: ModelConfig, context: int = 0) -> int:
    """Forward FLOPs of one token: 2 per weight it multiplies, plus attention over `context`.

    A query of a chunked layer sees no more than the attention chunk. Latent attention counts in
    the absorbed form, which is what decode runs: scores against whole entries of the cache, sums
    of their latents. (A prefill expands them, which is fewer per query.)
    Source: PaLM (arXiv 2204.02311) appendix B; the embedding lookup multiplies nothing, the head
    does even when tied.
    """
    tree = abstract_tree(config)
    met = _met_by_a_token(config)
    matrices = sum(size for name, size in met.items() if len(tree[name].shape) > 1)
    if not config.tie_embeddings:
        matrices -= tree["embed.weight"].size
    attention = sum(_attention_flops(config, layer, context) for layer in config.layers)
    return 2 * matrices + attention


def _attention_flops(config: ModelConfig, layer: LayerSpec, context: int) -> int:
    if config.latent is not None:
        latent = config.latent
        return 2 * config.num_heads * (2 * latent.rank + latent.rope_dim) * context
    if layer.attention == "chunked" and config.attention_chunk is not None:
        context = min(context, config.attention_chunk)
    return 4 * config.num_heads * config.head_dim * context


def kv_bytes_per_token(config: ModelConfig, itemsize: int) -> int:
    """Bytes of keys and values that one token leaves in all layers, unreplicated."""
    return config.num_layers * config.cached_heads * sum(config.kv_widths) * itemsize


def parameters_by_tensor(config: ModelConfig) -> dict[str, int]:
    """Parameters in each tensor: eight in a word of int4 weights, none in their scales."""
    tree = abstract_tree(config)

    def parameters(name: str, spec: ParamSpec) -> int:
        stem, kind = name.rsplit(".", 1)
        if kind == "packed":
            return INT4_IN_A_WORD * spec.size
        return 0 if kind == "scale" and f"{stem}.packed" in tree else spec.size

    return {name: parameters(name, spec) for name, spec in tree.items()}


def _met_by_a_token(config: ModelConfig) -> dict[str, int]:
    experts = config.experts
    return {
        name: size * experts.per_token // experts.count
        if experts is not None and ".mlp.experts." in name
        else size
        for name, size in parameters_by_tensor(config).items()
    }
