"""Interactive time to first token with batch and without, taken in turn, and where the difference goes.

The shared replica is alone: the other nodes are drained, so that no other engine runs on this machine's
cores, as none would on a GPU node's, and it leaves them to gateway and callers first, as on nodes of their
own. Batch is kept off the model (`fctl hold`) for the quiet turns. Callers come in the same numbers and at
the same pace in both.
"""

import dataclasses
import statistics
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tests.bench import reclaim_site, reclaim_trials
from tests.integration.whole import running

ARMS = ("quiet", "filled")
CROWDS = 5  # of one arm's turn
PACE_S = 0.8  # between two crowds of a turn
TOKENS = 4
PARTS: Mapping[str, str] = {
    "way_in": "caller → gateway: connection, and the gateway's own wait for a core",
    "gateway": "gateway: from the request's arrival to its dispatch",
    "seat": "replica: batch aborted until the seat is free",
    "engine": "replica and engine: the step under way, the prompt's own step, back to the gateway",
    "way_out": "gateway → caller",
}


@dataclasses.dataclass
class Arm:
    """What the callers of one arm saw: each one's whole time and its parts, ms."""

    ttft_ms: list[float] = dataclasses.field(default_factory=list)
    parts: list[dict[str, float]] = dataclasses.field(default_factory=list)
    heard: list[reclaim_site.Heard] = dataclasses.field(default_factory=list)
    waits_ms: list[float] = dataclasses.field(default_factory=list)  # for seats, by the replica
    steps_ms: list[float] = dataclasses.field(default_factory=list)  # of the engine, before a crowd
    beside: list[int] = dataclasses.field(default_factory=list)  # batch sequences before a crowd
    failed: int = 0


class Turns:
    """Takes the arms in turn.

    Args:
        house: where.
        callers: of a crowd.
        words: of each caller's prompt; 0: a few.
    """

    def __init__(self, house: reclaim_site.House, callers: int, words: int) -> None:
        self._house = house
        self._callers = callers
        self._words = words

    def measure(self, rounds: int) -> dict[str, Arm]:
        """Return both arms after so many turns each; the one that comes first changes each round."""
        arms = {name: Arm() for name in ARMS}
        since_us = time.time_ns() // 1_000
        self._house.give_way()
        for number in range(rounds):
            for name in ARMS if number % 2 == 0 else reversed(ARMS):
                self._turn(name, arms[name])
        hold(self._house, held=False)
        rows = self._house.attempts(tier="interactive", start_us=str(since_us))
        for arm in arms.values():
            arm.parts = parts(arm.heard, rows, arm.waits_ms)
        return arms

    def _turn(self, name: str, arm: Arm) -> None:
        quiet = name == "quiet"
        hold(self._house, held=quiet)
        reclaim_site.until(lambda: self._at_rest(quiet=quiet), f"the {name} arm", 60)
        (shared,) = self._house.replicas()
        peek = reclaim_site.Peek(self._house, shared)
        before = peek.state()["stats"]["reclaim_ms"]
        for _ in range(CROWDS):
            due = time.monotonic() + PACE_S
            reclaim_site.until(lambda: self._at_rest(quiet=quiet), f"the {name} arm", 60, 0.02)
            time.sleep(max(0.0, due - time.monotonic()))
            stats = peek.state()["stats"]
            arm.steps_ms.append(stats["step_ms"])
            arm.beside.append(stats["batch"])
            crowd = reclaim_site.Crowd(
                self._house, self._house.key, self._callers, TOKENS, words=self._words
            )
            crowd.leave()
            arm.heard += crowd.heard
            arm.ttft_ms += crowd.ttft_ms
            arm.failed += crowd.failed
            after = peek.state()["stats"]["reclaim_ms"]
            arm.waits_ms += reclaim_trials.fresh(before, after)
            before = after
        peek.close()

    def _at_rest(self, *, quiet: bool) -> bool:
        """Return whether the one replica has no caller, and no batch or all that it may have."""
        found = self._house.replicas()
        if len(found) != 1 or not found[0]["stats"]:
            return False
        stats, role = found[0]["stats"], found[0]["role"]
        if stats["interactive"]:
            return False
        batch, room = int(stats["batch"]), int(stats["batch_room"])
        if quiet:
            return bool(role == "interactive") and batch == 0
        return bool(role == "shared") and room == 0 and batch > 0


def hold(house: reclaim_site.House, *, held: bool) -> None:
    """Keep batch off the model, or let it back."""
    house.call("POST", f"/admin/models/{running.MODEL}/{'hold' if held else 'release'}")


def alone(house: reclaim_site.House, *, resume: bool = False) -> None:
    """Drain the nodes on which no lease is, so that no other replica starts; or resume them."""
    used = {node for lease in house.leases() for node in lease["nodes"]}
    others = [name for name in house.site.nodes if resume or name not in used]
    change = ["state=resume"] if resume else ["state=drain", "reason=bench"]
    for name in others:
        subprocess.run(
            ["scontrol", "update", f"nodename={name}", *change],
            env=house.env,
            check=not resume,
            capture_output=True,
        )


def parts(
    heard: Sequence[reclaim_site.Heard],
    rows: Sequence[Mapping[str, Any]],
    waits_ms: Sequence[float],
) -> list[dict[str, float]]:
    """Return each caller's time in its parts, ms, in the order of `PARTS`; they add up to its whole.

    A replica tells its waits for seats without saying whose they were: each caller gets their mean.

    Args:
        heard: the answers.
        rows: usage rows, those of the answers among them.
        waits_ms: the waits for seats of these callers.
    """
    by_id = {row["caller_request_id"]: row for row in rows if row["first_token_us"]}
    known = [(each, by_id[each.caller_id]) for each in heard if each.caller_id in by_id]
    waited = sum(waits_ms) / max(1, len(known))
    found = []
    for each, row in known:
        inside = (row["first_token_us"] - row["started_us"]) / 1_000
        seat = min(inside, waited)
        found.append(
            {
                "way_in": (row["arrived_us"] - each.sent_us) / 1_000,
                "gateway": (row["started_us"] - row["arrived_us"]) / 1_000,
                "seat": seat,
                "engine": inside - seat,
                "way_out": (each.first_us - row["first_token_us"]) / 1_000,
            }
        )
    return found


def told(arms: Mapping[str, Arm]) -> dict[str, Any]:
    """Return the arms' figures: mean of each part, the engine's step and batch beside."""
    return {
        name: {
            "parts_ms": {
                part: round(statistics.fmean(each[part] for each in arm.parts), 2) for part in PARTS
            },
            "mean_ms": round(statistics.fmean(arm.ttft_ms), 2),
            "step_ms": round(statistics.median(arm.steps_ms), 2),
            "batch_beside": round(statistics.fmean(arm.beside), 2),
            "failed": arm.failed,
        }
        for name, arm in arms.items()
    }
