"""Who is thought to hold how much of one prompt, the longest first; who holds less only when asked. Pure."""

from collections.abc import Callable, Mapping, Sequence

from scheduler.contracts import ids


class Holders:
    """The replicas that hold a prompt's beginning.

    Args:
        levels: pairs of a share of the prompt in (0, 1] and a mask of those that hold just so much, by
            falling share; a replica is in one mask only.
        at: replica by its bit in the masks.
        bit: returns a replica's bit, 0 for one that is not known.
    """

    __slots__ = ("_at", "_bit", "_levels")

    def __init__(
        self,
        levels: Sequence[tuple[float, int]],
        at: Mapping[int, ids.ReplicaId],
        bit: Callable[[ids.ReplicaId], int],
    ) -> None:
        self._levels = levels
        self._at = at
        self._bit = bit

    @classmethod
    def of(cls, shares: Mapping[ids.ReplicaId, float]) -> "Holders":
        """Return holders with these shares."""
        bits = {name: 1 << place for place, name in enumerate(shares)}
        levels: dict[float, int] = {}
        for name, share in shares.items():
            levels[share] = levels.get(share, 0) | bits[name]
        at = {bit: name for name, bit in bits.items()}
        return cls(sorted(levels.items(), reverse=True), at, lambda name: bits.get(name, 0))

    def share(self, replica_id: ids.ReplicaId) -> float:
        """Return the part of the prompt that a replica holds."""
        if self._levels:
            bit = self._bit(replica_id)
            for share, mask in self._levels:
                if mask & bit:
                    return share
        return 0.0

    def levels(self) -> Sequence[tuple[float, int]]:
        """Return each share and a mask of who holds it, by falling share."""
        return self._levels

    def names(self, mask: int) -> list[ids.ReplicaId]:
        """Return who is in a mask."""
        names, left = list[ids.ReplicaId](), mask
        while left:
            low = left & -left
            names.append(self._at[low])
            left ^= low
        return names

    def has(self, mask: int, replica_id: ids.ReplicaId) -> bool:
        """Return whether a replica is in a mask."""
        return bool(mask & self._bit(replica_id))

    def shares(self) -> dict[ids.ReplicaId, float]:
        """Return every holder's share."""
        return {name: share for share, mask in self._levels for name in self.names(mask)}


NOBODY = Holders((), {}, lambda _: 0)
