"""The hop to a replica: one POST, frames back, and every way it can fail told apart."""

import asyncio
import contextlib
import dataclasses
import json
import re
import urllib.parse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from gateway import hop, hop_pool, hop_reader, probing, settings, trunk
from scheduler.contracts import errors, fleet, frames, ids, ports, trunks, usage

_JSON_SAFE = '{}":,/ '  # harmless in a header, and most identities then need no quoting at all
MESSAGE_CHARS = 2000  # an engine may echo the whole input in its error; nobody reads more
_HEAD = (
    b"POST %b HTTP/1.1\r\nHost: %b\r\nAuthorization: Bearer %b\r\nX-Request-Id: %b.%d\r\n"
    b"X-Forebay-Identity: %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\n"
    b"Accept: " + frames.MEDIA_TYPE.encode() + b"\r\nAccept-Encoding: identity\r\n%b\r\n"
)


# vLLM's words for fields of the wrong kind: every one, for each form that the field may have, with what
# was sent. The first is named, as for those that are judged here.
_LISTED = re.compile(r"\d+ validation errors?: \{")
_FAULT = re.compile(r"""\{'type': '[^']*', 'loc': '([^']*)', 'msg': (?:'([^']*)'|"([^"]*)")""")
_FORM = re.compile(r"\.([A-Z]\w*|\w+\[.*\])(?=\.|$)")  # its name in the place of a fault
_CUT = re.compile(r'"message"\s*:\s*("(?:[^"\\]|\\.){1,2000})')  # of a body too long to keep
_FORMS = 3  # of one field that are told
_TRUNK = trunks.HEADER.encode() + b": %b\r\n"


def _more(call: "Call", place: trunk.Place | None) -> bytes:
    """Return the headers that not every request has."""
    more = b"X-Forebay-Most-Tokens: %d\r\n" % call.most_tokens if call.most_tokens else b""
    if call.preempted:
        more += b"X-Forebay-Preempted: %d\r\n" % call.preempted
    if place is not None:
        more += _TRUNK % place.name
    if call.traceparent is not None:
        more += b"traceparent: %b\r\n" % call.traceparent.encode()
    return more


class Full(Exception):
    """The replica has no seat; nothing was computed.

    Args:
        no_adapter: it has, but not the request's adapter.
    """

    def __init__(self, *, no_adapter: bool = False) -> None:
        super().__init__("no adapter" if no_adapter else "no seat")
        self.no_adapter = no_adapter


class Lost(Exception):
    """The replica broke off, could not be reached, or answered nonsense.

    Args:
        reason: one line.
        computed: whether tokens may have been computed.
        kind: `errors.ReplicaLost`, or that it leaves as planned, or failed on this request and lives on.
        counted: what it said that it had computed, if it still could.
    """

    def __init__(
        self,
        reason: str,
        *,
        computed: bool,
        kind: type[errors.ReplicaLost] = errors.ReplicaLost,
        counted: frames.Error | None = None,
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.computed = computed
        self.kind = kind
        self.counted = counted


@dataclasses.dataclass(slots=True)  # a frozen one costs a call a field to make
class Call:
    """What is sent; not changed afterwards.

    Attributes:
        path: the engine's route.
        body: the JSON body's bytes.
        identity: the attempt, for the replica's own usage row.
        silence_s: seconds without a byte after which the replica counts as lost.
        traceparent: the trace that the request belongs to, if any.
        most_tokens: bound of each sequence's output where the body names none, 0 if there is none.
        streams: the answer comes token by token: on the replica's trunk, where there is one.
        preempted: how often the batch line gave its seat back before.
    """

    path: str
    body: bytes
    identity: usage.Identity
    silence_s: float
    traceparent: str | None = None
    most_tokens: int = 0
    streams: bool = False
    preempted: int = 0


class Client:
    """Keeps connections to replicas, and their secrets.

    Use as an async context manager.
    """

    def __init__(self, options: settings.GatewaySettings) -> None:
        quickest = min(options.stream_idle_s, options.answer_timeout_s)
        probes = probing.Probes(
            options.hop_keepalive_s, options.hop_keepalive_probes, options.hop_unacknowledged_s
        )
        self._pool = hop_pool.Pool(options.connect_timeout_s, min(1.0, quickest / 4), probes)
        self._trunks = trunk.Trunks(probes, self._pool.vouching)
        self._secrets: dict[tuple[ids.ReplicaId, int], str] = {}

    async def __aenter__(self) -> "Client":
        """Begin; connections are made when they are needed."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close every connection."""
        self._trunks.close()
        self._pool.close()

    async def watch(self, source: ports.FleetSource) -> None:
        """End connections to replicas that the fleet loses, until cancelled."""
        revision = -1
        while True:
            await source.changed(revision)
            view = source.view()
            if view is None or view.revision == revision:
                await asyncio.sleep(0)  # a source that wakes for nothing must not spin the loop
                continue
            revision = view.revision
            self._pool.vouching.see(view)
            self._pool.doubt()
            self._trunks.doubt()

    async def send(self, replica: fleet.Replica, call: Call) -> "Answer":
        """Send ``call`` and return its answer; `leave` that whatever happens: early, it is cancelled there.

        Raises:
            Full: the replica has no seat.
            Lost: it is gone, or was during the answer.
            errors.ForebayError: the engine refuses the request itself; nothing was computed.
        """
        secret = self._secret(replica)
        try:
            connection = await self._pool.get(replica.address)
        except (OSError, ValueError) as error:
            raise Lost(f"not reachable: {hop_reader.words(error)}", computed=False) from error
        connection.owner = owner = (replica.replica_id, replica.incarnation)
        coming = connection.expect(call.silence_s)
        place: trunk.Place | None = None
        if call.streams and (shared := self._trunks.of(owner, replica.address, secret)) is not None:
            connection.place = place = shared.enter(coming)
        connection.write(_head(replica, call, secret, place) + call.body)
        answer = Answer(connection, coming)
        try:
            self._check(replica, await answer.head(), call.path)
        except BaseException:
            answer.leave()
            raise
        return answer

    def _secret(self, replica: fleet.Replica) -> str:
        key = (replica.replica_id, replica.incarnation)
        found = self._secrets.get(key)
        if found is None:
            try:
                found = Path(replica.secret_file).read_text(encoding="ascii").strip()
            except (OSError, ValueError) as error:
                raise Lost(f"secret of {replica.replica_id}: {error}", computed=False) from error
            self._secrets = {k: v for k, v in self._secrets.items() if k[0] != key[0]}
            self._secrets[key] = found
        return found

    def _check(self, replica: fleet.Replica, said: hop_reader.Reader, path: str) -> None:
        """Raise unless the answer consists of frames."""
        if said.framed:
            return
        status = said.status
        if status == 200:
            kind = said.content_type.decode("latin-1")[:100]
            raise Lost(f"answered {kind}, not frames", computed=True)
        if status == 429:
            raise Full(no_adapter=_code(said.text) == frames.NO_ADAPTER)
        if status in (401, 403):
            # The secret belongs to another incarnation, which the next view will tell.
            self._secrets.pop((replica.replica_id, replica.incarnation), None)
            raise Lost("refused our secret", computed=False)
        if status >= 500 or status < 400:
            # It answers, so it lives: what made it fail may be this request, and others go on there.
            raise Lost(f"answered {status}", computed=False, kind=errors.EngineFailed)
        raise engine_error(
            status, said.text, f"model {replica.spec.model}: its engine has no {path}"
        )


def _head(replica: fleet.Replica, call: Call, secret: str, place: trunk.Place | None) -> bytes:
    identity = msgspec.json.encode(call.identity)
    if b"%" in identity or not identity.isascii():
        identity = urllib.parse.quote(identity, safe=_JSON_SAFE).encode()
    return _HEAD % (
        call.path.encode(),
        replica.address.encode(),
        secret.encode(),
        call.identity.request_id.encode(),
        call.identity.attempt,
        identity,
        len(call.body),
        _more(call, place),
    )


class Answer:
    """The frames of one answer.

    Args:
        connection: where it comes on.
        coming: the answer as the hop has it.
    """

    __slots__ = ("_coming", "_connection")

    def __init__(self, connection: hop.Connection, coming: hop.Answer) -> None:
        self._connection = connection
        self._coming = coming

    async def head(self) -> hop_reader.Reader:
        """Return what the head says.

        Raises:
            Lost: none came.
        """
        try:
            return await self._coming.head()
        except hop.Broken as error:
            computed = not self._coming.reader.status  # a status that is an error: nothing was
            raise Lost(f"no answer: {error}", computed=computed) from error

    async def each(self, take: hop.Take) -> frames.Frame | None:
        """Give every frame to ``take``, at once when it comes and without a switch of tasks.

        Args:
            take: is given the frames before the last; False from it ends this call.

        Returns:
            The END or ERROR frame; None after ``take`` said False: call again to go on.

        Raises:
            Lost: the stream broke off, was silent for too long, or is no sequence of frames.
        """
        try:
            return await self._coming.each(take)
        except hop.Broken as error:
            raise Lost(f"broke off: {error}", computed=True) from error

    def leave(self) -> None:
        """Give the connection back if the answer was read whole, else close it."""
        self._connection.leave()


def _code(raw: bytes) -> object:
    """Return the code of an error's body, None if it has none."""
    with contextlib.suppress(ValueError, AttributeError, TypeError):
        return json.loads(raw)["error"].get("code")
    return None


def _first(faults: list[tuple[str, str, str]]) -> tuple[str, str]:
    """Return the first field that is wrong, and what each of its forms asks for."""
    found = [(_FORM.sub("", place).removeprefix("body."), a or b) for place, a, b in faults]
    name = found[0][0]
    words = dict.fromkeys(said for place, said in found if place == name)
    return name, "; or ".join(list(words)[:_FORMS])


def engine_error(status: int, raw: bytes, missing: str = "") -> errors.ForebayError:
    """Turn an engine's own refusal into the error that the caller sees.

    Args:
        status: its HTTP status.
        raw: its body.
        missing: what a 404 means that says no more than that: the engine knows no such path.
    """
    message: Any = None
    param: Any = None
    with contextlib.suppress(ValueError, AttributeError):
        parsed = json.loads(raw)
        fields = parsed.get("error") if isinstance(parsed.get("error"), Mapping) else parsed
        message, param = fields.get("message"), fields.get("param")
    if message is None and (cut := _CUT.search(raw.decode("utf-8", "ignore"))) is not None:
        with contextlib.suppress(ValueError):
            message = json.loads(cut[1] + '"')
    if status == 404 and (not message or str(message).lower() == "not found"):
        message = f"{missing or 'not found'}: use another endpoint or another model"
    text = " ".join(str(message or f"the engine refused the request ({status})").split())
    if _LISTED.match(text) and (faults := _FAULT.findall(text)):
        param, words = _first(faults)
        text = f"{param}: {words}"
    text = text[:MESSAGE_CHARS]
    name = str(param).removeprefix("body.")[:100] if param else None
    lowered = text.lower()
    if "context length" in lowered or "maximum context" in lowered or "context_length" in lowered:
        return errors.ContextTooLong(text, param=name)
    if status == 404:
        return errors.ModelNotFound(text, param=name)
    if status == 413:
        return errors.BodyTooLarge(text, param=name)
    return errors.BadRequest(text, param=name)
