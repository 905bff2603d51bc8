"""Slurm by its own commands: works wherever sbatch does, at the cost of a process a call."""

import os
import re
import secrets
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from scheduler.contracts import ids, slurm
from slurm_plugins import (
    find,
    owner,
    parse_reservation,
    parse_sacct,
    parse_scontrol,
    parse_squeue,
    parse_submit,
    sbatch,
)

_VERSION = re.compile(r"(\d+)\.(\d+)[.\w-]*")
_JSON_SINCE = (21, 8)
# A job that is gone is what a cancel wants.
_GONE = (
    "invalid job id",
    "already completing or completed",
    "already finished",
    "invalid job array",
)
# The request was sent and no answer came: the job may be there.
_UNCERTAIN = ("socket timed out", "zero bytes", "unexpected message", "connection reset")


class CliClient:
    """`slurm.SlurmPort` over sbatch, squeue, scontrol, scancel, sacct and sacctmgr.

    Args:
        conf: slurm.conf; None leaves it to Slurm's own search.
        cluster: the cluster's name; "" takes Slurm's.
        timeout_s: limit of one call.
        path: where the commands are looked for; None takes this process's PATH.
    """

    kind = "cli"
    excludes = True

    def __init__(
        self,
        conf: Path | None = None,
        *,
        cluster: str = "",
        timeout_s: float = 20.0,
        path: str | None = None,
    ) -> None:
        self._conf = conf
        self.users = owner.names()
        self._timeout_s = timeout_s
        self._path = path if path is not None else os.environ.get("PATH", sbatch.DEFAULT_PATH)
        self._cluster = cluster
        self._version: tuple[int, int] | None = None

    @property
    def cluster(self) -> str:
        """The cluster's name; the first use may ask Slurm for it."""
        if not self._cluster:
            self._cluster = self.config()["ClusterName"]
        return self._cluster

    def versions(self) -> slurm.Versions:
        """Ask squeue for its version and the controller for its own."""
        client = self._call(["squeue", "--version"]).split()
        controller = self.config().get("SLURM_VERSION", "")
        return slurm.Versions(client=client[-1] if client else "", controller=controller)

    def submit(self, spec: slurm.JobSpec) -> slurm.Submitted:
        """Submit by ``sbatch --parsable``, the script on its standard input."""
        argv = ["sbatch", *sbatch.arguments(spec)]
        # All of this reaches the job, so it is what the spec says and the way to Slurm, no more.
        environment = {**self._conf_variable(), **sbatch.environment(spec)}
        try:
            done = self._run(argv, environment=environment, stdin=spec.script)
        except slurm.SlurmTimeout as error:
            return find.submitted(self, spec, str(error))
        said = _line(done.stderr)
        if done.returncode and any(text in said.lower() for text in _UNCERTAIN):
            return find.submitted(self, spec, said)
        if done.returncode:
            raise parse_squeue.fault("sbatch", said or f"exit {done.returncode} without a word")
        answer = parse_submit.parse(done.stdout, cluster=self._cluster)
        if answer is None:
            return find.submitted(self, spec, f"sbatch printed no job id ({_line(done.stdout)!r})")
        return answer if answer.cluster else slurm.Submitted(answer.job_id, self.cluster)

    def cancel(self, job_id: ids.SlurmJobId, *, signal: str = "") -> None:
        """Cancel by scancel; with a signal, only the job's steps get it."""
        option = [f"--signal={signal}"] if signal else []
        done = self._run(["scancel", *option, job_id])
        said = _line(done.stderr)
        if done.returncode and not any(text in said.lower() for text in _GONE):
            raise parse_squeue.fault(f"scancel {job_id}", said)

    def update(
        self, job_id: ids.SlurmJobId, *, time_limit_s: int | None = None, comment: str | None = None
    ) -> None:
        """Change a job by ``scontrol update``."""
        changes = []
        if time_limit_s is not None:
            changes.append(f"TimeLimit={sbatch.minutes(time_limit_s)}")
        if comment is not None:
            changes.append(f"Comment={comment}")
        if changes:
            self._call(["scontrol", "update", f"JobId={job_id}", *changes])

    def jobs(self) -> tuple[slurm.Job, ...]:
        """List all jobs by one squeue: JSON where it has it, else text with safe separators."""
        if self._client_version() >= _JSON_SINCE:
            done = self._run(
                ["squeue", "--all", "--states=all", "--json"], errors=parse_squeue.JSON_ERRORS
            )
            if done.returncode and not done.stdout.strip():
                raise parse_squeue.fault("squeue --json", _line(done.stderr))
            value = parse_squeue.load(done.stdout, "squeue --json")
            return parse_squeue.jobs(value, cluster=self.cluster)
        mark = f"<{secrets.token_hex(8)}>"
        asked = f"--format={parse_squeue.text_format(mark)}"
        answer = self._call(["squeue", "--all", "--states=all", "--noheader", asked])
        return parse_squeue.text(answer, mark, cluster=self.cluster)

    def states(self, job_ids: Iterable[ids.SlurmJobId]) -> Mapping[ids.SlurmJobId, slurm.JobState]:
        """Return the states of the jobs asked for, out of one list of all."""
        known = {job.job_id: job.state for job in self.jobs()}
        return {job_id: known.get(job_id, slurm.JobState.UNKNOWN) for job_id in job_ids}

    def nodes(self) -> tuple[slurm.Node, ...]:
        """List nodes by ``scontrol show node``, which alone says how GPUs are used."""
        return parse_scontrol.nodes(self._call(["scontrol", "--all", "-d", "-o", "show", "node"]))

    def partitions(self) -> tuple[slurm.Partition, ...]:
        """List partitions by ``scontrol show partition``."""
        return parse_scontrol.partitions(
            self._call(["scontrol", "--all", "-o", "show", "partition"])
        )

    def reservations(self) -> tuple[slurm.Reservation, ...]:
        """List reservations by ``scontrol show reservation``."""
        return parse_reservation.text(self._call(["scontrol", "-o", "show", "reservation"]))

    def accounting(self, job_id: ids.SlurmJobId) -> tuple[slurm.JobRun, ...]:
        """Return every run by ``sacct -D``, times in seconds since the epoch."""
        argv = [
            "sacct", "--duplicates", "--allocations", "--noheader", "--parsable2",
            f"--jobs={job_id}", f"--format={','.join(parse_sacct.FIELDS)}",
        ]  # fmt: skip
        answer = self._call(argv, {"SLURM_TIME_FORMAT": "%s"})
        return parse_sacct.runs(answer, job_id)

    def associations(self) -> tuple[slurm.Association, ...]:
        """Join sacctmgr's associations, users and coordinators."""
        ask = ["sacctmgr", "--noheader", "--parsable2", "--readonly", "show"]
        assoc = self._call([*ask, "assoc", "format=Cluster,Account,User"])
        users = self._call([*ask, "user", "format=User,DefaultAccount,AdminLevel"])
        coordinators = self._call([*ask, "account", "withcoord", "format=Account,Coordinators"])
        return parse_sacct.associations(assoc, users, coordinators, cluster=self.cluster)

    def config(self) -> Mapping[str, str]:
        """Return ``scontrol show config``."""
        return parse_scontrol.config(self._call(["scontrol", "show", "config"]))

    def _client_version(self) -> tuple[int, int]:
        if self._version is None:
            match = _VERSION.search(self._call(["squeue", "--version"]))
            if match is None:
                raise slurm.SlurmGarbled("squeue --version: no version in the answer")
            self._version = (int(match[1]), int(match[2]))
        return self._version

    def _conf_variable(self) -> dict[str, str]:
        conf = str(self._conf) if self._conf is not None else os.environ.get("SLURM_CONF", "")
        return {"SLURM_CONF": conf} if conf else {}

    def _environment(self) -> dict[str, str]:
        return {"PATH": self._path, "LC_ALL": "C.UTF-8", "TZ": "UTC", **self._conf_variable()}

    def _call(self, argv: Sequence[str], extra: Mapping[str, str] | None = None) -> str:
        """Run a command that must succeed and return what it printed."""
        done = self._run(argv, environment={**self._environment(), **(extra or {})})
        said = _line(done.stderr)
        what = " ".join(argv[:3])
        if done.returncode:
            raise parse_squeue.fault(what, said or _line(done.stdout) or f"exit {done.returncode}")
        # Some commands say that nobody answered, print nothing, and exit with 0.
        if not done.stdout.strip() and said:
            error = parse_squeue.fault(what, said)
            if not isinstance(error, slurm.SlurmRefused):
                raise error
        return done.stdout

    def _run(
        self,
        argv: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        stdin: str = "",
        errors: str = "backslashreplace",
    ) -> "subprocess.CompletedProcess[str]":
        env = self._environment() if environment is None else environment
        # Found by our own PATH: the job's environment, which sbatch is started with, has another.
        command = _which(argv[0], self._path)
        try:
            return subprocess.run(
                [command, *argv[1:]],
                input=stdin,
                capture_output=True,
                env=env,
                timeout=self._timeout_s,
                encoding="utf-8",
                errors=errors,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise slurm.SlurmTimeout(
                f"{argv[0]}: no answer within {self._timeout_s:g} s; is slurmctld up?"
            ) from error
        except OSError as error:
            raise slurm.SlurmUnavailable(f"{argv[0]} can't be run: {error.strerror}") from error


def _which(name: str, path: str) -> str:
    for folder in path.split(os.pathsep):
        candidate = Path(folder, name)
        if os.access(candidate, os.X_OK):
            return str(candidate)
    raise slurm.SlurmUnavailable(
        f"{name} is not on PATH; install Slurm's client or set [slurm] client"
    )


def _line(text: str) -> str:
    return " ".join(text.split())
