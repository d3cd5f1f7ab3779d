"""Device page pools: keys and values of every layer, in pages, on one mesh."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jinfire.layout import StageLayout
from sharding import PIPELINE, TENSOR

POOL_SPEC = PartitionSpec(PIPELINE, None, None, TENSOR, None)


class PagePair(NamedTuple):
    """Key and value pages of one slot: [stages, P, Z, K@tensor, H] each.

    Page 0 is the null page: padding and stopped rows write there and nothing reads it.
    """

    key: jax.Array
    value: jax.Array


Pools = dict[str, tuple[PagePair, ...]]
"""Pages by KV group; the slots of a group in stack order. Groups may differ in page count."""


def group_slots(layout: StageLayout) -> dict[str, tuple[int, ...]]:
    """Slots whose layers keep their keys and values in each KV group."""
    groups = {group: [] for group in layout.config.kv_groups}
    for slot, spec in enumerate(layout.slot_specs):
        groups[spec.kv_group].append(slot)
    return {group: tuple(slots) for group, slots in groups.items()}


def pool_specs(layout: StageLayout) -> dict[str, tuple[PagePair, ...]]:
    """Partition specs in the structure of `Pools`."""
    pair = PagePair(POOL_SPEC, POOL_SPEC)  # type: ignore[arg-type]
    return {group: (pair,) * len(slots) for group, slots in group_slots(layout).items()}


def make_pools(
    layout: StageLayout, mesh: Mesh, num_pages: int, page_size: int, dtype: jnp.dtype
) -> Pools:
    """Zeroed pools of `num_pages` pages, the null page included."""
    shape = (
        layout.mesh_spec.pipeline,
        num_pages,
        page_size,
        layout.kv_heads,
        layout.config.head_dim,
    )
    sharding = NamedSharding(mesh, POOL_SPEC)
    zeros = jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=sharding)
    return {
        group: tuple(PagePair(zeros(), zeros()) for _ in slots)
        for group, slots in group_slots(layout).items()
    }


def pool_bytes(pools: Pools) -> int:
    """Bytes of all pages on all devices, replicated heads included."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(pools))
