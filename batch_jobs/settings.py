"""The `[batch_jobs]` table of forebay.toml."""

import dataclasses

from scheduler.contracts.settings import setting


@dataclasses.dataclass(frozen=True)
class BatchJobsSettings:
    """How batch jobs are taken, run and published."""

    max_line_bytes: int = setting(
        16 * 1024 * 1024,
        "Longest line of a batch file; a longer one fails alone. Above any prompt that fits a context.",
        unit="bytes",
        least=1024,
    )
    max_jobs: int = setting(
        64, "Jobs that one runner works on at the same time; more wait as PENDING.", least=1
    )
    first_window: int = setting(
        32,
        "Lines in flight for each model at the start, so that long lines fill a fleet at once; what finds "
        "no seat waits in the gateway's queue. Doubles until the fleet says full.",
        least=1,
    )
    max_window: int = setting(
        256, "Most lines in flight for each model; bounds the runner's memory.", least=1
    )
    retry_cap: int = setting(
        5,
        "Failures of one line before it goes to the error file. Preemptions and refusals for lack of"
        " room never count.",
        least=1,
    )
    poison_after: int = setting(
        2, "Replicas that a line may lose before it is set aside as poisonous.", least=1
    )
    first_backoff_s: float = setting(
        0.5, "Wait before the first retry of a line; doubles each time.", unit="s", least=0.001
    )
    max_backoff_s: float = setting(
        30.0, "Longest wait between two tries of a line.", unit="s", least=0.001
    )
    max_wait_s: float = setting(
        5.0,
        "Longest wait before a line that was preempted or found no room is offered again; short,"
        " since an offer costs little and a gap should not stay empty.",
        unit="s",
        least=0.001,
    )
    max_quota_wait_s: float = setting(
        60.0,
        "Longest wait of a line whose team's quota is used up, however far off the told time is; so"
        " soon is a raised quota seen, and each offer leaves a usage row.",
        unit="s",
        least=0.001,
    )
    request_timeout_s: float = setting(
        5400.0,
        "Longest wait for one line's answer: the gateway's queue (its deadline_batch_s) and half an"
        " hour of work.",
        unit="s",
        least=1,
    )
    team_storage_bytes: int = setting(
        0,
        "What a team's uploads and batch jobs may take in the state folder together; 0: no limit.",
        unit="bytes",
        least=0,
    )
    keep_s: int = setting(
        30 * 86_400,
        "How long a job's files are kept after its end; results that were published to a user's own "
        "folder stay there. 0: for ever.",
        unit="s",
        least=0,
    )
    poll_s: float = setting(
        0.25,
        "How often the runner looks for new jobs, cancellations and limits; one short query each.",
        unit="s",
        least=0.01,
    )
