"""The order of batch jobs: fair share, priority, limits, and why each of the others waits."""

import dataclasses
import math
from typing import Any

import pytest

from scheduler.core import batch_order
from scheduler.core.batch_order import Dependency, Job, Qos, Rules, Wait, Weights

NOW = 1_000_000_000_000
DAY = 86_400_000_000


def job(job_id: int, team: str = "a", **more: Any) -> Job:
    base = Job(job_id, team, "u", submitted_us=NOW - DAY + job_id)
    return dataclasses.replace(base, **more)


def test_fair_share_is_slurms_classic_formula() -> None:
    found = batch_order.factors({"a": 300.0, "b": 100.0}, {"a": 1.0, "b": 3.0}, ["c"])
    assert found["c"] == 1.0
    assert found["a"] == pytest.approx(2 ** (-0.75 / 0.2))
    assert found["b"] == pytest.approx(2 ** (-0.25 / 0.6))
    assert batch_order.factors({}, {}, ["a"]) == {"a": 1.0}
    assert batch_order.factors({"a": 1.0}, {"a": 0.0}, ["b"])["a"] == 0.0


def test_use_is_forgotten_by_half_lives() -> None:
    assert batch_order.decayed(1_000, 0, 60) == 1_000
    assert batch_order.decayed(1_000, 120, 60) == 250
    assert batch_order.decayed(1_000, -5, 60) == 1_000


def test_who_has_used_less_goes_first_and_then_who_came_first() -> None:
    jobs = [job(1), job(2), job(3, "b"), job(4, "b")]
    decided = batch_order.decide(jobs, Rules(jobs=3), {"a": 900.0, "b": 100.0}, NOW)
    assert decided.start == (3, 4, 1)
    assert decided.waits == {2: Wait.PRIORITY}
    assert decided.priority[3] > decided.priority[1]


def test_age_grows_to_its_bound_and_qos_counts() -> None:
    rules = Rules(
        jobs=1, qos={"high": Qos(10), "low": Qos(5)}, weights=Weights(100, 86_400, 0, 1_000)
    )
    assert batch_order.priority(job(1, submitted_us=NOW - DAY // 2), rules, 1.0, NOW) == 50
    assert batch_order.priority(job(1, submitted_us=NOW - 9 * DAY), rules, 1.0, NOW) == 100
    assert batch_order.priority(job(1, submitted_us=NOW, qos="high"), rules, 1.0, NOW) == 1_000
    assert batch_order.priority(job(1, submitted_us=NOW, qos="low"), rules, 1.0, NOW) == 500
    assert batch_order.priority(job(1, submitted_us=NOW, priority=-7), rules, 1.0, NOW) == -7


def test_top_moves_a_job_before_its_users_others_and_nobody_elses() -> None:
    jobs = [
        job(1, priority=30),
        job(2, "b", priority=20),
        job(3, priority=10, top_us=NOW),
        job(4, priority=5),
    ]
    rules = Rules(jobs=9, weights=Weights(0, 1, 0, 0))
    assert batch_order.decide(jobs, rules, {}, NOW).start == (3, 2, 1, 4)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"held": "user"}, Wait.HELD_USER),
        ({"held": "admin"}, Wait.HELD_ADMIN),
        ({"begin_us": NOW + 1}, Wait.BEGIN),
        ({"dependency": Dependency.OPEN}, Wait.DEPENDENCY),
        ({"dependency": Dependency.NEVER}, Wait.NEVER),
        ({"array_id": 7, "array_limit": 1}, Wait.ARRAY_LIMIT),
        ({"qos": "low"}, Wait.QOS_JOBS),
    ],
)
def test_what_keeps_a_job_back_lets_others_pass(change: dict[str, Any], why: Wait) -> None:
    running = job(1, running=True, array_id=7, qos="low")
    rules = Rules(jobs=9, qos={"low": Qos(0, max_jobs=1)})
    decided = batch_order.decide([running, job(2, **change), job(3)], rules, {}, NOW)
    assert decided.start == (3,)
    assert decided.waits == {2: why}


def test_a_teams_jobs_have_their_limit() -> None:
    jobs = [job(1, running=True), job(2), job(3), job(4, "b")]
    decided = batch_order.decide(jobs, Rules(jobs=9, team_jobs=2), {}, NOW)
    assert decided.start == (2, 4)
    assert decided.waits == {3: Wait.TEAM_JOBS}


def test_throughput_counts_time_in_which_any_ran_once() -> None:
    second = 1_000_000
    runs = [(100, 0, 10 * second), (100, 5 * second, 15 * second), (50, 20 * second, 30 * second)]
    assert batch_order.throughput(runs) == pytest.approx(250 / 25)
    assert batch_order.throughput([]) == 0.0


def test_starts_are_told_from_what_is_left_and_how_fast_it_goes() -> None:
    jobs = [
        job(1, running=True, left_tokens=1_000),
        job(2, "b", running=True, left_tokens=3_000),
        job(3, "c", left_tokens=500),
        job(4, "d", left_tokens=500, submitted_us=NOW, held="user"),
        job(5, "d", left_tokens=10, submitted_us=NOW),
    ]
    found = batch_order.starts(jobs, Rules(jobs=2), {}, NOW, 100.0)
    # Both run at 50 tokens/s: the first ends after 20 s, then the third's 500 take 10 s.
    assert (found[3] - NOW) / 1e6 == pytest.approx(20, abs=0.01)
    assert (found[5] - NOW) / 1e6 == pytest.approx(30, abs=0.01)
    assert 4 not in found
    assert batch_order.starts(jobs, Rules(jobs=2), {}, NOW, 0.0) == {}


def test_a_start_is_not_told_before_its_begin() -> None:
    later = NOW + 3_600_000_000
    found = batch_order.starts([job(1, begin_us=later, left_tokens=5)], Rules(jobs=1), {}, NOW, 1.0)
    assert found == {1: later}
    assert not math.isinf(found[1])


def test_estimates_for_thousands_put_them_in_order_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for each that starts, and two thousand jobs held up the runner's look for half a minute."""
    calls: list[int] = []
    real = batch_order.priority

    def priority(each: Job, *more: Any) -> int:
        calls.append(each.job_id)
        return real(each, *more)

    monkeypatch.setattr(batch_order, "priority", priority)
    jobs = [job(n, left_tokens=100) for n in range(1, 301)]
    found = batch_order.starts(jobs, Rules(jobs=2), {}, NOW, 100.0)
    assert len(found) == len(calls) == 300
    assert list(found) == sorted(found, key=lambda each: (found[each], each))
    assert (found[300] - NOW) / 1e6 == pytest.approx(298, abs=0.1)
    monkeypatch.setattr(batch_order, "_TOLD", 10)
    assert len(batch_order.starts(jobs, Rules(jobs=2), {}, NOW, 100.0)) == 10


def test_estimates_heed_the_limits_of_what_runs_by_then() -> None:
    mine: dict[str, Any] = {"array_id": 1, "array_limit": 1, "left_tokens": 100}
    jobs = [job(1, **mine), job(2, **mine), job(3, left_tokens=100)]
    found = batch_order.starts(jobs, Rules(jobs=9), {}, NOW, 100.0)
    assert {each: round((at - NOW) / 1e6) for each, at in found.items()} == {1: 0, 3: 0, 2: 2}


def test_what_jobs_took_tells_the_next_ones_estimates() -> None:
    assert batch_order.truth([]) == 1.0
    assert batch_order.truth([(30, 100), (70, 100), (999, 0)]) == 0.5
    assert batch_order.truth([(10_000, 1)]) == 2.0
    assert batch_order.truth([(0, 100)]) > 0


@pytest.mark.parametrize(
    ("used", "done", "total", "expected", "left"),
    [
        (0, 0, 100, 5_000, 5_000),
        (600, 10, 100, 5_000, 4_400),  # too few to tell
        (600, 20, 100, 5_000, 2_400),
        (9_000, 10, 100, 5_000, 0),
        (20, 2, 4, 5_000, 4_980),
        (40, 4, 4, 5_000, 0),
        (0, 0, 0, 7, 0),
    ],
)
def test_the_lines_that_are_done_tell_what_the_others_want(
    used: int, done: int, total: int, expected: int, left: int
) -> None:
    assert batch_order.left(used, done, total, expected) == left
