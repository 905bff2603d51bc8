"""Who is at fault for a lost replica: trials of one suspect each say it, never a count of losses alone."""

import dataclasses
import random

import pytest

from scheduler.contracts import errors, ids
from scheduler.core import suspects

ALONE, SHARED, NONE = errors.Blame.ALONE, errors.Blame.SHARED, errors.Blame.NONE


def life(name: str, incarnation: int = 1) -> suspects.Life:
    return ids.ReplicaId(name), incarnation


def die(known: suspects.Suspects, *names: str, now: float = 0.0) -> dict[str, errors.Blame]:
    """Return what each hears, when they find out one after the other."""
    found = {}
    for name in names:
        known.closed(name)
        found[name] = known.lost(name, now)
    return found


def test_of_the_first_loss_everybody_may_be_at_fault() -> None:
    known = suspects.Suspects(2)
    for name in "abc":
        known.placed(name, life("r1"), 0)
    assert die(known, "a", "c", "b") == {"a": SHARED, "b": SHARED, "c": SHARED}


def test_the_only_suspect_is_at_fault_and_its_company_is_not() -> None:
    known = suspects.Suspects(2)
    known.placed("before", life("r1"), 0)
    assert known.restless == {"r1"}
    for at in (-9.0, 0.0):
        known.shown("before", at)
    assert not known.restless
    known.placed("suspect", life("r1"), 1)
    assert known.tried == {"r1"}
    assert die(known, "before", "suspect") == {"before": NONE, "suspect": ALONE}
    assert not known.tried
    assert not known.restless


def test_whose_prompt_is_computed_beside_a_suspect_may_be_another_killer() -> None:
    known = suspects.Suspects(2)
    for name, level in (("before", 0), ("suspect", 1), ("other", 0)):
        known.placed(name, life("r1"), level)
    known.shown("before", -9.0)
    assert die(known, "suspect", "before", "other") == {
        "before": NONE, "suspect": SHARED, "other": SHARED,
    }  # fmt: skip
    known.placed("suspect", life("r2"), 3)  # but not for ever
    known.placed("later", life("r2"), 0)
    assert die(known, "suspect", "later") == {"suspect": ALONE, "later": NONE}


def test_two_suspects_in_one_place_are_tried_again() -> None:
    known = suspects.Suspects(2)
    for name, level in (("one", 2), ("other", 1)):
        known.placed(name, life("r1"), level)
    assert die(known, "one", "other") == {"one": SHARED, "other": SHARED}


def test_who_has_come_further_is_no_suspect() -> None:
    known = suspects.Suspects(2)
    known.placed("passed", life("r1"), 1)
    assert known.passed("passed")
    assert not known.passed("passed")
    assert not known.tried
    known.placed("suspect", life("r1"), 1)
    known.shown("passed", -9.0)
    assert die(known, "passed", "suspect") == {"passed": NONE, "suspect": ALONE}
    known.placed("gone", life("r2"), 1)
    known.forget("gone")
    assert not known.passed("gone")
    assert not known.tried
    assert known.lost("gone", 0.0) is SHARED


def test_a_limit_of_three_takes_one_trial_more() -> None:
    known = suspects.Suspects(3)
    known.placed("a", life("r1"), 1)
    assert die(known, "a") == {"a": SHARED}
    known.placed("a", life("r2"), 2)
    assert die(known, "a") == {"a": ALONE}


def test_a_later_loss_of_the_same_replica_is_judged_anew() -> None:
    """A connection that broke off was taken for a loss: the others ran on."""
    known = suspects.Suspects(2)
    for name, level in (("broke", 0), ("ran on", 0)):
        known.placed(name, life("r1"), level)
    assert die(known, "broke") == {"broke": SHARED}
    known.shown("ran on", 1.0)
    known.placed("suspect", life("r1"), 1)
    assert die(known, "ran on", "suspect", now=60.0) == {"ran on": NONE, "suspect": ALONE}


STEP_S = 0.2


@dataclasses.dataclass
class Line:
    """A batch line: how many steps it takes, and at which it kills, if it does."""

    name: str
    kills_at: int | None
    left: int = 12
    done: int = 0
    level: int = 0
    lost_at: int = 0
    fate: str = ""


def run(lines: list[Line], replicas: int, seed: int, deaths: int) -> int:
    """Run lines as runner and gateway do, with nodes that die too; returns the engines killed."""
    rng = random.Random(seed)
    known, killed = suspects.Suspects(2), 0
    incarnations = dict.fromkeys((f"r{n}" for n in range(replicas)), 1)
    where: dict[str, list[Line]] = {name: [] for name in incarnations}
    waiting = list(lines)
    for step in range(20_000):
        rng.shuffle(waiting)
        for line in list(waiting):
            free = [
                name
                for name in where
                if len(where[name]) < 6 and ids.ReplicaId(name) not in known.tried
            ]
            if line.level:
                free = [name for name in free if ids.ReplicaId(name) not in known.restless] or free
            if free:
                name = rng.choice(free)
                waiting.remove(line)
                where[name].append(line)
                known.placed(line.name, life(name, incarnations[name]), line.level)
        for name, here in where.items():
            dead = deaths > 0 and rng.random() < 0.02
            deaths -= dead
            for line in here:
                line.done += 1
                if line.level and line.done > line.lost_at + 2 and known.passed(line.name):
                    line.level = 0
                if line.kills_at == line.done:
                    dead, killed = True, killed + 1
                    break
                known.shown(line.name, step * STEP_S)
            if not dead:
                for line in [line for line in here if line.done == line.left]:
                    here.remove(line)
                    known.forget(line.name)
                    line.fate = "whole"
                continue
            incarnations[name] += 1
            lost, where[name] = where[name], []
            rng.shuffle(lost)
            for line in lost:
                known.closed(line.name)
                blame = known.lost(line.name, step * STEP_S)
                line.level += blame is SHARED
                line.lost_at = max(line.lost_at, line.done)
                line.done = 0
                if blame is ALONE:
                    line.fate = "set aside"
                else:
                    waiting.append(line)
        if not waiting and not any(where.values()):
            return killed
    raise AssertionError("it never ends")


@pytest.mark.parametrize("replicas", [1, 2, 8])
def test_poisoned_lines_and_no_others_are_set_aside(replicas: int) -> None:
    """Whatever stands beside what, with every eighth line poisoned."""
    killed = poisoned = 0
    for seed in range(40):
        rng = random.Random(seed)
        lines = [Line(f"l{n}", rng.choice((1, 2)) if n % 8 == 0 else None) for n in range(48)]
        killed += run(lines, replicas, seed, deaths=0)
        poisoned += sum(line.kills_at is not None for line in lines)
        assert {line.fate for line in lines if line.kills_at is None} == {"whole"}
        assert {line.fate for line in lines if line.kills_at is not None} == {"set aside"}
    assert killed < (2 if replicas == 8 else 2.6) * poisoned


def test_a_node_that_dies_sets_nobody_aside() -> None:
    for seed in range(40):
        lines = [Line(f"l{n}", None) for n in range(48)]
        assert run(lines, 4, seed, deaths=1) == 0
        assert {line.fate for line in lines} == {"whole"}
