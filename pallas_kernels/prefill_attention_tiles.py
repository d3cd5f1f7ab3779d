"""How prefill attention on Hopper cuts its work: blocks, tiles, and a tile's place in its row."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.prefill_attention_xla import first_seen

# Query rows of a warpgroup: the M of a WGMMA.
ROWS = 64
# Query positions of a tile are a multiple of this, the height of a swizzled TMA tile.
SUBLANES = 8


@dataclasses.dataclass(frozen=True)
class PrefillBlocks:
    """Tokens of a key block, key blocks in flight, and warpgroups that compute a tile."""

    kv_tokens: int = 128
    slots: int = 3
    warpgroups: int = 2


DEFAULT_BLOCKS = PrefillBlocks()
SPACE = {"kv_tokens": (64, 128), "slots": (2, 3, 4), "warpgroups": (2, 3)}


@dataclasses.dataclass(frozen=True)
class Plan:
    """All that is static: shapes, mask, and how the work is cut."""

    scale: float
    window: int | None
    attention_chunk: int | None
    dtype: Any
    head_dim: int
    chunk: int  # queries of a row
    group: int  # query heads of a kv head
    heads: int  # query heads of a tile
    positions: int  # query positions of a tile
    warpgroups: int
    pool: int  # pages of the pool
    page_size: int
    width: int  # columns of the page table
    pages: int  # pages of a key block
    slots: int
    interpret: bool

    @property
    def tiles(self) -> int:
        return -(-self.chunk // self.positions)

    @property
    def tokens(self) -> int:
        return self.pages * self.page_size

    def first_seen(self, position: jax.Array) -> jax.Array | None:
        return first_seen(position, self.window, self.attention_chunk)


def tile_shape(group: int, chunk: int, rows: int) -> tuple[int, int]:
    """Query heads and positions of a tile: as many of its rows in use as can be."""

    def positions(heads: int) -> int:
        return min(rows // heads // SUBLANES * SUBLANES, chunk)

    fitting = [heads for heads in range(1, rows // SUBLANES + 1) if group % heads == 0]
    # More heads and fewer positions waste less on the diagonal.
    heads = max(fitting, key=lambda heads: (heads * positions(heads), heads))
    return heads, positions(heads)


class Tile(NamedTuple):
    """A tile's place in its row: scalars on the device."""

    first: jax.Array  # position of its first query
    end: jax.Array  # tokens of the row
    begin: jax.Array | int  # key blocks [begin, stop) hold what its queries see,
    full_begin: jax.Array | int  # and of them [full_begin, full_end) need no mask
    full_end: jax.Array
    stop: jax.Array
    first_column: jax.Array | int  # columns of the page table that it needs
    last_column: jax.Array


def place_tile(plan: Plan, start: jax.Array, length: jax.Array, tile: jax.Array) -> Tile:
    """Where a tile of a row lies; one without a valid query gets no key block."""
    tokens = jnp.int32(plan.tokens)
    length = jnp.clip(jnp.minimum(length, plan.width * plan.page_size - start), 0, plan.chunk)
    first = start + tile * plan.positions
    end = start + length
    last = jnp.minimum(first + plan.positions, end) - 1
    stop = jnp.where(first < end, lax.div(last, tokens) + 1, 0)
    begin = full_begin = first_column = 0
    seen_of_first, seen_of_last = plan.first_seen(first), plan.first_seen(last)
    if seen_of_first is not None and seen_of_last is not None:
        lowest, highest = jnp.maximum(seen_of_first, 0), jnp.maximum(seen_of_last, 0)
        begin = jnp.minimum(lax.div(lowest, tokens), stop)
        full_begin = jnp.clip(lax.div(highest + (tokens - 1), tokens), begin, stop)
        first_column = lax.div(lowest, jnp.int32(plan.page_size))
    full_end = jnp.clip(lax.div(first + 1, tokens), full_begin, stop)
    last_column = lax.div(last, jnp.int32(plan.page_size))
    return Tile(first, end, begin, full_begin, full_end, stop, first_column, last_column)
