"""Operations on the 64 weights of a row, as LLVM vectors for numba functions.

Arguments that end in `at` are places in the array before them, in elements. Nothing is checked: a
caller stays inside its arrays. Vectors are unaligned, and bytes are little-endian as the format's.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

ROW = 64
BYTE, HALF, LONG = ir.IntType(8), ir.IntType(16), ir.IntType(64)
LANES = ir.IntType(32)
CACHE_LINE = 64
_PREFETCH = ir.FunctionType(ir.VoidType(), [BYTE.as_pointer(), *[LANES] * 3])


def _vector(element: ir.Type, length: int = ROW) -> ir.VectorType:
    return ir.VectorType(element, length)


def _constant(kind: ir.VectorType, value: int) -> ir.Constant:
    return ir.Constant(kind, [value] * kind.count)


class _Rows:
    """Loads and stores of one lowering."""

    def __init__(self, context: Any, builder: Any, signature: Any) -> None:
        self.context, self.builder, self.signature = context, builder, signature

    def pointer(self, args: Any, argument: int, kind: ir.Type) -> Any:
        array = self.context.make_array(self.signature.args[argument])
        data = array(self.context, self.builder, args[argument]).data
        place = self.builder.gep(data, [args[argument + 1]])
        return self.builder.bitcast(place, kind.as_pointer())

    def load(self, args: Any, argument: int, kind: ir.Type) -> Any:
        return self.builder.load(self.pointer(args, argument, kind), align=1)

    def store(self, args: Any, argument: int, value: Any) -> None:
        self.builder.store(value, self.pointer(args, argument, value.type), align=1)

    def nibbles(self, packed: Any) -> Any:
        """The 64 nibbles of 32 bytes, low ones first, a byte each."""
        b, half = self.builder, packed.type
        low = b.and_(packed, _constant(half, 15))
        high = b.lshr(packed, _constant(half, 4))
        order = [lane for pair in zip(range(32), range(32, 64), strict=True) for lane in pair]
        return b.shuffle_vector(low, high, ir.Constant(_vector(LANES), order))

    def packed(self, nibbles: Any) -> Any:
        """The inverse of `nibbles`."""
        b, undefined = self.builder, ir.Constant(nibbles.type, ir.Undefined)
        low, high = (
            b.shuffle_vector(
                nibbles, undefined, ir.Constant(_vector(LANES, 32), list(range(first, 64, 2)))
            )
            for first in (0, 1)
        )
        return b.or_(low, b.shl(high, _constant(high.type, 4)))


def _spread(builder: Any, value: Any) -> Any:
    """A byte in all of 64 places."""
    one = builder.insert_element(ir.Constant(_vector(BYTE), ir.Undefined), value, LANES(0))
    return builder.shuffle_vector(one, one, _constant(_vector(LANES), 0))


def _dummy(context: Any) -> Any:
    return context.get_dummy_value()


def operation(typing: Callable[..., Any]) -> Callable[..., Any]:
    """What compiled functions call with the arguments behind `typing`."""
    return intrinsic(typing)


@operation
def load_u64(typing: Any, data: Any, data_at: Any) -> Any:
    """Eight bytes of a uint8 array as a number."""

    def lower(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _Rows(context, builder, signature).load(args, 0, LONG)

    return types.uint64(data, types.int64), lower


@operation
def store_u64(typing: Any, data: Any, data_at: Any, value: Any) -> Any:
    """Eight bytes of a uint8 array from a number."""

    def lower(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _Rows(context, builder, signature).store(args, 0, args[2])
        return _dummy(context)

    return types.void(data, types.int64, types.uint64), lower


@operation
def split_words(typing: Any, words: Any, at: Any, exps: Any, e_at: Any, sms: Any, s_at: Any) -> Any:
    """Exponents, and bytes of sign and mantissa, of the 64 bfloat16 words in 128 bytes."""

    def lower(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        rows, b = _Rows(context, builder, signature), builder
        word, narrow = rows.load(args, 0, _vector(HALF)), _vector(BYTE)
        rows.store(args, 2, b.trunc(b.lshr(word, _constant(word.type, 7)), narrow))
        sign = b.and_(b.lshr(word, _constant(word.type, 8)), _constant(word.type, 0x80))
        mantissa = b.and_(word, _constant(word.type, 0x7F))
        rows.store(args, 4, b.trunc(b.or_(sign, mantissa), narrow))
        return _dummy(context)

    at = types.int64
    return types.void(words, at, exps, at, sms, at), lower


@operation
def join_words(typing: Any, exps: Any, e_at: Any, sms: Any, s_at: Any, words: Any, at: Any) -> Any:
    """The inverse of `split_words`, to an array of uint16."""

    def lower(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        rows, b, wide = _Rows(context, builder, signature), builder, _vector(HALF)
        exponent = b.zext(rows.load(args, 0, _vector(BYTE)), wide)
        byte = b.zext(rows.load(args, 2, _vector(BYTE)), wide)
        sign = b.shl(b.and_(byte, _constant(wide, 0x80)), _constant(wide, 8))
        mantissa = b.and_(byte, _constant(wide, 0x7F))
        word = b.or_(b.or_(sign, mantissa), b.shl(exponent, _constant(wide, 7)))
        rows.store(args, 4, word)
        return _dummy(context)

    at = types.int64
    return types.void(exps, at, sms, at, words, at), lower


@operation
def split_nibbles(typing: Any, words: Any, at: Any, nibbles: Any, n_at: Any) -> Any:
    """The 64 4-bit values of 32 bytes, a byte each."""

    def lower(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        rows = _Rows(context, builder, signature)
        rows.store(args, 2, rows.nibbles(rows.load(args, 0, _vector(BYTE, 32))))
        return _dummy(context)

    return types.void(words, types.int64, nibbles, types.int64), lower


@operation
def join_nibbles(typing: Any, nibbles: Any, n_at: Any, words: Any, at: Any) -> Any:
    """The inverse of `split_nibbles`, to an array of uint16."""

    def lower(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        rows = _Rows(context, builder, signature)
        rows.store(args, 2, rows.packed(rows.load(args, 0, _vector(BYTE))))
        return _dummy(context)

    return types.void(nibbles, types.int64, words, types.int64), lower


@operation
def equal_bits(typing: Any, data: Any, data_at: Any, value: Any) -> Any:
    """Bit j says whether byte j of 64 is the value."""

    def lower(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        byte, b = _Rows(context, builder, signature).load(args, 0, _vector(BYTE)), builder
        return b.bitcast(b.icmp_unsigned("==", byte, _spread(b, args[2])), LONG)

    return types.uint64(data, types.int64, types.uint8), lower


@operation
def outside_bits(typing: Any, words: Any, at: Any, low: Any, span: Any) -> Any:
    """Bit j says that the exponent of word j in 128 bytes is not in `low` to `low + span`."""

    def lower(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word, b = _Rows(context, builder, signature).load(args, 0, _vector(HALF)), builder
        exponent = b.trunc(b.lshr(word, _constant(word.type, 7)), _vector(BYTE))
        above = b.sub(exponent, _spread(b, args[2]))
        return b.bitcast(b.icmp_unsigned(">", above, _spread(b, args[3])), LONG)

    return types.uint64(words, types.int64, types.uint8, types.uint8), lower


@operation
def prefetch(typing: Any, words: Any, at: Any) -> Any:
    """Asks for 128 bytes, which need not be in the array, to be in the cache."""

    def lower(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        fetch = builder.module.declare_intrinsic("llvm.prefetch", [BYTE.as_pointer()], _PREFETCH)
        pointer = _Rows(context, builder, signature).pointer(args, 0, BYTE)
        for offset in (0, CACHE_LINE):
            line = builder.gep(pointer, [LONG(offset)])
            builder.call(fetch, [line, LANES(0), LANES(3), LANES(1)])
        return _dummy(context)

    return types.void(words, types.int64), lower


@operation
def select_bits(
    typing: Any, bit0: Any, bit1: Any, bit2: Any, values: Any, values_at: Any, out: Any, at: Any
) -> Any:
    """64 bytes, byte j being the one of eight `values` whose number has bits j of the three."""

    def lower(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        rows, b = _Rows(context, builder, signature), builder
        masks = [b.bitcast(bits, _vector(ir.IntType(1))) for bits in args[:3]]
        table = rows.load(args, 3, _vector(BYTE, 8))
        level = [
            b.shuffle_vector(table, table, _constant(_vector(LANES), value)) for value in range(8)
        ]
        for mask in masks:
            level = [
                b.select(mask, odd, even)
                for even, odd in zip(level[0::2], level[1::2], strict=True)
            ]
        rows.store(args, 5, level[0])
        return _dummy(context)

    at, bits = types.int64, types.uint64
    return types.void(bits, bits, bits, values, at, out, at), lower


@operation
def lowest_bit(typing: Any, bits: Any) -> Any:
    """Place of the lowest bit that is set, 64 where none is."""

    def lower(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 0))

    return types.int64(types.uint64), lower
