"""How the Mosaic form of latent attention shares out its work: tiles, splits, items."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

# Tokens in a KV block and queries in a tile: the rows of one WGMMA.
BLOCK = 64
TILE = 64
# KV blocks in shared memory. Beside the queries there is no room for a third.
SLOTS = 2
# A compiler that sees that a row has two blocks at most unrolls the loop over them, and spills.
# Lengths in so short a table are clipped outside the kernel, where it cannot see it.
SHORT_TABLE = 4 * BLOCK
# Splits whose outputs the combine step reads at once.
SPLITS_AT_ONCE = 8
# Streaming multiprocessors of an H100 or H200. Each holds one CTA of this kernel.
PROCESSORS = 132

# The largest score of a query that has seen nothing. Masked scores are -inf, which may not become
# the maximum: the difference of two would be NaN.
NOTHING = -1e30


@dataclasses.dataclass(frozen=True)
class LatentBlocks:
    """How a row's KV is split.

    A split has `split_tokens` tokens, or more where a row would have over `max_splits`. Each split
    of a row that has several writes float32 outputs of all heads and reads them back; memory is
    set aside for `max_splits` of every row.
    """

    split_tokens: int = 2048
    max_splits: int = 32


DEFAULT_BLOCKS = LatentBlocks()

SPACE = {"split_tokens": (512, 1024, 2048, 4096), "max_splits": (16, 32, 64)}


class Work(NamedTuple):
    """One item of work: the queries of one tile, and `count` KV blocks from block `first` on."""

    row: Any
    split: Any
    tile: Any
    tile_rows: Any
    length: Any
    first: Any
    count: Any
    alone: Any  # the row has no other split

    def tokens_from(self, block: Any) -> Any:
        """Tokens of the row from a block of this part on."""
        return self.length - (self.first + block) * BLOCK


@dataclasses.dataclass(frozen=True)
class Plan:
    """Sizes of one call. Static shapes alone decide them, so that no row depends on another."""

    batch: int
    tokens: int  # queries of one head
    heads: int
    tiles: int
    rows: int  # of a tile that are in use, a multiple of 8: the granule of a swizzled tile
    rank: int
    width: int  # rank and rotary columns
    pages: int
    page_size: int
    columns: int  # of the page table
    splits: int
    split_blocks: int
    scale: float
    with_lse: bool  # the sums of weights are a result too

    @property
    def padded_rows(self) -> int:
        return self.tiles * self.rows

    def row_blocks(self, length: jax.Array) -> tuple[jax.Array, jax.Array]:
        """KV blocks of a row, and how many of them a split takes.

        Divisors are constants: a general division is a call, and calls spill registers.
        """
        count = ceil_div(length, BLOCK)
        return count, jnp.maximum(ceil_div(count, self.splits), self.split_blocks)

    def clip_length(self, length: jax.Array) -> jax.Array:
        """Length within the table, or within `SHORT_TABLE` tokens where that is wider."""
        return jnp.clip(length, 0, max(self.columns * self.page_size, SHORT_TABLE))

    def row_splits(self, lengths_B: jax.Array) -> jax.Array:
        """Items of every row: splits with a token, and one where there is none."""
        row_blocks_B, split_blocks_B = self.row_blocks(self.clip_length(lengths_B))
        return jnp.maximum(ceil_div(row_blocks_B, split_blocks_B), 1)

    def items(self, lengths_B: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Row and split of every item [2, I], and where each row's items end [B].

        A row has one item for each split with a token; a row of length 0 has one, for its zeros.
        """
        splits_B = self.row_splits(lengths_B)
        rows_B = jnp.arange(self.batch)
        ends_B = jnp.sum(jnp.where(rows_B[None] <= rows_B[:, None], splits_B[None], 0), axis=1)
        items_I = jnp.arange(self.batch * self.splits)
        row_I = jnp.sum(ends_B[None] <= items_I[:, None], axis=1)
        row_I = jnp.minimum(row_I, self.batch - 1)
        return jnp.stack([row_I, items_I - (ends_B - splits_B)[row_I]]), ends_B

    def work(self, length: Any, row: Any, split: Any, tile: Any) -> Work:
        length = self.clip_length(length)
        row_blocks, split_blocks = self.row_blocks(length)
        first = split * split_blocks
        count = jnp.clip(row_blocks - first, 0, split_blocks)
        alone = split_blocks >= row_blocks
        tile_rows = pl.ds(tile * self.rows, self.rows)
        return Work(row, split, tile, tile_rows, length, first, count, alone)


def ceil_div(a: jax.Array, b: Any) -> jax.Array:
    """Quotient of int32 scalars that are not negative, rounded up."""
    return lax.div(a + b - 1, jnp.full_like(a, b))


def make_plan(
    query: Any,
    latent_pages: Any,
    page_table: Any,
    scale: float,
    rank: int,
    blocks: LatentBlocks,
    with_lse: bool = False,
) -> Plan:
    B, W = page_table.shape
    P, Z, _, D = latent_pages.shape
    tokens, heads = (1, query.shape[1]) if query.ndim == 3 else query.shape[1:3]
    tiles = -(-tokens * heads // TILE)
    rows = -(-tokens * heads // (8 * tiles)) * 8
    # Were all rows as long as the table is wide, this many splits would fill the chip: a small
    # batch takes shorter splits than `blocks` says.
    fill = -(-PROCESSORS // (B * tiles))
    table_blocks = -(-W * Z // BLOCK)
    split_blocks = min(max(-(-table_blocks // fill), 4), max(blocks.split_tokens // BLOCK, 1))
    splits = min(-(-table_blocks // split_blocks), max(fill, blocks.max_splits))
    return Plan(
        B, tokens, heads, tiles, rows, rank, D, P, Z, W, splits, split_blocks, scale, with_lse
    )
