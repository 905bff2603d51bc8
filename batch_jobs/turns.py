"""Whose line goes next, and of which model: fair among teams and jobs, within each model's window. Pure."""

import collections
from collections.abc import Iterable, Mapping
from typing import Protocol, TypeVar

from batch_jobs import model, ready, window

_LEAST_SHARE = 0.05  # a team far over its share still gets a twentieth of the lines


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
    """What is in flight, and the windows that bound it.

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
        self._teams: collections.Counter[str] = collections.Counter()
        self._served: collections.Counter[int] = collections.Counter()  # by job: when, last
        self._serial = 0

    def window(self, name: str) -> window.Window:
        """Return a model's window."""
        found = self._windows.get(name)
        if found is None:
            found = self._windows[name] = window.Window(*self._sizes)
        return found

    def free(self, name: str) -> bool:
        """Whether a model takes a line more."""
        return self._models[name] < self.window(name).size

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
                if count >= 0 and (fewest < 0 or count < fewest):
                    found, fewest = name, count
            if fewest < 0:
                continue
            factor = max(_LEAST_SHARE, self.factors.get(team, 1.0))
            rank = (sent / factor, run.sent, self._served[run.job.job_id])
            if least is None or rank < least:
                best, least = (run, found), rank
        return best

    def take(self, run: Run, name: str) -> None:
        """Count a line that is sent."""
        self._serial += 1
        self._served[run.job.job_id] = self._serial
        run.sent += 1
        self._teams[run.job.team] += 1
        self._models[name] += 1

    def give_back(self, run: Run, name: str) -> None:
        """Count a line that is back, however it went."""
        run.sent -= 1
        self._teams[run.job.team] -= 1
        self._models[name] -= 1

    def forget_model(self, name: str) -> None:
        """Forget a name that nobody serves, once nothing of it is in flight: such must not pile up."""
        if not self._models[name]:
            del self._models[name]
            self._windows.pop(name, None)

    def forget_job(self, run: Run) -> None:
        """Forget a job that has ended."""
        self._served.pop(run.job.job_id, None)
        if not self._teams[run.job.team]:
            del self._teams[run.job.team]
