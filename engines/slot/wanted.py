"""What the broker wants of a replica."""

import dataclasses

from scheduler.contracts import fleet


@dataclasses.dataclass(frozen=True, slots=True)
class Wish:
    """What the broker wants of a replica.

    Attributes:
        adapters: that it shall hold, name and path, the most urgent first; None: it is not said.
        nodes: over which it goes.
        rank: which of them this one is; the first serves, the others work for it.
        meet: where rank 0 waits for this one, "" where that is not known yet; of rank 0: in which life of it.
        fault: why that life must end as lost, or "".
    """

    role: fleet.Role
    run: bool
    drain_s: float
    asleep: bool = False
    adapters: tuple[tuple[str, str], ...] | None = None
    nodes: int = 1
    rank: int = 0
    meet: str = ""
    fault: str = ""

    @property
    def up(self) -> bool:
        """Whether it shall answer."""
        return self.run and not self.asleep
