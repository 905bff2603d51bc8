"""The cost of a token from the engine's own step times."""

import random

import pytest

from accounting import stepcost

GIVEN = stepcost.Cost(1.0, 4.0)


def intervals(n: int, noise: float = 0.0, ratio: float | None = None) -> list[tuple[int, int, int]]:
    draw = random.Random(7)
    found = []
    for _ in range(n):
        decode = draw.randrange(1000)
        prefill = draw.randrange(20_000) if ratio is None else round(ratio * decode)
        busy = 80 * prefill + 900 * decode
        found.append((prefill, decode, max(0, round(busy * draw.gauss(1, noise)))))
    return found


@pytest.mark.parametrize("noise", [0.0, 0.1, 0.3])
def test_both_costs_are_found_and_how_sure_they_are(noise: float) -> None:
    cost = stepcost.fit(stepcost.of(intervals(500, noise)), GIVEN)
    assert cost.fitted
    assert cost.n == 500
    assert abs(cost.prefill_us - 80) <= 4 * cost.prefill_error + 1e-6
    assert abs(cost.decode_us - 900) <= 4 * cost.decode_error + 1e-6


@pytest.mark.parametrize(
    "rows",
    [
        [],
        intervals(stepcost.LEAST - 1),  # too few
        intervals(500, ratio=7.0),  # which of the two cost it, nobody can say
        intervals(40, noise=5.0),
        [(p, 0, y) for p, _, y in intervals(500)],  # embeddings: there is no decode
        [
            (p, d, max(0, 10_000_000 - 400 * p + d)) for p, d, _ in intervals(500)
        ],  # less than nothing
    ],
    ids=["none", "few", "collinear", "noise", "no decode", "negative"],
)
def test_until_it_is_known_the_given_weights_hold(rows: list[tuple[int, int, int]]) -> None:
    cost = stepcost.fit(stepcost.of(rows), GIVEN)
    assert (cost.prefill_us, cost.decode_us, cost.fitted, cost.n) == (1.0, 4.0, False, len(rows))


def test_where_a_step_takes_its_time_whatever_is_in_it_a_prompt_costs_next_to_nothing() -> None:
    draw = random.Random(7)
    rows = []
    for _ in range(60):  # batches of about three, 20 ms a step
        steps = draw.randrange(500, 3000)
        tokens = round(steps * draw.gauss(3, 0.3))
        rows.append((draw.randrange(2_000, 12_000), tokens, 20_000 * steps))
    cost = stepcost.fit(stepcost.of(rows), GIVEN)
    assert cost.fitted
    assert cost.decode_us == pytest.approx(20_000 / 3, rel=0.1)
    assert cost.prefill_us * 12_000 < 0.2 * 20_000 * 3000


def test_sums_of_two_hours_are_those_of_both() -> None:
    rows = intervals(100, 0.1)
    both = stepcost.of(rows[:40]) + stepcost.of(rows[40:])
    whole = stepcost.of(rows)
    assert stepcost.fit(both, GIVEN).prefill_us == pytest.approx(
        stepcost.fit(whole, GIVEN).prefill_us
    )
