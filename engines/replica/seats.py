"""Who may sit in a replica: rung 0 of the ladder as a pure table of seats.

Interactive and standard requests take a free seat, else the youngest batch sequences are told to
leave until there is room for them. A line that was preempted twice before is pinned: it leaves after all
that are not, and then it too, as interactive work goes first. Batch takes a seat only where the role
allows and more seats are free than are kept in reserve. Nobody queues for longer than the victims need
to leave. Holds counts and names only: no clock, no tasks (`engines.replica.gate` is the moving part).
"""

import dataclasses
import enum
import itertools

from scheduler.contracts import fleet, requests

# Each preemption costs a prefill anew, and a line that always comes last would else never end.
PINNED_AFTER = 2


class Verdict(enum.Enum):
    """What a request for a seat got."""

    SEATED = "seated"
    WAIT = "wait"  # seats are being freed for it; it holds a claim
    FULL = "full"


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """The verdict, who must leave for it, and why it is full."""

    verdict: Verdict
    victims: tuple[str, ...] = ()
    reason: str = ""


@dataclasses.dataclass(slots=True)
class _Holder:
    batch: bool
    need: int
    order: int
    pinned: bool = False
    waiting: bool = False
    leaving: bool = False


class Seats:
    """The table of seats.

    Args:
        total: seats in all.
        reserved: seats that batch never takes while the role is shared.
        role: what the replica takes now.
    """

    def __init__(self, total: int, reserved: int, role: fleet.Role) -> None:
        if total < 1 or not 0 <= reserved <= total:
            raise ValueError(
                f"seats {total}, reserved {reserved}: want 0 <= reserved <= seats >= 1"
            )
        self.total = total
        self.reserved = reserved
        self.role = role
        self.draining = False
        self.preempted_total = 0
        self._holders: dict[str, _Holder] = {}
        self._order = itertools.count()

    @property
    def interactive(self) -> int:
        """Seats that interactive and standard requests hold or claim."""
        return sum(h.need for h in self._holders.values() if not h.batch)

    @property
    def batch(self) -> int:
        """Seats that batch sequences hold, leaving ones included."""
        return sum(h.need for h in self._holders.values() if h.batch)

    @property
    def free(self) -> int:
        """Seats that nobody holds or claims."""
        return max(0, self.total - self.interactive - self.batch)

    @property
    def batch_free(self) -> int:
        """Seats that the role leaves to batch and that nobody holds or claims."""
        if self.draining or self.role is fleet.Role.INTERACTIVE:
            return 0
        kept = 0 if self.role is fleet.Role.BATCH else self.reserved
        return max(0, self.total - kept - self.interactive - self.batch)

    def __contains__(self, key: str) -> bool:
        return key in self._holders

    def __len__(self) -> int:
        return len(self._holders)

    def ask(self, key: str, tier: requests.Tier, need: int = 1, preempted: int = 0) -> Answer:
        """Ask for ``need`` seats; a verdict other than FULL must be met by one `give_back`.

        Args:
            key: the holder's name.
            tier: its tier.
            need: seats that it takes.
            preempted: how often its line gave a seat back before, here or elsewhere; batch's alone counts.

        Raises:
            ValueError: ``key`` holds a seat already.
        """
        if key in self._holders:
            raise ValueError(f"{key} holds a seat already")
        need = max(1, min(need, self.total))
        if self.draining:
            return Answer(Verdict.FULL, reason="draining")
        if tier is requests.Tier.BATCH:
            return self._ask_batch(key, need, preempted >= PINNED_AFTER)
        return self._ask_interactive(key, need)

    def _ask_batch(self, key: str, need: int, pinned: bool) -> Answer:
        if self.role is fleet.Role.INTERACTIVE:
            return Answer(Verdict.FULL, reason="role interactive takes no batch")
        kept = 0 if self.role is fleet.Role.BATCH else self.reserved
        need = min(need, max(1, self.total - kept))  # else one with many choices could never sit
        if self.interactive + self.batch + need > self.total - kept:
            return Answer(Verdict.FULL, reason="no seat for batch")
        self._holders[key] = _Holder(True, need, next(self._order), pinned)
        return Answer(Verdict.SEATED)

    def _ask_interactive(self, key: str, need: int) -> Answer:
        staying = sum(h.need for h in self._holders.values() if not h.leaving)
        victims: list[str] = []
        for name, holder in self._movable():
            if staying + need <= self.total:
                break
            victims.append(name)
            staying -= holder.need
        if staying + need > self.total:
            return Answer(Verdict.FULL, reason="every seat is taken by interactive work")
        wait = self.interactive + self.batch + need > self.total
        self._evict(victims)
        self._holders[key] = _Holder(False, need, next(self._order), waiting=wait)
        return Answer(Verdict.WAIT if wait else Verdict.SEATED, tuple(victims))

    def try_seat(self, key: str) -> bool:
        """Turn a claim into a seat if there is room now; older claims go first."""
        claim = self._holders[key]
        if claim.waiting:
            before = sum(
                h.need for h in self._holders.values() if not h.waiting or h.order < claim.order
            )
            claim.waiting = before + claim.need > self.total
        return not claim.waiting

    def give_back(self, key: str) -> None:
        """Free what ``key`` holds or claims; no error if it holds nothing."""
        self._holders.pop(key, None)

    def shed(self, count: int) -> tuple[str, ...]:
        """Make ``count`` batch sequences leave, the youngest first; returns their names."""
        leaving = sum(h.need for h in self._holders.values() if h.batch and h.leaving)
        victims: list[str] = []
        for name, holder in self._movable():
            if leaving >= count:
                break
            victims.append(name)
            leaving += holder.need
        self._evict(victims)
        return tuple(victims)

    def set_role(self, role: fleet.Role) -> tuple[str, ...]:
        """Change the role; turning interactive returns every batch sequence: they must leave now."""
        self.role = role
        if role is not fleet.Role.INTERACTIVE:
            return ()
        victims = [name for name, h in self._holders.items() if h.batch and not h.leaving]
        self._evict(victims)
        return tuple(victims)

    def _movable(self) -> list[tuple[str, _Holder]]:
        """Return the batch sequences that stay, in the order in which they would have to leave."""
        staying = ((name, h) for name, h in self._holders.items() if h.batch and not h.leaving)
        return sorted(staying, key=lambda item: (item[1].pinned, -item[1].order))

    def _evict(self, victims: list[str]) -> None:
        for name in victims:
            self._holders[name].leaving = True
        self.preempted_total += len(victims)
