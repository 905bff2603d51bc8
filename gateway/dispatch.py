"""One dispatch of a request to one replica: recorded, forwarded, and ended in exactly one way.

Payload bytes pass unparsed. The last bytes go out only when the CLOSE row is on disk.
"""

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator
from typing import Protocol

import msgspec

from gateway import asks, emitted, metrics, recording, replica, settings, upstream, waiting
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


@dataclasses.dataclass(slots=True)  # frozen ones cost a call a field to make
class Job:
    """What is dispatched; not changed afterwards.

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
        suspect: replicas were lost with it before: that it comes further than there is told to admission.
        over: called when the answer's last frame has come, before the record and the client's last bytes.
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
    suspect: bool = False
    over: Callable[[], None] | None = None


@dataclasses.dataclass(slots=True)
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
        "_add", "_begun", "_count", "_data", "_first", "_gap", "_grant", "_job", "_last", "_named", "_now",
        "_record", "held",
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
        self._begun = bool(record.first_token_us)
        self._data = job.outlet.data
        self._add = job.sent.add
        self.held: frames.Frame | None = None

    def take(self, frame: frames.Frame) -> bool:
        """Take a DATA or PROMPT frame; False: the client is behind."""
        kind, payload, packed, _, _, _ = frame
        if kind is _PROMPT:
            self._record.prompt(frame)
            self._grant.prefilled()
            self._job.outlet.prompt(frame, self._job.version)
            return True
        if self._begun:
            if packed:
                self._count = count = self._count + 1
                turn = count % _GAP_EACH
                if turn == _GAP_EACH - 1:
                    self._last = self._now()
                elif not turn:
                    self._gap((self._now() - self._last) / (len(packed) >> 2))
        elif payload or packed:
            self._begin()
        going = True
        if self.held is not None:
            held, self.held = self.held, None
            self._add(held)
            going = self._data(held)
        if payload.find(_DONE, _TAIL) >= 0 or (self._named and payload.startswith(_COMPLETED)):
            self.held = frame
            return going
        self._add(frame)
        return self._data(frame) and going

    def _begin(self) -> None:
        """Note that the first token has come."""
        self._begun = True
        self._record.first_token()
        self._grant.prefilled()
        if self._first is not None:
            self._first(self._job.request)


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
        numbers: metrics.Numbers,
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
            try:
                if job.span is None:
                    return await self._exchange(job, grant, record, None)
                with _traced(job, job.span, grant) as span:
                    return await self._exchange(job, grant, record, span)
            except BaseException as error:
                _close(record, job, error)
                raise
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
            job.request.endpoint._value_,
            upstream.body(job.request, job.begun),
            record.identity,
            options.stream_idle_s if job.request.stream else options.answer_timeout_s,
            job.request.traceparent if span is None else span.traceparent,
            0 if asks.most_tokens(job.request.body) else options.output_most_tokens,
            job.request.stream,
            0 if job.request.batch is None else job.request.batch.preempted,
        )
        answer = await self._client.send(grant.replica, call)
        try:
            last = await self._forward(answer, job, record, grant)
            # The seat is free at the replica now; a slow client must not keep it here.
            grant.close()
            end = _ended(last.frame, record, job)
            await self._recorder.sync()
            if last.held is not None:
                await self._pass_on(job, last.held)
            return end
        finally:
            answer.leave()

    async def _forward(
        self, answer: replica.Answer, job: Job, record: recording.Attempt, grant: waiting.Grant
    ) -> _Last:
        """Pass DATA on until the END or ERROR frame; the stream's last event is held back for it."""
        first = None if job.resumed else self._first_token
        served = self._numbers.served(job.request.model, job.request.tier._value_)
        forwarding = _Forwarding(job, record, grant, first, served.inter_token.observe)
        take = _watched(forwarding.take, job, grant) if job.suspect else forwarding.take
        while True:
            last = await answer.each(take)
            if last is not None:
                if job.over is not None:
                    job.over()
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


def _watched(
    take: Callable[[frames.Frame], bool], job: Job, grant: waiting.Grant
) -> Callable[[frames.Frame], bool]:
    """Return ``take`` that tells once that a suspect has come further than where it was lost.

    How far a batch line was that can't go on from its ids, nobody knows: it is a suspect to its end.
    """
    told, batch = False, job.request.tier is requests.Tier.BATCH

    def watching(frame: frames.Frame) -> bool:
        nonlocal told
        going = take(frame)
        known = job.request.batch is None or not job.sent.why_not
        if not told and known and job.sent.further(batch=batch):
            told = True
            grant.passed()
        return going

    return watching


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
        record.close(usage.Outcome.OK, usage.ESTIMATED if end.estimated else "", end)
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
def _traced(job: Job, request: tracing.Span, grant: waiting.Grant) -> Iterator[tracing.Span | None]:
    """Put the attempt into the request's trace."""
    where: tracing.Attributes = {
        "forebay.attempt": job.number,
        "forebay.replica": grant.replica.replica_id,
    }
    span = request.child("attempt", where)
    error = "the client left"
    try:
        yield span
        error = ""
    except Exception as failure:
        error = f"{type(failure).__name__}: {failure}"
        raise
    finally:
        span.end(error)


def _close(record: recording.Attempt, job: Job, error: BaseException) -> None:
    """Close the record of an attempt that ends in ``error``, unless it is closed."""
    outcome, reason = usage.Outcome.ERROR, "the gateway failed"
    payer: usage.Payer | None = None
    counted: frames.Error | None = None
    planned = died = False
    match error:
        case replica.Full():
            record.refused()
        case replica.Lost() as lost:
            outcome, reason, counted = usage.Outcome.REPLICA_LOST, lost.reason, lost.counted
            planned = lost.kind is errors.Draining
            died = lost.kind is errors.ReplicaLost
            if job.losses.after(lost, job.sent, begun=job.outlet.begun) is emitted.Next.RESUME:
                payer = usage.Payer.TEAM  # what was sent is part of the whole answer
        case asyncio.CancelledError():
            why = job.why_cancelled()
            if why is None:
                outcome, reason = usage.Outcome.CLIENT_GONE, "the client left"
            elif isinstance(why, errors.Cancelled | errors.Expired):
                outcome, reason = recording.outcome_of(why), why.message
            else:
                outcome, reason = usage.Outcome.CANCELLED, why.message
                payer = usage.Payer.PLATFORM
        case errors.ForebayError():
            outcome, reason = recording.outcome_of(error), error.message
    try:
        record.close(outcome, reason, counted, payer=payer, planned=planned, died=died)
    except errors.RecordingUnavailable as unavailable:
        _log.error("CLOSE of %s is not kept: %s", job.request.request_id, unavailable.message)
