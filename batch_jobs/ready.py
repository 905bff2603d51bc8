"""Lines of a job that may be sent now, by model. Pure."""

import collections
from collections.abc import Iterable

from batch_jobs import client


class Ready:
    """Lines that may be sent now, by model: one whose fleet is full holds up no other's."""

    def __init__(self) -> None:
        self._by_model: dict[str, collections.deque[client.Work]] = {}
        self._lines = 0
        self.size = 0  # bytes of their bodies

    def __len__(self) -> int:
        return self._lines

    @property
    def models(self) -> Iterable[str]:
        """The models that they are for."""
        return self._by_model.keys()

    def of(self, models: Iterable[str]) -> int:
        """How many are for these models."""
        return sum(len(self._by_model[name]) for name in models)

    def append(self, work: client.Work, *, first: bool = False) -> None:
        """Add one, behind the others of its model or before them."""
        queue = self._by_model.setdefault(work.line.model, collections.deque())
        (queue.appendleft if first else queue.append)(work)
        self._lines += 1
        self.size += len(work.payload)

    def pop(self, name: str) -> client.Work:
        """Take the first one of a model."""
        queue = self._by_model[name]
        work = queue.popleft()
        if not queue:
            del self._by_model[name]
        self._lines -= 1
        self.size -= len(work.payload)
        return work
