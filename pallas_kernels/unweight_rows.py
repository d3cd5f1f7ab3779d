"""Single rows of a compressed matrix: what an embedding looks up."""

import jax
import jax.numpy as jnp

from pallas_kernels.unweight_matrix import UnweightMatrix

ROW = 64
BAND = 64
PAIR = 2
RANDOM_ACCESS_FORMS = ("palette", "compact")


def unweight_rows(matrix: UnweightMatrix, ids: jax.Array) -> jax.Array:
    """Rows of a matrix in palette or compact form, each decoded on its own.

    Shapes: ids int32 [...] in 0 to F - 1; bfloat16 [..., D].
    Raises: ValueError for a form whose rows need others to be decoded.
    """
    if matrix.form not in RANDOM_ACCESS_FORMS:
        raise ValueError(
            f"rows of a compressed matrix: expected a form of {RANDOM_ACCESS_FORMS}, "
            f"got {matrix.form!r}"
        )
    F, D = matrix.shape
    tiles = D // ROW
    ids_T1 = ids.reshape(-1, 1)
    band_T1, inside_T1 = ids_T1 // BAND, ids_T1 % BAND
    height_T1 = jnp.minimum(F - band_T1 * BAND, BAND)
    tile_1C = jnp.arange(tiles, dtype=jnp.int32)[None]
    row_TC = band_T1 * (BAND * tiles) + tile_1C * height_T1 + inside_T1
    if matrix.form == "palette":
        exponent_TCR = _palette_exponents(matrix, row_TC)
    else:
        # A whole band has as many pairs of rows as any other; the last may have fewer.
        pairs_T1 = (height_T1 + PAIR - 1) // PAIR
        pair_TC = band_T1 * (BAND // PAIR * tiles) + tile_1C * pairs_T1 + inside_T1 // PAIR
        exponent_TCR = _compact_exponents(
            matrix, row_TC, band_T1 * tiles + tile_1C, pair_TC, inside_T1 % PAIR == 1
        )
    sign_mantissa_TCR = matrix.sign_mantissa[row_TC].astype(jnp.uint16)
    words = (
        (sign_mantissa_TCR & 0x80) << 8
        | exponent_TCR.astype(jnp.uint16) << 7
        | sign_mantissa_TCR & 0x7F
    )
    return jax.lax.bitcast_convert_type(words, jnp.bfloat16).reshape(*ids.shape, D)


def _palette_exponents(matrix: UnweightMatrix, row_TC: jax.Array) -> jax.Array:
    pairs_TCI = matrix.codes[row_TC]
    code_TCR = jnp.stack([pairs_TCI & 15, pairs_TCI >> 4], axis=-1).reshape(*row_TC.shape, ROW)
    coded_TCR = matrix.palette[code_TCR]
    if not matrix.verbatim_row.shape[0]:
        return coded_TCR
    place_TC = jnp.searchsorted(matrix.verbatim_row, row_TC).astype(jnp.int32)
    place_TC = jnp.minimum(place_TC, matrix.verbatim_row.shape[0] - 1)
    is_verbatim_TC = matrix.verbatim_row[place_TC] == row_TC
    return jnp.where(is_verbatim_TC[..., None], matrix.verbatim[place_TC], coded_TCR)


def _compact_exponents(
    matrix: UnweightMatrix,
    row_TC: jax.Array,
    tile_TC: jax.Array,
    pair_TC: jax.Array,
    is_second_T1: jax.Array,
) -> jax.Array:
    code_TCR = _plane_codes(matrix.codes[row_TC])
    escaped_TCR = code_TCR == 7
    first_TC = matrix.tile_first[tile_TC].astype(jnp.int32)
    first_TC += matrix.pair_first[pair_TC].astype(jnp.int32)
    # The escapes of a pair's first row come before those of its second.
    before_TCR = _plane_codes(matrix.codes[jnp.where(is_second_T1, row_TC - 1, row_TC)])
    before_TC = jnp.sum(before_TCR == 7, axis=-1, dtype=jnp.int32)
    first_TC += jnp.where(is_second_T1, before_TC, 0)
    escaped = escaped_TCR.astype(jnp.int32)
    place_TCR = first_TC[..., None] + jnp.cumsum(escaped, axis=-1) - escaped
    if not matrix.escapes.shape[0]:
        return matrix.palette[code_TCR]
    last = matrix.escapes.shape[0] - 1
    return jnp.where(
        escaped_TCR, matrix.escapes[jnp.minimum(place_TCR, last)], matrix.palette[code_TCR]
    )


def _plane_codes(words: jax.Array) -> jax.Array:
    """3-bit codes int32 [..., 64] of three bit planes uint32 [..., 6]."""
    planes = words.reshape(*words.shape[:-1], 3, 2, 1)
    shifts = jnp.arange(32, dtype=jnp.uint32).reshape((1,) * (planes.ndim - 1) + (32,))
    bits = (planes >> shifts & 1).reshape(*words.shape[:-1], 3, ROW).astype(jnp.int32)
    return bits[..., 0, :] | bits[..., 1, :] << 1 | bits[..., 2, :] << 2
