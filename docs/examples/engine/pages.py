"""Who owns which page of the cache, and which pages hold the beginning of a prompt already.

A full page is found again by all tokens up to its end, since keys depend on every token before
them. Pages that nobody uses any more stay known until their room is needed, oldest first.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence

Prefix = tuple[int, ...]


class PagePool:
    """``num_pages`` pages of ``page_size`` tokens, with their numbers of users."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.users = [0] * num_pages
        self.free = deque(range(num_pages))
        self.idle: OrderedDict[int, None] = OrderedDict()  # known, but used by nobody
        self.known: dict[Prefix, int] = {}
        self.prefix_of: dict[int, Prefix] = {}
        self.coming: set[Prefix] = set()  # somebody is computing them

    @property
    def available(self) -> int:
        """Pages that ``take`` can give."""
        return len(self.free) + len(self.idle)

    def prefixes(self, tokens: Sequence[int], end: int) -> list[Prefix]:
        """What the full pages of the first ``end`` tokens hold."""
        return [tuple(tokens[:stop]) for stop in range(self.page_size, end + 1, self.page_size)]

    def match(self, prompt: Sequence[int]) -> list[int] | None:
        """Known pages that a prompt begins with; None if the next one is being computed."""
        found: list[int] = []
        for prefix in self.prefixes(prompt, len(prompt) - 1):  # the last token's logits are wanted
            if prefix not in self.known:
                return None if prefix in self.coming else found
            found.append(self.known[prefix])
        return found

    def use(self, pages: Sequence[int]) -> None:
        """Count one more user of known pages."""
        for page in pages:
            self.users[page] += 1
            self.idle.pop(page, None)

    def take(self, count: int) -> list[int]:
        """Give pages of one user, forgetting what unused ones hold if there are no others."""
        while len(self.free) < count:
            page, _ = self.idle.popitem(last=False)
            del self.known[self.prefix_of.pop(page)]
            self.free.append(page)
        pages = [self.free.popleft() for _ in range(count)]
        self.use(pages)
        return pages

    def publish(self, page: int, prefix: Prefix) -> None:
        """Let others find a page that is now full."""
        self.coming.discard(prefix)
        if self.known.setdefault(prefix, page) == page:
            self.prefix_of[page] = prefix

    def release(self, pages: Sequence[int]) -> None:
        """Count one user less; of a prefix, the end is forgotten before the beginning."""
        for page in reversed(pages):
            self.users[page] -= 1
            if self.users[page] == 0 and page in self.prefix_of:
                self.idle[page] = None
            elif self.users[page] == 0:
                self.free.append(page)
