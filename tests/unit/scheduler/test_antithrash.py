"""The rules against thrash, each with the recorded trace that shows why it is as it is.

The code trace (Azure, 2023: requests of one hour) is bursty: its rate over 5 s exceeds twice that of the
minute before 72 times, for 13 s at the median. What a rule saves is counted in turns of a role: each aborts
the batch sequences of a whole replica.
"""

import bisect
import dataclasses

import pytest

from scheduler.core import ladder, lending
from scheduler.sim import scenario, traffic

TICK_S = 0.2
SHORT_S, LONG_S = 5.0, 60.0


@dataclasses.dataclass(frozen=True)
class Settings:
    ttft_slo_ms: float = 500.0
    pressure_ticks: int = 2
    calm_s: float = 30.0


@pytest.fixture(scope="module")
def pressed() -> list[bool]:
    """Return for each tick of the hour whether callers come at more than twice the last minute's rate."""
    times = [row.at_s for row in traffic.read(scenario.SHIPPED / "azure_llm_2023_code.csv")]

    def within(until: float, seconds: float) -> float:
        count = bisect.bisect_right(times, until) - bisect.bisect_right(times, until - seconds)
        return count / seconds

    ticks = [LONG_S + n * TICK_S for n in range(round((times[-1] - LONG_S) / TICK_S))]
    return [within(at, SHORT_S) > 2 * max(within(at, LONG_S), 1 / LONG_S) for at in ticks]


def turns(
    pressed: list[bool], *, calm_s: float = 30.0, pressure_ticks: int = 2
) -> tuple[int, float]:
    """Return how often the one replica turns back, and the share of time in which it is interactive."""
    settings = Settings(pressure_ticks=pressure_ticks, calm_s=calm_s)
    memory: ladder.Memory | None = ladder.Memory()
    back = held = 0
    for tick, hot in enumerate(pressed):
        before = memory.interactive if memory else 0
        signal = ladder.Signal(1.0 if hot else 0.0, before, 1)
        memory = ladder.step(memory, signal, tick * TICK_S, settings)
        back += before > memory.interactive
        held += memory.interactive
    return back, held / len(pressed)


def test_a_short_calm_turns_roles_for_ever_and_half_a_minute_does_not(pressed: list[bool]) -> None:
    """A role turns back 47 times an hour after 5 s of calm, 32 times after 30 s, 13 times after a minute."""
    short, _ = turns(pressed, calm_s=5.0)
    design, _ = turns(pressed)
    longest, _ = turns(pressed, calm_s=60.0)
    assert short >= 45
    assert design <= 0.7 * short
    assert longest < design


def test_a_lone_tick_of_pressure_turns_nothing(pressed: list[bool]) -> None:
    """A wait of one tick is over before a role has turned: half of such alarms are for nothing."""
    lone = [False] * len(pressed)
    lone[10::50] = [True] * len(lone[10::50])
    assert turns(lone)[0] == 0
    assert turns(lone, pressure_ticks=1)[1] > 0.9


def test_between_calm_and_pressure_nothing_moves(pressed: list[bool]) -> None:
    """The trace's lulls as waits of three eighths of the SLO: neither up nor back."""
    memory: ladder.Memory | None = ladder.Memory(interactive=1)
    for tick, _ in enumerate(pressed):
        memory = ladder.step(memory, ladder.Signal(0.1875, 1, 2), tick * TICK_S, Settings())
        assert memory.interactive == 1


def test_lent_replicas_stay_for_their_least_time_whatever_the_backlogs_do(
    pressed: list[bool],
) -> None:
    """Two models whose batch work swaps sides with the trace's spells: young loans do not move."""

    def moves(young: int) -> int:
        current, count = [4, 0], 0
        for hot in pressed[::25]:
            works = (10_000.0, 1.0) if hot else (1.0, 10_000.0)
            wants = [
                lending.Want(
                    (name, "v1"), 1, lending.Backlog(work), held, maximum=4, young=min(held, young)
                )
                for name, work, held in zip("ab", works, current, strict=True)
            ]
            given = lending.lend(4, wants, settled=True)
            after = [given["a", "v1"], given["b", "v1"]]
            count += after != current
            current = after
        return count

    assert moves(young=4) <= 1
    assert moves(young=0) > 40
