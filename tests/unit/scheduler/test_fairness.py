"""What teams have had: weights, half-life, and totals that stay finite for ever."""

import pytest

from scheduler.core import fairness


def test_weights() -> None:
    assert fairness.weighted(100, 50, 10) == 100 + 5 + 20


def test_half_is_forgotten_after_a_half_life() -> None:
    service = fairness.Service(100.0)
    service.charge("a", 80.0, 0.0)
    assert service.attained("a", 0.0) == 80.0
    assert service.attained("a", 100.0) == pytest.approx(40.0)
    service.charge("b", 40.0, 100.0)
    assert service.key("a")[0] == pytest.approx(service.key("b")[0])
    assert service.attained("nobody", 100.0) == 0.0


def test_what_is_given_back_never_goes_below_nothing() -> None:
    service = fairness.Service(100.0)
    service.charge("a", 10.0, 0.0)
    service.charge("a", -30.0, 50.0)
    assert service.attained("a", 50.0) == 0.0


def test_who_comes_back_is_lifted_to_the_least_of_those_that_wait() -> None:
    service = fairness.Service(100.0)
    service.charge("a", 70.0, 0.0)
    service.charge("b", 30.0, 0.0)
    service.lift("c", "b", 0.0)
    assert service.attained("c", 0.0) == 30.0
    service.lift("a", "b", 0.0)
    assert service.attained("a", 0.0) == 70.0  # nobody is lowered
    service.lift("d", None, 0.0)
    assert service.attained("d", 0.0) == 70.0  # nobody waited: no lead is earned


def test_the_lead_of_who_comes_back_is_bounded() -> None:
    service = fairness.Service(100.0, credit=25.0)
    service.charge("a", 400.0, 0.0)
    service.lift("b", "a", 200.0)
    assert service.attained("a", 200.0) - service.attained("b", 200.0) == pytest.approx(25.0)


def test_rebase_changes_keys_and_nothing_else() -> None:
    service = fairness.Service(10.0)
    service.charge("old", 50.0, 0.0)
    assert not service.due(2000.0)
    service.charge("a", 60.0, 2560.0)
    service.charge("b", 30.0, 2560.0)
    assert service.due(2570.0)
    service.rebase(2570.0)
    assert service.attained("a", 2570.0) == pytest.approx(30.0)
    assert service.key("a")[0] == pytest.approx(30.0)
    assert service.key("b")[0] == pytest.approx(15.0)
    assert service.key("old") == (0.0, -1)  # nothing is left of it, so nothing is kept
    assert not service.due(2570.0)
    assert service.attained("a", 1e9) == 0.0  # years later nothing overflows
    service.lift("c", None, 2570.0)
    assert service.attained("c", 2570.0) == pytest.approx(30.0)
