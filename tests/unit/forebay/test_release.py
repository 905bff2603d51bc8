"""What `forebay up` cancels as it ends: its own leases, and nothing else that Slurm has."""

import dataclasses

from forebay import up
from scheduler.contracts import clock, ids, slurm
from tests import fakeslurm


def test_only_its_own_leases_are_given_back(fake_clock: clock.FakeClock) -> None:
    port = fakeslurm.FakeSlurm(fake_clock)

    def add(user: str, cluster: str | None, number: int) -> str:
        stamp = None
        if cluster is not None:
            stamp = slurm.Stamp(cluster, ids.LeaseId(f"l-{number}"), "serve", "forebay")
        spec = slurm.JobSpec("lease", "", ("serve",), 600, "/dev/null", "/", stamp=stamp)
        job = dataclasses.replace(port.add(spec), user=user)
        port._jobs[job.job_id] = job
        return job.job_id

    ours = add("forebay", "alpha", 1)
    add("mallory", "alpha", 1)
    add("forebay", "beta", 2)
    add("forebay", None, 3)
    ended = add("forebay", "alpha", 4)
    port.end(ended, slurm.JobState.COMPLETED)
    assert up.release(port, "alpha") == [ours]
    assert port.cancelled == [ours]
