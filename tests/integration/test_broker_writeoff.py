"""The last GPU time of a lease: written by the broker where nobody on the node could, and only there."""

import dataclasses
from pathlib import Path

import pytest

from scheduler.contracts import errors, slurm, usage
from tests import brokersite

SECOND = 1_000_000


@pytest.fixture
def rows() -> list[usage.GpuRow]:
    return []


@pytest.fixture
def site(tmp_path: Path, rows: list[usage.GpuRow]) -> brokersite.Site:
    made = brokersite.Site(tmp_path)

    async def write_off(row: usage.GpuRow) -> None:
        rows.append(row)

    made.parts = dataclasses.replace(made.parts, write_off=write_off)
    return made


async def test_a_dead_nodes_lease_is_booked_until_the_end_that_slurm_states(
    site: brokersite.Site, rows: list[usage.GpuRow]
) -> None:
    async with site.lead() as leader:
        await site.settle(leader)
        (lease_id,) = site.agents
        started_us = site.slurm.job_of(lease_id).started_us
        for _ in range(8):
            await site.step(leader, 120.0)
        await site.cut(leader, lease_id)
        heard_us = site.clock.wall_us()
        await site.clock.advance(12.0)
        site.slurm.end("100", slurm.JobState.NODE_FAIL)
        ended_us = site.clock.wall_us()
        await site.step(leader, 2.1)
        (row,) = rows
        assert (row.lease_id, row.slurm_job_id, row.run, row.lost) == (lease_id, "100", 0, 1)
        assert (row.gpus, row.node, row.team) == (4, "n1", "forebay")
        assert started_us < row.start_us < heard_us  # readers cut off what the agent has told
        assert row.end_us == ended_us
        await site.settle(leader)
        assert len(rows) == 1


async def test_an_agent_that_leaves_or_dies_alone_has_written_its_own_end(
    site: brokersite.Site, rows: list[usage.GpuRow]
) -> None:
    async with site.lead() as leader:
        await site.settle(leader)
        site.slurm.end("100", slurm.JobState.FAILED)  # its script has ended: seen at the next poll
        await site.step(leader, 2.1)
        await site.settle(leader)
        assert [item.slurm_job_id for item in leader.view().replicas] == ["101"]
    assert rows == []


async def test_where_no_agent_ever_came_the_whole_run_is_lost(
    site: brokersite.Site, rows: list[usage.GpuRow]
) -> None:
    async with site.lead() as leader:
        await site.clock.advance(0.2)
        await leader.poller.poll()
        await leader.tick()
        await leader.applier.settle()
        site.slurm.start_all()
        (job,) = site.slurm.jobs()
        await site.clock.advance(40.0)
        site.slurm.end(job.job_id, slurm.JobState.FAILED)
        await leader.poller.poll()
        await leader.tick()
        (row,) = rows
        assert (row.start_us, row.end_us) == (job.started_us, job.started_us + 40 * SECOND)


@pytest.mark.parametrize(
    "fault",
    [
        errors.RecordingUnavailable("usage spool: no space left, free some or move it"),
        OverflowError("a time that no row takes"),
    ],
)
async def test_a_row_that_cannot_be_written_keeps_no_lease_from_ending(
    site: brokersite.Site, fault: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    async def full(row: usage.GpuRow) -> None:
        raise fault

    site.parts = dataclasses.replace(site.parts, write_off=full)
    async with site.lead() as leader:
        await site.settle(leader)
        (lease_id,) = site.agents
        await site.cut(leader, lease_id)
        site.slurm.end("100", slurm.JobState.NODE_FAIL)
        await site.step(leader, 2.1)
        await site.settle(leader)
        assert [item.slurm_job_id for item in leader.view().replicas] == ["101"]
    assert "its last GPU time is not written" in caplog.text
