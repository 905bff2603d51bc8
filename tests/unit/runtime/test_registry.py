"""The registry's promises, the same on SQLite and PostgreSQL."""

import asyncio
import dataclasses
import threading
from collections.abc import Callable

import pytest
import sqlalchemy as sa

from scheduler.contracts import clock, errors, fleet, ids, requests
from scheduler.core import replicas, snapshot
from scheduler.runtime import config
from scheduler.runtime.registry import database, holdings, keys, store, tables

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


def wish(**changes: object) -> keys.Key:
    base = keys.Key("", "physics", "ada", (requests.Tier.INTERACTIVE, requests.Tier.BATCH))
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type] # the test's own fields


def test_a_token_is_shown_once_and_kept_as_a_hash(registry: store.Registry) -> None:
    key, token = registry.keys.create(wish(comment="laptop"), 7)
    assert token.startswith(f"fbk_{key.key_id}_")
    assert registry.keys.find(token) == key
    assert registry.keys.list() == (key,)
    secret = token.rsplit("_", 1)[1]
    with registry.database.read() as session:
        row = session.get_one(tables.ApiKey, key.key_id)
        kept = [str(getattr(row, column.name)) for column in tables.ApiKey.__table__.columns]
    assert all(secret not in text for text in kept)
    for wrong in (token[:-1] + "x", "fbk_nope_" + secret, "sk-123", "", "fbk__", "a_b_c"):
        with pytest.raises(errors.Unauthenticated):
            registry.keys.find(wrong)
    with pytest.raises(errors.BadRequest, match="needs a team"):
        registry.keys.create(wish(team=""), 1)


async def test_the_key_store_tells_unknown_expired_and_revoked_apart(
    registry: store.Registry, fake_clock: clock.FakeClock
) -> None:
    found = keys.RegistryKeys(registry.keys, fake_clock)
    now = fake_clock.wall_us()
    key, token = registry.keys.create(wish(expires_us=now + 60_000_000, models=("chat",)), now)
    caller = await found.find(token)
    assert caller == requests.Caller(
        team="physics",
        user="ada",
        key_id=key.key_id,
        tiers=(requests.Tier.INTERACTIVE, requests.Tier.BATCH),
        models=("chat",),
    )
    await fake_clock.advance(61)
    with pytest.raises(errors.KeyExpired, match="has expired"):
        await found.find(token)
    second, other = registry.keys.create(wish(), now)
    assert (await found.find(other)).key_id == second.key_id
    registry.keys.revoke(second.key_id, now + 1)
    await fake_clock.advance(2.1)
    with pytest.raises(errors.KeyExpired, match="was revoked"):
        await found.find(other)
    with pytest.raises(errors.Unauthenticated, match="not known"):
        await found.find(keys.new_token())


async def test_known_keys_stay_good_while_the_registry_is_down(
    registry: store.Registry, fake_clock: clock.FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = keys.RegistryKeys(registry.keys, fake_clock)
    _, token = registry.keys.create(wish(), 1)
    caller = await found.find(token)

    def down(token: str) -> keys.Key:
        raise sa.exc.OperationalError("SELECT", {}, Exception("connection refused"))

    monkeypatch.setattr(registry.keys, "find", down)
    await fake_clock.advance(60)
    assert await found.find(token) == caller
    with pytest.raises(errors.Busy, match="registry does not answer"):
        await found.find(keys.new_token())


async def test_a_registry_that_hangs_is_waited_for_once(
    registry: store.Registry, fake_clock: clock.FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a machine that has stopped: no error ever comes, and every thread that asks it is lost."""
    monkeypatch.setattr(keys, "UNKNOWN_S", 60.0)
    monkeypatch.setattr(keys, "_LOOKUPS", 8)
    found = keys.RegistryKeys(registry.keys, fake_clock)
    _, token = registry.keys.create(wish(), 1)
    caller = await found.find(token)
    monkeypatch.setattr(keys, "PATIENCE_S", 0.05)
    monkeypatch.setattr(keys, "UNKNOWN_S", 0.05)
    asked, going = [], threading.Event()
    before = registry.keys.find

    def hangs(token: str) -> keys.Key:
        asked.append(token)
        going.wait()
        return before(token)

    monkeypatch.setattr(registry.keys, "find", hangs)
    for _ in range(5):
        await fake_clock.advance(60)
        assert await found.find(token) == caller
    assert asked == [token]
    for _ in range(10):
        with pytest.raises(errors.Busy, match="registry does not answer"):
            await found.find(keys.new_token())
    assert len(asked) <= 2  # the rest waits for a thread, or was not taken
    going.set()
    async with asyncio.timeout(10):
        while found._reading:  # noqa: ASYNC110 - the end of a thread rings no bell
            await asyncio.sleep(0.01)
    monkeypatch.setattr(keys, "PATIENCE_S", 60.0)
    registry.keys.revoke(caller.key_id, 5)
    await fake_clock.advance(60)
    with pytest.raises(errors.KeyExpired):  # it has caught up
        await found.find(token)


async def test_a_registry_that_is_late_each_time_is_heard(
    registry: store.Registry, fake_clock: clock.FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for its answers, and a key that was revoked must not stay good for ever."""
    found = keys.RegistryKeys(registry.keys, fake_clock)
    _, token = registry.keys.create(wish(), 1)
    caller = await found.find(token)
    registry.keys.revoke(caller.key_id, 5)
    going, before = threading.Event(), registry.keys.find

    def late(token: str) -> keys.Key:
        going.wait()
        return before(token)

    monkeypatch.setattr(registry.keys, "find", late)
    monkeypatch.setattr(keys, "PATIENCE_S", 0.0)
    await fake_clock.advance(60)
    assert await found.find(token) == caller
    going.set()
    async with asyncio.timeout(10):
        while found._reading:  # noqa: ASYNC110 - the end of a thread rings no bell
            await asyncio.sleep(0.01)
    with pytest.raises(errors.KeyExpired):
        await found.find(token)


async def test_who_guesses_keys_keeps_no_known_one_out(
    registry: store.Registry, fake_clock: clock.FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the registry hangs, guesses fill what may be looked up at once."""
    found = keys.RegistryKeys(registry.keys, fake_clock)
    _, token = registry.keys.create(wish(), 1)
    caller = await found.find(token)
    going, before = threading.Event(), registry.keys.find

    def hangs(token: str) -> keys.Key:
        going.wait()
        return before(token)

    monkeypatch.setattr(registry.keys, "find", hangs)
    monkeypatch.setattr(keys, "_LOOKUPS", 3)
    monkeypatch.setattr(keys, "PATIENCE_S", 0.0)
    monkeypatch.setattr(keys, "UNKNOWN_S", 0.0)
    await fake_clock.advance(60)
    for _ in range(5):
        with pytest.raises(errors.Busy):
            await found.find(keys.new_token())
    assert await found.find(token) == caller
    going.set()
    async with asyncio.timeout(10):
        while found._reading:  # noqa: ASYNC110 - the end of a thread rings no bell
            await asyncio.sleep(0.01)


def test_a_given_token_can_be_kept(registry: store.Registry) -> None:
    token = keys.new_token()
    key = registry.keys.put(wish(service=True), token, 3)
    registry.keys.put(wish(service=True, user="batchd"), token, 4)
    assert registry.keys.find(token).user == "batchd"
    assert registry.keys.find(token).caller().service
    assert [item.key_id for item in registry.keys.list()] == [key.key_id]


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
