"""Device page pools: keys and values of every layer, in pages, on one mesh."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jinfire.config import ModelConfig
from jinfire.layout import StageLayout
from sharding import EXPERT, PIPELINE, TENSOR, Placed

POOL_SPEC = PartitionSpec(PIPELINE, None, None, (EXPERT, TENSOR), None)
SPLIT_POOL_SPEC = PartitionSpec(PIPELINE, None, (EXPERT, TENSOR), None, None)


class PagePair(NamedTuple):
    """Key and value pages of one slot: [stages, P, Z, K@tensor, H] each.

    Page 0 is the null page: padding and stopped rows write there and nothing reads it.
    """

    key: jax.Array
    value: jax.Array


class LatentPages(NamedTuple):
    """Latent pages of one slot of a stage.

    Layout: replicated [stages, P, Z, copies@tensor, C + A], a copy on every device of a stage;
    split [stages, P, Z@tensor, 1, C + A], a part of every page's slots on each.
    """

    latent: jax.Array


Pages = PagePair | LatentPages

Pools = dict[str, tuple[Pages, ...]]
"""Pages by KV group; the slots of a group in stack order. Groups may differ in page count."""


def group_slots(layout: StageLayout) -> dict[str, tuple[int, ...]]:
    """Slots whose layers keep their keys and values in each KV group."""
    groups = {group: [] for group in layout.config.kv_groups}
    for slot, spec in enumerate(layout.slot_specs):
        groups[spec.kv_group].append(slot)
    return {group: tuple(slots) for group, slots in groups.items()}


def pages_like(config: ModelConfig, make: Callable[[int], Any]) -> Pages:
    """`make(width)` for each array that a layer of the model caches."""
    kind = PagePair if config.latent is None else LatentPages
    return kind(*map(make, config.kv_widths))


def _pool_spec(layout: StageLayout) -> PartitionSpec:
    return SPLIT_POOL_SPEC if layout.splits_latents else POOL_SPEC


def pool_specs(layout: StageLayout) -> Pools:
    """Partition specs in the structure of `Pools`."""
    pages = pages_like(layout.config, lambda width: _pool_spec(layout))
    return {group: (pages,) * len(slots) for group, slots in group_slots(layout).items()}


def group_layers(layout: StageLayout) -> dict[str, Placed]:
    """Which layer every slot of a KV group holds on every stage."""
    stages = range(layout.mesh_spec.pipeline)
    return {
        group: tuple(tuple(layout.layer_at(stage, slot) for slot in slots) for stage in stages)
        for group, slots in group_slots(layout).items()
    }


def make_pools(
    layout: StageLayout, mesh: Mesh, num_pages: Mapping[str, int], page_size: int, dtype: jnp.dtype
) -> Pools:
    """Zeroed pools of `num_pages` pages by KV group, the null page included.

    Raises: ValueError for a page size that does not split as the layout says.
    """
    layout.page_slots(page_size)
    sharding = NamedSharding(mesh, _pool_spec(layout))

    def pool(pages: int, width: int) -> jax.Array:
        shape = (layout.mesh_spec.pipeline, pages, page_size, layout.kv_heads, width)
        return _maker(shape, dtype, sharding)()

    def zeros(group: str) -> Pages:
        return pages_like(layout.config, lambda width: pool(num_pages[group], width))

    return {
        group: tuple(zeros(group) for _ in slots) for group, slots in group_slots(layout).items()
    }


@functools.lru_cache(maxsize=64)
def _maker(
    shape: tuple[int, ...], dtype: jnp.dtype, sharding: NamedSharding
) -> Callable[[], jax.Array]:
    """A compiled program that makes zeros; pools are made again after a step that broke off."""
    return jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=sharding)


def pool_bytes(pools: Pools) -> int:
    """Bytes of all pages on all devices, replicated heads included."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(pools))
