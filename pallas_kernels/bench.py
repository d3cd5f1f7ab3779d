"""Kernels at the size of real models: data made on the device, and the time of a call.

A workload is to measurement what an `ArgSpec` is to tests: arrays too large for the host, without
NaN, with all rows alike, so that the least bytes and operations are plain to count.
"""

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.unweight_bench import ARRAYS_OF, grouped_arrays, product_arrays

# Calls take turns on this much data at least, so that no cache holds the next call's.
ROTATED_BYTES = 256 * 2**20
MAX_BUFFERS = 8

# A timed repeat lasts this long at least: what it costs to start a program shows less.
REPEAT_S = 2e-3

# Calls before the first that is timed: a GPU that was idle raises its clocks in the meantime.
WARM_S = 0.02

Arrays = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Workload:
    """One kernel at one size. `make(key)` gives its arrays by name, in order."""

    kernel: str
    name: str
    make: Callable[[jax.Array], Arrays]
    static: Mapping[str, Any]

    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes of the arrays, which are not made."""
        names: list[str] = []

        def values() -> list[jax.Array]:
            arrays = self.make(_key(0))
            # Traced functions return dicts in the order of the keys' names.
            names[:] = arrays
            return list(arrays.values())

        return dict(zip(names, jax.eval_shape(values), strict=True))

    def buffers(self, limit: int = MAX_BUFFERS) -> list[Arrays]:
        """Argument sets to rotate: at least two where `limit` allows it."""
        first = self.make(_key(0))
        size = sum(x.nbytes for x in first.values())
        count = min(limit, MAX_BUFFERS, max(2, math.ceil(ROTATED_BYTES / size)))
        return [first, *(self.make(_key(i)) for i in range(1, count))]


def _key(seed: int) -> jax.Array:
    """A key of the generator that compiles in no time, which counts at dozens of shapes."""
    return jax.random.key(seed, impl="rbg")


def counted(arrays: Arrays) -> dict[str, Any]:
    """Arguments for `Kernel.flops` and `Kernel.bytes`: small integers (lengths) as NumPy arrays."""
    return {
        name: np.asarray(x) if jnp.issubdtype(x.dtype, jnp.integer) and x.size < 2**20 else x
        for name, x in arrays.items()
    }


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds of one call, once for every repeat, and what the first call returned.

    `dispatch_s` is what the host takes to start a call. Where it is near the whole, the device
    waits for the host, and the time says little about it.
    """

    seconds: list[float]
    dispatch_s: float
    result: Any


def seconds_per_call(
    function: Callable[..., Any],
    buffers: Sequence[Sequence[Any]],
    repeats: int = 20,
    warm_s: float = WARM_S,
) -> Timing:
    """How long one call takes, and what it returns: one program serves both.

    The program calls the function on all buffers in turn, so that one start of a program serves
    many calls. The function is traced and lowered once for all of them.
    """
    once = jax.jit(function)
    program = jax.jit(lambda buffers: [once(*arguments) for arguments in buffers])
    result = jax.block_until_ready(program(buffers))[0]

    def run(times: int) -> tuple[float, float]:
        """Seconds until the device is done, and until the host has started everything."""
        results = None
        start = time.perf_counter()
        for _ in range(times):
            results = program(buffers)
        started = time.perf_counter() - start
        jax.block_until_ready(results)
        return time.perf_counter() - start, started

    start = time.perf_counter()
    fastest = run(1)[0]
    while time.perf_counter() - start < warm_s:
        fastest = min(fastest, run(1)[0])
    times = max(1, min(64, math.ceil(REPEAT_S / fastest)))
    calls = times * len(buffers)
    runs = [run(times) for _ in range(repeats)]
    return Timing(
        seconds=[whole / calls for whole, _ in runs],
        dispatch_s=statistics.median(started for _, started in runs) / calls,
        result=result,
    )


def _normal(key: jax.Array, *shape: int) -> jax.Array:
    return jax.random.normal(key, shape, jnp.bfloat16)


def _paged(
    key: jax.Array, rows: int, tokens: int, page_size: int, heads: tuple[int, int], pools: int
) -> tuple[list[jax.Array], jax.Array]:
    """Pools [P, Z, K, H] and a page table for rows of so many tokens, pages in random order."""
    width = -(-tokens // page_size)
    keys = jax.random.split(key, pools + 1)
    order = jax.random.permutation(keys[-1], rows * width).astype(jnp.int32) + 1
    shape = (rows * width + 1, page_size, *heads)
    return [_normal(k, *shape) for k in keys[:-1]], order.reshape(rows, width)


def _decode(
    key: jax.Array, rows: int, tokens: int, heads: int, kv_heads: int, head_dim: int, page_size: int
) -> Arrays:
    keys = jax.random.split(key)
    pools, table = _paged(keys[0], rows, tokens, page_size, (kv_heads, head_dim), 2)
    return {
        "query": _normal(keys[1], rows, heads, head_dim),
        "key_pages": pools[0],
        "value_pages": pools[1],
        "page_table": table,
        "lengths": jnp.full(rows, tokens, jnp.int32),
    }


def _prefill(
    key: jax.Array,
    rows: int,
    prefix: int,
    chunk: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    page_size: int,
) -> Arrays:
    keys = jax.random.split(key)
    pools, table = _paged(keys[0], rows, prefix + chunk, page_size, (kv_heads, head_dim), 2)
    return {
        "query": _normal(keys[1], rows, chunk, heads, head_dim),
        "key_pages": pools[0],
        "value_pages": pools[1],
        "page_table": table,
        "starts": jnp.full(rows, prefix, jnp.int32),
        "lengths": jnp.full(rows, chunk, jnp.int32),
    }


def _latent(key: jax.Array, rows: int, tokens: int, heads: int, page_size: int) -> Arrays:
    keys = jax.random.split(key)
    (pages,), table = _paged(keys[0], rows, tokens, page_size, (1, 576), 1)
    return {
        "query": _normal(keys[1], rows, heads, 576),
        "latent_pages": pages,
        "page_table": table,
        "lengths": jnp.full(rows, tokens, jnp.int32),
    }


def _group_sizes(key: jax.Array, rows: int, experts: int) -> jax.Array:
    chosen = jax.random.randint(key, (rows,), 0, experts)
    return jnp.zeros(experts, jnp.int32).at[chosen].add(1)


def _grouped(key: jax.Array, rows: int, experts: int, features: int, width: int) -> Arrays:
    keys = jax.random.split(key, 3)
    return {
        "x": _normal(keys[0], rows, width),
        "weights": _normal(keys[1], experts, features, width),
        "group_sizes": _group_sizes(keys[2], rows, experts),
    }


def _int4(key: jax.Array, *shape: int) -> Arrays:
    """4-bit weights [..., F, D] and their scales, in the kernels' own form."""
    keys = jax.random.split(key)
    *experts, features, width = shape
    words = jax.random.bits(keys[0], (*experts, features, width // 8), jnp.uint32)
    return {
        "weights": jax.lax.bitcast_convert_type(words, jnp.int32),
        "scales": jax.random.uniform(
            keys[1], (*experts, width // 32, features), jnp.bfloat16, 0.001, 0.002
        ),
    }


def _int4_matmul(key: jax.Array, rows: int, features: int, width: int) -> Arrays:
    keys = jax.random.split(key)
    return {"x": _normal(keys[0], rows, width), **_int4(keys[1], features, width)}


def _grouped_int4(key: jax.Array, rows: int, experts: int, features: int, width: int) -> Arrays:
    keys = jax.random.split(key, 3)
    return {
        "x": _normal(keys[0], rows, width),
        **_int4(keys[1], experts, features, width),
        "group_sizes": _group_sizes(keys[2], rows, experts),
    }


def _workload(
    kernel: str, name: str, make: Callable[..., Arrays], *sizes: int, **static: Any
) -> Workload:
    return Workload(kernel, name, partial(_sized, make, sizes), static)


def _sized(make: Callable[..., Arrays], sizes: tuple[int, ...], key: jax.Array) -> Arrays:
    return make(key, *sizes)


def _attention(head_dim: int, **static: int) -> dict[str, Any]:
    return {"scale": 1 / math.sqrt(head_dim), **static}


def _unweight(model: str, F: int, D: int) -> tuple[Workload, ...]:
    """Decompression of a matrix [F, D], from every form."""
    return tuple(
        _workload(kernel, model, make, F, D, shape=(F, D)) for kernel, make in ARRAYS_OF.items()
    )


def _rows_first(form: str, key: jax.Array, rows: int, F: int, D: int) -> Arrays:
    keys = jax.random.split(key)
    return {"x": _normal(keys[0], rows, D), **product_arrays(form, keys[1], F, D)}


def _grouped_rows(form: str, key: jax.Array, rows: int, experts: int, F: int, D: int) -> Arrays:
    keys = jax.random.split(key, 3)
    return {
        "x": _normal(keys[0], rows, D),
        **grouped_arrays(form, keys[1], experts, F, D),
        "group_sizes": _group_sizes(keys[2], rows, experts),
    }


def _unweight_products(name: str, *sizes: int) -> tuple[Workload, ...]:
    """Rows, features, width, with every form of the matrix; experts behind the rows."""
    prefix, make = ("", _rows_first) if len(sizes) == 3 else ("grouped_", _grouped_rows)
    return tuple(
        _workload(f"{prefix}unweight_{form}_matmul", name, partial(make, form), *sizes)
        for form in ("palette", "exponent", "compact")
    )


_MLA = {"scale": 1 / math.sqrt(128 + 64), "rank": 512}

WORKLOADS = (
    # Rows, tokens, query and kv heads, head dim, page size.
    _workload(
        "paged_attention",
        "Llama 3.1 8B, 64 rows of 8k",
        _decode,
        *(64, 8192, 32, 8, 128, 64),
        **_attention(128),
    ),
    _workload(
        "paged_attention",
        "Llama 3.1 8B, 1 row of 128k",
        _decode,
        *(1, 131072, 32, 8, 128, 64),
        **_attention(128),
    ),
    _workload(
        "paged_attention",
        "Llama 3.1 8B on 8 devices, 256 rows of 8k",
        _decode,
        *(256, 8192, 4, 1, 128, 64),
        **_attention(128),
    ),
    _workload(
        "paged_attention",
        "Llama 3.1 8B, 16 rows of 1k",
        _decode,
        *(16, 1024, 32, 8, 128, 16),
        **_attention(128),
    ),
    _workload(
        "paged_attention",
        "SmolLM2 135M, 256 rows of 2k",
        _decode,
        *(256, 2048, 9, 3, 64, 16),
        **_attention(64),
    ),
    _workload(
        "paged_attention",
        "Llama 4 Scout, chunked, 32 rows of 15k",
        _decode,
        *(32, 15360, 40, 8, 128, 64),
        **_attention(128, attention_chunk=8192),
    ),
    # Rows, tokens of prefix and chunk, query and kv heads, head dim, page size.
    _workload(
        "prefill_attention",
        "Llama 3.1 8B, 8k",
        _prefill,
        *(1, 0, 8192, 32, 8, 128, 64),
        **_attention(128),
    ),
    _workload(
        "prefill_attention",
        "Llama 3.1 8B, 2k after 30k",
        _prefill,
        *(1, 30720, 2048, 32, 8, 128, 64),
        **_attention(128),
    ),
    _workload(
        "prefill_attention",
        "Llama 4 Scout, chunked, 8k after 4k",
        _prefill,
        *(1, 4096, 8192, 40, 8, 128, 64),
        **_attention(128, attention_chunk=8192),
    ),
    # Rows, tokens, heads, page size.
    _workload("latent_attention", "Kimi K2, 128 rows of 8k", _latent, *(128, 8192, 64, 64), **_MLA),
    _workload(
        "latent_attention",
        "Kimi K2 on 8 devices, 128 rows of 8k",
        _latent,
        *(128, 8192, 8, 64),
        **_MLA,
    ),
    _workload("latent_attention", "Kimi K2, 1 row of 128k", _latent, *(1, 131072, 64, 64), **_MLA),
    # Rows, experts, features, width.
    _workload("grouped_matmul", "Llama 4 Scout, 64 rows", _grouped, 64, 16, 8192, 5120),
    _workload("grouped_matmul", "Llama 4 Scout, 8k rows", _grouped, 8192, 16, 8192, 5120),
    # Rows, features, width.
    _workload("int4_matmul", "Kimi K2 up, 1 row", _int4_matmul, 1, 18432, 7168),
    _workload("int4_matmul", "Kimi K2 up, 16 rows", _int4_matmul, 16, 18432, 7168),
    _workload("int4_matmul", "Kimi K2 up, 256 rows", _int4_matmul, 256, 18432, 7168),
    _workload(
        "grouped_int4_matmul", "Kimi K2, 48 experts, 64 rows", _grouped_int4, 64, 48, 2048, 7168
    ),
    _workload(
        "grouped_int4_matmul", "Kimi K2, 48 experts, 4k rows", _grouped_int4, 4096, 48, 2048, 7168
    ),
    # Features, width.
    *_unweight("Llama 3.1 8B gate", 14336, 4096),
    *_unweight("Llama 3.1 8B output", 4096, 4096),
    # Rows, features, width.
    *_unweight_products("Llama 3.1 8B gate, 1 row", 1, 14336, 4096),
    *_unweight_products("Llama 3.1 8B gate, 32 rows", 32, 14336, 4096),
    *_unweight_products("Llama 3.1 8B gate, 4k rows", 4096, 14336, 4096),
    # Rows, experts, features, width.
    *_unweight_products("Qwen3 30B-A3B up, 64 rows", 64, 128, 768, 2048),
    *_unweight_products("Qwen3 30B-A3B up, 8k rows", 8192, 128, 768, 2048),
)

# The same builders at sizes that a CPU and the interpreter take.
SMOKE_WORKLOADS = (
    _workload("paged_attention", "small", _decode, 2, 70, 8, 2, 64, 16, **_attention(64)),
    _workload("prefill_attention", "prefix", _prefill, 1, 16, 64, 4, 2, 64, 16, **_attention(64)),
    _workload("prefill_attention", "small", _prefill, 2, 0, 32, 4, 2, 64, 16, **_attention(64)),
    _workload("latent_attention", "small", _latent, 1, 70, 8, 16, **_MLA),
    _workload("grouped_matmul", "small", _grouped, 16, 4, 256, 128),
    _workload("int4_matmul", "small", _int4_matmul, 4, 256, 256),
    _workload("grouped_int4_matmul", "small", _grouped_int4, 16, 2, 256, 256),
    *_unweight("small", 128, 128),
    *_unweight_products("small", 4, 128, 128),
    *_unweight_products("small", 16, 2, 128, 128),
)
