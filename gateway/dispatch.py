"""One dispatch of a request to one replica: recorded, forwarded, and ended in exactly one way.

Payload bytes pass unparsed. The last bytes go out only when the CLOSE row is on disk.
"""

import asyncio
import contextlib
import dataclasses
import logging
import re
from collections.abc import Callable, Iterator
from typing import Protocol

import msgspec

from gateway import asks, emitted, metrics, recording, replica, resolve, settings, waiting
from scheduler.contracts import errors, frames, quota, requests, resume, tracing, usage

_DONE = b"data: [DONE]"
_COMPLETED = (b"event: response.completed\n", b"event: response.incomplete\n")
_TAIL = -len(_DONE) - 4  # with the blank line behind it
_GAP_EACH = 8  # intervals between tokens that are observed: each costs a few per cent of a frame
_PROMPT = frames.Kind.PROMPT
_end = msgspec.json.Decoder(frames.End).decode
_log = logging.getLogger(__name__)


class Outlet(Protocol):
    """Where an answer goes: an HTTP response, or a gRPC stream."""

    @property
    def begun(self) -> bool:
        """Whether the client has got anything of this answer."""
        ...

    def prompt(self, frame: frames.Frame, version: str) -> None:
        """Hear of the prompt's ids, before the first DATA frame, and of the version that answers."""
        ...

    def data(self, frame: frames.Frame) -> bool:
        """Pass on one DATA frame; False: the client is behind, await `drained` before the next."""
        ...

    def quotas(self, told: quota.Headers) -> None:
        """Take what is left of the caller's quotas: it is told before the answer, if nothing was yet."""
        ...

    async def drained(self) -> None:
        """Return once the client has read enough of what it was given."""
        ...

    def restart(self) -> None:
        """Forget what was collected and not sent: another replica begins anew."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """What is dispatched.

    Attributes:
        request: the checked request.
        number: the attempt, from 1.
        version: the version that was drawn.
        outlet: where the answer goes.
        why_cancelled: after a cancellation, its reason if it was on purpose; None: the client left.
        sent: what the client has got over all attempts.
        losses: judges the loss of a replica.
        begun: the beginning of the answer, where this replica shall go on from one.
        resumed: that beginning is an earlier attempt's of this request, which has recorded it.
        span: the request's, if it is traced.
    """

    request: requests.InferenceRequest
    number: int
    version: str
    outlet: Outlet
    why_cancelled: Callable[[], errors.ForebayError | None]
    sent: emitted.Emitted
    losses: emitted.Losses
    begun: resume.Resume | None = None
    resumed: bool = False
    span: tracing.Span | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class _Last:
    """The frame that ended an answer, and the client bytes that wait for the record."""

    frame: frames.Frame
    held: frames.Frame | None


class _Forwarding:
    """Takes an answer's frames as they come; called for every one of them, in the hop's own callback.

    Attributes:
        held: the stream's last event, which waits for the record.
    """

    __slots__ = (
        "_count", "_first", "_gap", "_grant", "_job", "_last", "_named", "_now", "_outlet", "_record",
        "_sent", "held",
    )  # fmt: skip

    def __init__(
        self,
        job: Job,
        record: recording.Attempt,
        grant: waiting.Grant,
        first: Callable[[requests.InferenceRequest], None] | None,
        gap: Callable[[float], None],
    ) -> None:
        self._gap = gap
        self._now = asyncio.get_running_loop().time
        self._last = 0.0
        self._count = 0
        self._job = job
        self._record = record
        self._grant = grant
        self._first = first
        self._named = job.request.endpoint is requests.Endpoint.RESPONSES  # its events have names
        self._outlet = job.outlet
        self._sent = job.sent
        self.held: frames.Frame | None = None

    def take(self, frame: frames.Frame) -> bool:
        """Take a DATA or PROMPT frame; False: the client is behind."""
        payload, record = frame.payload, self._record
        if frame.kind is _PROMPT:
            record.prompt(frame)
            self._grant.prefilled()
            self._outlet.prompt(frame, self._job.version)
            return True
        if not record.first_token_us and (payload or frame.packed):
            record.first_token()
            self._last = self._now()
            self._grant.prefilled()
            if self._first is not None:
                self._first(self._job.request)
        elif tokens := len(frame.packed) >> 2:
            now, self._count = self._now(), self._count + 1
            if not self._count % _GAP_EACH:
                self._gap((now - self._last) / tokens)
            self._last = now
        going = True
        if self.held is not None:
            held, self.held = self.held, None
            self._sent.add(held)
            going = self._outlet.data(held)
        if payload.find(_DONE, _TAIL) >= 0 or (self._named and payload.startswith(_COMPLETED)):
            self.held = frame
            return going
        self._sent.add(frame)
        return self._outlet.data(frame) and going


class Dispatcher:
    """Sends requests to granted replicas.

    Args:
        options: the [gateway] table.
        client: the hop to the replicas.
        recorder: where rows go.
        first_token: called with the request when its first token has come.
        numbers: where intervals between tokens are told.
    """

    def __init__(
        self,
        options: settings.GatewaySettings,
        client: replica.Client,
        recorder: recording.Recorder,
        first_token: Callable[[requests.InferenceRequest], None],
        numbers: metrics.Metrics,
    ) -> None:
        self._numbers = numbers
        self._options = options
        self._client = client
        self._recorder = recorder
        self._first_token = first_token

    async def run(self, job: Job, grant: waiting.Grant) -> frames.End:
        """Serve the job on the granted replica; the grant is closed as soon as it has ended there.

        Raises:
            replica.Full: it has no seat.
            replica.Lost: it is gone; `job.losses` says what follows.
            errors.ForebayError: any other end without an answer.
        """
        try:
            record = self._recorder.open(job, grant)
            with _closing(record, job), _traced(job, grant) as span:
                return await self._exchange(job, grant, record, span)
        finally:
            grant.close()

    async def _exchange(
        self,
        job: Job,
        grant: waiting.Grant,
        record: recording.Attempt,
        span: tracing.Span | None,
    ) -> frames.End:
        options = self._options
        call = replica.Call(
            job.request.endpoint.value,
            upstream_body(job.request, job.begun),
            record.identity,
            options.stream_idle_s if job.request.stream else options.answer_timeout_s,
            job.request.traceparent if span is None else span.traceparent,
            0 if asks.most_tokens(job.request.body) else options.output_most_tokens,
            job.request.stream,
        )
        async with self._client.open(grant.replica, call) as answer:
            last = await self._forward(answer, job, record, grant)
            # The seat is free at the replica now; a slow client must not keep it here.
            grant.close()
            end = _ended(last.frame, record, job)
            await self._recorder.sync()
            if last.held is not None:
                await self._pass_on(job, last.held)
            return end

    async def _forward(
        self, answer: replica.Answer, job: Job, record: recording.Attempt, grant: waiting.Grant
    ) -> _Last:
        """Pass DATA on until the END or ERROR frame; the stream's last event is held back for it."""
        first = None if job.resumed else self._first_token
        served = self._numbers.served(job.request.model, job.request.tier.value)
        forwarding = _Forwarding(job, record, grant, first, served.inter_token.observe)
        while True:
            last = await answer.each(forwarding.take)
            if last is not None:
                return _Last(last, forwarding.held)
            await self._drained(job.outlet)

    async def _pass_on(self, job: Job, frame: frames.Frame) -> None:
        """Give a frame to the client that was held back."""
        job.sent.add(frame)
        if not job.outlet.data(frame):
            await self._drained(job.outlet)

    async def _drained(self, outlet: Outlet) -> None:
        """Wait for a client that is behind; one that no longer reads must not keep a seat for ever."""
        limit_s = self._options.client_stall_s
        try:
            async with asyncio.timeout(limit_s):
                await outlet.drained()
        except TimeoutError:
            raise errors.Cancelled(f"the client has not read for {limit_s:g} s") from None


def _ended(frame: frames.Frame, record: recording.Attempt, job: Job) -> frames.End:
    """Record how the replica says that the answer ended.

    Raises:
        replica.Lost: the engine was lost, or stopped without being asked.
        errors.ForebayError: the answer failed for another reason.
    """
    if frame.kind is frames.Kind.END:
        try:
            end = _end(frame.payload)
        except msgspec.MsgspecError as fault:
            raise replica.Lost(f"ended with nonsense: {fault}", computed=True) from fault
        record.close(usage.Outcome.OK, "", end)
        return end
    try:
        said = _one_line(frames.Error.parse(frame.payload))
    except (TypeError, ValueError) as fault:
        raise replica.Lost(f"failed with nonsense: {fault}", computed=True) from fault
    error = errors.from_code(said.code, said.message)
    if isinstance(error, errors.Internal) and 400 <= said.status < 500:
        error = errors.BadRequest(said.message)
    if isinstance(error, errors.Cancelled):
        error = errors.ReplicaLost(said.message)
    if isinstance(error, errors.ReplicaLost):
        raise replica.Lost(said.message, computed=True, kind=type(error), counted=said)
    if isinstance(error, errors.Preempted) and job.request.caller.service and not job.sent.why_not:
        error.resume = job.sent.resume(begun=False).to_json()
    outcome = recording.outcome_of(error)
    if outcome is usage.Outcome.REFUSED and said.output_tokens:
        outcome = usage.Outcome.ERROR
    record.close(outcome, said.message, said)
    raise error


def _one_line(said: frames.Error) -> frames.Error:
    """Return an engine's error for a caller and a record: it may repeat the whole input."""
    words = " ".join(said.message.split())[: replica.MESSAGE_CHARS]
    return said if words == said.message else dataclasses.replace(said, message=words)


@contextlib.contextmanager
def _traced(job: Job, grant: waiting.Grant) -> Iterator[tracing.Span | None]:
    """Put the attempt into the request's trace, if it has one."""
    if job.span is None:
        yield None
        return
    where: tracing.Attributes = {
        "forebay.attempt": job.number,
        "forebay.replica": grant.replica.replica_id,
    }
    span = job.span.child("attempt", where)
    error = "the client left"
    try:
        yield span
        error = ""
    except Exception as failure:
        error = f"{type(failure).__name__}: {failure}"
        raise
    finally:
        span.end(error)


@contextlib.contextmanager
def _closing(record: recording.Attempt, job: Job) -> Iterator[None]:
    """Close the record on every way out that has not closed it yet."""
    outcome, reason = usage.Outcome.ERROR, "the gateway failed"
    payer: usage.Payer | None = None
    counted: frames.Error | None = None
    try:
        yield
    except replica.Full:
        record.refused()
        raise
    except replica.Lost as lost:
        outcome, reason, counted = usage.Outcome.REPLICA_LOST, lost.reason, lost.counted
        if job.losses.after(lost, job.sent, begun=job.outlet.begun) is emitted.Next.RESUME:
            payer = usage.Payer.TEAM  # what was sent is part of the whole answer
        raise
    except asyncio.CancelledError:
        why = job.why_cancelled()
        if why is None:
            outcome, reason = usage.Outcome.CLIENT_GONE, "the client left"
        elif isinstance(why, errors.Cancelled | errors.Expired):
            outcome, reason = recording.outcome_of(why), why.message
        else:
            outcome, reason = usage.Outcome.CANCELLED, why.message
            payer = usage.Payer.PLATFORM
        raise
    except errors.ForebayError as error:
        outcome, reason = recording.outcome_of(error), error.message
        raise
    finally:
        try:
            record.close(outcome, reason, counted, payer=payer)
        except errors.RecordingUnavailable as error:
            _log.error("CLOSE of %s is not kept: %s", job.request.request_id, error.message)


def upstream_body(request: requests.InferenceRequest, begun: resume.Resume | None = None) -> bytes:
    """Return the body as the engine shall see it: its own name of the model, none of our fields.

    Args:
        request: the checked request.
        begun: the beginning of the answer, if the replica shall go on from one.
    """
    name = request.adapter or request.model
    if begun is None and request.raw and not resolve.has_ours(request.body):
        ready = _renamed(request.raw, request.body["model"], name)
        if ready is not None:
            return ready
    body = {key: value for key, value in request.body.items() if not key.startswith("forebay_")}
    body["model"] = name
    if begun is not None:
        body[resume.FIELD] = begun.to_json()
    return msgspec.json.encode(body)


def _renamed(raw: bytes, said: str, name: str) -> bytes | None:
    """Return the client's own bytes with another model's name in them; None: not without doubt."""
    if said == name:
        return raw
    quoted = msgspec.json.encode(said)
    if raw.count(quoted) != 1:
        return None  # a text says the same, or the name is written with escapes
    changed, times = re.subn(
        rb'("model"\s*:\s*)' + re.escape(quoted), lambda m: m[1] + msgspec.json.encode(name), raw
    )
    return changed if times == 1 else None


def given(request: requests.InferenceRequest) -> resume.Resume | None:
    """Return the beginning of an answer that Forebay's batch runner sent along; nobody else's is heard.

    Raises:
        errors.BadRequest: it is none.
    """
    value = request.body.get(resume.FIELD)
    if value is None or not request.caller.service:
        return None
    try:
        return resume.Resume.from_json(value)
    except resume.ResumeError as error:
        raise errors.BadRequest(str(error), param=resume.FIELD) from None
