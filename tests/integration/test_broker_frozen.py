"""A registry that hangs: its leader goes on with what it has in memory, and begins nothing."""

import asyncio
import contextlib
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from scheduler.contracts import clock, fleet, ids, observed
from scheduler.runtime import address, broker, client, guard, leadership, serving, settings
from scheduler.runtime.registry import database, store
from tests import brokersite, fakeagent, fakeslurm
from tests.integration import test_registry_outage as outage

ROLE = fleet.Role


@pytest.fixture
def site(tmp_path: Path) -> Iterator[brokersite.Site]:
    found = brokersite.Site(tmp_path)
    yield found
    found.registry.close()


class Hang:
    """Makes a method of the registry hang until the block ends, whoever calls it."""

    def __init__(self, owner: object, name: str) -> None:
        self._real = getattr(owner, name)
        self._over = threading.Event()
        self._patch = mock.patch.object(owner, name, self._hangs)
        self.asked = threading.Event()

    def _hangs(self, *args: Any, **words: Any) -> Any:
        self.asked.set()
        self._over.wait(60)
        return self._real(*args, **words)

    def __enter__(self) -> "Hang":
        self._patch.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._patch.stop()
        self._over.set()


def waits(leader: broker.Leader, site: brokersite.Site, seconds: float) -> None:
    """Let the gateways tell that somebody waits, or that nobody does."""
    demand = observed.Demand("chat", {"interactive": 2 if seconds else 0}, {}, seconds)
    leader.live.absorb_demand("g1", {"chat": demand}, site.clock.monotonic())


def kept(site: brokersite.Site) -> ROLE:
    """Return the role that the registry says the one replica should have."""
    (row,) = site.registry.holdings.load().replicas
    return row.wanted_role


async def test_roles_turn_and_nothing_is_begun_while_a_tick_waits(site: brokersite.Site) -> None:
    async with site.lead() as leader:
        await site.settle(leader)
        (agent,) = site.agents.values()
        (replica,) = site.running()
        with Hang(site.registry.catalog, "deployments") as hang:
            await site.clock.advance(1.1)
            tick = asyncio.create_task(leader.tick())
            await asyncio.to_thread(hang.asked.wait, 20)
            for _ in range(3):  # not yet: a slow answer is no outage
                waits(leader, site, 1.0)
                await leader.bridge()
            assert agent.replicas()[replica].role == ROLE.SHARED
            await site.clock.advance(site.options.registry_patience_s)
            for _ in range(2):
                agent.load(replica, interactive=1, batch=3)
                await site.clock.advance(0.2)
                await site.heard(leader)
                waits(leader, site, 1.0)
                await leader.bridge()
            await site.heard(leader)
            assert agent.replicas()[replica].role == ROLE.INTERACTIVE
            assert kept(site) is ROLE.SHARED
            # Gateways hear who is gone, and nothing takes its place before that can be written down.
            agent.kill(replica)
            await site.clock.advance(0.2)
            await site.heard(leader)
            await leader.bridge()
            assert leader.view().replicas == ()
            assert agent.started == [replica]
            assert len(site.slurm.submitted) == 1
            assert not tick.done()
        await tick
        for _ in range(4):
            await site.step(leader, 1.0)
        assert list(site.running().values()) == ["serving"]
        assert leader.live.epoch == 1


async def test_what_was_only_told_is_written_down_afterwards(site: brokersite.Site) -> None:
    async with site.lead() as leader:
        await site.settle(leader)
        (agent,) = site.agents.values()
        (replica,) = site.running()
        entry = leader.live.leases[ids.LeaseId(agent.report.lease_id)]
        with Hang(site.registry.holdings, "save_wishes") as hang:
            await site.clock.advance(3.0)
            for _ in range(2):
                agent.load(replica, interactive=1, batch=3)
                await site.heard(leader)
                waits(leader, site, 1.0)
                await leader.bridge()
            told = entry.revision
            assert kept(site) is ROLE.SHARED
            paying = asyncio.create_task(leader.applier.flush())
            await asyncio.to_thread(hang.asked.wait, 20)
            assert not paying.done()
        await paying
        assert kept(site) is ROLE.INTERACTIVE
        assert entry.revision > told, "two states of a lease never have one number"
        await site.heard(leader)
        assert agent.replicas()[replica].role == ROLE.INTERACTIVE


async def test_a_leader_whose_registry_hangs_reads_in_broker_json_that_it_was_replaced(
    site: brokersite.Site,
) -> None:
    async with site.lead() as leader:
        await site.settle(leader)
        await site.clock.advance(3.0)
        await leader.bridge()
        address.publish(site.folder, address.Address("127.0.0.1:1", leader.live.epoch + 1))
        with pytest.raises(database.Fenced, match=r"broker\.json names epoch 2"):
            await leader.bridge()


async def test_a_lead_is_given_up_though_the_registry_hangs(
    site: brokersite.Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leadership, "RELEASE_S", 0.01)
    claim = leadership.Leadership(site.registry.lead, site.options, site.clock)
    await claim.acquire()
    with Hang(site.registry.lead, "release"):
        await claim.release()
    assert claim.epoch == 0


@pytest.mark.postgres
async def test_postgresql_is_frozen_while_callers_come(tmp_path: Path) -> None:
    """The real thing: the lead can't be renewed for longer than it lasts, and nobody can take it."""
    server = outage.Postgres(Path(tempfile.mkdtemp(prefix="forebay-pg-")))
    server.start()
    options = settings.Settings(
        tick_s=0.05, slurm_poll_s=0.1, adopt_grace_s=0.0, leader_ttl_s=0.5, leader_renew_s=0.1,
        registry_patience_s=0.3, idle_lease_s=600.0, agent_connect_s=600.0, calm_s=600.0,
    )  # fmt: skip
    time = clock.SystemClock()
    slurm = fakeslurm.FakeSlurm(time)
    parts = broker.Parts(
        options, store.Registry.open(server.url), slurm, brokersite.render, tmp_path, time, "alpha",
        models=(brokersite.CHAT,),
    )  # fmt: skip
    leading = asyncio.Event()
    life = asyncio.create_task(serving.serve(parts, ready=lambda where: leading.set()))
    gateway = client.FleetClient(tmp_path, "g1", time)
    try:
        async with asyncio.timeout(60):
            await leading.wait()
            agent = await _agent(slurm, parts)
            gateway.start()
            (replica,) = (await _view(gateway, _serves)).replicas
            talking = asyncio.create_task(_talk(agent, replica.replica_id, time))
            server.signal(signal.SIGSTOP)
            try:
                gateway.report([observed.Demand("chat", {"interactive": 2}, {}, 1.0)])
                await _view(gateway, lambda view: {ROLE.INTERACTIVE} == _roles(view))
                await time.sleep(2 * options.leader_ttl_s)
                talking.cancel()
                agent.kill(replica.replica_id)
                await _view(gateway, lambda view: not view.replicas)
                assert agent.started == [replica.replica_id]
            finally:
                server.signal(signal.SIGCONT)
            (another,) = (await _view(gateway, _serves)).replicas
            assert another.replica_id != replica.replica_id
            where = address.read(tmp_path)
            assert where is not None
            assert where.epoch == 1
            await agent.disconnect()
    finally:
        await gateway.close()
        life.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await life
        parts.registry.close()
        server.stop()
        shutil.rmtree(server.folder, ignore_errors=True)


@pytest.mark.postgres
async def test_a_broker_process_ends_on_sigterm_though_postgresql_is_frozen(tmp_path: Path) -> None:
    server = outage.Postgres(Path(tempfile.mkdtemp(prefix="forebay-pg-")))
    server.start()
    state = tmp_path / "state"
    written = tmp_path / "forebay.toml"
    written.write_text(
        f'[forebay]\nstate_dir = "{state}"\n[slurm]\nclient = "embedded"\n'
        f'[scheduler]\nregistry_url = "{server.url}"\n'
    )
    argv = [sys.executable, "-P", "-m", "forebay", "broker", "--config", str(written)]
    process = await asyncio.create_subprocess_exec(*argv)
    try:
        async with asyncio.timeout(60):
            while address.read(state) is None:  # noqa: ASYNC110 - a file rings no bell
                await asyncio.sleep(0.1)
            server.signal(signal.SIGSTOP)
            try:
                await asyncio.sleep(1.0)  # until a tick and a renewal wait for it
                process.terminate()
                assert await process.wait() == 0
            finally:
                server.signal(signal.SIGCONT)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        server.stop()
        shutil.rmtree(server.folder, ignore_errors=True)


async def _agent(slurm: fakeslurm.FakeSlurm, parts: broker.Parts) -> fakeagent.FakeAgent:
    """Let Slurm run the one lease, and put an agent into it."""
    while not slurm.submitted:
        await parts.time.sleep(0.05)
    slurm.start_all()
    (lease,) = parts.registry.holdings.leases()
    job = slurm.job_of(lease.lease_id)
    agent = fakeagent.FakeAgent(lease.lease_id, job.job_id, job.nodes[0], lease.gpus)
    where = address.read(parts.state_dir)
    assert where is not None
    agent.connect(where.address, guard.token(parts.state_dir))
    return agent


def _serves(view: fleet.FleetView) -> bool:
    return any(each.state is fleet.ReplicaState.SERVING for each in view.replicas)


def _roles(view: fleet.FleetView) -> set[ROLE]:
    return {each.role for each in view.replicas}


async def _talk(agent: fakeagent.FakeAgent, replica_id: str, time: clock.Clock) -> None:
    """Let a replica report again and again, so that its statistics are never too old."""
    while True:
        agent.load(replica_id, interactive=1, batch=3)
        await time.sleep(0.1)


async def _view(
    gateway: client.FleetClient, is_so: Callable[[fleet.FleetView], bool]
) -> fleet.FleetView:
    """Return the first view of which ``is_so`` holds."""
    revision = -1
    while True:
        await gateway.changed(revision)
        view = gateway.view()
        assert view is not None
        if is_so(view):
            return view
        revision = view.revision
