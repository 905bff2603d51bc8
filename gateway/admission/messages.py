"""What a worker and the process that owns the queues say to each other.

MessagePack arrays behind a length of four bytes. A request goes by its id; a replica is told whole once on
each link and by its number from then on. Both sides belong to one release: a site upgrades a host at once,
and between hosts `VERSION` keeps strangers apart.
"""

import struct

import msgspec

from gateway import asks
from scheduler.contracts import errors, quota, requests

VERSION = 6
LENGTH = struct.Struct(">I")
MOST_BYTES = 4 * 1024 * 1024  # an `Enter` with the fingerprints of a million tokens is 10 kB


class Hello(msgspec.Struct, array_like=True, tag=0):
    """A worker's first word.

    Attributes:
        token: the control token.
        worker: its name, for logs.
    """

    token: str
    worker: str
    version: int = VERSION


class Enter(msgspec.Struct, array_like=True, tag=1):
    """A request waits.

    Attributes:
        turned: it had its turn with another owner, which let it in; see `LocalRoom.rejoin`.
    """

    asking: asks.Asking
    turned: bool = False


class Adopt(msgspec.Struct, array_like=True, tag=2):
    """A request runs already, admitted by another owner or by this one in an earlier life."""

    asking: asks.Asking
    replica: bytes  # control_pb2.Replica
    served: str  # the version


class Again(msgspec.Struct, array_like=True, tag=3):
    """A request that had its turn waits again; see `waiting.Rooms.again`."""

    request_id: str
    version: str | None = None
    avoid: str | None = None
    lost: bool = False


class Close(msgspec.Struct, array_like=True, tag=4):
    """A request no longer runs on its replica."""

    request_id: str


class Leave(msgspec.Struct, array_like=True, tag=5):
    """A request has ended, and has used this at its team's cost."""

    request_id: str
    uncached_prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    output_tokens: int = 0


class Full(msgspec.Struct, array_like=True, tag=6):
    """A replica had no seat, or lacked the adapter that is named."""

    replica_id: str
    incarnation: int
    tier: requests.Tier
    adapter: str = ""


class Suspect(msgspec.Struct, array_like=True, tag=7):
    """A replica broke off an answer, or could not be reached."""

    replica_id: str
    incarnation: int


class FirstToken(msgspec.Struct, array_like=True, tag=8):
    """An interactive request's time to its first token."""

    model: str
    ms: float


class Welcome(msgspec.Struct, array_like=True, tag=9):
    """The owner's answer to `Hello`."""

    owner: str


class Known(msgspec.Struct, array_like=True, tag=10):
    """A replica, and the number that stands for it on this link."""

    number: int
    replica: bytes  # control_pb2.Replica


class Granted(msgspec.Struct, array_like=True, tag=11):
    """It is a request's turn."""

    request_id: str
    number: int
    served: str  # the version
    limits: quota.Headers = ()


class Refused(msgspec.Struct, array_like=True, tag=12):
    """Waiting is of no use: a `errors.ForebayError` on its way."""

    request_id: str
    code: str
    message: str
    retry_after_s: float | None = None
    param: str | None = None
    limits: quota.Headers = ()
    blame: errors.Blame | None = None


class Prefilled(msgspec.Struct, array_like=True, tag=13):
    """A request's prompt has been computed."""

    request_id: str


class Beat(msgspec.Struct, array_like=True, tag=14):
    """Either side lives; the link itself hears it, and nobody else."""


class Cancel(msgspec.Struct, array_like=True, tag=15):
    """A caller wants a request of its own ended, whichever worker has it.

    Attributes:
        number: the worker's, by which the answer names it.
    """

    number: int
    request_id: str
    team: str
    user: str


class Cancelled(msgspec.Struct, array_like=True, tag=16):
    """Whether the request of a `Cancel` was here and is ended."""

    number: int
    found: bool


class Ended(msgspec.Struct, array_like=True, tag=17):
    """The caller of a worker's request has cancelled it elsewhere."""

    request_id: str


class Passed(msgspec.Struct, array_like=True, tag=18):
    """A request has come further than where its last replica was lost."""

    request_id: str


FromWorker = (
    Hello
    | Enter
    | Adopt
    | Again
    | Close
    | Leave
    | Full
    | Suspect
    | FirstToken
    | Prefilled
    | Passed
    | Cancel
    | Beat
)
FromOwner = Welcome | Known | Granted | Refused | Cancelled | Ended | Beat
Message = FromWorker | FromOwner

_encoder = msgspec.msgpack.Encoder()
from_worker: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)
from_owner: msgspec.msgpack.Decoder[FromOwner] = msgspec.msgpack.Decoder(FromOwner)


def check(message: Message) -> None:
    """Refuse a message that the other side would not take.

    Raises:
        errors.BadRequest: it is too large, or holds a number beyond 64 bits.
    """
    try:
        size = len(_encoder.encode(message))
    except (OverflowError, TypeError, ValueError) as error:
        raise errors.BadRequest(f"the request can't be queued: {error}") from error
    if size > MOST_BYTES:
        raise errors.BadRequest(
            "the request can't be queued: its names or fingerprints are too large"
        )


def encode(message: Message) -> bytes:
    """Return a message's frame."""
    body = _encoder.encode(message)
    return LENGTH.pack(len(body)) + body
