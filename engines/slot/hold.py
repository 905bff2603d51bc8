"""The GPUs that one replica holds, and the node's notes of it."""

from collections.abc import Iterable

from engines import gpus, processes
from engines.slot import means, occupancy

FAULTS = (gpus.GpuError, occupancy.Occupied)


class Hold:
    """What a replica holds.

    Args:
        replica_id: which.
        given: its slot's means.

    Attributes:
        gpus: as CUDA names them in the slot; empty: it holds none.
    """

    def __init__(self, replica_id: str, given: means.Means) -> None:
        self.gpus: tuple[str, ...] = ()
        self._replica_id = replica_id
        self._means = given

    def take(self, among: Iterable[str], count: int, pid: int) -> None:
        """Take so many of these.

        Raises:
            gpus.GpuError: another replica of the slot holds them.
            occupancy.Occupied: one of another slot does.
        """
        self.gpus = gpus.choose(among, self._means.held(), count, self._replica_id)
        self.note(pid)

    def again(self, mine: tuple[str, ...], pid: int) -> str:
        """Take those that it had before; returns who holds one of them now, or ""."""
        try:
            self.take(mine, len(mine), pid)
        except FAULTS as error:
            return str(error)
        return ""

    def note(self, pid: int) -> None:
        """Note which process it is; raises `occupancy.Occupied`."""
        slot = self._means.slot
        holder = occupancy.Holder(
            pid, processes.start_time(pid), slot.lease_id, slot.slot_id, self._replica_id
        )
        self._means.notes.take(self._on_node, holder)

    def give_back(self) -> None:
        """Hold none."""
        self._means.notes.give_back(self._on_node, self._replica_id)
        self.gpus = ()

    @property
    def _on_node(self) -> tuple[str, ...]:
        """Return the GPUs that nobody else may hold: none where it has a part of one."""
        if self._means.slot.parts > 1:
            return ()
        return tuple(self._means.gpus[gpu] for gpu in self.gpus)
