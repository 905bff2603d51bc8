"""What the broker wants of a replica."""

import dataclasses

from scheduler.contracts import fleet


@dataclasses.dataclass(frozen=True, slots=True)
class Wish:
    """What the broker wants of a replica."""

    role: fleet.Role
    run: bool
    drain_s: float
    asleep: bool = False

    @property
    def up(self) -> bool:
        """Whether it shall answer."""
        return self.run and not self.asleep
