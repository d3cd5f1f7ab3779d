"""The handoff of a prefilled request: pages gathered on P, sent, scattered on D, row installed.

Colocated is the same path with the identity for a transfer: the pages stay where they are and only
the row is installed.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jinfire.kvcache.pages import PagePair, Pools, pool_specs
from jinfire.programs.batch import DecodeRows, NewRow
from jinfire.programs.runtime import REPLICATED, MeshModel, global_pools, local_pools
from jinfire.programs.sampler import Sampled
from sharding import EXPERT, PIPELINE, TENSOR, InFlight, Side, TransferPlan

BLOCK_SPEC = PartitionSpec(PIPELINE, None, None, None, (EXPERT, TENSOR), None)
HEADS_DIM = 4

Blocks = list[dict[str, PagePair]]
"""One request's pages, per cut of the local layers: [stages, layers, pages, Z, K@tensor, H]."""


def page_buckets(table_width: int) -> tuple[int, ...]:
    """Page counts that a handoff is padded up to: powers of two, and the whole table."""
    sizes = {table_width}
    size = 1
    while size < table_width:
        sizes.add(size)
        size *= 2
    return tuple(sorted(sizes))


@dataclasses.dataclass
class Transit:
    """One request under way: its copies, and the first token's, on the decode mesh.

    `pages` is None when colocated. `num_pages` of the bucket carry tokens; `bytes` counts those.
    """

    pages: InFlight | None
    sampled: Sampled
    num_pages: int
    bytes: int

    def is_ready(self) -> bool:
        """Whether every copy has arrived, so that using it cannot stall the decode mesh."""
        return self.pages is None or (self.pages.is_ready() and self.sampled.token_B.is_ready())


class Handoff:
    """Everything that moves requests from a prefill mesh to a decode mesh.

    `send` is called right behind the prefill that completed a request, before the next prefill
    takes the donated pools; `install` once the copies have arrived.
    """

    def __init__(self, prefill: MeshModel, decode: MeshModel, table_width: int):
        self._decode = decode
        self._colocated = prefill is decode
        self.buckets = page_buckets(table_width)
        pools = pool_specs(decode.layout)
        self._install_row = decode.program(
            "install",
            _install_row,
            in_specs=(REPLICATED, REPLICATED, REPLICATED),
            out_specs=REPLICATED,
            donate=(0,),
        )
        if self._colocated:
            return
        self._plan = TransferPlan.make(
            prefill.config.num_layers,
            Side(prefill.mesh, prefill.config.num_kv_heads),
            Side(decode.mesh, decode.config.num_kv_heads),
        )
        self._gather = prefill.program(
            "gather",
            functools.partial(_gather, self._plan.source_cuts),
            in_specs=(pool_specs(prefill.layout), REPLICATED),
            out_specs=_block_specs(prefill, len(self._plan.source_cuts)),
        )
        self._scatter = decode.program(
            "scatter",
            functools.partial(_scatter, self._plan.target_cuts),
            in_specs=(pools, _block_specs(decode, len(self._plan.target_cuts)), REPLICATED),
            out_specs=pools,
            donate=(0,),
        )

    def send(self, pools: Pools, pages: list[int], sampled: Sampled) -> Transit:
        """Gather a request's pages and start their copies. Does not wait.

        `pools` are the prefill mesh's, `sampled` the dispatch that drew the first token.
        """
        if self._colocated:
            return Transit(None, sampled, len(pages), 0)
        blocks = self._gather(pools, self._padded(pages, fill=0))
        in_flight = self._plan.send(blocks, heads_dim=HEADS_DIM)
        bucket = self._bucket(len(pages))
        return Transit(
            in_flight,
            self._decode.replicate(sampled),
            len(pages),
            in_flight.bytes * len(pages) // bucket,
        )

    def install(
        self, pools: Pools, rows: DecodeRows, transit: Transit, pages: list[int], row: NewRow
    ) -> tuple[Pools, DecodeRows]:
        """Scatter arrived pages into the decode pools and set the row's state.

        Donates: pools and rows.
        """
        if transit.pages is not None:
            # Padding goes to a page past the pool, which the scatter drops.
            num_pool_pages = jax.tree.leaves(pools)[0].shape[1]
            targets = self._padded(pages[: transit.num_pages], fill=num_pool_pages)
            pools = self._scatter(pools, transit.pages.receive(), targets)
        return pools, self._install_row(rows, transit.sampled, row)

    def _bucket(self, num_pages: int) -> int:
        return next(size for size in self.buckets if size >= num_pages)

    def _padded(self, pages: list[int], fill: int) -> np.ndarray:
        padded = np.full(self._bucket(len(pages)), fill, np.int32)
        padded[: len(pages)] = pages
        return padded


def _block_specs(model: MeshModel, cuts: int) -> list[dict[str, PagePair]]:
    pair = PagePair(BLOCK_SPEC, BLOCK_SPEC)  # type: ignore[arg-type]
    return [dict.fromkeys(pool_specs(model.layout), pair) for _ in range(cuts)]


def _gather(cuts: tuple[tuple[int, int], ...], pools: Pools, pages: jax.Array) -> Blocks:
    return [
        {
            group: PagePair(
                *(
                    jnp.stack([slot[kind][0][pages] for slot in slots[start:stop]])[None]
                    for kind in range(2)
                )
            )
            for group, slots in pools.items()
        }
        for start, stop in cuts
    ]


def _scatter(
    cuts: tuple[tuple[int, int], ...], pools: Pools, blocks: Blocks, pages: jax.Array
) -> Pools:
    local = {group: list(slots) for group, slots in local_pools(pools).items()}
    for (start, stop), block in zip(cuts, blocks, strict=True):
        for group, slots in local.items():
            for slot in range(start, stop):
                slots[slot] = PagePair(
                    *(
                        old.at[pages].set(new[0, slot - start], mode="drop")
                        for old, new in zip(slots[slot], block[group], strict=True)
                    )
                )
    return global_pools({group: tuple(slots) for group, slots in local.items()})


def _install_row(rows: DecodeRows, sampled: Sampled, new: NewRow) -> DecodeRows:
    """Row state after a handoff: the first token may already have ended the request."""
    token = sampled.token_B[new.source[0], new.source[1]]
    stopped = jnp.any(token == new.stop_ids) | (new.remaining <= 0)

    def put(old: jax.Array, value: jax.Array) -> jax.Array:
        return old.at[new.row].set(value)

    return DecodeRows(
        token=put(rows.token, token),
        position=put(rows.position, new.position),
        remaining=put(rows.remaining, new.remaining),
        active=put(rows.active, ~stopped),
        page_tables=jax.tree.map(put, rows.page_tables, new.page_tables),
        stop_ids=put(rows.stop_ids, new.stop_ids),
        sampling=jax.tree.map(put, rows.sampling, new.sampling),
    )
