"""The handoff of a prefilled request: pages gathered on P, sent, scattered on D, row installed.

Colocated is the same path with the identity for a transfer: the pages stay where they are and only
the row is installed. With a KV codec, pages are coded where they are gathered and decoded where
they are scattered, and the transfer moves coded bytes.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jinfire.kvcache.pages import Pages, Pools, group_layers, pool_specs
from jinfire.programs.batch import DecodeRows, NewRow
from jinfire.programs.page_codec import (
    MESSAGE_HEADS_DIM,
    MESSAGE_SPEC,
    OVERFULL_SPEC,
    decode_pages,
    encode_pages,
)
from jinfire.programs.runtime import REPLICATED, MeshModel, Program, global_pools, local_pools
from jinfire.programs.sampler import Sampled
from sharding import Cuts, InFlight, Side, TransferPlan

SLOTS_DIM, HEADS_DIM = 3, 4

Blocks = dict[str, list[Pages]]
"""One request's pages by KV group, per cut of its slots: [stages, slots, pages, Z, K@tensor, H];
coded, its messages or their exponents: [stages, slots, K@tensor, bytes].

Where a side splits latents, blocks are cut along Z; on a side that does not, they are whole."""

Flights = dict[str, InFlight]

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


class Gathered(NamedTuple):
    """Coded blocks. Where a message is `overfull` all exponents have to follow it."""

    messages: Blocks
    exponents: Blocks
    overfull: Any  # an array, or its spec


@dataclasses.dataclass
class Transit:
    """One request under way: its copies, and the first token's, on the decode mesh.

    `pages` are by KV group, and none when colocated. The first `counts` pages of a group's bucket
    carry tokens. `bytes` are those of these pages, `sent_bytes` those in which they cross; neither
    counts the padding of the bucket, nor copies of a head.
    """

    pages: Flights
    sampled: Sampled
    counts: dict[str, int]
    bytes: int
    sent_bytes: int
    exponents: "Exponents | None" = None

    def is_ready(self) -> bool:
        """Whether every copy has arrived, so that using it cannot stall the decode mesh.

        What has to follow overfull messages is sent as soon as that is known.
        """
        if not self.pages:
            return True
        if self.exponents is not None and not self.exponents.settled():
            return False
        followed = self.exponents.flights if self.exponents is not None else {}
        copies = (*self.pages.values(), *followed.values())
        return all(each.is_ready() for each in copies) and self.sampled.token_B.is_ready()

    @property
    def crossed_bytes(self) -> int:
        """`sent_bytes` with the exponents that had to follow."""
        return self.sent_bytes + (self.exponents.bytes if self.exponents is not None else 0)


class Exponents:
    """The exponents of coded pages, kept on the prefill mesh until it is known who needs them."""

    def __init__(self, overfull: Any, send: Callable[[], tuple[Flights, int]]) -> None:
        self._overfull = overfull
        self._send: Callable[[], tuple[Flights, int]] | None = send
        self.flights: Flights = {}
        self.bytes = 0
        overfull.copy_to_host_async()

    def settled(self) -> bool:
        """Whether it is known; where they are needed they are under way then."""
        if self._send is not None and self._overfull.is_ready():
            if np.asarray(self._overfull).any():
                self.follow()
            self._send = None  # forgets the arrays
        return self._send is None

    def follow(self) -> None:
        """Send them."""
        assert self._send is not None
        self.flights, self.bytes = self._send()
        self._send = None


class Handoff:
    """Everything that moves requests from a prefill mesh to a decode mesh.

    `send` is called right behind the prefill that completed a request, before the next prefill
    takes the donated pools; `install` once the copies have arrived. `rings` are the most pages that
    a sequence holds, by KV group. With `codec` "unweight" pages cross coded, and come out bit for
    bit.
    """

    def __init__(
        self,
        prefill: MeshModel,
        decode: MeshModel,
        rings: dict[str, int],
        page_size: int,
        codec: str = "none",
    ):
        self._decode = decode
        self._rings = rings
        self._colocated = prefill is decode
        self.is_coded = codec != "none" and not self._colocated
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
        # One spec for all blocks of a side.
        gathered: Any = MESSAGE_SPEC
        blocks = MESSAGE_SPEC
        if self.is_coded:
            self._cut_dim = MESSAGE_HEADS_DIM
        else:
            gathered, blocks = map(self._block_spec, (source, target))
        self._gather = prefill.program(
            "gather",
            functools.partial(_gather_coded if self.is_coded else _gather, source_cuts),
            in_specs=(pool_specs(prefill.layout), REPLICATED),
            out_specs=Gathered(gathered, gathered, OVERFULL_SPEC) if self.is_coded else gathered,
        )

        def scatter(name: str, function: Any, *more: PartitionSpec) -> Program:
            return decode.program(
                name,
                function,
                in_specs=(pools, REPLICATED, blocks, *more),
                out_specs=pools,
                donate=(0,),
            )

        if self.is_coded:
            self._scatter = scatter("scatter", _scatter_coded)
            self._scatter_overfull = scatter("scatter overfull", _scatter_coded, blocks)
        else:
            self._scatter = scatter("scatter", functools.partial(_scatter, target_cuts))

    def _block_spec(self, sides: dict[str, Side]) -> PartitionSpec:
        return next(iter(sides.values())).block_sharding(self._cut_dim).spec

    def send(self, pools: Pools, pages: PageLists, sampled: Sampled) -> Transit:
        """Gather a request's pages and start their copies. Does not wait.

        `pools` are the prefill mesh's, `sampled` the dispatch that drew the first token.
        """
        counts = {group: len(listed) for group, listed in pages.items()}
        if self._colocated:
            return Transit({}, sampled, counts, 0, 0)
        padded = self._padded(pages, dict.fromkeys(pages, 0))
        gathered = self._gather(pools, padded)
        size = sum(count * self._page_bytes(group, pools[group]) for group, count in counts.items())
        if not self.is_coded:
            flights = self._flights(gathered)
            return Transit(flights, self._decode.replicate(sampled), counts, size, size)
        shares = {group: (count, len(padded[group])) for group, count in counts.items()}
        messages, exponents, overfull = gathered
        flights = self._flights(messages)

        def follow() -> tuple[Flights, int]:
            more = self._flights(exponents)
            return more, _bytes_of(more, shares)

        return Transit(
            flights,
            self._decode.replicate(sampled),
            counts,
            size,
            _bytes_of(flights, shares),
            Exponents(overfull, follow),
        )

    def _flights(self, blocks: Blocks) -> Flights:
        """Copies of blocks under way to the decode mesh."""
        return {
            group: plan.send(blocks[group], heads_dim=self._cut_dim)
            for group, plan in self._plans.items()
        }

    def _page_bytes(self, group: str, slots: tuple[Pages, ...]) -> int:
        """Bytes of a page in all layers of a group, each head once."""
        plan = self._plans[group]
        token = sum(leaf.shape[-1] * leaf.dtype.itemsize for leaf in jax.tree.leaves(slots[0]))
        page_size = jax.tree.leaves(slots[0])[0].shape[2]
        return plan.num_layers * self._decode.config.cached_heads * page_size * token

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
            blocks = _received(transit.pages)
            padded = self._padded(sent, past)
            if transit.exponents is not None and transit.exponents.flights:
                exponents = _received(transit.exponents.flights)
                pools = self._scatter_overfull(pools, padded, blocks, exponents)
            else:
                pools = self._scatter(pools, padded, blocks)
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


def _gather_coded(cuts: dict[str, Cuts], pools: Pools, pages: dict[str, jax.Array]) -> Gathered:
    messages, exponents, overfull = {}, {}, []
    for group, slots in pools.items():
        messages[group], exponents[group], any_of_it = encode_pages(
            slots, cuts[group], pages[group]
        )
        overfull.append(any_of_it)
    return Gathered(messages, exponents, jnp.any(jnp.stack(overfull))[None, None])


def _scatter(
    cuts: dict[str, Cuts], pools: Pools, pages: dict[str, jax.Array], blocks: Blocks
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


def _scatter_coded(
    pools: Pools,
    pages: dict[str, jax.Array],
    messages: Blocks,
    exponents: Blocks | None = None,
) -> Pools:
    """`_scatter` of messages; with `exponents` of any, else of those that are not overfull."""
    scattered = {}
    for group, slots in local_pools(pools).items():
        wanted = pages[group]
        beside = None if exponents is None else exponents[group]
        decoded = decode_pages(messages[group], beside, slots[0], len(wanted))
        put = functools.partial(_put, wanted)
        scattered[group] = tuple(map(functools.partial(jax.tree.map, put), slots, decoded))
    return global_pools(scattered)


def _received(flights: Flights) -> Blocks:
    return {group: copies.receive() for group, copies in flights.items()}


def _bytes_of(flights: Flights, shares: dict[str, tuple[int, int]]) -> int:
    """Bytes of copies for the pages of their buckets that carry tokens."""
    return sum(
        copies.bytes * shares[group][0] // shares[group][1] for group, copies in flights.items()
    )


def _put_slot(pages: jax.Array, index: int, old: jax.Array, block: jax.Array) -> jax.Array:
    return _put(pages, old, block[0, index])


def _put(pages: jax.Array, old: jax.Array, new: jax.Array) -> jax.Array:
    return old.at[pages].set(new, mode="drop")


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
