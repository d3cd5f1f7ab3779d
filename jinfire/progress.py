"""Progress bars on stderr, so that stdout stays clean for output that machines read."""

import sys
from collections.abc import Collection, Iterator

from tqdm import tqdm


def bytes_bar(label: str, total_bytes: int) -> tqdm:
    """A bar over bytes, in decimal units as everywhere here (MB = 1e6)."""
    return tqdm(
        total=total_bytes,
        desc=label,
        unit="B",
        unit_scale=True,
        file=sys.stderr,
        disable=None,  # only where stderr is a terminal
        leave=False,
    )


def progress[T](items: Collection[T], desc: str) -> Iterator[T]:
    """The items, counted on a bar that disappears when done."""
    yield from tqdm(items, desc=desc, leave=False, file=sys.stderr, disable=None)


def items_bar(label: str, total: int, unit: str) -> tqdm:
    """A bar over countable things that its owner advances, e.g. requests."""
    return tqdm(total=total, desc=label, unit=unit, file=sys.stderr, disable=None, leave=False)
