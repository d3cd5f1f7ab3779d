"""Products with 4-bit weights that become bfloat16 in registers, for one matrix and for experts."""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import vector

from pallas_kernels.grouped_matmul import build_rows, grouped_matmul_reference
from pallas_kernels.grouped_matmul_mosaic import (
    ALIGN,
    GroupedBlocks,
    Step,
    WeightTiles,
    multiply_tiles,
    swizzled,
    unaligned,
)
from pallas_kernels.grouped_matmul_xla import (
    RowTiles,
    loop_over_tiles,
    num_tiles,
    power_of_two,
    row_tiles,
    tile_rows,
    whole_tiles,
)
from pallas_kernels.int4_format import (
    GROUP,
    OFFSET,
    PER_WORD,
    WORDS,
    dequantise,
    dequantise_reference,
)
from pallas_kernels.kernel import ArgSpec, Kernel


def int4_matmul_reference(x: np.ndarray, weights: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Rows times the dequantised weights, in float64."""
    weights_FD = dequantise_reference(weights, scales)
    return x.astype(np.float64) @ weights_FD.astype(np.float64).T


def grouped_int4_matmul_reference(
    x: np.ndarray, weights: np.ndarray, scales: np.ndarray, group_sizes: np.ndarray
) -> np.ndarray:
    """Each row times the dequantised weights of its group, in float64."""
    return grouped_matmul_reference(x, dequantise_reference(weights, scales), group_sizes)


def int4_matmul_xla(x_MD: jax.Array, weights_FW: jax.Array, scales_GF: jax.Array) -> jax.Array:
    """Product with weights that are dequantised as a whole."""
    weights_FD = dequantise(weights_FW, scales_GF).astype(x_MD.dtype)
    out = jnp.einsum("MD,FD->MF", x_MD, weights_FD, preferred_element_type=jnp.float32)
    return out.astype(x_MD.dtype)


def grouped_int4_matmul_xla(
    x_MD: jax.Array, weights_EFW: jax.Array, scales_EGF: jax.Array, group_sizes_E: jax.Array
) -> jax.Array:
    """Grouped product that dequantises the weights of one group at a time."""
    return loop_over_tiles(
        x_MD,
        weights_EFW.shape[1],
        group_sizes_E,
        lambda e: dequantise(weights_EFW[e], scales_EGF[e]),
    )


@dataclasses.dataclass(frozen=True)
class Int4Blocks(GroupedBlocks):
    """Tile sizes of the kernels, as in `GroupedBlocks`.

    Registers hold the sums and the words of a step, of 64 features for each warpgroup.
    """

    features: int = 128
    depth: int = 128

    def _out_bytes(self, splits: int) -> int:
        return 4

    def _slot_bytes(self, rows: int, features: int) -> int:
        return rows * self.depth * 2 + features * self.depth * 9 // 16


SPACE = {
    "rows": (0, 8, 16, 32, 64, 128),
    "features": (128, 256),
    "depth": (128, 256),
    "slots": (2, 3, 4, 6, 8),
    "splits": (0, 1, 2, 4, 8),
    "warpgroups": (2, 4),
}

# The layout in which a warpgroup holds words: lane t of four has word t of a group, for the rows
# that the lane has in the layout of a WGMMA operand.
WORD_LAYOUT = plgpu.Layout.TILED(
    plgpu.Tiling(((64, WORDS), (16, WORDS), (8, WORDS), (1,))),
    warp_dims=(-7,),
    lane_dims=(-3, -2),
    vector_dim=-1,
)


def _pair_registers(pairs: Sequence[jax.Array], interpret: Any) -> jax.Array:
    """WGMMA operand [rows, 32] whose registers are those of four arrays [rows, 4] of pairs.

    Array i holds columns 8i + 2t and 8i + 2t + 1 in lane t. No instruction is spent.
    """
    rows = pairs[0].shape[0]
    if interpret:  # Registers are a matter of the device: say the same in logical columns.
        pairs_R4T2 = jax.lax.bitcast_convert_type(jnp.stack(pairs, axis=1), jnp.bfloat16)
        return pairs_R4T2.reshape(rows, GROUP)

    @plgpu.inline_mgpu(
        arg_types=(WORD_LAYOUT,) * len(pairs),
        return_type=plgpu.ShapeDtypeStruct((rows, GROUP), jnp.bfloat16, layout=plgpu.Layout.WGMMA),
    )
    def reinterpret(_, *words: Any) -> Any:
        shape = mgpu.WGMMA_LAYOUT.registers_shape((rows, GROUP))
        registers = np.empty(shape, dtype=object)
        pair = ir.VectorType.get((2,), ir.BF16Type.get())
        for i, array in enumerate(words):
            for index, register in np.ndenumerate(array.registers):
                place = (index[0], i, *index[2:])
                registers[place] = vector.bitcast(pair, register)
        return mgpu.FragmentedArray(
            _registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None
        )

    return reinterpret(*pairs)


def weights_of_words(words_R4: jax.Array, scales_R: jax.Array, interpret: Any) -> jax.Array:
    """bfloat16 weights [rows, 32] of one group of columns, rounded once.

    Four bits in the mantissa of 128.0 make 128 + stored value, exactly.
    """
    pairs = [((words_R4 >> (4 * i)) & 0x000F000F) | 0x43004300 for i in range(4)]
    stored = _pair_registers(pairs, interpret)
    values = stored - jnp.bfloat16(128 + OFFSET)
    return values * jax.lax.broadcast_in_dim(scales_R, values.shape, [0])


def int4_tiles(blocks: GroupedBlocks, interpret: Any) -> WeightTiles:
    """Weights [E, F, D / 8] and scales [E, D / 32, F] in the device form."""
    slots, depth = blocks.slots, blocks.depth
    own = blocks.features // blocks.warpgroups

    def load(refs, buffers, barrier, step: Step) -> None:
        group, features, slot = step.group, pl.ds(step.feature, blocks.features), step.slot
        words = pl.ds(step.column // PER_WORD, depth // PER_WORD)
        plgpu.copy_gmem_to_smem(refs[0].at[group, features, words], buffers[0].at[slot], barrier)
        scales = pl.ds(step.column // GROUP, depth // GROUP)
        plgpu.copy_gmem_to_smem(refs[1].at[group, scales, features], buffers[1].at[slot], barrier)

    def multiply(acc, refs, buffers, x, step: Step, warpgroup, values) -> None:
        slot, features = step.slot, pl.ds(warpgroup * own, own)
        words = plgpu.load(buffers[0].at[slot, features], layout=WORD_LAYOUT)
        for group in range(depth // GROUP):
            scales = plgpu.load(
                buffers[1].at[slot, group, features],
                layout=plgpu.Layout.WGMMA.reduce(1),
                optimized=False,
            )
            own_words = words[:, group * WORDS : (group + 1) * WORDS]
            weights = weights_of_words(own_words, scales, interpret)
            if interpret:  # The interpreter takes this operand from shared memory only.
                operand = buffers[2].at[features]
                operand[...] = weights
                plgpu.commit_smem()
                weights = operand
            columns = pl.ds(group * GROUP, GROUP)
            plgpu.wgmma(acc, weights, x.at[slot, :, columns].transpose((1, 0)))
            if interpret:
                plgpu.wgmma_wait(0)

    buffers: list[Any] = [
        swizzled((slots, blocks.features, depth // PER_WORD), jnp.int32, 64),
        plgpu.SMEM((slots, depth // GROUP, blocks.features), jnp.bfloat16),
    ]
    if interpret:
        buffers.append(swizzled((blocks.features, GROUP), jnp.bfloat16, 2 * GROUP))
    # The operand is in registers, which the next step overwrites: nothing may be pending.
    return WeightTiles(buffers, 2, load, multiply, pending=0, x_row_bytes=2 * GROUP)


def multiply_int4_tiles(
    x_MD: jax.Array,
    weights_EFW: jax.Array,
    scales_EGF: jax.Array,
    tiles: RowTiles,
    blocks: GroupedBlocks,
    interpret: Any,
    name: str,
    out_dtype: Any = None,
) -> jax.Array:
    """Grouped product over given tiles, in the dtype of x unless another is asked for."""
    E, F, _ = weights_EFW.shape
    return multiply_tiles(
        x_MD,
        [weights_EFW, scales_EGF],
        tiles,
        groups=E,
        F=F,
        form=int4_tiles(blocks, interpret),
        blocks=blocks,
        out_dtype=out_dtype or x_MD.dtype,
        interpret=interpret,
        name=name,
    )


def int4_matmul_mosaic(
    x_MD: jax.Array,
    weights_FW: jax.Array,
    scales_GF: jax.Array,
    *,
    blocks: Int4Blocks = Int4Blocks(),
    interpret: Any = False,
) -> jax.Array:
    """Product with one group of all rows."""
    M, D = x_MD.shape
    rows = blocks.rows or power_of_two(M)
    tiled = blocks.resolved(rows, pl.cdiv(M, rows), weights_FW.shape[0], D)
    tiles = whole_tiles(M, rows)
    return multiply_int4_tiles(
        x_MD, weights_FW[None], scales_GF[None], tiles, tiled, interpret, "int4_matmul"
    )


def grouped_int4_matmul_mosaic(
    x_MD: jax.Array,
    weights_EFW: jax.Array,
    scales_EGF: jax.Array,
    group_sizes_E: jax.Array,
    *,
    blocks: Int4Blocks = Int4Blocks(),
    interpret: Any = False,
) -> jax.Array:
    """Grouped product: the tiles of `grouped_matmul` with the weights of `int4_matmul`."""
    M, D = x_MD.shape
    E, F, _ = weights_EFW.shape
    rows = blocks.rows or tile_rows(M, E)
    tiled = blocks.resolved(rows, num_tiles(M, E, rows, ALIGN), F, D)
    tiles = row_tiles(group_sizes_E, M, rows, ALIGN)
    return multiply_int4_tiles(
        x_MD, weights_EFW, scales_EGF, tiles, tiled, interpret, "grouped_int4_matmul"
    )


def _unsupported(x: Any, weights: Any, scales: Any, group_sizes: Any = None) -> str | None:
    if scales.dtype != jnp.bfloat16:
        return f"scales are {scales.dtype}, not bfloat16"
    return unaligned(x, weights.shape[-2], 128)


def _weight_bytes(weights: Any, scales: Any) -> int:
    """Bytes of one matrix: 4.5 bits a weight."""
    F, W = weights.shape[-2:]
    return F * W * 4 + scales.shape[-2] * F * scales.dtype.itemsize


def _flops(x: Any, weights: Any, scales: Any) -> int:
    return 2 * x.shape[0] * weights.shape[0] * x.shape[1]


def _bytes(x: Any, weights: Any, scales: Any) -> int:
    """Weights, scales, x and the output once."""
    M, D = x.shape
    return _weight_bytes(weights, scales) + M * (D + weights.shape[0]) * x.dtype.itemsize


def _grouped_flops(x: Any, weights: Any, scales: Any, group_sizes: Any) -> int:
    return int(2 * np.sum(group_sizes) * weights.shape[1] * x.shape[1])


def _grouped_bytes(x: Any, weights: Any, scales: Any, group_sizes: Any) -> int:
    """The weights of groups with rows once, the rows of x in groups, and all of the output."""
    M, D = x.shape
    used = np.count_nonzero(group_sizes) * _weight_bytes(weights, scales)
    return int(used + (np.sum(group_sizes) * D + M * weights.shape[1]) * x.dtype.itemsize)


def _build(
    rng: np.random.Generator, dtype: np.dtype, num_rows: int, F: int, D: int
) -> dict[str, np.ndarray]:
    rows = build_rows(rng, dtype, num_rows, D, (num_rows,))
    weights_EFW, scales_EGF = _build_weights(rng, 1, F, D)
    return {"x": rows["x"], "weights": weights_EFW[0], "scales": scales_EGF[0]}


def _build_grouped(
    rng: np.random.Generator,
    dtype: np.dtype,
    num_rows: int,
    sizes: tuple[int, ...],
    F: int,
    D: int,
) -> dict[str, np.ndarray]:
    rows = build_rows(rng, dtype, num_rows, D, sizes)
    weights_EFW, scales_EGF = _build_weights(rng, len(sizes), F, D)
    scales_EGF[np.asarray(sizes) == 0] = np.nan
    sizes_E = rows["group_sizes"]
    return {"x": rows["x"], "weights": weights_EFW, "scales": scales_EGF, "group_sizes": sizes_E}


def _build_weights(
    rng: np.random.Generator, groups: int, F: int, D: int
) -> tuple[np.ndarray, np.ndarray]:
    words = rng.integers(0, 2**32, size=(groups, F, D // PER_WORD), dtype=np.uint32)
    scales = rng.uniform(0.01, 0.1, size=(groups, D // GROUP, F))
    return words.view(np.int32), scales.astype(jnp.bfloat16)


def _model_spec(name: str, num_rows: int, F: int, D: int, experts: int = 0) -> ArgSpec:
    def build(rng: np.random.Generator, dtype: np.dtype) -> dict[str, Any]:
        leading = (experts,) if experts else ()
        arrays = {
            "x": jax.ShapeDtypeStruct((num_rows, D), dtype),
            "weights": jax.ShapeDtypeStruct((*leading, F, D // PER_WORD), np.int32),
            "scales": jax.ShapeDtypeStruct((*leading, D // GROUP, F), jnp.bfloat16),
        }
        if experts:
            arrays["group_sizes"] = jax.ShapeDtypeStruct((experts,), np.int32)
        return arrays

    return ArgSpec(name, build, {}, compile_only=True)


ARG_SPECS = (
    ArgSpec("one row", partial(_build, num_rows=1, F=128, D=256), {}),
    ArgSpec("parts of the sum", partial(_build, num_rows=10, F=64, D=1024), {}),
    ArgSpec("ragged ends", partial(_build, num_rows=19, F=136, D=384), {}),
    ArgSpec("several tiles of rows", partial(_build, num_rows=140, F=128, D=128), {}),
    _model_spec("Kimi K2.5 up, decode", 16, 2048, 7168),
    _model_spec("Kimi K2.5 down, decode", 16, 7168, 2048),
    _model_spec("Kimi K2.5 up, 64 rows", 64, 2048, 7168),
    _model_spec("Kimi K2.5 down, prefill", 4096, 7168, 2048),
)

GROUPED_ARG_SPECS = (
    ArgSpec(
        "ragged with a tail",
        partial(_build_grouped, num_rows=30, sizes=(3, 0, 17, 1, 4), F=128, D=256),
        {},
    ),
    ArgSpec("no rows", partial(_build_grouped, num_rows=9, sizes=(0, 0), F=64, D=128), {}),
    ArgSpec(
        "groups of several tiles",
        partial(_build_grouped, num_rows=150, sizes=(130, 3), F=72, D=128),
        {},
    ),
    _model_spec("Kimi K2.5 up, one row", 8, 2048, 7168, 48),
    _model_spec("Kimi K2.5 up, decode", 128, 2048, 7168, 48),
    _model_spec("Kimi K2.5 down, decode", 128, 7168, 2048, 48),
    _model_spec("Kimi K2.5 down, 512 rows", 512, 7168, 2048, 48),
    _model_spec("Kimi K2.5 up, prefill", 8192, 2048, 7168, 48),
)

INT4_MATMUL = Kernel(
    name="int4_matmul",
    reference=int4_matmul_reference,
    implementations={"xla": int4_matmul_xla, "mosaic": int4_matmul_mosaic},
    arg_specs=ARG_SPECS,
    tolerance={"float32": 1e-5, "bfloat16": 2e-2},
    flops=_flops,
    bytes=_bytes,
    unsupported=_unsupported,
    blocks=Int4Blocks,
    space=SPACE,
)

GROUPED_INT4_MATMUL = Kernel(
    name="grouped_int4_matmul",
    reference=grouped_int4_matmul_reference,
    implementations={"xla": grouped_int4_matmul_xla, "mosaic": grouped_int4_matmul_mosaic},
    arg_specs=GROUPED_ARG_SPECS,
    tolerance={"float32": 1e-5, "bfloat16": 2e-2},
    flops=_grouped_flops,
    bytes=_grouped_bytes,
    unsupported=_unsupported,
    blocks=Int4Blocks,
    space=SPACE,
)


def int4_matmul(
    x_MD: jax.Array,
    weights_FW: jax.Array,
    scales_GF: jax.Array,
    *,
    implementation: str | None = None,
) -> jax.Array:
    """Rows times 4-bit weights, which are rounded to bfloat16 after scaling.

    Sums are float32. A row's result depends on its own values, the weights and the shapes.

    Shapes: x [M, D], weights [F, D / 8] int32 and scales [D / 32, F] bfloat16 as
    `pack_for_device` makes them; the result is [M, F].
    Layout: features may be a shard, and so may whole groups of 32 columns.
    """
    return INT4_MATMUL(x_MD, weights_FW, scales_GF, implementation=implementation)


def grouped_int4_matmul(
    x_MD: jax.Array,
    weights_EFW: jax.Array,
    scales_EGF: jax.Array,
    group_sizes_E: jax.Array,
    *,
    implementation: str | None = None,
) -> jax.Array:
    """Each row times the 4-bit weights of its group; rows behind the last group give zeros.

    Shapes: x [M, D] sorted by group, weights [E, F, D / 8] int32 and scales [E, D / 32, F]
    bfloat16 as `pack_for_device` makes them, group sizes [E] int32 with a sum of at most M; the
    result is [M, F].
    """
    return GROUPED_INT4_MATMUL(
        x_MD, weights_EFW, scales_EGF, group_sizes_E, implementation=implementation
    )
