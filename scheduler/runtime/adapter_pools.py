"""Adapters as the leader has them: who asks for which, what replicas are told to hold, what does not load.

`scheduler.core.adapters` decides; here the picture for it is kept, and what comes of it goes into what each
replica is told. An adapter that fails on a replica is kept from that one: it may be the node's fault. Where
it fails on another too, or there is no other, it is in quarantine for its version, since its files are the
same everywhere. Either lasts until it is declared anew or `adapter_retry_s` is over.
"""

import collections
import dataclasses
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from scheduler.contracts import fleet, ids, loras, observed
from scheduler.core import adapters, popularity, snapshot
from scheduler.runtime import entries

log = logging.getLogger(__name__)
FACT = "adapters"
CHANGES_KEPT = 50
COST_S = 1.0  # of a load, before one was seen
TRIES = 2  # replicas on which an adapter fails before it is at fault itself
_S = loras.AdapterState
_R = fleet.ReplicaState


@dataclasses.dataclass(frozen=True, slots=True)
class Fault:
    """Why an adapter is not tried on a version, and until when (UTC µs)."""

    reason: str
    at_us: int
    until_us: int


@dataclasses.dataclass(frozen=True, slots=True)
class Scene:
    """What the leader knows when it decides.

    Attributes:
        now: monotonic seconds.
        now_us: UTC µs.
    """

    deployments: Sequence[snapshot.Deployment]
    routes: Mapping[str, fleet.Route]
    replicas: Sequence[entries.ReplicaEntry]
    now: float
    now_us: int


@dataclasses.dataclass(frozen=True, slots=True)
class _Use:
    """Whose requests a pool of replicas takes."""

    batch: bool
    urgent: bool


_Key = tuple[str, str]  # model, version
_FaultKey = tuple[str, str, str, str]  # model, version, adapter, path


class Pools:
    """The adapters of every pool.

    Attributes:
        retry_s: how long a quarantine lasts.
        faults: model to adapter to why no replica can serve it, for gateways.
    """

    def __init__(self) -> None:
        self.retry_s = 600.0
        self.faults: Mapping[str, Mapping[str, str]] = {}
        self._popular: dict[str, popularity.Popularity] = {}
        self._demand: dict[str, dict[str, Mapping[str, observed.AdapterDemand]]] = {}
        self._since: dict[tuple[ids.ReplicaId, str], float] = {}
        self._cost_s: dict[tuple[str, str], float] = {}
        self._quarantine: dict[_FaultKey, Fault] = {}
        self._kept_from: dict[tuple[ids.ReplicaId, _FaultKey], int] = {}  # until then, UTC µs
        self._changes: collections.deque[str] = collections.deque(maxlen=CHANGES_KEPT)
        self._notes: dict[_Key, list[str]] = {}
        self._touched: set[str] = set()
        self._scene: Scene | None = None

    @property
    def dirty(self) -> bool:
        """Whether something has changed that may want a decision before the next tick."""
        return bool(self._touched)

    def touch(self, model: str) -> None:
        """Note that a model's replicas, or their adapters, have changed."""
        self._touched.add(model)

    def note(self, gateway_id: str, demand: Mapping[str, observed.Demand]) -> None:
        """Take what a gateway has waiting, and count what came since its last word."""
        before = self._demand.get(gateway_id)
        after = {model: part.adapters for model, part in demand.items() if part.adapters}
        self._demand[gateway_id] = after
        for model, parts in after.items():
            popular = self._popular.setdefault(model, popularity.Popularity())
            known = (before or {}).get(model, {})
            for name, part in parts.items():
                # Of a gateway that was here before this leader nobody knows when its requests came.
                since = (
                    known[name].arrived
                    if name in known
                    else (0 if before is not None else part.arrived)
                )
                if part.arrived > since:
                    popular.note(name, part.arrived - since)
                if part.waiting or part.batch:
                    self._touched.add(model)

    def forget(self, gateway_id: str) -> None:
        """A gateway has left."""
        self._demand.pop(gateway_id, None)

    def place(self, scene: Scene, *, every: bool = True) -> tuple[set[ids.LeaseId], bool]:
        """Decide for every pool, or for those of models alone whose demand or replicas have changed.

        Returns:
            The leases whose replicas are told anew, and whether what gateways hear of faults has changed.
        """
        touched, self._touched = self._touched, set()
        self._learn(scene)
        self._scene, self._notes = scene, {} if every else self._notes
        changed: set[ids.LeaseId] = set()
        for deployment in scene.deployments:
            if not every and deployment.spec.model not in touched:
                continue
            notes: list[str] = []
            mine = [known for known in scene.replicas if _takes(known, deployment.key)]
            lent = [known for known in mine if known.replica.role is fleet.Role.BATCH]
            shared = [known for known in mine if known.replica.role is not fleet.Role.BATCH]
            # What only batch may use is a pool of its own: there interactive requests find nothing.
            for pool, use in ((shared, _Use(not lent, True)), (lent, _Use(True, False))):
                if pool:
                    found = adapters.decide(
                        [self._holder(known, scene) for known in pool],
                        list(self._wishes(deployment, scene, use)),
                    )
                    notes += [f"{deployment.spec.model} {note}" for note in found.notes]
                    changed |= self._tell(pool, found, scene.now)
            self._notes[deployment.key] = notes
        known_ids = {known.replica.replica_id for known in scene.replicas}
        self._since = {key: at for key, at in self._since.items() if key[0] in known_ids}
        before, self.faults = self.faults, self._route_faults(scene)
        return changed, before != self.faults

    def _learn(self, scene: Scene) -> None:
        """Note what failed and what loading took."""
        declared = {
            (*one.key, name, path)
            for one in scene.deployments
            for name, path in one.spec.adapters.items()
        }
        self._forgive(scene, declared)
        loaded: set[_FaultKey] = set()
        failed: list[tuple[entries.ReplicaEntry, _FaultKey, str]] = []
        for known in scene.replicas:
            spec = known.replica.spec
            for held in known.replica.adapters or ():
                key = (spec.model, spec.version, held.name, held.path)
                if held.state is _S.LOADED:
                    loaded.add(key)
                    if held.load_ms:
                        self._cost_s[spec.model, held.name] = held.load_ms / 1000
                told = (known.adapters or {}).get(held.name) == held.path
                if held.state is _S.FAILED and told and key in declared:
                    failed.append((known, key, held.reason))
        until_us = scene.now_us + round(self.retry_s * 1e6)
        able = _able(scene)
        for known, key, reason in failed:
            model, version, name, _ = key
            replica_id = known.replica.replica_id
            if key in self._quarantine:
                continue
            self._kept_from[replica_id, key] = until_us
            tried = {one for one, other in self._kept_from if other == key}
            mine = {one for one, pool in able.items() if pool == able.get(replica_id)}
            if key not in loaded and (len(tried) >= TRIES or mine <= tried):
                self._quarantine[key] = Fault(reason, scene.now_us, until_us)
                self._say(f"{model} {version}: adapter {name} does not load: {reason}")
            else:
                self._say(f"{replica_id}: adapter {name} does not load: {reason}")

    def _forgive(self, scene: Scene, declared: set[_FaultKey]) -> None:
        """Forget faults whose time or declaration is over, and those that would leave nobody to load it."""
        self._quarantine = {
            key: fault
            for key, fault in self._quarantine.items()
            if key in declared and scene.now_us < fault.until_us
        }
        able = _able(scene)
        kept = {
            one: until_us
            for one, until_us in self._kept_from.items()
            if one[0] in able and one[1] in declared and scene.now_us < until_us
        }
        among = collections.Counter(able.values())
        without = collections.Counter((able[one], key) for one, key in kept)
        self._kept_from = {
            (one, key): until_us
            for (one, key), until_us in kept.items()
            if without[able[one], key] < among[able[one]]
        }

    def _wishes(
        self, one: snapshot.Deployment, scene: Scene, use: "_Use"
    ) -> Iterable[adapters.Wish]:
        model, version = one.key
        popular = self._popular.get(model, popularity.Popularity())
        route = scene.routes.get(model)
        for name, path in one.spec.adapters.items():
            if (model, version, name, path) in self._quarantine:
                continue
            parts = list(self._parts(model, name))
            urgent = sum(part.waiting for part in parts) if use.urgent else 0
            batch = sum(part.batch for part in parts) if use.batch else 0
            yield adapters.Wish(
                name,
                path,
                share=popular.share(name),
                waiting=urgent + batch,
                # Batch waits its time: no turn is taken for it from what interactive requests use.
                oldest_s=max((part.oldest_wait_s for part in parts), default=0.0)
                if urgent
                else 0.0,
                preload=use.urgent and route is not None and name in route.preload,
                cost_s=self._cost_s.get((model, name), COST_S),
            )

    def _parts(self, model: str, name: str) -> Iterable[observed.AdapterDemand]:
        """Yield what each gateway has of an adapter."""
        for demand in self._demand.values():
            part = demand.get(model, {}).get(name)
            if part is not None:
                yield part

    def _holder(self, known: entries.ReplicaEntry, scene: Scene) -> adapters.Holder:
        replica = known.replica
        copies = tuple(
            adapters.Copy(
                held.name,
                held.path,
                held.state,
                held.running,
                held.uses,
                max(0.0, (scene.now_us - held.used_us) / 1e6),
                scene.now - self._since.get((replica.replica_id, held.name), scene.now),
            )
            for held in replica.adapters or ()
        )
        has = {copy.name for copy in copies}
        copies += tuple(
            adapters.Copy(name, path, _S.FAILED)
            for replica_id, (_, _, name, path) in self._kept_from
            if replica_id == replica.replica_id and name not in has
        )
        return adapters.Holder(replica.replica_id, replica.adapter_room, copies, known.adapters)

    def _tell(
        self, mine: Sequence[entries.ReplicaEntry], found: adapters.Decision, now: float
    ) -> set[ids.LeaseId]:
        changed: set[ids.LeaseId] = set()
        for known in mine:
            told = found.told[known.replica.replica_id]
            if known.adapters is None or list(told.items()) != list(known.adapters.items()):
                known.adapters = dict(told)
                changed.add(known.replica.lease_id)
        for change in found.changes:
            key = (change.replica_id, change.name)
            if change.load:
                self._since[key] = now
            else:
                self._since.pop(key, None)
            way = "comes to" if change.load else "goes from"
            self._say(f"adapter {change.name} {way} {change.replica_id}: {change.reason}")
        return changed

    def _say(self, line: str) -> None:
        log.info("%s", line)
        self._changes.append(line)

    def _route_faults(self, scene: Scene) -> dict[str, dict[str, str]]:
        """Return why adapters can't be served at all, where that is so."""
        serving = [known.replica for known in scene.replicas if known.replica.state is _R.SERVING]
        found: dict[str, dict[str, str]] = {}
        for model, route in scene.routes.items():
            if not route.adapters:
                continue
            used = {name for name, percent in route.weights.items() if percent}
            used |= {pool.version for pool in route.pools}
            answering = [
                one.spec
                for one in scene.deployments
                if one.spec.model == model and one.spec.version in used
            ]
            mine = [one for one in serving if one.spec.model == model and one.spec.version in used]
            ready = {name for replica in mine for name in replica.adapters_ready}
            for name in route.adapters:
                fault = "" if name in ready else self._fault(name, answering, mine)
                if fault:
                    found.setdefault(model, {})[name] = fault
        return found

    def _fault(
        self, name: str, answering: Sequence[fleet.ReplicaSpec], serving: Sequence[fleet.Replica]
    ) -> str:
        fitting = [spec for spec in answering if name in spec.adapters]
        if answering and not fitting:
            return "it fits no version that answers requests"
        reasons = [
            self._quarantine.get((spec.model, spec.version, name, spec.adapters[name]))
            for spec in fitting
        ]
        if fitting and all(reasons):
            return next(f"it does not load: {fault.reason}" for fault in reasons if fault)
        versions = {spec.version for spec in fitting}
        able = [one for one in serving if one.spec.version in versions]
        if able and not any(one.adapter_room for one in able):
            return "no replica takes adapters: set adapter_slots of its version and start its replicas anew"
        return ""

    def _shown(self, scene: Scene) -> dict[str, dict[str, dict[str, Any]]]:
        """Return what people are shown of each adapter."""
        found: dict[str, dict[str, dict[str, Any]]] = {}
        for one in scene.deployments:
            model, version = one.key
            for name, path in one.spec.adapters.items():
                entry = found.setdefault(model, {}).setdefault(
                    name, {"states": {}, "waiting": 0, "share": 0.0, "faults": {}}
                )
                if fault := self._quarantine.get((model, version, name, path)):
                    entry["faults"][version] = dataclasses.asdict(fault)
        for known in scene.replicas:
            there = found.get(known.replica.spec.model, {})
            for name, state in _states(known.replica):
                if name in there:
                    there[name]["states"][known.replica.replica_id] = state.value
        for model, there in found.items():
            popular = self._popular.get(model, popularity.Popularity())
            for name, entry in there.items():
                entry["share"] = round(popular.share(name), 4)
                entry["waiting"] = sum(p.waiting + p.batch for p in self._parts(model, name))
        return found

    def fact(self) -> dict[str, Any]:
        """Return what other processes show, and what the next leader begins with."""
        return {
            "models": {} if self._scene is None else self._shown(self._scene),
            "notes": [note for notes in self._notes.values() for note in notes],
            "changes": list(self._changes),
            "quarantine": [
                [*key, *dataclasses.astuple(fault)] for key, fault in self._quarantine.items()
            ],
            "popular": {model: dict(popular.counts) for model, popular in self._popular.items()},
        }

    def restore(self, body: Mapping[str, Any]) -> None:
        """Begin with what another leader knew."""
        for model, version, name, path, reason, at_us, until_us, *_ in body.get("quarantine", ()):
            self._quarantine[model, version, name, path] = Fault(reason, at_us, until_us)
        for model, counts in body.get("popular", {}).items():
            self._popular[model] = popularity.Popularity(dict(counts), sum(counts.values()))


def _states(replica: fleet.Replica) -> Iterable[tuple[str, loras.AdapterState]]:
    """Yield the adapters that a replica has, and how far they are."""
    for held in replica.adapters or ():
        yield held.name, held.state
    if replica.adapters is None and replica.state is _R.SERVING:
        for name in replica.spec.adapters:
            yield name, _S.LOADED


def _able(scene: Scene) -> dict[ids.ReplicaId, tuple[str, str, bool]]:
    """Return the replicas that can be told to hold adapters, with the pool that each is in."""
    found = {}
    for known in scene.replicas:
        replica = known.replica
        spec, lent = replica.spec, replica.role is fleet.Role.BATCH
        if _takes(known, (spec.model, spec.version)) and replica.adapter_room:
            found[replica.replica_id] = (spec.model, spec.version, lent)
    return found


def _takes(known: entries.ReplicaEntry, key: _Key) -> bool:
    """Whether a replica is one of a pool's that can be told."""
    replica = known.replica
    return (
        known.run
        and not known.asleep
        and (replica.spec.model, replica.spec.version) == key
        and replica.state is _R.SERVING
        and replica.adapters is not None
    )
