"""What a replica's process last said of itself, and what is wrong with that or with its silence."""

from collections.abc import Mapping
from typing import Any

from engines import settings
from engines.slot import stillness
from scheduler.contracts.v1 import control_pb2 as pb


class Vitals:
    """The last words of one process.

    Args:
        options: the [engines] settings.
        external: its engine is another server: that it fails is no reason to end what stands in front of it.

    Attributes:
        running: requests on it.
        sleeps: whether its engine can be put to sleep.
    """

    def __init__(self, options: settings.EnginesSettings, *, external: bool) -> None:
        self._unhealthy_s = options.unhealthy_s
        self._no_step_s = options.no_step_s
        self._external = external
        self._still = stillness.Stillness(options.no_step_s, counts=not external)
        self._stats: Mapping[str, Any] | None = None
        self._work: Mapping[str, int] | None = None
        self._answered = 0.0
        self.running = 0
        self.sleeps = False

    def listens(self, now: float) -> None:
        """Begin to wait for its words, at monotonic seconds ``now``."""
        self._answered = now

    def heard(self, said: Mapping[str, Any]) -> None:
        """Take its state."""
        self._stats = said["stats"]
        self._work = said.get("work")
        self.sleeps = bool(said.get("sleeps"))
        self.running = int(said["running"])

    def judged(self, said: Mapping[str, Any], now: float) -> tuple[str, str]:
        """Take its answer; returns why it must end, and why it must leave the routes, "" if it need not."""
        self._answered = now
        self.heard(said)
        failure = str(said["failure"])
        if failure and not self._external:
            return f"engine failed: {failure}", ""
        step_ms = float(said["stats"]["step_ms"])
        hangs, kill = self._still.look(int(said["steps_total"]), self.running, step_ms, now)
        return (f"{hangs}: killed" if kill else ""), failure or hangs

    def silent(self, now: float) -> tuple[str, bool]:
        """Return why it must leave the routes where it does not answer, or "", and whether it must end."""
        silent = now - self._answered
        why = f"does not answer for {silent:.0f} s" if silent >= self._unhealthy_s else ""
        return why, bool(why) and silent >= stillness.KILL_AFTER * self._no_step_s

    def tell(self, report: pb.ReplicaReport) -> None:
        """Put what is known into a report."""
        if self._stats is not None:
            report.stats.CopyFrom(pb.ReplicaStats(**self._stats))
        if self._work is not None:
            report.work.CopyFrom(pb.EngineWork(**self._work))

    def rest(self) -> None:
        """It serves nobody: it sleeps, or its process has ended."""
        self._stats = None
        self.running = 0
        self._still.reset()

    def end(self) -> None:
        """Its process has ended."""
        self.rest()
        self._work = None
        self.sleeps = False
