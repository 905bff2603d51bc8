"""Whose line goes next: shares among teams, one job beside another, several models, windows and caps."""

import collections
import dataclasses
from collections.abc import Sequence

from batch_jobs import client, lines, model, ready, turns


@dataclasses.dataclass
class Run:
    job: model.BatchJob
    ready: ready.Ready
    sent: int = 0
    stalled: str = ""
    ended: bool = False


def work(name: str) -> client.Work:
    return client.Work.of(lines.Line(1, "c", "/v1/chat/completions", {"model": name}))


def run(number: int, team: str = "physics", **counts: int) -> Run:
    found = ready.Ready()
    for name, count in (counts or {"chat": 100}).items():
        for _ in range(count):
            found.append(work(name))
    return Run(model.BatchJob(number, team, "alice"), found)


def sent(table: turns.Turns, runs: Sequence[Run], count: int) -> list[tuple[int, str]]:
    """Send lines until ``count`` are in flight or none may go; returns job and model of each."""
    found: list[tuple[int, str]] = []
    while len(found) < count and (picked := table.pick(runs)) is not None:
        each, name = picked
        each.ready.pop(name)
        table.take(each, name)
        found.append((each.job.job_id, name))
    return found


def test_teams_share_by_their_factors_and_jobs_of_a_team_equally() -> None:
    table = turns.Turns(32, 256)
    table.factors = {"physics": 0.5, "chem": 1.0}
    runs = [run(1), run(2), run(3, "chem")]
    by_job = collections.Counter(job for job, _ in sent(table, runs, 24))
    assert by_job == {1: 4, 2: 4, 3: 16}


def test_a_team_far_over_its_share_is_never_shut_out() -> None:
    table = turns.Turns(42, 256)
    table.factors = {"physics": 0.0, "chem": 1.0}
    by_job = collections.Counter(job for job, _ in sent(table, [run(1), run(2, "chem")], 42))
    assert by_job == {1: 2, 2: 40}


def test_a_full_model_holds_up_no_other() -> None:
    table = turns.Turns(2, 2)
    one, other = run(1, big=5, small=5), run(2, big=5)
    assert collections.Counter(sent(table, [one, other], 9)) == {
        (1, "big"): 1,
        (1, "small"): 2,
        (2, "big"): 1,
    }
    table.give_back(other, "big")
    assert sent(table, [one, other], 9) == [(2, "big")]


def test_what_may_send_nothing_is_passed_over() -> None:
    table = turns.Turns(32, 256, team_lines=3)
    full, stalled, ended = run(1), run(2, "chem"), run(3, "bio")
    stalled.stalled, ended.ended = "journal: disk full", True
    assert sent(table, [full, stalled, ended, run(4, "art", chat=1)], 9) == [
        (1, "chat"),
        (4, "chat"),
        (1, "chat"),
        (1, "chat"),
    ]


def test_names_that_nobody_serves_do_not_pile_up() -> None:
    table = turns.Turns(32, 256)
    one = run(1, typo=2)
    sent(table, [one], 2)
    for kept in (True, False):
        table.give_back(one, "typo")
        table.forget_model("typo")
        assert ("typo" in table._windows) is kept
    table.forget_job(one)
    assert not table._teams
    assert not table._served
