"""The window: quick at first, halved by a refusal, then one line a round."""

from batch_jobs import window


def test_it_doubles_a_round_until_the_first_refusal() -> None:
    found = window.Window(4, 64)
    for _ in range(4):
        found.answered()
    assert found.size == 8


def test_it_never_leaves_its_bounds() -> None:
    found = window.Window(4, 10)
    for _ in range(100):
        found.answered()
    assert found.size == 10
    for _ in range(100):
        found.refused(found.round)
    assert found.size == 1


def test_the_refusals_of_one_round_halve_once() -> None:
    found = window.Window(32, 64)
    sent_in = found.round
    for _ in range(20):
        found.refused(sent_in)
    assert found.size == 16
    found.refused(found.round)
    assert found.size == 8


def test_after_a_refusal_it_grows_by_one_a_round() -> None:
    found = window.Window(16, 64)
    found.refused(found.round)
    for _ in range(8):
        found.answered()
    assert found.size == 8
    found.answered()
    assert found.size == 9


def test_after_a_spike_it_is_quickly_back_at_half_of_what_worked() -> None:
    found = window.Window(32, 64)
    for _ in range(6):
        found.refused(found.round)
    assert found.size == 1
    for _ in range(15):
        found.answered()
    assert found.size == 16
    for _ in range(16):
        found.answered()
    assert found.size == 16
    found.answered()
    assert found.size == 17
