"""Host-side accounting of one page pool: free list, reference counts, prefix cache."""

import collections
from collections.abc import Iterable, Sequence

from jinfire.errors import OutOfPages

NULL_PAGE = 0
_ROOT = 0


def pages_for(num_tokens: int, page_size: int) -> int:
    """Pages that hold `num_tokens` tokens."""
    return -(-num_tokens // page_size)


class PagePool:
    """The pages of one mesh, as the host sees them.

    A page is *held* (reference count >= 1), *cached* (no holder, but findable by its tokens and
    evicted when nothing else is left) or *free*. Page 0, the null page, is never handed out.

    A cached page is found by walking a trie of full pages. Its key is the pair (node of the page
    before it, its own tokens), compared token by token: no hash of the prefix that could collide.
    A page gets a node number that is never used again, so the children of an evicted page become
    unreachable instead of matching whatever page takes its place.

    What is found is cut to a multiple of `hit_pages`.

    Units: `num_pages` includes the null page; everything else counts usable pages or tokens.
    """

    def __init__(
        self, num_pages: int, page_size: int, prefix_caching: bool = True, hit_pages: int = 1
    ) -> None:
        if num_pages < 2:
            raise ValueError(f"num_pages: expected at least 2 (page 0 is null), got {num_pages}")
        if page_size < 1:
            raise ValueError(f"page_size: expected at least 1, got {page_size}")
        self.num_pages = num_pages
        self.page_size = page_size
        self.prefix_caching = prefix_caching
        self.hit_pages = hit_pages
        self.hit_tokens = 0
        self.lookup_tokens = 0
        self._free = list(range(num_pages - 1, NULL_PAGE, -1))  # popped from the end: 1, 2, 3, ...
        self._evictable: collections.OrderedDict[int, None] = collections.OrderedDict()
        self._refs = [0] * num_pages
        self._node = [_ROOT] * num_pages  # _ROOT: the page is not registered
        self._key: list[tuple[int, tuple[int, ...]] | None] = [None] * num_pages
        self._page_of: dict[tuple[int, tuple[int, ...]], int] = {}
        self._last_node = _ROOT

    @property
    def total(self) -> int:
        """Usable pages: all but the null page."""
        return self.num_pages - 1

    @property
    def free_pages(self) -> int:
        """Pages that `allocate` can hand out now: free ones and evictable cached ones."""
        return len(self._free) + len(self._evictable)

    @property
    def cached_pages(self) -> int:
        """Pages kept only for their content."""
        return len(self._evictable)

    def allocate(self, count: int) -> list[int]:
        """`count` pages with one holder each; least recently used cached pages are evicted.

        Raises: OutOfPages, with nothing changed.
        """
        if count > self.free_pages:
            raise OutOfPages(
                f"wanted {count} pages, {self.free_pages} of {self.total} are free "
                f"(page size {self.page_size} tokens)"
            )
        pages = []
        for _ in range(count):
            if self._free:
                page = self._free.pop()
            else:
                page, _ = self._evictable.popitem(last=False)
                self._forget(page)
            self._refs[page] = 1
            pages.append(page)
        return pages

    def match(self, tokens: Sequence[int]) -> list[int]:
        """The longest chain of cached full pages that `tokens` begins with, without holding it.

        At least one token is left over: its logits are what a prefill is for.
        """
        pages: list[int] = []
        if not self.prefix_caching:
            return pages
        size, node = self.page_size, _ROOT
        for start in range(0, (len(tokens) - 1) // size * size, size):
            page = self._page_of.get((node, tuple(tokens[start : start + size])))
            if page is None:
                break
            pages.append(page)
            node = self._node[page]
        if self.hit_pages > 1:
            del pages[len(pages) // self.hit_pages * self.hit_pages :]
        return pages

    def lookup(self, tokens: Sequence[int]) -> list[int]:
        """`match`, with one more holder on every page found, and counted in the hit statistics."""
        pages = self.match(tokens)
        for page in pages:
            if self._refs[page] == 0:
                del self._evictable[page]
            self._refs[page] += 1
        self.lookup_tokens += len(tokens)
        self.hit_tokens += len(pages) * self.page_size
        return pages

    def fits(self, count: int, matched: Iterable[int] = ()) -> bool:
        """Whether `count` pages can be allocated after `matched` pages are held."""
        return count <= self.free_pages - sum(self._refs[page] == 0 for page in matched)

    def register(self, tokens: Sequence[int], pages: Sequence[int], num_computed: int) -> None:
        """Makes the full pages among the first `num_computed` tokens findable.

        `pages[i]` holds the keys and values of the i-th page of `tokens`. Where another page with
        the same tokens is findable already, that one stays (first writer wins) and the chain goes
        on behind it.
        """
        if not self.prefix_caching:
            return
        size, node = self.page_size, _ROOT
        for i in range(min(num_computed, len(tokens)) // size):
            key = (node, tuple(tokens[i * size : (i + 1) * size]))
            found = self._page_of.get(key)
            if found is None:
                found = self._set_key(pages[i], key)
            node = self._node[found]

    def release(self, pages: Sequence[int]) -> None:
        """One holder less on every page. Pages nobody holds become cached or free.

        The last page of a chain is released first, so it is also evicted first: evicting the
        front would make the rest unreachable.

        Raises: ValueError on a page that nobody holds.
        """
        for page in reversed(pages):
            if self._refs[page] < 1:
                raise ValueError(f"release: expected a held page, got page {page} without holder")
            self._refs[page] -= 1
            if self._refs[page] == 0:
                if self._node[page] == _ROOT:
                    self._free.append(page)
                else:
                    self._evictable[page] = None

    def _set_key(self, page: int, key: tuple[int, tuple[int, ...]]) -> int:
        # A page whose chain lost an earlier page may come back under that page's successor. It
        # keeps its node: the tokens before it are the same, so its children are right again.
        old_key = self._key[page]
        if old_key is None:
            self._last_node += 1
            self._node[page] = self._last_node
        else:
            del self._page_of[old_key]
        self._key[page] = key
        self._page_of[key] = page
        return page

    def _forget(self, page: int) -> None:
        key = self._key[page]
        assert key is not None, f"page {page} is evictable but not registered"
        del self._page_of[key]
        self._key[page] = None
        self._node[page] = _ROOT
