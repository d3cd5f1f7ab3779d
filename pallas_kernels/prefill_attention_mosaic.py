"""Paged attention of prefill chunks on Hopper GPUs: TMA through the page table, WGMMA, one launch.

A thread block owns one tile: some query positions of one row, for some or all query heads of one
kv head, so that a block of keys is read once for all of them. Two warpgroups compute, each on 64
rows of the tile (row m is query m % positions of head m // positions). The four warps of a third
one load: two bring keys and two bring values, a page at a time, into rings of buffers that hold a
block of tokens each, as many blocks ahead as there are buffers.

The computing warpgroups take turns at the tensor cores. In its turn one issues the product of its
weights and a block of values, and that of its queries and the next block of keys; then it passes
the turn on, waits for its products and does its softmax, while the other's products run. Blocks
that no query of the tile sees are not visited; only those on the diagonal or on the border of a
window compute a mask.

Blocks are counted from position 0 and a block that a query does not see changes none of its bits,
so a result depends on neither the tile nor the batch nor the chunk that its query came in.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention_xla import MASKED
from pallas_kernels.prefill_attention_tiles import (
    DEFAULT_BLOCKS,
    ROWS,
    SUBLANES,
    Plan,
    PrefillBlocks,
    Tile,
    place_tile,
    tile_shape,
)

# Registers of a computing and of a loading thread, by the number of computing warpgroups. They use
# up the register file, so one block runs on an SM, whatever shared memory it takes.
REGISTERS = {2: (240, 24), 3: (160, 24)}


class _Ring(NamedTuple):
    """Buffers of `slots` blocks, with barriers for a block that is there and for one let go."""

    buffers: Any
    ready: Any
    free: Any


class _Scratch(NamedTuple):
    """Shared memory and barriers of a thread block."""

    queries: Any  # and in the end the output
    queries_ready: Any
    keys: _Ring
    values: _Ring
    weights: Any  # of the interpreter only
    turn: Any
    cleaned: Any
    done: Any


def _scratch(plan: Plan) -> _Scratch:
    def shared(*shape: int) -> Any:
        return plgpu.SMEM(shape, plan.dtype)

    def ring() -> _Ring:
        return _Ring(
            buffers=shared(plan.slots, plan.tokens, plan.head_dim),
            ready=plgpu.Barrier(num_arrivals=plan.pages, num_barriers=plan.slots),
            free=plgpu.Barrier(num_arrivals=plan.warpgroups, num_barriers=plan.slots),
        )

    return _Scratch(
        queries=shared(plan.warpgroups * ROWS, plan.head_dim),
        queries_ready=plgpu.Barrier(num_arrivals=plan.heads),
        keys=ring(),
        values=ring(),
        weights=shared(plan.warpgroups, ROWS, plan.tokens) if plan.interpret else None,
        turn=plgpu.Barrier(num_barriers=plan.warpgroups),
        cleaned=plgpu.Barrier(num_arrivals=plan.warpgroups),
        done=plgpu.Barrier(num_arrivals=plan.warpgroups),
    )


class _Source(NamedTuple):
    """A pool's pages in device memory, and the ring that they go to."""

    page: Callable[[jax.Array], Any]
    ring: _Ring


def _load_blocks(
    plan: Plan,
    tile: Tile,
    column_page: Callable[[jax.Array], jax.Array],
    sources: Sequence[_Source],
    share: range,
) -> None:
    """A share of the pages of every key block, each as soon as its buffer comes free.

    Columns that the tile does not need bring page P, which is outside the pool: TMA reads nothing
    and writes zeros, which are safe as values.
    """
    blocks = tile.stop - tile.begin

    def load(i: jax.Array, _: None) -> None:
        slot = lax.rem(i, jnp.int32(plan.slots))
        ids = []
        for page in share:
            column = (tile.begin + i) * plan.pages + page
            needed = (column >= tile.first_column) & (column <= tile.last_column)
            found = jnp.clip(column_page(jnp.minimum(column, plan.width - 1)), 0, plan.pool - 1)
            ids.append(jnp.where(needed, found, plan.pool))
        for source in sources:
            pl.when(i >= plan.slots)(partial(plgpu.barrier_wait, source.ring.free.at[slot]))

            @pl.when(i < blocks)
            def _(source=source):
                for page, found in zip(share, ids, strict=True):
                    place = pl.ds(page * plan.page_size, plan.page_size)
                    plgpu.copy_gmem_to_smem(
                        source.page(found),
                        source.ring.buffers.at[slot, place],
                        source.ring.ready.at[slot],
                    )

    # The last turns load nothing and wait for the last buffers: no signal is left unseen.
    lax.fori_loop(0, jnp.where(blocks > 0, blocks + plan.slots, 0), load, None)


def _clean_values(plan: Plan, tile: Tile, block: jax.Array, values: Any, scratch: _Scratch):
    """Zeros in the slots behind the row's last token: they may hold NaN, and 0 x NaN is NaN.

    Each computing warpgroup cleans its part, and waits for the others.
    """
    warpgroup = lax.axis_index("warpgroup")
    for part in range(plan.tokens // ROWS):

        @pl.when(warpgroup == part % plan.warpgroups)
        def _(part=part):
            some = values.at[pl.ds(part * ROWS, ROWS)]
            shape = (ROWS, plan.head_dim)
            slots = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA)
            live = slots < tile.end - block * plan.tokens - part * ROWS
            found = plgpu.load(some, layout=plgpu.Layout.WGMMA)
            some[...] = jnp.where(live, found, jnp.zeros_like(found))
            plgpu.commit_smem()

    plgpu.barrier_arrive(scratch.cleaned)
    plgpu.barrier_wait(scratch.cleaned)


def _accumulator(columns: int) -> Any:
    return plgpu.WGMMAAccumulatorRef((ROWS, columns), jnp.float32)


def _add_product(
    plan: Plan,
    acc: jax.Array,
    weights: jax.Array,
    values: Any,
    scratch: _Scratch,
    meanwhile: Callable[[], None],
) -> jax.Array:
    """`acc` plus weights times values; `meanwhile` runs while the tensor cores do."""
    if plan.interpret:
        # The interpreter takes the left operand from shared memory, and a fresh accumulator, only.
        place = scratch.weights.at[lax.axis_index("warpgroup")]
        place[...] = weights
        plgpu.commit_smem()

        def multiply(product):
            plgpu.wgmma(product, place, values)
            return product[...]

        acc += pl.run_scoped(multiply, _accumulator(plan.head_dim))
        meanwhile()
        return acc

    def accumulate(product):
        plgpu.wgmma(product, weights, values)
        meanwhile()

    accumulator: Any = plgpu.WGMMAAccumulatorRef.init(acc)
    return pl.run_state(accumulate)(accumulator)


def _attend(plan: Plan, tile: Tile, scratch: _Scratch) -> None:
    """A computing warpgroup's 64 rows of the tile: queries in, output out, in the same place."""
    layout = plgpu.Layout.WGMMA
    warpgroup = lax.axis_index("warpgroup")
    mine = scratch.queries.at[pl.ds(warpgroup * ROWS, ROWS)]
    row = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=layout.reduce(1)) + warpgroup * ROWS
    position = tile.first + lax.rem(row, jnp.int32(plan.positions))
    # Queries that are not there see what the last one does: no slot behind the row's tokens.
    last_seen = jnp.minimum(position, tile.end - 1)
    first_seen = plan.first_seen(last_seen)
    # exp2 is what the hardware has; the scale goes into one multiply-add with the subtraction.
    scale = plan.scale * math.log2(math.e)

    def slot_of(block: jax.Array | int) -> jax.Array:
        return lax.rem(block - tile.begin, jnp.int32(plan.slots))

    def multiply_keys(scores: Any, block: jax.Array | int) -> None:
        plgpu.wgmma(scores, mine, scratch.keys.buffers.at[slot_of(block)].transpose((1, 0)))

    def await_turn() -> None:
        if plan.warpgroups > 1:
            plgpu.barrier_wait(scratch.turn.at[warpgroup])

    def pass_turn() -> None:
        if plan.warpgroups > 1:
            following = lax.rem(warpgroup + 1, jnp.int32(plan.warpgroups))
            plgpu.barrier_arrive(scratch.turn.at[following])

    def first_scores(scores: Any) -> jax.Array:
        await_turn()
        multiply_keys(scores, tile.begin)
        pass_turn()
        return scores[...]

    def mask(scores: jax.Array, block: jax.Array) -> jax.Array:
        def of_rows(bound: jax.Array) -> jax.Array:
            return lax.broadcast_in_dim(bound, scores.shape, [0])

        key = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=layout)
        key += block * plan.tokens
        seen = key <= of_rows(last_seen)
        if first_seen is not None:
            seen &= key >= of_rows(first_seen)
        return jnp.where(seen, scores, -jnp.inf)

    def attend_block(block: jax.Array, state: tuple, *, masked: bool = False) -> tuple:
        """The softmax of a block; then its values and the next block's keys, in one turn."""
        scores, acc, total, top = state
        slot = slot_of(block)
        values = scratch.values.buffers.at[slot]
        more = block + 1 < tile.stop
        if masked:
            scores = mask(scores, block)
        # The top starts finite, so a block without a seen key gives weights of exp2(-inf) = 0 and
        # keeps what was there times exp2(0) = 1.
        new_top = jnp.maximum(top, scores.max(axis=1) * scale)
        keep = jnp.exp2(top - new_top)
        weights = jnp.exp2(scores * scale - lax.broadcast_in_dim(new_top, scores.shape, [0]))
        acc *= lax.broadcast_in_dim(keep, acc.shape, [0])
        total = total * keep + weights.sum(axis=1)
        weights = weights.astype(plan.dtype)
        if not plan.interpret:
            # Nothing of the softmax drifts behind the waits: that would spill.
            acc, total, new_top, weights = lax.optimization_barrier((acc, total, new_top, weights))
        plgpu.barrier_wait(scratch.values.ready.at[slot])
        if masked:

            @pl.when((block + 1) * plan.tokens > tile.end)
            def _():
                _clean_values(plan, tile, block, values, scratch)

        @pl.when(more)
        def _():
            plgpu.barrier_wait(scratch.keys.ready.at[slot_of(block + 1)])

        await_turn()

        def multiply(next_scores):
            def issue_the_rest():
                # Behind the last block the keys are any, and the scores are not used: that is
                # cheaper than another copy of the loop for the last block.
                multiply_keys(next_scores, block + 1)
                pass_turn()
                plgpu.wgmma_wait(1)
                plgpu.barrier_arrive(scratch.values.free.at[slot])

            out = _add_product(plan, acc, weights, values, scratch, issue_the_rest)
            return out, next_scores[...]

        acc, scores = pl.run_scoped(multiply, _accumulator(plan.tokens))

        @pl.when(more)
        def _():
            plgpu.barrier_arrive(scratch.keys.free.at[slot_of(block + 1)])

        return scores, acc, total, new_top

    plgpu.barrier_wait(scratch.queries_ready)
    plgpu.barrier_wait(scratch.keys.ready.at[0])
    # The first turn is the first warpgroup's, and in the end it takes back what was passed on.
    pl.when(warpgroup == plan.warpgroups - 1)(pass_turn)
    scores = pl.run_scoped(first_scores, _accumulator(plan.tokens))
    plgpu.barrier_arrive(scratch.keys.free.at[0])
    state = (
        scores,
        plgpu.layout_cast(jnp.zeros((ROWS, plan.head_dim), jnp.float32), layout),
        plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), layout.reduce(1)),
        plgpu.layout_cast(jnp.full((ROWS,), MASKED, jnp.float32), layout.reduce(1)),
    )
    masked_block = partial(attend_block, masked=True)
    if first_seen is not None:
        state = lax.fori_loop(tile.begin, tile.full_begin, masked_block, state)
    state = lax.fori_loop(tile.full_begin, tile.full_end, attend_block, state)
    _, acc, total, _ = lax.fori_loop(tile.full_end, tile.stop, masked_block, state)
    pl.when(warpgroup == 0)(await_turn)

    out = acc * lax.broadcast_in_dim(1 / total, acc.shape, [0])
    # Queries that are not there may be NaN; their rows are apart from all others.
    out = jnp.where(lax.broadcast_in_dim(position, acc.shape, [0]) < tile.end, out, 0.0)
    mine[...] = out.astype(plan.dtype)


def _kernel(
    plan: Plan,
    query: Any,
    key_pages: Any,
    value_pages: Any,
    page_table: Any,
    starts: Any,
    lengths: Any,
    out: Any,
    scratch: _Scratch,
) -> None:
    row, warpgroup = lax.axis_index("row"), lax.axis_index("warpgroup")
    # The longest tiles first: the chip empties evenly.
    index = plan.tiles - 1 - lax.axis_index("tile")
    first_head = lax.axis_index("heads") * plan.heads
    kv_head = lax.div(first_head, jnp.int32(plan.group))
    tile = place_tile(plan, starts[row], lengths[row], index)
    # Each head of the tile: its rows in shared memory, its place in the query and in the output.
    places = [
        (
            scratch.queries.at[pl.ds(head * plan.positions, plan.positions)],
            (row, pl.ds(index * plan.positions, plan.positions), first_head + head),
        )
        for head in range(plan.heads)
    ]

    sources = [
        _Source(lambda page: key_pages.at[page, :, kv_head], scratch.keys),
        _Source(lambda page: value_pages.at[page, :, kv_head], scratch.values),
    ]
    load_blocks = partial(_load_blocks, plan, tile, lambda column: page_table[row, column])

    def load() -> None:
        for ours, theirs in places:
            plgpu.copy_gmem_to_smem(query.at[theirs], ours, scratch.queries_ready)
        if plan.interpret:
            # The interpreter runs out of threads where warps wait on their own.
            load_blocks(sources, range(plan.pages))
            return

        @plgpu.warp_map
        def _(warp):
            for i, source in enumerate(sources):
                for j in range(min(2, plan.pages)):
                    share = range(j, plan.pages, 2)
                    pl.when(warp == 2 * i + j)(partial(load_blocks, [source], share))

    @pl.when(warpgroup == plan.warpgroups)
    def _():
        if plan.warpgroups in REGISTERS:
            plgpu.set_max_registers(REGISTERS[plan.warpgroups][1], action="decrease")
        pl.when(tile.begin < tile.stop)(load)
        plgpu.barrier_wait(scratch.done)
        # TMA drops what lies behind the last query of the chunk.
        for ours, theirs in places:
            plgpu.copy_smem_to_gmem(ours, out.at[theirs])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    @pl.when(warpgroup < plan.warpgroups)
    def _():
        if plan.warpgroups in REGISTERS:
            plgpu.set_max_registers(REGISTERS[plan.warpgroups][0], action="increase")
        occupied = tile.begin < tile.stop
        pl.when(occupied)(partial(_attend, plan, tile, scratch))

        @pl.when(~occupied)
        def _():
            mine = scratch.queries.at[pl.ds(warpgroup * ROWS, ROWS)]
            zeros = jnp.zeros((ROWS, plan.head_dim), plan.dtype)
            mine[...] = plgpu.layout_cast(zeros, plgpu.Layout.WGMMA)

        plgpu.commit_smem()
        plgpu.barrier_arrive(scratch.done)


def prefill_attention_mosaic(
    query_RCNH: jax.Array,
    key_pages: jax.Array,
    value_pages: jax.Array,
    page_table_RW: jax.Array,
    starts_R: jax.Array,
    lengths_R: jax.Array,
    *,
    scale: float,
    window: int | None = None,
    attention_chunk: int | None = None,
    blocks: PrefillBlocks = DEFAULT_BLOCKS,
    interpret: bool | plgpu.InterpretGPUParams = False,
) -> jax.Array:
    """Prefill attention on Hopper: TMA through the page table, WGMMA, one tile a thread block.

    One launch. Shared memory holds a tile of queries and the two rings: 224 KB of 227 at head
    dimension 128.
    """
    R, chunk, N, H = query_RCNH.shape
    P, Z, K, _ = key_pages.shape
    query = jnp.pad(query_RCNH, ((0, 0), (0, -chunk % SUBLANES), (0, 0), (0, 0)))
    heads, positions = tile_shape(N // K, query.shape[1], blocks.warpgroups * ROWS)
    plan = Plan(
        scale=scale,
        window=window,
        attention_chunk=attention_chunk,
        dtype=query.dtype,
        head_dim=H,
        chunk=chunk,
        group=N // K,
        heads=heads,
        positions=positions,
        warpgroups=min(blocks.warpgroups, -(-heads * positions // ROWS)),
        pool=P,
        page_size=Z,
        width=page_table_RW.shape[1],
        pages=max(1, blocks.kv_tokens // Z),
        slots=blocks.slots,
        interpret=bool(interpret),
    )
    run = plgpu.kernel(
        partial(_kernel, plan),
        out_type=jax.ShapeDtypeStruct(query.shape, query.dtype),
        scratch_types=[_scratch(plan)],
        # The last axis is the fastest: blocks that run together share a kv head's keys in L2.
        grid=(R, N // heads, plan.tiles),
        grid_names=("row", "heads", "tile"),
        num_threads=plan.warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="prefill_attention",
        interpret=plgpu.InterpretGPUParams() if interpret is True else interpret or None,
    )
    return run(query, key_pages, value_pages, page_table_RW, starts_R, lengths_R)[:, :chunk]
