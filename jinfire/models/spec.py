"""The abstract tree of a model: every tensor's name, shape, logical axes and initialiser.

Random initialisation, shardings, restore targets, byte counts and FLOPs all derive from it.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jinfire.config import LayerSpec, ModelConfig
from jinfire.models.transformer import Transformer


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

    def bind(self, params: dict[str, jax.Array]) -> Transformer:
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
    """Number of parameters; tied embeddings count once."""
    return sum(spec.size for spec in abstract_tree(config).values())


def flops_per_token(config: ModelConfig, context: int = 0) -> int:
    """Forward FLOPs of one token: 2 per weight it multiplies, plus attention over `context`.

    Source: PaLM (arXiv 2204.02311) appendix B; the embedding lookup multiplies nothing, the head
    does even when tied.
    """
    tree = abstract_tree(config)
    matrices = sum(s.size for n, s in tree.items() if len(s.shape) == 2 and n != "embed.weight")
    if config.tie_embeddings:
        matrices += tree["embed.weight"].size
    attention = 4 * config.num_layers * config.num_heads * config.head_dim * context
    return 2 * matrices + attention


def kv_bytes_per_token(config: ModelConfig, itemsize: int) -> int:
    """Bytes of keys and values that one token leaves in all layers, unreplicated."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * itemsize
