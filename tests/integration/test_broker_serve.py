"""`serving.serve` on real time: one leader of two, its periodic work once, gateways that reconnect."""

import asyncio
import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from sqlalchemy import exc

from scheduler.contracts import clock, observed
from scheduler.contracts.v1 import control_pb2 as pb
from scheduler.runtime import address, broker, client, guard, loop, watch
from tests import brokersite
from tests.integration import serving_brokers


async def test_of_two_brokers_one_leads_and_the_other_takes_over(
    tmp_path: Path, ends: contextlib.AsyncExitStack
) -> None:
    brokers = serving_brokers.Brokers(tmp_path)
    ends.push_async_callback(brokers.close)
    brokers.start("a")
    async with asyncio.timeout(20):
        assert await brokers.leading.get() == "a"
        first = address.read(tmp_path)
        brokers.start("b")
        await brokers.stop("a")
        assert await brokers.leading.get() == "b"
    second = address.read(tmp_path)
    assert first is not None
    assert second is not None
    assert (first.epoch, second.epoch) == (1, 2)
    assert first.address != second.address


async def test_a_leader_that_is_replaced_stands_by_again(
    tmp_path: Path, ends: contextlib.AsyncExitStack
) -> None:
    brokers = serving_brokers.Brokers(tmp_path)
    ends.push_async_callback(brokers.close)
    brokers.start("a")
    async with asyncio.timeout(20):
        assert await brokers.leading.get() == "a"
        far = clock.SystemClock().wall_us() + 3_600_000_000
        assert brokers.parts.registry.lead.take("other", far, 0) == 2
        # "other" never renews: its lead is over when the wall clock says so; give it up for it.
        brokers.parts.registry.lead.release(2)
        assert await brokers.leading.get() == "a"
    where = address.read(tmp_path)
    assert where is not None
    assert where.epoch == 3


async def test_a_lead_is_renewed_while_its_leader_reads_the_registry(
    tmp_path: Path, ends: contextlib.AsyncExitStack
) -> None:
    """A registry that took longer than a lead lasts was read by one broker after the other, and none led."""
    brokers = serving_brokers.Brokers(tmp_path)
    ends.push_async_callback(brokers.close)
    renewed = threading.Event()
    row, declare = brokers.parts.registry.lead, brokers.parts.registry.catalog.declare
    renew = row.renew

    def noted(*given: int) -> None:
        renew(*given)
        renewed.set()

    def slow(*given: Any) -> None:
        assert renewed.wait(10)
        declare(*given)

    with (
        mock.patch.object(row, "renew", noted),
        mock.patch.object(brokers.parts.registry.catalog, "declare", slow),
    ):
        brokers.start("a")
        async with asyncio.timeout(20):
            assert await brokers.leading.get() == "a"


@pytest.mark.parametrize(
    "fault",
    [
        exc.OperationalError("declare", {}, Exception("the server closed the connection")),
        ValueError("'next' is not a valid EngineKind"),
    ],
)
async def test_a_leader_that_can_not_begin_stands_by_again(
    tmp_path: Path, fault: Exception, ends: contextlib.AsyncExitStack
) -> None:
    """The process ended: a registry that was away for a moment took its standby along."""
    brokers = serving_brokers.Brokers(tmp_path)
    ends.push_async_callback(brokers.close)
    declare = brokers.parts.registry.catalog.declare
    tries: list[object] = []

    def away(*given: Any) -> None:
        tries.append(given)
        if len(tries) == 1:
            raise fault
        declare(*given)

    with mock.patch.object(brokers.parts.registry.catalog, "declare", away):
        brokers.start("a")
        async with asyncio.timeout(20):
            assert await brokers.leading.get() == "a"
    where = address.read(tmp_path)
    assert where is not None
    assert where.epoch == 2


async def test_broker_json_names_the_newest_leader_whoever_wakes_up_late(tmp_path: Path) -> None:
    """Agents and gateways followed it to a broker that had been replaced, and the leader lost all leases."""
    site = brokersite.Site(tmp_path)
    declare, there = site.registry.catalog.declare, address.Address("elsewhere:1", 2)

    def overtaken(*given: Any) -> None:
        declare(*given)
        site.registry.lead.release(1)
        assert site.registry.lead.take("other", site.clock.wall_us(), 60_000_000) == 2
        address.publish(tmp_path, there)

    with mock.patch.object(site.registry.catalog, "declare", overtaken):
        leader = broker.Leader(site.parts, 1)
        assert site.registry.lead.take("late", site.clock.wall_us(), 60_000_000) == 1
        with pytest.raises(brokersite.Fenced):
            await leader.start()
        await leader.stop()
    assert address.read(tmp_path) == there
    site.registry.lead.release(2)
    async with site.lead() as leader:
        mine = address.Address(leader.address, 3)
        address.publish(tmp_path, there)  # in the moment between its look at who leads and this
        await leader.announce()
        assert address.read(tmp_path) == mine
        (tmp_path / address.FILE).unlink()
        await leader.announce()
        assert address.read(tmp_path) == mine
        newer = address.Address("elsewhere:1", 4)
        address.publish(tmp_path, newer)
        await leader.announce()
        assert address.read(tmp_path) == newer


async def test_a_gateway_that_has_come_back_does_not_leave_with_its_old_link(
    tmp_path: Path,
) -> None:
    """A link that a network cut ends minutes later, and took along what the next one had told."""
    site = brokersite.Site(tmp_path)
    async with site.lead() as leader, asyncio.timeout(20):
        picture, time = leader.live, site.clock
        here = watch.Fleet(picture, time, guard.Guard("secret"), site.options)
        report = pb.GatewayReport(gateway_id="g1", admission="h:1")
        report.demand.add(model="chat")
        old, new, gone = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def link(over: asyncio.Event) -> AsyncIterator[pb.GatewayReport]:
            yield report
            await over.wait()

        first = asyncio.create_task(here._read(link(old), gone))
        while "g1" not in picture.demand:
            await picture.heard.wait()
        second = asyncio.create_task(here._read(link(new), gone))
        await picture.heard.wait()
        old.set()
        await first
        assert "g1" in picture.demand
        assert [each.gateway_id for each in picture.gateways.live(time.monotonic() + 10)] == ["g1"]
        new.set()
        await second
        assert "g1" not in picture.demand


async def test_periodic_work_is_done_once_though_its_leader_is_killed_midway(
    tmp_path: Path, ends: contextlib.AsyncExitStack
) -> None:
    effects: list[int] = []
    begun: list[int] = []
    midway, done = asyncio.Event(), asyncio.Event()

    async def rollup(start_us: int) -> None:
        begun.append(start_us)
        if len(begun) == 1:
            midway.set()
            await asyncio.Event().wait()  # the leader dies here
        effects.append(start_us)

    brokers = serving_brokers.Brokers(tmp_path, loop.Periodic("rollup", 3600.0, rollup))
    ends.push_async_callback(brokers.close)
    here = asyncio.get_running_loop()
    end_period = brokers.parts.registry.lead.end_period

    def noted(epoch: int, name: str, start_us: int) -> None:
        end_period(epoch, name, start_us)
        here.call_soon_threadsafe(done.set)

    with mock.patch.object(brokers.parts.registry.lead, "end_period", noted):
        for name in ("a", "b"):
            brokers.start(name)
        async with asyncio.timeout(20):
            first = await brokers.leading.get()
            await midway.wait()
            await brokers.stop(first)
            assert await brokers.leading.get() != first
            await done.wait()
        brokers.start("c")
        epoch = brokers.parts.registry.lead.epoch()
        found = await loop.run_period(
            brokers.works[0], brokers.parts.registry.lead, epoch, clock.SystemClock()
        )
    assert begun[0] in effects
    assert len(set(effects)) == len(effects)
    assert begun[0] not in found


def test_gateway_workers_have_nothing_to_run_periodically_s8() -> None:
    """S8: each worker ran every scheduled entry; a gateway, however many, does not even load a scheduler."""
    code = "import sys, gateway.server, gateway.openai_routes; print('apscheduler' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert done.stdout.strip() == "False"


async def test_four_gateways_and_two_brokers_do_a_minutes_rollup_once_s8(
    tmp_path: Path, ends: contextlib.AsyncExitStack
) -> None:
    """S8: the leader dies when the effect is there but not yet noted; the next one's repeat adds nothing."""
    minutes: dict[int, int] = {}
    runs: list[int] = []
    written, done = asyncio.Event(), asyncio.Event()

    async def rollup(start_us: int) -> None:
        runs.append(start_us)
        minutes[start_us] = 17  # keyed by its period, as every periodic work must be
        written.set()
        if len(runs) == 1:
            await asyncio.Event().wait()  # killed here

    brokers = serving_brokers.Brokers(tmp_path, loop.Periodic("minute rollup", 60.0, rollup))
    ends.push_async_callback(brokers.close)
    end_period = brokers.parts.registry.lead.end_period
    here = asyncio.get_running_loop()

    def noted(epoch: int, name: str, start_us: int) -> None:
        end_period(epoch, name, start_us)
        if start_us == runs[0]:
            here.call_soon_threadsafe(done.set)

    gateways = [client.FleetClient(tmp_path, f"g{n}", clock.SystemClock()) for n in range(4)]
    for each in gateways:
        ends.push_async_callback(each.close)
    with mock.patch.object(brokers.parts.registry.lead, "end_period", noted):
        for each in gateways:
            each.start()
        for name in ("a", "b"):
            brokers.start(name)
        async with asyncio.timeout(20):
            first = await brokers.leading.get()
            await written.wait()
            await asyncio.gather(*[each.changed(-1) for each in gateways])
            await brokers.stop(first)
            await brokers.leading.get()
            await done.wait()
    killed = runs[0]
    assert runs.count(killed) == 2
    assert all(runs.count(minute) == 1 for minute in minutes if minute != killed)
    assert set(minutes.values()) == {17}


async def test_a_gateway_keeps_its_view_without_a_broker_and_finds_the_next_one(
    tmp_path: Path, ends: contextlib.AsyncExitStack
) -> None:
    brokers = serving_brokers.Brokers(tmp_path)
    ends.push_async_callback(brokers.close)
    fleet_client = client.FleetClient(tmp_path, "g1", clock.SystemClock())
    ends.push_async_callback(fleet_client.close)
    fleet_client.start()
    fleet_client.report([observed.Demand("chat", {"interactive": 2}, {"batch": 1}, 0.5, (12.0,))])
    brokers.start("a")
    async with asyncio.timeout(20):
        await fleet_client.changed(-1)
        first = fleet_client.view()
        assert first is not None
        assert first.epoch == 1
        assert first.routes["chat"].cluster == "alpha"
        await brokers.leading.get()
        await brokers.stop("a")
        assert fleet_client.view() is not None
        brokers.start("b")
        while True:
            view = fleet_client.view()
            assert view is not None
            if view.epoch == 2:
                break
            await fleet_client.changed(view.revision)
        assert view.revision > first.revision
    await fleet_client.close()
    assert fleet_client.view() is view


async def test_a_gateway_leaves_a_leader_that_was_replaced_and_hangs_up_on_nobody(
    tmp_path: Path, ends: contextlib.AsyncExitStack
) -> None:
    """A stopped leader (SIGSTOP, a dead host) keeps its calls; waiting for TCP would cost 15 s."""
    site = brokersite.Site(tmp_path)
    fleet_client = client.FleetClient(tmp_path, "g1", clock.SystemClock())
    ends.push_async_callback(fleet_client.close)
    async with site.lead() as old, asyncio.timeout(20):
        await site.step(old)
        fleet_client.start()
        await fleet_client.changed(-1)
        site.registry.lead.release(old.live.epoch)
        async with site.lead() as new:
            while "g1" not in new.live.demand:
                await new.live.heard.wait()
            await fleet_client.close()


async def test_demand_reaches_the_broker_and_leaves_with_its_gateway(
    tmp_path: Path, ends: contextlib.AsyncExitStack
) -> None:
    site = brokersite.Site(tmp_path)
    async with site.lead() as leader, asyncio.timeout(20):
        fleet_client = client.FleetClient(tmp_path, "g1", clock.SystemClock())
        ends.push_async_callback(fleet_client.close)
        sent = observed.Demand("chat", {"interactive": 2}, {"batch": 1}, 0.5, (12.0,))
        fleet_client.report([sent])
        fleet_client.start()
        while "g1" not in leader.live.demand:
            await leader.live.heard.wait()
        assert leader.live.demand["g1"][1] == {"chat": sent}
        await fleet_client.close()
        while "g1" in leader.live.demand:
            await leader.live.heard.wait()


async def test_a_proxy_in_the_environment_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: contextlib.AsyncExitStack
) -> None:
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    site = brokersite.Site(tmp_path)
    async with site.lead() as leader, asyncio.timeout(20):
        await site.settle(leader)
        assert list(site.running().values()) == ["serving"]
        fleet_client = client.FleetClient(tmp_path, "g1", clock.SystemClock())
        ends.push_async_callback(fleet_client.close)
        fleet_client.start()
        await fleet_client.changed(-1)
        await fleet_client.close()
