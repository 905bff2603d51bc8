"""The batch runner: takes jobs from the store, feeds their lines to the gateway, ends them.

Three loops. `_watch` looks at the store: new jobs, cancellations, limits; it tells counts. `_feed` picks the
next line: the team with the fewest lines in flight first, then the job, then who waited longest, as far
as the model's window allows. `_live` is one per job: it waits until the job is over, seals its journal,
writes and publishes the results. A runner that dies leaves journals; the next one goes on from them.
"""

import asyncio
import contextlib
import functools
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

import sqlalchemy.exc

from batch_jobs import (
    client,
    files,
    finishing,
    following,
    intake,
    journal,
    journal_writer,
    model,
    queueing,
    runner,
    settings,
    taking,
    turns,
    verdicts,
)
from batch_jobs import store as stores
from scheduler.contracts import clock as clocks
from scheduler.contracts import errors
from scheduler.core import batch_order

_LOG = logging.getLogger(__name__)
_CLEAN_S = 600.0
_ESTIMATE_US = 5_000_000
_DECIDE_US = 1_000_000  # who waits gets older, and what Slurm says of dependencies changes
_OUR_FAULT = frozenset({errors.Unauthenticated.code, errors.KeyExpired.code})
_TRANSIENT = (sqlalchemy.exc.SQLAlchemyError, OSError)


async def serve(  # noqa: PLR0913 - the parts of a runner, each by its name
    options: settings.BatchJobsSettings,
    *,
    store: stores.Store,
    state_dir: Path,
    gateway_url: str,
    service_key: str,
    clock: clocks.Clock,
    ready: Callable[[], None] | None = None,
    shares: Mapping[str, float] | None = None,
    slurm: queueing.SlurmFates | None = None,
) -> None:
    """Run batch jobs until cancelled; lines in flight are then left to the next runner.

    Args:
        options: the [batch_jobs] table.
        store: the registry's batch jobs.
        state_dir: where the gateways put the jobs' files.
        gateway_url: base URL.
        service_key: the credential that may act for the jobs' teams and users.
        clock: time.
        ready: called once the store was read and lines may flow.
        shares: the teams' shares, 1 where one is not named.
        slurm: says how jobs of the Slurm cluster stand, for those that wait for them.
    """
    queue = queueing.Queue(store, options, shares or {}, slurm)
    async with client.HttpSender(gateway_url, service_key, options.request_timeout_s) as sender:
        await Daemon(options, queue, store, state_dir, sender, clock).run(ready)


class Daemon:
    """The runner's loops and what they share."""

    def __init__(
        self,
        options: settings.BatchJobsSettings,
        queue: queueing.Queue,
        store: stores.Store,
        state_dir: Path,
        sender: client.Sender,
        clock: clocks.Clock,
    ) -> None:
        self._options = options
        self._queue = queue
        self._estimated_us = 0
        self._store = store
        self._following = following.Following(store)
        self._decision = batch_order.NOTHING
        self._decide_us = 0
        self._state_dir = state_dir
        self._sender = sender
        self._finisher = finishing.Finisher(store, clock)
        self._clock = clock
        self._runs: dict[int, runner.JobRun] = {}
        self._wake = asyncio.Event()
        self._turns = turns.Turns(options.first_window, options.max_window, options.team_lines)
        self._told: dict[int, tuple[model.Counts, str]] = {}
        self._refused: set[int] = set()  # jobs whose journal could not be opened, said once
        self._tasks: asyncio.TaskGroup | None = None

    async def run(self, ready: Callable[[], None] | None = None) -> None:
        """Work until cancelled."""
        try:
            async with asyncio.TaskGroup() as self._tasks:
                self._tasks.create_task(self._feed())
                self._tasks.create_task(self._clean())
                await self._look()
                if ready is not None:
                    ready()
                await self._watch()
        finally:
            await asyncio.gather(*(run.close() for run in self._runs.values()))
            self._runs.clear()

    async def _clean(self) -> None:
        kept = files.Files(self._store, self._state_dir)
        while True:
            try:
                for word in await asyncio.to_thread(
                    files.sweep,
                    kept,
                    self._store,
                    self._state_dir,
                    self._clock.wall_us(),
                    keep_s=self._options.keep_s,
                ):
                    _LOG.info("removed: %s", word)
            except _TRANSIENT as error:
                _LOG.error("old files stay for now: %s", error)
            await self._clock.sleep(_CLEAN_S)

    async def _watch(self) -> None:
        while True:
            await self._clock.sleep(self._options.poll_s)
            try:
                await self._look()
            except sqlalchemy.exc.SQLAlchemyError as error:
                _LOG.error("the registry does not answer, running jobs go on: %s", error)

    async def _look(self) -> None:
        now = self._clock.wall_us()
        changed = await asyncio.to_thread(self._following.look, now)
        jobs = self._following.jobs
        new = []
        for job in jobs:
            run = self._runs.get(job.job_id)
            if run is None:
                new.append(job)
            elif job.cancel_us:
                run.end(model.Ending.CANCELLED)
            elif model.overdue(job, now):
                run.end(model.Ending.EXPIRED)
            elif job.requeue_us and job.state is model.State.RUNNING:
                run.put_back()
        if changed or not 0 < self._decide_us - now <= _DECIDE_US:
            await self._decide(jobs, now)
        await self._take_some(jobs, new, now)
        for run in list(self._runs.values()):
            await self._tell(run)

    async def _decide(self, jobs: Sequence[model.BatchJob], now: int) -> None:
        """Say anew who starts and why others wait, and when that is to be looked at again."""
        self._decision = await asyncio.to_thread(self._queue.decide, jobs, now)
        self._turns.factors = self._queue.factors({job.team for job in jobs})
        begins = [job.begin_us for job in jobs if job.begin_us > now]
        self._decide_us = min([now + _DECIDE_US, *begins])

    async def _take_some(
        self, jobs: Sequence[model.BatchJob], new: Sequence[model.BatchJob], now: int
    ) -> None:
        """Take over what others left, end what is to be ended, start what may start."""
        decision = self._decision
        # By id: thousands may wait, and to compare jobs is to compare all their fields.
        waits = {job.job_id: job for job in new if not self._at_once(job, now)}
        for job in new:
            if job.job_id not in waits:
                await self._take(job, now)
        for job_id in decision.start:
            if job_id in waits:
                await self._take(waits[job_id], now)
        for job in waits.values():
            why = decision.waits.get(job.job_id)
            if why is not None and job.reason != why:
                await asyncio.to_thread(self._store.tell, job.job_id, reason=str(why))
        if waits and now - self._estimated_us >= _ESTIMATE_US:
            self._estimated_us = now
            await asyncio.to_thread(self._queue.foretell, jobs, now)

    @staticmethod
    def _at_once(job: model.BatchJob, now: int) -> bool:
        """Return whether a job needs a runner whatever its turn: it runs already, or is to be ended."""
        waits = job.state is model.State.PENDING
        return not waits or bool(job.cancel_us or model.overdue(job, now))

    async def _take(self, job: model.BatchJob, now: int) -> bool:
        folder = intake.job_folder(self._state_dir, job.job_id)
        try:
            writer = await asyncio.to_thread(taking.journal_of, self._store, job, folder)
        except journal_writer.JournalBusy:
            return False
        except (journal.JournalError, FileNotFoundError) as error:
            _LOG.error("job %d can't be run: %s", job.job_id, error)
            with contextlib.suppress(stores.Stale):  # it has ended since we looked
                await self._store_move(
                    job,
                    model.Event.FAIL,
                    reason=model.Reason.LAUNCH_FAILED,
                    detail=str(error),
                    ended_us=now,
                )
            return False
        except OSError as error:  # a full disk passes: the job waits
            if job.job_id not in self._refused:
                _LOG.error("job %d waits, its journal can't be opened: %s", job.job_id, error)
            self._refused.add(job.job_id)
            return False
        self._refused.discard(job.job_id)
        if writer is None:
            return False
        run = runner.JobRun(
            job, runner.source_of(job, folder, self._options), writer, self._options
        )
        if job.cancel_us:
            run.end(model.Ending.CANCELLED)
        elif model.overdue(job, now):
            run.end(model.Ending.EXPIRED)
        if job.state is model.State.PENDING and not run.over.is_set():
            try:
                run.job = await self._store_move(
                    job,
                    model.Event.START,
                    started_us=job.started_us or now,
                    reason=model.Reason.NONE,
                )
            except stores.Stale:
                await run.close()
                return False
            except BaseException:
                await run.close()  # else this process would hold the journal against itself
                raise
        self._runs[job.job_id] = run
        self._spawn(self._live(run))
        self._wake.set()
        return True

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        if self._tasks is None:
            raise RuntimeError("the daemon does not run")
        return self._tasks.create_task(work)

    async def _store_move(
        self, job: model.BatchJob, event: model.Event, **changes: Any
    ) -> model.BatchJob:
        return await asyncio.to_thread(self._store.move, job, event, **changes)

    async def _tell(self, run: runner.JobRun) -> None:
        reason = run.blocked or (model.Reason.RESOURCES if run.stalled else model.Reason.NONE)
        if self._turns.capped(run):
            reason = model.Reason.GROUP_LINES
        news = (run.durable, str(reason))
        if not run.over.is_set() and self._told.get(run.job.job_id) != news:
            await asyncio.to_thread(
                self._store.tell,
                run.job.job_id,
                counts=news[0],
                reason=news[1],
                used=run.used,
            )
            self._told[run.job.job_id] = news

    # The lines

    async def _feed(self) -> None:
        while True:
            self._wake.clear()
            while (picked := self._turns.pick(self._runs.values())) is not None:
                run, served = picked
                work = run.ready.pop(served)
                self._turns.take(run, served)
                task = self._spawn(self._line(run, work))
                run.tasks.add(task)
                task.add_done_callback(run.tasks.discard)
            for run in self._runs.values():
                if run.hungry():
                    task = self._spawn(self._refill(run))
                    run.tasks.add(task)
                    task.add_done_callback(run.tasks.discard)
            await self._wake.wait()

    async def _refill(self, run: runner.JobRun) -> None:
        await run.refill(self._clock)
        run.touch()
        self._wake.set()

    async def _line(self, run: runner.JobRun, work: client.Work) -> None:
        name = work.line.model
        sent_in = self._turns.window(name).round, self._turns.allowance(run, name).round
        run.dispatched(work)
        try:
            answer = await self._sender.send(
                run.job,
                work,
                run.begun(work),
                functools.partial(run.heard, work),
                run.told(work),
            )
        finally:
            self._turns.give_back(run, name)
            self._wake.set()
        judged = verdicts.judge(answer)
        alone = verdicts.alone(judged, work.payload)
        self._learn(run, name, judged, sent_in, alone=alone)
        delay = run.conclude(work, answer, judged)
        run.touch()
        if delay is None:
            run.look()
            return
        with contextlib.ExitStack() as until:
            until.callback(self._wake.set)
            until.enter_context(run.retrying(name))
            if judged.verdict is verdicts.Verdict.WAIT:
                until.enter_context(self._turns.kept(run, name, alone=alone))
            await self._clock.sleep(delay)
        run.ready.append(work, first=True)

    def _learn(
        self,
        run: runner.JobRun,
        served: str,
        judged: verdicts.Judged,
        sent_in: tuple[int, int],
        *,
        alone: bool,
    ) -> None:
        fleet, own = self._turns.window(served), self._turns.allowance(run, served)
        if judged.verdict is verdicts.Verdict.WAIT:
            if alone:  # which says nothing of the fleet
                own.refused(sent_in[1])
            else:
                fleet.refused(sent_in[0])
            if judged.code in _OUR_FAULT:
                _LOG.error("the gateway refuses the batch runner's own key: %s", judged.message)
        elif judged.verdict is verdicts.Verdict.OK:
            fleet.answered()
            own.answered()
        elif judged.code == errors.ModelNotFound.code:
            self._turns.forget_model(served)

    # The end of a job

    async def _live(self, run: runner.JobRun) -> None:
        committing = self._spawn(run.keep_committing(self._clock, self._wake.set))
        try:
            await run.over.wait()
            ending = run.ending or model.Ending.DRAINED
            tasks = list(run.tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if run.requeued:
                await self._finisher.put_back(run)
                return
            await self._finisher.seal(run)
            try:
                await self._finisher.finish(run, ending)
            except journal.JournalError as error:
                await self._finisher.give_up(run, str(error))
            except (
                Exception
            ) as fault:  # ours: every other job would end with this runner, again and again
                _LOG.exception("job %d: its results can't be made", run.job.job_id)
                why = f"a fault of Forebay's, please report it: {type(fault).__name__}: {fault}"
                await self._finisher.give_up(run, why)
        finally:
            committing.cancel()
            if run.over.is_set():
                await run.close()
                self._runs.pop(run.job.job_id, None)
                self._told.pop(run.job.job_id, None)
                self._turns.forget_job(run)
