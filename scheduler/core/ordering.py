"""A heap from which anything can be taken out again, whichever place it has."""

import heapq
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")
Key = tuple[Any, ...]
_SLACK = 32  # dead entries that are not worth a rebuild


class Order(Generic[Item]):
    """Named items by key, the smallest first: O(log n) to put, find or discard, amortised.

    What is discarded or moved leaves a dead entry in the heap; once these outnumber the living the heap
    is rebuilt, so that memory stays within twice what is needed.
    """

    __slots__ = ("_heap", "_live")

    def __init__(self) -> None:
        self._heap: list[tuple[Key, str]] = []
        self._live: dict[str, tuple[Key, Item]] = {}

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, name: str) -> bool:
        return name in self._live

    def __iter__(self) -> Iterator[Item]:
        """Go through everything, in no order."""
        return (item for _, item in self._live.values())

    def put(self, name: str, key: Key, item: Item) -> None:
        """Add ``item``, or move it if ``name`` is there already."""
        known = self._live.get(name)
        if known is not None and known[0] == key:
            self._live[name] = (key, item)
            return
        self._live[name] = (key, item)
        heapq.heappush(self._heap, (key, name))
        self._tidy()

    def discard(self, name: str) -> None:
        """Take ``name`` out; nothing happens if it is not there."""
        if self._live.pop(name, None) is not None:
            self._tidy()

    def first(self) -> tuple[Key, Item] | None:
        """Return the smallest key and its item, or None."""
        heap, live = self._heap, self._live
        while heap:
            key, name = heap[0]
            known = live.get(name)
            if known is not None and known[0] == key:
                return known
            heapq.heappop(heap)
        return None

    def _tidy(self) -> None:
        if len(self._heap) > 2 * len(self._live) + _SLACK:
            self._heap = [(key, name) for name, (key, _) in self._live.items()]
            heapq.heapify(self._heap)
