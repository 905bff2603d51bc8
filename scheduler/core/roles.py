"""Rung 1: which replicas take what, model by model.

Of a scaled model's replicas as many as interactive callers need are shared, the others are given to batch.
The ladder turns more of them, one for each run of ticks with pressure, and back after calm.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from scheduler.contracts import fleet
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
    shared: dict[str, list[snapshot.KnownReplica]] = {}
    lent: dict[str, int] = {}
    for deployment in snap.deployments:
        role = fleet.Role.INTERACTIVE if deployment.hold_batch else deployment.role
        mine = [known for known in counted.get(deployment.key, ()) if members.serves(known)]
        if role is fleet.Role.SHARED and (deployment.scaling is None or 1 in settings.rungs):
            model = deployment.spec.model
            shared.setdefault(model, []).extend(mine)
            if deployment.scaling is not None and model in snap.backlogs:
                lent[model] = lent.get(model, 0) + max(
                    0, len(mine) - max(1, wanted[deployment.key].need)
                )
            continue
        if role is fleet.Role.SHARED:
            continue  # without rung 1 a replica keeps the role that it was started with
        reason = "an admin holds batch" if deployment.hold_batch else f"deployed as {role}"
        todo += [
            actions.SetRole(known.replica.replica_id, role, reason)
            for known in mine
            if known.wanted_role is not role
        ]
    for model, mine in shared.items():
        signal = _signal(snap, model, mine, settings)
        memory[model] = ladder.step(snap.ladder_memory.get(model), signal, snap.now, settings)
        if signal.predicted_s is None and mine:
            notes.append(f"{model}: {_blind(snap, model, settings)}, so roles stay as they are")
            continue
        split = _Split(memory[model].interactive, lent.get(model, 0))
        todo += _turn(mine, split, signal, settings)
    return todo, memory


class _Split:
    """How many of a model's replicas take interactive work alone, and how many batch alone."""

    def __init__(self, interactive: int, batch: int) -> None:
        self.interactive = interactive
        # What the ladder turned comes out of what batch has first: that is what rung 1 is for.
        self.batch = max(0, batch - interactive)

    def role(self, place: int, count: int) -> fleet.Role:
        """Return the role of the replica in ``place`` of ``count``."""
        if place < self.interactive:
            return fleet.Role.INTERACTIVE
        return fleet.Role.BATCH if place >= count - self.batch else fleet.Role.SHARED


_ORDER = {fleet.Role.INTERACTIVE: 0, fleet.Role.SHARED: 1, fleet.Role.BATCH: 2}


def _turn(
    mine: Sequence[snapshot.KnownReplica],
    split: _Split,
    signal: ladder.Signal,
    settings: Settings,
) -> Iterator[actions.Action]:
    """Give each its role: those that have it keep it, then the cheapest to turn come first."""

    def cost(known: snapshot.KnownReplica) -> tuple[int, int, str]:
        stats = known.replica.stats
        return (_ORDER[known.wanted_role], stats.batch if stats else 0, known.replica.replica_id)

    for place, known in enumerate(sorted(mine, key=cost)):
        role = split.role(place, len(mine))
        if known.wanted_role is role:
            continue
        if role is fleet.Role.INTERACTIVE:
            reason = (
                f"predicted wait {signal.predicted_s or 0.0:.2f} s is over half the TTFT SLO "
                f"({settings.ttft_slo_ms:g} ms): rung 1"
            )
        elif role is fleet.Role.BATCH:
            reason = "interactive callers do not need it now: lent to batch"
        elif known.wanted_role is fleet.Role.BATCH:
            reason = "interactive callers need it again: rung 1"
        else:
            reason = f"calm for {settings.calm_s:g} s: shared with batch again"
        yield actions.SetRole(known.replica.replica_id, role, reason)


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
    return ladder.Signal(predicted, turned, len(mine))
