"""How many replicas of a model interactive callers need: up at once, down slowly.

Signals are what callers feel and what fills up: queue wait, sequences in flight against those that a replica
runs within its SLO, KV pressure, TTFT and time per token against SLO, the request rate against what a replica
takes, and the forecast. CPU or GPU percent is none of them. What a signal asks for is split by tier, each
part is held within its tier's bounds, and the need is the largest of the sums. It falls only after it has
been lower for a while, a tenth at a time, by draining. A version that the route no longer names falls at once
to its floor, or to what still answers callers: an answer that a drain cuts short goes on at no other version.
"""

import dataclasses
import math
from typing import Protocol

KV_FULL = 0.9  # share of KV blocks held by interactive sequences that counts as pressure
PRESSURE = 0.5  # of the TTFT SLO, as for rung 1
MOST = 10_000  # far above any site: a rate that is a slip must not become a number that nobody can hold
LASTING_S = 5.0  # pressure that rung 1, which takes a second, has not ended by then
_UNREACHABLE = "no request can come to it"
GROWTH = 0.25  # replicas added under pressure, as a share of those that serve


class Settings(Protocol):
    """What autoscaling needs to be told."""

    @property
    def ttft_slo_ms(self) -> float:
        """Interactive time to first token aimed at, ms."""
        ...

    @property
    def itl_slo_ms(self) -> float:
        """Time per output token aimed at, ms."""
        ...

    @property
    def scale_fill(self) -> float:
        """Share of what replicas can take that is planned for."""
        ...

    @property
    def scale_down_s(self) -> float:
        """Seconds of lower need before replicas are given up."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds of what one tier, or all callers, may have; all in replicas.

    Attributes:
        floor: kept warm whatever the demand.
        minimum: never fewer as long as somebody asks; nobody keeps it from going to zero.
        maximum: 0: no bound but the fleet.
    """

    floor: int = 0
    minimum: int = 0
    maximum: int = 0

    def within(self, replicas: float, *, used: bool) -> float:
        """Return ``replicas`` within these; the floor is never undercut.

        Args:
            replicas: asked for; a part of one where several tiers share it.
            used: whether somebody has asked lately, so that the minimum counts.
        """
        return max(min(replicas, self.maximum or replicas), self.least(used=used))

    def least(self, *, used: bool) -> int:
        """Return the fewest."""
        return max(self.floor, self.minimum if used else 0)


@dataclasses.dataclass(frozen=True, slots=True)
class Scaling:
    """Bounds of one deployment and what its replicas can do.

    Attributes:
        floor, minimum, maximum: of what callers (tiers interactive and standard) have together; see `Bounds`.
        interactive_floor and so on: of what tier interactive may ask for of that.
        standard_floor and so on: the same for tier standard. Both tiers share replicas, so floors add up.
        batch_floor and so on: of what is lent to batch beyond the callers' need. The floor is batch's even
            when callers would need it, as far as their own floors leave GPUs.
        share: of the model's traffic (versions of one model share it); 0: no request comes to it.
        concurrency: sequences that a replica runs within its SLOs; 0: its seats.
        requests_per_s: what a replica takes within its SLOs; 0: not known.
        start_s: how long a start takes, measured (0: not known yet); `wake_s`: out of a parked process.
        idle_to_zero_s: without a request for so long a model without floor goes to zero.
        park_gb: host memory that it takes parked, in 10^9 bytes; 0: it can't be parked.
    """

    floor: int = 0
    minimum: int = 0
    maximum: int = 0
    interactive_floor: int = 0
    interactive_minimum: int = 0
    interactive_maximum: int = 0
    standard_floor: int = 0
    standard_minimum: int = 0
    standard_maximum: int = 0
    batch_floor: int = 0
    batch_minimum: int = 0
    batch_maximum: int = 0
    share: float = 1.0
    concurrency: float = 0.0
    requests_per_s: float = 0.0
    start_s: float = 0.0
    wake_s: float = 0.0
    idle_to_zero_s: float = 900.0
    park_gb: float = 0.0

    @property
    def callers(self) -> Bounds:
        """Return the bounds of all callers together."""
        return Bounds(self.floor, self.minimum, self.maximum)

    @property
    def interactive(self) -> Bounds:
        """Return the bounds of tier interactive."""
        return Bounds(self.interactive_floor, self.interactive_minimum, self.interactive_maximum)

    @property
    def standard(self) -> Bounds:
        """Return the bounds of tier standard."""
        return Bounds(self.standard_floor, self.standard_minimum, self.standard_maximum)

    def least(self, *, used: bool) -> int:
        """Return the fewest replicas that callers keep; ``used``: whether somebody has asked lately."""
        tiers = self.interactive.least(used=used) + self.standard.least(used=used)
        return math.ceil(self.callers.within(tiers, used=used))

    def bounded(self, load: float, standard: float, *, used: bool) -> int:
        """Return the replicas for what a signal asks for, each tier within its bounds.

        Args:
            load: replicas, in parts of one.
            standard: the part of it, in [0, 1], that tier standard asks for.
            used: whether somebody has asked lately.
        """
        load = min(load, MOST)
        parts = self.interactive.within(load * (1 - standard), used=used)
        parts += self.standard.within(load * standard, used=used)
        return _count(self.callers.within(_count(parts), used=used))


@dataclasses.dataclass(frozen=True, slots=True)
class Signal:
    """What is known of one deployment now.

    Attributes:
        serving: replicas that interactive callers can use; `coming`: on their way.
        answering: replicas that answer such callers now.
        waiting, in_flight: interactive and standard requests.
        standard: the part of these, in [0, 1], that is of tier standard; `standard_rate`: of the rate.
        oldest_wait_s: the head of the queue.
        ttft_ms, itl_ms: newest medians, 0 if there are none.
        kv: share of KV blocks that interactive sequences hold, in [0, 1].
        rate: requests/s over the last minute, None if nobody counts them.
        outlook: requests/s that the forecast holds possible until a new replica is warm, None without one.
        held_s: seconds that a request stays, by the ledger; 0 if not known.
        floor: a schedule's floor now; `floor_name`: whose.
        seats: of a replica.
        ttft_slo_ms, itl_slo_ms: what the model promises; 0: nothing but what the site does.
    """

    serving: int = 0
    coming: int = 0
    answering: int = 0
    waiting: int = 0
    in_flight: int = 0
    standard: float = 0.0
    oldest_wait_s: float = 0.0
    ttft_ms: float = 0.0
    itl_ms: float = 0.0
    kv: float = 0.0
    rate: float | None = None
    standard_rate: float = 0.0
    outlook: float | None = None
    held_s: float = 0.0
    floor: int = 0
    floor_name: str = ""
    seats: int = 1
    ttft_slo_ms: float = 0.0
    itl_slo_ms: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class Memory:
    """What is remembered of one deployment.

    Attributes:
        need: replicas last decided; `since`: monotonic seconds since when less has been enough.
        pressed_at: since when there is pressure, None if there is none.
        busy_at: when somebody last asked for the model.
    """

    need: int = 0
    since: float | None = None
    pressed_at: float | None = None
    busy_at: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Need:
    """Replicas that are needed and the signal behind it."""

    replicas: int
    reason: str
    memory: Memory


def need(
    scaling: Scaling, signal: Signal, before: Memory | None, now: float, settings: Settings
) -> Need:
    """Return how many replicas interactive callers need; see the module."""
    if scaling.share <= 0:  # whatever it was needed for is over: its GPUs may be another version's
        floor = scaling.least(used=False)
        least, reason = max(floor, signal.answering), _UNREACHABLE
        if least:
            reason += f": floor {floor}" if least == floor else f": {least} still answer"
        return Need(least, reason, Memory(least))
    memory = Memory(need=signal.serving + signal.coming) if before is None else before
    busy = signal.waiting + signal.in_flight > 0 or bool(signal.rate)
    busy_at = now if busy or memory.busy_at is None else memory.busy_at
    pressed_at = None
    if _pressed(signal, settings):
        pressed_at = now if memory.pressed_at is None else memory.pressed_at
    lasting = pressed_at is not None and now - pressed_at >= LASTING_S
    lately = now - busy_at < scaling.idle_to_zero_s and memory.need > 0
    asked, wanted, reason = _asked(scaling, signal, settings, lasting=lasting, used=busy or lately)
    if wanted == 0 and lately:
        asked, wanted, reason = 1, 1, f"asked for {now - busy_at:.0f} s ago"
    floor = max(scaling.least(used=busy or lately), _capped(scaling, signal.floor))
    wanted = max(wanted, floor)
    if wanted != asked:
        reason = _bound(scaling, signal, asked, wanted)
    if wanted >= memory.need:
        return Need(wanted, reason, Memory(wanted, None, pressed_at, busy_at))
    since = now if memory.since is None else memory.since
    if now - since < settings.scale_down_s:
        kept = max(floor, min(memory.need, scaling.maximum or memory.need))
        held = f"{wanted} are enough, kept until that has held for {settings.scale_down_s:g} s"
        return Need(kept, held, Memory(kept, since, pressed_at, busy_at))
    lower = max(wanted, memory.need - max(1, math.ceil(memory.need * 0.1)))
    reason = f"{wanted} have been enough for {now - since:.0f} s: a tenth is given up"
    # A tenth of the time between two steps, so that a long way down takes as long as one wait.
    return Need(
        lower, reason, Memory(lower, since + settings.scale_down_s * 0.1, pressed_at, busy_at)
    )


def _pressed(signal: Signal, settings: Settings) -> bool:
    slo_s = (signal.ttft_slo_ms or settings.ttft_slo_ms) / 1000
    wait = max(signal.oldest_wait_s if signal.waiting else 0.0, signal.ttft_ms / 1000)
    # A model that promises no more than so many tokens/s is not pressed where the site aims at more.
    slow = settings.itl_slo_ms > 0 and signal.itl_ms > max(settings.itl_slo_ms, signal.itl_slo_ms)
    return wait > PRESSURE * slo_s or signal.kv > KV_FULL or slow


def _asked(
    scaling: Scaling, signal: Signal, settings: Settings, *, lasting: bool, used: bool
) -> tuple[int, int, str]:
    """Return the largest number that a signal asks for, what its bounds leave of it, and that signal."""
    room = (scaling.concurrency or signal.seats) * settings.scale_fill
    held = signal.waiting + signal.in_flight
    found = [(held / room, signal.standard, f"{held} requests in flight or waiting")]
    takes = scaling.requests_per_s * settings.scale_fill
    if takes > 0 and signal.rate is not None:
        found.append((signal.rate / takes, signal.standard_rate, f"{signal.rate:.1f} requests/s"))
    if signal.outlook is not None and (takes > 0 or signal.held_s > 0):
        # Without a measured rate by Little's law: so many are there at once, and each takes a seat.
        asks = signal.outlook / takes if takes > 0 else signal.outlook * signal.held_s / room
        text = f"the forecast holds {signal.outlook:.1f} requests/s possible"
        found.append((asks, signal.standard_rate, text))
    bounded = [
        (scaling.bounded(load, standard, used=used), _count(load), text)
        for load, standard, text in found
    ]
    if lasting and signal.serving:
        # Whoever waits: a tier's bounds can't be told from it, the callers' own can.
        more = signal.serving + max(1, math.ceil(signal.serving * GROWTH))
        text = (
            f"pressure: wait {signal.oldest_wait_s:.2f} s, TTFT {signal.ttft_ms:.0f} ms, "
            f"{signal.itl_ms:.1f} ms a token, KV {signal.kv:.0%}"
        )
        bounded.append((_capped(scaling, more), more, text))
    wanted, asked, text = max(bounded, key=lambda item: item[:2])
    return asked, wanted, text


def _capped(scaling: Scaling, replicas: int) -> int:
    return min(replicas, scaling.maximum or replicas)


def _count(replicas: float) -> int:
    # Parts that were split by tier and added again must not make one more of a whole number.
    return math.ceil(round(min(replicas, MOST), 6))


def _bound(scaling: Scaling, signal: Signal, asked: int, wanted: int) -> str:
    """Say which bound made ``wanted`` of what was asked for."""
    if wanted < max(asked, signal.floor):
        asks = f"{asked} would be needed"
        if signal.floor > asked:
            asks = f"schedule {signal.floor_name} asks for {signal.floor}"
        limits = {
            "maximum": scaling.maximum if wanted == scaling.maximum else 0,
            "interactive_maximum": scaling.interactive_maximum,
            "standard_maximum": scaling.standard_maximum,
        }
        named = [f"{name} {most}" for name, most in limits.items() if most]
        return f"{named[0] if limits['maximum'] else ' and '.join(named)}, though {asks}"
    if signal.floor_name and wanted == signal.floor:
        return f"schedule {signal.floor_name}: floor {signal.floor}"
    if wanted == scaling.least(used=False):
        return f"floor {wanted}"
    return (
        f"minimum {wanted}" if wanted == scaling.least(used=True) else f"{wanted} by tiers' bounds"
    )
