"""Mosaic GPU forms of what begins with Huffman codes.

Codes are serial, and a chunk is what one thread decodes: 128 chunks, 32 tiles, make a block. After
each row of its chunk a thread leaves 64 palette codes in shared memory, and the block turns 128
rows of codes into the result as the other forms do. A lookup of 12 bits gives two symbols where
both fit, which is nearly always.

Bounds, by count, at the copy bandwidth of an H200 (4.2 of 4.8 TB/s, 132 SMs at 1.7 GHz): with 3.3
bytes in and out a weight has time for 23 instructions. The PTX has 27 for a pair of symbols, where
one of 32 threads takes the rare paths, and 7 a weight for the rest: 20 a weight, so that memory and
instructions are bounds alike. A pair waits some 85 cycles for its lookup and two branches, so an SM
needs 240 threads with a chunk: a matrix of 2^25 weights has them, and a smaller one takes as long
as that, however small it is. Eight blocks fit on an SM.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.threads import THREADS, Words, launch
from pallas_kernels.unweight_decompress_mosaic import (
    SEGMENT,
    SEGMENTS,
    SWEEP_ROWS,
    exponents_of_codes,
    rebuild,
    store_words,
    write_verbatim,
)
from pallas_kernels.unweight_decompress_xla import TABLE, decode_table
from pallas_kernels.unweight_matrix import CHUNK_ROWS, ROW, TILE_ROWS, MatrixTiling

TILE_CHUNKS = TILE_ROWS // CHUNK_ROWS
BLOCK_TILES = THREADS // TILE_CHUNKS

# Columns of codes are 4 words longer than needed: eight neighbours read eight columns of four rows
# without a conflict of banks.
COLUMN = THREADS + 4
CODES = SEGMENTS * COLUMN


# -- one thread


def _decode_pair(t: Any, state: Words, last: Any) -> tuple[Words, Any]:
    """The next two symbols in byte 3 of a word, and the state behind them.

    The state is two words of the stream, the bit in the first, modulo 32, which is two before the
    next code (so that 12 bits are an offset into the table), the word behind both, which is on its
    way, and the place of the next.
    """
    low, high, bit, coming, place = state
    window = t.funnel(low, high, bit)
    (entry,) = t.load("shared", window & 4 * (TABLE - 1))

    def second() -> Words:
        """Both symbols have more than 12 bits: another lookup for the second."""
        length = entry >> 8 & 0xF
        (other,) = t.load("shared", window >> length & 4 * (TABLE - 1))
        both = entry & 0x0F000000 | (other & 0x0F000000) << 4
        return [both | length + (other >> 8 & 0xF)]

    (entry,) = t.when((entry & 0x00FF0000) != 0, second, [entry])
    # What the entry has above its lowest byte stays above the six bits that count.
    behind = bit + entry

    def advance() -> Words:
        (word,) = t.load("stream", t.minimum(place, last) * 4)
        return [high, coming, word, place + 1]

    crosses = ((behind ^ bit) & 32) != 0
    low, high, coming, place = t.when(crosses, advance, [low, high, coming, place])
    return [low, high, behind, coming, place], entry


def _decode_row(t: Any, state: Words, last: Any, column: Any) -> Words:
    """Leaves the codes of a row, 64 symbols, in the thread's place of shared memory."""

    def eight(word: Any, state: Words) -> Words:
        codes = t.word(0)
        for _ in range(4):
            state, entry = _decode_pair(t, state, last)
            codes = t.permute(codes, entry, 0x7321)
        t.store("shared", (column + word * COLUMN + t.thread) * 4, [codes])
        return state

    return t.loop(SEGMENTS, state, eight)


def _huffman_program(
    t: Any, *, tiling: MatrixTiling, stream_length: int, length: int, result: str
) -> None:
    # Blocks of a matrix, whose last may have chunks of no tile: those follow the last one.
    blocks = -(-tiling.tiles // BLOCK_TILES)
    matrix, part = t.block // blocks, t.block % blocks
    first_tile = part * BLOCK_TILES
    tiles = t.word(tiling.tiles) - first_tile
    tiles = t.where(tiles < BLOCK_TILES, tiles, t.word(BLOCK_TILES))
    chunks = tiles * TILE_CHUNKS
    first_chunk = matrix * tiling.chunks + first_tile * TILE_CHUNKS

    for i in range(TABLE // (4 * THREADS)):
        place = (t.thread + i * THREADS) * 16
        t.store("shared", place, t.load("table", matrix * (4 * TABLE) + place, 4))
    palette = [] if result == "codes" else t.load("palette", matrix * 16, 4)

    own = first_chunk + t.where(t.thread < chunks, t.thread, chunks - 1)
    coded = t.load_half("coded", own * 2)
    (start,) = t.load("chunk_first", own * 4)
    base = matrix * stream_length
    last = base + (stream_length - 1)
    # Two bits before the first code are at most in the word before. Outside of the stream the last
    # word is read: it belongs to no code of this thread.
    places = [base + (start + 3) // 4 - 1 + i for i in range(4)]
    low, high, coming = (t.load("stream", t.minimum(place, last) * 4)[0] for place in places[:3])
    t.barrier()

    def step(row: Any, state: Words) -> Words:
        # Two halves of shared memory take turns, so that one wait for all threads is enough.
        column = row % 2 * CODES + TABLE
        segment = t.thread % SEGMENTS

        def chunk_of(i: Any) -> Any:
            """Threads beyond the last chunk write its rows once more."""
            chunk = t.thread // SEGMENTS + i * SWEEP_ROWS
            return t.where(chunk < chunks, chunk, chunks - 1)

        def flat_row(i: Any) -> Any:
            return (first_chunk + chunk_of(i)) * CHUNK_ROWS + row

        others = []
        if result == "words":
            # On their way while the row is decoded.
            places = [flat_row(i) * ROW + segment * SEGMENT for i in range(SEGMENTS)]
            others = [t.load("sign_mantissa", place, 2) for place in places]
        here = coded >> row & 1
        state = t.when(here != 0, lambda: _decode_row(t, state, last, column), state)
        if result == "codes":
            t.when(here == 0, lambda: _clear_row(t, column), [])
        t.barrier()

        for i in range(SEGMENTS):
            (codes,) = t.load("shared", (column + segment * COLUMN + chunk_of(i)) * 4)
            if result == "codes":
                t.store("out", flat_row(i) * (ROW // 2) + segment * 4, [codes])
                continue
            exponents = exponents_of_codes(t, codes, palette)
            if result == "exponents":
                t.store("out", flat_row(i) * ROW + segment * SEGMENT, exponents)
                continue
            words = rebuild(t, exponents, others[i])
            tile, inside = flat_row(i) // TILE_ROWS, flat_row(i) % TILE_ROWS
            store_words(t, tiling, tile, inside, segment, words)
        return state

    t.loop(CHUNK_ROWS, [low, high, start % 4 * 8 + 30, coming, places[3]], step)
    if result != "codes":
        write_verbatim(
            t,
            tiling,
            matrix,
            matrix * tiling.tiles + first_tile,
            tiles,
            length,
            words=result == "words",
        )


def _clear_row(t: Any, column: Any) -> Words:
    """Codes 0 for a row that is not in the stream."""
    for word in range(SEGMENTS):
        t.store("shared", (column + word * COLUMN + t.thread) * 4, [t.word(0)])
    return []


# -- operations


def unweight_huffman_mosaic(
    sign_mantissa: jax.Array,
    stream: jax.Array,
    chunk_first: jax.Array,
    coded: jax.Array,
    lengths: jax.Array,
    palette: jax.Array,
    verbatim_row: jax.Array,
    verbatim: jax.Array,
    verbatim_first: jax.Array,
    *,
    shape: tuple[int, int],
    interpret: Any = False,
) -> jax.Array:
    """Matrix of the form `huffman`."""
    arrays = {
        "sign_mantissa": sign_mantissa,
        "stream": stream,
        "chunk_first": chunk_first,
        "coded": coded,
        "palette": palette,
        "verbatim_row": verbatim_row,
        "verbatim": verbatim,
        "verbatim_first": verbatim_first,
    }
    output = jax.ShapeDtypeStruct((*coded.shape[:-1], *shape), jnp.bfloat16)
    return _launch_huffman("words", arrays, lengths, output, shape, interpret)


def unweight_exponents_mosaic(
    stream: jax.Array,
    chunk_first: jax.Array,
    coded: jax.Array,
    lengths: jax.Array,
    palette: jax.Array,
    verbatim_row: jax.Array,
    verbatim: jax.Array,
    verbatim_first: jax.Array,
    *,
    shape: tuple[int, int],
    interpret: Any = False,
) -> jax.Array:
    """Exponents of the form `exponent`, of the form `huffman`."""
    arrays = {
        "stream": stream,
        "chunk_first": chunk_first,
        "coded": coded,
        "palette": palette,
        "verbatim_row": verbatim_row,
        "verbatim": verbatim,
        "verbatim_first": verbatim_first,
    }
    rows = (*coded.shape[:-1], MatrixTiling(*shape).rows, ROW)
    output = jax.ShapeDtypeStruct(rows, jnp.uint8)
    return _launch_huffman("exponents", arrays, lengths, output, shape, interpret)


def unweight_transcode_mosaic(
    stream: jax.Array,
    chunk_first: jax.Array,
    coded: jax.Array,
    lengths: jax.Array,
    *,
    shape: tuple[int, int],
    interpret: Any = False,
) -> jax.Array:
    """Codes of the form `palette`, of the form `huffman`."""
    arrays = {"stream": stream, "chunk_first": chunk_first, "coded": coded}
    output = jax.ShapeDtypeStruct(
        (*coded.shape[:-1], MatrixTiling(*shape).rows, ROW // 2), jnp.uint8
    )
    return _launch_huffman("codes", arrays, lengths, output, shape, interpret)


def _launch_huffman(
    result: str,
    arrays: dict[str, jax.Array],
    lengths: jax.Array,
    output: jax.ShapeDtypeStruct,
    shape: tuple[int, int],
    interpret: Any,
) -> jax.Array:
    tiling = MatrixTiling(*shape)
    matrices = math.prod(arrays["coded"].shape[:-1])
    rows = arrays.get("verbatim_row")
    return launch(
        partial(
            _huffman_program,
            tiling=tiling,
            stream_length=max(1, arrays["stream"].shape[-1]),
            length=0 if rows is None else rows.shape[-1],
            result=result,
        ),
        {**arrays, "table": decode_table(lengths)},
        output,
        blocks=matrices * -(-tiling.tiles // BLOCK_TILES),
        shared_words=TABLE + 2 * CODES,
        name=f"unweight_huffman_{result}",
        interpret=interpret,
    )
