"""Who may have killed a replica: requests that were lost with one are tried apart from each other. Pure.

When a replica is lost nothing says which of its requests did it, or whether any did: a node may have died. So
all of them become suspects, and each is tried where no other suspect is. One that is lost again as the only
suspect there is at fault; whoever else was lost beside it is not. A trial is short: a request that kills does
so at the place where it did before, so one that comes further than that, or ends, is a suspect no more.

Whose prompt was computed beside the suspect just then is in doubt too: it may be another killer on its first
replica. Then nobody is at fault yet, and the suspect is tried once more; but not for ever. (A killer that
kills later, and just then, is not seen: its part falls to the suspect.)
"""

import collections
import dataclasses
import math
from collections.abc import Mapping
from collections.abc import Set as AbstractSet

import msgspec

from scheduler.contracts import errors, ids

_SETTLED_S = 0.3  # after its prompt: by then a request has made some steps
_CASE_S = 5.0  # so long all that were lost with a replica say so; a later loss is another one
Life = tuple[ids.ReplicaId, int]
"""A replica and its incarnation."""


class _Run(msgspec.Struct, frozen=True):
    """A request on a replica.

    Attributes:
        life: where.
        level: replicas that were lost with it before, and perhaps by it; 0: it is no suspect.
        shown: monotonic seconds at which its prompt was computed: most killers kill there, or with their
            first tokens. Infinity: not yet.
    """

    life: Life
    level: int
    shown: float = math.inf


@dataclasses.dataclass(slots=True)
class _Case:
    """A lost replica, and what is said of each request that ran there, until it has heard it."""

    at: float
    blames: dict[str, errors.Blame]


class Suspects:
    """The requests of one owner of queues that run, and which of them are on trial.

    Args:
        limit: a request is at fault for the loss of so many replicas, the last of them alone.

    Attributes:
        tried: the replicas on which a suspect runs.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._runs: dict[str, _Run] = {}  # by request id: where it runs, or ran last
        self._running: dict[Life, set[str]] = {}
        self._trials: collections.Counter[ids.ReplicaId] = collections.Counter()
        self._prompts: collections.Counter[ids.ReplicaId] = collections.Counter()
        self._cases: dict[Life, _Case] = {}
        self.tried: AbstractSet[ids.ReplicaId] = self._trials.keys()

    @property
    def restless(self) -> AbstractSet[ids.ReplicaId]:
        """The replicas that compute somebody's prompt: of a loss there little would be known."""
        return self._prompts.keys()

    def placed(self, request_id: str, life: Life, level: int) -> None:
        """Note that a request runs on a replica from now on.

        Args:
            request_id: the request.
            life: where.
            level: replicas that were lost with it before, and perhaps by it.
        """
        self._runs[request_id] = _Run(life, level)
        self._running.setdefault(life, set()).add(request_id)
        self._prompts[life[0]] += 1
        if level:
            self._trials[life[0]] += 1

    def shown(self, request_id: str, now: float) -> None:
        """Note that a request's prompt was computed by monotonic second ``now``; the first call does."""
        run = self._here(request_id)
        if run is not None and run.shown == math.inf:
            self._runs[request_id] = msgspec.structs.replace(run, shown=now)
            _less(self._prompts, run)

    def passed(self, request_id: str) -> bool:
        """Note that a suspect has come further than where it was lost; returns whether it was on trial."""
        run = self._here(request_id)
        if run is None or not run.level:
            return False
        self._runs[request_id] = msgspec.structs.replace(run, level=0)
        _less(self._trials, run)
        return True

    def closed(self, request_id: str) -> None:
        """Note that a request runs there no more, however it ended."""
        run = self._here(request_id)
        if run is None:
            return
        here = self._running[run.life]
        here.remove(request_id)
        if not here:
            del self._running[run.life]
        if run.shown == math.inf:
            _less(self._prompts, run)
        if run.level:
            _less(self._trials, run)

    def forget(self, request_id: str) -> None:
        """Forget a request that has ended."""
        self.closed(request_id)
        self._runs.pop(request_id, None)

    def lost(self, request_id: str, now: float) -> errors.Blame:
        """Return what part a request had in the loss of the replica that it ran on last.

        Args:
            request_id: the request; `closed` already.
            now: monotonic seconds.
        """
        run = self._runs.get(request_id)
        if run is None:
            return errors.Blame.SHARED
        case = self._cases.get(run.life)
        if case is None or now - case.at > _CASE_S or request_id not in case.blames:
            self._cases = {key: one for key, one in self._cases.items() if now - one.at <= _CASE_S}
            names = {request_id, *self._running.get(run.life, ())}
            runs = {name: self._runs[name] for name in names}
            blames = _judged(runs, self._limit, now - _SETTLED_S)
            case = self._cases[run.life] = _Case(now, blames)
        return case.blames.pop(request_id)

    def _here(self, request_id: str) -> _Run | None:
        """Return where a request runs, None if it runs nowhere now."""
        run = self._runs.get(request_id)
        running = run is not None and request_id in self._running.get(run.life, ())
        return run if running else None


def _less(counter: "collections.Counter[ids.ReplicaId]", run: _Run) -> None:
    replica_id = run.life[0]
    counter[replica_id] -= 1
    if not counter[replica_id]:
        del counter[replica_id]


def _judged(runs: Mapping[str, _Run], limit: int, settled: float) -> dict[str, errors.Blame]:
    """Return who may be at fault for the loss of a replica.

    Args:
        runs: what ran there, by request id.
        limit: see `Suspects`.
        settled: whose prompt was computed later than this may have been what killed it.
    """
    suspects = [name for name, run in runs.items() if run.level]
    if not suspects:
        return dict.fromkeys(runs, errors.Blame.SHARED)
    blames = dict.fromkeys(runs, errors.Blame.NONE)
    doubtful = [name for name, run in runs.items() if run.level or run.shown > settled]
    level = runs[suspects[0]].level
    sure = len(doubtful) == 1 or level > limit
    if len(suspects) == 1 and sure and level + 1 >= limit:
        return {**blames, suspects[0]: errors.Blame.ALONE}
    return {**blames, **dict.fromkeys(doubtful, errors.Blame.SHARED)}
