"""Cordoned nodes in the registry: the leader's own, and those that an admin keeps Forebay off.

They stand in one fact, read and written whole: there are few.
"""

import dataclasses
from collections.abc import Callable, Mapping

from scheduler.contracts import errors, stored
from scheduler.runtime.registry import database, journal, tables

NAME = "cordons"


@dataclasses.dataclass(frozen=True, slots=True)
class Cordon:
    """Why and how long a node is kept off; `until_us` 0: until somebody ends it."""

    node: str
    reason: str
    by: str
    since_us: int
    until_us: int = 0

    def holds(self, now_us: int) -> bool:
        """Return whether it still does."""
        return not self.until_us or now_us < self.until_us


class Cordons:
    """Reads and writes of cordons."""

    def __init__(self, base: database.Database) -> None:
        self._base = base

    def all(self) -> Mapping[str, Cordon]:
        """Return the cordons by node, those that have run out too."""
        with self._base.read() as session:
            return _read(session.get(tables.Fact, NAME))

    def add(self, cordon: Cordon, *, epoch: int | None = None) -> None:
        """Cordon a node, or say so anew; ``epoch``: the leader's, raises `database.Fenced`.

        An admin's cordon stays until an admin ends it, whatever the leader finds.
        """

        def change(known: dict[str, Cordon]) -> str:
            before = known.get(cordon.node)
            if epoch is None or before is None or before.until_us:
                known[cordon.node] = cordon
            return f"cordoned by {cordon.by}: {cordon.reason}"

        self._change(cordon.node, cordon.since_us, change, epoch)

    def end(self, node: str, by: str, now_us: int) -> None:
        """End a node's cordon; raises `errors.NotFound`."""

        def change(known: dict[str, Cordon]) -> str:
            if known.pop(node, None) is None:
                raise errors.NotFound(f"{node}: not cordoned; see `fctl show nodes`")
            return f"cordon ended by {by}"

        self._change(node, now_us, change, None)

    def _change(
        self,
        node: str,
        now_us: int,
        change: Callable[[dict[str, Cordon]], str],
        epoch: int | None,
    ) -> None:
        with self._base.write(epoch) as session:
            row = session.get(tables.Fact, NAME, with_for_update=True)
            if row is None:
                row = tables.Fact(name=NAME, at_us=now_us, body={})
                session.add(row)
            known = {name: cordon for name, cordon in _read(row).items() if cordon.holds(now_us)}
            told = change(known)
            row.at_us = now_us
            row.body = {name: dataclasses.asdict(cordon) for name, cordon in known.items()}
            journal.note(session, now_us, node, told)


def _read(row: tables.Fact | None) -> dict[str, Cordon]:
    return (
        {} if row is None else {name: stored.read(Cordon, body) for name, body in row.body.items()}
    )
