"""Kernel records: one operation, its NumPy reference, its implementations and its argument sets."""

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import numpy as np

# The platform whose programs prefer each implementation; "xla" runs on every other one.
PLATFORMS = {"mosaic": "cuda"}


@dataclasses.dataclass(frozen=True)
class ArgSpec:
    """Realistic argument set of a kernel, made on demand from a seed.

    `build(rng, dtype)` returns the array arguments as NumPy arrays by name, `static` holds the
    others. All that an implementation must not let into its result is NaN: the null page, pages
    that no row owns, and the slots behind a row's last token.
    """

    name: str
    build: Callable[[np.random.Generator, np.dtype], dict[str, np.ndarray]]
    static: Mapping[str, Any]

    def make(self, seed: int, dtype: Any = np.float32) -> dict[str, np.ndarray]:
        return self.build(np.random.default_rng(seed), np.dtype(dtype))


# Compared by identity: a record holds dicts, and jit must be able to hash it.
@dataclasses.dataclass(frozen=True, eq=False)
class Kernel:
    """Operation with a float64 NumPy reference and interchangeable implementations.

    `tolerance` maps a dtype name to the largest error relative to the largest reference value.
    `flops` and `bytes` take the arguments and count the least work that the operation needs.
    """

    name: str
    reference: Callable[..., np.ndarray]
    implementations: Mapping[str, Callable[..., jax.Array]]
    arg_specs: tuple[ArgSpec, ...]
    tolerance: Mapping[str, float]
    flops: Callable[..., int]
    bytes: Callable[..., int]

    def __call__(self, *args: Any, implementation: str | None = None, **static: Any) -> jax.Array:
        """Result of the named implementation, else of the best one for the device in use.

        The choice falls where the program is lowered, so a program compiled for an absent GPU
        holds the GPU's kernel. Keyword arguments are static.

        Raises: ValueError for an implementation that the kernel does not have.
        """
        if implementation is None:
            preferred = {
                PLATFORMS[name]: partial(function, **static)
                for name, function in self.implementations.items()
                if name in PLATFORMS
            }
            default = partial(self.implementations["xla"], **static)
            if not preferred:
                return default(*args)
            return jax.lax.platform_dependent(*args, default=default, **preferred)
        if implementation not in self.implementations:
            raise ValueError(
                f"expected an implementation of {self.name} among "
                f"{sorted(self.implementations)}, received {implementation!r}"
            )
        return self.implementations[implementation](*args, **static)


def attention_reference(
    query_NH: np.ndarray, keys_SKH: np.ndarray, values_SKH: np.ndarray, scale: float
) -> np.ndarray:
    """Attention of one query token over all the given keys, in float64: [N, H]."""
    group = query_NH.shape[0] // keys_SKH.shape[1]
    keys_SNH = np.repeat(keys_SKH.astype(np.float64), group, axis=1)
    values_SNH = np.repeat(values_SKH.astype(np.float64), group, axis=1)
    scores_NS = np.einsum("NH,SNH->NS", query_NH.astype(np.float64), keys_SNH) * scale
    weights_NS = np.exp(scores_NS - scores_NS.max(axis=1, keepdims=True))
    weights_NS /= weights_NS.sum(axis=1, keepdims=True)
    return np.einsum("NS,SNH->NH", weights_NS, values_SNH)


def build_paged(
    rng: np.random.Generator,
    dtype: np.dtype,
    tokens_B: np.ndarray,
    kv_heads: int,
    head_dim: int,
    page_size: int,
    width: int,
) -> dict[str, np.ndarray]:
    """Pools and a page table for rows that hold so many tokens, on pages in random order.

    Shapes: key_pages and value_pages [P, Z, K, H], page_table_BW int32.
    """
    counts_B = -(-np.asarray(tokens_B) // page_size)
    if counts_B.max(initial=0) > width:
        raise ValueError(
            f"expected rows of at most {width * page_size} tokens, received {max(tokens_B)}"
        )
    # Some pages belong to nobody; page 0 is the null page.
    pages = int(counts_B.sum()) + 4
    order = iter(rng.permutation(np.arange(1, pages)))
    table_BW = np.zeros((len(tokens_B), width), np.int32)
    shape = (pages, page_size, kv_heads, head_dim)
    key_pages = np.full(shape, np.nan, np.float32)
    value_pages = np.full(shape, np.nan, np.float32)
    for row, tokens in enumerate(tokens_B):
        for column in range(int(counts_B[row])):
            page = int(next(order))
            table_BW[row, column] = page
            filled = min(page_size, int(tokens) - column * page_size)
            key_pages[page, :filled] = rng.normal(size=(filled, kv_heads, head_dim))
            value_pages[page, :filled] = rng.normal(size=(filled, kv_heads, head_dim))
    return {
        "key_pages": key_pages.astype(dtype),
        "value_pages": value_pages.astype(dtype),
        "page_table": table_BW,
    }


def row_tokens(pages_PZKH: np.ndarray, table_W: np.ndarray, tokens: int) -> np.ndarray:
    """The first tokens of a row, in order: [S, K, H]."""
    return pages_PZKH[table_W].reshape(-1, *pages_PZKH.shape[2:])[:tokens]
