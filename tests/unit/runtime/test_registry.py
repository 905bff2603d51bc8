"""The registry's promises, the same on SQLite and PostgreSQL."""

import dataclasses
from collections.abc import Callable

import pytest
import sqlalchemy as sa

from scheduler.contracts import errors, fleet, ids
from scheduler.core import replicas, snapshot
from scheduler.runtime import config
from scheduler.runtime.registry import database, holdings, store

CHAT = config.ModelSettings(
    name="chat",
    engine=fleet.EngineKind.SIMULATED,
    gpus=4,
    replicas=2,
    engine_args={"step-ms": 2.5},
    adapters={"legal": "/a/legal"},
)
LEASE = fleet.Lease(
    lease_id=ids.LeaseId("l-000000000001"),
    cluster="alpha",
    kind=fleet.LeaseKind.SERVE,
    team="physics",
    state=fleet.LeaseState.REQUESTED,
    gpus=4,
    requested_us=5,
)


@pytest.fixture
def epoch(registry: store.Registry) -> int:
    taken = registry.lead.take("me", 0, 10_000_000)
    assert taken is not None
    return taken


def test_migrations_make_what_the_models_say_and_can_be_taken_back(registry_url: str) -> None:
    base = database.Database(registry_url)
    assert base.differences()
    base.upgrade()
    base.upgrade()
    assert base.differences() == []
    base.downgrade("base")
    with base.read() as session:
        names = sa.inspect(session.connection()).get_table_names()
    assert set(names) <= {database.VERSION_TABLE}
    base.upgrade()
    assert base.differences() == []
    base.close()


def test_foreign_tables_in_the_same_database_are_left_alone(registry_url: str) -> None:
    base = database.Database(registry_url)
    with base.write() as session:
        session.execute(sa.text("CREATE TABLE others (id INTEGER PRIMARY KEY)"))
    base.upgrade()
    assert base.differences() == []
    base.downgrade("base")
    with base.read() as session:
        assert "others" in sa.inspect(session.connection()).get_table_names()
    base.close()


def test_the_catalog_says_what_the_file_says_and_keeps_an_admins_wishes(
    registry: store.Registry,
) -> None:
    registry.catalog.declare([CHAT], 1)
    (deployment,) = registry.catalog.deployments()
    spec = dataclasses.replace(CHAT.spec(), adapter_slots=1)  # as many as it has adapters
    assert deployment == snapshot.Deployment(spec, 2, fleet.Role.SHARED)
    route = fleet.Route("chat", {"v1": 100}, 2048, ("legal",), runner="generate")
    assert registry.catalog.routes() == {"chat": route}
    registry.catalog.scale("chat", 5)
    registry.catalog.hold_batch("chat", True)
    registry.catalog.declare([dataclasses.replace(CHAT, replicas=3, seats=16)], 2)
    (deployment,) = registry.catalog.deployments()
    assert (deployment.replicas, deployment.hold_batch, deployment.spec.seats) == (5, True, 16)
    registry.catalog.declare([], 3)
    (deployment,) = registry.catalog.deployments()
    assert deployment.replicas == 0
    registry.catalog.declare([CHAT], 4)
    (deployment,) = registry.catalog.deployments()
    assert deployment.replicas == 2


def test_weights_of_versions_add_up_to_100(registry: store.Registry) -> None:
    versions = [dataclasses.replace(CHAT, version=f"v{n}", weight=1) for n in (1, 2, 3)]
    registry.catalog.declare(versions, 1)
    assert registry.catalog.routes()["chat"].weights == {"v1": 34, "v2": 33, "v3": 33}
    with pytest.raises(errors.BadRequest, match="3 versions: name one"):
        registry.catalog.scale("chat", 1)
    registry.catalog.scale("chat", 1, "v2")
    assert [item.replicas for item in registry.catalog.deployments()] == [2, 1, 2]


def test_what_is_not_there_is_said_so(registry: store.Registry) -> None:
    with pytest.raises(errors.ModelNotFound, match="nope: not deployed here"):
        registry.catalog.scale("nope", 1)
    with pytest.raises(errors.NotFound, match="no such API key"):
        registry.keys.revoke("nope", 1)
    with pytest.raises(errors.NotFound, match="no such replica"):
        registry.holdings.ask_drain("nope")
    with pytest.raises(errors.BadRequest, match="must be 0 or more"):
        registry.catalog.scale("nope", -1)


def test_a_lease_and_its_wishes_come_back_as_they_were(
    registry: store.Registry, epoch: int
) -> None:
    registry.holdings.save_lease(epoch, LEASE, 5)
    slot = snapshot.Slot(ids.SlotId("l-000000000001.s0"), LEASE.lease_id, 4)
    replica = fleet.Replica(
        replica_id=ids.ReplicaId("r-000000000001"),
        cluster="alpha",
        lease_id=LEASE.lease_id,
        slot_id=slot.slot_id,
        slurm_job_id="7",
        node="n1",
        spec=CHAT.spec(),
        state=fleet.ReplicaState.STARTING,
        role=fleet.Role.SHARED,
    )
    row = holdings.ReplicaRow(replica, True, fleet.Role.SHARED, 30.0, False, 6)
    registry.holdings.save_wishes(epoch, LEASE.lease_id, 1, slots=[slot], wishes=[row])
    running = dataclasses.replace(
        LEASE, state=fleet.LeaseState.RUNNING, slurm_job_id="7", nodes=("n1",), started_us=9
    )
    registry.holdings.save_lease(epoch, running, 9)
    held = registry.holdings.load()
    assert held.leases == (running,)
    assert held.revisions == {LEASE.lease_id: 1}
    assert held.slots == (slot,)
    assert held.replicas == (row,)
    assert held.ended == frozenset()
    registry.holdings.ask_drain(replica.replica_id)
    assert registry.holdings.drains() == {replica.replica_id}
    lost = dataclasses.replace(replica, state=fleet.ReplicaState.LOST, reason="gone")
    closed = dataclasses.replace(slot, state=replicas.SlotState.LOST)
    registry.holdings.save_news(epoch, [lost], [closed], 11)
    ended = dataclasses.replace(running, state=fleet.LeaseState.ENDED, reason="over")
    registry.holdings.save_lease(epoch, ended, 12)
    held = registry.holdings.load()
    assert (held.leases, held.slots, held.replicas) == ((), (), ())
    assert held.ended == {LEASE.lease_id}
    texts = [(entry.at_us, entry.name, entry.body["text"]) for entry in registry.journal.events()]
    assert texts == [
        (12, LEASE.lease_id, "ended: over"),
        (11, replica.replica_id, "lost: gone"),
        (9, LEASE.lease_id, "running"),
        (5, LEASE.lease_id, "requested"),
    ]


def test_the_lead_changes_hands_only_when_it_is_free(registry: store.Registry) -> None:
    lead = registry.lead
    assert lead.epoch() == 0
    assert lead.take("a", 0, 100) == 1
    assert lead.take("b", 99, 100) is None
    lead.renew(1, 90, 100)
    assert lead.take("b", 150, 100) is None
    assert lead.take("b", 191, 100) == 2
    with pytest.raises(database.Fenced, match="epoch 1 is over, the newest is 2"):
        lead.renew(1, 192, 100)
    lead.release(1)
    assert lead.take("a", 195, 100) is None
    lead.release(2)
    assert lead.take("a", 195, 100) == 3
    assert lead.epoch() == 3


def test_every_write_of_an_old_leader_is_fenced(registry: store.Registry) -> None:
    registry.catalog.declare([CHAT], 1)
    old = registry.lead.take("a", 0, 1)
    new = registry.lead.take("b", 10, 100)
    assert (old, new) == (1, 2)
    assert old is not None
    writes: list[Callable[[], object]] = [
        lambda: registry.holdings.save_lease(old, LEASE, 1),
        lambda: registry.holdings.save_wishes(old, LEASE.lease_id, 1),
        lambda: registry.catalog.quarantine(old, "chat", "v1", 9, "x"),
        lambda: registry.journal.add_plan(old, 1, {}, keep=5),
        lambda: registry.journal.set_facts(old, 1, {"nodes": {}}),
        lambda: registry.lead.begin_period(old, "rollup", 0),
        lambda: registry.timetable.note(old, []),
    ]
    for write in writes:
        with pytest.raises(database.Fenced):
            write()
    assert registry.holdings.load().leases == ()
    assert registry.journal.fact("nodes") is None


def test_a_period_left_half_done_is_done_first_and_a_done_one_never_again(
    registry: store.Registry, epoch: int
) -> None:
    lead = registry.lead
    assert lead.begin_period(epoch, "rollup", 60) == 60
    assert lead.begin_period(epoch, "rollup", 120) == 60
    lead.end_period(epoch, "rollup", 60)
    assert lead.begin_period(epoch, "rollup", 60) is None
    assert lead.begin_period(epoch, "rollup", 120) == 120
    lead.end_period(epoch, "rollup", 120)
    assert lead.begin_period(epoch, "rollup", 120) is None
    assert lead.begin_period(epoch, "other", 60) == 60


def test_only_the_newest_plans_are_kept(registry: store.Registry, epoch: int) -> None:
    for at in range(10):
        registry.journal.add_plan(epoch, at, {"n": at}, keep=3)
    assert [entry.body["n"] for entry in registry.journal.plans(100)] == [9, 8, 7]
    registry.journal.set_facts(epoch, 1, {"nodes": {"a": 1}, "queue": {}})
    registry.journal.set_facts(epoch, 2, {"nodes": {"a": 2}})
    fact = registry.journal.fact("nodes")
    assert fact is not None
    assert (fact.at_us, fact.body) == (2, {"a": 2})


def test_no_word_of_others_keeps_a_state_from_being_written(
    registry: store.Registry, epoch: int
) -> None:
    """Last lines of a log after a power cut: PostgreSQL takes no NUL, and nothing was planned any more."""
    said = "engine ended: \x00\x00 | CUDA error"
    ended = dataclasses.replace(LEASE, state=fleet.LeaseState.ENDED, reason=said)
    registry.holdings.save_lease(epoch, ended, 9)
    (told,) = registry.holdings.leases()
    assert told.reason == "engine ended: \\x00\\x00 | CUDA error"
    assert "CUDA error" in registry.journal.events(1)[0].body["text"]
    plan = {"actions": [{"what": said}]}
    registry.journal.add_plan(epoch, 9, plan, keep=10)
    assert registry.journal.plans(1)[0].body == plan
