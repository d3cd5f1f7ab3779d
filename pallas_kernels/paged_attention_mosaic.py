"""Paged attention of decode rows on Hopper GPUs: split over the KV length, then combined.

The product is computed transposed: the tokens of a KV block are the rows of a WGMMA and the query
rows of a kv head its columns, padded to 8 only; the usual form would pad them to 64 rows and spend
eight times the softmax on them. Scores[tokens, columns] = K Q^T, weights go through shared memory
as [columns, tokens], and outputs[H, columns] += V^T P^T.

A program is one split of one row for one or a few kv heads, one warpgroup. It keeps two to four KV
blocks in flight: a block is used as soon as its keys are there, and its slot is refilled as soon
as its values are used. The four warps issue the copies in turn, one page slice [tokens, heads * H]
of the pool each; a slice that holds no seen token is not read. Tokens lie in the pool with all kv
heads side by side, so even a slice of 64 columns reads whole lines of 128 bytes, and the programs
of the other heads, which run beside it, read the lines between.

Shared memory bounds the occupancy: a ring of 96 KiB and 8 to 16 KiB for the rest let two programs
share an SM, up to 32 query rows of 128 columns. Together they keep up to 192 KiB in flight; the
4.8 TB/s of an H200, over 132 SMs, take 36 KiB for every microsecond of latency.

A row's splits follow from its own length and the shapes alone, so its result does not depend on
the other rows.
"""

import functools
import math
import types
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention_plan import DEFAULT_BLOCKS, PagedBlocks, Plan, plan_of
from pallas_kernels.paged_attention_xla import MASKED, first_seen

WARPS = 4
MMA_TOKENS = 64  # tokens that one WGMMA takes as its rows

# Splits that one step of the second kernel reads.
SPLITS_AT_ONCE = 8

WGMMA = plgpu.Layout.WGMMA
WGMMA_T = plgpu.Layout.WGMMA_TRANSPOSED
TILED = (
    plgpu.TilingTransform((8, 64)),  # pyright: ignore[reportAbstractUsage]
    plgpu.SwizzleTransform(128),  # pyright: ignore[reportAbstractUsage]
)

# Lane semantics: layouts are said here, not inferred.
PARAMS = plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane)


def paged_attention_mosaic(
    query: jax.Array,
    key_pages: jax.Array,
    value_pages: jax.Array,
    page_table_BW: jax.Array,
    lengths_B: jax.Array,
    *,
    scale: float,
    window: int | None = None,
    attention_chunk: int | None = None,
    blocks: PagedBlocks = DEFAULT_BLOCKS,
    interpret: Any = False,
) -> jax.Array:
    """Decode attention on Hopper: splits of the rows, then their combination.

    A split's partial result is float32 [rows, H] with the largest score and the sum of weights of
    every row. Rows of one split at most, by the width of the page table, need no second kernel.
    """
    plan = plan_of(query, key_pages, page_table_BW, scale, window, attention_chunk, blocks)
    B, T, K, G, H = plan.B, plan.T, plan.K, plan.G, plan.H
    # R counts the query rows of a kv head.
    query_BKRH = query.reshape(B, T, K, G, H).transpose(0, 2, 1, 3, 4).reshape(B, K, T * G, H)
    padding = plan.padded_rows - plan.rows
    query_BKRH = jnp.pad(query_BKRH, ((0, 0), (0, 0), (0, padding), (0, 0)))
    pools = (pages.reshape(plan.P, plan.Z, K * H) for pages in (key_pages, value_pages))
    out = _attend(plan, query.dtype, interpret)(page_table_BW, lengths_B, query_BKRH, *pools)
    if plan.splits > 1:
        return _combine(plan, query.dtype, interpret)(lengths_B, *out).reshape(query.shape)
    return out[0].reshape(B, K, T, G, H).transpose(0, 2, 1, 3, 4).reshape(query.shape)


def _attend(plan: Plan, dtype: Any, interpret: Any) -> Any:
    """The first kernel: partial results of every split, or the result where there is one split."""
    C, H, kv, slots, copies = (
        plan.columns,
        plan.H,
        plan.kv,
        plan.slots,
        plan.kv // plan.copy_rows,
    )
    width = plan.heads * H
    partial_dtype = dtype if plan.splits == 1 else jnp.float32
    stats = jax.ShapeDtypeStruct((plan.splits, plan.B, plan.groups, C), jnp.float32)
    out = jax.ShapeDtypeStruct((plan.splits, plan.B, plan.K, plan.rows, H), partial_dtype)
    return plgpu.kernel(
        partial(_attend_split, plan, interpret),
        out_type=[out, stats, stats],
        grid=(plan.splits, plan.B, plan.groups),
        grid_names=("split", "row", "group"),
        interpret=interpret,
        kernel_name="paged_attention",
        compiler_params=PARAMS,
        scratch_types={
            "query": plgpu.SMEM((C, H), dtype, transforms=TILED),
            # The result is written out when all keys have been used.
            "keys_or_out": plgpu.RefUnion(
                plgpu.SMEM((slots, kv, width), dtype, transforms=TILED),
                plgpu.SMEM((C, H), partial_dtype),
            ),
            "values": plgpu.SMEM((slots, kv, width), dtype, transforms=TILED),
            "weights": plgpu.SMEM((C, kv), dtype, transforms=TILED),
            "top": plgpu.SMEM((C,), jnp.float32),
            "total": plgpu.SMEM((C,), jnp.float32),
            "query_ready": plgpu.Barrier(num_arrivals=plan.heads),
            "keys_ready": plgpu.Barrier(num_arrivals=copies, num_barriers=slots),
            "values_ready": plgpu.Barrier(num_arrivals=copies, num_barriers=slots),
        },
    )


def _attend_split(
    plan: Plan,
    interpret: Any,
    table_ref: Any,
    lengths_ref: Any,
    query_ref: Any,
    key_ref: Any,
    value_ref: Any,
    out_ref: Any,
    top_ref: Any,
    total_ref: Any,
    **scratch: Any,
) -> None:
    """One program of the first kernel."""
    split, row, group = (lax.axis_index(name) for name in ("split", "row", "group"))
    keys, out = scratch.pop("keys_or_out")
    s = types.SimpleNamespace(keys=keys, out=out, **scratch)
    length = lengths_ref[row]
    first, end = plan.seen(length)
    start, count, each = plan.split(first, end)
    start = start + split * each
    steps = jnp.minimum(count - split * each, each)
    load = partial(
        _load_block, plan, interpret, table_ref.at[row], (key_ref, value_ref), group, first, end, s
    )

    def attend() -> None:
        _load_query(plan, query_ref.at[row], group, s)
        for i in range(plan.slots):
            pl.when(i < steps)(partial(load, jnp.int32(i), start + i))
        plgpu.barrier_wait(s.query_ready)

        def step(i, state):
            block = start + i
            slot = lax.rem(i, jnp.int32(plan.slots))
            state = _attend_block(plan, slot, block, first, end, length, state, s)
            pl.when(i + plan.slots < steps)(lambda: load(slot, block + plan.slots))
            return state

        out_HC, total_C, top_C = lax.fori_loop(0, steps, step, _nothing(plan))
        if plan.splits == 1:
            out_HC = out_HC / _along_tokens(jnp.where(total_C > 0, total_C, 1.0), plan.H)
        else:
            s.top[...] = top_C
            s.total[...] = total_C
        s.out.transpose((1, 0))[...] = plgpu.layout_cast(out_HC.astype(s.out.dtype), WGMMA_T)
        plgpu.commit_smem()
        for head in range(plan.heads):
            plgpu.copy_smem_to_gmem(
                s.out.at[pl.ds(head * plan.padded_rows, plan.rows)],
                out_ref.at[split, row, group * plan.heads + head],
            )
        if plan.splits > 1:
            plgpu.copy_smem_to_gmem(s.top, top_ref.at[split, row, group])
            plgpu.copy_smem_to_gmem(s.total, total_ref.at[split, row, group])
        plgpu.wait_smem_to_gmem(0)

    # A split that is not there is not read by the second kernel either. Without one, rows that see
    # nothing still get their zeros here.
    if plan.splits == 1:
        attend()
    else:
        pl.when(steps > 0)(attend)


def _load_query(plan: Plan, query_ref: Any, group: jax.Array, s: Any) -> None:
    for head in range(plan.heads):
        plgpu.copy_gmem_to_smem(
            query_ref.at[group * plan.heads + head],
            s.query.at[pl.ds(head * plan.padded_rows, plan.padded_rows)],
            s.query_ready,
        )


def _load_block(
    plan: Plan,
    interpret: Any,
    table_ref: Any,
    pools: tuple[Any, Any],
    group: jax.Array,
    first: jax.Array,
    end: jax.Array,
    s: Any,
    slot: jax.Array,
    block: jax.Array,
) -> None:
    """Starts the copies of a KV block: of its page slices with a token between first and end."""
    rows, Z, width = plan.copy_rows, plan.Z, plan.heads * plan.H
    copies = plan.kv // rows

    def load(copy) -> None:
        position = block * plan.kv + copy * rows
        seen = (position < end) & (position + rows > first)
        # The page of a slice that nobody sees is not looked up: the table may end before it.
        column = jnp.where(seen, lax.div(position, jnp.int32(Z)), 0)
        page = jnp.clip(table_ref[column], 0, plan.P - 1)
        part = lax.rem(lax.div(position, jnp.int32(rows)), jnp.int32(Z // rows))
        source = (page, pl.ds(part * rows, rows), pl.ds(group * width, width))
        target = (slot, pl.ds(copy * rows, rows))
        for pool, ring, ready in zip(
            pools, (s.keys, s.values), (s.keys_ready, s.values_ready), strict=True
        ):
            if not interpret:
                # Arrives at the barrier in any case.
                plgpu.copy_gmem_to_smem(
                    pool.at[source], ring.at[target], ready.at[slot], predicate=seen
                )
                continue
            # The interpreter has no predicates on copies with an indexed barrier.
            pl.when(seen)(
                partial(plgpu.copy_gmem_to_smem, pool.at[source], ring.at[target], ready.at[slot])
            )
            pl.when(~seen)(partial(plgpu.barrier_arrive, ready.at[slot]))

    def issue(warp) -> None:
        for copy in range(0, copies, WARPS):
            if copies - copy >= WARPS:
                load(warp + copy)
            else:
                pl.when(warp < copies - copy)(partial(load, warp + copy))

    plgpu.warp_map(issue)


def _nothing(plan: Plan) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Output, sum of weights and largest score before the first block."""

    def full(value: float, shape: tuple[int, ...], layout: Any) -> jax.Array:
        return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

    return (
        full(0.0, (plan.H, plan.columns), WGMMA),
        full(0.0, (plan.columns,), WGMMA.reduce(0)),
        full(MASKED, (plan.columns,), WGMMA.reduce(0)),
    )


def _along_tokens(x_C: jax.Array, size: int) -> jax.Array:
    """A vector over columns, the same for every row: [size, C]."""
    return lax.broadcast_in_dim(x_C, (size, *x_C.shape), (1,))


def _attend_block(
    plan: Plan,
    slot: jax.Array,
    block: jax.Array,
    first: jax.Array,
    end: jax.Array,
    length: jax.Array,
    state: tuple[jax.Array, jax.Array, jax.Array],
    s: Any,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Online softmax over one KV block."""
    out_HC, total_C, top_C = state
    heads = [
        (pl.ds(head * plan.padded_rows, plan.padded_rows), pl.ds(head * plan.H, plan.H))
        for head in range(plan.heads)
    ]

    plgpu.barrier_wait(s.keys_ready.at[slot])

    def scores(acc):
        for columns, of_head in heads:
            keys_ref = s.keys.at[slot, :, of_head]
            plgpu.wgmma(_part(plan, acc, columns), keys_ref, s.query.at[columns].transpose((1, 0)))
        return acc[...]

    # exp2 is one instruction, so the scores are scaled to base 2.
    scores_SC = pl.run_scoped(scores, plgpu.WGMMAAccumulatorRef((plan.kv, plan.columns))) * (
        plan.scale * math.log2(math.e)
    )
    seen_SC = _seen(plan, block, first, end, length)
    scores_SC = jnp.where(seen_SC, scores_SC, MASKED)
    new_top_C = jnp.maximum(top_C, jnp.max(scores_SC, axis=0))
    weights_SC = jnp.exp2(scores_SC - _along_tokens(new_top_C, plan.kv))
    # A column may see no token of the block, nor of any before it.
    weights_SC = jnp.where(seen_SC, weights_SC, 0.0)
    decay_C = jnp.exp2(top_C - new_top_C)
    total_C = total_C * decay_C + jnp.sum(weights_SC, axis=0)
    s.weights.transpose((1, 0))[...] = plgpu.layout_cast(
        weights_SC.astype(s.weights.dtype), WGMMA_T
    )

    plgpu.barrier_wait(s.values_ready.at[slot])
    whole = ((block + 1) * plan.kv <= end) & (block * plan.kv >= first)
    pl.when(~whole)(partial(_clear_dead_values, plan, s.values.at[slot], block, first, end))
    plgpu.commit_smem()

    def outputs(acc):
        for columns, of_head in heads:
            values_ref = s.values.at[slot, :, of_head]
            weights_ref = s.weights.at[columns]
            plgpu.wgmma(
                _part(plan, acc, columns),
                values_ref.transpose((1, 0)),
                weights_ref.transpose((1, 0)),
            )
        return acc[...]

    out_HC = out_HC * _along_tokens(decay_C, plan.H)
    out_HC = out_HC + pl.run_scoped(outputs, plgpu.WGMMAAccumulatorRef((plan.H, plan.columns)))
    return out_HC, total_C, new_top_C


def _part(plan: Plan, acc: Any, columns: Any) -> Any:
    """The columns of one kv head in an accumulator."""
    return acc if plan.heads == 1 else acc.at[:, columns]


def _seen(
    plan: Plan, block: jax.Array, first: jax.Array, end: jax.Array, length: jax.Array
) -> jax.Array:
    """Which query rows see which tokens of a block: [tokens, columns]."""
    shape = (plan.kv, plan.columns)
    position = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=WGMMA) + block * plan.kv
    seen = (position >= first) & (position < end)
    if plan.T == 1:
        return seen
    column = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=WGMMA)
    query_row = lax.rem(column, jnp.full_like(column, plan.padded_rows))
    own = length - plan.T + lax.div(query_row, jnp.full_like(column, plan.G))
    return (
        seen & (position <= own) & (position >= first_seen(own, plan.window, plan.attention_chunk))
    )


def _clear_dead_values(
    plan: Plan, values_ref: Any, block: jax.Array, first: jax.Array, end: jax.Array
) -> None:
    """Zeros for the tokens outside [first, end): what is there may be NaN, and 0 x NaN is NaN."""
    for i in range(0, plan.kv, MMA_TOKENS):
        for j in range(0, plan.heads * plan.H, 64):
            tile = (pl.ds(i, MMA_TOKENS), pl.ds(j, 64))
            values = plgpu.load(values_ref.at[tile], layout=WGMMA)
            position = plgpu.broadcasted_iota(jnp.int32, values.shape, 0, layout=WGMMA)
            position = position + (block * plan.kv + i)
            live = (position >= first) & (position < end)
            values_ref.at[tile][...] = jnp.where(live, values, jnp.zeros_like(values))


def _combine(plan: Plan, dtype: Any, interpret: Any) -> Any:
    """The second kernel: one program for every query row reads the splits that are there."""
    return plgpu.kernel(
        partial(_combine_row, plan),
        out_type=jax.ShapeDtypeStruct((plan.B, plan.T, plan.K * plan.G, plan.H), dtype),
        grid=(plan.B, plan.K, plan.rows),
        grid_names=("row", "head", "query_row"),
        interpret=interpret,
        kernel_name="paged_attention_combine",
        compiler_params=PARAMS,
    )


def _combine_row(
    plan: Plan, lengths_ref: Any, parts_ref: Any, top_ref: Any, total_ref: Any, out_ref: Any
) -> None:
    """One program of the second kernel: several splits at a time, all their reads in flight."""
    row, head, query_row = (lax.axis_index(name) for name in ("row", "head", "query_row"))
    _, count, each = plan.split(*plan.seen(lengths_ref[row]))
    splits = lax.div(count + (each - 1), each)
    group = lax.div(head, jnp.int32(plan.heads))
    column = lax.rem(head, jnp.int32(plan.heads)) * plan.padded_rows + query_row

    def step(i, state):
        out_H, total, top = state
        # Behind the last split: it again, with no weight.
        splits_X = [i * SPLITS_AT_ONCE + x for x in range(min(SPLITS_AT_ONCE, plan.splits))]
        places_X = [jnp.minimum(split, splits - 1) for split in splits_X]
        tops_X = [top_ref[place, row, group, column] for place in places_X]
        totals_X = [total_ref[place, row, group, column] for place in places_X]
        parts_XH = [
            plgpu.load(
                parts_ref.at[place, row, head, query_row], layout=WGMMA.reduce(1), optimized=False
            )
            for place in places_X
        ]
        new_top = functools.reduce(jnp.maximum, tops_X, top)
        decay = jnp.exp2(top - new_top)
        out_H, total = out_H * decay, total * decay
        for split, split_top, split_total, part_H in zip(
            splits_X, tops_X, totals_X, parts_XH, strict=True
        ):
            weight = jnp.where(split < splits, jnp.exp2(split_top - new_top), 0.0)
            out_H, total = out_H + part_H * weight, total + split_total * weight
        return out_H, total, new_top

    zeros_H = plgpu.layout_cast(jnp.zeros((plan.H,), jnp.float32), WGMMA.reduce(1))
    trips = lax.div(splits + (SPLITS_AT_ONCE - 1), jnp.int32(SPLITS_AT_ONCE))
    out_H, total, _ = lax.fori_loop(0, trips, step, (zeros_H, jnp.float32(0), jnp.float32(MASKED)))
    token = lax.div(query_row, jnp.int32(plan.G))
    query_head = head * plan.G + lax.rem(query_row, jnp.int32(plan.G))
    out_H = out_H / jnp.where(total > 0, total, 1.0)
    out_ref[row, token, query_head, ...] = out_H.astype(out_ref.dtype)
