"""A small world of usage that several tests ask about: two teams, a batch job, a lease."""

import itertools
from collections.abc import Iterable
from pathlib import Path

from accounting import spool
from scheduler.contracts import clock, ids, requests, slurm, usage
from tests.unit.accounting import samples

SECOND = 1_000_000
NOON = samples.NOON
ADMIN = requests.Caller("ops", "root", "k0", admin=True)
ANN = requests.Caller("red", "ann", "k1")
BOB = requests.Caller("blue", "bob", "k2", coordinator=True)

CUTS = (0, 10, SECOND, 2 * SECOND, 3 * SECOND, 10 * SECOND)  # of the replica's rows, after noon

ROWS: list[usage.Row] = [
    # ann: a replica died under her, the second attempt went well
    samples.row("open", "q1", 1),
    samples.row(
        "close", "q1", 1, outcome="replica_lost", payer="platform", output_tokens=4, ended_us=NOON + 9
    ),
    samples.row(
        "close", "q1", 2, arrived_us=NOON, started_us=NOON + 10, ended_us=NOON + SECOND,
        uncached_prompt_tokens=8, output_tokens=10,
    ),
    # bob's two batch lines, one of them preempted and sent again as a new request
    *[
        samples.row(
            "close", request, team="blue", user="bob", tier="batch", batch_job_id=12, custom_id=line,
            started_us=start, ended_us=start + SECOND, outcome=outcome, payer=payer,
            uncached_prompt_tokens=5, cached_prompt_tokens=1, output_tokens=tokens,
        )
        for request, line, start, outcome, payer, tokens in [
            ("b1", "x", NOON + SECOND, "preempted", "platform", 3),
            ("b2", "x", NOON + 2 * SECOND, "ok", "team", 7),
            ("b3", "y", NOON + 2 * SECOND, "ok", "team", 7),
        ]
    ],
    samples.row("close", "r1", user="rob", outcome="refused", ended_us=NOON, reason="replica full"),
    samples.gpu(0, 10),
    *[
        samples.replica("serving", NOON + start, NOON + end, seq=seq)
        for seq, (start, end) in enumerate(itertools.pairwise(CUTS))
    ],
]  # fmt: skip


class Books:
    def accounting(self, job_id: ids.SlurmJobId) -> tuple[slurm.JobRun, ...]:
        return (slurm.JobRun(job_id, 0, slurm.JobState.COMPLETED, NOON, NOON + 10 * SECOND, 10, 4),)


class AccountBooks:
    def accounts(self, job_ids: Iterable[ids.SlurmJobId]) -> dict[ids.SlurmJobId, str]:
        return dict.fromkeys(job_ids, "forebay")

    def gpu_seconds(self, start_us: int, end_us: int) -> dict[str, int]:
        assert (start_us, end_us) == (NOON, NOON + 3600 * SECOND)
        return {"forebay": 41, "other": 7200, "none": 0}


def write(state_dir: Path) -> None:
    """Write the world's rows as one process does."""
    sink = spool.Spool(state_dir / "spool" / "gateway", "gateway", clock=clock.FakeClock())
    for row in ROWS:
        sink.append(row)
    sink.close()
