"""What gateways see and tell the broker: what waits and runs, how versions fare, and copies for shadows."""

import dataclasses
import enum
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True, slots=True)
class AdapterDemand:
    """What one gateway has waiting for one adapter.

    Attributes:
        waiting: of tiers interactive and standard.
        oldest_wait_s: seconds that the first of these has waited.
        arrived: requests for it since the gateway's process began, of any tier.
        batch: of tier batch that wait.
    """

    waiting: int = 0
    oldest_wait_s: float = 0.0
    arrived: int = 0
    batch: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class VersionDemand:
    """What one gateway has of one version, tiers interactive and standard.

    Attributes:
        oldest_wait_s: seconds that the first of those that wait has waited.
        arrived: requests for it since the gateway's process began.
    """

    waiting: int = 0
    in_flight: int = 0
    oldest_wait_s: float = 0.0
    arrived: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Demand:
    """What one gateway has waiting for one model, told to the broker every 200 ms.

    Attributes:
        waiting: requests in the queue, by tier.
        in_flight: requests dispatched and not closed, by tier.
        oldest_wait_s: seconds that the head of the interactive queue has waited.
        ttft_ms: newest interactive TTFTs, at most 64.
        arrived: interactive and standard requests that came since the gateway's process began.
        arrived_standard: those of tier standard among them.
        adapters: what of it is for which adapter, those that were ever asked for.
        versions: what of it is for which version; only where the route has pools.
    """

    model: str
    waiting: Mapping[str, int]
    in_flight: Mapping[str, int]
    oldest_wait_s: float = 0.0
    ttft_ms: tuple[float, ...] = ()
    arrived: int = 0
    arrived_standard: int = 0
    adapters: Mapping[str, AdapterDemand] = dataclasses.field(default_factory=dict)
    versions: Mapping[str, VersionDemand] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class Trial:
    """How one request fared on a version, for the comparison of versions.

    Attributes:
        failed: by the engine or its replica, not by the caller or for want of room.
        ttft_ms: from dispatch to first token, 0 if there was none.
        itl_ms: mean time between tokens, 0 for an answer of one.
        death: the replica's life that ended under it, "" if it lives on. All that one death has cost is one
            event, and may be its node's fault.
    """

    model: str
    version: str
    failed: bool
    ttft_ms: float = 0.0
    itl_ms: float = 0.0
    death: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Fared:
    """How one answer went: a caller's, or that of a shadow version to a copy of its request.

    Attributes:
        ttft_ms: from dispatch to first token, 0 if there was none.
        itl_ms: mean time between tokens, 0 for an answer of one, and where a slow client held it up.
        total_ms: from dispatch to the last frame, 0 where a slow client held it up.
        tokens: of output.
    """

    failed: bool
    ttft_ms: float = 0.0
    itl_ms: float = 0.0
    total_ms: float = 0.0
    tokens: int = 0


class Match(enum.StrEnum):
    """Whether two answers say the same."""

    SAME = "same"
    DIFFERS = "differs"
    UNKNOWN = ""  # sampled, not whole, or too long to be kept


@dataclasses.dataclass(frozen=True, slots=True)
class Copied:
    """A request of which a shadow version got a copy: `version` has answered the caller."""

    model: str
    version: str
    shadow: str
    caller: Fared
    copy: Fared
    match: Match = Match.UNKNOWN


@dataclasses.dataclass(frozen=True, slots=True)
class CopiesDropped:
    """So many copies for a shadow version were not made, or given up, and why."""

    model: str
    shadow: str
    reason: str
    count: int
