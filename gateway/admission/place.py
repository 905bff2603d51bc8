"""Where admission happens, as a gateway's processes are told it by the composition root."""

import dataclasses
from collections.abc import Callable


def _nobody(address: str) -> None:
    """Tell nobody."""


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """How this process takes part in admission.

    Attributes:
        gateway: this host's gateway, one name for all its processes.
        token: the control token, which both sides of a link must have.
        owns: whether this process owns the queues; if not, it asks who listens at ``socket``.
        socket: path of the Unix socket between the processes of this gateway, "" if there is one process.
        listen: ``host:port`` at which workers of other hosts are heard; "": this host shares no models.
        advertise: host that others are told, "" for the one in ``listen``.
        workers: workers that a new owner waits for, up to a second, before it gives anybody a turn.
        told: called with the ``host:port`` that others are to be told.
    """

    gateway: str
    token: str
    owns: bool
    socket: str = ""
    listen: str = ""
    advertise: str = ""
    workers: int = 0
    told: Callable[[str], None] = _nobody
