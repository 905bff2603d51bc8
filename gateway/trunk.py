"""The gateway's end of trunks: the frames of all its streams at a replica, read at once.

A token comes here as one of many in a read and leaves in a write to its client; between the two there is
one loop, no task and no event (`scheduler.contracts.trunks` has the wire format).
"""

import asyncio
import logging
import socket
import struct
import uuid
from collections.abc import Callable

from gateway import hop, hop_reader, probing, vouching
from scheduler.contracts import frames, trunks

AGAIN_S = 10.0  # until a replica that could not be had a trunk with is asked again
_MAX_HEAD = 16 * 1024
_MAX_LINE = 64  # of a chunk's size
_log = logging.getLogger(__name__)
_DATA = frames.Kind.DATA
_Frame = frames.Frame
_new = tuple.__new__
# A record's head with its first frame's: most hold one frame, and one look is enough for them.
_BOTH = struct.Struct("!II" + frames.HEADER.format.removeprefix("!"))
_FIRST = trunks.RECORD.size
_LEAST = _BOTH.size
_both = _BOTH.unpack_from
_HEAD = (
    b"POST " + trunks.PATH.encode() + b" HTTP/1.1\r\nHost: %b\r\nAuthorization: Bearer %b\r\n"
    + trunks.HEADER.encode() + b": %b\r\nContent-Type: application/octet-stream\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)  # fmt: skip


class Trunk(asyncio.Protocol):
    """One trunk to a replica.

    Args:
        owner: the replica, and its incarnation.
        address: where it is.
        secret: its bearer secret.
        ended: called when the trunk is gone.

    Attributes:
        open: the replica has taken it.
        closed: it is gone.
    """

    def __init__(
        self, owner: vouching.Owner, address: str, secret: str, ended: Callable[["Trunk"], None]
    ) -> None:
        self.owner = owner
        self.open = False
        self.closed = False
        self._name = uuid.uuid4().hex
        self._request = _HEAD % (address.encode(), secret.encode(), self._name.encode())
        self._ended = ended
        self._answers: dict[int, hop.Answer] = {}
        self._last = 0
        self._rest = b""
        self._transport: asyncio.Transport | None = None
        self._time = asyncio.get_running_loop().time

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvloop's
        """Ask for the trunk."""
        self._transport = transport
        if self.closed:
            transport.abort()
        else:
            transport.write(self._request)

    def enter(self, answer: "hop.Answer") -> "Place":
        """Let an answer come here; its request names the place."""
        self._last = number = self._last % trunks.MOST_NUMBER + 1
        self._answers[number] = answer
        return Place(self, number)

    def leave(self, number: int) -> None:
        """Hear no more of a stream."""
        self._answers.pop(number, None)

    def named(self, number: int) -> bytes:
        """Return what a stream's request says in its header."""
        return trunks.named(self._name, number).encode()

    def say(self, word: int, number: int) -> None:
        """Tell the replica to stop or to go on with a stream."""
        if self._transport is not None and not self.closed:
            said = trunks.WORD.pack(word, number)
            self._transport.write(b"%x\r\n%b\r\n" % (len(said), said))

    def data_received(self, data: bytes) -> None:
        """Give every stream what has come for it."""
        if self._rest:
            data, self._rest = self._rest + data, b""
        try:
            at = 0 if self.open else self._begin(data)
            if not self.open:
                self._rest = data
                return
            while at < len(data):
                line = data.find(b"\r\n", at, at + _MAX_LINE)
                if line < 0:
                    if len(data) - at >= _MAX_LINE:
                        raise hop_reader.BadResponse("a chunk's size has no end")
                    break
                size = hop_reader.size(data[at:line])
                stop = line + 2 + size
                if stop + 2 > len(data):
                    if size > frames.MAX_FRAME_BYTES:
                        raise hop_reader.BadResponse("a chunk is too large")
                    break
                if not size:
                    self.abort("the replica has ended it")
                    return
                self._records(data, line + 2, stop)
                at = stop + 2
            self._rest = data[at:]
        except (hop_reader.BadResponse, frames.FrameError, struct.error) as fault:
            self.abort(str(fault))

    def _records(self, data: bytes, at: int, stop: int) -> None:
        """Take the records of one whole chunk."""
        answers = self._answers
        now = self._time()
        while at < stop:
            if stop - at < _LEAST:
                raise frames.FrameError("a record is shorter than a frame")
            number, size, kind, choice, tokens, ahead, chars, length = _both(data, at)
            begin, ids = at + _FIRST, at + _LEAST
            at = end = begin + size
            if end > stop:
                raise frames.FrameError("a record is longer than its chunk")
            answer = answers.get(number)
            if answer is None:
                continue  # its client has left; the replica hears of it on the other connection
            answer.connection.heard = now
            take = answer.take
            if take is not None and kind == 1:
                # By far the most are one token's frame for a client who keeps up: no further calls.
                held = ids + 4 * tokens
                text = held + 4 * ahead
                if text + length == end:
                    held_back = data[held:text] if ahead else b""
                    frame = _new(
                        _Frame, (_DATA, data[text:end], data[ids:held], choice, chars, held_back)
                    )
                    try:
                        if not take(frame):
                            answer.stop()
                    except Exception as fault:  # the taker's own: its task shall have it
                        answer.broken(fault)
                    continue
            found: list[frames.Frame] = []
            if frames.scan(data, begin, end, found) != end:
                raise frames.FrameError("a record ends within a frame")
            answer.give(found)

    def _begin(self, data: bytes) -> int:
        """Take the response's head if it is whole; returns where it ends."""
        stop = data.find(b"\r\n\r\n")
        if stop < 0:
            if len(data) > _MAX_HEAD:
                raise hop_reader.BadResponse("its head has no end")
            return 0
        reader = hop_reader.Reader()
        reader.feed(data[: stop + 4])
        if reader.status != 200 or reader.content_type != trunks.MEDIA_TYPE.encode():
            raise hop_reader.BadResponse(f"the replica answered {reader.status}")
        self.open = True
        return stop + 4

    def connection_lost(self, exc: Exception | None) -> None:
        """Let its streams hear that they broke off."""
        self._gone(hop_reader.words(exc) if exc is not None else "the trunk ended")

    def abort(self, why: str) -> None:
        """Close at once."""
        if self._transport is not None:
            self._transport.abort()
        self._gone(why)

    def _gone(self, why: str) -> None:
        if self.closed:
            return
        self.closed = True
        self._ended(self)
        answers, self._answers = self._answers, {}
        for answer in answers.values():
            answer.broken(hop.Broken(why))


class Place:
    """One stream's place on a trunk."""

    __slots__ = ("_number", "_stopped", "_trunk")

    def __init__(self, trunk: Trunk, number: int) -> None:
        self._trunk = trunk
        self._number = number
        self._stopped = False

    @property
    def name(self) -> bytes:
        """What the stream's request says in its header."""
        return self._trunk.named(self._number)

    def pause(self) -> None:
        """Let the replica wait: the client is behind."""
        self._stopped = True
        self._trunk.say(trunks.PAUSE, self._number)

    def resume(self) -> None:
        """Let it go on."""
        self._stopped = False
        self._trunk.say(trunks.RESUME, self._number)

    def leave(self) -> None:
        """Hear no more of it; a replica that waits with its last words would wait for ever."""
        self._trunk.leave(self._number)
        if self._stopped:
            self.resume()


class Trunks:
    """The trunks of one gateway worker, one to each replica, opened when the first stream goes there.

    Args:
        probes: the kernel's own look at a silent connection.
        watch: what the fleet says of those at the other ends.
    """

    def __init__(self, probes: probing.Probes, watch: vouching.Vouching) -> None:
        self._probes = probes
        self._vouching = watch
        self._known: dict[vouching.Owner, Trunk] = {}
        self._failed: dict[vouching.Owner, float] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def of(self, owner: vouching.Owner, address: str, secret: str) -> Trunk | None:
        """Return the replica's trunk, None while there is none; then streams have connections alone."""
        found = self._known.get(owner)
        if found is not None:
            return found if found.open else None
        loop = asyncio.get_running_loop()
        if self._failed.get(owner, 0.0) <= loop.time():
            self._failed.pop(owner, None)
            self._known[owner] = made = Trunk(owner, address, secret, self._ended)
            task = loop.create_task(self._connect(made, address))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return None

    async def _connect(self, trunk: Trunk, address: str) -> None:
        host, _, port = address.rpartition(":")
        loop = asyncio.get_running_loop()
        try:
            transport, _ = await loop.create_connection(lambda: trunk, host.strip("[]"), int(port))
        except (OSError, ValueError) as error:
            trunk.abort(hop_reader.words(error))
            return
        raw: socket.socket | None = transport.get_extra_info("socket")
        if raw is not None:
            self._probes.apply(raw)

    def _ended(self, trunk: Trunk) -> None:
        """Forget a trunk; one that never opened is not tried again at once."""
        self._known.pop(trunk.owner, None)
        if not trunk.open:
            now = asyncio.get_running_loop().time()
            self._failed = {owner: at for owner, at in self._failed.items() if at > now}
            self._failed[trunk.owner] = now + AGAIN_S

    def doubt(self) -> None:
        """End trunks to replicas that are gone, as the fleet knows."""
        for owner, trunk in list(self._known.items()):
            if self._vouching.silence_s(owner) <= 0:
                trunk.abort("its replica is gone, as the fleet knows")

    def close(self) -> None:
        """Close every trunk."""
        for task in list(self._tasks):
            task.cancel()
        for trunk in list(self._known.values()):
            trunk.abort("the gateway goes down")
