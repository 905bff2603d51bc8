"""A made-up fleet and its day: who held which GPU when, and what agents, replicas and gateways wrote of it.

The truth is kept beside the rows, moment by moment, so that a test can say what the table must add up to.
"""

import dataclasses
import random
from collections.abc import Iterator

from scheduler.contracts import usage

SECOND = 1_000_000
MINUTE = 60 * SECOND
MODELS = ("chat", "code", "embed")
TEAMS = ("physics", "biology", "007", "law")
GPUS = 4


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """A replica's GPUs from one moment to another, in one state."""

    lease_id: str
    replica_id: str
    gpus: int
    start_us: int
    end_us: int
    state: str


@dataclasses.dataclass(slots=True)
class Day:
    """What happened, and the rows of it in the order in which they were written."""

    start_us: int
    leases: dict[str, list[tuple[int, int]]] = dataclasses.field(default_factory=dict)
    spans: list[Span] = dataclasses.field(default_factory=list)
    rows: list[usage.Row] = dataclasses.field(default_factory=list)
    late: list[usage.Row] = dataclasses.field(default_factory=list)

    def held(self, first_us: int, last_us: int) -> Iterator[tuple[tuple[str, str, int], int]]:
        """Yield GPU-µs by (lease, replica, minute), the lease's own free GPUs under replica ""."""
        for lease_id, runs in self.leases.items():
            mine = [span for span in self.spans if span.lease_id == lease_id]
            for run in runs:
                yield from _by_minute(lease_id, "", GPUS, *run)
            for span in mine:
                yield from _by_minute(
                    lease_id, span.replica_id, span.gpus, span.start_us, span.end_us
                )
                for key, amount in _by_minute(lease_id, "", span.gpus, span.start_us, span.end_us):
                    yield key, -amount


def _by_minute(
    lease_id: str, replica_id: str, gpus: int, start_us: int, end_us: int
) -> Iterator[tuple[tuple[str, str, int], int]]:
    minute = start_us // MINUTE * MINUTE
    while minute < end_us:
        length = min(end_us, minute + MINUTE) - max(start_us, minute)
        yield (lease_id, replica_id, minute), gpus * length
        minute += MINUTE


def make(seed: int, start_us: int, *, replicas: int = 50, hours: int = 24) -> Day:
    """Make a day: leases that come, go and are requeued, replicas that start, sleep, die, and requests."""
    draw = random.Random(seed)
    day = Day(start_us)
    end_us = start_us + hours * 60 * MINUTE
    for number in range(-(-replicas // 2)):  # two replicas of two GPUs in a lease
        _lease(draw, day, f"l-{number}", end_us)
    draw.shuffle(day.rows)  # each writer has its own file, and files are read in no order
    return day


def _lease(draw: random.Random, day: Day, lease_id: str, end_us: int) -> None:
    at = day.start_us + draw.randrange(20 * MINUTE)
    for run in range(draw.choice((1, 1, 2))):
        until = min(end_us, at + draw.randrange(3 * 60, 16 * 60) * MINUTE + draw.randrange(MINUTE))
        if until <= at:
            return
        day.leases.setdefault(lease_id, []).append((at, until))
        _gpu_rows(draw, day, lease_id, run, at, until)
        for place in range(2):
            _replicas(draw, day, (lease_id, f"{lease_id}.{run}.{place}"), at, until)
        at = until + draw.randrange(30 * MINUTE)


def _gpu_rows(draw: random.Random, day: Day, lease_id: str, run: int, at: int, until: int) -> None:
    for seq, (start, end) in enumerate(_cuts(draw, at, until)):
        row = usage.GpuRow(
            cluster="c", lease_id=lease_id, slurm_job_id=lease_id[2:], run=run, node="n1",
            team="forebay", kind="serve", gpus=GPUS, start_us=start, end_us=end, seq=seq,
        )  # fmt: skip
        _written(draw, day, row)


def _cuts(draw: random.Random, at: int, until: int) -> Iterator[tuple[int, int]]:
    while at < until:
        end = min(until, at + MINUTE + draw.randrange(-200, 200_000))
        yield at, end
        at = end


def _written(draw: random.Random, day: Day, row: usage.GpuRow | usage.ReplicaTimeRow) -> None:
    """Write a row as agents do: sometimes shorter first, sometimes twice (a segment taken over)."""
    if draw.random() < 0.2:
        middle = (row.start_us + row.end_us) // 2
        day.rows.append(dataclasses.replace(row, end_us=middle))
    day.rows += [row] * (2 if draw.random() < 0.05 else 1)


def _replicas(draw: random.Random, day: Day, name: tuple[str, str], at: int, until: int) -> None:
    """Let replicas follow one another in one slot: each starts, serves and dies, drains or sleeps."""
    lease_id, slot = name
    life = 0
    at += draw.randrange(30 * SECOND)
    while at < until:
        replica_id = f"{slot}.{life}"
        model = draw.choice(MODELS)
        dedicated = "law" if model == "code" else ""
        end = min(until, at + draw.randrange(20, 300) * MINUTE)
        warm = min(end, at + draw.randrange(5, 90) * SECOND)
        states = [("starting", at, warm), ("serving", warm, end)]
        if draw.random() < 0.3 and end - warm > 20 * MINUTE:
            middle = warm + (end - warm) // 2
            states[1:] = [("serving", warm, middle), ("asleep", middle, end)]
        seq = 0
        for state, begin, finish in states:
            if finish <= begin:
                continue
            day.spans.append(Span(lease_id, replica_id, 2, begin, finish, state))
            for start, stop in _cuts(draw, begin, finish):
                row = usage.ReplicaTimeRow(
                    cluster="c", lease_id=lease_id, slurm_job_id=lease_id[2:],
                    replica_id=replica_id, model=model, version="1", gpus=2, start_us=start,
                    end_us=stop, state=state, seq=seq, dedicated=dedicated,
                )  # fmt: skip
                if state == "serving" and draw.random() < 0.95:  # the others do not tell
                    row = _busy(draw, row)
                _written(draw, day, row)
                seq += 1
        _requests(draw, day, (lease_id, replica_id, model), warm, end)
        life += 1
        at = end + draw.choice((0, draw.randrange(5 * MINUTE)))


def _busy(draw: random.Random, row: usage.ReplicaTimeRow) -> usage.ReplicaTimeRow:
    length = row.end_us - row.start_us
    prefill, decode = draw.randrange(60_000), draw.randrange(4_000)
    busy = round((80 * prefill + 900 * decode) * draw.gauss(1.0, 0.05))
    return dataclasses.replace(
        row, busy_us=min(max(0, busy), length), prefill_tokens=prefill, decode_tokens=decode,
        steps=decode + 1, measured=1,
    )  # fmt: skip


def _requests(
    draw: random.Random, day: Day, where: tuple[str, str, str], warm: int, end: int
) -> None:
    lease_id, replica_id, model = where
    at = warm
    number = 0
    while (at := at + draw.randrange(30, 400) * SECOND) < end:
        number += 1
        started = at + draw.randrange(SECOND)
        lasts = draw.choice((2, 20, 200)) * SECOND + draw.randrange(SECOND)
        lost = draw.random() < 0.05
        identity = usage.Identity(
            request_id=f"{replica_id}.{number}", attempt=draw.choice((1, 1, 2)), cluster="c",
            team=draw.choice(TEAMS), user="u", key_id="k", model=model, version="1", adapter="",
            endpoint="/v1/completions", tier=draw.choice(("interactive", "batch")),
            replica_id=replica_id, lease_id=lease_id, slurm_job_id=lease_id[2:], arrived_us=at,
            started_us=started,
        )  # fmt: skip
        row = usage.UsageRow(
            kind=usage.RowKind.CLOSE, identity=identity,
            outcome=usage.Outcome.REPLICA_LOST if lost else usage.Outcome.OK,
            uncached_prompt_tokens=draw.randrange(4_000),
            cached_prompt_tokens=draw.randrange(100), output_tokens=draw.randrange(500),
            first_token_us=0 if lost else started + lasts // 4, ended_us=started + lasts,
            payer=usage.Payer.PLATFORM if lost else usage.Payer.TEAM,
            waste_tokens=draw.randrange(900) if identity.attempt == 2 else 0,
        )  # fmt: skip
        last_hours = at > day.start_us + 22 * 60 * MINUTE
        (day.late if last_hours and draw.random() < 0.2 else day.rows).append(row)
