"""Rung 1 of the reclaim ladder: when shared replicas of a model turn interactive, and back.

Up: predicted interactive wait above half the TTFT SLO for some ticks in a row, one replica for each
such run of ticks. Down: all of them after some seconds of calm, where calm means a predicted wait
below a quarter of the SLO (between a quarter and a half nothing moves: that is the hysteresis). The
defaults follow the design: two ticks up, 30 s down, since spikes in real traces last 13 s at the median.
"""

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Protocol

from scheduler.contracts import fleet, observed, requests

NEWEST_TTFT = 8  # of the TTFTs that a gateway reports; older ones tell of another load
PRESSURE = 0.5  # of the SLO
CALM = 0.25  # of the SLO


class Settings(Protocol):
    """What the ladder needs to be told."""

    @property
    def ttft_slo_ms(self) -> float:
        """Interactive time to first token aimed at, ms."""
        ...

    @property
    def pressure_ticks(self) -> int:
        """Ticks in a row with pressure before one replica turns."""
        ...

    @property
    def calm_s(self) -> float:
        """Seconds of calm before they turn back."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Signal:
    """What is known of one model now.

    Attributes:
        predicted_s: predicted wait of a new interactive request, None if nothing fresh is known.
        turned: shared replicas that are told to be interactive now.
        turnable: shared replicas in all that could be.
        ttft_slo_ms: what the model promises; 0: what the site does.
    """

    predicted_s: float | None
    turned: int
    turnable: int
    ttft_slo_ms: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class Memory:
    """What the ladder remembers of one model.

    Attributes:
        interactive: shared replicas that should be interactive.
        ticks: ticks with pressure in a row.
        calm_since: monotonic seconds since when it is calm, None if it is not.
    """

    interactive: int = 0
    ticks: int = 0
    calm_since: float | None = None


def step(before: Memory | None, signal: Signal, now: float, settings: Settings) -> Memory:
    """Return the memory after one tick; `interactive` is how many replicas should be turned now.

    Without a memory (the broker is new) replicas that are turned stay so until calm has lasted.
    """
    memory = Memory(interactive=signal.turned) if before is None else before
    wanted = min(memory.interactive, signal.turnable)
    if signal.predicted_s is None:
        return Memory(wanted, 0, None)
    slo_s = (signal.ttft_slo_ms or settings.ttft_slo_ms) / 1000
    if signal.predicted_s > PRESSURE * slo_s:
        ticks = memory.ticks + 1
        if ticks < settings.pressure_ticks:
            return Memory(wanted, ticks, None)
        return Memory(min(wanted + 1, signal.turnable), 0, None)
    if signal.predicted_s > CALM * slo_s:
        return Memory(wanted, 0, None)
    since = now if memory.calm_since is None else memory.calm_since
    if now - since >= settings.calm_s:
        wanted = 0
    return Memory(wanted, 0, since)


def predicted_wait(
    demand: observed.Demand | None, stats: Sequence[fleet.ReplicaStats]
) -> float | None:
    """Return seconds that a new interactive request would wait for its first token, or None.

    The longest of: what the head of the queue has waited; the median of the newest TTFTs while
    interactive work is under way; and, when more wait than there are seats which batch could give up,
    no finite bound is known, so infinity.

    Args:
        demand: what the gateways have waiting, None if none of them reports.
        stats: fresh stats of the model's replicas that take requests.
    """
    if demand is None:
        return None
    tiers = (requests.Tier.INTERACTIVE, requests.Tier.STANDARD)
    waiting = sum(demand.waiting.get(tier, 0) for tier in tiers)
    running = sum(demand.in_flight.get(tier, 0) for tier in tiers)
    if waiting + running == 0:
        return 0.0
    if waiting and not stats:
        return float("inf")
    reachable = sum(max(0, stat.seats - stat.interactive) for stat in stats)
    if waiting > reachable:
        return float("inf")
    newest = demand.ttft_ms[-NEWEST_TTFT:]
    measured = statistics.median(newest) / 1000 if newest else 0.0
    return max(demand.oldest_wait_s if waiting else 0.0, measured)
