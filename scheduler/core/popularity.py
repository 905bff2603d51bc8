"""How much of a model's traffic each adapter has had of late. Pure."""

import dataclasses


@dataclasses.dataclass(slots=True)
class Popularity:
    """How much of a model's traffic each adapter has had of late; old requests fade.

    Attributes:
        counts: decayed requests by adapter.
        total: their sum.
    """

    counts: dict[str, float] = dataclasses.field(default_factory=dict)
    total: float = 0.0
    _since: int = 0
    _HALVE_AFTER = 1024  # requests

    def note(self, adapter: str, times: int = 1) -> None:
        """Count a request, or some that came together."""
        self.counts[adapter] = self.counts.get(adapter, 0.0) + times
        self.total += times
        self._since += times
        if self._since >= self._HALVE_AFTER:
            self._since = 0
            self.counts = {name: n / 2 for name, n in self.counts.items() if n >= 1.0}
            self.total = sum(self.counts.values())

    def share(self, adapter: str) -> float:
        """Return the adapter's part of the traffic, in [0, 1]."""
        return self.counts.get(adapter, 0.0) / self.total if self.total else 0.0
