"""A batch job, and which event leads from which state to which: pure, no file and no database."""

import dataclasses
import enum
from typing import Any

from batch_jobs import patterns


class State(enum.StrEnum):
    """A job's state, by Slurm's names."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    COMPLETING = "COMPLETING"  # no line runs any more; results are being written
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    TIMEOUT = "TIMEOUT"

    @property
    def short(self) -> str:
        """Return Slurm's code of two letters or so."""
        return _SHORT[self]

    @property
    def final(self) -> bool:
        """Whether nothing leads out of this state."""
        return self in FINAL


_SHORT = {
    State.PENDING: "PD",
    State.RUNNING: "R",
    State.COMPLETING: "CG",
    State.COMPLETED: "CD",
    State.FAILED: "F",
    State.CANCELLED: "CA",
    State.TIMEOUT: "TO",
}
FINAL = frozenset({State.COMPLETED, State.FAILED, State.CANCELLED, State.TIMEOUT})
ACTIVE = frozenset(State) - FINAL


class Event(enum.StrEnum):
    """What may happen to a job."""

    START = "start"  # a runner sends its lines
    REQUEUE = "requeue"  # it waits again; lines that have their result keep it
    DRAINED = "drained"  # every line has its result
    CANCEL = "cancel"  # lines without a result end as batch_cancelled
    EXPIRE = "expire"  # time limit or deadline: they end as batch_expired
    FAIL = "fail"  # the job itself can't go on (its files are gone, its output is refused)
    PUBLISHED = "published"  # results stand in their files
    PUBLISHED_CANCELLED = "published_cancelled"
    PUBLISHED_EXPIRED = "published_expired"


TRANSITIONS = {
    (State.PENDING, Event.START): State.RUNNING,
    (State.RUNNING, Event.REQUEUE): State.PENDING,
    (State.PENDING, Event.CANCEL): State.COMPLETING,
    (State.PENDING, Event.EXPIRE): State.COMPLETING,
    (State.PENDING, Event.FAIL): State.FAILED,
    (State.RUNNING, Event.DRAINED): State.COMPLETING,
    (State.RUNNING, Event.CANCEL): State.COMPLETING,
    (State.RUNNING, Event.EXPIRE): State.COMPLETING,
    (State.RUNNING, Event.FAIL): State.FAILED,
    (State.COMPLETING, Event.PUBLISHED): State.COMPLETED,
    (State.COMPLETING, Event.PUBLISHED_CANCELLED): State.CANCELLED,
    (State.COMPLETING, Event.PUBLISHED_EXPIRED): State.TIMEOUT,
    (State.COMPLETING, Event.FAIL): State.FAILED,
}


class WrongEvent(Exception):
    """The event is not listed for the state."""


def after(state: State, event: Event) -> State:
    """Return the state that ``event`` leads to.

    Raises:
        WrongEvent: the pair is not in `TRANSITIONS`.
    """
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise WrongEvent(f"a {state} job knows no event {event}") from None


class Ending(enum.StrEnum):
    """Why no line runs any more; kept in the journal's seal."""

    DRAINED = "drained"
    CANCELLED = "cancelled"
    EXPIRED = "expired"

    @property
    def published(self) -> Event:
        """Return the event that ends the job once its results stand in their files."""
        return _PUBLISHED[self]

    @property
    def event(self) -> Event:
        """Return the event that takes the job out of RUNNING."""
        return _ENDED[self]


_PUBLISHED = {
    Ending.DRAINED: Event.PUBLISHED,
    Ending.CANCELLED: Event.PUBLISHED_CANCELLED,
    Ending.EXPIRED: Event.PUBLISHED_EXPIRED,
}
_ENDED = {
    Ending.DRAINED: Event.DRAINED,
    Ending.CANCELLED: Event.CANCEL,
    Ending.EXPIRED: Event.EXPIRE,
}


class Reason(enum.StrEnum):
    """Why a job is in its state, in Slurm's words."""

    NONE = "None"
    PRIORITY = "Priority"  # other jobs go first
    RESOURCES = "Resources"  # no replica has room for it
    HELD_USER = "JobHeldUser"
    HELD_ADMIN = "JobHeldAdmin"
    BEGIN = "BeginTime"
    TIME_LIMIT = "TimeLimit"
    DEPENDENCY = "Dependency"
    NEVER = "DependencyNeverSatisfied"
    ARRAY_LIMIT = "JobArrayTaskLimit"
    GROUP_JOBS = "AssocGrpJobsLimit"  # the team runs as many jobs as it may
    GROUP_LINES = "AssocGrpLinesLimit"  # the team has as many lines in flight as it may
    GROUP_TOKENS = "AssocGrpTokensLimit"  # the team has used up its quota
    QOS_JOBS = "QOSMaxJobsPerUserLimit"
    DEADLINE = "DeadLine"
    LAUNCH_FAILED = "JobLaunchFailure"  # the job's own files are gone or unreadable
    OUTPUT_REFUSED = "OutputRefused"  # results stand in Forebay's folder, not where the user asked


class Order(enum.StrEnum):
    """In which order results are written."""

    INPUT = "input"
    COMPLETION = "completion"


@dataclasses.dataclass(frozen=True, slots=True)
class Counts:
    """Lines by how they ended, and what it took. Only what the journal has on disk is counted."""

    total: int = 0
    ok: int = 0
    failed: int = 0
    preempted: int = 0  # times that a line gave its seat back
    retried: int = 0  # failures that were tried again

    @property
    def done(self) -> int:
        """Lines that have their result."""
        return self.ok + self.failed


@dataclasses.dataclass(frozen=True, slots=True)
class Used:
    """Tokens of the answers, as the engines counted them. Only what the journal has on disk."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


class Door(enum.StrEnum):
    """Where a job came in; it is the same job at both."""

    FBATCH = "fbatch"
    OPENAI = "openai"


@dataclasses.dataclass(frozen=True, slots=True)
class BatchJob:
    """A submitted file of requests.

    Attributes:
        job_id: counts up from 1.
        team: who pays.
        user: whose job it is.
        uid: the Unix user that owns the published files; None: they stay in Forebay's folder.
        gid: that user's group.
        umask: for the published files.
        model: for lines that name none.
        endpoint: for lines that name none.
        order: of the results.
        detail: one line on the reason, or "".
        last_line: number of the file's last line, blank ones included.
        begin_us: UTC µs before which it does not start; 0: at once.
        deadline_us: UTC µs after which it is of no use; 0: never.
        time_limit_s: seconds that it may run; 0: unlimited.
        held: "", "user" or "admin".
        cancel_us: when somebody cancelled it; 0: nobody did.
        output_path: pattern of the file that its results go to, absolute; "": they stay in
            Forebay's folder.
        error_path: the same for the lines that failed.
        source: the submitted file as the user named it.
        door: where it came in.
        used: what its answers took.
        input_file: the uploaded file's id, "" where it came with the job.
        window: `completion_window` as it was asked.
        metadata: the caller's, a JSON object.
        finalizing_us: when its last line had ended.
        output_keep_s: seconds after the end for which results are kept; 0: as the site says.
        stored_bytes: what its files take, for the team's quota of storage.
        purged_us: when its files were removed; 0: they are there.
        priority: set by the user below 0, by an admin up to any; higher goes first.
        qos: a row of the site's, which adds to the priority and limits.
        dependency: as submitted, "" for none.
        array_id: the array's id, which is its first task's; 0: no array.
        array_task: the task's number; -1: no array.
        array_limit: tasks of the array that may run at once; 0: all.
        requeue: whether a lost or preempted job may start again.
        requeues: how often it was put back into the queue.
        top_us: when `fctl top` put it before the team's others; 0: never.
        requeue_us: when somebody asked for that; 0: nobody did, or it was done.
        estimated_us: when it was first expected to start; 0: nobody could tell.
        expected_us: when it is expected to start now, while it waits.
        format: of the results, jsonl or parquet.
        queued_tokens: what its lines were estimated to take.
    """

    job_id: int
    team: str
    user: str
    uid: int | None = None
    gid: int | None = None
    umask: int = 0o077
    name: str = "fbatch"
    comment: str = ""
    model: str = ""
    endpoint: str = ""
    order: Order = Order.COMPLETION
    state: State = State.PENDING
    reason: str = Reason.NONE
    detail: str = ""
    counts: Counts = dataclasses.field(default_factory=Counts)
    last_line: int = 0
    submitted_us: int = 0
    started_us: int = 0
    ended_us: int = 0
    begin_us: int = 0
    deadline_us: int = 0
    time_limit_s: int = 0
    held: str = ""
    cancel_us: int = 0
    output_path: str = ""
    error_path: str = ""
    source: str = ""
    input_sha256: str = ""
    door: Door = Door.FBATCH
    used: Used = dataclasses.field(default_factory=Used)
    input_file: str = ""
    window: str = ""
    metadata: str = "{}"
    finalizing_us: int = 0
    output_keep_s: int = 0
    stored_bytes: int = 0
    purged_us: int = 0
    priority: int = 0
    qos: str = ""
    dependency: str = ""
    array_id: int = 0
    array_task: int = -1
    array_limit: int = 0
    requeue: bool = True
    requeues: int = 0
    top_us: int = 0
    requeue_us: int = 0
    estimated_us: int = 0
    expected_us: int = 0
    format: str = "jsonl"
    queued_tokens: int = 0

    @property
    def shown_id(self) -> str:
        """Return the id as Slurm shows it: 12, or 12_3 for a task of an array."""
        return f"{self.array_id}_{self.array_task}" if self.array_id else str(self.job_id)

    @property
    def output_file(self) -> str:
        """Return the results' file, its pattern filled in, or ""."""
        return self._fill(self.output_path)

    @property
    def error_file(self) -> str:
        """Return the failed lines' file, its pattern filled in, or ""."""
        return self._fill(self.error_path)

    def _fill(self, pattern: str) -> str:
        return patterns.expand(
            pattern,
            job_id=self.job_id,
            array_id=self.array_id or None,
            name=self.name,
            user=self.user,
            task_id=self.array_task if self.array_id else None,
        )

    def public(self, now_us: int) -> dict[str, Any]:
        """Return the job as the API and ``fqueue --json`` show it; stable."""
        shown = dataclasses.asdict(self)
        for private in ("uid", "gid", "umask", "metadata"):
            del shown[private]
        lines = shown.pop("counts")
        end_us = self.ended_us if self.state.final else now_us
        waiting = waiting_reason(self, now_us) if self.state is State.PENDING else None
        return {
            **shown,
            "shown_id": self.shown_id,
            "door": str(self.door),
            "state": str(self.state),
            "order": str(self.order),
            "reason": str(waiting or self.reason),
            "tier": "batch",
            "lines": {**lines, "done": self.counts.done},
            "output_path": self.output_file,
            "error_path": self.error_file,
            "elapsed_s": max(0, end_us - self.started_us) // 1_000_000 if self.started_us else 0,
        }


def waiting_reason(job: BatchJob, now_us: int) -> Reason | None:
    """Return what of its own keeps a pending job back now, or None."""
    if job.held:
        return Reason.HELD_ADMIN if job.held == "admin" else Reason.HELD_USER
    if job.begin_us > now_us:
        return Reason.BEGIN
    return None


def overdue(job: BatchJob, now_us: int) -> Reason | None:
    """Return which limit an active job has passed, or None."""
    if job.deadline_us and now_us >= job.deadline_us:
        return Reason.DEADLINE
    limit = job.time_limit_s * 1_000_000
    if limit and job.started_us and now_us >= job.started_us + limit:
        return Reason.TIME_LIMIT
    return None
