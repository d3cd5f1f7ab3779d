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

from jinfire.kvcache.pages import Pages, Pools, group_layers, pool_specs
from jinfire.programs.batch import DecodeRows, NewRow
from jinfire.programs.runtime import REPLICATED, MeshModel, global_pools, local_pools
from jinfire.programs.sampler import Sampled
from sharding import Cuts, InFlight, Side, TransferPlan

SLOTS_DIM, HEADS_DIM = 3, 4

Blocks = dict[str, list[Pages]]
"""One request's pages by KV group, per cut of its slots: [stages, slots, pages, Z, K@tensor, H].

Where a side splits latents, blocks are cut along Z; on a side that does not, they are whole.
"""

PageLists = dict[str, list[int]]
"""Pages of one request by KV group, in the order of what they hold."""


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

    `pages` are by KV group, and none when colocated. The first `counts` pages of a group's bucket
    carry tokens; `bytes` counts those.
    """

    pages: dict[str, InFlight]
    sampled: Sampled
    counts: dict[str, int]
    bytes: int

    def is_ready(self) -> bool:
        """Whether every copy has arrived, so that using it cannot stall the decode mesh."""
        if not self.pages:
            return True
        arrived = all(copies.is_ready() for copies in self.pages.values())
        return arrived and self.sampled.token_B.is_ready()


class Handoff:
    """Everything that moves requests from a prefill mesh to a decode mesh.

    `send` is called right behind the prefill that completed a request, before the next prefill
    takes the donated pools; `install` once the copies have arrived. `rings` are the most pages that
    a sequence holds, by KV group.
    """

    def __init__(
        self, prefill: MeshModel, decode: MeshModel, rings: dict[str, int], page_size: int
    ):
        self._decode = decode
        self._rings = rings
        self._colocated = prefill is decode
        self.buckets = page_buckets(max(rings.values()))
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
        split = prefill.layout.splits_latents or decode.layout.splits_latents
        self._cut_dim = SLOTS_DIM if split else HEADS_DIM
        parts = page_size if split else decode.config.cached_heads
        source, target = (
            {
                group: Side(model.mesh, parts, layers, split and not model.layout.splits_latents)
                for group, layers in group_layers(model.layout).items()
            }
            for model in (prefill, decode)
        )
        self._plans = {group: TransferPlan.make(source[group], target[group]) for group in source}
        source_cuts = {group: plan.source_cuts for group, plan in self._plans.items()}
        target_cuts = {group: plan.target_cuts for group, plan in self._plans.items()}
        self._gather = prefill.program(
            "gather",
            functools.partial(_gather, source_cuts),
            in_specs=(pool_specs(prefill.layout), REPLICATED),
            out_specs=self._block_spec(source),
        )
        self._scatter = decode.program(
            "scatter",
            functools.partial(_scatter, target_cuts),
            in_specs=(pools, self._block_spec(target), REPLICATED),
            out_specs=pools,
            donate=(0,),
        )

    def _block_spec(self, sides: dict[str, Side]) -> PartitionSpec:
        return next(iter(sides.values())).block_sharding(self._cut_dim).spec

    def send(self, pools: Pools, pages: PageLists, sampled: Sampled) -> Transit:
        """Gather a request's pages and start their copies. Does not wait.

        `pools` are the prefill mesh's, `sampled` the dispatch that drew the first token.
        """
        counts = {group: len(listed) for group, listed in pages.items()}
        if self._colocated:
            return Transit({}, sampled, counts, 0)
        padded = self._padded(pages, dict.fromkeys(pages, 0))
        blocks = self._gather(pools, padded)
        in_flight = {
            group: plan.send(blocks[group], heads_dim=self._cut_dim)
            for group, plan in self._plans.items()
        }
        num_bytes = sum(
            copies.bytes * counts[group] // len(padded[group])
            for group, copies in in_flight.items()
        )
        return Transit(in_flight, self._decode.replicate(sampled), counts, num_bytes)

    def install(
        self, pools: Pools, rows: DecodeRows, transit: Transit, pages: PageLists, row: NewRow
    ) -> tuple[Pools, DecodeRows]:
        """Scatter arrived pages into the decode pools and set the row's state.

        Donates: pools and rows.
        """
        if transit.pages:
            # Padding goes to a page past the pool, which the scatter drops.
            past = {group: jax.tree.leaves(slots)[0].shape[1] for group, slots in pools.items()}
            sent = {group: pages[group][:count] for group, count in transit.counts.items()}
            blocks = {group: copies.receive() for group, copies in transit.pages.items()}
            pools = self._scatter(pools, blocks, self._padded(sent, past))
        return pools, self._install_row(rows, transit.sampled, row)

    def _padded(self, pages: PageLists, fill: dict[str, int]) -> dict[str, np.ndarray]:
        """Page lists filled up to a bucket: that of the longest, as far as a group goes."""
        longest = max(map(len, pages.values()))
        bucket = next(size for size in self.buckets if size >= longest)
        padded = {}
        for group, listed in pages.items():
            array = np.full(min(bucket, self._rings[group]), fill[group], np.int32)
            array[: len(listed)] = listed
            padded[group] = array
        return padded


def _gather(cuts: dict[str, Cuts], pools: Pools, pages: dict[str, jax.Array]) -> Blocks:
    def block(group: str, start: int, stop: int) -> Pages:
        wanted = pages[group]
        return jax.tree.map(
            lambda *slots: jnp.stack([slot[0][wanted] for slot in slots])[None],
            *pools[group][start:stop],
        )

    return {group: [block(group, *ends) for ends in cuts[group]] for group in pools}


def _scatter(
    cuts: dict[str, Cuts], pools: Pools, blocks: Blocks, pages: dict[str, jax.Array]
) -> Pools:
    scattered = {}
    for group, slots in local_pools(pools).items():
        put = functools.partial(_put_slot, pages[group])
        scattered[group] = tuple(
            jax.tree.map(functools.partial(put, slot - start), slots[slot], block)
            for (start, stop), block in zip(cuts[group], blocks[group], strict=True)
            for slot in range(start, stop)
        )
    return global_pools(scattered)


def _put_slot(pages: jax.Array, index: int, old: jax.Array, block: jax.Array) -> jax.Array:
    return old.at[pages].set(block[0, index], mode="drop")


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
