"""Takes the picture that a plan is made from, and polls Slurm for it."""

import asyncio
import collections
import dataclasses
import datetime
import logging
import math
import statistics
from collections.abc import Iterable, Mapping
from concurrent import futures

from scheduler.contracts import clock, fleet, ids, slurm
from scheduler.core import forecast, lending, rollouts, snapshot, windows
from scheduler.runtime import forecasts, live, settings
from scheduler.runtime.registry import wishes

log = logging.getLogger(__name__)
TOKENS_PER_S = 1_000.0  # of a replica that does batch, while none has said
HURRY_S = 0.5  # between polls while a lease is on its way in or out
RESERVED_S = 10.0  # between two looks at Slurm's reservations, which admins make hours ahead


_Answer = tuple[tuple[slurm.Job, ...], tuple[slurm.Node, ...], tuple[slurm.Reservation, ...] | None]


class Poller:
    """Asks Slurm for all jobs and nodes, one poll at a time, in a thread, never in the tick's way.

    Attributes:
        error: why the last poll got no answer, "" if it did.
        unread: why reservations are as they were last read, "" if they are new.
    """

    def __init__(
        self, port: slurm.SlurmPort, picture: live.Live, time: clock.Clock, every_s: float
    ) -> None:
        self._port = port
        self._live = picture
        self._time = time
        self._every_s = every_s
        self._due = float("-inf")
        self._reserved_due = float("-inf")
        self._running: asyncio.Task[None] | None = None
        # Its own thread: a controller that hangs must not take those that write the registry.
        self._thread = futures.ThreadPoolExecutor(1, "slurm-poll")
        self.error = ""
        self.unread = ""

    def kick(self) -> None:
        """Start a poll if one is due and none is under way."""
        if self._running is not None and not self._running.done():
            return
        if self._time.monotonic() >= self._due:
            self._running = asyncio.create_task(self.poll())

    def soon(self) -> None:
        """Make the next poll due now: something in Slurm has just changed."""
        self._due = float("-inf")

    async def poll(self) -> None:
        """Ask once and give the answer to the live picture."""
        began = self._time.monotonic()
        self._due = began + (min(HURRY_S, self._every_s) if self._hurry() else self._every_s)
        try:
            here = asyncio.get_running_loop()
            reserved = began >= self._reserved_due
            jobs, nodes, kept = await here.run_in_executor(self._thread, self._ask, reserved)
        except slurm.SlurmError as error:
            if not self.error:
                log.warning("Slurm does not answer, leases are left as they are: %s", error)
            self.error = str(error)
            self._live.absorb_poll(None, (), began)
            return
        if self.error:
            log.info("Slurm answers again")
        self.error = ""
        if reserved:
            self._reserved_due = began + RESERVED_S
        if kept is not None:
            self._live.reservations = kept
        self._live.absorb_poll(jobs, nodes, began)

    async def close(self) -> None:
        """Leave the poll under way, if there is one."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait([self._running])
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _ask(self, reserved: bool) -> _Answer:
        """Ask for all in one go: reservations only if they are due."""
        kept = self._reservations() if reserved else None
        return self._port.jobs(), self._port.nodes(), kept

    def _reservations(self) -> tuple[slurm.Reservation, ...] | None:
        """Ask for them; None if they can't be read: one odd reservation must hide no job."""
        try:
            kept = self._port.reservations()
        except slurm.SlurmGarbled as error:
            if not self.unread:
                log.warning("reservations stay as they were last read: %s", error)
            self.unread = str(error)
            return None
        self.unread = ""
        return kept

    def _hurry(self) -> bool:
        moving = {fleet.LeaseState.REQUESTED, fleet.LeaseState.PENDING, fleet.LeaseState.CLOSING}
        return any(entry.lease.state in moving for entry in self._live.leases.values())


def collect(
    picture: live.Live,
    time: clock.Clock,
    options: settings.Settings,
    zone: datetime.tzinfo = datetime.UTC,
) -> snapshot.Snapshot:
    """Return the live picture as one frozen snapshot; ``zone`` is whose clock forecasts follow."""
    now = time.monotonic()
    holding = {entry.replica.lease_id for entry in picture.replicas.values()}
    for entry in picture.leases.values():
        if entry.lease.lease_id in holding or entry.lease.state is not fleet.LeaseState.RUNNING:
            entry.idle_since = now
    parked = _parked_gb(picture)
    return snapshot.Snapshot(
        now=now,
        now_us=time.wall_us(),
        cluster=picture.cluster,
        jobs=picture.jobs,
        poll=picture.polls,
        nodes=picture.nodes,
        settling=not settled(picture, now, options),
        leases=tuple(
            snapshot.HeldLease(
                lease=entry.lease,
                slots=tuple(entry.slots.values()),
                silent_s=None if entry.seen is None else now - entry.seen,
                held_s=now - entry.since,
                idle_s=now - entry.idle_since,
                absent_polls=entry.absent_polls,
                leaving=entry.leaving,
                fresh=picture.polled > entry.since and not entry.submitting,
                left_s=_left_s(entry.lease, time.wall_us()),
                park_gb=max(0.0, entry.lease.gpus * options.park_gb_per_gpu - parked[lease_id]),
                drain_asked=_drained(picture, entry.lease),
            )
            for lease_id, entry in picture.leases.items()
        ),
        ended=frozenset(picture.ended),
        cancels={job_id: now - at for job_id, at in picture.cancels.items()},
        replicas=tuple(
            snapshot.KnownReplica(
                replica=known.replica,
                run=known.run,
                wanted_role=known.wanted_role,
                age_s=now - known.ordered,
                stats_age_s=None if known.stats_at is None else now - known.stats_at,
                drain_asked=known.drain_asked,
                missing_s=0.0 if known.missing_since is None else now - known.missing_since,
                asleep=known.asleep,
                preempt_asked=_asked(picture.standing.preempts.get(known.replica.replica_id)),
            )
            for known in picture.replicas.values()
        ),
        strangers=tuple(
            stranger for entry in picture.leases.values() for stranger in entry.strangers
        ),
        deployments=_bounded(picture),
        demand=demand(picture, now, options),
        failures=dict(picture.failures),
        lease_pause=picture.lease_pause,
        ladder_memory=picture.ladder_memory,
        gpus=options.fleet_gpus,
        rates=picture.rates.by_model(),
        curves=picture.learned.curves,
        held_s=picture.learned.held_s,
        week_s=forecasts.local_s(time.wall_us(), zone) % forecast.WEEK_S,
        scheduled=picture.scheduled,
        closures=closures(picture.reservations, time.wall_us()),
        backlogs=_backlogs(picture, time.wall_us()),
        scale_memory=picture.scale_memory,
        lent_at=picture.lent_at,
        cordoned=frozenset(
            node for node, cordon in picture.cordons.items() if cordon.holds(time.wall_us())
        ),
        starts=picture.starts.cold(),
    )


def _bounded(picture: live.Live) -> tuple[snapshot.Deployment, ...]:
    """Return the deployments, with what was measured of starts and their part of the model's traffic."""
    found: list[snapshot.Deployment] = []
    for deployment in picture.deployments:
        bounds = deployment.scaling
        if bounds is not None:
            route = picture.routes.get(deployment.spec.model)
            percent = route.weights.get(deployment.spec.version, 0) if route is not None else 100
            if any(_rolls(rollout, deployment.key) for rollout in picture.rollouts):
                percent = 100  # either version may have to take all of it within seconds
            bounds = dataclasses.replace(
                picture.starts.applied(deployment.key, bounds), share=percent / 100
            )
        held = deployment.hold_batch or picture.standing.batch is not None
        found.append(dataclasses.replace(deployment, scaling=bounds, hold_batch=held))
    return tuple(found)


def _parked_gb(picture: live.Live) -> Mapping[str, float]:
    """Return the host memory that models parked in each lease take, or will when they have been parked."""
    sizes = {
        deployment.key: deployment.scaling.park_gb
        for deployment in picture.deployments
        if deployment.scaling is not None
    }
    found: dict[str, float] = collections.defaultdict(float)
    for known in picture.replicas.values():
        if known.asleep:
            replica = known.replica
            found[replica.lease_id] += sizes.get((replica.spec.model, replica.spec.version), 0.0)
    return found


def _drained(picture: live.Live, lease: fleet.Lease) -> str:
    """Return who drains a lease, or a node of it, and why."""
    marks = (picture.standing.drains.get(name) for name in (lease.lease_id, *lease.nodes))
    return next((_asked(mark) for mark in marks if mark is not None), "")


def _asked(mark: wishes.Mark | None) -> str:
    return "" if mark is None else mark.told()


def closures(reservations: Iterable[slurm.Reservation], now_us: int) -> tuple[windows.Window, ...]:
    """Return Slurm's reservations as windows, whoever they are for: our leases do not ask for any of them.

    One without nodes keeps licences alone, and one that floats is always as far away.
    """
    return tuple(
        windows.Window(
            f"reservation {kept.name}",
            (kept.starts_us - now_us) / 1_000_000,
            (kept.ends_us - now_us) / 1_000_000,
            frozenset(kept.nodes),
        )
        for kept in reservations
        if kept.nodes and "TIME_FLOAT" not in kept.flags
    )


def _rolls(rollout: rollouts.Rollout, key: tuple[str, str]) -> bool:
    model, version = key
    return rollout.model == model and version in {rollout.version, *rollout.before}


def _backlogs(picture: live.Live, now_us: int) -> dict[str, lending.Backlog]:
    """Return each model's batch work, in seconds of one replica at the pace of those that do batch now."""
    found: dict[str, lending.Backlog] = {}
    for model, work in picture.batch_work.items():
        paces = [
            known.replica.stats.tokens_per_s
            for known in picture.replicas.values()
            if known.replica.spec.model == model
            and known.replica.stats is not None
            and known.replica.stats.batch
            and known.replica.stats.tokens_per_s > 0
        ]
        pace = statistics.median(paces) if paces else TOKENS_PER_S
        left_s = (work.deadline_us - now_us) / 1_000_000 if work.deadline_us else math.inf
        found[model] = lending.Backlog(work.output_tokens / pace, left_s, work.lines)
    return found


def _left_s(lease: fleet.Lease, now_us: int) -> float:
    """Return seconds until a lease's walltime ends, infinity while that is not known."""
    if not lease.started_us or not lease.walltime_s:
        return math.inf
    return lease.walltime_s - (now_us - lease.started_us) / 1_000_000


def settled(picture: live.Live, now: float, options: settings.Settings) -> bool:
    """Return whether a new leader knows enough to act: every agent is back, or had its time."""
    if picture.settled:
        return True
    waited = now - picture.started >= options.adopt_grace_s
    expected = any(
        entry.lease.state is fleet.LeaseState.RUNNING and entry.seen is None
        for entry in picture.leases.values()
    )
    picture.settled = waited or not (picture.jobs is None or expected or _unadopted(picture))
    if picture.settled:
        picture.touch()
    return picture.settled


def _unadopted(picture: live.Live) -> bool:
    """Return whether Slurm runs a lease of ours that the registry does not know yet."""
    return any(
        job.state is slurm.JobState.RUNNING
        and job.stamp is not None
        and job.stamp.cluster == picture.cluster
        and job.stamp.lease_id not in picture.leases
        and job.stamp.lease_id not in picture.ended
        for job in picture.jobs or ()
    )


def demand(picture: live.Live, now: float, options: settings.Settings) -> dict[str, fleet.Demand]:
    """Return what the connected gateways have waiting, by model; empty if none reports."""
    fresh = [
        models
        for at, models in picture.demand.values()
        if now - at <= max(options.stats_stale_s, options.tick_s)
    ]
    if not fresh:
        return {}
    names = {deployment.spec.model for deployment in picture.deployments}
    names |= {name for models in fresh for name in models}
    return {
        name: _merged(name, (models[name] for models in fresh if name in models))
        for name in sorted(names)
    }


def view(picture: live.Live, now: float, options: settings.Settings) -> fleet.FleetView:
    """Return what gateways should know: replicas of leases whose agents speak."""
    speaking: set[ids.LeaseId] = {
        lease_id
        for lease_id, entry in picture.leases.items()
        if entry.seen is not None and now - entry.seen <= options.agent_silent_s
    }
    return fleet.FleetView(
        epoch=picture.epoch,
        revision=picture.revision,
        routes=picture.routes,
        replicas=tuple(
            known.replica
            for known in picture.replicas.values()
            if known.replica.lease_id in speaking
        ),
        gateways=picture.gateways.live(now),
    )


def _merged(model: str, parts: Iterable[fleet.Demand]) -> fleet.Demand:
    """Return the sum of what several gateways have waiting for one model."""
    waiting: dict[str, int] = {}
    in_flight: dict[str, int] = {}
    oldest = 0.0
    ttft: list[float] = []
    for part in parts:
        for tier, count in part.waiting.items():
            waiting[tier] = waiting.get(tier, 0) + count
        for tier, count in part.in_flight.items():
            in_flight[tier] = in_flight.get(tier, 0) + count
        oldest = max(oldest, part.oldest_wait_s)
        ttft += part.ttft_ms
    return fleet.Demand(model, waiting, in_flight, oldest, tuple(ttft))
