"""The Slurm clients under contract, each with the cluster that it speaks to.

On a plain machine: embedded, and the command line and REST on the development cluster. Inside the root
that `make test-pyslurm` builds: pyslurm, the command line, and REST in each data-parser version.
"""

import dataclasses
import datetime
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from scheduler.contracts import ids, slurm
from slurm_plugins import cli, embedded, pyslurm_client, rest, tokens

ROOT_SITE = os.environ.get("FOREBAY_SLURM_ROOT", "")
_REST_VERSIONS = ("0.0.42", "0.0.43", "0.0.44", "0.0.45")
if ROOT_SITE:
    SUBJECTS = [
        pytest.param(name, marks=pytest.mark.pyslurm)
        for name in ("pyslurm", "cli", *(f"rest-{version}" for version in _REST_VERSIONS))
    ]
else:
    SUBJECTS = [
        pytest.param("embedded"),
        pytest.param("cli", marks=pytest.mark.slurm),
        pytest.param("rest", marks=pytest.mark.slurm),
    ]
PATIENCE_S = 60.0


@dataclasses.dataclass(frozen=True)
class Subject:
    """A client, where its jobs may write, and what its cluster has."""

    port: slurm.SlurmPort
    folder: Path
    accounting: bool
    associations: bool
    exclude: bool  # whether nodes can be asked for by name
    account: str
    conf: str = ""

    def spec(
        self, script: str, *, name: str = "lease", gpus: int = 2, stamped: bool = True
    ) -> slurm.JobSpec:
        """Return a small job in partition serve that can't be refused."""
        lease = ids.LeaseId(ids.short_id("l"))
        return slurm.JobSpec(
            name=name,
            script=f"#!/bin/bash\n{script}\n",
            partitions=("serve",),
            time_limit_s=600,
            output=str(self.folder / "out-%j"),
            directory=str(self.folder),
            stamp=slurm.Stamp(self.port.cluster, lease, "serve", "physics") if stamped else None,
            account=self.account,
            gpus_per_node=gpus,
            memory_mb=100,
            environment={"FOREBAY_TEST": "a,b 'c' $HOME\tü", "PATH": "/usr/bin:/bin"},
        )

    def reserve(self, kept: slurm.Reservation) -> None:
        """Keep nodes, as an admin does; `release` ends it."""
        if isinstance(self.port, embedded.EmbeddedClient):
            self.port.reserve(kept)
            return
        self._scontrol(
            "create", "reservation", f"ReservationName={kept.name}",
            f"StartTime={_scontrol_time(kept.starts_us)}", f"EndTime={_scontrol_time(kept.ends_us)}",
            f"Nodes={','.join(kept.nodes)}", f"Flags={','.join(sorted(kept.flags))}",
            f"Users={','.join(kept.users)}",
        )  # fmt: skip

    def release(self, name: str) -> None:
        """End a reservation."""
        if isinstance(self.port, embedded.EmbeddedClient):
            self.port.release(name)
        else:
            self._scontrol("delete", f"ReservationName={name}")

    def _scontrol(self, *words: str) -> None:
        subprocess.run(
            ["scontrol", *words],
            check=True,
            capture_output=True,
            env={**os.environ, "SLURM_CONF": self.conf, "TZ": "UTC"},
        )

    def job(self, job_id: str) -> slurm.Job:
        """Return a job out of the list of all."""
        return next(job for job in self.port.jobs() if job.job_id == job_id)

    def until(self, job_id: ids.SlurmJobId, wanted: Callable[[slurm.JobState], bool]) -> slurm.Job:
        """Wait until the job's state is as wanted."""
        eventually(lambda: wanted(self.port.states([job_id])[job_id]), f"state of job {job_id}")
        return self.job(job_id)

    def output(self, job_id: str, ends: str) -> str:
        """Return what a job printed, once it has printed its last line."""
        file = self.folder / f"out-{job_id}"
        eventually(lambda: file.exists() and ends in file.read_text(), f"output of job {job_id}")
        return file.read_text()


def _scontrol_time(at_us: int) -> str:
    moment = datetime.datetime.fromtimestamp(at_us / 1_000_000, datetime.UTC)
    return moment.strftime("%Y-%m-%dT%H:%M:%S")


def eventually(condition: Callable[[], bool], what: str) -> None:
    """Ask a real service until it says yes; it tells nobody by itself."""
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, f"{what}: not within {PATIENCE_S} s"
        time.sleep(0.05)


def running(state: slurm.JobState) -> bool:
    """Whether a job runs."""
    return state is slurm.JobState.RUNNING


def final(state: slurm.JobState) -> bool:
    """Whether a job has ended."""
    return state.final


def make(name: str, folder: Path, request: pytest.FixtureRequest) -> Iterator[Subject]:
    """Yield a subject; all that it still runs is cancelled at the end."""
    if name == "embedded":
        client = embedded.EmbeddedClient(folder / "state", kill_wait_s=1.0)
        try:
            yield Subject(client, folder, True, False, True, "")
        finally:
            client.shutdown()
        return
    port, site_accounting, conf = _real(name, request)
    folder.chmod(0o755)
    subject = Subject(
        port, folder, site_accounting, site_accounting, name != "rest",
        "physics" if site_accounting else "", str(conf),
    )  # fmt: skip
    try:
        yield subject
    finally:
        mine = [job for job in port.jobs() if not job.state.final]
        for job in mine:
            port.cancel(job.job_id)
        for job in mine:
            subject.until(job.job_id, final)
        if isinstance(port, rest.RestClient):
            port.close()


def _real(name: str, request: pytest.FixtureRequest) -> tuple[slurm.SlurmPort, bool, Path]:
    if ROOT_SITE:
        raw = json.loads(Path(ROOT_SITE).read_text())
        conf, url, key, user = Path(raw["slurm_conf"]), raw["rest_url"], raw["jwt_key"], "root"
    else:
        site = request.getfixturevalue("slurm_site")
        conf, url, key, user = site.slurm_conf, site.rest_url, site.jwt_key, site.rest_user
    if name == "pyslurm":
        return pyslurm_client.PyslurmClient(conf), not ROOT_SITE, conf
    if name == "cli":
        return cli.CliClient(conf), not ROOT_SITE, conf
    client = rest.RestClient(
        url,
        user=user,
        token=tokens.from_key(Path(key), user),
        version=name.partition("-")[2],
    )
    return client, not ROOT_SITE, conf
