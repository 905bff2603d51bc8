"""A caller's answer as a copy hears of it, over all replicas that gave a part of it."""

from gateway import shadow_answer
from scheduler.contracts import clock, frames, observed
from tests.unit.gateway import harness

END = frames.End(("stop",), 5, 0, 3)


def test_an_answer_that_goes_on_elsewhere_is_one(fake_clock: clock.FakeClock) -> None:
    """Its text is compared whole, and its time began with the first dispatch."""
    whole = shadow_answer.Answer(fake_clock, 10_000)
    parts = shadow_answer.Answer(fake_clock, 10_000)
    events = [harness.data(harness.chat_event({"content": word}), 7) for word in ("Hel", "lo")]
    for answer in (whole, parts):
        answer.dispatched()
    parts.add(events[0])
    parts.dispatched()
    parts.add(events[1])
    for event in events:
        whole.add(event)
    assert parts.text() == whole.text() is not None
    assert parts.fared(END).tokens == 3
    parts.restart()
    parts.dispatched()
    parts.add(events[1])
    assert parts.text() != whole.text()


def test_a_long_answer_is_not_kept(fake_clock: clock.FakeClock) -> None:
    answer = shadow_answer.Answer(fake_clock, 100)
    answer.dispatched()
    for _ in range(100):
        answer.add(harness.data(harness.chat_event({"content": "x"}), 7))
    assert answer.text() is None
    assert answer._parts == []


def test_an_answer_without_a_copy_is_not_kept(fake_clock: clock.FakeClock) -> None:
    answer = shadow_answer.Answer(fake_clock, 10_000)
    answer.dispatched()
    event = harness.data(harness.chat_event({"content": "x"}), 7)
    answer.add(event)
    answer.let_go()
    answer.add(event)
    assert answer._parts == []
    assert answer.text() is None
    assert answer.fared(END).tokens == 3


async def test_a_slow_client_is_no_time_of_the_answers(fake_clock: clock.FakeClock) -> None:
    """After the last frame its reading counts for nothing; if it held frames up, no time is known."""

    class Slow(shadow_answer.Sink):
        async def drained(self) -> None:
            await fake_clock.advance(5)

    answer = shadow_answer.Answer(fake_clock, 10_000)
    tee = shadow_answer.Tee(Slow(answer), answer, lambda: None)
    event = harness.data(harness.chat_event({"content": "x"}), 7)
    await fake_clock.advance(1)
    answer.dispatched()
    await fake_clock.advance(0.5)
    answer.add(event)
    await fake_clock.advance(1)
    answer.over()
    await tee.drained()
    assert answer.fared(END) == observed.Fared(False, 500.0, 500.0, 1500.0, 3)
    answer.dispatched()  # that frame was an error's: it goes on elsewhere
    answer.add(event)
    await tee.drained()
    answer.over()
    found = answer.fared(END)
    assert (found.itl_ms, found.total_ms, found.ttft_ms > 0) == (0.0, 0.0, True)
