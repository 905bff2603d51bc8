"""Times at which nodes are not ours: maintenance and Slurm's reservations. No lease may cross one."""

import dataclasses
import math
from collections.abc import Iterable, Sequence


@dataclasses.dataclass(frozen=True, slots=True)
class Window:
    """One window; `nodes` empty: the whole cluster. Seconds from now; one that runs has begun before 0."""

    name: str
    starts_s: float
    ends_s: float
    nodes: frozenset[str] = frozenset()

    def touches(self, nodes: Iterable[str]) -> bool:
        """Return whether it takes one of ``nodes``; unknown nodes (none given) are taken to be touched."""
        asked = frozenset(nodes)
        return not self.nodes or not asked or bool(asked & self.nodes)


def until(windows: Sequence[Window], nodes: Iterable[str] = ()) -> tuple[float, str]:
    """Return seconds until the next window takes ``nodes``, and its name; infinity, "" without one."""
    asked = tuple(nodes)
    due = [
        (max(0.0, window.starts_s), window.name)
        for window in windows
        if window.ends_s > 0 and window.touches(asked)
    ]
    return min(due, default=(math.inf, ""))
