"""The leader's adapters: who is told what, whose fault is kept, what gateways hear."""

import dataclasses

from scheduler.contracts import fleet, ids, loras, observed
from scheduler.core import snapshot
from scheduler.runtime import adapter_pools, entries

S = loras.AdapterState
PATHS = {"law": "/a/law", "tax": "/a/tax"}


def deployment(version: str = "v1", **adapters: str) -> snapshot.Deployment:
    spec = fleet.ReplicaSpec(
        "chat", version, fleet.EngineKind.VLLM, adapters=adapters or PATHS, adapter_slots=2
    )
    return snapshot.Deployment(spec, 1)


def known(
    name: str, *held: loras.HeldAdapter, version: str = "v1", room: int = 2
) -> entries.ReplicaEntry:
    replica = fleet.Replica(
        replica_id=ids.ReplicaId(name),
        cluster="c",
        lease_id=ids.LeaseId(f"l-{name}"),
        slot_id=ids.SlotId("s"),
        slurm_job_id="1",
        node="n",
        spec=deployment(version).spec.started,
        state=fleet.ReplicaState.SERVING,
        role=fleet.Role.SHARED,
        adapters=held if room else None,
        adapter_room=room,
    )
    return entries.ReplicaEntry(replica, True, fleet.Role.SHARED, 1.0, 0.0, 0, 0)


def held(name: str, state: loras.AdapterState = S.LOADED, **changes: object) -> loras.HeldAdapter:
    return loras.HeldAdapter(name, PATHS[name], state, **changes)  # type: ignore[arg-type]


def scene(
    *replicas: entries.ReplicaEntry,
    deployments: tuple[snapshot.Deployment, ...] = (deployment(),),
    now_us: int = 1_000_000_000,
    **route: object,
) -> adapter_pools.Scene:
    fields: dict[str, object] = {"weights": {"v1": 100}, "adapters": tuple(PATHS), **route}
    routes = {"chat": fleet.Route("chat", **fields)}  # type: ignore[arg-type]
    return adapter_pools.Scene(deployments, routes, replicas, 10.0, now_us)


def demand(**adapters: observed.AdapterDemand) -> dict[str, observed.Demand]:
    return {"chat": observed.Demand("chat", {}, {}, adapters=adapters)}


def test_who_waits_is_served_and_only_changes_are_told() -> None:
    pools = adapter_pools.Pools()
    one = known("r1")
    assert pools.place(scene(one)) == ({"l-r1"}, False)  # told for the first time: nothing
    pools.note("g1", demand(law=observed.AdapterDemand(2, 0.1, 2)))
    assert pools.dirty
    assert pools.place(scene(one)) == ({"l-r1"}, False)
    assert one.adapters == {"law": "/a/law"}
    assert not pools.dirty
    assert pools.place(scene(one)) == (set(), False)
    fact = pools.fact()
    assert fact["changes"] == ["adapter law comes to r1: 2 wait for it"]
    assert fact["models"]["chat"]["law"]["waiting"] == 2


def test_between_ticks_only_models_that_have_changed_are_decided_for() -> None:
    pools = adapter_pools.Pools()
    other = dataclasses.replace(deployment().spec, model="talk")
    mine, theirs = known("r1"), known("r2")
    theirs.replica = dataclasses.replace(theirs.replica, spec=other.started)
    both = (deployment(), snapshot.Deployment(other, 1))
    waiting = observed.AdapterDemand(1, 0.1, 1)
    pools.note("g1", {"talk": observed.Demand("talk", {}, {}, adapters={"law": waiting})})
    assert pools.place(scene(mine, theirs, deployments=both), every=False) == ({"l-r2"}, False)
    assert (mine.adapters, theirs.adapters) == (None, {"law": "/a/law"})
    pools.touch("chat")
    assert pools.place(scene(mine, theirs, deployments=both), every=False) == ({"l-r1"}, False)
    assert (mine.adapters, pools.dirty) == ({}, False)
    mine.adapters = None
    assert pools.place(scene(mine, theirs, deployments=both)) == ({"l-r1"}, False), "the tick's"


def test_popularity_counts_what_came_since_and_survives_the_leader() -> None:
    pools = adapter_pools.Pools()
    pools.note("g1", demand())
    pools.note("g1", demand(law=observed.AdapterDemand(arrived=3)))
    pools.note(
        "g1", demand(law=observed.AdapterDemand(arrived=3), tax=observed.AdapterDemand(arrived=1))
    )
    pools.place(scene(known("r1")))
    assert pools.fact()["models"]["chat"]["law"]["share"] == 0.75
    heir = adapter_pools.Pools()
    heir.restore(pools.fact())
    heir.note("g1", demand(law=observed.AdapterDemand(arrived=500)))  # it was here before: no news
    heir.place(scene(known("r1")))
    assert heir.fact()["models"]["chat"]["law"]["share"] == 0.75


def test_one_that_fails_twice_is_in_quarantine_for_its_version_until_it_is_declared_anew() -> None:
    pools = adapter_pools.Pools()
    pools.note("g1", demand(law=observed.AdapterDemand(1, 0.1, 1)))
    three = [known("r1"), known("r2"), known("r3")]

    def fails() -> tuple[set[ids.LeaseId], bool]:
        (told,) = [one for one in three if one.adapters]
        broken = (held("law", S.FAILED, reason="of another rank"),)
        told.replica = dataclasses.replace(told.replica, adapters=broken)
        placed = pools.place(scene(*three))
        told.replica = dataclasses.replace(told.replica, adapters=())  # it has forgotten it
        return placed

    pools.place(scene(*three))
    first = next(one for one in three if one.adapters)
    _, faults = fails()
    assert (faults, pools.faults, first.adapters) == (False, {}, {}), "it may be the node's fault"
    _, faults = fails()
    assert faults
    assert pools.faults == {"chat": {"law": "it does not load: of another rank"}}
    assert [one.adapters for one in three] == [{}, {}, {}], "not tried on the third"
    assert pools.fact()["models"]["chat"]["law"]["faults"]["v1"]["reason"] == "of another rank"
    heir = adapter_pools.Pools()
    heir.restore(pools.fact())
    heir.place(scene(*three))
    assert heir.faults == pools.faults, "another leader knows it too"
    anew = deployment(law="/b/law", tax="/a/tax")
    pools.place(scene(*three, deployments=(anew,)))
    assert pools.faults == {}
    assert {"law": "/b/law"} in [one.adapters for one in three]


def test_one_that_fails_where_there_is_no_other_replica_is_in_quarantine_at_once() -> None:
    """A replica that only batch may use is no other one: it loads nothing for interactive requests."""
    pools = adapter_pools.Pools()
    pools.note("g1", demand(law=observed.AdapterDemand(1, 0.1, 1)))
    one, lent = known("r1"), known("r2")
    lent.replica = dataclasses.replace(lent.replica, role=fleet.Role.BATCH)
    pools.place(scene(one, lent))
    one.replica = dataclasses.replace(one.replica, adapters=(held("law", S.FAILED, reason="no"),))
    pools.place(scene(one, lent))
    assert pools.faults == {"chat": {"law": "it does not load: no"}}


def test_one_that_another_replica_has_is_kept_from_the_one_that_failed_alone() -> None:
    """A node whose disk is full must not take an adapter from all others."""
    pools = adapter_pools.Pools()
    good, bad = known("r1", held("law")), known("r2", held("law", S.FAILED, reason="disk full"))
    good.adapters, bad.adapters = {"law": "/a/law"}, {"law": "/a/law"}
    pools.note("g1", demand())
    pools.note("g1", demand(law=observed.AdapterDemand(arrived=100)))  # as many copies as can be
    pools.place(scene(good, bad))
    assert (good.adapters, bad.adapters) == ({"law": "/a/law"}, {})
    assert pools.faults == {}
    assert "r2: adapter law does not load: disk full" in pools.fact()["changes"]
    bad.replica = dataclasses.replace(bad.replica, adapters=())  # it has forgotten it
    pools.place(scene(good, bad))
    assert bad.adapters == {}, "not again and again"
    pools.place(scene(good, bad, now_us=1_000_000_000 + 601_000_000))
    assert bad.adapters == {"law": "/a/law"}


def test_one_that_nobody_else_could_have_is_tried_where_it_failed() -> None:
    pools = adapter_pools.Pools()
    good, bad = known("r1", held("law")), known("r2", held("law", S.FAILED, reason="disk full"))
    good.adapters, bad.adapters = {"law": "/a/law"}, {"law": "/a/law"}
    pools.place(scene(good, bad))
    bad.replica = dataclasses.replace(bad.replica, adapters=())
    pools.note("g1", demand(law=observed.AdapterDemand(1, 0.1, 1)))
    pools.place(scene(bad))
    assert bad.adapters == {"law": "/a/law"}


def test_quarantine_ends_with_its_time() -> None:
    pools = adapter_pools.Pools()
    one = known("r1", held("law", S.FAILED, reason="disk full"))
    one.adapters = {"law": "/a/law"}
    pools.place(scene(one))
    assert one.adapters == {}
    one.replica = dataclasses.replace(one.replica, adapters=())
    pools.note("g1", demand(law=observed.AdapterDemand(1, 0.1, 1)))
    pools.place(scene(one, now_us=1_000_000_000 + 601_000_000))
    assert one.adapters == {"law": "/a/law"}
    assert pools.faults == {}


def test_what_no_replica_takes_is_said() -> None:
    pools = adapter_pools.Pools()
    pools.place(scene(known("r1", room=0)))
    assert "no replica takes adapters: set adapter_slots" in pools.faults["chat"]["law"]
    pools.place(scene(known("r1", room=0), deployments=(deployment(tax="/a/tax"),)))
    assert pools.faults["chat"]["law"] == "it fits no version that answers requests"
    pools.place(scene())  # none is up: they wait for one
    assert pools.faults == {}


def test_each_version_of_a_rollout_gets_its_own_copy() -> None:
    pools = adapter_pools.Pools()
    pools.note("g1", demand())
    pools.note("g1", demand(law=observed.AdapterDemand(1, 0.1, 1)))
    one, two = known("r1"), known("r2", version="v2")
    both = (deployment(), deployment("v2"))
    pools.place(scene(one, two, deployments=both, weights={"v1": 99, "v2": 1}))
    assert (one.adapters, two.adapters) == ({"law": "/a/law"}, {"law": "/a/law"})


def test_those_that_leave_or_sleep_are_told_nothing_new() -> None:
    pools = adapter_pools.Pools()
    pools.note("g1", demand(law=observed.AdapterDemand(1, 0.1, 1)))
    leaving, asleep = known("r1"), known("r2")
    leaving.run, asleep.asleep = False, True
    assert pools.place(scene(leaving, asleep)) == (set(), False)
    assert (leaving.adapters, asleep.adapters) == (None, None)


def test_preloaded_before_anybody_asks() -> None:
    pools = adapter_pools.Pools()
    one = known("r1")
    pools.place(scene(one, preload=("tax",)))
    assert one.adapters == {"tax": "/a/tax"}


def test_what_only_batch_may_use_is_a_pool_of_its_own() -> None:
    """An adapter on a replica that takes no interactive requests is of no use to those."""
    pools = adapter_pools.Pools()
    shared, lent = known("r1"), known("r2")
    lent.replica = dataclasses.replace(lent.replica, role=fleet.Role.BATCH, adapters=(held("law"),))
    pools.note("g1", demand(law=observed.AdapterDemand(waiting=1, arrived=1)))
    pools.place(scene(shared, lent))
    assert (shared.adapters, lent.adapters) == ({"law": "/a/law"}, {"law": "/a/law"})
    pools.note("g1", demand(tax=observed.AdapterDemand(batch=3, arrived=3)))
    pools.place(scene(shared, lent))
    assert "tax" in (lent.adapters or {})
