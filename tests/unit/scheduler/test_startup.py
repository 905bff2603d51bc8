"""The phases of a start: what a replica tells, made into the six that people read."""

import pytest

from scheduler.core import startup


def test_phases_add_up_to_the_whole_start() -> None:
    told = {
        "fork server": 11.0,
        "stage": 4.0,
        "configure": 0.4,
        "load": 2.0,
        "engine": 2.6,
        "compile": 0.5,
    }
    found = startup.phases(told, queue_s=30.0, allocate_s=0.3, total_s=19.0)
    assert list(found) == list(startup.PHASES)
    assert found == {
        "queue": 30.0,
        "allocate": 0.3,
        "stage": 4.0,
        "load": 13.1,
        "compile": 0.5,
        "warm-up": 1.1,
    }
    assert sum(found.values()) == pytest.approx(49.0)


def test_what_a_replica_does_not_tell_is_left_out_and_its_time_is_in_the_last_phase() -> None:
    found = startup.phases({}, queue_s=0.0, allocate_s=0.5, total_s=2.0)
    assert found == {"queue": 0.0, "allocate": 0.5, "warm-up": 1.5}


def test_more_told_than_there_was_time_is_never_less_than_nothing() -> None:
    found = startup.phases({"load": 9.0}, queue_s=0.0, allocate_s=0.0, total_s=5.0)
    assert found["warm-up"] == 0.0
    assert found["load"] == 9.0
