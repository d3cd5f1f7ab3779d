"""What JAX itself has for the operations of `experiments/kernels.py`, to compare speeds with.

A baseline gets the kernel's record, its static arguments and its arrays, and returns a function
with arguments laid out as it wants them: that is no part of its time. It raises where it has no
form of the operation.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

with warnings.catch_warnings():
    # The Triton backend is deprecated; it is what there was before.
    warnings.simplefilter("ignore")
    try:
        from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention as triton_paged
    except ImportError:
        triton_paged = None

Arrays = dict[str, jax.Array]
Call = tuple[Callable[..., Any], Sequence[Any]]


def _triton(block_tokens: int, kernel: Any, static: Any, arrays: Arrays) -> Call:
    """At most so many tokens in a block, which must divide what a split of a row has."""
    paged_attention = triton_paged
    if paged_attention is None:
        raise NotImplementedError("this JAX has no Triton paged attention")
    if set(static) != {"scale"}:
        raise NotImplementedError("no window and no attention chunk")
    pools = [jnp.transpose(arrays[name], (2, 0, 1, 3)) for name in ("key_pages", "value_pages")]
    query = (arrays["query"] * static["scale"]).astype(arrays["query"].dtype)
    pages = arrays["page_table"].shape[1]
    splits = math.gcd(16, pages)
    block_pages = max(1, block_tokens // arrays["key_pages"].shape[1])
    options = {
        "k_splits": splits,
        "pages_per_compute_block": math.gcd(block_pages, pages // splits),
        "interpret": jax.default_backend() == "cpu",
    }
    return (
        lambda *args: paged_attention(*args, **options),
        (query, *pools, arrays["page_table"], arrays["lengths"]),
    )


def _contiguous(arrays: Arrays) -> list[jax.Array]:
    """Keys and values without pages: [B, S, K, H]."""
    table = arrays["page_table"]
    return [
        arrays[name][table].reshape(table.shape[0], -1, *arrays[name].shape[2:])
        for name in ("key_pages", "value_pages")
    ]


def _dense_attention(implementation: Any) -> Callable[[Any, Any, Arrays], Call]:
    def make(kernel: Any, static: Any, arrays: Arrays) -> Call:
        if set(static) != {"scale"}:
            raise NotImplementedError("no attention chunk")
        prefill = "starts" in arrays
        if prefill and np.asarray(arrays["starts"]).any():
            raise NotImplementedError("no causal mask behind a prefix")
        query = arrays["query"] if prefill else arrays["query"][:, None]
        key, value = _contiguous(arrays)
        arguments = [query, key, value]
        # Lengths cost time, and full rows need none.
        if (np.asarray(arrays["lengths"]) != key.shape[1]).any():
            arguments.append(arrays["lengths"])

        def call(query: jax.Array, key: jax.Array, value: jax.Array, *lengths: jax.Array):
            options = {}
            if lengths:
                options["key_value_seq_lengths"] = lengths[0]
                options["query_seq_lengths"] = lengths[0] if prefill else jnp.ones_like(lengths[0])
            return jax.nn.dot_product_attention(
                query,
                key,
                value,
                scale=static["scale"],
                is_causal=prefill,
                implementation=implementation,
                **options,
            )

        return call, arguments

    return make


def _dot(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.dot(x, y, preferred_element_type=jnp.float32).astype(x.dtype)


def _ragged(x: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
    return jax.lax.ragged_dot(x, weights, sizes, preferred_element_type=jnp.float32).astype(x.dtype)


def _ragged_dot(kernel: Any, static: Any, arrays: Arrays) -> Call:
    weights_EDF = jnp.swapaxes(arrays["weights"], 1, 2)
    return _ragged, (arrays["x"], weights_EDF, arrays["group_sizes"])


@partial(jax.jit, static_argnums=0)
def _unpacked(kernel: Any, weights: jax.Array, scales: jax.Array) -> jax.Array:
    """The weights [D, F] as the kernel's own product with the identity gives them.

    A grouped kernel gets those of one expert, with a leading axis of one.
    """
    width = 8 * weights.shape[-1]
    sizes = [jnp.full(1, width, jnp.int32)] if weights.ndim == 3 else []
    identity = jnp.eye(width, dtype=scales.dtype)
    return kernel(identity, weights, scales, *sizes, implementation="xla")


def _bfloat16_matmul(kernel: Any, static: Any, arrays: Arrays) -> Call:
    return _dot, (arrays["x"], _unpacked(kernel, arrays["weights"], arrays["scales"]))


def _bfloat16_ragged_dot(kernel: Any, static: Any, arrays: Arrays) -> Call:
    pairs = zip(arrays["weights"], arrays["scales"], strict=True)
    weights_EDF = jnp.stack([_unpacked(kernel, w[None], s[None]) for w, s in pairs])
    return _ragged, (arrays["x"], weights_EDF, arrays["group_sizes"])


def _decompressed(kernel: Any, coded: Sequence[jax.Array], width: int, *sizes: Any) -> jax.Array:
    """The weights [D, F] as the kernel's own product with the identity gives them."""
    call = jax.jit(partial(kernel, implementation="xla"))
    return call(jnp.eye(width, dtype=jnp.bfloat16), *coded, *sizes)


def _decompressed_matmul(kernel: Any, static: Any, arrays: Arrays) -> Call:
    x, *coded = arrays.values()
    return _dot, (x, _decompressed(kernel, coded, x.shape[1]))


def _decompressed_ragged_dot(kernel: Any, static: Any, arrays: Arrays) -> Call:
    x, *coded, sizes = arrays.values()
    width = jnp.full(1, x.shape[1], jnp.int32)
    each = [[array[e : e + 1] for array in coded] for e in range(len(sizes))]
    weights_EDF = jnp.stack([_decompressed(kernel, own, x.shape[1], width) for own in each])
    return _ragged, (x, weights_EDF, sizes)


BASELINES: dict[str, dict[str, Callable[[Any, Any, Arrays], Call]]] = {
    "paged_attention": {
        "JAX Triton paged_attention, 64 tokens": partial(_triton, 64),
        "JAX Triton paged_attention, 128 tokens": partial(_triton, 128),
        "dot_product_attention cudnn, no pages": _dense_attention("cudnn"),
        "dot_product_attention xla, no pages": _dense_attention("xla"),
    },
    "prefill_attention": {
        "dot_product_attention cudnn, no pages": _dense_attention("cudnn"),
        "dot_product_attention xla, no pages": _dense_attention("xla"),
    },
    "grouped_matmul": {"jax.lax.ragged_dot": _ragged_dot},
    "int4_matmul": {"bfloat16 matmul": _bfloat16_matmul},
    "grouped_int4_matmul": {"jax.lax.ragged_dot in bfloat16": _bfloat16_ragged_dot},
    **{
        f"unweight_{form}_matmul": {"bfloat16 matmul": _decompressed_matmul}
        for form in ("palette", "exponent", "compact")
    },
    **{
        f"grouped_unweight_{form}_matmul": {
            "jax.lax.ragged_dot in bfloat16": _decompressed_ragged_dot
        }
        for form in ("palette", "exponent", "compact")
    },
}
