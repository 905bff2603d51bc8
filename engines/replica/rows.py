"""The replica's side of the usage record: one row whenever a sequence leaves, soon on disk."""

import asyncio
import logging

from engines.replica import engine
from scheduler.contracts import clock, errors, ids, usage

_log = logging.getLogger(__name__)
_OURS = frozenset({usage.Outcome.PREEMPTED, usage.Outcome.REPLICA_LOST, usage.Outcome.ERROR})
# Of a batch line: its team gets a whole answer or nothing, and pays for the try that comes to one.
_OURS_OF_LINES = _OURS | {usage.Outcome.CLIENT_GONE, usage.Outcome.CANCELLED}


def new_request_id() -> str:
    """Return an id for a request that brought none."""
    return ids.uuid7()


class Ledger:
    """Appends rows and keeps one sync under way while rows are not yet on disk."""

    def __init__(self, sink: usage.UsageSink, time: clock.Clock) -> None:
        self._sink = sink
        self._clock = time
        self._syncing: asyncio.Task[None] | None = None
        self._dirty = False

    def ready(self) -> None:
        """Raise `errors.RecordingUnavailable` if a row could not be kept now."""
        self._sink.ready()

    def close(
        self, identity: usage.Identity, tap: engine.Tap, outcome: usage.Outcome, reason: str
    ) -> None:
        """Append the row of a sequence that has left the engine, with what was computed."""
        prefilled = max(0, tap.prompt_tokens - tap.cached_tokens)
        ours = _OURS_OF_LINES if identity.batch_job_id else _OURS
        again = tap.begun is not None  # an earlier attempt's row has the prompt
        row = usage.UsageRow(
            kind=usage.RowKind.REPLICA,
            identity=identity,
            outcome=outcome,
            uncached_prompt_tokens=0 if again else prefilled,
            cached_prompt_tokens=0 if again else tap.cached_tokens,
            output_tokens=tap.output_tokens,
            first_token_us=tap.first_token_us,
            ended_us=self._clock.wall_us(),
            payer=usage.Payer.PLATFORM if outcome in ours else usage.Payer.TEAM,
            reason=reason,
            waste_tokens=prefilled if again else 0,
        )
        try:
            self._sink.append(row)
        except errors.RecordingUnavailable as error:
            # The gateway's CLOSE row still records the attempt, and `ready` refuses the next one.
            _log.error("row of %s is not kept: %s", identity.request_id, error.message)
            return
        self._dirty = True
        if self._syncing is None or self._syncing.done():
            self._syncing = asyncio.create_task(self._sync())

    async def _sync(self) -> None:
        while self._dirty:
            self._dirty = False
            try:
                await self._sink.sync()
            except errors.RecordingUnavailable as error:
                _log.error("usage rows are not on disk yet: %s", error.message)
                return

    async def flush(self) -> None:
        """Return when every row is on disk, or can't be."""
        if self._syncing is not None:
            await self._syncing
        self._dirty = True
        await self._sync()
