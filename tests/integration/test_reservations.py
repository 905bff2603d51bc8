"""Maintenance and Slurm's reservations: leases end before them, on a scripted Slurm and on a real one."""

import dataclasses
import datetime
import os
import subprocess
import time
from pathlib import Path
from unittest import mock

import pytest

from scheduler.contracts import clock, fleet, slurm
from scheduler.core import grounds, plan
from scheduler.runtime import broker, settings
from slurm_plugins import cli, devcluster
from tests import brokersite

QUICK = settings.Settings(idle_lease_s=5.0, lease_backoff_s=0.0)


def hours(site: brokersite.Site, count: float) -> int:
    return site.clock.wall_us() + round(count * 3600) * 1_000_000


async def test_a_lease_ends_before_maintenance_and_is_whole_again_after_it(tmp_path: Path) -> None:
    site = brokersite.Site(tmp_path, options=QUICK)
    site.slurm.reserved = (
        slurm.Reservation("patch", hours(site, 3), hours(site, 5), ("n1", "n2"), frozenset({"MAINT"})),
        slurm.Reservation("licences", hours(site, 0), hours(site, 9)),
        slurm.Reservation("always", hours(site, 1), hours(site, 9), ("n1",), frozenset({"TIME_FLOAT"})),
    )  # fmt: skip
    async with site.lead() as leader:
        await site.settle(leader)
        (first,) = leader.live.leases.values()
        assert first.lease.walltime_s == 178 * 60  # whole minutes, and one to start in
        fact = site.registry.journal.fact("nodes")
        assert fact is not None
        assert [kept["name"] for kept in fact.body["reservations"]] == [
            "patch",
            "licences",
            "always",
        ]
        site.slurm.reserved = ()
        await site.step(leader, 20.0)
        site.slurm.end(first.lease.slurm_job_id, slurm.JobState.CANCELLED)
        for _ in range(12):
            await site.step(leader, 1.0)
        assert site.slurm.submitted[-1].time_limit_s == QUICK.lease_walltime_s


async def test_shortly_before_maintenance_nothing_is_asked_for_and_it_says_why(
    tmp_path: Path,
) -> None:
    site = brokersite.Site(tmp_path, options=QUICK)
    site.slurm.reserved = (
        slurm.Reservation("patch", hours(site, 0.1), hours(site, 5), ("n1", "n2")),
    )
    async with site.lead() as leader:
        for _ in range(3):
            await site.step(leader)
        assert site.slurm.submitted == []
        assert any("reservation patch begins in" in note for note in leader.notes)


async def test_nodes_of_other_partitions_do_not_count(tmp_path: Path) -> None:
    """A window on all our nodes was none, as long as somebody else's had none."""
    site = brokersite.Site(tmp_path, options=QUICK)
    foreign = slurm.Node("n9", "idle", frozenset(), True, ("guests",), 4, 4)
    nodes = (*site.slurm.nodes(), foreign)
    site.slurm.reserved = (
        slurm.Reservation("patch", hours(site, 3), hours(site, 5), ("n1", "n2")),
    )
    site.parts = dataclasses.replace(site.parts, where=grounds.Grounds(("serve",), ("backfill",)))
    with mock.patch.object(site.slurm, "nodes", return_value=nodes):
        async with site.lead() as leader:
            await site.settle(leader)
            (first,) = leader.live.leases.values()
            assert first.lease.walltime_s == 178 * 60


@pytest.fixture
def real(slurm_at_rest: devcluster.Site, tmp_path: Path) -> brokersite.Site:
    """Return a broker's site whose Slurm is the development cluster."""
    site = brokersite.Site(tmp_path, options=QUICK)
    site.clock = clock.FakeClock(int(time.time()) * 1_000_000)
    port = cli.CliClient(slurm_at_rest.slurm_conf)

    def render(lease: fleet.Lease) -> slurm.JobSpec:
        return dataclasses.replace(
            brokersite.render(lease),
            script="#!/bin/sh\nsleep 600\n",
            account="physics",
            memory_mb=100,
            directory="/",
        )

    site.parts = dataclasses.replace(
        site.parts, slurm=port, lease_renderer=render, time=site.clock, cluster=port.cluster
    )
    return site


def scontrol(on: devcluster.Site, *words: str) -> None:
    env = {**os.environ, **on.env(), "TZ": "UTC"}
    subprocess.run(["scontrol", *words], check=True, capture_output=True, env=env)


async def planned(site: brokersite.Site, leader: broker.Leader) -> plan.Plan:
    await site.clock.advance(11.0)
    await leader.poller.poll()
    made = await leader.tick()
    await leader.applier.settle()
    return made


@pytest.mark.slurm
async def test_an_admins_reservation_on_a_real_cluster_shapes_the_lease(
    real: brokersite.Site, slurm_site: devcluster.Site
) -> None:
    """`scontrol create reservation` in two hours, then in five minutes."""
    begins = datetime.datetime.fromtimestamp(real.clock.wall_us() / 1e6, datetime.UTC)
    begins = (begins + datetime.timedelta(hours=2)).replace(microsecond=0)
    scontrol(
        slurm_site, "create", "reservation", "ReservationName=patch", "Nodes=ALL", "Users=root",
        f"StartTime={begins:%Y-%m-%dT%H:%M:%S}", "Duration=60", "Flags=MAINT,IGNORE_JOBS",
    )  # fmt: skip
    try:
        async with real.lead() as leader:
            await planned(real, leader)
            (entry,) = leader.live.leases.values()
            assert 6_900 <= entry.lease.walltime_s <= 7_140
            assert entry.lease.slurm_job_id, entry.lease.reason
            end = time.monotonic() + 30
            while entry.lease.state is not fleet.LeaseState.RUNNING and time.monotonic() < end:
                await planned(real, leader)
                (entry,) = leader.live.leases.values()
            assert entry.lease.state is fleet.LeaseState.RUNNING, entry.lease.reason
            real.registry.catalog.scale("chat", 2)
            soon = begins - datetime.timedelta(minutes=115)
            scontrol(
                slurm_site, "update", "ReservationName=patch", f"StartTime={soon:%Y-%m-%dT%H:%M:%S}"
            )
            await planned(real, leader)
            await planned(real, leader)
            assert len(leader.live.leases) == 1
            assert any("reservation patch begins in" in note for note in leader.notes), leader.notes
    finally:
        scontrol(slurm_site, "delete", "ReservationName=patch")
