"""Rung 1: two ticks of pressure up, calm down, nothing in between."""

import dataclasses

import pytest

from scheduler.contracts import fleet, observed
from scheduler.core import ladder


@dataclasses.dataclass(frozen=True)
class Settings:
    ttft_slo_ms: float = 500.0
    pressure_ticks: int = 2
    calm_s: float = 30.0


def run(waits: list[tuple[float, float | None]], turnable: int = 3) -> list[int]:
    """Return how many replicas are turned after each (time, predicted wait)."""
    memory: ladder.Memory | None = None
    found = []
    for now, predicted in waits:
        turned = memory.interactive if memory else 0
        signal = ladder.Signal(predicted, turned, turnable)
        memory = ladder.step(memory, signal, now, Settings())
        found.append(memory.interactive)
    return found


def test_one_replica_for_every_two_ticks_of_pressure() -> None:
    assert run([(n * 0.2, 0.3) for n in range(7)]) == [0, 1, 1, 2, 2, 3, 3]


def test_pressure_must_be_above_half_the_slo_in_a_row() -> None:
    assert run([(0.0, 0.25), (0.2, 0.25), (0.4, 0.25)]) == [0, 0, 0]
    assert run([(0.0, 0.3), (0.2, 0.2), (0.4, 0.3), (0.6, 0.2)]) == [0, 0, 0, 0]


def test_turned_back_after_calm_all_at_once() -> None:
    up = [(0.0, 9.0), (0.2, 9.0), (0.4, 9.0), (0.6, 9.0)]
    assert run([*up, (1.0, 0.0), (30.9, 0.0), (31.0, 0.0)]) == [0, 1, 1, 2, 2, 2, 0]


def test_a_wait_in_between_restarts_the_calm() -> None:
    up = [(0.0, 9.0), (0.2, 9.0)]
    rest = [(1.0, 0.0), (20.0, 0.2), (21.0, 0.0), (50.9, 0.0), (51.0, 0.0)]
    assert run([*up, *rest]) == [0, 1, 1, 1, 1, 1, 0]


def test_without_fresh_signals_nothing_moves_and_calm_does_not_run() -> None:
    up = [(0.0, 9.0), (0.2, 9.0)]
    assert run([*up, (1.0, 0.0), (40.0, None), (41.0, 0.0), (70.0, 0.0), (71.0, 0.0)]) == [
        *(0, 1, 1, 1, 1, 1, 0)
    ]


def test_a_new_broker_keeps_what_is_turned_until_calm() -> None:
    memory = ladder.step(None, ladder.Signal(0.0, 2, 3), 100.0, Settings())
    assert memory.interactive == 2
    assert ladder.step(memory, ladder.Signal(0.0, 2, 3), 130.0, Settings()).interactive == 0


def test_fewer_replicas_than_were_turned() -> None:
    memory = ladder.Memory(interactive=3)
    assert ladder.step(memory, ladder.Signal(0.2, 1, 1), 0.0, Settings()).interactive == 1


@pytest.mark.parametrize(
    ("demand", "expected"),
    [
        (None, None),
        (observed.Demand("m", {}, {}), 0.0),
        (observed.Demand("m", {"batch": 900}, {"batch": 8}, 0.0, (9000.0,)), 0.0),
        (observed.Demand("m", {"interactive": 3}, {}, 0.4), 0.4),
        (observed.Demand("m", {"interactive": 5}, {}, 0.0), float("inf")),
        (observed.Demand("m", {"standard": 5}, {}, 0.0), float("inf")),
        (observed.Demand("m", {}, {"interactive": 1}, 0.0, (100.0, 300.0, 320.0)), 0.3),
        (observed.Demand("m", {}, {"interactive": 1}, 9.0, ()), 0.0),
        (observed.Demand("m", {}, {"interactive": 1}, 0.0, (9e3,) * 50 + (10.0,) * 8), 0.01),
    ],
)
def test_predicted_wait(demand: observed.Demand | None, expected: float | None) -> None:
    stats = [fleet.ReplicaStats(0, seats=4, interactive=2, batch=2), fleet.ReplicaStats(0, 2)]
    assert ladder.predicted_wait(demand, stats) == expected


def test_waiting_with_no_replica_has_no_bound() -> None:
    assert ladder.predicted_wait(observed.Demand("m", {"interactive": 1}, {}), []) == float("inf")
