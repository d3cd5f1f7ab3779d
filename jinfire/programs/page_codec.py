"""Pages of a request as coded messages, on the devices that hold them.

A message is of one KV head of one layer: heads stay an axis, along which a transfer splits and
joins messages as it does pages. All layers of a group are coded at once: one set of kernels.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jinfire.kvcache.pages import Pages
from pallas_kernels import decode_kv, encode_kv, merge_kv
from sharding import EXPERT, PIPELINE, TENSOR, Cuts

MESSAGE_SPEC = PartitionSpec(PIPELINE, None, (EXPERT, TENSOR))
MESSAGE_HEADS_DIM = 2
OVERFULL_SPEC = PartitionSpec(PIPELINE, (EXPERT, TENSOR))


def encode_pages(
    slots: Sequence[Pages], cuts: Cuts, pages: jax.Array
) -> tuple[list[Pages], list[Pages], jax.Array]:
    """Messages and all exponents of one device's pages, per cut, and whether one is overfull.

    Shapes: arrays of the slots [1, P, Z, K, H], messages and exponents [1, slots, K, bytes], the
    flag a scalar. Pages behind those that carry tokens are the null page.
    """
    words = [[_words(leaf[0][pages]) for leaf in jax.tree.leaves(slot)] for slot in slots]
    tokens = jnp.sum(pages != 0, dtype=jnp.int32) * jax.tree.leaves(slots[0])[0].shape[2]
    coded = encode_kv(jnp.stack([jnp.stack(own) for own in words]), tokens)
    treedef = jax.tree.structure(slots[0])

    def cut(array: jax.Array) -> list[Pages]:
        arrays = range(array.shape[1])
        return [treedef.unflatten([array[slice(*ends), i][None] for i in arrays]) for ends in cuts]

    return cut(coded.message), cut(coded.exponents), jnp.any(coded.overfull)


def decode_pages(
    messages: Sequence[Pages], exponents: Sequence[Pages] | None, like: Pages, num_pages: int
) -> list[Pages]:
    """Pages [pages, Z, K, H] of every slot, from messages per cut.

    `like` are local pools [P, Z, K, H] of a slot. `exponents` are given where a message is
    overfull.
    """
    leaves, treedef = jax.tree.flatten(like)
    _, page_size, _, width = leaves[0].shape
    sizes = (num_pages * page_size, width, leaves[0].dtype.itemsize)
    if exponents is None:
        words = decode_kv(_joined(messages), *sizes)
    else:
        words = merge_kv(_joined(messages), _joined(exponents), *sizes)
    arrays = range(len(leaves))
    return [
        treedef.unflatten([_pages(own[i], page_size, leaves[i].dtype) for i in arrays])
        for own in words
    ]


def _joined(cuts: Sequence[Pages]) -> jax.Array:
    """Inverse of `cut`: [slots, arrays, K, bytes]."""
    slots = [jnp.stack(jax.tree.leaves(block), axis=2)[0] for block in cuts]
    return jnp.concatenate(slots)


def _words(pages: jax.Array) -> jax.Array:
    """[pages, Z, K, H] as words [K, T, H]: bits, which no device rounds."""
    words = jax.lax.bitcast_convert_type(pages, jnp.dtype(f"uint{8 * pages.dtype.itemsize}"))
    words = jnp.moveaxis(words, 2, 0)
    return words.reshape(words.shape[0], -1, words.shape[-1])


def _pages(words: jax.Array, page_size: int, dtype: np.dtype) -> jax.Array:
    """Inverse of `_words`."""
    heads, _, width = words.shape
    words = jnp.moveaxis(words.reshape(heads, -1, page_size, width), 0, 2)
    return jax.lax.bitcast_convert_type(words, dtype)
