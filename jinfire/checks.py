"""Fields and arguments that a caller fills: checked, and turned into plain Python values.

Converters give the value to keep, or raise TypeError, ValueError or OverflowError.
"""

import math
import numbers
import operator
from collections.abc import Callable, Mapping
from typing import Any


def convert_field(owner: Any, name: str, expected: str, convert: Callable[[Any], object]) -> None:
    """Puts the converted value in the place of a field of a frozen dataclass.

    Raises: ValueError naming the field, what it allows and what came.
    """
    given = getattr(owner, name)
    try:
        object.__setattr__(owner, name, convert(given))
    except (TypeError, ValueError, OverflowError):
        field = f"{type(owner).__name__}.{name}"
        raise ValueError(f"{field}: expected {expected}, got {given!r:.80}") from None


def as_integer(value: Any) -> int:
    """The Python integer of a Python or NumPy one.

    Raises: TypeError for anything else, bools included.
    """
    if isinstance(value, bool):
        raise TypeError("expected an integer, got a bool")
    return operator.index(value)


def integer_in(least: int, most: float = math.inf) -> Callable[[Any], int]:
    """Converter of integers within bounds."""

    def convert(value: Any) -> int:
        number = as_integer(value)
        if not least <= number <= most:
            raise ValueError(f"expected an integer from {least} to {most}, got {number}")
        return number

    return convert


def number_where(allowed: Callable[[float], bool]) -> Callable[[Any], float]:
    """Converter of real numbers for which `allowed` holds; NaN passes none of its comparisons."""

    def convert(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise TypeError(f"expected a number, got {type(value).__name__}")
        number = float(value)
        if not allowed(number):
            raise ValueError(f"{number} is not allowed")
        return number

    return convert


def as_flag(value: Any) -> bool:
    """True or False, and nothing that merely counts as one."""
    if not isinstance(value, bool):
        raise TypeError(f"expected a bool, got {type(value).__name__}")
    return value


def as_items(value: Any) -> list[Any]:
    """The elements of a list, array or iterator.

    Raises: TypeError for what has none, or none that are a caller's list: text, bytes, mappings
    and sets.
    """
    if isinstance(value, str | bytes | bytearray | memoryview | Mapping | set | frozenset):
        raise TypeError(f"expected a list, got {type(value).__name__}")
    return list(value)
