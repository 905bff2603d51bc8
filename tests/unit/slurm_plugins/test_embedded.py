"""The embedded Slurm beyond the contract: restarts, kills, limits, preemption, and nothing left behind."""

import dataclasses
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from scheduler.contracts import clock, slurm
from slurm_plugins import embedded, embedded_runner


def _spec(folder: Path, script: str, *, gpus: int = 2, partition: str = "serve") -> slurm.JobSpec:
    return slurm.JobSpec(
        name="job", script=f"#!/bin/bash\n{script}\n", partitions=(partition,), time_limit_s=600,
        output="out-%j", directory=str(folder), gpus_per_node=gpus,
    )  # fmt: skip


class Site:
    """A client of a folder, and a way to wait for its real processes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.clock = clock.FakeClock()
        self.port = self.open()

    def open(self, kill_wait_s: float = 0.5) -> embedded.EmbeddedClient:
        shape = embedded.Shape(nodes=2, gpus=4)
        return embedded.EmbeddedClient(
            self.folder / "state", shape=shape, kill_wait_s=kill_wait_s, clock=self.clock
        )

    def run(self, script: str, **options: object) -> str:
        """Start a job and wait for the line READY that its script prints."""
        job_id = self.port.submit(_spec(self.folder, script, **options)).job_id  # type: ignore[arg-type] # options
        eventually(lambda: "READY" in self.text(job_id))
        return job_id

    def text(self, job_id: str) -> str:
        file = self.folder / f"out-{job_id}"
        return file.read_text() if file.exists() else ""

    def job(self, job_id: str) -> slurm.Job:
        return next(job for job in self.port.jobs() if job.job_id == job_id)

    def ended(self, job_id: str) -> slurm.Job:
        eventually(lambda: self.job(job_id).state.final)
        return self.job(job_id)

    def pids(self, job_id: str) -> list[int]:
        return [int(word) for word in self.text(job_id).split() if word.isdecimal()]


def eventually(condition: Callable[[], bool]) -> None:
    """Real processes tell nobody when they are done."""
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def gone(pid: int) -> bool:
    return embedded_runner.start_time(pid) == 0


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path)
    yield made
    made.port.shutdown()


def test_processes_that_left_their_group_end_with_the_job(site: Site) -> None:
    job_id = site.run("setsid sleep 100 & echo $! $$; setsid -f sleep 99; echo READY; wait")
    pids = site.pids(job_id)
    site.port.cancel(site.job(job_id).job_id)
    assert site.ended(job_id).state is slurm.JobState.CANCELLED
    assert all(gone(pid) for pid in pids)


def test_who_ignores_sigterm_is_killed_after_the_kill_wait(site: Site) -> None:
    job_id = site.run("trap 'echo HEARD' TERM; echo $$ READY; while :; do sleep 0.05; done")
    site.port.cancel(site.job(job_id).job_id)
    job = site.ended(job_id)
    assert (job.state, job.exit_code) == (slurm.JobState.CANCELLED, "0:9")
    assert "HEARD" in site.text(job_id)


def test_a_second_client_of_the_folder_finds_the_jobs_and_their_processes(site: Site) -> None:
    job_id = site.run("echo $$ READY; sleep 100 & wait")
    (pid,) = site.pids(job_id)
    before = site.job(job_id)
    site.port.close()
    assert not gone(pid)
    site.port = site.open()
    assert site.job(job_id) == before
    site.port.cancel(before.job_id)
    assert site.ended(job_id).state is slurm.JobState.CANCELLED
    assert gone(pid)


def test_shutdown_ends_everything(tmp_path: Path) -> None:
    site = Site(tmp_path)
    running = site.run("echo $$; setsid sleep 100 & echo $! READY; wait")
    waiting = site.port.submit(_spec(tmp_path, "true", gpus=4)).job_id
    blocked = site.port.submit(_spec(tmp_path, "sleep 100", gpus=4)).job_id
    pids = site.pids(running)
    site.port.shutdown()
    assert all(gone(pid) for pid in pids)
    again = embedded.EmbeddedClient(tmp_path / "state", shape=embedded.Shape(nodes=2, gpus=4))
    assert all(state.final for state in again.states([waiting, blocked]).values())
    again.shutdown()


def test_a_runner_that_dies_takes_its_job_along(site: Site) -> None:
    job_id = site.run("echo $$; sleep 100 & echo $! READY; wait")
    script, child = site.pids(job_id)
    runner = next(
        int(line.split()[1])
        for line in Path(f"/proc/{script}/status").read_text().splitlines()
        if line.startswith("PPid:")
    )
    os.kill(runner, signal.SIGKILL)
    job = site.ended(job_id)
    assert (job.state, job.reason) == (slurm.JobState.NODE_FAIL, "the job's runner died")
    eventually(lambda: gone(script))
    assert site.port.nodes()[0].gpus_free == 4
    os.kill(child, signal.SIGKILL)  # an orphan now, as under proctrack/linuxproc


async def test_walltime_ends_a_job(site: Site) -> None:
    job_id = site.run("echo READY; sleep 100 & wait")
    await site.clock.advance(601)
    assert site.ended(job_id).state is slurm.JobState.TIMEOUT


def test_gpus_are_shared_out_and_come_back(site: Site) -> None:
    first = site.run("echo $CUDA_VISIBLE_DEVICES READY; sleep 100 & wait")
    second = site.run("echo $CUDA_VISIBLE_DEVICES READY; sleep 100 & wait")
    assert (site.text(first).split()[0], site.text(second).split()[0]) == ("0,1", "2,3")
    assert site.job(first).nodes == site.job(second).nodes
    wide = site.run("echo $SLURM_JOB_NODELIST READY; sleep 100 & wait", gpus=4)
    assert site.text(wide).startswith("e2")
    waiting = site.port.submit(_spec(site.folder, "echo READY", gpus=1)).job_id
    assert site.job(waiting).reason == "Resources"
    site.port.cancel(site.job(first).job_id)
    assert site.ended(waiting).state is slurm.JobState.COMPLETED


def test_serve_takes_gpus_from_the_youngest_backfill_and_no_more(site: Site) -> None:
    old = site.run("echo READY; sleep 100 & wait", gpus=4, partition="backfill")
    young = site.run("echo READY; sleep 100 & wait", gpus=4, partition="backfill")
    serve = site.run("echo READY; sleep 100 & wait", gpus=2)
    assert site.ended(young).state is slurm.JobState.PREEMPTED
    assert site.job(old).state is slurm.JobState.RUNNING
    assert site.job(serve).partition == "serve"


def test_what_never_fits_is_refused(site: Site) -> None:
    for change in (
        {"gpus_per_node": 5},
        {"nodes": 3},
        {"gres_type": "H100"},
        {"exclude": ("e1", "e2")},
    ):
        spec = dataclasses.replace(_spec(site.folder, "true"), **change)
        with pytest.raises(slurm.SlurmRefused):
            site.port.submit(spec)
    assert site.port.jobs() == ()


def test_a_script_that_can_not_start_fails_with_its_reason(site: Site) -> None:
    spec = dataclasses.replace(_spec(site.folder, "true"), output="no/such/folder/%j")
    job = site.ended(site.port.submit(spec).job_id)
    assert job.state is slurm.JobState.FAILED
    assert "no/such/folder" in job.reason


def test_a_damaged_state_file_is_said_so(site: Site) -> None:
    (site.folder / "other").mkdir()
    (site.folder / "other" / "jobs.json").write_text('{"next_id": 1, "jobs"')
    port = embedded.EmbeddedClient(site.folder / "other")
    with pytest.raises(slurm.SlurmGarbled, match=r"jobs\.json"):
        port.jobs()
    port.close()


def test_only_who_asks_for_jobs_watches_them(tmp_path: Path) -> None:
    """A gateway asks for the cluster's name alone: a second thread would take turns with its streams."""

    def watching() -> bool:
        return any(thread.name == "embedded-slurm" for thread in threading.enumerate())

    before = watching()
    port = embedded.EmbeddedClient(tmp_path / "state", cluster="alpha")
    assert port.config()["ClusterName"] == port.cluster == "alpha"
    with pytest.raises(slurm.AccountingOff):
        port.associations()
    assert watching() == before
    port.jobs()
    assert watching()
    port.close()
    assert watching() == before
    embedded.EmbeddedClient(tmp_path / "other").close()
