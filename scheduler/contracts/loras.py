"""LoRA adapters as replicas hold them."""

import dataclasses
import enum


class AdapterState(enum.StrEnum):
    """What a replica does with an adapter."""

    LOADING = "loading"
    LOADED = "loaded"
    LEAVING = "leaving"  # takes nothing new, goes once its last sequence has ended
    FAILED = "failed"  # could not be loaded; `HeldAdapter.reason` says why


@dataclasses.dataclass(frozen=True, slots=True)
class HeldAdapter:
    """A LoRA adapter as one replica has it.

    Attributes:
        path: where it came from, as it is declared.
        running: its sequences that run now.
        used_us: UTC µs when it last ended one or began to be loaded.
        uses: requests that it has served since it was loaded.
        load_ms: that loading took, staging included.
        reason: why it failed, one line, or "".
    """

    name: str
    path: str
    state: AdapterState
    running: int = 0
    used_us: int = 0
    uses: int = 0
    load_ms: float = 0.0
    reason: str = ""
