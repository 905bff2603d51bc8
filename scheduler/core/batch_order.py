"""Which batch jobs start now, in which order, and why the others wait: fair share, priority, limits. Pure.

The priority is a sum of weighted factors, as in Slurm's multifactor plugin: age, fair share and QOS, each
from 0 to 1, and what a user or an admin has set. The fair-share factor is its classic one, F = 2^(-U/S): U is
the team's part of all decayed use, S its part of all shares.
https://slurm.schedmd.com/classic_fair_share.html
"""

import bisect
import collections
import dataclasses
import enum
import math
from collections.abc import Iterable, Mapping, Sequence

US = 1_000_000


class Wait(enum.StrEnum):
    """Why a job waits, in Slurm's words."""

    PRIORITY = "Priority"
    DEPENDENCY = "Dependency"
    NEVER = "DependencyNeverSatisfied"
    HELD_USER = "JobHeldUser"
    HELD_ADMIN = "JobHeldAdmin"
    BEGIN = "BeginTime"
    ARRAY_LIMIT = "JobArrayTaskLimit"
    TEAM_JOBS = "AssocGrpJobsLimit"
    QOS_JOBS = "QOSMaxJobsPerUserLimit"


class Dependency(enum.Enum):
    """What a job's dependencies come to now."""

    MET = "met"
    OPEN = "open"
    NEVER = "never"


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """An active job as its order depends on it.

    Attributes:
        running: it runs, so it only counts.
        priority: set by hand.
        dependency: what its dependencies come to.
        left_tokens: estimated tokens that are still to be computed.
    """

    job_id: int
    team: str
    user: str
    submitted_us: int
    running: bool = False
    priority: int = 0
    qos: str = ""
    held: str = ""
    begin_us: int = 0
    top_us: int = 0
    array_id: int = 0
    array_limit: int = 0
    dependency: Dependency = Dependency.MET
    left_tokens: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Qos:
    """A quality of service.

    Attributes:
        priority: against the others'.
        max_jobs: jobs of one user that may run at once; 0: no limit.
    """

    priority: int = 0
    max_jobs: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Weights:
    """What each factor counts.

    Attributes:
        age_s: a job that has waited so long has the whole age factor.
    """

    age: int = 1_000
    age_s: float = 7 * 86_400.0
    fairshare: int = 10_000
    qos: int = 10_000


@dataclasses.dataclass(frozen=True, slots=True)
class Rules:
    """What the site has set.

    Attributes:
        jobs: that run at once.
        team_jobs: of one team; 0: no limit.
        shares: by team, 1 for one that is not named.
    """

    jobs: int
    team_jobs: int = 0
    shares: Mapping[str, float] = dataclasses.field(default_factory=dict)
    qos: Mapping[str, Qos] = dataclasses.field(default_factory=dict)
    weights: Weights = dataclasses.field(default_factory=Weights)


@dataclasses.dataclass(frozen=True, slots=True)
class Decision:
    """What follows for the jobs that wait.

    Attributes:
        start: ids, in the order in which they start.
        waits: the others, by id, in the order in which they would.
        priority: of each that waits, by id.
    """

    start: tuple[int, ...]
    waits: Mapping[int, Wait]
    priority: Mapping[int, int]


NOTHING = Decision((), {}, {})


def decayed(tokens: float, age_s: float, half_life_s: float) -> float:
    """Return what is left of ``tokens`` that were used ``age_s`` ago."""
    return float(tokens * 2.0 ** (-max(0.0, age_s) / half_life_s))


def factors(
    usage: Mapping[str, float], shares: Mapping[str, float], teams: Iterable[str]
) -> dict[str, float]:
    """Return each team's fair-share factor, from 0 (far over its share) to 1 (it has used nothing).

    Args:
        usage: decayed tokens by team.
        shares: by team, 1 for one that is not named.
        teams: who asks; those that have used something count as well.
    """
    known = set(teams) | set(usage)
    everything = sum(usage.values())
    all_shares = sum(shares.get(team, 1.0) for team in known)
    found = {}
    for team in known:
        share = shares.get(team, 1.0) / all_shares if all_shares else 0.0
        used = usage.get(team, 0.0) / everything if everything else 0.0
        found[team] = 0.0 if share <= 0 else 2.0 ** (-used / share)
    return found


def priority(job: Job, rules: Rules, factor: float, now_us: int) -> int:
    """Return a job's priority."""
    weights = rules.weights
    since_us = max(job.submitted_us, job.begin_us)
    age = min(1.0, max(0, now_us - since_us) / US / weights.age_s)
    most = max((each.priority for each in rules.qos.values()), default=0)
    qos = rules.qos.get(job.qos, Qos()).priority / most if most else 0.0
    return round(weights.age * age + weights.fairshare * factor + weights.qos * qos) + job.priority


def ordered(
    jobs: Sequence[Job], rules: Rules, usage: Mapping[str, float], now_us: int
) -> list[tuple[Job, int]]:
    """Return jobs with their priority, the first first.

    What a user has put on top takes the place of that user's first job, and no other user's: as scontrol top.
    """
    share = factors(usage, rules.shares, (job.team for job in jobs))
    ranked = [(job, priority(job, rules, share[job.team], now_us)) for job in jobs]
    ranked.sort(key=lambda each: (-each[1], each[0].submitted_us, each[0].job_id))
    owned: dict[tuple[str, str], list[tuple[Job, int]]] = {}
    for each in ranked:
        owned.setdefault((each[0].team, each[0].user), []).append(each)
    for mine in owned.values():
        mine.sort(
            key=lambda each: -each[0].top_us
        )  # stable: those never put on top keep their order
    turns = {owner: iter(mine) for owner, mine in owned.items()}
    return [next(turns[job.team, job.user]) for job, _ in ranked]


def decide(jobs: Sequence[Job], rules: Rules, usage: Mapping[str, float], now_us: int) -> Decision:
    """Say which of the jobs that wait start now.

    A job that is over a limit of its own lets those behind it pass; one that waits for a place does not,
    so that nobody starves.
    """
    running = [job for job in jobs if job.running]
    tally = _Tally(running)
    start: list[int] = []
    waits: dict[int, Wait] = {}
    ranks: dict[int, int] = {}
    for job, rank in ordered([job for job in jobs if not job.running], rules, usage, now_us):
        ranks[job.job_id] = rank
        why = _own(job, now_us) or tally.limit(job, rules)
        if why is None and len(running) + len(start) >= rules.jobs:
            why = Wait.PRIORITY
        if why is None:
            start.append(job.job_id)
            tally.add(job)
        else:
            waits[job.job_id] = why
    return Decision(tuple(start), waits, ranks)


def _own(job: Job, now_us: int) -> Wait | None:
    if job.held:
        return Wait.HELD_ADMIN if job.held == "admin" else Wait.HELD_USER
    if job.dependency is Dependency.NEVER:
        return Wait.NEVER
    if job.dependency is Dependency.OPEN:
        return Wait.DEPENDENCY
    return Wait.BEGIN if job.begin_us > now_us else None


class _Tally:
    """What runs, by whom."""

    def __init__(self, running: Iterable[Job]) -> None:
        self._teams: collections.Counter[str] = collections.Counter()
        self._arrays: collections.Counter[int] = collections.Counter()
        self._qos: collections.Counter[tuple[str, str, str]] = collections.Counter()
        for job in running:
            self.add(job)

    def add(self, job: Job, count: int = 1) -> None:
        """Count a job that runs; ``count`` -1: it has ended."""
        self._teams[job.team] += count
        self._arrays[job.array_id] += count
        self._qos[job.qos, job.team, job.user] += count

    def limit(self, job: Job, rules: Rules) -> Wait | None:
        """Return which limit of its own keeps a job back."""
        if job.array_id and job.array_limit and self._arrays[job.array_id] >= job.array_limit:
            return Wait.ARRAY_LIMIT
        if rules.team_jobs and self._teams[job.team] >= rules.team_jobs:
            return Wait.TEAM_JOBS
        most = rules.qos.get(job.qos, Qos()).max_jobs
        if most and self._qos[job.qos, job.team, job.user] >= most:
            return Wait.QOS_JOBS
        return None


def throughput(runs: Iterable[tuple[int, int, int]]) -> float:
    """Return the tokens a second that jobs got together, while any ran; 0 if none did.

    Args:
        runs: tokens, start and end (UTC µs) of each.
    """
    tokens, busy_us, until = 0, 0, 0
    for count, start, end in sorted(runs, key=lambda run: run[1]):
        tokens += count
        busy_us += max(0, end - max(start, until))
        until = max(until, end)
    return tokens * US / busy_us if busy_us else 0.0


_SURE = 20  # lines from whose tokens the others' are told
_TOLD = 2_000  # jobs whose start is estimated: their users look again before the others matter
_NOTHING = 1e-6  # of a token
_ALL = (0.02, 2.0)  # how far jobs may make the next ones' estimates shrink or grow


def truth(jobs: Iterable[tuple[int, int]]) -> float:
    """Return what jobs took of the tokens that had been estimated for them; 1 without any.

    Args:
        jobs: tokens that each took, and that were estimated; those without an estimate don't count.
    """
    took = expected = 0
    for tokens, guess in jobs:
        if guess:
            took, expected = took + tokens, expected + guess
    return min(max(took / expected, _ALL[0]), _ALL[1]) if expected else 1.0


def left(used: int, done: int, total: int, expected: int) -> int:
    """Return the tokens that a job still wants.

    Args:
        used: tokens of its lines that are done.
        done: those lines.
        total: all lines.
        expected: tokens that are expected of all, where too few are done to tell.
    """
    if done >= min(_SURE, total):
        return round(used / done * (total - done)) if done else 0
    return max(0, expected - used)


def starts(
    jobs: Sequence[Job], rules: Rules, usage: Mapping[str, float], now_us: int, tokens_per_s: float
) -> dict[int, int]:
    """Estimate when jobs that wait will start, UTC µs; one that can't be told is left out.

    The running jobs share the rate equally, each that ends makes room for the next in today's order. What is
    held, or waits for another job, has no estimate, nor has what comes after the first `_TOLD`.
    """
    if tokens_per_s <= 0:
        return {}
    running = {job.job_id: job for job in jobs if job.running}
    left = {job_id: _work(job) for job_id, job in running.items()}
    tally = _Tally(running.values())
    may = [job for job in jobs if not job.running and _own(job, job.begin_us) is None]
    waiting = [job for job, _ in ordered(may, rules, usage, now_us)]
    begins = sorted({job.begin_us for job in waiting if job.begin_us > now_us})
    found: dict[int, int] = {}
    at_us = now_us
    while waiting and len(found) < _TOLD:
        late: list[Job] = []
        for place, job in enumerate(waiting):
            if len(running) >= rules.jobs:
                late += waiting[place:]
                break
            if job.begin_us > at_us or tally.limit(job, rules):
                late.append(job)
                continue
            tally.add(job)
            running[job.job_id], left[job.job_id], found[job.job_id] = job, _work(job), at_us
        waiting = late
        step_us = min(left.values()) * len(left) / tokens_per_s * US if left else math.inf
        coming = bisect.bisect_right(begins, at_us)
        if coming < len(begins):
            step_us = min(step_us, begins[coming] - at_us)
        if math.isinf(step_us):
            break
        step = max(1, math.ceil(step_us))
        done = tokens_per_s * step / US / len(left) if left else 0.0
        for job_id in [each for each, rest in left.items() if rest - done <= _NOTHING]:
            tally.add(running.pop(job_id), -1)
            del left[job_id]
        left = {job_id: rest - done for job_id, rest in left.items()}
        at_us += step
    return found


def _work(job: Job) -> float:
    return float(max(1, job.left_tokens))
