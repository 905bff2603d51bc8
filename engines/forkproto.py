"""What a slot's supervisor and an engine's fork server say to each other, one JSON object a line.

The supervisor starts the fork server (``python -P -m engines.vllm.forkserver`` with the engine
environment's python), writes commands to its stdin and reads events from its stdout; stderr is the
log. Importing an engine costs 10 to 20 s, forking a process that has it imported costs less than 2.

```
fork server                          supervisor
  ready | failed            ───────►
                            ◄───────   start(id, launch, env, log)
  started(id, pid) | refused(id)  ►
  status(id, status) …      ───────►   whatever the replica reports of itself: phases, its address
  exited(id, pid, code, reason) ──►
                            ◄───────   signal(id, number)
```
When the supervisor's end of stdin closes, for whatever reason, the fork server kills its replicas and
ends; if the fork server itself is killed, the kernel kills the replicas (PR_SET_PDEATHSIG).
This module must not know of any engine: both sides import it, each in its own environment.
"""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from scheduler.contracts import stored

MAX_LINE_BYTES = 1024 * 1024  # for `asyncio.create_subprocess_exec(limit=…)`; a launch is a few KB


class ProtocolError(ValueError):
    """A line is not a message of this protocol."""


@dataclasses.dataclass(frozen=True, slots=True)
class Start:
    """Fork a replica.

    Attributes:
        id: the replica's id; one life each.
        launch: what the replica needs to know, as `engines.replica`'s launch record in JSON; the fork
            server hands it on unread.
        env: environment variables to set in the replica (`CUDA_VISIBLE_DEVICES` …).
        log: file for its stdout and stderr, appended; "" keeps the fork server's own.
    """

    id: str
    launch: Mapping[str, Any]
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    log: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Signal:
    """Send signal ``number`` to a replica; one that has ended is no error. SIGKILL takes all of it."""

    id: str
    number: int


@dataclasses.dataclass(frozen=True, slots=True)
class Ready:
    """The engine is imported: replicas can be forked.

    Attributes:
        pid: the fork server's own process.
        engine: the engine's name.
        version: its version.
        import_s: seconds that the import took.
    """

    pid: int
    engine: str
    version: str
    import_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class Failed:
    """The engine can't be imported; the fork server ends after this. `reason` is one line."""

    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class Started:
    """The replica's process exists; it is not ready yet."""

    id: str
    pid: int


@dataclasses.dataclass(frozen=True, slots=True)
class Refused:
    """The replica was not started. `reason` is one line."""

    id: str
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class Status:
    """Something that a replica says of itself, one JSON object that it wrote to its status pipe.

    Attributes:
        id: which replica.
        status: ``{"phase": name, "seconds": s}`` after each start-up phase, then
            ``{"address": "host:port", "incarnation": n, "phases_s": {…}}`` once it listens, or
            ``{"failed": reason}`` before it exits.
    """

    id: str
    status: Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Exited:
    """The replica's process ended.

    Attributes:
        id: which replica.
        pid: its process.
        code: exit code; minus the signal's number if one killed it.
        reason: what it said last of why (``failed`` status), or "".
    """

    id: str
    pid: int
    code: int
    reason: str = ""


Command = Start | Signal
Event = Ready | Failed | Started | Refused | Status | Exited
_TYPES: dict[str, type[Any]] = {
    kind.__name__.lower(): kind
    for kind in (Start, Signal, Ready, Failed, Started, Refused, Status, Exited)
}


def encode(message: Command | Event) -> bytes:
    """Return ``message`` as one line, newline included."""
    fields = dataclasses.asdict(message)
    return json.dumps({"type": type(message).__name__.lower(), **fields}).encode() + b"\n"


def decode(line: bytes) -> Any:
    """Return the `Command` or `Event` in ``line``.

    Raises:
        ProtocolError: it is none; the message quotes the beginning of the line.
    """
    try:
        fields = json.loads(line)
        return stored.read(_TYPES[fields["type"]], fields)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ProtocolError(f"not a fork server message: {line[:80]!r}") from error


def decode_status(line: bytes) -> dict[str, Any]:
    """Return one line of a replica's status pipe as a mapping; what is none is told as ``unreadable``."""
    try:
        status = json.loads(line)
    except ValueError:
        status = None
    return status if isinstance(status, dict) else {"unreadable": repr(line[:80])}
