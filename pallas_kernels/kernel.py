"""Kernel records: one operation, its NumPy reference, its implementations and its argument sets."""

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

TUNED = Path(__file__).parent / "tuned"

# The chips whose instructions the Mosaic kernels use: TMA and WGMMA, compute capability 9.0.
HOPPER = ("H100", "H200", "H800", "H20", "GH200")

Shapes = dict[str, jax.ShapeDtypeStruct]


@dataclasses.dataclass(frozen=True)
class ArgSpec:
    """Realistic argument set of a kernel, made on demand from a seed.

    `build(rng, dtype)` returns the array arguments as NumPy arrays by name, `static` holds the
    others. All that an implementation must not let into its result is NaN: the null page, pages
    that no row owns, and the slots behind a row's last token.

    A compile-only set has the size of a real model: its `build` may return
    `jax.ShapeDtypeStruct`s, it is compiled and never run.
    """

    name: str
    build: Callable[[np.random.Generator, np.dtype], Mapping[str, Any]]
    static: Mapping[str, Any]
    compile_only: bool = False

    def make(self, seed: int, dtype: Any = np.float32) -> dict[str, np.ndarray]:
        """The arrays. Raises: ValueError for a compile-only set."""
        if self.compile_only:
            raise ValueError(f"{self.name}: expected a set that runs, this one only compiles")
        return dict(self.build(np.random.default_rng(seed), np.dtype(dtype)))

    def shapes(self, dtype: Any = np.float32) -> Shapes:
        """Shape and dtype of every array."""
        arrays = self.build(np.random.default_rng(0), np.dtype(dtype))
        return {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in arrays.items()}


# Compared by identity: a record holds dicts, and jit must be able to hash it.
@dataclasses.dataclass(frozen=True, eq=False)
class Kernel:
    """Operation with a float64 NumPy reference and interchangeable implementations.

    `tolerance` maps every dtype that the kernel is for to the largest `error`.
    `flops` and `bytes` take the arguments and count the least work that the operation needs.
    `unsupported` takes the arguments, or their shapes, and says why the Mosaic form does not take
    them; None where it does. `blocks` is the dataclass of the Mosaic form's block sizes, whose
    defaults hold where nothing was tuned, and `space` the values that a search may try. An `exact`
    kernel moves bits: its results have one dtype, whatever arrays are made for.
    """

    name: str
    reference: Callable[..., np.ndarray]
    implementations: Mapping[str, Callable[..., jax.Array]]
    arg_specs: tuple[ArgSpec, ...]
    tolerance: Mapping[str, float]
    flops: Callable[..., int]
    bytes: Callable[..., int]
    unsupported: Callable[..., str | None] | None = None
    blocks: Callable[..., Any] | None = None
    space: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    exact: bool = False

    def error(self, got: np.ndarray, want: np.ndarray) -> float:
        """Largest error relative to the largest reference value; of an exact kernel, the share of
        values whose bits differ.

        Infinite where zero is right, as for a row without a token, and something small came.
        """
        if self.exact:
            if got.dtype != want.dtype or got.shape != want.shape:
                return math.inf
            bits = np.dtype(f"uint{8 * want.dtype.itemsize}")
            return float(np.mean(got.view(bits) != want.view(bits)))
        got, want = got.astype(np.float64), np.asarray(want)
        if got[want == 0].any():
            return math.inf
        largest = max(np.abs(want).max(initial=0), np.finfo(np.float32).tiny)
        return float(np.abs(got - want).max(initial=0) / largest)

    def __call__(
        self,
        *args: Any,
        implementation: str | None = None,
        blocks: Any = None,
        interpret: bool = False,
        **static: Any,
    ) -> jax.Array:
        """Result of the named implementation, else of the best one for the device in use.

        The choice falls where the program is lowered, so a program compiled for an absent GPU
        holds the GPU's kernel. Other keyword arguments are static. `blocks` overrides the tuned
        block sizes. `interpret` runs the Mosaic form on the CPU, for tests.

        Raises: ValueError for an implementation that the kernel does not have, or that does not
        take these arguments.
        """
        if implementation is None:
            return self._dispatch(args, static)
        if implementation not in self.implementations:
            raise ValueError(
                f"expected an implementation of {self.name} among "
                f"{sorted(self.implementations)}, received {implementation!r}"
            )
        if implementation != "mosaic":
            return self.implementations[implementation](*args, **static)
        if reason := self.refusal(*args, **static):
            raise ValueError(f"{self.name}: the Mosaic form does not take this: {reason}")
        return self._mosaic(blocks or self.tuned_blocks(args, device_kind()), interpret, static)(
            *args
        )

    def refusal(self, *args: Any, **static: Any) -> str | None:
        """Why the Mosaic form does not take these arguments or shapes; None where it does."""
        if "mosaic" not in self.implementations:
            return "there is none"
        return self.unsupported(*args, **static) if self.unsupported else None

    def tuned_blocks(self, args: Iterable[Any], kind: str | None) -> Any:
        """Block sizes for a device: of the tuned entry next to these shapes, else the defaults."""
        if self.blocks is None:
            return None
        entries = tuned_entries(kind).get(self.name, ()) if kind else ()
        shapes = [(tuple(x.shape), np.dtype(x.dtype).name) for x in args]
        near = [(d, i) for i, e in enumerate(entries) if (d := _distance(shapes, e)) < math.inf]
        return self.blocks(**entries[min(near)[1]]["blocks"]) if near else self.blocks()

    def _dispatch(self, args: tuple[Any, ...], static: Mapping[str, Any]) -> jax.Array:
        default = functools.partial(self.implementations["xla"], **static)
        kind = device_kind()
        other = kind is not None and not is_hopper(kind)
        if other or self.refusal(*args, **static) is not None:
            return default(*args)
        mosaic = self._mosaic(self.tuned_blocks(args, kind), False, static)
        return jax.lax.platform_dependent(*args, default=default, cuda=mosaic)

    def _mosaic(
        self, blocks: Any, interpret: bool, static: Mapping[str, Any]
    ) -> Callable[..., jax.Array]:
        options = dict(static)
        if blocks is not None:
            options["blocks"] = blocks
        if interpret:
            options["interpret"] = plgpu.InterpretGPUParams()
        return functools.partial(self.implementations["mosaic"], **options)


def device_kind() -> str | None:
    """The kind of device that a trace is for: of the mesh in use, else of the GPU at hand.

    None where neither says it; then the platform decides at lowering.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is not None:
        return device.device_kind
    if jax.default_backend() == "gpu":
        return jax.devices()[0].device_kind
    return None


def is_hopper(kind: str) -> bool:
    return kind.startswith("NVIDIA") and any(chip in kind for chip in HOPPER)


def device_slug(kind: str) -> str:
    """A device kind as a file name: "NVIDIA H200" is nvidia_h200."""
    return "_".join("".join(c if c.isalnum() else " " for c in kind.lower()).split())


@functools.cache
def tuned_entries(kind: str, folder: Path = TUNED) -> dict[str, list[dict[str, Any]]]:
    """Tuned block sizes of a device, by kernel; none where nobody tuned for it."""
    path = folder / f"{device_slug(kind)}.json"
    return json.loads(path.read_text(encoding="utf-8"))["kernels"] if path.exists() else {}


def _distance(shapes: list[tuple[tuple[int, ...], str]], entry: Mapping[str, Any]) -> float:
    """How far arguments are from those that an entry was tuned on; infinite where it cannot apply.

    Floating arrays must agree but for their leading axis (rows, pages, experts); what remains
    counts by its ratio.
    """
    total = 0.0
    theirs = entry["shapes"]
    if len(theirs) != len(shapes):
        return math.inf
    for (shape, dtype), (shape2, dtype2) in zip(shapes, theirs, strict=True):
        floating = dtype.startswith(("float", "bfloat"))
        if dtype != dtype2 or len(shape) != len(shape2):
            return math.inf
        if floating and tuple(shape[1:]) != tuple(shape2[1:]):
            return math.inf
        total += sum(
            abs(math.log2(max(a, 1) / max(b, 1))) for a, b in zip(shape, shape2, strict=True)
        )
    return total


def first_seen_reference(
    position: Any, window: int | None = None, attention_chunk: int | None = None
) -> Any:
    """First position that a token at `position` sees, of an integer or a NumPy array of them."""
    first = np.zeros_like(position)
    if window is not None:
        first = np.maximum(first, position - (window - 1))
    if attention_chunk is not None:
        first = np.maximum(first, position // attention_chunk * attention_chunk)
    return first


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
