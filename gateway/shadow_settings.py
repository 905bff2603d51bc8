"""What shadow traffic may take of a gateway worker: fields of the [gateway] table."""

import dataclasses

from scheduler.contracts.settings import setting

MIB = 1024 * 1024


@dataclasses.dataclass(frozen=True)
class ShadowSettings:
    """Bounds of the copies that shadow versions get; what is beyond is dropped and counted."""

    shadow_in_flight: int = setting(
        32,
        "Copies of requests that a worker has with shadow versions at once; more are dropped: a copy is of "
        "use only as a sample.",
        least=0,
    )
    shadow_bytes: int = setting(
        64 * MIB,
        "Memory that copies may take per worker: their requests, and both answers until they are compared.",
        unit="bytes",
        least=0,
    )
    shadow_answer_bytes: int = setting(
        256 * 1024,
        "Of an answer so much is kept for the comparison of texts; a longer one is compared in all but that.",
        unit="bytes",
        least=0,
    )
    shadow_limit_s: float = setting(
        120.0,
        "A copy that is not answered after so long is ended, and counts as failed.",
        unit="s",
        least=0.1,
    )
