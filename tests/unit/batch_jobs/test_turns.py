"""Whose line goes next: shares among teams, one job beside another, several models, windows and caps."""

import collections
import contextlib
import dataclasses
import functools
import heapq
import itertools
from collections.abc import Callable, Sequence

from batch_jobs import client, lines, model, ready, turns, verdicts


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


def test_lines_that_found_no_room_fill_the_window_while_none_is_in_flight() -> None:
    """Else all of a job's lines would be offered in turn; but where answers come there is room."""
    table = turns.Turns(2, 2)
    one, other = run(1, chat=9, small=1), run(2, "chem")
    assert len(sent(table, [one, other], 9)) == 3
    table.give_back(one, "chat")
    with table.kept(one, "chat", alone=False):
        assert sent(table, [one, other], 9) == [(2, "chat")]
    table.give_back(other, "chat")
    table.give_back(other, "chat")
    with table.kept(other, "chat", alone=False), table.kept(one, "chat", alone=False):
        assert table.pick([one, other]) is None
    assert table.pick([one, other]) is not None
    assert not table._held


def test_a_quota_keeps_the_lines_of_its_user_and_model_alone() -> None:
    table = turns.Turns(3, 3)
    one, same, other = run(1, chat=9, small=1), run(2), run(3, chat=2)
    other.job = dataclasses.replace(other.job, user="bob")
    allowed = table.allowance(one, "chat")
    allowed.refused(allowed.round)
    assert allowed.size == 1
    with table.kept(one, "chat", alone=True):
        assert sorted(sent(table, [one, same, other], 9)) == [
            (1, "small"),
            (3, "chat"),
            (3, "chat"),
        ]
    assert sent(table, [one, same, other], 9) == [(2, "chat")], "in its place"
    for each, name in ((one, "small"), (other, "chat"), (other, "chat"), (same, "chat")):
        table.give_back(each, name)
    for each in (one, same, other):
        table.forget_job(each)
    assert not table._own
    assert not table._allowances


def test_a_quota_of_concurrent_lines_is_nearly_used_up_and_not_run_against_all_the_time() -> None:
    limit, ends_s, work_s = 8, 120.0, 1.0
    table, one = turns.Turns(32, 256), run(1, chat=5_000)
    tries: collections.Counter[int] = collections.Counter()
    coming: list[tuple[float, int, Callable[[], None]]] = []
    serial = itertools.count()
    now, running, answered, offered = 0.0, 0, 0, 0

    def later(after_s: float, act: Callable[[], None]) -> None:
        heapq.heappush(coming, (now + after_s, next(serial), act))

    def end() -> None:
        nonlocal running, answered
        running, answered = running - 1, answered + 1
        table.give_back(one, "chat")
        table.allowance(one, "chat").answered()

    def refuse(each: client.Work, sent_in: int) -> None:
        table.give_back(one, "chat")
        table.allowance(one, "chat").refused(sent_in)
        keeping = contextlib.ExitStack()
        keeping.callback(lambda: one.ready.append(each, first=True))
        keeping.enter_context(table.kept(one, "chat", alone=True))
        wait_s = verdicts.backoff_s(
            tries[id(each)], first_s=0.5, most_s=5.0, key=offered, asked_s=1.0
        )
        later(wait_s, keeping.close)

    while now < ends_s:
        while table.pick([one]) is not None:
            each = one.ready.pop("chat")
            sent_in = table.allowance(one, "chat").round
            table.take(one, "chat")
            offered += 1
            tries[id(each)] += 1
            if running < limit:
                running += 1
                later(work_s, end)
            else:
                later(0.005, functools.partial(refuse, each, sent_in))
        now, _, act = heapq.heappop(coming)
        act()
    most = limit * ends_s / work_s
    assert answered > 0.6 * most
    assert offered < 2 * most


def test_a_job_that_its_teams_lines_hold_up_is_told_from_one_that_runs() -> None:
    table = turns.Turns(32, 256, team_lines=1)
    one, two, other, done = run(1), run(2), run(3, "chem"), run(4)
    while done.ready:
        done.ready.pop("chat")
    assert not table.capped(two)
    assert sent(table, [one, two], 9) == [(1, "chat")]
    assert [table.capped(each) for each in (one, two, other, done)] == [False, True, False, False]
    assert not turns.Turns(32, 256).capped(two)
