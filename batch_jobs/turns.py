"""Whose line goes next, and of which model: fair among teams and jobs, within each model's window. Pure.

A job whose model takes none would offer all its lines again and again: so refused ones fill the model's
window until they are offered again, unless answers come.
"""

import collections
import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Protocol, TypeVar

from batch_jobs import model, ready, window

_LEAST_SHARE = 0.05  # a team far over its share still gets a twentieth of the lines
_Mark = tuple[str, str, str]  # team, user and model: whose quotas lines meet together


class Run(Protocol):
    """What is looked at of a job that runs; `runner.JobRun` is one."""

    job: model.BatchJob
    ready: ready.Ready
    sent: int
    stalled: str

    @property
    def ended(self) -> bool:
        """No line of it may be sent any more."""
        ...


R = TypeVar("R", bound=Run)


class Turns:
    """What is in flight, and the windows that bound it: each model's, and each user's of a model.

    Args:
        first_window: lines in flight for each model at the start.
        max_window: the most.
        team_lines: the most of one team; 0: no limit.

    Attributes:
        factors: the teams' fair-share factors, 1 where one is not named.
    """

    def __init__(self, first_window: int, max_window: int, team_lines: int = 0) -> None:
        self.factors: Mapping[str, float] = {}
        self._sizes = first_window, max_window
        self._team_lines = team_lines
        self._windows: dict[str, window.Window] = {}
        self._models: collections.Counter[str] = collections.Counter()  # lines in flight
        self._held: collections.Counter[str] = collections.Counter()  # that found no room
        self._teams: collections.Counter[str] = collections.Counter()
        self._own: collections.Counter[_Mark] = collections.Counter()  # in flight, or refused alone
        self._allowances: dict[_Mark, window.Window] = {}
        self._served: collections.Counter[int] = collections.Counter()  # by job: when, last
        self._serial = 0

    def allowance(self, run: Run, name: str) -> window.Window:
        """Return the window of a user's lines of a model; it is wide until one is refused alone.

        Quotas may be a user's, a key's or the team's: what one user is refused says nothing of another.
        """
        found = self._allowances.get(_mark(run, name))
        if found is None:
            most = self._sizes[1]
            found = self._allowances[_mark(run, name)] = window.Window(most, most)
        return found

    def window(self, name: str) -> window.Window:
        """Return a model's window."""
        found = self._windows.get(name)
        if found is None:
            found = self._windows[name] = window.Window(*self._sizes)
        return found

    def free(self, name: str) -> bool:
        """Whether a model takes a line more.

        Refused lines fill the window only while none is in flight: an answer shows that there is room.
        """
        return (self._models[name] or self._held[name]) < self.window(name).size

    def capped(self, run: Run) -> bool:
        """Whether a job stands still because its team has all the lines in flight that it may have."""
        full = bool(self._team_lines) and self._teams[run.job.team] >= self._team_lines
        return full and not run.sent and bool(run.ready)

    @contextlib.contextmanager
    def kept(self, run: Run, name: str, *, alone: bool) -> Iterator[None]:
        """Offer nothing in a refused line's place until it is offered again.

        Args:
            run: its job.
            name: its model.
            alone: what refused it says nothing of others' lines (`verdicts.alone`); else the fleet is full.
        """
        mark = _mark(run, name)
        self._own[mark] += alone
        self._held[name] += not alone
        try:
            yield
        finally:
            self._own[mark] -= alone
            self._held[name] -= not alone
            self._own, self._held = +self._own, +self._held

    def pick(self, runs: Iterable[R]) -> tuple[R, str] | None:
        """Choose: the least served team's least served job, and the least busy of its models."""
        best: tuple[R, str] | None = None
        least: tuple[float, int, int] | None = None
        busy: dict[str, int] = {}  # by model; -1: it is full
        for run in runs:
            team = run.job.team
            sent = self._teams[team]
            if run.stalled or (self._team_lines and sent >= self._team_lines) or run.ended:
                continue
            found, fewest = "", -1
            for name in run.ready.models:
                count = busy.get(name)
                if count is None:
                    count = busy[name] = self._models[name] if self.free(name) else -1
                if count >= 0 and (fewest < 0 or count < fewest) and self._allowed(run, name):
                    found, fewest = name, count
            if fewest < 0:
                continue
            factor = max(_LEAST_SHARE, self.factors.get(team, 1.0))
            rank = (sent / factor, run.sent, self._served[run.job.job_id])
            if least is None or rank < least:
                best, least = (run, found), rank
        return best

    def _allowed(self, run: Run, name: str) -> bool:
        mark = _mark(run, name)
        found = self._allowances.get(mark)
        return found is None or self._own[mark] < found.size

    def take(self, run: Run, name: str) -> None:
        """Count a line that is sent."""
        self._serial += 1
        self._served[run.job.job_id] = self._serial
        run.sent += 1
        self._teams[run.job.team] += 1
        self._models[name] += 1
        self._own[_mark(run, name)] += 1

    def give_back(self, run: Run, name: str) -> None:
        """Count a line that is back, however it went."""
        run.sent -= 1
        self._teams[run.job.team] -= 1
        self._models[name] -= 1
        self._own[_mark(run, name)] -= 1

    def forget_model(self, name: str) -> None:
        """Forget a name that nobody serves, once nothing of it is in flight: such must not pile up."""
        if not self._models[name] and not self._held[name]:
            del self._models[name]
            self._windows.pop(name, None)
            self._let_go({mark for mark in self._allowances if mark[2] == name})

    def forget_job(self, run: Run) -> None:
        """Forget a job that has ended."""
        self._served.pop(run.job.job_id, None)
        if not self._teams[run.job.team]:
            del self._teams[run.job.team]
        who = run.job.team, run.job.user
        self._let_go({mark for mark in self._allowances if mark[:2] == who})

    def _let_go(self, marks: Collection[_Mark]) -> None:
        """Forget the windows of users of whom nothing is under way."""
        self._own = +self._own
        for mark in marks:
            if not self._own[mark]:
                del self._allowances[mark]


def _mark(run: Run, name: str) -> _Mark:
    return run.job.team, run.job.user, name
