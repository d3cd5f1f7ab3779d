"""The page pools of one mesh, one per KV group, reserved and given back together."""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

from jinfire.config import EngineConfig, ModelConfig
from jinfire.errors import OutOfPages
from jinfire.kvcache.page_table import PagePool, pages_for

FULL = "full"
LOCAL = "local"


@dataclasses.dataclass(frozen=True)
class KVGroup:
    """Sizes of one KV group in an engine.

    `ring` is the most pages that a sequence holds. Column c of its page table is page c % ring of
    them, so pages of tokens that no layer of the group sees any more take new ones. `hit_pages`:
    prefix hits are whole multiples of so many pages; 0 for none.
    Units: pages; `pool_pages` includes the null page.
    """

    name: str
    ring: int
    pool_pages: int
    hit_pages: int = 1


def ring_pages(attention_chunk: int, span: int, page_size: int) -> int:
    """Pages that hold whatever `span` new tokens may see within their attention chunk.

    These are at most attention_chunk - 1 + span tokens in a row, and they may begin and end inside
    a page.
    """
    return pages_for(attention_chunk + span, page_size) + 1


def kv_groups(model: ModelConfig, config: EngineConfig) -> tuple[KVGroup, ...]:
    """The KV groups of a model, sized for an engine.

    A program writes at most one prefill chunk of a row before the row attends. A local group never
    has more pages than `max_rows` sequences hold, nor than the full one.
    Raises: ValueError for a group of another name, or a local one without an attention chunk.
    """
    names, chunk, size = model.kv_groups, model.attention_chunk, config.page_size
    if set(names) - {FULL, LOCAL} or (LOCAL in names and chunk is None):
        raise ValueError(
            f"KV groups: expected {FULL!r}, or {LOCAL!r} in a model with an attention chunk; got "
            f"{names} with attention_chunk={chunk}"
        )
    width = config.table_width
    if LOCAL not in names or chunk is None:
        return (KVGroup(FULL, width, config.pool_pages),)
    ring = min(width, ring_pages(chunk, max(c for _, c in config.prefill_shapes), size))
    local = KVGroup(LOCAL, ring, min(config.pool_pages, config.max_rows * ring + 1), hit_pages=0)
    # Where an attention chunk begins, local layers need nothing of what came before.
    full = KVGroup(FULL, width, config.pool_pages, hit_pages=math.lcm(chunk, size) // size)
    return tuple({FULL: full, LOCAL: local}[name] for name in names)


class HeldPages:
    """Pages of one sequence on one mesh: those behind the first `columns` of its page tables."""

    __slots__ = ("by_group", "columns")

    def __init__(self, columns: int = 0, by_group: dict[str, list[int]] | None = None) -> None:
        self.columns = columns
        self.by_group = by_group or {}

    def table(self, group: str, start: int, stop: int) -> list[int]:
        """The page table of a group from column `start` to `stop`, at most `columns`."""
        pages = self.by_group[group]
        count = len(pages)
        if stop <= count:
            return pages[start:stop]
        return [pages[column % count] for column in range(start, stop)]

    def first(self, columns: int) -> dict[str, list[int]]:
        """The pages by group that so many columns are made of."""
        return {group: pages[:columns] for group, pages in self.by_group.items()}


class PageSet:
    """One page pool for each KV group of a mesh.

    A sequence takes pages of all groups for a number of page-table columns, or of none. Only the
    full group keeps what a prefix cache needs.
    """

    def __init__(
        self, groups: Iterable[KVGroup], page_size: int, prefix_caching: bool = True
    ) -> None:
        self.groups = tuple(groups)
        self.page_size = page_size
        self.pools = {
            group.name: PagePool(
                group.pool_pages, page_size, prefix_caching and group.hit_pages > 0, group.hit_pages
            )
            for group in self.groups
        }
        self._rings = tuple(group.ring for group in self.groups)
        self._pools = tuple(self.pools.values())
        self._each = tuple(zip(self.pools, self._pools, self._rings, strict=True))
        self._caching = self.pools.get(FULL)

    @property
    def totals(self) -> tuple[int, ...]:
        """Usable pages by group."""
        return tuple(pool.total for pool in self._pools)

    @property
    def free(self) -> tuple[int, ...]:
        """Pages by group that can be handed out now."""
        return tuple(pool.free_pages for pool in self._pools)

    def demand(self, columns: int) -> tuple[int, ...]:
        """Pages by group that a sequence holds for `columns`."""
        return tuple(min(columns, ring) for ring in self._rings)

    def match(self, tokens: Sequence[int]) -> list[int]:
        """Pages of the full group that hold what `tokens` begins with, without holding them."""
        return [] if self._caching is None else self._caching.match(tokens)

    def fits(self, columns: int, matched: Sequence[int] = ()) -> bool:
        """Whether `columns` can be allocated after `matched` pages of the full group are held."""
        for pool, count in zip(self._pools, self.demand(columns), strict=True):
            hits = matched if pool is self._caching else ()
            if not pool.fits(count - len(hits), hits):
                return False
        return True

    def allocate(self, columns: int, tokens: Sequence[int] = ()) -> tuple[HeldPages, int]:
        """Pages for `columns`, and how many tokens of `tokens` they hold already.

        Raises: OutOfPages, with nothing changed.
        """
        counts = list(self.demand(columns))
        hits: list[int] = []
        if self._caching is not None and tokens:
            hits = self._caching.lookup(tokens)
            counts[self._pools.index(self._caching)] -= len(hits)
        try:
            taken = self._take(counts)
        except OutOfPages:
            if self._caching is not None:
                self._caching.release(hits)
            raise
        if hits:
            taken[FULL] = hits + taken[FULL]
        return HeldPages(columns, taken), len(hits) * self.page_size

    def can_grow(self, wants: Mapping[HeldPages, int]) -> bool:
        """Whether all these sequences can have pages for so many columns."""
        for _, pool, ring in self._each:
            missing = 0
            for held, columns in wants.items():
                before = held.columns
                missing += columns - before if columns <= ring else max(ring - before, 0)
            if missing > pool.free_pages:
                return False
        return True

    def grow(self, held: HeldPages, columns: int) -> None:
        """Pages for more columns of a sequence, where `can_grow` says so."""
        before = held.columns
        for name, pool, ring in self._each:
            # Not `min`: this runs for many rows in every decode step.
            missing = columns - before if columns <= ring else max(ring - before, 0)
            if missing:
                held.by_group[name] += pool.allocate(missing)
        held.columns = columns

    def _take(self, counts: Sequence[int]) -> dict[str, list[int]]:
        for pool, count in zip(self._pools, counts, strict=True):
            if count > pool.free_pages:
                pool.allocate(count)  # says what is missing, before another group gives any
        return {
            name: pool.allocate(count)
            for (name, pool), count in zip(self.pools.items(), counts, strict=True)
        }

    def register(self, tokens: Sequence[int], held: HeldPages, num_computed: int) -> None:
        """Makes the full pages of the first `num_computed` tokens findable."""
        if self._caching is not None and held.columns:
            self._caching.register(tokens, held.by_group[FULL], num_computed)

    def release(self, held: HeldPages) -> None:
        """Gives back all pages of a sequence."""
        for name, pages in held.by_group.items():
            self.pools[name].release(pages)
