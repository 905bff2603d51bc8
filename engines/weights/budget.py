"""What must leave a node's disk so that something new fits: the longest unused, never what is used. Pure."""

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """A set of weights on the disk, whole or begun.

    Attributes:
        size: bytes on the disk, its caches included.
        used_us: UTC µs of its last use.
        busy: in use by a replica, or being staged now.
        coming: bytes that its staging has still to write.
        whole: published; what is only begun goes before everything whole.
    """

    key: str
    size: int
    used_us: int
    busy: bool
    whole: bool = True
    coming: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Room:
    """What the disk offers.

    Attributes:
        free: bytes free on the file system.
        budget: most bytes that weights may take; 0: only the file system bounds them.
        reserve: bytes of the file system that stay free.
    """

    free: int
    budget: int
    reserve: int


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """What to do.

    Attributes:
        victims: what to evict, in this order.
        lacking: bytes that are still missing then; 0: it fits.
        never: it would not fit on an empty disk either.
    """

    victims: tuple[str, ...]
    lacking: int
    never: bool = False


def decide(size: int, there: int, entries: Sequence[Entry], room: Room) -> Verdict:
    """Return what must leave so that a set of ``size`` bytes fits.

    Nothing is evicted if that would not be enough: weights that may be wanted soon are worth more than a
    half-empty disk.

    Args:
        size: bytes of the whole set.
        there: of these, bytes that a begun staging has on the disk.
        entries: what else is there.
        room: the disk.
    """
    coming = sum(one.coming for one in entries)
    held = coming + sum(one.size for one in entries)
    usable = room.free - room.reserve - coming
    missing = max(size - there - usable, held + size - room.budget if room.budget else 0)
    if missing <= 0:
        return Verdict((), 0)
    never = size > usable + there + held or 0 < room.budget < size
    victims: list[str] = []
    freed = 0
    for one in sorted(entries, key=lambda one: (one.whole, one.used_us, one.key)):
        if one.busy or freed >= missing:
            continue
        victims.append(one.key)
        freed += one.size
    if freed < missing:
        return Verdict((), missing - freed, never)
    return Verdict(tuple(victims), 0)
