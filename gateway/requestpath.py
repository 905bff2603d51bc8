"""The one way of a request, for HTTP and gRPC alike: admit, wait, dispatch, and dispatch again if need be.

A replica that is lost is replaced in silence: the answer begins anew if the client has got nothing, else it
goes on elsewhere from the token ids that were sent. Where that can't be, the client is told.
"""

import asyncio
import contextlib
import dataclasses
import logging
from concurrent import futures
from typing import Any

from gateway import (
    access_log,
    dependencies,
    dispatch,
    emitted,
    measuring,
    metrics,
    recording,
    replica,
    shadow,
    upstream,
    waiting,
)
from scheduler.contracts import errors, fleet, frames, requests, resume, tracing, usage

_FLUSH_S = 0.2
_ASKED_S = 5.0  # longest wait for the word on a batch job that a line was left of
_ASKERS = 4  # threads of their own: a registry that hangs must not keep anything else waiting
_log = logging.getLogger(__name__)


@dataclasses.dataclass(eq=False, slots=True)
class _Live:
    """A request under way, since a monotonic second; `why` is set before its task is cancelled on purpose."""

    caller: requests.Caller
    task: "asyncio.Task[Any]"
    cancelling: int
    since: float
    span: tracing.Span | None = None
    why: errors.ForebayError | None = None


@dataclasses.dataclass(slots=True)
class _Trip:
    """A request from its admission to its end; not changed afterwards.

    Attributes:
        begun: the beginning of the answer that the batch runner sent along, if it did.
        sent: what its client has got.
        copy: for a shadow version, None for most requests.
    """

    request: requests.InferenceRequest
    waiter: waiting.Waiter
    outlet: dispatch.Outlet
    begun: resume.Resume | None
    sent: emitted.Emitted
    copy: shadow.Copy | None = None


class RequestPath:
    """Serves the requests of one gateway worker."""

    def __init__(
        self,
        deps: dependencies.Dependencies,
        room: waiting.Room,
        client: replica.Client,
        numbers: metrics.Metrics,
        measure: measuring.Measuring,
    ) -> None:
        self._settings = deps.settings
        self._measure = measure
        self._clock = deps.clock
        self._fleet = deps.fleet
        self._room = room
        self._metrics = numbers
        self._fate = deps.job_fate
        self._askers = futures.ThreadPoolExecutor(_ASKERS, "job-fate")
        self._log = access_log.AccessLog(deps.settings.access_log, deps.clock)
        self._tracer = None if isinstance(deps.tracer, tracing.NoTracer) else deps.tracer
        self._recorder = recording.Recorder(deps.sink, deps.clock, deps.cluster, numbers)
        self._dispatcher = dispatch.Dispatcher(
            deps.settings, client, self._recorder, self._first_token, numbers
        )
        self._shadows = shadow.Shadows(deps.settings, room, client, self._recorder, numbers)
        self._live: dict[str, _Live] = {}
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._closing = False
        room.hear(self._cancelled)

    @property
    def live(self) -> int:
        """How many requests wait or run."""
        return len(self._live)

    async def run(self) -> None:
        """Put rows on disk that nobody waits for, tell how versions fare, until cancelled."""
        while True:
            await self._clock.sleep(_FLUSH_S)
            # Asked for each few seconds: not with each request.
            self._metrics.in_flight.set(len(self._live))
            self._metrics.tell()
            if (view := self._fleet.view()) is not None:
                self._recorder.comparing.follow(view.routes.values())
                self._fleet.tell(self._recorder.comparing.take())
                self._fleet.compared(*self._shadows.take())
            await self._recorder.flush()
            await self._shadows.flush()

    async def answer(
        self, request: requests.InferenceRequest, outlet: dispatch.Outlet
    ) -> frames.End:
        """Serve ``request`` into ``outlet``; cancel the task when the client leaves.

        Returns:
            What the replica counted. An outlet that does not stream may send only now.

        Raises:
            errors.ForebayError: why there is no (whole) answer.
        """
        result = metrics.OK
        span = None
        if self._tracer is not None:
            span = self._tracer.begin("request", request.traceparent, access_log.traits(request))
        try:
            return await self._cancellable(request, outlet, span)
        except errors.ForebayError as error:
            result = error.code
            raise
        except asyncio.CancelledError:
            result = usage.Outcome.CLIENT_GONE.value
            raise
        finally:
            if result == metrics.OK:
                self._metrics.served(request.model, request.tier._value_).whole.inc()
            else:
                self._metrics.ended.labels(request.model, request.tier.value, result).inc()
            if span is not None:
                span.end("" if result == metrics.OK else result, {"forebay.result": result})
            self._log.ended(request, result)

    def turned_away(self, error: errors.ForebayError, request_id: str, endpoint: str) -> None:
        """Count and log a request that was refused before it was known who asks for what."""
        self._metrics.refused.labels("", "", error.code).inc()
        self._log.turned_away(error, request_id, endpoint)

    async def cancel(self, request_id: str, caller: requests.Caller) -> bool:
        """End one of the caller's own requests, whichever process has it; False if none has."""
        live = self._live.get(request_id)
        if live is None:
            return await self._room.cancel(request_id, caller.team, caller.user)
        if (live.caller.team, live.caller.user) != (caller.team, caller.user):
            return False
        self._cancelled(request_id)
        return True

    def _cancelled(self, request_id: str) -> None:
        """End a request of this process whose caller has cancelled it, here or at another."""
        if (live := self._live.get(request_id)) is not None:
            self._end(live, errors.Cancelled("cancelled by the caller"))

    async def drain(self, seconds: float) -> None:
        """Take nothing new, let running answers end for ``seconds``, then end them with an error."""
        self._closing = True
        await self._shadows.close()
        quiet = asyncio.ensure_future(self._quiet.wait())
        late = asyncio.ensure_future(self._clock.sleep(seconds))
        try:
            await asyncio.wait({quiet, late}, return_when=asyncio.FIRST_COMPLETED)
            for live in list(self._live.values()):
                self._end(live, _going_down())
            await quiet
        finally:
            for task in (quiet, late):
                task.cancel()
            await asyncio.wait({quiet, late})
            await self._recorder.flush()
            self._metrics.tell()

    @staticmethod
    def _end(live: _Live, why: errors.ForebayError) -> None:
        if live.why is None:
            live.why = why
            live.task.cancel()

    async def _cancellable(
        self, request: requests.InferenceRequest, outlet: dispatch.Outlet, span: tracing.Span | None
    ) -> frames.End:
        """Answer a registered request; a cancellation on purpose becomes its error, any other passes."""
        if self._closing:
            raise _going_down()
        task = asyncio.current_task()
        if task is None:
            raise errors.Internal("request served outside a task")
        live = _Live(request.caller, task, task.cancelling(), self._clock.monotonic(), span)
        self._live[request.request_id] = live
        self._quiet.clear()
        try:
            return await self._answer(request, outlet)
        except asyncio.CancelledError:
            # As asyncio.timeout does: only if nobody else has cancelled the task meanwhile.
            if live.why is not None and task.uncancel() <= live.cancelling:
                raise live.why from None
            raise
        finally:
            del self._live[request.request_id]
            if not self._live:
                self._quiet.set()

    async def _answer(
        self, request: requests.InferenceRequest, outlet: dispatch.Outlet
    ) -> frames.End:
        self._recorder.ready()
        begun = upstream.given(request)
        sent = emitted.Emitted(begun)
        try:
            route = self._room.view().routes.get(request.model)
            asking = await self._measure.asking(request, route)
            copy = self._shadows.of(request, route, asking)
            waiter = self._room.enter(asking)
        except errors.ForebayError as error:
            self._refused(request, 1, error)
            raise
        expiry = self._deadline(request)
        if copy is not None:
            outlet = self._shadows.tee(copy, outlet)
        end, failure = None, None
        try:
            end = await self._attempts(_Trip(request, waiter, outlet, begun, sent, copy))
            return end
        except (errors.ForebayError, asyncio.CancelledError) as ended:
            failure = ended
            live = self._live[request.request_id]
            why = ended if isinstance(ended, errors.ForebayError) else live.why
            if why is not None:
                if not recording.own_doing(why, request):
                    self._recorder.forgive(sent)
                if sent.tokens:  # the end of a part waits for the disk as that of a whole does
                    await self._recorder.kept()
            elif sent.left is not None:
                self._recorder.left(sent, await self._why_left(request))
            raise
        finally:
            if expiry is not None:
                expiry.cancel()
            self._room.leave(waiter, sent.spent)
            if copy is not None:
                self._shadows.over(copy, end, failure)

    async def _why_left(self, request: requests.InferenceRequest) -> usage.Outcome:
        """Say why a line's runner has left it; in doubt that it has, and no more."""
        if request.batch is None or self._fate is None:
            return usage.Outcome.CLIENT_GONE
        job_id = request.batch.job_id
        said = asyncio.get_running_loop().run_in_executor(self._askers, self._fate, job_id)
        asked = asyncio.ensure_future(asyncio.wait_for(said, _ASKED_S))
        while not asked.done():  # that its client has left may be told twice
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait({asked})
        if (fault := asked.exception()) is not None:
            _log.warning("%s: nobody says how job %d ended: %r", request.request_id, job_id, fault)
        return asked.result() if fault is None else usage.Outcome.CLIENT_GONE

    def _deadline(self, request: requests.InferenceRequest) -> asyncio.TimerHandle | None:
        """End the request, wherever it is, when the deadline that it named has passed."""
        if request.deadline_us is None:
            return None
        left_s = (request.deadline_us - self._clock.wall_us()) / 1_000_000
        expired = errors.Expired("the request's deadline has passed: give it more time")
        live = self._live[request.request_id]
        return asyncio.get_running_loop().call_later(max(0.0, left_s), self._end, live, expired)

    async def _attempts(self, trip: "_Trip") -> frames.End:
        request, waiter, sent = trip.request, trip.waiter, trip.sent
        live = self._live[request.request_id]
        batch = request.tier is requests.Tier.BATCH
        losses = emitted.Losses(self._settings.replica_attempts, batch=batch)
        begun, resumed = trip.begun, False
        failed: list[fleet.Replica] = []  # on this request, and alive: others may fail on it too
        number = 1
        while True:
            grant = await self._turn(trip, number)
            job = dispatch.Job(
                request=request,
                number=number,
                version=grant.version,
                outlet=trip.outlet,
                why_cancelled=lambda: live.why,
                sent=sent,
                losses=losses,
                begun=begun,
                resumed=resumed,
                span=live.span,
                suspect=waiter.asking.suspected > 0,
                over=None if trip.copy is None else trip.copy.answer.over,
            )
            renewed: str | None = None
            avoid: str | None = None
            try:
                end = await self._dispatcher.run(job, grant)
                for each in failed:
                    if each.replica_id != grant.replica.replica_id:
                        self._room.suspect(each)  # the request is sound: the replica is not
                return end
            except replica.Full as full:
                lacking = request.adapter if full.no_adapter else None
                self._room.full(grant.replica, request.tier, lacking or "")
                self._room.again(waiter)
                continue  # the same attempt: it has not begun
            except replica.Lost as lost:
                if lost.kind is not errors.Draining:
                    avoid = grant.replica.replica_id
                if lost.kind is errors.EngineFailed:
                    failed.append(grant.replica)
                else:  # gone, or leaving: until the view says so, nobody else is sent there
                    self._room.suspect(grant.replica)
                _log.warning(
                    "%s.%d: %s; %s", request.request_id, number, lost.reason, losses.next.value
                )
                if losses.next is emitted.Next.FAIL:
                    raise await self._last_word(waiter, losses, batch=batch) from lost
                if losses.next is emitted.Next.RESUME:
                    begun = sent.resume(begun=trip.outlet.begun)
                    resumed = resumed or lost.computed  # else all of it is the runner's beginning
                    renewed = grant.version if lost.computed else None
                    self._metrics.served(request.model, request.tier._value_).resumed.inc()
                else:
                    begun, resumed = trip.begun, False
                    sent.clear(trip.begun)
                    trip.outlet.restart()
            number += 1
            self._room.again(waiter, renewed, avoid, lost=losses.died)

    async def _last_word(
        self, waiter: waiting.Waiter, losses: emitted.Losses, *, batch: bool
    ) -> errors.ForebayError:
        """Return what a request ends in whose replica was lost; to a batch line admission says its part."""
        if batch and losses.died:
            self._room.again(waiter, lost=True)
            try:
                grant = await self._room.wait(waiter)
            except errors.ForebayError as told:
                return told
            grant.close()  # another owner of the queue, which knows nothing of the loss
        return losses.error()

    async def _turn(self, trip: "_Trip", number: int) -> waiting.Grant:
        """Wait for a replica; an end of the wait is recorded."""
        request, waiter = trip.request, trip.waiter
        try:
            grant = await self._room.wait(waiter)
        except errors.ReplicaLost:
            raise  # it is at fault: its tries are recorded, and this is none
        except errors.ForebayError as error:
            self._waited(request, waiter, error.code)
            self._refused(request, number, error)
            raise
        except asyncio.CancelledError:
            live = self._live[request.request_id]
            outcome = recording.outcome_of(live.why) if live.why else usage.Outcome.CLIENT_GONE
            row = self._recorder.undispatched(request, number, outcome, "left while it waited")
            trip.sent.left = row if request.batch is not None else None
            raise
        waited_s = self._clock.monotonic() - waiter.arrived
        self._metrics.served(request.model, request.tier._value_).dispatched.observe(waited_s)
        if trip.copy is not None:
            trip.copy.dispatched(grant.version)
        if grant.limits:
            trip.outlet.quotas(grant.limits)
        return grant

    def _waited(
        self, request: requests.InferenceRequest, waiter: waiting.Waiter, reason: str
    ) -> None:
        waited_s = self._clock.monotonic() - waiter.arrived
        self._metrics.queue_wait.labels(request.model, request.tier.value, reason).observe(waited_s)

    def _refused(
        self, request: requests.InferenceRequest, number: int, error: errors.ForebayError
    ) -> None:
        outcome = recording.outcome_of(error)
        self._recorder.undispatched(request, number, outcome, error.message)
        self._metrics.refused.labels(request.model, request.tier.value, error.code).inc()

    def _first_token(self, request: requests.InferenceRequest) -> None:
        """Note the time to a request's first token, by a clock that is never set."""
        seconds = self._clock.monotonic() - self._live[request.request_id].since
        self._metrics.served(request.model, request.tier._value_).ttft.observe(seconds)
        if request.tier is requests.Tier.INTERACTIVE:
            self._room.first_token(request.model, seconds * 1_000)


def _going_down() -> errors.NoReplica:
    return errors.NoReplica("the gateway is going down: send the request again", retry_after_s=1.0)
