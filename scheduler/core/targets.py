"""How many replicas of each deployment there should be: what interactive callers need, and what is lent.

The need comes first, within the fleet's GPUs; whatever they leave is lent to batch work.
"""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Protocol

from scheduler.contracts import fleet
from scheduler.core import autoscale, floors, forecast, ladder, lending, members, snapshot, traffic

HORIZON = 1.5  # a start may take so much longer than it usually does
UNKNOWN_START_S = 300.0  # until one has been measured
LEVEL = (1.0, 1.5)  # how far today's rate against its forecast moves what is still to come


class Settings(autoscale.Settings, Protocol):
    """What targets need to be told."""

    @property
    def rungs(self) -> Sequence[int]:
        """Rungs of the ladder that may be used."""
        ...

    @property
    def node_gpus(self) -> int:
        """GPUs of a node; 0: not known, so no lease spans nodes."""
        ...

    @property
    def use_forecast(self) -> bool:
        """Whether history may ask for capacity ahead of time."""
        ...

    @property
    def lend_every_s(self) -> float:
        """Seconds between two moves of batch shares."""
        ...

    @property
    def min_run_s(self) -> float:
        """Seconds that a lent replica runs at least before its share may move."""
        ...

    @property
    def stats_stale_s(self) -> float:
        """Age in seconds from which stats are not used."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """What one deployment should have: `need` for interactive callers, `lent` for batch, and why.

    Attributes:
        borrowed: of the need, what its own replicas in backfill leases cover: their role turns (rung 1),
            so that no lease has to be taken back for it (rung 3). Only where leases live apart.
        signal: what the need was worked out from; None where it is a fixed number.
    """

    need: int
    lent: int
    reason: str
    borrowed: int = 0
    signal: autoscale.Signal | None = None

    @property
    def total(self) -> int:
        """Return all replicas."""
        return self.need + self.lent


@dataclasses.dataclass(frozen=True, slots=True)
class Targets:
    """All targets, and what to remember for the next plan."""

    of: Mapping[members.Key, Target]
    scale_memory: Mapping[members.Key, autoscale.Memory]
    lent_at: float | None
    notes: tuple[str, ...]


def decide(
    snap: snapshot.Snapshot,
    settings: Settings,
    counted: Mapping[members.Key, list[snapshot.KnownReplica]],
) -> Targets:
    """Return what each deployment should have."""
    needs: dict[members.Key, autoscale.Need] = {}
    signals: dict[members.Key, autoscale.Signal] = {}
    for deployment in snap.deployments:
        if deployment.scaling is None:
            number, reason = _fixed(snap, deployment, counted.get(deployment.key, []))
            needs[deployment.key] = autoscale.Need(number, reason, autoscale.Memory(number))
        else:
            signal = _signal(snap, settings, deployment, counted.get(deployment.key, []))
            signals[deployment.key] = signal
            before = snap.scale_memory.get(deployment.key)
            needs[deployment.key] = autoscale.need(
                deployment.scaling, signal, before, snap.now, settings
            )
    notes = [_stuck(each) for mine in counted.values() for each in mine if members.stuck(each)]
    for deployment in snap.deployments:
        if deployment.quarantined_until_us > snap.now_us:
            there = len(counted.get(deployment.key, []))
            needs[deployment.key] = _resting(deployment, needs[deployment.key], there, notes)
    fitting = _fit(snap, settings, needs, notes)
    lent, lent_at = _lent(snap, settings, counted, fitting)
    found = {
        key: Target(fitting[key], lent.get(key, 0), needed.reason, signal=signals.get(key))
        for key, needed in needs.items()
    }
    if 1 in settings.rungs and 2 not in settings.rungs:
        kinds = members.kinds(snap)
        for deployment in snap.deployments:
            target = found[deployment.key]
            mine = [each for each in counted.get(deployment.key, []) if not members.stuck(each)]
            borrowed = _short(deployment, target.need, _apart(mine, kinds), target.lent)
            found[deployment.key] = dataclasses.replace(target, borrowed=borrowed)
    memory_of = {
        deployment.key: needs[deployment.key].memory
        for deployment in snap.deployments
        if deployment.scaling is not None
    }
    return Targets(found, memory_of, lent_at, tuple(notes))


def _resting(
    deployment: snapshot.Deployment, needed: autoscale.Need, there: int, notes: list[str]
) -> autoscale.Need:
    """Return what one in quarantine has: nothing of it starts, and nobody else's GPUs wait for it."""
    reason = f"quarantined: {deployment.quarantine_reason}"
    notes.append(f"{members.name(deployment)}: {reason}")
    if there >= needed.replicas:
        return needed
    return dataclasses.replace(
        needed, replicas=there, reason=f"{there} of {needed.replicas}, {reason}"
    )


def _stuck(known: snapshot.KnownReplica) -> str:
    return (
        f"replica {known.replica.replica_id} was told to take callers {known.told_s:.0f} s ago and still "
        "says batch: rung 1 missed its budget"
    )


def _fixed(
    snap: snapshot.Snapshot,
    deployment: snapshot.Deployment,
    mine: Sequence[snapshot.KnownReplica],
) -> tuple[int, str]:
    """Return the replicas of one that follows no demand, and why: a schedule may ask for more."""
    number, model = deployment.replicas, deployment.spec.model
    follows = not deployment.pinned and deployment.traffic is snapshot.Traffic.PERCENT
    answering = sum(members.serves(known) and _answers(known) for known in mine)
    if follows and deployment.share <= 0 and answering > number:
        return answering, f"no request can come to it: {answering} still answer"
    if number and follows:
        lead_s = (snap.starts.get(deployment.key) or UNKNOWN_START_S) * HORIZON
        least, name = floors.floor_of(model, snap.scheduled, lead_s)
        least = traffic.portion(least, deployment.share)
        if least > number:
            return least, f"schedule {name}: floor {least}"
    return number, f"{number} replicas are asked for"


def _signal(
    snap: snapshot.Snapshot,
    settings: Settings,
    deployment: snapshot.Deployment,
    mine: Sequence[snapshot.KnownReplica],
) -> autoscale.Signal:
    scaling = deployment.scaling
    assert scaling is not None  # noqa: S101 - the caller has looked
    model = deployment.spec.model
    part = traffic.part(snap, deployment)
    serving = [known for known in mine if members.serves(known)]
    felt = (
        deployment.traffic is not snapshot.Traffic.SHADOW
    )  # copies have nobody who waits for them
    open_to = [known for known in serving if known.wanted_role is not fleet.Role.BATCH and felt]
    stats = [
        known.replica.stats
        for known in open_to
        if known.replica.stats is not None
        and known.stats_age_s is not None
        and known.stats_age_s <= settings.stats_stale_s
    ]
    newest: Sequence[float] = ()
    if deployment.traffic is snapshot.Traffic.PERCENT and part.in_flight and model in snap.demand:
        newest = snap.demand[model].ttft_ms[-ladder.NEWEST_TTFT :]
    lead_s = scaling.start_s or UNKNOWN_START_S
    least, name = floors.floor_of(model, snap.scheduled, lead_s * HORIZON)
    if deployment.traffic is not snapshot.Traffic.PERCENT:
        least, name = 0, ""  # a schedule asks for those who answer the model's callers by the route
    least = traffic.portion(least, scaling.share)
    standard, standard_rate = traffic.of_standard(snap, model)
    foreseen = _outlook(snap, model, lead_s) if settings.use_forecast else None
    return autoscale.Signal(
        serving=len(serving),
        coming=len(mine) - len(serving),
        answering=sum(_answers(known) for known in serving),
        waiting=part.waiting,
        in_flight=part.in_flight,
        standard=standard,
        oldest_wait_s=part.oldest_wait_s,
        ttft_ms=statistics.median(newest) if newest else 0.0,
        itl_ms=statistics.median(stat.step_ms for stat in stats) if stats else 0.0,
        kv=max((_interactive_kv(stat) for stat in stats), default=0.0),
        rate=part.rate,
        standard_rate=standard_rate,
        outlook=None if foreseen is None else foreseen * part.of_model,
        held_s=snap.held_s.get(model, 0.0),
        floor=least,
        floor_name=name,
        seats=max(1, deployment.spec.seats),
        ttft_slo_ms=deployment.spec.ttft_slo_ms,
        itl_slo_ms=deployment.spec.itl_slo_ms,
    )


def _answers(known: snapshot.KnownReplica) -> bool:
    return known.replica.stats is not None and known.replica.stats.interactive > 0


def _interactive_kv(stat: fleet.ReplicaStats) -> float:
    held = stat.interactive + stat.batch
    return stat.kv_utilisation * stat.interactive / held if held else 0.0


def _outlook(snap: snapshot.Snapshot, model: str, lead_s: float) -> float | None:
    """Return what the forecast holds possible until a replica that is started now is warm."""
    rate = snap.rates.get(model)
    curve = snap.curves.get(model)
    if curve is None or snap.week_s is None:
        return None
    ahead = curve.ahead(snap.week_s, lead_s * HORIZON + forecast.SLOT_S / 3)
    if ahead is None or ahead.sure < forecast.TRUSTED:
        return None
    here = curve.at(snap.week_s)
    level = 1.0
    if rate is not None and here is not None and here.mean > 0:
        level = min(LEVEL[1], max(LEVEL[0], rate / here.mean))
    return max(ahead.upper, ahead.mean * level)


def _fit(
    snap: snapshot.Snapshot,
    settings: Settings,
    needs: Mapping[members.Key, autoscale.Need],
    notes: list[str],
) -> dict[members.Key, int]:
    """Cut the needs to the fleet's GPUs: callers' floors, then batch's, then everybody by the same share."""
    sizes = {each.key: members.gpus(each.spec, settings.node_gpus) for each in snap.deployments}
    wanted = {key: each.replicas for key, each in needs.items()}
    total = sum(wanted[key] * sizes[key] for key in wanted)
    kept = {
        each.key: min(
            wanted[each.key],
            each.scaling.least(used=True) if each.scaling else wanted[each.key],
        )
        for each in snap.deployments
    }
    floors_gpus = sum(kept[key] * sizes[key] for key in kept)
    batch = sum(_batch_floor(snap, each) * sizes[each.key] for each in snap.deployments)
    gpus = snap.gpus - max(0, min(batch, snap.gpus - floors_gpus))
    if not snap.gpus or total <= gpus:
        return wanted
    over = sum((wanted[key] - kept[key]) * sizes[key] for key in wanted)
    left = max(0, gpus - floors_gpus)
    share = left / over if over else 0.0
    for key, asked in wanted.items():
        kept[key] += int((asked - kept[key]) * share)
    left = gpus - sum(kept[key] * sizes[key] for key in kept)
    # What rounding down has left goes to who lacks the largest part, as long as a replica of its fits.
    while True:
        short = [key for key in kept if kept[key] < wanted[key] and 0 < sizes[key] <= left]
        if not short:
            break
        worst = min(short, key=lambda key: (kept[key] / wanted[key], key))
        kept[worst] += 1
        left -= sizes[worst]
    apart = f", {snap.gpus - gpus} of them batch's floor" if gpus < snap.gpus else ""
    notes.append(
        f"{total} GPUs are needed and the fleet has {snap.gpus}{apart}: everybody gets {share:.0%}"
    )
    return kept


def _batch_floor(snap: snapshot.Snapshot, deployment: snapshot.Deployment) -> int:
    """Return the replicas that are batch's whatever callers need; of one in quarantine nothing starts."""
    resting = deployment.quarantined_until_us > snap.now_us
    if deployment.scaling is None or deployment.hold_batch or resting:
        return 0
    return deployment.scaling.batch_floor


def _lent(
    snap: snapshot.Snapshot,
    settings: Settings,
    counted: Mapping[members.Key, list[snapshot.KnownReplica]],
    needs: Mapping[members.Key, int],
) -> tuple[Mapping[members.Key, int], float | None]:
    sizes = {each.key: members.gpus(each.spec, settings.node_gpus) for each in snap.deployments}
    held = snap.gpus or sum(
        each.lease.hardware.whole(each.lease.gpus)
        for each in snap.leases
        if each.lease.state is fleet.LeaseState.RUNNING
    )
    kinds = members.kinds(snap)
    swaps = 2 in settings.rungs
    wants: list[lending.Want] = []
    for deployment in snap.deployments:
        scaling, key = deployment.scaling, deployment.key
        if scaling is None or deployment.hold_batch:
            continue
        mine = counted.get(key, [])
        if swaps:
            extra = max(0, len(mine) - needs[key])
        else:
            mine = [
                known for known in mine if kinds[known.replica.lease_id] is fleet.LeaseKind.BACKFILL
            ]
            extra = len(mine)
        resting = deployment.quarantined_until_us > snap.now_us
        if resting and not extra:
            continue  # nothing of it could be started for batch either
        short = 0
        if 1 in settings.rungs and not swaps:
            short = _short(deployment, needs[key], _apart(counted.get(key, []), kinds))
        young = sum(known.age_s < settings.min_run_s for known in mine)
        # Batch goes by the percents too: lines that name a version without one have its floor.
        work = snap.backlogs.get(deployment.spec.model, lending.Backlog(0.0))
        work = dataclasses.replace(work, work_s=work.work_s * traffic.of_batch(deployment))
        wants.append(
            lending.Want(
                key=key,
                gpus=max(1, sizes[key]),
                backlog=work,
                current=extra,
                floor=_batch_floor(snap, deployment),
                minimum=0 if resting else scaling.batch_minimum,
                maximum=extra if resting else scaling.batch_maximum,
                young=min(extra, young),
                short=short,
            )
        )
    spare = max(0, held - sum(needs[key] * sizes[key] for key in needs))
    settled = snap.lent_at is None or snap.now - snap.lent_at >= settings.lend_every_s
    given = lending.lend(spare, wants, settled=settled)
    moved = any(given[want.key] != want.current for want in wants)
    return given, snap.now if settled and moved else snap.lent_at


def _apart(
    mine: Sequence[snapshot.KnownReplica], kinds: Mapping[str, fleet.LeaseKind]
) -> tuple[int, int]:
    """Return how many of these are in serve leases and how many in backfill leases."""
    backfill = sum(kinds[known.replica.lease_id] is fleet.LeaseKind.BACKFILL for known in mine)
    return len(mine) - backfill, backfill


def _short(
    deployment: snapshot.Deployment, need: int, apart: tuple[int, int], lent: int = 0
) -> int:
    """Return how many replicas callers lack in serve leases that those in backfill leases can stand in for.

    A role turns at once, a lease that is taken back and asked for anew costs a cold start on the very same
    GPUs: rung 1 goes first. What has to stay warm whatever comes stands in leases that Slurm protects.
    """
    if deployment.scaling is None:
        return 0
    serve, backfill = apart
    protected = max(serve, deployment.scaling.least(used=True))
    return max(0, min(need - protected, backfill - lent))
