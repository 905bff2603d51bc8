"""The port to Slurm: what Forebay asks of a cluster, and every way in which Slurm can fail to answer.

```
SlurmError
├── SlurmUnavailable   controller or daemon does not answer     retry with back-off
│   └── SlurmTimeout   no answer within the call's time limit   retry with back-off
├── SlurmRefused       Slurm said no, and why                   not as it is
├── SlurmGarbled       the answer can't be read                 retry once, then report
├── SubmitUncertain    the submission may or may not have gone  look the stamp up, never submit again blindly
└── AccountingOff      no accounting storage                    never: the site has none
```
A job id that is missing from an answer is `JobState.UNKNOWN`, never finished; a final state stays final.
"""

import dataclasses
import enum
from collections.abc import Iterable, Mapping
from typing import Protocol

from scheduler.contracts import ids


class SlurmError(Exception):
    """Base of all; the message is one line: what was asked, what Slurm said, what to do."""

    retryable = False


class SlurmUnavailable(SlurmError):
    """The controller, or the daemon behind this client, does not answer."""

    retryable = True


class SlurmTimeout(SlurmUnavailable):
    """No answer within the call's time limit."""


class SlurmRefused(SlurmError):
    """Slurm refused what was asked."""


class SlurmGarbled(SlurmError):
    """The answer was truncated, empty or of an unknown form."""

    retryable = True


class SubmitUncertain(SlurmError):
    """A submission was sent and no job id came back: look for the stamp before trying again."""


class AccountingOff(SlurmError):
    """The cluster keeps no accounting records."""


class JobState(enum.StrEnum):
    """Slurm's base job states, and `UNKNOWN` for what Slurm did not answer."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    SUSPENDED = "SUSPENDED"
    COMPLETING = "COMPLETING"
    COMPLETED = "COMPLETED"
    CANCELLED = "CANCELLED"
    FAILED = "FAILED"
    TIMEOUT = "TIMEOUT"
    NODE_FAIL = "NODE_FAIL"
    PREEMPTED = "PREEMPTED"
    BOOT_FAIL = "BOOT_FAIL"
    DEADLINE = "DEADLINE"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    UNKNOWN = "UNKNOWN"

    @property
    def final(self) -> bool:
        """Whether nothing follows (a requeued job is PENDING again, which is not final)."""
        return self not in _OPEN_STATES


_OPEN_STATES = frozenset(
    {
        JobState.PENDING,
        JobState.RUNNING,
        JobState.SUSPENDED,
        JobState.COMPLETING,
        JobState.UNKNOWN,
    }
)


@dataclasses.dataclass(frozen=True, slots=True)
class Stamp:
    """What Forebay writes into its jobs' comments, to know them again.

    `slurm_plugins.stamp` renders and parses it; `job_submit.lua` checks it.
    """

    cluster: str
    lease_id: ids.LeaseId
    kind: str  # serve or backfill
    team: str


@dataclasses.dataclass(frozen=True, slots=True)
class JobSpec:
    """A job to submit.

    Attributes:
        script: the whole batch script, ``#!`` line included.
        stamp: becomes the job's comment; None for a job that is not a lease.
        partitions: Slurm takes the first that can start.
        gpus_per_node: 0 for none.
        gres: what is counted in `gpus_per_node`: `gpu`, or parts of one: `shard`, `mps`.
        gres_type: as the site spells it (`H100`), "" for any.
        memory_mb: per node; None leaves the site's default, 0 asks for all.
        time_limit_s: walltime in seconds.
        time_min_s: the least walltime that is still useful; 0 for none.
        environment: variables for the script, besides Slurm's own; nothing else is exported.
        output: file for the script's output (Slurm's `%j` patterns work).
    """

    name: str
    script: str
    partitions: tuple[str, ...]
    time_limit_s: int
    output: str
    directory: str
    stamp: Stamp | None = None
    account: str = ""
    qos: str = ""
    nodes: int = 1
    cpus_per_node: int = 1
    gpus_per_node: int = 0
    gres_type: str = ""
    memory_mb: int | None = None
    time_min_s: int = 0
    constraint: str = ""
    nodelist: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    hold: bool = False
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    gres: str = "gpu"


@dataclasses.dataclass(frozen=True, slots=True)
class Submitted:
    """What Slurm answered to a submission."""

    job_id: ids.SlurmJobId
    cluster: str


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """One job as the controller knows it.

    Attributes:
        gpus: GPUs allocated or asked for; None if Slurm does not say.
        flags: state flags beside the base state (`REQUEUED`, `COMPLETING` …).
        restarts: how often it was requeued.
        started_us, ended_us: UTC µs, 0 if not yet.
    """

    job_id: ids.SlurmJobId
    cluster: str
    name: str
    user: str
    account: str
    partition: str
    state: JobState
    reason: str = ""
    comment: str = ""
    stamp: Stamp | None = None
    flags: frozenset[str] = frozenset()
    nodes: tuple[str, ...] = ()
    gpus: int | None = None
    submitted_us: int = 0
    started_us: int = 0
    ended_us: int = 0
    time_limit_s: int = 0
    restarts: int = 0
    exit_code: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Node:
    """One node.

    Attributes:
        state: base state, lower case (`idle`, `mixed`, `allocated`, `down` …).
        flags: lower-case flags (`drain`, `planned`, `not_responding` …).
        usable: whether a new lease could start on it, by state and flags.
        gpus, gpus_free: None if Slurm does not say; `gpus_free` is 0 where `usable` is false.
        gres_type: the GPU type as the site spells it, "" if untyped.
        shared: parts of GPUs that it offers, by kind: `{"shard": 16}`.
        features: that constraints may ask for; None if Slurm does not say.
    """

    name: str
    state: str
    flags: frozenset[str]
    usable: bool
    partitions: tuple[str, ...]
    gpus: int | None
    gpus_free: int | None
    gres_type: str = ""
    cpus: int = 0
    cpus_free: int = 0
    memory_mb: int = 0
    reason: str = ""
    unknown_flags: frozenset[str] = frozenset()
    shared: Mapping[str, int] = dataclasses.field(default_factory=dict)
    features: tuple[str, ...] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Partition:
    """One partition; times in seconds, None for unlimited."""

    name: str
    up: bool
    nodes: tuple[str, ...]
    max_time_s: int | None
    preempt_mode: str = ""
    priority_tier: int = 1
    grace_time_s: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Reservation:
    """Nodes that Slurm keeps for somebody, or for maintenance, for some time.

    Attributes:
        starts_us, ends_us: UTC µs; one that comes again (`DAILY` …) tells its present or next time.
        nodes: empty where it keeps only licences.
        flags: Slurm's words, upper case (`MAINT`, `IGNORE_JOBS`, `DAILY` …).
        users, accounts: whom it is for; both empty for maintenance of older releases.
    """

    name: str
    starts_us: int
    ends_us: int
    nodes: tuple[str, ...] = ()
    flags: frozenset[str] = frozenset()
    users: tuple[str, ...] = ()
    accounts: tuple[str, ...] = ()

    @property
    def maintenance(self) -> bool:
        """Whether its nodes are worked on."""
        return "MAINT" in self.flags


@dataclasses.dataclass(frozen=True, slots=True)
class JobRun:
    """One run of a job in Slurm's accounting (a requeued job has several).

    `gpus` is None where AllocTRES has none; `ended_us` is 0 while it runs; `shared` are parts of GPUs by
    kind, where the site counts them (`AccountingStorageTRES`).
    """

    job_id: ids.SlurmJobId
    run: int
    state: JobState
    started_us: int
    ended_us: int
    elapsed_s: int
    gpus: int | None
    node_count: int = 1
    exit_code: str = ""
    shared: Mapping[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class Association:
    """A user's right to charge an account; `user` is "" for the account's own row."""

    user: str
    account: str
    default: bool = False
    coordinator: bool = False
    admin: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Versions:
    """Versions of the client side and of the controller, as text (`22.05.8`)."""

    client: str
    controller: str


class SlurmPort(Protocol):
    """What Forebay asks of one Slurm cluster. Calls block; the broker runs them in threads.

    Every call may raise `SlurmUnavailable`, `SlurmTimeout` or `SlurmGarbled`.
    """

    @property
    def excludes(self) -> bool:
        """Whether a job can be kept off nodes (`JobSpec.exclude`)."""
        ...

    @property
    def kind(self) -> str:
        """Which client this is: pyslurm, slurmrestd, cli or embedded."""
        ...

    @property
    def cluster(self) -> str:
        """The cluster's name, on every lease and record."""
        ...

    @property
    def users(self) -> frozenset[str]:
        """Names (and numbers) of the user that jobs are submitted as; asks nobody."""
        ...

    def versions(self) -> Versions:
        """Ask for both versions."""
        ...

    def submit(self, spec: JobSpec) -> Submitted:
        """Submit a job.

        Raises:
            SlurmRefused: with Slurm's own words.
            SubmitUncertain: it may have been accepted; find it by its stamp.
        """
        ...

    def cancel(self, job_id: ids.SlurmJobId, *, signal: str = "") -> None:
        """Cancel a job, or send ``signal`` (`TERM`) to its steps; a job that is gone is no error."""
        ...

    def update(
        self, job_id: ids.SlurmJobId, *, time_limit_s: int | None = None, comment: str | None = None
    ) -> None:
        """Change a job. Raises `SlurmRefused` where Slurm does not allow it."""
        ...

    def jobs(self) -> tuple[Job, ...]:
        """List every job that the controller knows, in one call (array tasks apart)."""
        ...

    def states(self, job_ids: Iterable[ids.SlurmJobId]) -> Mapping[ids.SlurmJobId, JobState]:
        """Return a state for each id asked, `UNKNOWN` for those that Slurm did not name."""
        ...

    def nodes(self) -> tuple[Node, ...]:
        """List nodes with their usable GPUs."""
        ...

    def partitions(self) -> tuple[Partition, ...]:
        """List partitions."""
        ...

    def reservations(self) -> tuple[Reservation, ...]:
        """List reservations that have not ended; jobs start on their nodes only if they end before."""
        ...

    def accounting(self, job_id: ids.SlurmJobId) -> tuple[JobRun, ...]:
        """Return every run of a job from Slurm's accounting (`sacct -D`).

        Raises:
            AccountingOff: the cluster keeps none.
        """
        ...

    def associations(self) -> tuple[Association, ...]:
        """List who may charge which account. Raises `AccountingOff`."""
        ...

    def config(self) -> Mapping[str, str]:
        """Return the controller's configuration (`scontrol show config`), for `fctl doctor`."""
        ...


class AccountBooks(Protocol):
    """Slurm's own books by account; `slurm_plugins.sreport` is the real one."""

    def accounts(self, job_ids: Iterable[ids.SlurmJobId]) -> Mapping[ids.SlurmJobId, str]:
        """Return which account each job was charged to; unknown jobs are left out.

        Raises:
            SlurmError: accounting is off or does not answer.
        """
        ...

    def gpu_seconds(self, start_us: int, end_us: int) -> Mapping[str, int]:
        """Return each account's GPU-seconds between two whole UTC hours, by Slurm's hourly sums.

        Raises:
            SlurmError: accounting is off or does not answer.
        """
        ...
