"""Case A8 on the real thing: a job that Slurm requeues twice; every run of it is in both books."""

import time
from pathlib import Path

import pytest

from accounting import books, reconcile, reports, spool
from scheduler.contracts import clock, ids
from slurm_plugins import cli, devcluster
from slurm_plugins.devcluster import processes
from tests.integration.test_devcluster import run
from tests.unit.accounting import samples

pytestmark = [pytest.mark.slurm, pytest.mark.long, pytest.mark.timeout(600)]

# Each run says by its own clock from when to when it held its GPUs, as an agent does.
_SCRIPT = """#!/bin/bash
begin=$(date +%s%N)
over() {{ echo "${{SLURM_RESTART_COUNT:-0}} $begin $(date +%s%N)" >> {folder}/held; exit 0; }}
trap over TERM
touch {folder}/up.${{SLURM_RESTART_COUNT:-0}}
until [ -e {folder}/stop ]; do sleep 0.1; done
over
"""


def test_every_run_of_a_requeued_job_is_in_both_books(
    slurm_site: devcluster.Site, tmp_path: Path
) -> None:
    """A8: three runs, two of them ended by a requeue."""
    script = tmp_path / "job.sh"
    script.write_text(_SCRIPT.format(folder=tmp_path))
    job = run(slurm_site, "sbatch", "--parsable", "--requeue", "-A", "physics", "--gres=gpu:4",
              "-c4", "--mem=100", "-o", "/dev/null", str(script)).strip()  # fmt: skip
    for number in range(3):
        started = tmp_path / f"up.{number}"
        assert processes.wait_until(lambda started=started: started.exists(), 240.0), number  # type: ignore[misc]
        time.sleep(3)  # so long that a run that one book lacks is more than the two may differ by
        if number < 2:
            run(slurm_site, "scontrol", "requeue", job)
            held = number + 1
            assert processes.wait_until(lambda held=held: _held(tmp_path) >= held, 60.0)  # type: ignore[misc]
            run(slurm_site, "scontrol", "update", f"jobid={job}", "StartTime=now")
    (tmp_path / "stop").touch()
    port = cli.CliClient(slurm_site.slurm_conf)

    def over() -> bool:
        runs = port.accounting(ids.SlurmJobId(job))
        return len(runs) == 3 and all(one.ended_us for one in runs)

    assert processes.wait_until(over, 60.0), port.accounting(ids.SlurmJobId(job))
    _write(tmp_path / "state", job, (tmp_path / "held").read_text())
    with books.Books(tmp_path / "state").reading() as reading:
        (lease,) = reports.lease_times(reading, reports.Scope(), reports.Filter())
    assert (lease.runs, lease.gpus) == (3, 4)
    assert lease.gpu_us > 3 * 4 * 3_000_000
    (found,) = reconcile.reconcile(port, [lease])
    assert found.agrees, found
    last = (tmp_path / "held").read_text().splitlines()[-1]
    _write(tmp_path / "short", job, last)
    with books.Books(tmp_path / "short").reading() as reading:
        (lease,) = reports.lease_times(reading, reports.Scope(), reports.Filter())
    (found,) = reconcile.reconcile(port, [lease])
    assert found.agrees is False, found  # the last run alone is what must not pass


def _held(folder: Path) -> int:
    path = folder / "held"
    return len(path.read_text().splitlines()) if path.exists() else 0


def _write(state: Path, job: str, held: str) -> None:
    sink = spool.Spool(state / "spool" / "agent", "agent", clock=clock.FakeClock())
    for line in held.splitlines():
        number, begin, end = map(int, line.split())
        sink.append(
            samples.gpu(
                run=number,
                start_us=begin // 1_000,
                seconds=(end - begin) / 1e9,
                slurm_job_id=job,
                gpus=4,
            )
        )
    sink.close()
