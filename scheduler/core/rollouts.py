"""A rollout's next step: warm the new version, move requests to it by percent, go back if it is worse. Pure.

The old versions' replicas stay as they are until the new one has held all requests for a while, so that going
back is one change of the route.
"""

import dataclasses
import enum
from collections.abc import Mapping


class State(enum.StrEnum):
    """Where a rollout stands; `OVER` is final."""

    WARMING = "warming"  # the new version's replicas come up; nothing has moved
    STEPPING = "stepping"
    KEEPING = "keeping"  # all requests are on the new version, the old one is kept
    OVER = "over"


@dataclasses.dataclass(frozen=True, slots=True)
class Rollout:
    """One model's rollout as it is kept.

    Attributes:
        before: the route's percents that rolling back restores.
        steps: percents of the new version, rising; one that ends below 100 stays there.
        hold_s: how long each step holds at least.
        least: requests of the new version that each step waits for; 0: none.
        keep_s: how long the old versions are kept after the last step.
        warm_s: limit of warming.
        gate: an offline quality verdict must come before the second step.
        gate_passed: that verdict, None before it came; `gate_reason` says more.
        step: index of the step that holds; -1 while warming.
        since_us: UTC µs since which the state or step holds.
        outcome: of one that is over: done, rolled back, failed.
        reason: why it is where it is, one line.
    """

    model: str
    version: str
    before: Mapping[str, int]
    steps: tuple[int, ...]
    hold_s: float
    author: str
    state: State = State.WARMING
    step: int = -1
    since_us: int = 0
    began_us: int = 0
    least: int = 20
    keep_s: float = 600.0
    warm_s: float = 1800.0
    gate: bool = False
    gate_passed: bool | None = None
    gate_reason: str = ""
    outcome: str = ""
    reason: str = ""

    @property
    def percent(self) -> int:
        """Return the new version's percent now."""
        if self.step < 0 or (self.state is State.OVER and self.outcome != "done"):
            return self.before.get(self.version, 0)
        return self.steps[self.step]

    def weights(self) -> dict[str, int]:
        """Return the route's percents now; what the new version takes is taken from all others alike."""
        if self.percent == self.before.get(self.version, 0):
            return dict(self.before)
        others = {
            name: share for name, share in self.before.items() if name != self.version and share
        }
        left, total = 100 - self.percent, sum(others.values())
        found = {name: share * left // total for name, share in others.items()} if total else {}
        first = next(iter(found), None)
        if first is not None:
            found[first] += left - sum(found.values())
        return {**dict.fromkeys(self.before, 0), **found, self.version: self.percent}


@dataclasses.dataclass(frozen=True, slots=True)
class Seen:
    """What is known now.

    Attributes:
        serving: replicas of the new version that take requests; `wanted`: how many there should be.
        quarantined: why the new version is not started any more, "" if it is.
        verdict: what the comparison has proven, "" if nothing.
        requests: of the new version, seen since the step began.
    """

    now_us: int
    serving: int
    wanted: int
    quarantined: str = ""
    verdict: str = ""
    requests: int = 0


def after(rollout: Rollout, seen: Seen) -> Rollout:
    """Return the rollout as it should be now; the same one if nothing moves."""
    held_s = (seen.now_us - rollout.since_us) / 1_000_000
    if rollout.state is State.OVER:
        return rollout
    if seen.quarantined:
        return back(
            rollout, f"{rollout.version} does not start: {seen.quarantined}", seen.now_us, "failed"
        )
    if rollout.gate_passed is False:
        return back(rollout, f"the quality gate says no: {rollout.gate_reason}", seen.now_us)
    if rollout.state is State.WARMING:
        return _warming(rollout, seen, held_s)
    if seen.verdict:
        return back(rollout, seen.verdict, seen.now_us)
    if not seen.serving:
        return back(rollout, f"no replica of {rollout.version} serves any more", seen.now_us)
    if rollout.state is State.KEEPING:
        return _keeping(rollout, seen, held_s)
    if _passed(rollout, seen) and rollout.step + 1 < len(rollout.steps):
        return _step(rollout, seen)
    return rollout


def stays(rollout: Rollout, seen: Seen) -> bool:
    """Whether nothing more comes of itself: its last step is below 100 percent, and has held."""
    stepping = rollout.state is State.STEPPING and rollout.step + 1 == len(rollout.steps)
    return stepping and _passed(rollout, seen)


def _passed(rollout: Rollout, seen: Seen) -> bool:
    """Whether the step has held as long as it should, with the requests and the verdict that it waits for."""
    held = (seen.now_us - rollout.since_us) / 1_000_000 >= rollout.hold_s
    judged = not rollout.gate or rollout.gate_passed is not None
    return held and judged and seen.requests >= rollout.least


def _warming(rollout: Rollout, seen: Seen, held_s: float) -> Rollout:
    if seen.serving >= max(1, seen.wanted):
        return _step(rollout, seen)
    if held_s <= rollout.warm_s:
        return rollout
    up = f"{seen.serving} of {seen.wanted} replicas of {rollout.version}"
    return back(rollout, f"{up} are up after {held_s:.0f} s", seen.now_us, "failed")


def _keeping(rollout: Rollout, seen: Seen, held_s: float) -> Rollout:
    if held_s < rollout.keep_s:
        return rollout
    reason = f"{rollout.version} has held all requests for {held_s:.0f} s"
    return dataclasses.replace(
        rollout, state=State.OVER, outcome="done", since_us=seen.now_us, reason=reason
    )


def waits_for(rollout: Rollout, seen: Seen) -> str:
    """Return what a rollout waits for, as one line."""
    held_s = (seen.now_us - rollout.since_us) / 1_000_000
    if rollout.state is State.OVER:
        return rollout.reason
    if rollout.state is State.WARMING:
        return f"{seen.serving} of {max(1, seen.wanted)} replicas of {rollout.version} are up"
    if rollout.state is State.KEEPING:
        return f"the versions before are kept for {max(0.0, rollout.keep_s - held_s):.0f} s more"
    if held_s < rollout.hold_s:
        return f"{rollout.percent} percent hold for {rollout.hold_s - held_s:.0f} s more"
    if seen.requests < rollout.least:
        return f"{seen.requests} of {rollout.least} requests have been seen at {rollout.percent} percent"
    if rollout.gate and rollout.gate_passed is None:
        return "the quality gate's verdict"
    return f"stays at {rollout.percent} percent: `fctl rollout {rollout.model} {rollout.version}` goes on"


def back(rollout: Rollout, reason: str, now_us: int, outcome: str = "rolled back") -> Rollout:
    """Return the rollout rolled back: the route is as before."""
    return dataclasses.replace(
        rollout, state=State.OVER, outcome=outcome, since_us=now_us, reason=reason
    )


def _step(rollout: Rollout, seen: Seen) -> Rollout:
    step = rollout.step + 1
    percent = rollout.steps[step]
    state = State.KEEPING if percent == 100 else State.STEPPING
    reason = f"{percent} percent on {rollout.version}"
    return dataclasses.replace(rollout, state=state, step=step, since_us=seen.now_us, reason=reason)
