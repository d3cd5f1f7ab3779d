"""Single rows of a coded matrix: what an embedding looks up."""

import jax
import jax.numpy as jnp

from pallas_kernels.unweight_matrix import COMPACT, ROW, UnweightMatrix

RANDOM_ACCESS_FORMS = ("palette", "compact")


def unweight_rows(matrix: UnweightMatrix, ids: jax.Array) -> jax.Array:
    """Rows of a matrix in palette or compact form, each decoded on its own.

    Shapes: ids int32 [...] in 0 to F - 1; bfloat16 [..., D].
    Raises: ValueError for a form whose rows need others to be decoded.
    """
    if matrix.form not in RANDOM_ACCESS_FORMS:
        raise ValueError(
            f"rows of a coded matrix: expected a form of {RANDOM_ACCESS_FORMS}, "
            f"received {matrix.form!r}"
        )
    row_TC = matrix.row_ids(ids.reshape(-1))
    decode = _palette_exponents if matrix.form == "palette" else _compact_exponents
    exponent_TCR = decode(matrix, row_TC).astype(jnp.uint16)
    byte_TCR = matrix.sign_mantissa[row_TC].astype(jnp.uint16)
    words = (byte_TCR & 0x80) << 8 | exponent_TCR << 7 | byte_TCR & 0x7F
    values = jax.lax.bitcast_convert_type(words, jnp.bfloat16)
    return values.reshape(*ids.shape, matrix.shape[1])


def _palette_exponents(matrix: UnweightMatrix, row_TC: jax.Array) -> jax.Array:
    pairs_TCI = matrix.codes[row_TC]
    code_TCR = jnp.stack([pairs_TCI & 15, pairs_TCI >> 4], axis=-1).reshape(*row_TC.shape, ROW)
    coded_TCR = matrix.palette[code_TCR]
    num_verbatim = matrix.verbatim_row.shape[0]
    if not num_verbatim:
        return coded_TCR
    place_TC = jnp.searchsorted(matrix.verbatim_row, row_TC).astype(jnp.int32)
    place_TC = jnp.minimum(place_TC, num_verbatim - 1)
    is_verbatim_TC = matrix.verbatim_row[place_TC] == row_TC
    return jnp.where(is_verbatim_TC[..., None], matrix.verbatim[place_TC], coded_TCR)


def _compact_exponents(matrix: UnweightMatrix, row_TC: jax.Array) -> jax.Array:
    tiling = matrix.tiling
    code_TCR = _plane_codes(matrix.codes[row_TC])
    is_escape_TCR = code_TCR == COMPACT
    first_TC = matrix.tile_first[tiling.tile_ids(row_TC)].astype(jnp.int32)
    first_TC += matrix.pair_first[tiling.parts(row_TC, 2)].astype(jnp.int32)
    # The escapes of a pair's first row come before those of its second.
    is_second_TC = tiling.tile_rows(row_TC) % 2 == 1
    before_TCR = _plane_codes(matrix.codes[row_TC - is_second_TC.astype(row_TC.dtype)])
    before_TC = jnp.sum(before_TCR == COMPACT, axis=-1, dtype=jnp.int32)
    first_TC += jnp.where(is_second_TC, before_TC, 0)
    escapes = is_escape_TCR.astype(jnp.int32)
    place_TCR = first_TC[..., None] + jnp.cumsum(escapes, axis=-1) - escapes
    coded_TCR = matrix.palette[code_TCR]
    num_escapes = matrix.escapes.shape[0]
    if not num_escapes:
        return coded_TCR
    escaped_TCR = matrix.escapes[jnp.minimum(place_TCR, num_escapes - 1)]
    return jnp.where(is_escape_TCR, escaped_TCR, coded_TCR)


def _plane_codes(words: jax.Array) -> jax.Array:
    """3-bit codes int32 [..., 64] of three bit planes, uint32 [..., 6]."""
    planes = words.reshape(*words.shape[:-1], 3, 2, 1)
    shifts = jnp.arange(32, dtype=jnp.uint32).reshape((1,) * (planes.ndim - 1) + (32,))
    bits = (planes >> shifts & 1).reshape(*words.shape[:-1], 3, ROW).astype(jnp.int32)
    return bits[..., 0, :] | bits[..., 1, :] << 1 | bits[..., 2, :] << 2
