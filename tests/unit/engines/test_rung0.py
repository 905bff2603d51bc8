"""Rung 0: the step-time model, the seats kept free, and how much batch a shared replica takes."""

import random

import hypothesis
import pytest
from hypothesis import strategies

from engines.replica import arrivals, gate, seats, steptime, throttle
from engines.simulated import batching
from scheduler.contracts import clock, fleet, requests

TRUE = batching.StepTime(base=8.0, prefill=0.08, decode=0.05, kv=0.00005)
P, B = requests.Tier.INTERACTIVE, requests.Tier.BATCH


def steps(count: int, *, noise: float, seed: int = 1) -> list[steptime.Step]:
    draw = random.Random(seed)
    made = []
    for _ in range(count):
        prefill = draw.choice([0, 0, 0, 256, 1024, 2048])
        decode, kv = draw.randint(1, 64), draw.randint(1_000, 400_000)
        ms = TRUE.milliseconds(prefill, decode, kv) * (1 + draw.gauss(0, noise))
        made.append(steptime.Step(ms, prefill, decode, kv))
    return made


def test_the_model_finds_the_coefficients() -> None:
    model = steptime.Model()
    for step in steps(400, noise=0.03):
        model.observe(step)
    fit = model.coefficients()
    assert fit is not None
    assert fit.base == pytest.approx(TRUE.base, rel=0.1)
    assert fit.prefill == pytest.approx(TRUE.prefill, rel=0.03)
    assert fit.kv == pytest.approx(TRUE.kv, rel=0.1)


def test_it_says_nothing_before_it_has_seen_enough() -> None:
    model = steptime.Model()
    for step in steps(steptime.LEAST - 1, noise=0.0):
        model.observe(step)
    assert model.coefficients() is None
    model.observe(steptime.Step(0.0, 10, 10, 10))  # no duration: no step
    assert model.coefficients() is None


def test_outliers_move_it_little_and_a_new_clock_is_followed() -> None:
    model = steptime.Model()
    for place, step in enumerate(steps(600, noise=0.01)):
        slow = place > 100 and place % 50 == 0  # a stolen core
        model.observe(
            steptime.Step(step.ms * (20 if slow else 1), step.prefill, step.decode, step.kv_tokens)
        )
    fit = model.coefficients()
    assert fit is not None
    truth = TRUE.milliseconds(0, 32, 100_000)
    assert fit.ms(0, 32, 100_000) == pytest.approx(truth, rel=0.25)
    for step in steps(1_500, noise=0.01, seed=2):
        model.observe(steptime.Step(step.ms * 2, step.prefill, step.decode, step.kv_tokens))
    later = model.coefficients()
    assert later is not None
    assert later.ms(0, 32, 100_000) == pytest.approx(2 * truth, rel=0.1)


@hypothesis.given(
    strategies.lists(
        strategies.builds(
            steptime.Step,
            strategies.floats(0, 1e5),
            strategies.integers(0, 100_000),
            strategies.integers(0, 1_000),
            strategies.integers(0, 10_000_000),
        ),
        min_size=steptime.LEAST,
        max_size=80,
    )
)
def test_no_coefficient_is_ever_negative_or_not_a_number(given: list[steptime.Step]) -> None:
    model = steptime.Model()
    for step in given:
        model.observe(step)
    fit = model.coefficients()
    if fit is not None:
        assert min(fit.base, fit.prefill, fit.decode, fit.kv) >= 0
        assert fit.ms(1, 1, 1) < float("inf")


def test_the_reserve_is_the_p99_of_arrivals_within_a_round_trip() -> None:
    seen = arrivals.Arrivals(0.0)
    for second in range(100):
        seen.note(second + 0.05)
    assert seen.reserve(100.0, 0.1) == 1  # one in ten windows sees one arrival
    for place in range(30):  # three windows of a thousand see ten at once: below p99
        seen.note(20.0 + place // 10 * 0.1)
    assert seen.reserve(100.0, 0.1) == 1
    for window in range(0, 1_000, 20):
        for _ in range(4):
            seen.note(window / 10 + 0.05)
    assert seen.reserve(100.0, 0.1) >= 4


def test_a_crowd_or_two_of_a_young_replica_keep_no_seat_from_batch() -> None:
    seen = arrivals.Arrivals(0.0)
    for crowd in (30.0, 40.0):
        for _ in range(8):
            seen.note(crowd)
    assert seen.reserve(41.0, 0.5) == 0
    for second in range(30, 41):  # what comes all the time is no chance
        seen.note(second + 0.2)
    assert seen.reserve(41.0, 0.5) == 1


def test_rare_arrivals_reserve_nothing_and_old_ones_are_forgotten() -> None:
    seen = arrivals.Arrivals(0.0)
    seen.note(10.0)
    assert seen.reserve(590.0, 0.1) == 0
    for place in range(100):
        seen.note(600.0 + place / 5)
    assert seen.reserve(620.0, 0.1) == 1
    assert seen.reserve(1_300.0, 0.1) == 0


def run(held: throttle.Throttle, ms: float, interactive: int, batch: int, kv: int = 1_000) -> int:
    """Feed one window of steps; return how many were told to leave."""
    left = 0
    for _ in range(throttle.WINDOW):
        left += held.step(
            steptime.Step(ms, 0, interactive + batch, kv), interactive=interactive, batch=batch
        )
    return left


def test_batch_shrinks_at_once_above_the_slo_and_grows_by_one() -> None:
    held = throttle.Throttle(64, throttle.Limits(itl_slo_ms=25.0))
    assert held.most(1) == 64
    left = run(held, 40.0, 4, 40)
    assert left == 12  # 0.7 of 40 may stay, far above the SLO they leave at once
    assert held.most(4) <= 28
    before = held.most(4)
    assert run(held, 26.0, 4, before) == 0  # a little above: no abort
    assert held.most(4) < before


def test_without_interactive_work_no_step_counts_against_batch() -> None:
    held = throttle.Throttle(8, throttle.Limits(itl_slo_ms=1.0))
    assert run(held, 500.0, 0, 8) == 0
    assert held._cap == 8


def simulate(batch_wanted: int, slo: float, ticks: int = 4_000) -> tuple[float, int]:
    """Run the throttle against the true step times; return the late ITL (p95) and batch at the end."""
    held = throttle.Throttle(256, throttle.Limits(itl_slo_ms=slo))
    batch, each, late = 0, 1_500, []
    for tick in range(ticks):
        interactive = 8
        if batch < batch_wanted and not held.refuses(fleet.Role.SHARED, interactive, batch, 1):
            batch += 1
        kv = (interactive + batch) * each
        ms = TRUE.milliseconds(0, interactive + batch, kv)
        batch -= held.step(
            steptime.Step(ms, 0, interactive + batch, kv), interactive=interactive, batch=batch
        )
        if tick > ticks // 2:
            late.append(ms)
    return sorted(late)[int(0.95 * len(late))], batch


def test_batch_fills_what_the_slo_leaves_and_not_more() -> None:
    late, batch = simulate(256, slo=25.0)
    best = int((25.0 - 8.0) / (0.05 + 0.00005 * 1_500)) - 8  # the most that the truth allows
    assert late <= 25.0 * 1.02
    assert 0.85 * best <= batch <= best + 1


def test_an_engine_slower_than_the_slo_keeps_little_batch_and_never_blames_itself() -> None:
    late, batch = simulate(256, slo=2.0)  # the engine alone takes 9 ms
    assert late <= 9.1 * throttle.SLACK * 1.05
    assert batch >= 1


def test_prompts_of_batch_wait_for_one_another_where_somebody_would_wait_for_them() -> None:
    held = throttle.Throttle(8, throttle.Limits(prefill_tokens=2_048))
    assert held.refuses(fleet.Role.SHARED, 1, 1, 1) == ""
    held.entered("a", 3_000)  # one alone may be longer than the bound
    assert "3000 batch prompt tokens" in held.refuses(fleet.Role.SHARED, 1, 1, 1)
    assert held.refuses(fleet.Role.BATCH, 1, 1, 1) == ""
    assert held.refuses(fleet.Role.SHARED, 0, 1, 1) == ""
    held.prefilled("a")
    assert held.refuses(fleet.Role.SHARED, 1, 1, 1) == ""


async def test_the_gate_sheds_the_youngest_and_says_its_room() -> None:
    time = clock.FakeClock()
    door = gate.Gate(seats.Seats(8, 1, fleet.Role.SHARED), time, throttle.Limits(itl_slo_ms=25.0))
    held = [await door.enter(f"b{place}", B, prompt_tokens=1) for place in range(4)]
    await door.enter("i", P)
    door.throttle.prefilled("i")
    assert door.batch_room() == 2
    for _ in range(throttle.WINDOW):
        door.step(steptime.Step(100.0, 0, 5, 100))
    assert [seat.why for seat in held] == [None, None, gate.Leave.PREEMPTED, gate.Leave.PREEMPTED]
    assert door.batch_room() == 0
    with pytest.raises(gate.Full, match="held to 2 sequences"):
        await door.enter("late", B)


async def test_seats_are_reserved_as_arrivals_come_and_given_back_when_they_stop() -> None:
    time = clock.FakeClock()
    door = gate.Gate(seats.Seats(8, 1, fleet.Role.SHARED), time)
    for burst in range(200):
        for place in range(4):
            (await door.enter(f"{burst}.{place}", P)).release()
        await time.advance(0.5)
    assert door.batch_room() == 4
    await time.advance(2 * arrivals.MEMORY_S)
    assert door.batch_room() == 7  # the configured reserve stays


async def test_a_refused_or_left_batch_request_frees_its_prompt() -> None:
    door = gate.Gate(seats.Seats(2, 1, fleet.Role.SHARED), clock.FakeClock())
    seat = await door.enter("a", B, prompt_tokens=10_000)
    with pytest.raises(gate.Full):
        await door.enter("b", B)
    seat.release()
    (await door.enter("b", B)).release()
    assert door.batch_room() == 1


async def test_no_batch_enters_while_an_interactive_prompt_is_computed() -> None:
    door = gate.Gate(seats.Seats(8, 1, fleet.Role.SHARED), clock.FakeClock())
    person = await door.enter("p", P)
    assert door.batch_room() == 0
    with pytest.raises(gate.Full, match="an interactive prompt is being computed"):
        await door.enter("b", B)
    door.throttle.prefilled("p")  # its first token
    assert door.batch_room() == 6
    line = await door.enter("b", B)
    line.release()
    again = await door.enter("q", P)
    again.release()  # gone without a token
    assert door.batch_room() == 6
    person.release()


async def test_a_caller_who_found_no_seat_holds_no_batch_up() -> None:
    door = gate.Gate(seats.Seats(1, 0, fleet.Role.SHARED), clock.FakeClock())
    person = await door.enter("p", P)
    door.throttle.prefilled("p")
    with pytest.raises(gate.Full):
        await door.enter("q", P)
    person.release()
    assert door.batch_room() == 1


def test_beside_interactive_work_prompts_of_batch_keep_a_step_within_its_slo() -> None:
    held = throttle.Throttle(64, throttle.Limits(itl_slo_ms=25.0))
    for step in steps(400, noise=0.0):
        held.model.observe(step)
    held.entered("a", 300)  # 25 ms less a base of 8 are some 200 tokens at 0.08 ms each
    assert "prompt tokens" in held.refuses(fleet.Role.SHARED, 1, 1, 1)
    assert held.refuses(fleet.Role.SHARED, 0, 1, 1) == ""
    held.prefilled("a")
    assert held.refuses(fleet.Role.SHARED, 1, 1, 1) == ""


def test_beside_inputs_that_are_read_at_once_batch_is_held_by_its_prompts_alone() -> None:
    held = throttle.Throttle(64, throttle.Limits(itl_slo_ms=25.0))
    for place in range(400):
        tokens = 100 + place % 7 * 50
        reading = steptime.Step(5.0 + 0.05 * tokens, tokens, 0, 0)
        held.step(reading, interactive=4, batch=1)
    assert held.most(4) == 64
    held.entered("a", 390)  # 25 ms less a base of 5 are 400 tokens at 0.05 ms each
    assert held.refuses(fleet.Role.SHARED, 4, 1, 1) == ""
    held.entered("b", 20)
    assert "410 batch prompt tokens" in held.refuses(fleet.Role.SHARED, 4, 2, 1)
