"""Lines of a job that may be sent now, by model. Pure."""

import collections
from collections.abc import Iterable

from batch_jobs import client


class _Queue:
    """The lines of one model, and the bytes of their bodies."""

    __slots__ = ("size", "works")

    def __init__(self) -> None:
        self.works: collections.deque[client.Work] = collections.deque()
        self.size = 0


class Ready:
    """Lines that may be sent now, by model: one whose fleet is full holds up no other's."""

    def __init__(self) -> None:
        self._by_model: dict[str, _Queue] = {}
        self._lines = 0

    def __len__(self) -> int:
        return self._lines

    @property
    def models(self) -> Iterable[str]:
        """The models that they are for."""
        return self._by_model.keys()

    def of(self, name: str) -> tuple[int, int]:
        """Return how many are for a model, and the bytes of their bodies."""
        queue = self._by_model.get(name)
        return (len(queue.works), queue.size) if queue is not None else (0, 0)

    def append(self, work: client.Work, *, first: bool = False) -> None:
        """Add one, behind the others of its model or before them."""
        queue = self._by_model.get(work.line.model)
        if queue is None:
            queue = self._by_model[work.line.model] = _Queue()
        (queue.works.appendleft if first else queue.works.append)(work)
        queue.size += len(work.payload)
        self._lines += 1

    def pop(self, name: str) -> client.Work:
        """Take the first one of a model."""
        queue = self._by_model[name]
        work = queue.works.popleft()
        queue.size -= len(work.payload)
        if not queue.works:
            del self._by_model[name]
        self._lines -= 1
        return work
