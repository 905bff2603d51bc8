"""Rung 1: which replicas take what, model by model.

Of a scaled model's replicas as many as interactive callers need are shared, the others are given to batch.
The ladder turns more of them, one for each run of ticks with pressure, and back after calm.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from scheduler.contracts import fleet, ids
from scheduler.core import actions, ladder, members, snapshot, targets


class Settings(ladder.Settings, Protocol):
    """What roles need to be told."""

    @property
    def stats_stale_s(self) -> float:
        """Age in seconds from which stats are not used."""
        ...

    @property
    def rungs(self) -> Sequence[int]:
        """Rungs of the ladder that may be used."""
        ...


def roles(
    snap: snapshot.Snapshot,
    settings: Settings,
    counted: Mapping[members.Key, list[snapshot.KnownReplica]],
    wanted: Mapping[members.Key, targets.Target],
    notes: list[str],
) -> tuple[list[actions.Action], dict[str, ladder.Memory]]:
    """Return role changes, and the ladder's memory for the next plan."""
    todo: list[actions.Action] = []
    memory: dict[str, ladder.Memory] = {}
    shared: dict[str, _Shared] = {}
    for deployment in snap.deployments:
        role = fleet.Role.INTERACTIVE if deployment.hold_batch else deployment.role
        mine = [known for known in counted.get(deployment.key, ()) if members.serves(known)]
        if role is fleet.Role.SHARED and (deployment.scaling is None or 1 in settings.rungs):
            model = shared.setdefault(deployment.spec.model, _Shared())
            model.mine += mine
            if deployment.scaling is not None and deployment.spec.model in snap.backlogs:
                model.work = True
                lendable = _lendable(snap, settings, mine)
                over = max(0, len(mine) - wanted[deployment.key].need)
                model.lendable |= lendable
                model.lent += min(over, len(lendable))
            continue
        if role is fleet.Role.SHARED:
            continue  # without rung 1 a replica keeps the role that it was started with
        reason = "an admin holds batch" if deployment.hold_batch else f"deployed as {role}"
        todo += [
            actions.SetRole(known.replica.replica_id, role, reason)
            for known in mine
            if known.wanted_role is not role
        ]
    for name, model in shared.items():
        signal = _signal(snap, name, model.mine, settings)
        memory[name] = ladder.step(snap.ladder_memory.get(name), signal, snap.now, settings)
        if signal.predicted_s is None and model.mine:
            notes.append(f"{name}: {_blind(snap, name, settings)}, so roles stay as they are")
            continue
        todo += _turn(model, memory[name].interactive, signal, settings)
    return todo, memory


@dataclasses.dataclass(slots=True)
class _Shared:
    """Replicas of one model whose roles the ladder moves.

    Attributes:
        mine: those that serve.
        lendable: those that may take batch alone.
        lent: how many of them callers do not need.
        work: whether there is batch work for it.
    """

    mine: list[snapshot.KnownReplica] = dataclasses.field(default_factory=list)
    lendable: set[ids.ReplicaId] = dataclasses.field(default_factory=set)
    lent: int = 0
    work: bool = False


def _lendable(
    snap: snapshot.Snapshot, settings: Settings, mine: Sequence[snapshot.KnownReplica]
) -> set[ids.ReplicaId]:
    """Return those that may be batch's alone: all, or those in backfill leases where leases live apart."""
    kinds = members.kinds(snap)
    return {
        known.replica.replica_id
        for known in mine
        if 2 in settings.rungs or kinds[known.replica.lease_id] is fleet.LeaseKind.BACKFILL
    }


_ORDER = {fleet.Role.INTERACTIVE: 0, fleet.Role.SHARED: 1, fleet.Role.BATCH: 2}


def _turn(
    model: _Shared, interactive: int, signal: ladder.Signal, settings: Settings
) -> Iterator[actions.Action]:
    """Give each its role: those that have it keep it, then the cheapest to turn come first.

    Args:
        model: its replicas.
        interactive: how many take interactive work alone. They come out of what batch has first: that is
            what rung 1 is for.
        signal: why.
        settings: the settings.
    """

    def cost(known: snapshot.KnownReplica) -> tuple[int, int, str]:
        stats = known.replica.stats
        return (_ORDER[known.wanted_role], stats.batch if stats else 0, known.replica.replica_id)

    ranked = sorted(model.mine, key=cost)
    batch = max(0, model.lent - interactive)
    lendable = [k.replica.replica_id for k in ranked if k.replica.replica_id in model.lendable]
    lent = set(lendable[len(lendable) - batch :])
    others = [known.replica.replica_id for known in ranked if known.replica.replica_id not in lent]
    alone = set(others[:interactive])
    for known in ranked:
        if known.replica.replica_id in lent:
            role = fleet.Role.BATCH
        else:
            shared = known.replica.replica_id not in alone
            role = fleet.Role.SHARED if shared else fleet.Role.INTERACTIVE
        if known.wanted_role is not role:
            reason = _reason(known.wanted_role, role, signal, settings)
            if known.wanted_role is fleet.Role.BATCH and not model.work:
                reason = "no batch work is left for it"
            yield actions.SetRole(known.replica.replica_id, role, reason)


def _reason(before: fleet.Role, role: fleet.Role, signal: ladder.Signal, settings: Settings) -> str:
    if role is fleet.Role.INTERACTIVE:
        return (
            f"predicted wait {signal.predicted_s or 0.0:.2f} s is over half the TTFT SLO "
            f"({signal.ttft_slo_ms or settings.ttft_slo_ms:g} ms): rung 1"
        )
    if role is fleet.Role.BATCH:
        return "interactive callers do not need it now: lent to batch"
    if before is fleet.Role.BATCH:
        return "interactive callers need it again: rung 1"
    return f"calm for {settings.calm_s:g} s: shared with batch again"


def _blind(snap: snapshot.Snapshot, model: str, settings: Settings) -> str:
    """Say what is missing to predict a model's wait."""
    if _fresh(snap, model, settings):
        return "no gateway has told its demand"
    return (
        f"stale stats: none of its replicas has reported for {settings.stats_stale_s:g} s; gateways "
        "send requests round and batch to seats known to be free"
    )


def _fresh(snap: snapshot.Snapshot, model: str, settings: Settings) -> list[fleet.ReplicaStats]:
    return [
        known.replica.stats
        for known in snap.replicas
        if known.replica.spec.model == model
        and members.serves(known)
        and known.replica.stats is not None
        and known.stats_age_s is not None
        and known.stats_age_s <= settings.stats_stale_s
    ]


def _signal(
    snap: snapshot.Snapshot,
    model: str,
    mine: Sequence[snapshot.KnownReplica],
    settings: Settings,
) -> ladder.Signal:
    fresh = _fresh(snap, model, settings)
    predicted = ladder.predicted_wait(snap.demand.get(model), fresh)
    if mine and not fresh:
        predicted = None
    turned = sum(known.wanted_role is fleet.Role.INTERACTIVE for known in mine)
    # The strictest: a version that promises nothing of its own goes by the site's.
    keys = {known.key for known in mine}
    promised = [
        each.spec.ttft_slo_ms or settings.ttft_slo_ms
        for each in snap.deployments
        if each.key in keys
    ]
    return ladder.Signal(predicted, turned, len(mine), min(promised, default=0.0))
