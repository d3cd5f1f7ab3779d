"""Sizes of the Mosaic form of paged attention: blocks, programs, and the splits of a row."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.paged_attention_xla import first_seen

HEAD_DIMS = (64, 128)
PROCESSORS = 132  # of an H100 or H200
MAX_COLUMNS = 64  # query rows of a program: their accumulators stay in registers
MAX_WIDTH = 256  # columns of all kv heads of a program: two KV blocks fit in shared memory

# Splits that a row may always have, however many rows there are, and that it has at most.
MIN_SPLITS = 8
MAX_SPLITS = 64


@dataclasses.dataclass(frozen=True)
class PagedBlocks:
    """Block sizes of the Mosaic form.

    The ring of KV blocks takes `ring_bytes` of shared memory or less, at least two blocks; 96 KiB
    let two programs share an SM. A program serves as many kv heads as it takes to make TMA copies
    of `copy_bytes`. A split is `split_tokens` long or longer, shorter only where the rows are few,
    and rows are cut into so many splits that full rows give `programs` programs.
    """

    kv_tokens: int = 64
    ring_bytes: int = 98304
    copy_bytes: int = 4096
    split_tokens: int = 512
    programs: int = 1056


DEFAULT_BLOCKS = PagedBlocks()

SPACE = {
    "kv_tokens": (64, 128),
    "ring_bytes": (49152, 65536, 98304, 196608),
    "copy_bytes": (2048, 4096, 8192),
    "split_tokens": (128, 256, 512, 1024),
    "programs": (528, 1056, 2112),
}


@dataclasses.dataclass(frozen=True)
class Plan:
    """Static sizes of one call, and the arithmetic of a row's splits."""

    B: int
    T: int
    K: int
    G: int
    H: int
    P: int
    Z: int
    W: int
    scale: float
    window: int | None
    attention_chunk: int | None
    blocks: PagedBlocks

    @property
    def kv(self) -> int:
        """Tokens in a KV block."""
        return self.blocks.kv_tokens

    @property
    def rows(self) -> int:
        """Query rows of a kv head: heads of all its tokens."""
        return self.T * self.G

    @property
    def padded_rows(self) -> int:
        return -(-self.rows // 8) * 8

    @property
    def copy_rows(self) -> int:
        """Tokens in a TMA copy: it may cross neither a page nor a block."""
        return math.gcd(self.Z, self.kv)

    @property
    def heads(self) -> int:
        """kv heads of a program: the fewest that make copies of the wanted size."""
        fits = [
            k
            for k in range(1, self.K + 1)
            if self.K % k == 0 and k * self.padded_rows <= MAX_COLUMNS and k * self.H <= MAX_WIDTH
        ]
        large = [k for k in fits if 2 * k * self.H * self.copy_rows >= self.blocks.copy_bytes]
        return min(large, default=max(fits))

    @property
    def columns(self) -> int:
        return self.heads * self.padded_rows

    @property
    def slots(self) -> int:
        """KV blocks in the ring."""
        return min(max(self.blocks.ring_bytes // (4 * self.kv * self.heads * self.H), 2), 4)

    @property
    def groups(self) -> int:
        """Programs that share a split of a row, each with its kv heads."""
        return self.K // self.heads

    @property
    def min_blocks(self) -> int:
        """Blocks of the shortest split: fewer where rows and heads alone do not fill the chip.

        A split writes float32 outputs of all its query rows, so with many rows it is longer.
        """
        tokens = max(self.blocks.split_tokens, 32 * self.rows)
        full = min(self.B * self.groups / PROCESSORS, 1)
        return max(int(tokens * full) // self.kv, 2)

    @property
    def splits(self) -> int:
        """Splits that a row may have. Nothing but shapes enters."""
        seen = self.W * self.Z
        for limit in (self.window, self.attention_chunk):
            if limit is not None:
                seen = min(seen, limit + self.T + self.kv)
        longest = -(-seen // (self.kv * self.min_blocks))
        wanted = self.blocks.programs // (self.B * self.groups)
        return min(longest, max(wanted, MIN_SPLITS), MAX_SPLITS)

    def seen(self, length: jax.Array) -> tuple[jax.Array, jax.Array]:
        """First position that the first of a row's tokens sees, and the end of the row."""
        first = first_seen(length - self.T, self.window, self.attention_chunk)
        return first, jnp.minimum(length, self.W * self.Z)

    def split(self, first: jax.Array, end: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """A row's first block, its blocks, and those of one split: of its own length alone."""
        start = lax.div(first, jnp.int32(self.kv))
        count = jnp.maximum(lax.div(end + (self.kv - 1), jnp.int32(self.kv)) - start, 0)
        each = lax.div(count + (self.splits - 1), jnp.int32(self.splits))
        return start, count, jnp.maximum(each, self.min_blocks)


def plan_of(
    query: Any,
    key_pages: Any,
    page_table_BW: Any,
    scale: float,
    window: int | None,
    attention_chunk: int | None,
    blocks: PagedBlocks,
) -> Plan:
    """The plan for these arrays or shapes."""
    N, H = query.shape[-2:]
    P, Z, K, _ = key_pages.shape
    T = query.shape[1] if len(query.shape) == 4 else 1
    B, W = page_table_BW.shape
    return Plan(B, T, K, N // K, H, P, Z, W, scale, window, attention_chunk, blocks)


def unsupported(
    query: Any,
    key_pages: Any,
    value_pages: Any,
    page_table: Any,
    lengths: Any,
    *,
    scale: float,
    window: int | None = None,
    attention_chunk: int | None = None,
) -> str | None:
    """Why the Mosaic form does not take these arguments."""
    _, Z, K, H = key_pages.shape
    rows = math.prod(query.shape[1:-1]) // K
    if any(np.dtype(x.dtype) != jnp.bfloat16 for x in (query, key_pages, value_pages)):
        return "WGMMA takes bfloat16; float32 would be rounded to TF32"
    if H not in HEAD_DIMS:
        return f"head dims are {HEAD_DIMS}, not {H}"
    if Z % 8:
        return f"pages of {Z} tokens are not whole tiles of 8"
    if rows > MAX_COLUMNS:
        return f"{rows} query rows of a kv head are more than {MAX_COLUMNS}"
    return None
