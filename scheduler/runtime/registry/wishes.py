"""What admins want for now of batch, leases, nodes and single replicas, until they take it back.

They stand in one fact, read and written whole: there are few. What they want of nodes that nothing new goes
to is in `registry.cordons`.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from scheduler.contracts import errors, stored
from scheduler.runtime.registry import database, journal, tables

NAME = "wishes"
FORGET_US = 30 * 86_400_000_000  # a lease that was to drain is long gone, and so is a replica
BATCH = "batch"


@dataclasses.dataclass(frozen=True, slots=True)
class Mark:
    """Who wants it, why, and since when (UTC µs)."""

    by: str
    reason: str = ""
    since_us: int = 0

    def told(self) -> str:
        """Return it as the reason of what is done about it."""
        return f"{self.by}: {self.reason}" if self.reason else self.by


@dataclasses.dataclass(frozen=True, slots=True)
class Standing:
    """All wishes.

    Attributes:
        batch: batch is held everywhere; None: it is not.
        drains: leases and nodes whose replicas move away.
        preempts: replicas whose GPUs are taken at once.
    """

    batch: Mark | None = None
    drains: Mapping[str, Mark] = dataclasses.field(default_factory=dict)
    preempts: Mapping[str, Mark] = dataclasses.field(default_factory=dict)


class Wishes:
    """Reads and writes of wishes."""

    def __init__(self, base: database.Database) -> None:
        self._base = base

    def read(self) -> Standing:
        """Return what stands."""
        with self._base.read() as session:
            row = session.get(tables.Fact, NAME)
            return _read({} if row is None else row.body)

    def hold_batch(self, mark: Mark) -> None:
        """Hold batch everywhere."""
        self._change(BATCH, mark.since_us, f"held by {mark.told()}", _put("batch", BATCH, mark))

    def release_batch(self, by: str, now_us: int) -> None:
        """Let batch go on; raises `errors.NotFound` if it does."""
        gone = _drop("batch", BATCH, "batch: not held")
        self._change(BATCH, now_us, f"released by {by}", gone)

    def drain(self, name: str, mark: Mark) -> None:
        """Let what runs in a lease, or on a node, move away."""
        self._change(name, mark.since_us, f"drained by {mark.told()}", _put("drains", name, mark))

    def resume(self, name: str, by: str, now_us: int) -> None:
        """Use a lease or node again; raises `errors.NotFound` if it does not drain."""
        gone = _drop("drains", name, f"{name}: does not drain")
        self._change(name, now_us, f"resumed by {by}", gone)

    def preempt(self, replica_id: str, mark: Mark) -> None:
        """Take a replica's GPUs at once."""
        change = _put("preempts", replica_id, mark)
        self._change(replica_id, mark.since_us, f"preempted by {mark.told()}", change)

    def _change(
        self, subject: str, now_us: int, told: str, change: Callable[[dict[str, Any]], None]
    ) -> None:
        with self._base.write() as session:
            row = session.get(tables.Fact, NAME, with_for_update=True)
            if row is None:
                row = tables.Fact(name=NAME, at_us=now_us, body={})
                session.add(row)
            body = _young(row.body, now_us)
            change(body)
            row.at_us, row.body = now_us, body
            journal.note(session, now_us, subject, told)


def _put(kind: str, name: str, mark: Mark) -> Callable[[dict[str, Any]], None]:
    def change(body: dict[str, Any]) -> None:
        body.setdefault(kind, {})[name] = dataclasses.asdict(mark)

    return change


def _drop(kind: str, name: str, absent: str) -> Callable[[dict[str, Any]], None]:
    def change(body: dict[str, Any]) -> None:
        if body.get(kind, {}).pop(name, None) is None:
            raise errors.NotFound(absent)

    return change


def _young(body: Mapping[str, Any], now_us: int) -> dict[str, Any]:
    """Return a copy without what was said of leases and replicas that have long ended."""

    def stays(name: str, mark: Mapping[str, Any]) -> bool:
        passing = name.startswith(("l-", "r-"))
        return not passing or now_us - int(mark["since_us"]) < FORGET_US

    return {
        kind: {name: dict(mark) for name, mark in marks.items() if stays(name, mark)}
        for kind, marks in body.items()
    }


def _read(body: Mapping[str, Any]) -> Standing:
    found = {
        kind: {name: stored.read(Mark, mark) for name, mark in body.get(kind, {}).items()}
        for kind in ("batch", "drains", "preempts")
    }
    return Standing(found["batch"].get(BATCH), found["drains"], found["preempts"])
