"""Mosaic form of latent attention, for Hopper."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.latent_attention_plan import (
    BLOCK,
    DEFAULT_BLOCKS,
    NOTHING,
    PROCESSORS,
    SHORT_TABLE,
    SLOTS,
    SPLITS_AT_ONCE,
    TILE,
    LatentBlocks,
    Plan,
    Work,
    ceil_div,
    make_plan,
)

# Registers of a computing and of the loading thread: as many in all as the launch has, 3 x 168.
REGISTERS = (232, 40)

WGMMA = plgpu.Layout.WGMMA
ROWS = WGMMA.reduce(1)


def latent_attention_mosaic(
    query: jax.Array,
    latent_pages: jax.Array,
    page_table_BW: jax.Array,
    lengths_B: jax.Array,
    *,
    scale: float,
    rank: int,
    with_lse: bool = False,
    blocks: LatentBlocks = DEFAULT_BLOCKS,
    interpret: Any = False,
) -> Any:
    """Latent attention on a Hopper GPU, split over each row's KV length.

    A list of the parts of rows that have tokens is made first; it is the same in all layers. One
    launch works through it. Where the table is wide enough for splits, another one combines those
    of the rows that have several.
    """
    plan = make_plan(query, latent_pages, page_table_BW, scale, rank, blocks, with_lse)
    rows = plan.tokens * plan.heads
    query_BMD = query.reshape(plan.batch, rows, plan.width)
    if plan.padded_rows != rows:
        query_BMD = jnp.pad(query_BMD, ((0, 0), (0, plan.padded_rows - rows), (0, 0)))
    pool_PZD = latent_pages.reshape(plan.pages, plan.page_size, plan.width)
    if plan.columns * plan.page_size < SHORT_TABLE:
        lengths_B = jnp.minimum(lengths_B, plan.columns * plan.page_size)
    out_BMC, *parts = _attend(plan, interpret)(
        query_BMD, pool_PZD, page_table_BW, lengths_B, *plan.items(lengths_B)
    )
    if plan.splits > 1:
        # Rows with one split are done: the second launch writes the others in place.
        out_ref = jax.new_ref(out_BMC)
        _combine(plan, interpret)(*parts, lengths_B, out_ref)
        out_BMC = jax.freeze(out_ref)
    out = out_BMC[:, :rows].reshape(*query.shape[:-1], rank)
    if not with_lse:
        return out
    lse_BM = _log_sums(plan, parts[-1], lengths_B)
    return out, lse_BM[:, :rows].reshape(query.shape[:-1])


def _log_sums(plan: Plan, sums_BXQM: jax.Array, lengths_B: jax.Array) -> jax.Array:
    """Natural logarithm of each query's sum of weights over all splits, -inf for none: [B, M].

    `sums` are base 2, by split and tile; those of splits that a row does not have were not written.
    """
    splits_X = jnp.arange(plan.splits, dtype=jnp.int32)
    there = splits_X[None, :] < plan.row_splits(lengths_B)[:, None]
    sums = jnp.where(there[:, :, None, None], sums_BXQM, NOTHING)
    top_BQM = jnp.max(sums, axis=1)
    total_BQM = jnp.sum(jnp.exp2(sums - top_BQM[:, None]), axis=1)
    lse = jnp.where(top_BQM > NOTHING, (top_BQM + jnp.log2(total_BQM)) * math.log(2), -jnp.inf)
    return lse[:, :, : plan.rows].reshape(plan.batch, plan.padded_rows)


def _attend(plan: Plan, interpret: Any) -> Callable[..., Any]:
    """Attention of one tile of queries to one split of a row's KV, for every tile, split and row.

    As many CTAs as the chip holds share the items of work evenly; splits that a short row does not
    have are not in the list, and cost nothing. Tiles of a row and split are neighbours in it, so
    that all but the first find the latents in L2.

    Three warpgroups. `load` fetches an item's queries, then KV blocks through the page table, two
    in flight. `lead` multiplies queries by latents, keeps the softmax, and hands weights and the
    factor by which outputs shrink to `follow` through shared memory. Each of the two accumulates
    half of the output's columns from the same latents in shared memory: [64, 512] float32 is twice
    what the registers of one warpgroup hold. A tile's queries are the heads of its tokens, token
    by token.

    A row with one split writes its output; the splits of others write theirs in float32, with the
    base-2 logarithm of the sum of weights. Where that is a result, every item writes it.

    Bounds: 64 queries cost 2200 cycles of tensor cores a block, its 72 KB 3600 cycles of an SM's
    share of an H200's memory: products and softmax may follow one another as long as loads go on.

    Occupancy: one CTA, by shared memory (72 KB of queries, 144 KB of latents and 8 KB of weights,
    of 227) and by registers (232 a thread in two warpgroups, 40 in the third).
    """
    C, D, Z = plan.rank, plan.width, plan.page_size
    half = C // 2
    pages_in_block, tokens_of_page = max(1, BLOCK // Z), min(Z, BLOCK)
    base2 = plan.scale * math.log2(math.e)
    ctas = min(PROCESSORS, plan.batch * plan.splits * plan.tiles)
    keeps_sums = plan.splits > 1 or plan.with_lse

    def body(
        query_ref, pool_ref, table_ref, lengths_ref, items_ref, ends_ref, out_ref, *parts,
        queries_s, latents_s, weights_s, shrink_s, sums_s,
        queries_loaded, loaded, freed, weighed, taken, cleared, stored,
    ):  # fmt: skip
        (query_s, out_s), (kv_s, part_s) = queries_s, latents_s

        def load(work: Work):
            plgpu.copy_gmem_to_smem(
                query_ref.at[work.row, work.tile_rows],
                query_s.at[0, pl.ds(0, plan.rows)],
                queries_loaded,
            )

            def page_ids(block):
                column = lax.div((work.first + block) * BLOCK, jnp.int32(Z))
                columns = (jnp.minimum(column + j, plan.columns - 1) for j in range(pages_in_block))
                return tuple(table_ref[work.row, c] for c in columns)

            def load_block(i, pages):
                slot = lax.rem(i, jnp.int32(SLOTS))
                pl.when(i >= SLOTS)(lambda: plgpu.barrier_wait(freed.at[slot]))
                offset = lax.rem((work.first + i) * BLOCK, jnp.int32(Z))
                for j, page in enumerate(pages):
                    source = pool_ref.at[
                        jnp.clip(page, 0, plan.pages - 1), pl.ds(offset, tokens_of_page)
                    ]
                    target = kv_s.at[slot, pl.ds(j * tokens_of_page, tokens_of_page)]
                    # The table's columns behind the last token name no page of this row.
                    live = work.tokens_from(i) > j * tokens_of_page
                    lax.cond(
                        live,
                        partial(plgpu.copy_gmem_to_smem, source, target, loaded.at[slot]),
                        partial(plgpu.barrier_arrive, loaded.at[slot]),
                    )
                # Asked for a block ahead: the answer takes as long as a page does.
                return page_ids(i + 1)

            lax.fori_loop(0, work.count, load_block, page_ids(0))
            for slot in range(SLOTS):
                pl.when(work.count > slot)(partial(plgpu.barrier_wait, freed.at[slot]))
            # The next item's queries and latents go where this one's outputs are staged.
            plgpu.barrier_wait(stored)

        def clear_dead(slot, live):
            """Zeroes the slots behind the row's end: they may hold NaN, and 0 x NaN is NaN."""
            for column in range(0, C, 64):
                ref = kv_s.at[slot, :, pl.ds(column, 64)]
                latents = plgpu.load(ref, layout=WGMMA)
                slots = plgpu.broadcasted_iota(jnp.int32, latents.shape, 0, layout=WGMMA)
                ref[...] = jnp.where(slots < live, latents, jnp.zeros_like(latents))
            plgpu.commit_smem()
            plgpu.barrier_arrive(cleared)

        def accumulate(out, slot, start, shrink):
            out = out * lax.broadcast_in_dim(shrink, out.shape, [0])
            values = kv_s.at[slot, :, pl.ds(start, half)]
            if interpret:  # The interpreter knows no run_state.
                return out + _product(weights_s, values)
            return pl.run_state(lambda acc: plgpu.wgmma(acc, weights_s, values))(
                plgpu.WGMMAAccumulatorRef.init(out)
            )

        def lead(work: Work):
            """Scores and softmax, and the left half of the output."""
            plgpu.barrier_wait(queries_loaded)
            # Query r is a head of token r // N; the row's last token sees all.
            queries = plgpu.broadcasted_iota(jnp.int32, (TILE,), 0, layout=ROWS)
            tokens = lax.div(queries + work.tile * plan.rows, jnp.full_like(queries, plan.heads))

            def step(i, carry):
                out, total, top = carry
                slot = lax.rem(i, jnp.int32(SLOTS))
                plgpu.barrier_wait(loaded.at[slot])
                # Always 0, which the compiler cannot tell: it would keep the addresses of all tiles
                # of the queries in registers, more than there are.
                zero = (work.tokens_from(i) <= 0).astype(jnp.int32)
                scores = _product(query_s.at[zero], kv_s.at[slot].transpose((1, 0))) * base2
                ends = tokens + (work.tokens_from(i) - plan.tokens + 1)
                slots = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=WGMMA)
                seen = slots < lax.broadcast_in_dim(ends, scores.shape, [0])
                scores = jnp.where(seen, scores, -jnp.inf)
                new_top = jnp.maximum(top, scores.max(axis=1))
                shrink = jnp.exp2(top - new_top)
                weights = jnp.exp2(scores - lax.broadcast_in_dim(new_top, scores.shape, [0]))
                total = total * shrink + weights.sum(axis=1)
                pl.when(i > 0)(partial(plgpu.barrier_wait, taken))
                weights_s[...] = weights.astype(weights_s.dtype)
                shrink_s[...] = shrink
                plgpu.commit_smem()
                plgpu.barrier_arrive(weighed)
                pl.when(work.tokens_from(i) < BLOCK)(partial(plgpu.barrier_wait, cleared))
                out = accumulate(out, slot, 0, shrink)
                plgpu.barrier_arrive(freed.at[slot])
                return out, total, new_top

            start = (_full((TILE, half), 0.0), _full((TILE,), 0.0), _full((TILE,), NOTHING))
            out, total, top = lax.fori_loop(0, work.count, step, start)
            pl.when(work.count > 0)(partial(plgpu.barrier_wait, taken))
            share = jnp.where(total > 0, 1 / total, 0.0)
            shrink_s[...] = share
            if keeps_sums:
                sums_s[...] = jnp.where(total > 0, top + jnp.log2(total), NOTHING)
            plgpu.commit_smem()
            plgpu.barrier_arrive(weighed)
            write(work, out, share, 0)

        def follow(work: Work):
            """The right half of the output."""

            def step(i, out):
                slot = lax.rem(i, jnp.int32(SLOTS))
                plgpu.barrier_wait(loaded.at[slot])
                plgpu.barrier_wait(weighed)
                live = work.tokens_from(i)
                pl.when(live < BLOCK)(partial(clear_dead, slot, live))
                out = accumulate(out, slot, half, plgpu.load(shrink_s, layout=ROWS))
                plgpu.barrier_arrive(taken)
                plgpu.barrier_arrive(freed.at[slot])
                return out

            out = lax.fori_loop(0, work.count, step, _full((TILE, half), 0.0))
            plgpu.barrier_wait(weighed)
            write(work, out, plgpu.load(shrink_s, layout=ROWS), 1)

        def write(work: Work, out, share, side):
            """Stores half of the output, by way of shared memory that nobody reads any more."""
            out = out * lax.broadcast_in_dim(share, out.shape, [0])
            columns = pl.ds(side * half, half)

            def copy_out(stage, target):
                stage.at[side][...] = out.astype(stage.dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(
                    stage.at[side, pl.ds(0, plan.rows)], target.at[work.tile_rows, columns]
                )

            def copy_sums():
                plgpu.copy_smem_to_gmem(sums_s, parts[-1].at[work.row, work.split, work.tile])

            def copy_part():
                copy_out(part_s, parts[0].at[work.row, work.split])
                if side == 0 and not plan.with_lse:
                    copy_sums()

            if plan.splits > 1:
                lax.cond(work.alone, partial(copy_out, out_s, out_ref.at[work.row]), copy_part)
            else:
                copy_out(out_s, out_ref.at[work.row])
            if side == 0 and plan.with_lse:
                copy_sums()
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(stored)

        cta = lax.axis_index("cta")
        grow = partial(plgpu.set_max_registers, REGISTERS[0], action="increase")
        shrink = partial(plgpu.set_max_registers, REGISTERS[1], action="decrease")
        roles = ((lead, grow), (follow, grow), (load, shrink))
        for warpgroup, (role, set_registers) in enumerate(roles):

            @pl.when(lax.axis_index("warpgroup") == warpgroup)
            def _(role=role, set_registers=set_registers):
                set_registers()
                items = ends_ref[plan.batch - 1] * plan.tiles

                @pl.loop(0, ceil_div(jnp.maximum(items - cta, 0), ctas))
                def _(k):
                    item = cta + k * ctas
                    index = lax.div(item, jnp.int32(plan.tiles))
                    tile = lax.rem(item, jnp.int32(plan.tiles))
                    row, split = items_ref[0, index], items_ref[1, index]
                    role(plan.work(lengths_ref[row], row, split, tile))

    out_type = [jax.ShapeDtypeStruct((plan.batch, plan.padded_rows, C), jnp.bfloat16)]
    shape = (plan.batch, plan.splits)
    if plan.splits > 1:
        out_type.append(jax.ShapeDtypeStruct((*shape, plan.padded_rows, C), jnp.float32))
    if keeps_sums:
        out_type.append(jax.ShapeDtypeStruct((*shape, plan.tiles, TILE), jnp.float32))
    return plgpu.kernel(
        body,
        out_type=out_type,
        grid=(ctas,),
        grid_names=("cta",),
        num_threads=3,
        thread_name="warpgroup",
        scratch_types={
            "queries_s": plgpu.RefUnion(
                _swizzled((1, TILE, D), jnp.bfloat16), _swizzled((2, TILE, half), jnp.bfloat16)
            ),
            "latents_s": plgpu.RefUnion(
                _swizzled((SLOTS, BLOCK, D), jnp.bfloat16), _swizzled((2, TILE, half), jnp.float32)
            ),
            "weights_s": _swizzled((TILE, BLOCK), jnp.bfloat16),
            "shrink_s": plgpu.SMEM((TILE,), jnp.float32),
            "sums_s": plgpu.SMEM((TILE,), jnp.float32),
            "queries_loaded": plgpu.Barrier(),
            "loaded": plgpu.Barrier(num_arrivals=pages_in_block, num_barriers=SLOTS),
            "freed": plgpu.Barrier(num_arrivals=2, num_barriers=SLOTS),
            "weighed": plgpu.Barrier(),
            "taken": plgpu.Barrier(),
            "cleared": plgpu.Barrier(),
            "stored": plgpu.Barrier(num_arrivals=2),
        },
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        interpret=interpret,
        kernel_name="latent_attention",
    )


def _swizzled(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory in the tiles that TMA writes and WGMMA reads without bank conflicts."""
    columns = 128 // jnp.dtype(dtype).itemsize
    tiling = plgpu.TilingTransform((8, columns))  # pyright: ignore[reportAbstractUsage]
    swizzle = plgpu.SwizzleTransform(128)  # pyright: ignore[reportAbstractUsage]
    return plgpu.SMEM(shape, dtype, transforms=(tiling, swizzle))


def _full(shape: tuple[int, ...], value: float) -> jax.Array:
    layout = WGMMA if len(shape) == 2 else ROWS
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def _product(a: Any, b: Any) -> jax.Array:
    """Product of two matrices in shared memory."""

    def multiply(acc):
        plgpu.wgmma(acc, a, b)
        return acc[...]

    return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((a.shape[0], b.shape[1])))


def _combine(plan: Plan, interpret: Any) -> Callable[..., Any]:
    """Outputs of the rows that have several splits: one warpgroup for each query.

    Splits are read a few at once, to have as many loads in flight.
    """
    C = plan.rank
    layout = plgpu.Layout.WG_STRIDED((C,), vec_size=C // 128)

    def body(part_ref, sums_ref, lengths_ref, out_ref):
        query, row = lax.axis_index("query"), lax.axis_index("row")
        tile, tile_row = lax.div(query, jnp.int32(plan.rows)), lax.rem(query, jnp.int32(plan.rows))
        row_blocks, split_blocks = plan.row_blocks(plan.clip_length(lengths_ref[row]))
        splits = ceil_div(row_blocks, split_blocks)
        iterations = ceil_div(splits, SPLITS_AT_ONCE)

        def several(i):
            """The splits of an iteration, the row's last one instead of those behind it."""
            for j in range(SPLITS_AT_ONCE):
                split = i * SPLITS_AT_ONCE + j
                there = jnp.minimum(split, splits - 1)
                yield split < splits, there, sums_ref[row, there, tile, tile_row]

        def find_top(i, top):
            for _, _, log_sum in several(i):
                top = jnp.maximum(top, log_sum)
            return top

        @pl.when(splits > 1)
        def _():
            top = lax.fori_loop(0, iterations, find_top, jnp.float32(NOTHING))

            def add(i, carry):
                out, total = carry
                for live, split, log_sum in several(i):
                    weight = jnp.where(live, jnp.exp2(log_sum - top), 0.0)
                    out += weight * plgpu.load(part_ref.at[row, split, query], layout=layout)
                    total += weight
                return out, total

            out = plgpu.layout_cast(jnp.zeros((C,), jnp.float32), layout)
            out, total = lax.fori_loop(0, iterations, add, (out, jnp.float32(0)))
            out_ref[row, query] = (out / total).astype(out_ref.dtype)

    return plgpu.kernel(
        body,
        grid=(plan.tokens * plan.heads, plan.batch),
        grid_names=("query", "row"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
        kernel_name="latent_attention_combine",
    )
