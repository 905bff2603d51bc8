"""The timed engine against the closed form and against the simulated engine that runs step by step."""

import math

import pytest

from engines.simulated import batching, blocks
from scheduler.core import sizing
from scheduler.sim import engine

STEP = sizing.StepTime(8.0, 0.08, 0.05, 5e-5)


def made(**changes: object) -> engine.Engine:
    options: dict[str, object] = {
        "kv_tokens": 100_000, "seats": 64, "chunk": 512, "itl_s": 0.02,
        "shape": engine.BatchShape(1000, 300),
    }  # fmt: skip
    return engine.Engine(STEP, **(options | changes))  # type: ignore[arg-type]


def drive(one: engine.Engine, calls: list[engine.Call]) -> dict[int, tuple[float, float]]:
    """Run to the end; returns each call's first token and end."""
    found: dict[int, tuple[float, float]] = {}
    todo = sorted(calls, key=lambda call: call.arrival)
    while todo or one.next_at < math.inf:
        if todo and todo[0].arrival <= one.next_at:
            one.add(todo.pop(0), max(one.at, calls[0].arrival, one.at))
            continue
        done = one.pop(one.next_at)
        if done is not None and done[1]:
            found[done[0].prompt] = (done[0].first, one.at)
    return found


def test_one_request_takes_its_prompt_and_then_a_step_a_token() -> None:
    one = made()
    found = drive(one, [engine.Call(0, 0.0, 1000, 1000, 11)])
    steps = 1000 / 512
    first = steps * (8 + 0.08 * 512) / 1000
    assert found[1000][0] == pytest.approx(first)
    step = STEP.ms(0, 1, 1000 + 11 / 2) / 1000
    assert found[1000][1] == pytest.approx(first + 10 * step)
    assert (one.running, one.reserved, one.backlog) == (0, 0, 0)
    assert one.busy_s == pytest.approx(found[1000][1])


def test_it_agrees_with_the_engine_that_runs_step_by_step() -> None:
    calls = [engine.Call(0, 0.4 * n, 200 + 40 * n, 200 + 40 * n, 40 + n) for n in range(20)]
    mine = made()
    found: dict[int, float] = {}
    todo = list(calls)
    while todo or mine.next_at < math.inf:
        if todo and todo[0].arrival <= mine.next_at:
            call = todo.pop(0)
            mine.add(call, call.arrival)
            continue
        done = mine.pop(mine.next_at)
        if done is not None and done[1]:
            found[done[0].prompt] = mine.at - done[0].arrival
    times = batching.StepTime(STEP.base, STEP.prefill, STEP.decode, STEP.kv)
    other = batching.Batch(64, blocks.BlockPool(100_000 // 16, 16), 512, times)
    now, todo, ends = 0.0, list(calls), {}
    while todo or other.busy:
        while todo and todo[0].arrival <= now:
            call = todo.pop(0)
            other.add(
                batching.Sequence(
                    str(call.prompt),
                    tuple([call.prompt] * call.prompt),
                    call.output,
                    ignore_eos=True,
                )
            )
        if not other.busy:
            now = todo[0].arrival
            continue
        step = other.step()
        now += step.ms / 1000
        for output in step.outputs:
            if output.finish_reason:
                ends[int(output.key)] = now
    took = {call.prompt: ends[call.prompt] - 0.4 * n for n, call in enumerate(calls)}
    assert sum(found.values()) == pytest.approx(sum(took.values()), rel=0.03)
    for prompt, seconds in took.items():
        assert found[prompt] == pytest.approx(seconds, rel=0.15)


def test_short_prompts_that_fit_into_one_chunk_are_computed_together() -> None:
    one = made(chunk=512)
    for prompt in (300, 200, 100, 40):
        one.add(engine.Call(0, 0.0, prompt, prompt, 1), 0.0)
    ends: list[float] = []
    while one.next_at < math.inf:
        ends.append(one.next_at)
        one.pop(one.next_at)
    first = (8 + 0.08 * 300) / 1000  # nothing else was there when its step began
    both = first + (8 + 0.08 * 340) / 1000
    assert ends == pytest.approx([first, both, both, both])
    assert (one.running, one.backlog) == (0, 0)


def test_what_fits_into_the_last_chunk_of_a_long_prompt_is_computed_with_it() -> None:
    one = made(chunk=512)
    one.add(engine.Call(0, 0.0, 50, 50, 2), 0.0)
    for prompt in (700, 300, 100):
        one.add(engine.Call(0, 0.0, prompt, prompt, 1), 0.0)
    seen = []
    while one.next_at < math.inf:
        at = one.next_at
        done = one.pop(at)
        assert done is not None
        seen.append((done[0].prompt, at))
    firsts = dict(reversed(seen))
    assert firsts[700] == pytest.approx(firsts[300])
    assert firsts[100] > firsts[300] + 0.01


def test_batch_keeps_the_step_within_the_stream_speed_and_gives_way_for_seats() -> None:
    one = made(seats=32, kv_tokens=1_000_000)
    one.set_feed("shared", 0.0)
    assert 0 < one.batch <= 32 - one.reserve
    assert one.step_ms <= 20.0 + 1e-6
    for n in range(20):
        one.add(engine.Call(0, 0.0, 100 + n, 100 + n, 50), 0.0)
    assert one.batch + one.running <= 32
    assert one.preempted > 0
    assert one.wasted_s > 0
    one.set_feed("none", 0.1)
    assert one.batch == 0


def test_what_a_dead_replica_leaves_says_how_far_it_was() -> None:
    one = made()
    one.add(engine.Call(0, 0.0, 100, 100, 100), 0.0)
    one.pop(one.next_at)
    one.add(engine.Call(0, 0.5, 200, 200, 10), 0.5)
    left = one.clear(0.51)
    assert sorted(call.prompt for call in left) == [100, 200]
    assert 0 < next(call.done for call in left if call.prompt == 100) < 100
    assert (one.running, one.reserved, one.next_at) == (0, 0, math.inf)


def test_more_than_the_cache_holds_is_not_taken() -> None:
    one = made(kv_tokens=1000)
    assert one.fits(engine.Call(0, 0.0, 900, 900, 100))
    assert not one.fits(engine.Call(0, 0.0, 901, 901, 100))
