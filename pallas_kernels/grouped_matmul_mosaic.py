"""Products of row tiles with their group's weights, for Hopper: the kernel that the grouped and the
4-bit products share."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.grouped_matmul_xla import RowTiles, num_tiles, row_tiles, tile_rows

NUM_SMS = 132  # streaming multiprocessors of a chip
SHARED_BYTES = 226 * 1024  # that a block of threads may use on one, less its barriers

# Rows of a tile of swizzled shared memory. TMA views x in the same tiles and bounds rows within
# one: a copy that started between them would bring zeros in place of rows of the next.
ALIGN = 8


@dataclasses.dataclass(frozen=True)
class GroupedBlocks:
    """Tile sizes of the kernel; 0 stands for a choice by the shapes.

    A tile has `rows` of x and `features` of the output, shared by `warpgroups` that multiply. A
    slot of shared memory holds `depth` of the contraction. `splits` parts of the contraction are
    summed by different blocks of threads, where there are few tiles.
    """

    rows: int = 0
    features: int = 0
    depth: int = 64
    slots: int = 0
    splits: int = 0
    warpgroups: int = 2

    def resolved(self, rows: int, row_tiles: int, F: int, D: int) -> "GroupedBlocks":
        """The same without zeros, for tiles of so many rows. The choice follows shapes and never
        group sizes: a row's result must not depend on the rows around it."""
        # Large tiles feed the tensor cores from fewer loads and have an SM for themselves. Small
        # ones share it by twos: one loads while the other begins or ends.
        large = rows >= 64
        # Wide tiles have to fill half the chip: narrow ones do before the sum is split.
        wide = large and row_tiles * pl.cdiv(F, 256) > NUM_SMS // 2
        features = self.features or (256 if wide else 64 * self.warpgroups)
        tiles = row_tiles * pl.cdiv(F, features)
        splits = self.splits or max(1, min(NUM_SMS // tiles, pl.cdiv(D, self.depth) // 4))
        alone = large or self.warpgroups > 2
        out_bytes = rows * features * self._out_bytes(splits)
        free_bytes = SHARED_BYTES // (1 if alone else 2) - out_bytes
        slots = free_bytes // self._slot_bytes(rows, features)
        return dataclasses.replace(
            self,
            rows=rows,
            features=features,
            slots=self.slots or max(2, min(8, slots)),
            splits=splits,
        )

    def _out_bytes(self, splits: int) -> int:
        """Bytes of a value of the output in shared memory: parts of a sum are float32."""
        return 2 if splits == 1 else 4

    def _slot_bytes(self, rows: int, features: int) -> int:
        return (rows + features) * self.depth * 2


SPACE = {
    "rows": (0, 8, 16, 32, 64, 128),
    "features": (128, 256),
    "depth": (64, 128),
    "slots": (2, 3, 4, 6, 8),
    "splits": (0, 1, 2, 4),
    "warpgroups": (2, 4),
}


@dataclasses.dataclass(frozen=True)
class Step:
    """Where the work of one slot lies: the group, the first feature of the tile, the first column
    of the slot's depth, and the slot."""

    group: Any
    feature: Any
    column: Any
    slot: Any


@dataclasses.dataclass(frozen=True)
class WeightTiles:
    """How the kernel reads weights of one format.

    `buffers`: shared memory of all slots.
    `load(refs, buffers, barrier, step)`: starts `copies` copies of a tile.
    `start(refs, group)`: values that all steps of a tile need, loaded once. A tile of no group has
    a group behind the last.
    `multiply(acc, refs, buffers, x, step, warpgroup, values)`: adds the product of a warpgroup's
    part of the tile's features and the slot's rows of x, in `pending` groups of WGMMA instructions
    that may still run when the next step begins.
    `x_row_bytes`: width of the swizzle of x, which is also the depth of a group of instructions.
    `registers`: those of a thread that copies and of one that multiplies, where they differ.
    """

    buffers: Sequence[Any]
    copies: int
    load: Callable[..., None]
    multiply: Callable[..., None]
    pending: int
    x_row_bytes: int
    start: Callable[..., Any] = lambda refs, group: None
    registers: tuple[int, int] | None = None


def swizzled(shape: tuple[int, ...], dtype: Any, row_bytes: int = 128) -> Any:
    """Shared memory whose last two axes lie as WGMMA and swizzled TMA copies want them."""
    columns = row_bytes // jnp.dtype(dtype).itemsize
    tiling = plgpu.TilingTransform((8, columns))  # pyright: ignore[reportAbstractUsage]
    swizzle = plgpu.SwizzleTransform(row_bytes)  # pyright: ignore[reportAbstractUsage]
    return plgpu.SMEM(shape, dtype, transforms=(tiling, swizzle))


def dense_tiles(blocks: GroupedBlocks) -> WeightTiles:
    """Weights [E, F, D] in bfloat16."""
    own = blocks.features // blocks.warpgroups

    def load(refs, buffers, barrier, step: Step) -> None:
        features, columns = pl.ds(step.feature, blocks.features), pl.ds(step.column, blocks.depth)
        source = refs[0].at[step.group, features, columns]
        plgpu.copy_gmem_to_smem(source, buffers[0].at[step.slot], barrier)

    def multiply(acc, refs, buffers, x, step: Step, warpgroup, values) -> None:
        weights = buffers[0].at[step.slot, pl.ds(warpgroup * own, own)]
        plgpu.wgmma(acc, weights, x.at[step.slot].transpose((1, 0)))

    shape = (blocks.slots, blocks.features, blocks.depth)
    return WeightTiles([swizzled(shape, jnp.bfloat16)], 1, load, multiply, 1, 128)


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What is static in a launch. A split takes `steps` slots' depth of the contraction."""

    blocks: GroupedBlocks
    form: WeightTiles
    groups: int
    row_tiles: int
    feature_tiles: int
    steps: int
    part_dtype: Any

    @property
    def own_features(self) -> int:
        return self.blocks.features // self.blocks.warpgroups


@dataclasses.dataclass(frozen=True)
class _Shared:
    """Shared memory: rows of x and weights by slot, the output by warpgroup, and barriers that say
    that a slot is full or free."""

    x: Any
    out: Any
    full: Any
    free: Any
    weights: Sequence[Any]


def multiply_tiles(
    x_MD: jax.Array,
    weights: Sequence[jax.Array],
    tiles: RowTiles,
    *,
    groups: int,
    F: int,
    form: WeightTiles,
    blocks: GroupedBlocks,
    out_dtype: Any,
    interpret: Any,
    name: str,
) -> jax.Array:
    """Products of row tiles with their group's weights, and zeros for tiles of no group: [M, F].

    A block of threads makes the transposed tile [features, rows]: weights are the M operand of
    WGMMA, which comes in 64s, and rows of x the N operand, of which 8 will do. So a decode step
    pads little, and the same code serves prefill with 128 rows. A tile may start at any row, but
    x is loaded from the last multiple of `ALIGN` on: rows of other groups, before and behind the
    tile's own, are multiplied in vain and not stored.

    One warpgroup copies weights and rows of the next `slots` steps of depth into shared memory by
    TMA, as slots become free. The others, each with its part of the features, multiply what has
    arrived, and free a slot when its products are done: in the next step where they may lag.

    Occupancy is bounded by shared memory, of which `GroupedBlocks.resolved` gives all to slots,
    and from 64 rows on by the registers of the sums.
    """
    M, D = x_MD.shape
    N = blocks.rows
    plan = _Plan(
        blocks,
        form,
        groups,
        row_tiles=tiles.group.shape[0],
        feature_tiles=pl.cdiv(F, blocks.features),
        steps=pl.cdiv(pl.cdiv(D, blocks.depth), blocks.splits),
        part_dtype=jnp.dtype(out_dtype if blocks.splits == 1 else jnp.float32),
    )

    def body(group_ref, start_ref, rows_ref, x_ref, *refs) -> None:
        weight_refs, out_ref = refs[: len(weights)], refs[len(weights)]
        x, out, full, free, *buffers = refs[len(weights) + 1 :]
        tile_refs = (group_ref, start_ref, rows_ref)
        shared = _Shared(x, out, full, free, buffers)
        _multiply_tile(plan, tile_refs, x_ref, weight_refs, out_ref, shared)

    kernel = plgpu.kernel(
        body,
        # With all features of the last tile: the store of a contiguous piece, such as one row, is
        # bounded by the end of the array only, and would run over F into the next row.
        out_type=jax.ShapeDtypeStruct(
            (blocks.splits, M, plan.feature_tiles * blocks.features), plan.part_dtype
        ),
        grid=(blocks.splits, plan.row_tiles * plan.feature_tiles),
        grid_names=("split", "tile"),
        num_threads=blocks.warpgroups + 1,
        thread_name="warpgroup",
        kernel_name=name,
        # Layouts are all explicit here; inference of them refuses a copy to tiles of 8 rows whose
        # start it cannot prove to be a multiple of 8.
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret or None,
        scratch_types=[
            swizzled((blocks.slots, N, blocks.depth), x_MD.dtype, form.x_row_bytes),
            plgpu.SMEM((blocks.warpgroups, N, plan.own_features), plan.part_dtype),
            plgpu.Barrier(num_arrivals=1 + form.copies, num_barriers=blocks.slots),
            plgpu.Barrier(num_arrivals=blocks.warpgroups, num_barriers=blocks.slots),
            *form.buffers,
        ],
    )
    # TMA views x in whole tiles of rows; beyond the last one it reads zeros.
    padded_x = jnp.pad(x_MD, ((0, -M % ALIGN), (0, 0)))
    parts = kernel(tiles.group, tiles.start, tiles.rows, padded_x, *weights)
    # In this order, whatever the compiler likes: results must not move with the program around.
    total = parts[0]
    for i in range(1, blocks.splits):
        total = total + parts[i]
    return total[:, :F].astype(out_dtype)


def _multiply_tile(plan: _Plan, tile_refs, x_ref, weight_refs, out_ref, shared: _Shared) -> None:
    """The work of a block of threads: one tile, one part of the contraction."""
    blocks = plan.blocks
    warpgroup = jax.lax.axis_index("warpgroup")
    split = jax.lax.axis_index("split")
    # Tiles of one group follow each other, so that they find its weights in the L2 cache.
    shape = (plan.row_tiles, plan.feature_tiles)
    tile, feature_tile = plgpu.planar_snake(jax.lax.axis_index("tile"), shape, 0, 4)
    group, start, rows = (ref[tile] for ref in tile_refs)
    first_feature = feature_tile * blocks.features
    skip = jax.lax.rem(start, ALIGN)
    in_group = group < plan.groups

    def at(step, slot) -> Step:
        return Step(group, first_feature, (split * plan.steps + step) * blocks.depth, slot)

    copies, multiplies = warpgroup == blocks.warpgroups, warpgroup < blocks.warpgroups

    def copy() -> None:
        def load(step: Step, full) -> None:
            source = x_ref.at[pl.ds(start - skip, blocks.rows), pl.ds(step.column, blocks.depth)]
            plgpu.copy_gmem_to_smem(source, shared.x.at[step.slot], full)
            plan.form.load(weight_refs, shared.weights, full, step)

        _fill_slots(plan, shared, at, load)

    def multiply() -> None:
        steps = jnp.where(in_group, plan.steps, 0)
        values = plan.form.start(weight_refs, group)

        def add(acc, step: Step) -> None:
            plan.form.multiply(acc, weight_refs, shared.weights, shared.x, step, warpgroup, values)

        sums_FN = pl.run_scoped(
            lambda acc: _sum_slots(plan, shared, at, steps, add, acc),
            plgpu.WGMMAAccumulatorRef((plan.own_features, blocks.rows), jnp.float32),
        )
        features = pl.ds(first_feature + warpgroup * plan.own_features, plan.own_features)
        target = out_ref.at[split, :, features]
        _store_rows(plan, shared.out.at[warpgroup], target, sums_FN, start, skip, rows)

    if plan.form.registers is None:
        pl.when((rows > 0) & in_group & copies)(copy)
        pl.when((rows > 0) & multiplies)(multiply)
        return
    less, more = plan.form.registers

    # Whatever the tile: who waits for more registers waits until the others have given theirs.
    @pl.when(copies)
    def _() -> None:
        plgpu.set_max_registers(less, action="decrease")
        pl.when((rows > 0) & in_group)(copy)

    @pl.when(multiplies)
    def _() -> None:
        plgpu.set_max_registers(more, action="increase")
        pl.when(rows > 0)(multiply)


def _fill_slots(plan: _Plan, shared: _Shared, at: Callable[..., Step], load) -> None:
    """Loads of all steps, as many ahead as there are slots."""
    slots = plan.blocks.slots

    @pl.loop(0, plan.steps)
    def _(step) -> None:
        slot = jax.lax.rem(step, slots)

        @pl.when(step >= slots)
        def _() -> None:
            plgpu.barrier_wait(shared.free.at[slot])

        load(at(step, slot), shared.full.at[slot])


def _sum_slots(plan: _Plan, shared: _Shared, at: Callable[..., Step], steps, add, acc) -> jax.Array:
    """Sums over the steps of a warpgroup's own features: [features, rows]."""
    slots = plan.blocks.slots

    @pl.loop(0, steps)
    def _(step) -> None:
        slot = jax.lax.rem(step, slots)
        plgpu.barrier_wait(shared.full.at[slot])
        add(acc, at(step, slot))
        plgpu.wgmma_wait(plan.form.pending)
        # While products of this step may still run, only those of the step before are done. A slot
        # that nobody will fill again is not freed: barriers end as they began.
        done = step - min(plan.form.pending, 1)

        @pl.when((done >= 0) & (done + slots < steps))
        def _() -> None:
            plgpu.barrier_arrive(shared.free.at[jax.lax.rem(done, slots)])

    return acc[...]


def _store_rows(plan: _Plan, buffer, target, sums_FN: jax.Array, start, skip, rows) -> None:
    """Stores the tile's own rows, behind those to skip, through shared memory to turn them."""
    if plan.part_dtype == jnp.float32:
        # Pairs of columns, in which the sums lie, cannot be stored as a row of 32-bit values.
        sums_FN = plgpu.layout_cast(sums_FN, plgpu.Layout._WGMMA_ACC_32BIT)
    buffer.transpose((1, 0))[...] = sums_FN.astype(plan.part_dtype)
    plgpu.commit_smem()
    # A copy has a static number of rows: copy the powers of two that make up the tile.
    done = 0
    for count in (2**i for i in reversed(range(plan.blocks.rows.bit_length()))):

        @pl.when((rows & count) > 0)
        def _(done=done, count=count) -> None:
            own = target.at[pl.ds(start + done, count)]
            plgpu.copy_smem_to_gmem(buffer.at[pl.ds(skip + done, count)], own)

        done = done + (rows & count)
    plgpu.wait_smem_to_gmem(0)


def grouped_matmul_mosaic(
    x_MD: jax.Array,
    weights_EFD: jax.Array,
    group_sizes_E: jax.Array,
    *,
    blocks: GroupedBlocks = GroupedBlocks(),
    interpret: Any = False,
) -> jax.Array:
    """Grouped product in tiles of one group's rows; weights of empty groups are not read.

    `jax.experimental.pallas.ops.gpu.ragged_dot_mgpu` does not store the rows behind the last
    group, multiplies as many tiles with group 0 as there are empty groups, looks up its group in
    code unrolled over all groups, and pads a group of one row to 64.
    """
    M, D = x_MD.shape
    E, F, _ = weights_EFD.shape
    rows = blocks.rows or tile_rows(M, E)
    blocks = blocks.resolved(rows, num_tiles(M, E, rows, ALIGN), F, D)
    return multiply_tiles(
        x_MD,
        [weights_EFD],
        row_tiles(group_sizes_E, M, rows, ALIGN),
        groups=E,
        F=F,
        form=dense_tiles(blocks),
        blocks=blocks,
        out_dtype=x_MD.dtype,
        interpret=interpret,
        name="grouped_matmul",
    )


def unaligned(x_MD: Any, F: int, columns: int) -> str | None:
    """Why TMA cannot copy tiles of so many columns, or of the output; None where it can."""
    M, D = x_MD.shape
    if x_MD.dtype != jnp.bfloat16:
        return f"x is {x_MD.dtype}, not bfloat16"
    if D % columns:
        return f"{D} columns are no multiple of {columns}"
    if F % 8:
        return f"{F} features are no multiple of 8"
    return None if M else "x has no rows"
