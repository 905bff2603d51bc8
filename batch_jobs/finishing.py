"""The end of a job: sealed, written, published, told; or put back into the queue.

Each step is repeated until neither the registry nor the disk is in its way: nothing is lost meanwhile, and a
runner that dies in between leaves it to the next one, which comes to the same files.
"""

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy.exc

from batch_jobs import intake, model, parquet, publish, results, runner
from batch_jobs import store as stores
from scheduler.contracts import clock as clocks

T = TypeVar("T")
_LOG = logging.getLogger(__name__)
_AGAIN_S = 1.0
_TRANSIENT = (sqlalchemy.exc.SQLAlchemyError, OSError)


class Finisher:
    """Ends jobs."""

    def __init__(self, store: stores.Store, clock: clocks.Clock) -> None:
        self._store = store
        self._clock = clock

    async def _move(
        self, job: model.BatchJob, event: model.Event, **changes: Any
    ) -> model.BatchJob:
        try:
            return await asyncio.to_thread(self._store.move, job, event, **changes)
        except stores.Stale:  # by an earlier try whose answer was lost: nobody else moves this job
            newest = await asyncio.to_thread(self._store.get, job.job_id)
            if newest is None or newest.state is not model.after(job.state, event):
                raise
            return newest

    async def seal(self, run: runner.JobRun) -> None:
        """Make the ending the journal's last word."""
        await self._insist(run.seal, run)

    async def put_back(self, run: runner.JobRun) -> None:
        """Let a job wait again; its journal keeps what its lines have."""
        await self._insist(run.commit, run)
        await self._insist(
            lambda: self._move(
                run.job,
                model.Event.REQUEUE,
                counts=run.durable,
                used=run.used,
                reason=model.Reason.PRIORITY,
                requeues=run.job.requeues + 1,
                requeue_us=0,
            ),
            run,
        )

    async def _fail(self, run: runner.JobRun, why: str) -> None:
        """Fail a job whose journal went bad on disk; what it holds stays there to be looked at."""
        _LOG.error("job %d: %s", run.job.job_id, why)
        job = await asyncio.to_thread(self._store.get, run.job.job_id)
        if job is not None:
            await self._move(
                job,
                model.Event.FAIL,
                reason=model.Reason.LAUNCH_FAILED,
                detail=why,
                ended_us=self._clock.wall_us(),
            )

    async def give_up(self, run: runner.JobRun, why: str) -> None:
        """Fail a job whose journal went bad on disk."""
        await self._insist(lambda: self._fail(run, why), run)

    async def finish(self, run: runner.JobRun, ending: model.Ending) -> None:
        """Write, publish and tell a sealed job's results.

        Raises:
            journal.JournalError: its journal went bad.
        """
        job = run.job
        if job.state is not model.State.COMPLETING:
            job = await self._insist(
                lambda: self._move(
                    job,
                    ending.event,
                    counts=run.durable,
                    used=run.used,
                    finalizing_us=self._clock.wall_us(),
                ),
                run,
            )
        built = await self._insist(
            lambda: asyncio.to_thread(results.build, run.source, ending, job.order), run
        )
        if job.format == parquet.FORMAT:
            await self._insist(lambda: asyncio.to_thread(parquet.build, run.source.folder), run)
        counts = dataclasses.replace(run.durable, ok=built.ok, failed=built.failed)
        stored = await self._insist(
            lambda: asyncio.to_thread(intake.stored_bytes, run.source.folder), run
        )
        changes: dict[str, Any] = {
            "counts": counts,
            "used": run.used,
            "ended_us": self._clock.wall_us(),
            "stored_bytes": stored,
        }
        try:
            await self._insist(lambda: self._publish(job, run.source.folder), run)
        except publish.PublishError as error:
            changes |= {"reason": model.Reason.OUTPUT_REFUSED, "detail": str(error)}
            event = model.Event.FAIL
        else:
            changes["reason"] = self._why(job, ending)
            event = ending.published
        await self._insist(lambda: self._move(job, event, **changes), run)

    def _why(self, job: model.BatchJob, ending: model.Ending) -> model.Reason:
        if ending is not model.Ending.EXPIRED:
            return model.Reason.NONE
        return model.overdue(job, self._clock.wall_us()) or model.Reason.TIME_LIMIT

    @staticmethod
    async def _publish(job: model.BatchJob, folder: Path) -> None:
        output = parquet.OUTPUT if job.format == parquet.FORMAT else results.OUTPUT
        targets = ((output, job.output_file), (results.ERRORS, job.error_file))
        for name, target in targets:
            if target and (folder / name).exists() and job.uid is not None and job.gid is not None:
                await publish.publish(
                    folder / name, target, uid=job.uid, gid=job.gid, umask=job.umask
                )

    async def _insist(self, step: Callable[[], Coroutine[Any, Any, T]], run: runner.JobRun) -> T:
        """Repeat a step until neither the registry nor the disk is in its way."""
        while True:
            try:
                return await step()
            except _TRANSIENT as error:
                _LOG.error("job %d: tried again in a second: %s", run.job.job_id, error)
                await self._clock.sleep(_AGAIN_S)
