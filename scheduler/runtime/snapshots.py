"""Takes the picture that a plan is made from, and the view that gateways get."""

import collections
import dataclasses
import datetime
import math
import statistics
from collections.abc import Iterable, Mapping

from scheduler.contracts import clock, fleet, ids, observed, slurm
from scheduler.core import forecast, grounds, lending, rollouts, snapshot, windows
from scheduler.runtime import entries, forecasts, live, settings
from scheduler.runtime.registry import wishes

TOKENS_PER_S = 1_000.0  # of a replica that does batch, while none has said


def collect(
    picture: live.Live,
    time: clock.Clock,
    options: settings.Settings,
    zone: datetime.tzinfo = datetime.UTC,
    where: grounds.Grounds | None = None,
) -> snapshot.Snapshot:
    """Return the live picture as one frozen snapshot.

    Args:
        picture: the leader's.
        time: the clock.
        options: the settings.
        zone: whose clock forecasts follow.
        where: the nodes on which leases may start.
    """
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
                park_gb=max(0.0, _parkable_gb(entry.lease, options) - parked[lease_id]),
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
                budget_s=_budget_s(picture, known),
                told_s=now - max(known.told, known.ordered),
                away_s=None if known.away is None else now - known.away,
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
        rates=picture.rates.per_s(),
        standard_rates=picture.standard_rates.per_s(),
        version_rates=picture.version_rates.per_s(),
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
        where=where or grounds.Grounds(),
    )


def _bounded(picture: live.Live) -> tuple[snapshot.Deployment, ...]:
    """Return the deployments, with what was measured of starts and their part of the model's traffic."""
    found: list[snapshot.Deployment] = []
    for deployment in picture.deployments:
        route = picture.routes.get(deployment.spec.model)
        rolls = any(_rolls(rollout, deployment.key) for rollout in picture.rollouts)
        traffic, percent = _traffic(route, deployment.spec.version)
        batch_share = None
        if rolls:
            # Either version may have to take all requests within seconds; batch lines stay by percent.
            batch_share = percent / 100 if traffic is snapshot.Traffic.PERCENT else 0.0
            traffic, percent = snapshot.Traffic.PERCENT, 100
        bounds, share = deployment.scaling, percent / 100
        if bounds is not None:
            applied = picture.starts.applied(deployment.key, bounds)
            bounds = dataclasses.replace(applied, share=share)
        held = deployment.hold_batch or picture.standing.batch is not None
        found.append(
            dataclasses.replace(
                deployment,
                scaling=bounds,
                hold_batch=held,
                traffic=traffic,
                share=share,
                batch_share=batch_share,
            )
        )
    return tuple(found)


def _traffic(route: fleet.Route | None, version: str) -> tuple[snapshot.Traffic, int]:
    """Return how requests come to a version, and the percent of its model's that it answers or copies."""
    percent = route.weights.get(version, 0) if route is not None else 100
    if route is None or percent:
        return snapshot.Traffic.PERCENT, percent
    if any(pool.version == version for pool in route.pools):
        return snapshot.Traffic.POOL, 100
    if version == route.shadow:
        return snapshot.Traffic.SHADOW, route.shadow_percent
    return snapshot.Traffic.PERCENT, 0


def _budget_s(picture: live.Live, known: entries.ReplicaEntry) -> float:
    """Return the seconds in which it should serve (again), 0 where it does, or is not to."""
    if known.replica.state is fleet.ReplicaState.SERVING or (known.served and known.away is None):
        return 0.0
    spec = known.replica.spec
    woken = known.replica.state is fleet.ReplicaState.ASLEEP or known.replica.incarnation > 1
    return picture.starts.budget_s((spec.model, spec.version), woken=woken)


def _parkable_gb(lease: fleet.Lease, options: settings.Settings) -> float:
    """Return the host memory that a lease was asked with for parked models (`lease.Renderer`)."""
    return lease.hardware.whole(lease.gpus) * options.park_gb_per_gpu


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
    """Return each model's batch work, in seconds of one replica at the pace of those that do batch now.

    Lines that name an adapter are its model's work: that model's replicas answer them.
    """
    found: dict[str, lending.Backlog] = {}
    for name, work in picture.batch_work.items():
        model = name if name in picture.routes else name.rpartition(":")[0] or name
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
        before = found.get(model, lending.Backlog(0.0))
        found[model] = lending.Backlog(
            before.work_s + work.output_tokens / pace,
            min(before.deadline_s, left_s),
            before.lines + work.lines,
        )
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


def demand(
    picture: live.Live, now: float, options: settings.Settings
) -> dict[str, observed.Demand]:
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


def _told(picture: live.Live, route: fleet.Route, now_us: int) -> fleet.Route:
    """Return a route with what is known at run time: faults of adapters, and how long a start takes."""
    cold = picture.starts.cold()
    took = [
        cold.get((route.model, version), 0.0) for version, share in route.weights.items() if share
    ]
    start_s = math.ceil(max(took, default=0.0))
    faults = picture.adapters.faults.get(route.model)
    wakes = tuple(
        each.spec.version
        for each in picture.deployments
        if each.spec.model == route.model
        and each.scaling is not None
        and each.quarantined_until_us <= now_us
        and route.weights.get(each.spec.version)
    )
    if not faults and not start_s and not wakes:
        return route
    return dataclasses.replace(
        route, start_s=start_s, wakes=wakes, adapter_faults=faults or route.adapter_faults
    )


def view(picture: live.Live, time: clock.Clock, options: settings.Settings) -> fleet.FleetView:
    """Return what gateways should know: replicas of leases whose agents speak."""
    now, now_us = time.monotonic(), time.wall_us()
    speaking: set[ids.LeaseId] = {
        lease_id
        for lease_id, entry in picture.leases.items()
        if entry.seen is not None and now - entry.seen <= options.agent_silent_s
    }
    return fleet.FleetView(
        epoch=picture.epoch,
        revision=picture.revision,
        routes={model: _told(picture, route, now_us) for model, route in picture.routes.items()},
        replicas=tuple(
            known.replica
            for known in picture.replicas.values()
            if known.replica.lease_id in speaking
        ),
        gateways=picture.gateways.live(now),
    )


def _merged(model: str, parts: Iterable[observed.Demand]) -> observed.Demand:
    """Return the sum of what several gateways have waiting for one model."""
    waiting: dict[str, int] = {}
    in_flight: dict[str, int] = {}
    oldest = 0.0
    ttft: list[float] = []
    versions: dict[str, observed.VersionDemand] = {}
    for part in parts:
        for tier, count in part.waiting.items():
            waiting[tier] = waiting.get(tier, 0) + count
        for tier, count in part.in_flight.items():
            in_flight[tier] = in_flight.get(tier, 0) + count
        oldest = max(oldest, part.oldest_wait_s)
        ttft += part.ttft_ms
        for version, one in part.versions.items():
            versions[version] = _sum(versions.get(version, observed.VersionDemand()), one)
    return observed.Demand(model, waiting, in_flight, oldest, tuple(ttft), versions=versions)


def _sum(one: observed.VersionDemand, other: observed.VersionDemand) -> observed.VersionDemand:
    return observed.VersionDemand(
        one.waiting + other.waiting,
        one.in_flight + other.in_flight,
        max(one.oldest_wait_s, other.oldest_wait_s),
        one.arrived + other.arrived,
    )
