"""Programs of `pallas_kernels/threads.py` carried out with JAX, inside a kernel that Pallas
interprets: there a call back to Python may wait for a thread that waits for it."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.threads import THREADS, WARP, Words


class JaxThreads:
    """Machine that carries out a program for all threads of a block with JAX.

    Memory is a dict of arrays of words, which a store replaces. A load from outside an array gives
    a pattern that shows.
    """

    def __init__(self, memory: Mapping[str, jax.Array], block: jax.Array) -> None:
        self.memory = dict(memory)
        self.thread = jnp.arange(THREADS, dtype=jnp.uint32)
        self.block = jnp.broadcast_to(block.astype(jnp.uint32), (THREADS,))
        self._active = jnp.ones(THREADS, bool)

    def word(self, number: int) -> jax.Array:
        return jnp.full(THREADS, number, jnp.uint32)

    def _at(self, name: str, place: jax.Array) -> jax.Array:
        return self.memory[name].at[place].get(mode="fill", fill_value=0xDEADBEEF)

    def load(self, name: str, offset: jax.Array, count: int = 1) -> Words:
        return [self._at(name, offset // 4 + i) for i in range(count)]

    def load_byte(self, name: str, offset: jax.Array) -> jax.Array:
        return self._at(name, offset // 4) >> offset % 4 * 8 & 0xFF

    def load_half(self, name: str, offset: jax.Array) -> jax.Array:
        return self._at(name, offset // 4) >> offset % 4 * 8 & 0xFFFF

    def store(self, name: str, offset: jax.Array, words: Words) -> None:
        size = self.memory[name].size
        for i, word in enumerate(words):
            place = jnp.where(self._active, offset // 4 + i, size)
            self.memory[name] = self.memory[name].at[place].set(word, mode="drop")

    def where(self, flag: jax.Array, yes: jax.Array, no: jax.Array) -> jax.Array:
        return jnp.where(flag, yes, no)

    def minimum(self, one: jax.Array, other: jax.Array) -> jax.Array:
        return jnp.minimum(one, other)

    def permute(self, low: jax.Array, high: jax.Array, selectors: Any) -> jax.Array:
        place = jnp.arange(4, dtype=jnp.uint32)[:, None]
        selector = jnp.broadcast_to(jnp.uint32(selectors), low.shape)[None] >> 4 * place & 15
        source = jnp.where(selector < 4, low[None], high[None]) >> selector % 4 * 8
        return ((source & 0xFF) << 8 * place).sum(axis=0, dtype=jnp.uint32)

    def funnel(self, low: jax.Array, high: jax.Array, shift: jax.Array) -> jax.Array:
        by = shift % 32
        return jnp.where(by == 0, low, low >> by | high << (32 - by) % 32)

    def popcount(self, word: jax.Array) -> jax.Array:
        return jax.lax.population_count(word)

    def lowest_bit(self, word: jax.Array) -> jax.Array:
        return jax.lax.population_count((word & (~word + 1)) - 1)

    def shuffle_up(self, word: jax.Array, distance: int, width: int) -> jax.Array:
        return jnp.where(self.thread % width >= distance, jnp.roll(word, distance), word)

    def barrier(self) -> None:
        """All threads are at the same place anyway."""

    def loop(self, bound: Any, carry: Words, body: Callable[[Any, Words], Words]) -> Words:
        def step(i: jax.Array, state: tuple[Any, Words]) -> tuple[Any, Words]:
            self.memory, inner = dict(state[0]), state[1]
            after = body(jnp.broadcast_to(i.astype(jnp.uint32), (THREADS,)), inner)
            return self.memory, after

        bound = bound if isinstance(bound, int) else bound[0].astype(jnp.int32)
        self.memory, carry = jax.lax.fori_loop(0, bound, step, (self.memory, carry))
        return carry

    def unroll(self, count: int, carry: Words, body: Callable[[Any, Words], Words]) -> Words:
        # Written once: it has to be compiled, and nobody waits for what it takes to run.
        return self.loop(count, carry, body)

    def pick(self, items: list[Words], index: Any) -> Words:
        return [jnp.stack(words)[index[0]] for words in zip(*items, strict=True)]

    def repeat(
        self, carry: Words, test: Callable[[Words], Any], body: Callable[[Words], Words]
    ) -> Words:
        def step(state: Words) -> Words:
            flag = test(state)
            return [jnp.where(flag, x, y) for x, y in zip(body(state), state, strict=True)]

        return jax.lax.while_loop(lambda state: test(state).any(), step, carry)

    def when(self, flag: jax.Array, then: Callable[[], Words], otherwise: Words) -> Words:
        outer = self._active
        self._active = outer & flag
        values = then()
        self._active = outer
        return [jnp.where(flag, x, y) for x, y in zip(values, otherwise, strict=True)]

    def any(self, flag: jax.Array) -> jax.Array:
        """Whether the flag of any thread of the warp is set."""
        return jnp.repeat(flag.reshape(-1, WARP).any(axis=1), WARP)


def to_words(x: jax.Array) -> jax.Array:
    """The bytes of an array as words, the last filled with zeros."""
    narrow = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}")).reshape(-1)
    each = 4 // x.dtype.itemsize
    padded = jnp.pad(narrow, (0, -narrow.size % each)).reshape(-1, each)
    return jax.lax.bitcast_convert_type(padded if each > 1 else narrow, jnp.uint32).reshape(-1)
