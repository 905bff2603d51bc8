"""The trials of bench-reclaim, one class of them a rung; times are seconds.

Decision: from the first caller to the plan that orders the rung (rung 0: to the dispatch, which is the
replica's order to its batch). Ready: from the order until the replica says that it is (rung 3: until Slurm
shows the new lease running). First token: from the order to the first token of a caller on what was ordered,
by the gateway's own usage rows.
"""

import contextlib
import dataclasses
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tests.bench import reclaim_site, reclaim_timeline
from tests.integration.whole import running

CALM_S = 300.0  # a busy machine takes minutes to import vLLM
RUNG0_CALLERS, RUNG1_CALLERS, RUNG3_CALLERS = 5, 14, 20
GAP_S = 0.2
MOST_LATE = 3


@dataclasses.dataclass
class Times:
    """What the trials of one rung gave.

    `failed` counts callers without a whole answer, `late` trials that did not come to their end.
    """

    decision_s: list[float] = dataclasses.field(default_factory=list)
    ready_s: list[float] = dataclasses.field(default_factory=list)
    first_token_s: list[float] = dataclasses.field(default_factory=list)
    ttft_ms: list[float] = dataclasses.field(default_factory=list)
    stages: list[dict[str, float]] = dataclasses.field(default_factory=list)  # of rung 3
    failed: int = 0
    trials: int = 0
    late: int = 0

    @contextlib.contextmanager
    def bearing(self) -> Iterator[None]:
        """Bear a trial that takes too long, so that the others' figures are not lost; many are an error."""
        try:
            yield
        except TimeoutError as error:
            self.late += 1
            say(f"a trial did not come to its end: {error}")
            if self.late > MOST_LATE:
                raise


@dataclasses.dataclass(frozen=True)
class Order:
    """An order whose first token is still to be looked up: which replica, and when it was given."""

    replica_id: str
    at_us: float


class Trials:
    """The house at work."""

    def __init__(self, house: reclaim_site.House, key: str) -> None:
        self._house = house
        self._key = key
        self._slurm = reclaim_site.Slurm(house.site)

    def quiet(self, trials: int) -> list[float]:
        """Return times to first token without batch, ms."""
        found: list[float] = []
        for _ in range(trials):
            crowd = reclaim_site.Crowd(self._house, self._key, RUNG0_CALLERS, 4)
            crowd.leave()
            found += crowd.ttft_ms
            time.sleep(GAP_S)
        return found

    def calm(self) -> Sequence[dict[str, Any]]:
        """Wait until batch runs on every GPU, as it did before the first trial; return the replicas.

        What a replica said before is no answer: the broker's list may lag behind the trial that has ended.
        """
        since_us, found = time.time_ns() // 1_000, list[dict[str, Any]]()

        def there() -> bool:
            found[:] = self._house.replicas()
            heard = all((r["stats"] or {}).get("at_us", 0) > since_us for r in found)
            return heard and self._calm(found)

        reclaim_site.until(there, "batch on every GPU", CALM_S)
        return found

    def _calm(self, found: Sequence[Mapping[str, Any]]) -> bool:
        kinds = self._house.kinds()
        if sorted(kinds.values()) != ["backfill", "backfill", "serve"]:
            return False
        told = sorted((r["spec"]["model"], kinds.get(r["lease_id"]), r["role"]) for r in found)
        wanted = [
            (running.MODEL, "backfill", "batch"),
            (running.MODEL, "serve", "shared"),
            (reclaim_site.DIGEST, "backfill", "batch"),
        ]
        return told == wanted and all(_full(replica) for replica in found)

    def rung0(self, trials: int) -> Times:
        """As many callers as one shared replica has to abort batch for."""
        found = Times()
        (shared,) = (r for r in self.calm() if r["role"] == "shared")
        peek = reclaim_site.Peek(self._house, shared)
        before = peek.state()["stats"]["reclaim_ms"]
        since_us = time.time_ns() // 1_000
        for trial in range(trials):
            self.calm()
            crowd = reclaim_site.Crowd(self._house, self._key, RUNG0_CALLERS, 4)
            crowd.leave()
            after = peek.state()["stats"]["reclaim_ms"]
            found.ready_s += [ms / 1_000 for ms in fresh(before, after)]
            before = after
            self._note(found, crowd, trial, trials, "rung 0")
        peek.close()
        for row in self._rows(since_us):
            found.decision_s.append((row["started_us"] - row["arrived_us"]) / 1e6)
            found.first_token_s.append((row["first_token_us"] - row["started_us"]) / 1e6)
        return found

    def rung1(self, trials: int, seats: Times) -> Times:
        """More callers than one replica has seats: the one that batch was lent turns.

        They go on until it has: a fast engine answers a single round before the planner looks twice.

        Its seats are all batch's at that moment, so that each caller it gets is a trial of rung 0 as well.

        Args:
            trials: how many.
            seats: the times of rung 0; what the turned replica says of its seats is added.
        """
        found, orders = Times(), list[Order]()
        began_us = time.time_ns() // 1_000
        for trial in range(trials):
            with found.bearing():
                crowd = self._turn(found, orders, seats)
                self._note(found, crowd, trial, trials, "rung 1")
        found.first_token_s = first_tokens(orders, self._rows(began_us))
        return found

    def _turn(self, found: Times, orders: list[Order], seats: Times) -> reclaim_site.Crowd:
        """One trial of rung 1; returns its callers, who have left."""
        (lent,) = (
            r for r in self.calm() if r["spec"]["model"] == running.MODEL and r["role"] == "batch"
        )
        with contextlib.closing(reclaim_site.Peek(self._house, lent)) as peek:
            before = peek.state()["stats"]["reclaim_ms"]
            crowd = reclaim_site.Crowd(self._house, self._key, RUNG1_CALLERS, 40, again=True)
            try:
                ready_us = reclaim_site.until(
                    lambda: peek.state()["role"] != "batch", "role turned", 20, reclaim_site.POLL_S
                )
            finally:
                crowd.leave()
            after = peek.state()["stats"]["reclaim_ms"]
        seats.ready_s += [ms / 1_000 for ms in fresh(before, after)]
        order = self._ordered(crowd.began_us, "SetRole", "rung 1", lent["replica_id"])
        found.decision_s.append((order["at_us"] - crowd.began_us) / 1e6)
        found.ready_s.append((ready_us - order["at_us"]) / 1e6)
        orders.append(Order(lent["replica_id"], order["at_us"]))
        return crowd

    def rung3(self, to_first_token: bool, found: Times, orders: list[Order]) -> None:
        """More callers than the model has seats anywhere: another model's lease is taken back.

        Args:
            to_first_token: keep the callers until one is answered by a replica in the new lease.
            found: the trial's times are added there.
            orders: the order whose first token is to be looked up is added there.
        """
        self.calm()
        self._house.give_way()
        held = self._slurm.running("serve")
        known = {lease["lease_id"] for lease in self._house.leases()}
        crowd = reclaim_site.Crowd(self._house, self._key, RUNG3_CALLERS, 64, again=True)
        try:
            ready_us = reclaim_site.until(
                lambda: bool(self._slurm.running("serve") - held),
                "new serve lease",
                60,
                reclaim_site.POLL_S,
            )
            (new,) = self._slurm.running("serve") - held
            order = self._ordered(crowd.began_us, "CloseLease", "rung 3")
            if to_first_token:
                orders.append(Order(self._answering(known), order["at_us"]))
        finally:
            crowd.leave()
        order_us = self._stages(found, order, ready_us, new)
        found.decision_s.append((order_us - crowd.began_us) / 1e6)
        found.ready_s.append((ready_us - order_us) / 1e6)
        self._note(found, crowd, found.trials, 0, "rung 3")

    def _stages(self, found: Times, order: Mapping[str, Any], ready_us: float, new: str) -> float:
        """Note what the logs say of the time from an order to its lease; return when it was, in µs."""
        closed = next(
            action["what"]
            for action in order["actions"]
            if action["act"] == "CloseLease" and "rung 3" in action["what"]
        )
        lease_id = closed.partition("lease_id=")[2].split()[0].rstrip(":")
        (lease,) = (each for each in self._house.leases(ended=True) if each["lease_id"] == lease_id)
        folder = self._house.state / "leases" / lease_id
        logs = {
            "agent": reclaim_timeline.read(folder, "job-*.log"),
            "slot": reclaim_timeline.read(folder / "logs", "*.s?.log"),
            "slurmctld": reclaim_timeline.read(self._house.site.logs, "slurmctld.log"),
        }
        jobs = (str(lease["slurm_job_id"]), new)
        at = reclaim_timeline.ordered(order["at_us"] / 1e6, logs["agent"])
        stages = reclaim_timeline.stages(at, ready_us / 1e6, jobs, logs)
        if stages:
            found.stages.append(stages)
        else:
            say(f"rung 3: the logs do not tell how job {jobs[0]} gave way to {new}")
        return at * 1e6

    def _answering(self, known: set[str]) -> str:
        """Wait for a replica in a new lease that has an interactive caller; return its id."""
        names: list[str] = []

        def there() -> bool:
            names[:] = [
                str(replica["replica_id"])
                for replica in self._house.replicas()
                if replica["lease_id"] not in known
                and (replica["stats"] or {}).get("interactive", 0) > 0
            ]
            return bool(names)

        reclaim_site.until(there, "caller answered in the new lease", 120, 0.2)
        return names[0]

    @contextlib.contextmanager
    def spike(self) -> Iterator[None]:
        """Have as many callers as make both replicas of the model busy, without need of a lease."""
        self.calm()
        crowd = reclaim_site.Crowd(self._house, self._key, RUNG1_CALLERS, 64, again=True)
        try:
            reclaim_site.until(self._turned, "both replicas busy with callers", 60)
            yield
        finally:
            crowd.leave()

    def _turned(self) -> bool:
        return all(
            replica["role"] != "batch" and (replica["stats"] or {}).get("interactive", 0) > 0
            for replica in self._house.replicas()
            if replica["spec"]["model"] == running.MODEL
        )

    def first_tokens(self, orders: Sequence[Order], since_us: int) -> list[float]:
        """Return seconds from each order to the first token on its replica."""
        return first_tokens(orders, self._rows(since_us))

    def _ordered(self, since_us: int, act: str, word: str, about: str = "") -> dict[str, Any]:
        """Return the first plan that holds an action of a kind, with these words in it.

        A replica may have its role before the plan that gave it is in the broker's list.
        """
        found: list[dict[str, Any]] = []

        def told() -> bool:
            found.extend(
                plan
                for plan in self._house.plans(since_us)
                for action in plan["actions"]
                if action["act"] == act and word in action["what"] and about in action["what"]
            )
            return bool(found)

        reclaim_site.until(told, f"plan since the spike with {act} and {word!r}", 5, 0.05)
        return found[0]

    def _rows(self, since_us: int) -> list[dict[str, Any]]:
        """Return the usage rows of callers since a moment."""
        rows = self._house.attempts(tier="interactive", start_us=str(since_us))
        return [row for row in rows if row["first_token_us"] and row["replica_id"]]

    def _note(
        self, found: Times, crowd: reclaim_site.Crowd, trial: int, trials: int, name: str
    ) -> None:
        found.trials += 1
        found.failed += crowd.failed
        found.ttft_ms += crowd.ttft_ms
        if trials == 0 or trial % 20 == 19 or trial + 1 == trials:
            last = f"decision {found.decision_s[-1]:.2f} s, " if found.decision_s else ""
            ready = f"ready {found.ready_s[-1]:.3f} s" if found.ready_s else ""
            say(f"{name}: {found.trials} trials; the last one: {last}{ready}")


def _full(replica: Mapping[str, Any]) -> bool:
    """Return whether batch has every seat that it may have: a shared replica keeps some for arrivals."""
    stats = replica["stats"] or {}
    if replica["role"] == "batch":
        return int(stats.get("batch", 0)) >= reclaim_site.SEATS - 1  # one is between two lines
    return stats.get("batch_room") == 0


def fresh(before: Sequence[float], after: Sequence[float]) -> list[float]:
    """Return what came to a list that keeps only its newest entries."""
    for count in range(len(after) + 1):
        kept = len(after) - count
        if kept <= len(before) and list(before[len(before) - kept :]) == list(after[:kept]):
            return list(after[kept:])
    return list(after)


def first_tokens(orders: Sequence[Order], rows: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return seconds from each order to the first token of a caller on its replica; none: left out."""
    found: list[float] = []
    for order in orders:
        mine = [
            row["first_token_us"]
            for row in rows
            if row["replica_id"] == order.replica_id and row["first_token_us"] > order.at_us
        ]
        if mine:
            found.append((min(mine) - order.at_us) / 1e6)
    return found


def say(text: str) -> None:
    """Tell how far it is."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)
