"""Products with coded weights for Hopper: the kernel of `grouped_matmul_mosaic.py`, with operands
that are put together in registers (`unweight_operand.py`). No weight is written to memory."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.grouped_matmul_mosaic import (
    ALIGN,
    NUM_SMS,
    SHARED_BYTES,
    GroupedBlocks,
    Step,
    WeightTiles,
    multiply_tiles,
    swizzled,
)
from pallas_kernels.grouped_matmul_xla import (
    RowTiles,
    num_tiles,
    power_of_two,
    row_tiles,
    tile_rows,
    whole_tiles,
)
from pallas_kernels.unweight_matrix import PLANES, ROW, TILE_ROWS, UnweightMatrix
from pallas_kernels.unweight_operand import (
    AHEAD,
    WINDOW,
    compact_program,
    exponent_program,
    operand_order,
    palette_program,
)
from pallas_kernels.warpgroup import load_words, operand

PAIRS = TILE_ROWS // 2  # pairs of rows of a tile
# A row of 3-bit codes has 24 bytes, and TMA wants multiples of 16: the same bytes in lines of 128.
LINE_WORDS = 32
LINES = TILE_ROWS * PLANES // LINE_WORDS  # of a tile

# Ids of verbatim rows that are copied, since a copy has at least 128 bytes; `AHEAD` are used.
IDS_AHEAD = 32


# Of a thread that copies, and of one that multiplies for tiles whose sums alone take 128.
REGISTERS = (24, 240)
LARGEST_ROWS = 256


@dataclasses.dataclass(frozen=True)
class UnweightBlocks(GroupedBlocks):
    """Tile sizes of the kernels, as in `GroupedBlocks`.

    A warpgroup has 64 features. 0 `warpgroups` are four for 3-bit codes in small tiles, whose
    registers do not let two blocks share an SM, and else two. `splits` is rounded down to a number
    that divides the steps: behind its last column a matrix has other weights and not zeros.
    """

    warpgroups: int = 0

    def resolved_for(
        self, form: str, rows: int, row_tiles: int, F: int, D: int, out_bytes: int
    ) -> "UnweightBlocks":
        """The same without zeros, for tiles of so many rows and an output of so many bytes a value.

        The choice follows shapes and never group sizes.
        """
        depth = self.depth if D % self.depth == 0 else ROW
        small = rows < 64
        warpgroups = self.warpgroups or (4 if form == "compact" and small else 2)
        features = TILE_ROWS * warpgroups
        alone = not small or warpgroups > 2
        steps, tiles = D // depth, row_tiles * pl.cdiv(F, features)
        # What memory bounds wants all of its blocks at once.
        room = NUM_SMS if alone else 2 * NUM_SMS
        wanted = self.splits or max(1, min(room // tiles, steps // 4))
        splits = max(i for i in range(1, min(wanted, steps) + 1) if steps % i == 0)
        out = rows * features * (4 if splits > 1 else out_bytes)
        free = SHARED_BYTES // (1 if alone else 2) - out
        slots = free // (rows * depth * 2 + features // TILE_ROWS * depth // ROW * TILE_BYTES[form])
        return dataclasses.replace(
            self,
            rows=rows,
            features=features,
            depth=depth,
            slots=self.slots or max(2, min(8, slots)),
            splits=splits,
            warpgroups=warpgroups,
        )


# Of shared memory, with verbatim rows ahead, or counts of escapes.
TILE_BYTES = {
    "exponent": 2 * TILE_ROWS * ROW,
    "palette": TILE_ROWS * ROW * 3 // 2 + AHEAD * ROW + 4 * IDS_AHEAD,
    "compact": TILE_ROWS * (ROW + 4 * PLANES) + 2 * PAIRS + WINDOW,
}

SPACE = {
    "rows": (0, 8, 16, 32, 64, 128, 256),
    "depth": (64, 128),
    "slots": (2, 3, 4, 6, 8),
    "splits": (0, 1, 2, 4, 8),
    "warpgroups": (2, 4),
}


def most_rows(rows: int, num_rows: int) -> int:
    """Rows of a tile, where the rows fill more than one of the largest: fewer tiles put the same
    weights together."""
    return LARGEST_ROWS if rows == LARGEST_ROWS // 2 and num_rows >= 2 * LARGEST_ROWS else rows


@dataclasses.dataclass(frozen=True)
class _Form:
    """What is static in the tiles of matrices [E, F, D]."""

    blocks: GroupedBlocks
    E: int
    F: int
    D: int
    interpret: Any

    @property
    def bands(self) -> int:
        return self.F // TILE_ROWS

    @property
    def columns(self) -> int:
        return self.D // ROW

    @property
    def tiles(self) -> int:
        return self.bands * self.columns

    @property
    def own_bands(self) -> int:
        """Bands of a block of threads."""
        return self.blocks.features // TILE_ROWS

    def rows_of(self, array: jax.Array) -> jax.Array:
        """An array by rows [E, R, n] as [E, bands, D, n]: a column's number is also that of its
        tile's first row in the band."""
        return array.reshape(self.E, self.bands, self.D, -1)

    def buffer(self, width: int, dtype: Any) -> Any:
        return plgpu.SMEM((self.blocks.slots, self.own_bands, self.blocks.depth, width), dtype)

    def copy(self, ref: Any, buffer: Any, barrier: Any, step: Step) -> None:
        """Copies the rows of a step's tiles."""
        bands = pl.ds(step.feature // TILE_ROWS, self.own_bands)
        source = ref.at[step.group, bands, pl.ds(step.column, self.blocks.depth)]
        plgpu.copy_gmem_to_smem(source, buffer.at[step.slot], barrier)

    def band(self, step: Step, own: Any) -> Any:
        """A band of the block. The last block may have one that is not there; its products are not
        used, but it may not read from outside the arrays."""
        return jnp.minimum(step.feature // TILE_ROWS + own, self.bands - 1)

    def tile(self, step: Step, own: Any, part: int = 0) -> Any:
        """The place of a tile in an array [E, tiles + 1]."""
        inside = self.band(step, own) * self.columns + step.column // ROW + part
        return step.group * (self.tiles + 1) + inside

    def multiply(self, acc: Any, buffers: Any, x: Any, slot: Any, own: Any, tile: Any) -> None:
        """Adds the products of a warpgroup's tiles; `tile(part, rows)` gives their operand."""
        for part in range(self.blocks.depth // ROW):
            weights = tile(part, pl.ds(part * ROW, ROW))
            if self.interpret:  # The interpreter takes this operand from shared memory only.
                place = buffers[-1].at[own]
                place[...] = weights
                plgpu.commit_smem()
                weights = place
            columns = pl.ds(part * ROW, ROW)
            plgpu.wgmma(acc, weights, x.at[slot, :, columns].transpose((1, 0)))
            if self.interpret:
                plgpu.wgmma_wait(0)

    def tiles_of(self, buffers: list[Any], copies: int, **functions: Any) -> WeightTiles:
        if self.interpret:
            shape = (self.own_bands, TILE_ROWS, ROW)
            buffers = [*buffers, swizzled(shape, jnp.bfloat16)]
        # The operand is in registers, which the next step overwrites: nothing may be pending.
        large = self.blocks.rows >= LARGEST_ROWS
        return WeightTiles(
            buffers,
            copies,
            pending=0,
            x_row_bytes=2 * ROW,
            registers=REGISTERS if large else None,
            **functions,
        )


def _exponent_tiles(form: _Form, matrix: UnweightMatrix) -> tuple[list[jax.Array], WeightTiles]:
    def load(refs, buffers, barrier, step: Step) -> None:
        for ref, buffer in zip(refs, buffers, strict=False):
            form.copy(ref, buffer, barrier, step)

    def multiply(acc, refs, buffers, x, step: Step, warpgroup, values) -> None:
        def tile(part: int, rows: pl.Slice) -> jax.Array:
            shared = {
                "sign_mantissa": buffers[0].at[step.slot, warpgroup, rows],
                "exponents": buffers[1].at[step.slot, warpgroup, rows],
            }
            return operand(exponent_program, shared, tuple(shared), {}, form.interpret)

        form.multiply(acc, buffers, x, step.slot, warpgroup, tile)

    arrays = [form.rows_of(matrix.sign_mantissa), form.rows_of(matrix.exponents)]
    buffers = [form.buffer(ROW, jnp.uint8), form.buffer(ROW, jnp.uint8)]
    return arrays, form.tiles_of(buffers, 2, load=load, multiply=multiply)


def _palette_tiles(form: _Form, matrix: UnweightMatrix) -> tuple[list[jax.Array], WeightTiles]:
    """Palette codes, and of every step the first verbatim rows with their ids."""
    V = matrix.verbatim_row.shape[-1]
    row, verbatim = matrix.verbatim_row, matrix.verbatim
    if 0 < V < AHEAD:
        R = form.F * form.columns
        row = jnp.pad(row, ((0, 0), (0, AHEAD - V)), constant_values=R)
        verbatim = jnp.pad(verbatim, ((0, 0), (0, AHEAD - V), (0, 0)))
        V = AHEAD

    def load(refs, buffers, barrier, step: Step) -> None:
        for ref, buffer in zip(refs[:2], buffers, strict=False):
            form.copy(ref, buffer, barrier, step)
        for own in range(form.own_bands if V else 0):
            row_ref, verbatim_ref, first_ref = refs[3:]
            # Not over the end: in front there are rows of other tiles, behind none or another
            # matrix, of which there may be ids that nobody looks at.
            ahead = jnp.minimum(first_ref[form.tile(step, own)], V - AHEAD)
            place = step.group * V + ahead
            for ref, buffer, count in (
                (row_ref, buffers[2], IDS_AHEAD),
                (verbatim_ref, buffers[3], AHEAD),
            ):
                source, target = ref.at[pl.ds(place, count)], buffer.at[step.slot, own]
                plgpu.copy_gmem_to_smem(source, target, barrier)

    def start(refs, matrix):
        return load_words(refs[2], jnp.minimum(matrix, form.E - 1), 4, form.interpret)

    def multiply(acc, refs, buffers, x, step: Step, warpgroup, palette) -> None:
        program = partial(palette_program, has_verbatim=V > 0)
        first_row = form.band(step, warpgroup) * form.D + step.column

        def tile(part: int, rows: pl.Slice) -> jax.Array:
            shared = {
                "sign_mantissa": buffers[0].at[step.slot, warpgroup, rows],
                "codes": buffers[1].at[step.slot, warpgroup, rows],
            }
            stored = {}
            if V:
                shared["row_ahead"] = buffers[2].at[step.slot, warpgroup]
                shared["ahead"] = buffers[3].at[step.slot, warpgroup]
                names = ("verbatim_row", "verbatim", "verbatim_first")
                stored = dict(zip(names, refs[3:], strict=True))
            scalars = {
                "tile": form.tile(step, warpgroup, part),
                "first_row": first_row + part * TILE_ROWS,
                "offset": step.group * V,
                "palette": palette,
            }
            return operand(program, shared | stored, tuple(shared), scalars, form.interpret)

        form.multiply(acc, buffers, x, step.slot, warpgroup, tile)

    arrays = [form.rows_of(matrix.sign_mantissa), form.rows_of(matrix.codes), matrix.palette]
    buffers = [form.buffer(ROW, jnp.uint8), form.buffer(ROW // 2, jnp.uint8)]
    copies = 2
    if V:
        arrays += [row.reshape(-1), verbatim.reshape(-1, ROW), matrix.verbatim_first.reshape(-1)]
        leading = (form.blocks.slots, form.own_bands)
        buffers.append(plgpu.SMEM((*leading, IDS_AHEAD), jnp.int32))
        buffers.append(plgpu.SMEM((*leading, AHEAD, ROW), jnp.uint8))
        copies += 2 * form.own_bands
    return arrays, form.tiles_of(buffers, copies, load=load, start=start, multiply=multiply)


def _compact_tiles(form: _Form, matrix: UnweightMatrix) -> tuple[list[jax.Array], WeightTiles]:
    """3-bit codes, and where the escapes of pairs of rows begin."""
    spare = max(0, WINDOW - matrix.escapes.shape[-1])
    escapes = jnp.pad(matrix.escapes, ((0, 0), (0, spare))) if spare else matrix.escapes
    X = escapes.shape[-1]
    depth = form.blocks.depth

    def load(refs, buffers, barrier, step: Step) -> None:
        form.copy(refs[0], buffers[0], barrier, step)
        bands, tile = pl.ds(step.feature // TILE_ROWS, form.own_bands), step.column // ROW
        for ref, buffer, size in ((refs[1], buffers[1], LINES), (refs[4], buffers[2], PAIRS)):
            source = ref.at[step.group, bands, pl.ds(tile * size, depth // ROW * size)]
            plgpu.copy_gmem_to_smem(source, buffer.at[step.slot], barrier)
        for own in range(form.own_bands):
            first = jax.lax.bitcast_convert_type(refs[3][form.tile(step, own)], jnp.int32)
            source = pl.ds(step.group * X + jnp.minimum(first, X - WINDOW), WINDOW)
            plgpu.copy_gmem_to_smem(refs[5].at[source], buffers[3].at[step.slot, own], barrier)

    def start(refs, matrix):
        return load_words(refs[2], jnp.minimum(matrix, form.E - 1), 2, form.interpret)

    def multiply(acc, refs, buffers, x, step: Step, warpgroup, palette) -> None:
        program = partial(compact_program, count=X, matrices=form.E)

        def tile(part: int, rows: pl.Slice) -> jax.Array:
            shared = {
                "sign_mantissa": buffers[0].at[step.slot, warpgroup, rows],
                "codes": buffers[1].at[step.slot, warpgroup, pl.ds(part * LINES, LINES)],
                "pair_first": buffers[2].at[step.slot, warpgroup, pl.ds(part * PAIRS, PAIRS)],
                "ahead": buffers[3].at[step.slot, warpgroup],
            }
            stored = {"tile_first": refs[3], "escapes": refs[5]}
            scalars = {
                "step_tile": form.tile(step, warpgroup),
                "tile": form.tile(step, warpgroup, part),
                "offset": step.group * X,
                "palette": palette,
            }
            return operand(program, shared | stored, tuple(shared), scalars, form.interpret)

        form.multiply(acc, buffers, x, step.slot, warpgroup, tile)

    arrays = [
        form.rows_of(matrix.sign_mantissa),
        matrix.codes.reshape(form.E, form.bands, form.columns * LINES, LINE_WORDS),
        matrix.palette,
        matrix.tile_first.reshape(-1),
        matrix.pair_first.reshape(form.E, form.bands, form.columns * PAIRS),
        escapes.reshape(-1),
    ]
    leading = (form.blocks.slots, form.own_bands)
    buffers = [
        form.buffer(ROW, jnp.uint8),
        plgpu.SMEM((*leading, depth // ROW * LINES, LINE_WORDS), jnp.uint32),
        plgpu.SMEM((*leading, depth // ROW * PAIRS), jnp.uint16),
        plgpu.SMEM((*leading, WINDOW), jnp.uint8),
    ]
    return arrays, form.tiles_of(
        buffers, 3 + form.own_bands, load=load, start=start, multiply=multiply
    )


FORMS = {"exponent": _exponent_tiles, "palette": _palette_tiles, "compact": _compact_tiles}


def multiply_unweight_tiles(
    x_MD: jax.Array,
    matrices: UnweightMatrix,
    tiles: RowTiles,
    blocks: GroupedBlocks,
    *,
    interpret: Any,
    name: str,
    out_dtype: Any = None,
) -> jax.Array:
    """Grouped product over given tiles with matrices [E, F, D]."""
    F, D = matrices.shape
    E = matrices.leading[0]
    form = _Form(blocks, E, F, D, interpret)
    arrays, weight_tiles = FORMS[matrices.form](form, matrices)
    return multiply_tiles(
        operand_order(x_MD),
        arrays,
        tiles,
        groups=E,
        F=F,
        form=weight_tiles,
        blocks=blocks,
        out_dtype=out_dtype or x_MD.dtype,
        interpret=interpret,
        name=name,
    )


def unweight_matmul_mosaic(
    x_MD: jax.Array,
    matrix: UnweightMatrix,
    *,
    blocks: UnweightBlocks = UnweightBlocks(),
    interpret: Any = False,
    out_dtype: Any = None,
) -> jax.Array:
    """Product with one group of all rows."""
    M = x_MD.shape[0]
    F, D = matrix.shape
    rows = blocks.rows or most_rows(power_of_two(M), M)
    out_dtype = jnp.dtype(out_dtype or x_MD.dtype)
    return multiply_unweight_tiles(
        x_MD,
        jax.tree.map(lambda x: x[None], matrix),
        whole_tiles(M, rows),
        blocks.resolved_for(matrix.form, rows, pl.cdiv(M, rows), F, D, out_dtype.itemsize),
        interpret=interpret,
        name=f"unweight_{matrix.form}_matmul",
        out_dtype=out_dtype,
    )


def grouped_unweight_matmul_mosaic(
    x_MD: jax.Array,
    matrices: UnweightMatrix,
    group_sizes_E: jax.Array,
    *,
    blocks: UnweightBlocks = UnweightBlocks(),
    interpret: Any = False,
) -> jax.Array:
    """Grouped product: the tiles of `grouped_matmul`; matrices of empty groups are not read."""
    M = x_MD.shape[0]
    F, D = matrices.shape
    E = group_sizes_E.shape[0]
    rows = blocks.rows or most_rows(tile_rows(M, E), M // E)
    count = num_tiles(M, E, rows, ALIGN)
    return multiply_unweight_tiles(
        x_MD,
        matrices,
        row_tiles(group_sizes_E, M, rows, ALIGN),
        blocks.resolved_for(matrices.form, rows, count, F, D, x_MD.dtype.itemsize),
        interpret=interpret,
        name=f"grouped_unweight_{matrices.form}_matmul",
    )
