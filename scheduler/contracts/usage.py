"""The usage record: what each side of an attempt writes, and the one row that readers see.

An attempt is one dispatch of a request to a replica. The gateway appends OPEN at the dispatch and
CLOSE before the last bytes go out; the replica appends its own row whenever a sequence leaves the
engine. Readers merge on (request id, attempt): CLOSE over REPLICA over OPEN. Either process may die
and exactly one row remains. Of two CLOSE rows of an attempt the one with the later end holds: a part of
an answer that a team would pay for is amended so when the answer can't be completed. All counts are
disjoint non-negative integers; times are UTC µs.
"""

import dataclasses
import enum
from typing import Any, Protocol

from scheduler.contracts import errors


class Outcome(enum.StrEnum):
    """How an attempt ended."""

    OK = "ok"
    CLIENT_GONE = "client_gone"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    PREEMPTED = "preempted"
    REPLICA_LOST = "replica_lost"
    REFUSED = "refused"  # before any work; costs nothing and is counted
    ERROR = "error"
    OPEN = "open"  # dispatched, and neither side has said how it ended


class Payer(enum.StrEnum):
    """Who pays for the tokens."""

    TEAM = "team"
    PLATFORM = "platform"  # recomputation, preempted work, faults of ours


class RowKind(enum.StrEnum):
    """Which side wrote a row; the order of precedence is CLOSE, REPLICA, OPEN."""

    OPEN = "open"
    CLOSE = "close"
    REPLICA = "replica"


@dataclasses.dataclass(frozen=True, slots=True)
class Identity:
    """What is known of an attempt when it is dispatched; it travels to the replica in a header."""

    request_id: str
    attempt: int  # from 1
    cluster: str
    team: str
    user: str
    key_id: str
    model: str
    version: str
    adapter: str  # "" if none
    endpoint: str
    tier: str
    replica_id: str
    lease_id: str
    slurm_job_id: str
    arrived_us: int
    started_us: int  # dispatched to the replica
    batch_job_id: int = 0  # 0: not a batch line
    custom_id: str = ""
    caller_request_id: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class UsageRow:
    """One row in a spool: the identity, and what its writer knows of the end.

    Attributes:
        kind: which side wrote it.
        identity: which attempt it is.
        outcome: how the attempt ended (`OPEN` in an OPEN row).
        uncached_prompt_tokens: prompt tokens computed.
        cached_prompt_tokens: prompt tokens taken from the prefix cache.
        output_tokens: tokens sampled.
        first_token_us: UTC µs of the first token, 0 if none came.
        ended_us: UTC µs of the end, 0 if not ended.
        payer: who pays.
        reason: one line on why it did not end ok, or "".
        waste_tokens: tokens beside the other counts that the platform pays for whoever pays the row:
            what a resumed attempt prefilled again (prompt and delivered output, which an earlier
            attempt's row counts), and output that was sampled and lost before anybody got it.
    """

    kind: RowKind
    identity: Identity
    outcome: Outcome = Outcome.OPEN
    uncached_prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    output_tokens: int = 0
    first_token_us: int = 0
    ended_us: int = 0
    payer: Payer = Payer.TEAM
    reason: str = ""
    waste_tokens: int = 0

    def flat(self) -> dict[str, Any]:
        """Return one flat mapping: the identity's fields and this row's, as the spool stores it."""
        row = dataclasses.asdict(self)
        return {**row.pop("identity"), **row}


@dataclasses.dataclass(frozen=True, slots=True)
class GpuRow:
    """GPU time that a lease held, by the agent's own clock; appended about each minute and at the end.

    Rows of one lease run tile its life: each begins where the one before ended. `run` counts the
    runs of a requeued Slurm job from 0, so that no run's time is lost or counted twice. A row may be
    written again under the same key with a later end while its minute goes on; the one that ends last
    counts.

    Attributes:
        lost: 1 if nobody on the node could write it: the broker has, until the end that Slurm states. It
            counts from where the agent's own rows of the run end.
        parts: of a GPU that `gpus` counts, here and in the lease's replica rows: 1 for whole ones.
    """

    cluster: str
    lease_id: str
    slurm_job_id: str
    run: int
    node: str
    team: str  # the team that the lease is charged to
    kind: str  # serve or backfill
    gpus: int
    start_us: int
    end_us: int
    seq: int  # 0, 1, 2 … within the run; (lease, run, seq) is the key
    lost: int = 0
    parts: int = 1

    @property
    def gpu_us(self) -> int:
        """GPU-µs, rounded down; none of a row that ends before it begins."""
        return self.gpus * max(0, self.end_us - self.start_us) // max(1, self.parts)


@dataclasses.dataclass(frozen=True, slots=True)
class ReplicaTimeRow:
    """What a replica's GPUs did in an interval: which replica held which share of a lease, and when.

    A row may be written again under the same key with a later end while its interval goes on (so that a
    killed agent loses a second and not a minute); the one that ends last counts.

    Attributes:
        state: starting, serving, draining or asleep.
        seq: 0, 1, 2 … of the replica; (lease, replica, seq) is the key.
        busy_us: µs in which the engine made steps, at most the interval's length.
        prefill_tokens: prompt tokens that it computed, those taken from a cache left out.
        decode_tokens: tokens that it sampled.
        steps: steps that it made.
        measured: 1 if the engine tells its steps, so that no busy time means none; 0 if it does not
            (a foreign server; rows of the first release).
        dedicated: the team whose floor the replica is, "" if it is everybody's.
    """

    cluster: str
    lease_id: str
    slurm_job_id: str
    replica_id: str
    model: str
    version: str
    gpus: int
    start_us: int
    end_us: int
    state: str
    seq: int
    busy_us: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    steps: int = 0
    measured: int = 0
    dedicated: str = ""


# `UsageRow.reason` of a whole answer whose engine told no usage.
ESTIMATED = "usage estimated: the engine told none"

Row = UsageRow | GpuRow | ReplicaTimeRow


class UsageSink(Protocol):
    """Where a process appends its rows. One writer per process; `accounting.spool` is the real one."""

    def append(self, row: Row) -> None:
        """Buffer a row; it is durable after the next `sync`.

        Raises:
            errors.RecordingUnavailable: there is no room for it (raised when a segment is opened,
                so that a request can be refused before tokens are spent).
        """
        ...

    async def sync(self) -> None:
        """Return when every row appended so far is on disk (concurrent callers share one fsync).

        Raises:
            errors.RecordingUnavailable: the disk refused it.
        """
        ...

    def ready(self) -> None:
        """Raise `errors.RecordingUnavailable` if a row could not be kept now; cheap, for each request."""
        ...


class MemorySink:
    """The fake sink: rows in a list; `full` makes it refuse as a full disk does."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.synced = 0
        self.full = False

    def append(self, row: Row) -> None:
        """Keep the row."""
        self.ready()
        self.rows.append(row)

    async def sync(self) -> None:
        """Count the rows as durable."""
        self.synced = len(self.rows)

    def ready(self) -> None:
        """Refuse while `full` is set."""
        if self.full:
            raise errors.RecordingUnavailable("usage spool: no space left, free some or move it")
