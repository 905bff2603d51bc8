"""A replica's tempo: medians of the newest, rates over two seconds, nothing of those that never began."""

from engines.replica import engine, tempo
from scheduler.contracts import clock


async def test_time_to_first_token_is_the_median_of_the_newest() -> None:
    time = clock.FakeClock()
    unit = tempo.Tempo(time)
    assert unit.ttft_ms() == 0.0
    taps = [engine.Tap(time.wall_us) for _ in range(4)]
    for tap in taps:
        unit.opened(tap)
    for tap, wait_s in zip(taps[:3], (0.1, 0.1, 0.3), strict=True):
        await time.advance(wait_s)
        tap.sampled(1)
    assert unit.ttft_ms() == 200.0  # while they run
    unit.closed(taps[3])  # left before its first token
    for tap in taps[:3]:
        unit.closed(tap)
    assert unit.ttft_ms() == 200.0
    for _ in range(40):
        tap = engine.Tap(time.wall_us)
        unit.opened(tap)
        await time.advance(0.05)
        tap.sampled(1)
        unit.closed(tap)
    assert unit.ttft_ms() == 50.0


async def test_tokens_a_second_are_those_of_the_last_two_seconds() -> None:
    time = clock.FakeClock()
    unit = tempo.Tempo(time)
    assert unit.tokens_per_s(0) == 0.0
    for step in range(1, 20):
        await time.advance(0.2)
        assert unit.tokens_per_s(step * 20) == 100.0
    for _ in range(11):
        await time.advance(0.2)
        rate = unit.tokens_per_s(380)
    assert rate == 0.0
