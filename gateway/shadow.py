"""Shadow traffic: copies of requests for a version whose answers nobody sees.

A copy begins when the caller's own replica has begun to answer, and only where the shadow version has a seat
that nobody waits for. It is a request of its own: the platform's, of tier batch, without a quota, ended
where others wait. Nothing of it reaches the caller: no error, no wait, no byte.
"""

import asyncio
import collections
import contextlib
import dataclasses
import logging
import random
from collections.abc import AsyncIterator, Callable

import msgspec

from gateway import (
    asks,
    dispatch,
    emitted,
    metrics,
    recording,
    replica,
    said,
    settings,
    shadow_answer,
    waiting,
)
from scheduler.contracts import errors, fleet, frames, ids, observed, requests, usage

TEAM, USER = "forebay", "shadow"  # in usage records: the platform's team, and what it was for
TIER = "shadow"  # in metrics
CALLER = requests.Caller(TEAM, USER, USER, (requests.Tier.BATCH,))
_COPIED = frozenset({requests.Tier.INTERACTIVE, requests.Tier.STANDARD})
_log = logging.getLogger(__name__)


@dataclasses.dataclass(eq=False, slots=True)
class Copy:
    """A request that is copied, from the caller's dispatch to the comparison.

    Attributes:
        route: its model's, with the shadow.
        answer: the caller's.
        version: the version that answers the caller, "" before its dispatch.
        ended: how the caller fared; None: it left, and there is nothing to compare with.
        size: bytes that are counted for it.
        task: the copy's, once it runs.
        why: why it is ended before its time.
    """

    request: requests.InferenceRequest
    route: fleet.Route
    answer: shadow_answer.Answer
    asking: asks.Asking
    version: str = ""
    ended: "asyncio.Future[observed.Fared | None]" = dataclasses.field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    size: int = 0
    task: "asyncio.Task[None] | None" = None
    why: errors.ForebayError | None = None

    @property
    def shadow(self) -> str:
        """The version that gets the copy."""
        return self.route.shadow

    def weight(self, version: str) -> int:
        """Return the percent of requests that a version answers."""
        return self.route.weights.get(version, 0)

    def dispatched(self, version: str) -> None:
        """Note the caller's dispatch, each time; an answer that goes on elsewhere stays one."""
        self.version = version
        self.answer.dispatched()

    def stop(self, why: errors.ForebayError) -> None:
        """End it."""
        if self.task is not None and self.why is None:
            self.why = why
            self.task.cancel()


class Shadows:
    """The copies of one gateway worker.

    Args:
        options: the [gateway] table.
        room: where replicas are given.
        client: the hop to them.
        recorder: the worker's own; copies have another, whose rows the platform pays.
        numbers: what Prometheus may ask.
        draw: random numbers in [0, 1) that decide which requests are copied.
    """

    def __init__(
        self,
        options: settings.GatewaySettings,
        room: waiting.Room,
        client: replica.Client,
        recorder: recording.Recorder,
        numbers: metrics.Metrics,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._options = options
        self._room = room
        self._clock = recorder.clock
        self._numbers = numbers
        self._draw = draw
        under = metrics.Renamed(numbers, TIER)
        own = recorder.beside(under, usage.Payer.PLATFORM)
        self._recorder = own
        self._dispatcher = dispatch.Dispatcher(options, client, own, lambda _: None, under)
        self._running: set[Copy] = set()
        self._closed = False
        self._bytes = 0
        self._copies: list[observed.Copied] = []
        self._dropped: collections.Counter[tuple[str, str, str]] = collections.Counter()

    def of(
        self,
        request: requests.InferenceRequest,
        route: fleet.Route | None,
        asking: asks.Asking,
    ) -> Copy | None:
        """Return the copy of a request that is to have one, None for most."""
        if route is None or not route.shadow or request.tier not in _COPIED:
            return None
        if request.version is not None or 100 * self._draw() >= route.shadow_percent:
            return None  # who names a version is no sample of the traffic
        answer = shadow_answer.Answer(self._clock, self._options.shadow_answer_bytes)
        return Copy(request, route, answer, asking)

    def tee(self, copy: Copy, outlet: dispatch.Outlet) -> shadow_answer.Tee:
        """Return the caller's outlet with the copy behind it."""
        return shadow_answer.Tee(outlet, copy.answer, lambda: self._begin(copy))

    def over(self, copy: Copy, end: frames.End | None, error: BaseException | None = None) -> None:
        """Hear how the caller's answer ended."""
        theirs = isinstance(error, errors.Cancelled | errors.Expired | errors.BadRequest)
        left = error is not None and (theirs or not isinstance(error, Exception))
        copy.ended.set_result(None if left else copy.answer.fared(end))
        if left:
            copy.stop(errors.Cancelled("the caller left: there is nothing to compare with"))

    def take(self) -> tuple[list[observed.Copied], list[observed.CopiesDropped]]:
        """Return what has come since the last call."""
        copies, self._copies = self._copies, []
        dropped, self._dropped = self._dropped, collections.Counter()
        return copies, [observed.CopiesDropped(*key, count) for key, count in dropped.items()]

    async def flush(self) -> None:
        """Put rows on disk that nobody waits for."""
        await self._recorder.flush()

    async def close(self) -> None:
        """End all copies, and begin none any more."""
        self._closed = True
        for copy in list(self._running):
            copy.stop(errors.NoReplica("the gateway is going down"))
        tasks = [copy.task for copy in self._running if copy.task is not None]
        if tasks:
            await asyncio.wait(tasks)
        await self.flush()

    def _begin(self, copy: Copy) -> None:
        """Start a copy if there is room for it here."""
        if copy.version == copy.shadow or not copy.weight(copy.version):
            copy.answer.let_go()  # it has answered itself, or the request was for a pool of longer ones
            return
        if self._closed:
            self._drop(copy, "stopped")
            return
        request = copy.request
        size = max(len(request.raw), copy.asking.size) + 2 * self._options.shadow_answer_bytes
        full = len(self._running) >= self._options.shadow_in_flight
        if full or self._bytes + size > self._options.shadow_bytes:
            self._drop(copy, "gateway_busy")
            return
        copy.size = size
        self._bytes += size
        self._running.add(copy)
        name = f"shadow of {request.request_id}"
        copy.task = asyncio.get_running_loop().create_task(self._run(copy), name=name)
        copy.task.add_done_callback(lambda _: self._ended(copy))  # also of one that never began

    def _ended(self, copy: Copy) -> None:
        self._running.discard(copy)
        self._bytes -= copy.size

    async def _run(self, copy: Copy) -> None:
        try:
            mine = shadow_answer.Answer(self._clock, self._options.shadow_answer_bytes)
            end = await self._answered(copy, mine)
            fared = mine.fared(end)
            await asyncio.wait({copy.ended})  # awaited itself, it would be cancelled with this task
            caller = copy.ended.result()
            if caller is None:
                self._drop(copy, "caller_left")
            else:
                self._compare(copy, caller, mine, fared)
        except asyncio.CancelledError:
            self._drop(
                copy, "stopped" if copy.why is None else _REASONS.get(copy.why.code, "stopped")
            )
        except _Dropped as dropped:
            self._drop(copy, dropped.reason)
        except Exception:
            # A fault of ours must not be the caller's either.
            _log.exception("the copy of %s failed", copy.request.request_id)
            self._drop(copy, "fault")

    async def _answered(self, copy: Copy, mine: shadow_answer.Answer) -> frames.End | None:
        """Return the end of the shadow's answer, None if that failed.

        Raises:
            _Dropped: the shadow was not asked, or did not get to answer by no fault of its own.
        """
        request = dataclasses.replace(
            copy.request,
            request_id=ids.RequestId(ids.uuid7()),
            caller=CALLER,
            tier=requests.Tier.BATCH,
            version=copy.shadow,
            deadline_us=None,
            caller_request_id=copy.request.request_id,
            traceparent=None,
            arrived_us=self._clock.wall_us(),
        )
        asking = _asking(copy.asking, request)
        try:
            waiter = self._room.enter(asking)
        except errors.ForebayError as error:
            raise _Dropped(_REASONS.get(error.code, error.code)) from error
        sent = emitted.Emitted()
        try:
            grant = await self._granted(waiter)
            mine.dispatched()
            late = errors.Expired("the shadow version took too long")
            async with (
                self._giving_way(copy, waiter),
                asyncio.timeout(self._options.shadow_limit_s) as limit,
            ):
                job = dispatch.Job(
                    request=request,
                    number=1,
                    version=grant.version,
                    outlet=shadow_answer.Sink(mine),
                    why_cancelled=lambda: copy.why or (late if limit.expired() else None),
                    sent=sent,
                    losses=emitted.Losses(1, batch=True),
                    over=mine.over,
                )
                return await self._dispatcher.run(job, grant)
        except replica.Full as full:
            lacking = request.adapter if full.no_adapter else None
            self._room.full(grant.replica, requests.Tier.BATCH, lacking or "")
            raise _Dropped("busy") from full
        except replica.Lost as lost:
            if lost.kind is not errors.EngineFailed and not lost.computed:
                self._room.suspect(grant.replica)
            if lost.kind is errors.Draining:
                raise _Dropped("draining") from lost
            return None
        except (errors.Preempted, errors.RecordingUnavailable) as error:
            raise _Dropped(_REASONS.get(error.code, error.code)) from error
        except (errors.ForebayError, TimeoutError):
            return None
        finally:
            self._room.leave(waiter, sent.spent)

    @contextlib.asynccontextmanager
    async def _giving_way(self, copy: Copy, waiter: waiting.Waiter) -> AsyncIterator[None]:
        """End a copy within the block as soon as somebody waits."""

        async def watch() -> None:
            with contextlib.suppress(errors.ForebayError):
                await self._room.wait(waiter)
            copy.stop(errors.Preempted("others wait for its model"))

        watching = asyncio.create_task(watch())
        try:
            yield
        finally:
            watching.cancel()

    async def _granted(self, waiter: waiting.Waiter) -> waiting.Grant:
        try:
            return await self._room.wait(waiter)
        except errors.ForebayError as error:
            raise _Dropped(_REASONS.get(error.code, error.code)) from error

    def _compare(
        self, copy: Copy, caller: observed.Fared, mine: shadow_answer.Answer, fared: observed.Fared
    ) -> None:
        if (
            not caller.total_ms
        ):  # its client was slow: of neither side, or the means were of other requests
            fared = dataclasses.replace(fared, itl_ms=0.0, total_ms=0.0)
        match = observed.Match.UNKNOWN
        if said.greedy(copy.request.body) and not caller.failed and not fared.failed:
            texts = copy.answer.text(), mine.text()
            if None not in texts:
                match = observed.Match.SAME if texts[0] == texts[1] else observed.Match.DIFFERS
        model = copy.request.model
        self._copies.append(observed.Copied(model, copy.version, copy.shadow, caller, fared, match))
        self._numbers.copied(model, copy.shadow, caller, fared, match)

    def _drop(self, copy: Copy, reason: str) -> None:
        copy.answer.let_go()
        self._dropped[copy.request.model, copy.shadow, reason] += 1
        self._numbers.copies.labels(copy.request.model, copy.shadow, f"dropped_{reason}").inc()


class _Dropped(Exception):
    """A copy comes to nothing by no fault of its version.

    Args:
        reason: a word for metrics.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


_REASONS = {
    errors.Shed.code: "busy",
    errors.Preempted.code: "preempted",
    errors.Cancelled.code: "caller_left",
    errors.NoReplica.code: "no_replica",
    errors.RecordingUnavailable.code: "unrecorded",
}


def _asking(asking: asks.Asking, request: requests.InferenceRequest) -> asks.Asking:
    """Return what a copy asks of admission: a seat that nobody waits for, or nothing."""
    return msgspec.structs.replace(
        asking,
        request_id=request.request_id,
        tier=request.tier,
        team=TEAM,
        user=USER,
        key_id=USER,
        arrived_us=request.arrived_us,
        deadline_us=None,
        version=request.version,
        cache_hint=None,
        avoid=(),
        thread=0,
        spare=True,
    )
