"""The `[batch_jobs]` table of forebay.toml."""

import dataclasses
from collections.abc import Mapping

from scheduler.contracts.settings import setting
from scheduler.core import batch_order


@dataclasses.dataclass(frozen=True)
class BatchJobsSettings:
    """How batch jobs are taken, run and published."""

    max_line_bytes: int = setting(
        16 * 1024 * 1024,
        "Longest line of a batch file; a longer one fails alone. Above any prompt that fits a context.",
        unit="bytes",
        least=1024,
    )
    share_half_life_s: float = setting(
        7 * 86_400.0,
        "After so long half of what a team's batch jobs have used no longer counts against its next ones; "
        "as Slurm's PriorityDecayHalfLife.",
        unit="s",
        least=1,
    )
    weight_age: int = setting(
        1_000, "What having waited `age_most_s` adds to a job's priority.", least=0
    )
    age_most_s: float = setting(
        7 * 86_400.0, "Waiting longer than this adds nothing more.", unit="s", least=1
    )
    weight_fairshare: int = setting(
        10_000, "What a team that has used nothing has above one far over its share.", least=0
    )
    weight_qos: int = setting(10_000, "What the highest QOS adds to a job's priority.", least=0)
    qos: Mapping[str, float] = setting(
        {}, "QOS that --qos may name, with their priorities; without any there is none to name."
    )
    qos_max_jobs: Mapping[str, float] = setting(
        {}, "Jobs of one user that may run at once in a QOS; no limit where it is not named."
    )
    team_jobs: int = setting(0, "Jobs of one team that run at once; 0: no limit.", least=0)
    team_lines: int = setting(
        0, "Lines of one team that are in flight at once; 0: no limit.", least=0
    )
    team_queued_tokens: int = setting(
        0,
        "Estimated tokens of one team's jobs that have not ended; a submission beyond is refused. "
        "0: no limit.",
        unit="tokens",
        least=0,
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
        2,
        "A line that has lost so many replicas, the last as the only suspect there, is set aside as "
        "poisonous.",
        least=1,
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
    commit_s: float = setting(
        0.02,
        "Least time between two commits of a job's journal. Results that come meanwhile share one sync; "
        "what a crash then costs is that many seconds of work done again, nothing that was told.",
        unit="s",
        least=0,
    )
    nice: int = setting(
        5,
        "The runner leaves the processor to others on its machine by so much, as nice(1) does: the gateway "
        "and the broker beside it serve people.",
        least=0,
        most=19,
    )
    poll_s: float = setting(
        0.25,
        "How often the runner looks for new jobs, cancellations and limits; one short query each.",
        unit="s",
        least=0.01,
    )

    def rules(self, shares: Mapping[str, float]) -> batch_order.Rules:
        """Return how jobs are put in order; ``shares`` are the teams'."""
        return batch_order.Rules(
            jobs=self.max_jobs,
            team_jobs=self.team_jobs,
            shares=shares,
            qos={
                name: batch_order.Qos(int(rank), int(self.qos_max_jobs.get(name, 0)))
                for name, rank in self.qos.items()
            },
            weights=batch_order.Weights(
                self.weight_age, self.age_most_s, self.weight_fairshare, self.weight_qos
            ),
        )
