"""Who holds which GPU of this node: a note per GPU on the node's own disk.

A replica that outlived its supervisor still holds its GPU's memory; starting another one on top of it
fails minutes later for want of memory, and nobody knows why. So we look first, and say by whom.
"""

import contextlib
import dataclasses
import fcntl
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from engines import processes
from scheduler.contracts import stored


class Occupied(Exception):
    """A GPU can't be taken: a living process holds it, or no note can be written; the message says which."""


@dataclasses.dataclass(frozen=True, slots=True)
class Holder:
    """Who holds a GPU."""

    pid: int
    started: int
    lease_id: str
    slot_id: str
    replica_id: str

    @property
    def alive(self) -> bool:
        """Whether that very process lives."""
        return processes.alive(self.pid, self.started)


class Occupancy:
    """The notes of one node.

    Args:
        folder: where they lie; several pretended nodes may share a machine, so each has its own.
    """

    def __init__(self, folder: Path, node: str) -> None:
        self._folder = folder / (node or "node")

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        self._folder.mkdir(mode=0o777, parents=True, exist_ok=True)
        with (self._folder / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def holder(self, gpu: str) -> Holder | None:
        """Return the living holder of a GPU, or None."""
        try:
            found = stored.read(Holder, json.loads(self._note(gpu).read_text()))
        except (OSError, ValueError, TypeError):
            return None
        return found if found.alive else None

    def take(self, gpus: Iterable[str], who: Holder) -> None:
        """Note that ``who`` holds ``gpus``.

        Raises:
            Occupied: another replica's process holds one of them, and then nothing is noted; or the
                folder is another user's.
        """
        names = tuple(gpus)
        if not names:
            return
        try:
            self._take(names, who)
        except OSError as error:
            raise Occupied(
                f"no note of who holds which GPU can be written ({error}): "
                "give [engines] gpu_lock_dir a folder that this user may write"
            ) from error

    def _take(self, names: tuple[str, ...], who: Holder) -> None:
        with self._locked():
            for gpu in names:
                other = self.holder(gpu)
                if other is not None and other.replica_id != who.replica_id:
                    raise Occupied(
                        f"GPU {gpu} is held by replica {other.replica_id} of slot {other.slot_id} "
                        f"(lease {other.lease_id}, pid {other.pid}): end that process first"
                    )
            for gpu in names:
                fresh = self._folder / f".{os.getpid()}"
                fresh.write_text(json.dumps(dataclasses.asdict(who)))
                fresh.replace(self._note(gpu))

    def give_back(self, gpus: Iterable[str], replica_id: str) -> None:
        """Remove the notes of a replica that has ended; one that is left names a dead process, no holder."""
        names = tuple(gpus)
        if not names:
            return
        with contextlib.suppress(OSError), self._locked():
            for gpu in names:
                with contextlib.suppress(OSError, ValueError, TypeError):
                    note = self._note(gpu)
                    if stored.read(Holder, json.loads(note.read_text())).replica_id == replica_id:
                        note.unlink()

    def _note(self, gpu: str) -> Path:
        return self._folder / gpu.replace("/", "_")
