"""Latents whose slots are split over the devices of a stage: decode context parallelism for MLA.

Device d of n holds slots d*Z/n to (d+1)*Z/n of every page. Page tables are those of whole pages;
what a device sees of a row is a shorter sequence, in pages of Z/n slots. Attention does not care
for the order of its latents: rotary keys carry their positions. The functions run inside
`shard_map`; pages are a device's own, heads are its shard of the model's.
"""

import dataclasses
from typing import Self

import jax
import jax.numpy as jnp

from pallas_kernels import (
    expanded_latent_attention,
    join_parts,
    latent_attention_part,
    write_pages,
)
from sharding import EXPERT, TENSOR

STAGE = (EXPERT, TENSOR)


@dataclasses.dataclass(frozen=True)
class OwnSlots:
    """Which slots of every page this device holds: `count` of `page_size` from `first` on."""

    first: jax.Array
    count: int
    page_size: int

    @classmethod
    def of(cls, pages_PZKC: jax.Array) -> Self:
        count = pages_PZKC.shape[1]
        first = jax.lax.axis_index(STAGE) * count
        return cls(first.astype(jnp.int32), count, count * jax.lax.axis_size(STAGE))

    def lengths(self, lengths_B: jax.Array) -> jax.Array:
        """How many of a row's first tokens lie in these slots."""
        full_B, rest_B = lengths_B // self.page_size, lengths_B % self.page_size
        return full_B * self.count + jnp.clip(rest_B - self.first, 0, self.count)

    def positions(self, positions_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Where a token lies among the row's tokens in these slots, and whether it does."""
        slot_BT = positions_BT % self.page_size - self.first
        own_BT = (slot_BT >= 0) & (slot_BT < self.count)
        return positions_BT // self.page_size * self.count + slot_BT, own_BT


def write_split(
    pages_PZKC: jax.Array,
    new_BTKC: jax.Array,
    page_table_BW: jax.Array,
    positions_BT: jax.Array,
    valid_BT: jax.Array,
) -> jax.Array:
    """`write_pages` of the tokens whose slots this device holds; the others go to the null page."""
    positions_BT, own_BT = OwnSlots.of(pages_PZKC).positions(positions_BT)
    return write_pages(pages_PZKC, new_BTKC, page_table_BW, positions_BT, valid_BT & own_BT)


def split_latent_attention(
    query_BNC: jax.Array,
    pages_PZKC: jax.Array,
    page_table_BW: jax.Array,
    lengths_B: jax.Array,
    *,
    scale: float,
    rank: int,
) -> jax.Array:
    """`latent_attention` of this device's heads to the latents of all devices.

    The queries of all heads go to every device, each attends to the latents that it has, and every
    device gets back what the others made of its heads. Of a row, 1/n of the latents are read.
    """
    devices = jax.lax.axis_size(STAGE)
    num_rows, num_heads, _ = query_BNC.shape
    query_BNC = jax.lax.all_gather(query_BNC, STAGE, axis=1, tiled=True)
    lengths_B = OwnSlots.of(pages_PZKC).lengths(lengths_B)
    part_BNC, lse_BN = latent_attention_part(
        query_BNC, pages_PZKC, page_table_BW, lengths_B, scale=scale, rank=rank
    )
    shape = (devices, num_rows, num_heads)
    part_XBNC = _to_owners_of_heads(part_BNC).reshape(*shape, rank)
    return join_parts(part_XBNC, _to_owners_of_heads(lse_BN).reshape(shape))


def _to_owners_of_heads(x_BNC: jax.Array) -> jax.Array:
    """Every device's results [B, all heads, ...] for this device's heads: [devices * B, N, ...]."""
    return jax.lax.all_to_all(x_BNC, STAGE, split_axis=1, concat_axis=0, tiled=True)


def split_expanded_attention(
    query_RTNH: jax.Array,
    pages_PZKC: jax.Array,
    up_NUC: jax.Array,
    page_table_RW: jax.Array,
    starts_R: jax.Array,
    lengths_R: jax.Array,
    *,
    scale: float,
) -> jax.Array:
    """`expanded_latent_attention` of this device's heads to the latents of all devices.

    The pages of one row at a time are gathered from all devices, as far as its table is wide: that
    many latents are whole on every device for as long.
    """
    devices, width = jax.lax.axis_size(STAGE), page_table_RW.shape[1]
    # The gathered parts are the pages of a pool. Column w of the row is part w of every device.
    part_WX = jnp.arange(width)[:, None] + jnp.arange(devices)[None] * width
    parts_1W = part_WX.reshape(1, -1).astype(jnp.int32)

    def attend_row(row: tuple[jax.Array, ...]) -> jax.Array:
        query_TNH, table_W, start, length = row
        own_WZKC = pages_PZKC.at[table_W].get(mode="clip")
        gathered = jax.lax.all_gather(own_WZKC, STAGE, axis=0, tiled=True)
        (mixed_TNV,) = expanded_latent_attention(
            query_TNH[None], gathered, up_NUC, parts_1W, start[None], length[None], scale=scale
        )
        return mixed_TNV

    return jax.lax.map(attend_row, (query_RTNH, page_table_RW, starts_R, lengths_R))
