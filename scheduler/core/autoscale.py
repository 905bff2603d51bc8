"""How many replicas of a model interactive callers need: up at once, down slowly.

Signals are what callers feel and what fills up: queue wait, sequences in flight against those that a replica
runs within its SLO, KV pressure, TTFT and time per token against SLO, the request rate against what a replica
takes, and the forecast. CPU or GPU percent is none of them. The need is the largest of what the signals ask
for; it falls only after it has been lower for a while, a tenth at a time, by draining. A version that the
route no longer names falls at once to its floor, or to what still answers callers: an answer that a drain
cuts short goes on at no other version.
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
class Scaling:
    """Bounds of one deployment and what its replicas can do.

    Attributes:
        floor: replicas kept warm for interactive callers whatever the demand.
        minimum, maximum: interactive bounds; maximum 0: no bound but the fleet.
        batch_floor, batch_maximum: replicas that may be lent to batch beyond the need; maximum 0: no bound.
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
    batch_floor: int = 0
    batch_maximum: int = 0
    share: float = 1.0
    concurrency: float = 0.0
    requests_per_s: float = 0.0
    start_s: float = 0.0
    wake_s: float = 0.0
    idle_to_zero_s: float = 900.0
    park_gb: float = 0.0

    def bounded(self, replicas: int) -> int:
        """Return ``replicas`` within floor, minimum and maximum; the floor is never undercut."""
        most = self.maximum or replicas
        return max(min(replicas, most), self.floor, self.minimum)


@dataclasses.dataclass(frozen=True, slots=True)
class Signal:
    """What is known of one deployment now.

    Attributes:
        serving: replicas that interactive callers can use; `coming`: on their way.
        answering: replicas that answer such callers now.
        waiting, in_flight: interactive and standard requests.
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
    oldest_wait_s: float = 0.0
    ttft_ms: float = 0.0
    itl_ms: float = 0.0
    kv: float = 0.0
    rate: float | None = None
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
        floor = scaling.bounded(0)
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
    asked, reason = _asked(scaling, signal, settings, lasting=lasting)
    if asked == 0 and now - busy_at < scaling.idle_to_zero_s and memory.need > 0:
        asked, reason = 1, f"asked for {now - busy_at:.0f} s ago"
    floor = scaling.bounded(max(signal.floor, 0))
    wanted = max(scaling.bounded(asked), floor)
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
    scaling: Scaling, signal: Signal, settings: Settings, *, lasting: bool
) -> tuple[int, str]:
    """Return the largest number that a signal asks for, and that signal."""
    room = (scaling.concurrency or signal.seats) * settings.scale_fill
    held = signal.waiting + signal.in_flight
    found = [(_count(held / room), f"{held} requests in flight or waiting")]
    takes = scaling.requests_per_s * settings.scale_fill
    if takes > 0 and signal.rate is not None:
        found.append((_count(signal.rate / takes), f"{signal.rate:.1f} requests/s"))
    if signal.outlook is not None and (takes > 0 or signal.held_s > 0):
        # Without a measured rate by Little's law: so many are there at once, and each takes a seat.
        asks = signal.outlook / takes if takes > 0 else signal.outlook * signal.held_s / room
        text = f"the forecast holds {signal.outlook:.1f} requests/s possible"
        found.append((_count(asks), text))
    if lasting and signal.serving:
        more = signal.serving + max(1, math.ceil(signal.serving * GROWTH))
        text = (
            f"pressure: wait {signal.oldest_wait_s:.2f} s, TTFT {signal.ttft_ms:.0f} ms, "
            f"{signal.itl_ms:.1f} ms a token, KV {signal.kv:.0%}"
        )
        found.append((more, text))
    return max(found, key=lambda item: item[0])


def _count(replicas: float) -> int:
    return math.ceil(min(replicas, MOST))


def _bound(scaling: Scaling, signal: Signal, asked: int, wanted: int) -> str:
    if wanted < max(asked, signal.floor):
        asks = f"{asked} would be needed"
        if signal.floor > asked:
            asks = f"schedule {signal.floor_name} asks for {signal.floor}"
        return f"maximum {scaling.maximum}, though {asks}"
    if signal.floor_name and wanted == signal.floor:
        return f"schedule {signal.floor_name}: floor {signal.floor}"
    return f"floor {wanted}"
