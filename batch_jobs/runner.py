"""One job while it runs: which lines are open, what became of each, its journal.

Knows no database and no network: the daemon feeds it with answers. A line moves from the file to `ready`,
is sent, waits before a retry, and ends in the journal. Memory holds one byte a line and the lines
that are under way.
"""

import asyncio
import collections
import contextlib
import dataclasses
import logging
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from batch_jobs import (
    client,
    intake,
    journal,
    journal_writer,
    lines,
    model,
    partial,
    reading,
    ready,
    results,
    settings,
    verdicts,
)
from scheduler.contracts import clock as clocks
from scheduler.contracts import frames

_LOG = logging.getLogger(__name__)
_LOW = 256  # lines of a model that are ready when more of it are read
_MOST_LINES = 4_096  # that are ready of all models, each of which has its part
_MOST_BYTES = 4 * 1024 * 1024  # the same of their bodies
_RETRY_S = 1.0
_BLOCKED = {False: model.Reason.RESOURCES, True: model.Reason.GROUP_TOKENS}


class JobRun:
    """A job whose journal this process holds. Made in a thread by `open_run`; used on the event loop."""

    def __init__(
        self,
        job: model.BatchJob,
        source: results.Source,
        writer: journal_writer.Writer,
        options: settings.BatchJobsSettings,
    ) -> None:
        self.job = job
        self.source = source
        self.ready = ready.Ready()
        self.sent = 0
        self.waiting: collections.Counter[str] = collections.Counter()  # lines, by model
        self.tasks: set[asyncio.Task[None]] = set()
        self.over = asyncio.Event()  # set when no line may run any more, or none is left
        self.ending: model.Ending | None = None
        self.requeued = False
        self.stalled = ""  # why results can't be written now, or ""
        self.used = model.Used()  # by answers that the journal has on disk
        self.blocked = ""  # the reason, if the newest answer was that it waits
        self._options = options
        self._writer = writer
        self._lines = writer.recovered
        self._reader = reading.Reader(source, writer.recovered)
        self._reading = False
        self._dirty = asyncio.Event()
        self._durable, self.used = self.counts(), self._used()
        if self._lines.sealed:
            self.end(model.Ending(self._lines.sealed))

    @property
    def durable(self) -> model.Counts:
        """The counts that the journal has on disk."""
        return self._durable

    @property
    def ended(self) -> bool:
        """No line of it may be sent any more."""
        return self.ending is not None or self.requeued

    def hungry(self) -> bool:
        """Whether lines should be read now: of some model few are ready, and the file may have more."""
        if self._reading or self.over.is_set() or self._reader.exhausted:
            return False
        return self._reader.more(self._enough())

    def _enough(self) -> Collection[str]:
        """Return the models of which no lines are to be read now."""
        ours = {*self.ready.models, *self.waiting}
        parts = len(ours.union(self._reader.models)) or 1
        low, size = max(1, min(_LOW, _MOST_LINES // parts)), _MOST_BYTES // parts
        found = set()
        for name in ours:
            count, held = self.ready.of(name)
            full = count >= low or held >= size
            if full or self.waiting[name] >= self._options.max_window:
                found.add(name)
        return found

    @contextlib.contextmanager
    def retrying(self, name: str) -> Iterator[None]:
        """Count a line of a model that waits before it is offered again."""
        self.waiting[name] += 1
        try:
            yield
        finally:
            self.waiting[name] -= 1
            if not self.waiting[name]:
                del self.waiting[name]

    def counts(self) -> model.Counts:
        """Return the counts as they are, on disk or not yet."""
        found = self._lines
        return model.Counts(
            total=self.job.counts.total,
            ok=found.ok,
            failed=found.failed,
            preempted=found.preempted,
            retried=found.retried,
        )

    def _used(self) -> model.Used:
        return model.Used(*self._lines.used)

    def put_back(self) -> None:
        """Let no further line run, and none end: the job waits again."""
        self.requeued = True
        self.over.set()

    def end(self, ending: model.Ending) -> None:
        """Let no further line run; the first ending stands."""
        if self.ending is None and not self.requeued:
            self.ending = ending
            self.over.set()

    async def refill(self, clock: clocks.Clock) -> None:
        """Read some lines from the file, if it has more; what can't be read now holds up its job alone.

        Args:
            clock: for the wait after a refusal.
        """
        self._reading = True
        told = False
        try:
            # What is enough may change until the file can be read again.
            while (found := await asyncio.to_thread(self._read, self._enough())) is None:
                if not told:
                    _LOG.error("job %d waits: its file can't be read", self.job.job_id)
                told = True
                await clock.sleep(_RETRY_S)
        finally:
            self._reading = False
        for work in found:
            if isinstance(work, lines.BadLine):
                data = _rejected(self.job.job_id, work)
                self._record(journal.Kind.FAILED, work.number, data)
            else:
                self.ready.append(work)
        self.look()

    def _read(self, enough: Collection[str]) -> list[client.Work | lines.BadLine] | None:
        """Return the next lines, none of models that have enough; None: the file can't be read now."""
        try:
            return self._reader.read(enough)
        except OSError:
            return None

    def look(self) -> None:
        """End the job as drained if nothing is left of it."""
        left = self.ready or self.sent or self.waiting or self._reading
        if self._reader.exhausted and not left:
            self.end(model.Ending.DRAINED)

    def begun(self, work: client.Work) -> partial.Partial | None:
        """Return what is known of a line's answer from its earlier tries."""
        return self._lines.partials.get(work.line.number)

    def told(self, work: client.Work) -> client.Told:
        """Return what the gateway is told of a line's tries, those of earlier lives of the runner too."""
        history = self._lines.history(work.line.number)
        return client.Told(history.preempted, history.lost)

    def heard(self, work: client.Work, frame: frames.Frame, version: str) -> None:
        """Keep ids of an answer under way, so that the line's next try goes on from them."""
        number = work.line.number
        found = self._lines.partials.get(number)
        if frame.kind is frames.Kind.PROMPT:
            if not frame.packed:
                return  # it goes on from what is known
            data = b""  # an answer that can't be resumed begins anew
            if not frame.payload:
                data = partial.Partial(version, frame.packed, frame.chars).prompt_data()
            if data or found is not None:
                self._record(journal.Kind.PROMPT, number, data)
        elif found is not None and not frame.choice:
            self._record(journal.Kind.TOKENS, number, found.tokens_data(frame))
            self.touch()

    def dispatched(self, work: client.Work) -> None:
        """Note that a line is being sent."""
        history = self._lines.history(work.line.number)
        self._record(journal.Kind.DISPATCHED, work.line.number, attempt=history.attempts + 1)

    def conclude(
        self, work: client.Work, answer: verdicts.Answer, judged: verdicts.Judged
    ) -> float | None:
        """Record what an answer means for its line.

        Returns:
            Seconds after which the line is tried again, or None if it is finished.
        """
        verdict = judged.verdict
        number = work.line.number
        self.blocked = ""
        if verdict is verdicts.Verdict.WAIT:
            self.blocked = _BLOCKED[judged.of_quota]
        if verdict is verdicts.Verdict.OK:
            if used := verdicts.used(judged.body):
                self._record(journal.Kind.USED, number, journal.used(*used))
            data = results.answered(
                self.job.job_id, work.line, answer.request_id, judged.body or {}
            )
            self._result(journal.Kind.SUCCEEDED, work, data)
            return None
        if verdict is verdicts.Verdict.REFUSED:
            if (
                number in self._lines.partials
            ):  # its version may be gone: the line itself is judged anew
                self._record(journal.Kind.PROMPT, number)
                return 0.0
            self._fail(work, answer, judged)
            return None
        history = self._lines.history(number)
        if verdict is verdicts.Verdict.PREEMPTED:
            self._record(journal.Kind.PREEMPTED, number)
            return self._later(number, 1, answer, self._options.max_wait_s)
        if verdict is verdicts.Verdict.WAIT:
            most_s = verdicts.longest_wait_s(
                judged,
                answer.retry_after_s,
                room_s=self._options.max_wait_s,
                quota_s=self._options.max_quota_wait_s,
            )
            return self._later(number, history.attempts, answer, most_s)
        if verdict is verdicts.Verdict.BYSTANDER:
            return self._later(number, 1, answer, self._options.max_wait_s)
        guilty = verdict is verdicts.Verdict.GUILTY
        if guilty and history.lost + 1 >= self._options.poison_after:
            words = f"set aside: {history.lost + 1} replicas were lost while they worked on it"
            poisonous = dataclasses.replace(judged, code="poisonous_line", message=words)
            self._fail(work, answer, poisonous)
            return None
        if history.counted + 1 >= self._options.retry_cap:
            words = f"given up after {history.counted + 1} failures: {judged.message}"
            self._fail(work, answer, dataclasses.replace(judged, message=words))
            return None
        lost = guilty or verdict is verdicts.Verdict.SUSPECT
        self._record(journal.Kind.LOST if lost else journal.Kind.RETRIED, number)
        return self._later(number, history.counted, answer, self._options.max_backoff_s)

    def _fail(self, work: client.Work, answer: verdicts.Answer, judged: verdicts.Judged) -> None:
        data = results.failed(
            self.job.job_id,
            work.line.number,
            work.line.custom_id,
            judged.code,
            judged.message,
            status=answer.status,
            request_id=answer.request_id,
            body=judged.body,
        )
        self._result(journal.Kind.FAILED, work, data)

    def _later(self, number: int, tries: int, answer: verdicts.Answer, most_s: float) -> float:
        return verdicts.backoff_s(
            max(1, tries),
            first_s=self._options.first_backoff_s,
            most_s=most_s,
            key=number,
            asked_s=answer.retry_after_s,
        )

    def _result(self, kind: journal.Kind, work: client.Work, data: bytes) -> None:
        self._record(kind, work.line.number, data, self._reader.number(work.line.model))

    def _record(self, kind: journal.Kind, number: int, data: bytes = b"", attempt: int = 0) -> None:
        entry = journal.Entry(kind, number, attempt, data)
        if self._lines.add(entry):
            self._writer.append(entry)

    async def keep_committing(self, clock: clocks.Clock, freed: Callable[[], None]) -> None:
        """Write what was recorded, again and again; everything recorded during a commit is the next.

        Args:
            clock: for the wait after a refusal.
            freed: called when the disk takes results again after it had refused.
        """
        while True:
            await self._dirty.wait()
            self._dirty.clear()
            counts, used, due = self.counts(), self._used(), self._writer.due()
            try:
                await asyncio.to_thread(self._writer.commit)
                if due is not None:
                    await asyncio.to_thread(self._writer.keep, due)
            except OSError as error:
                if not self.stalled:
                    _LOG.error("job %d: its journal can't be written: %s", self.job.job_id, error)
                self.stalled = f"journal: {error.strerror}"
                self._dirty.set()
                await clock.sleep(_RETRY_S)
                continue
            self._durable, self.used = counts, used
            if self.stalled:
                self.stalled = ""
                freed()
            if self._options.commit_s:
                await clock.sleep(self._options.commit_s)

    def touch(self) -> None:
        """Have what was recorded committed soon."""
        self._dirty.set()

    async def commit(self) -> None:
        """Return when all that was recorded is on disk.

        Raises:
            OSError: the disk refused; call it again.
        """
        await asyncio.to_thread(self._writer.commit)
        self._durable, self.used = self.counts(), self._used()

    async def seal(self) -> None:
        """Make the ending the journal's last word, with all results before it on disk.

        Raises:
            OSError: the disk refused; call it again.
        """
        if not self._lines.sealed and self.ending is not None:
            entry = journal.Entry(journal.Kind.SEALED, data=self.ending.encode())
            self._lines.add(entry)
            self._writer.append(entry)
        await asyncio.to_thread(self._writer.commit)
        self._durable, self.used = self.counts(), self._used()

    async def close(self) -> None:
        """Stop what runs, commit, let go of the journal."""
        tasks = list(self.tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.to_thread(self._writer.close)


def _rejected(job_id: int, bad: lines.BadLine) -> bytes:
    return results.failed(job_id, bad.number, bad.custom_id, bad.code, bad.message)


def source_of(
    job: model.BatchJob, folder: Path, options: settings.BatchJobsSettings
) -> results.Source:
    """Return what is read of a job's files."""
    rules = lines.Rules(model=job.model, endpoint=job.endpoint)
    return results.Source(folder, job.job_id, job.last_line, rules, options.max_line_bytes)


def open_journal(job: model.BatchJob, folder: Path) -> journal_writer.Writer:
    """Open a job's journal and take the lines into it that intake refused. Blocks.

    Raises:
        journal_writer.JournalBusy: another runner works on the job.
        journal.JournalError: it is damaged beyond a torn end.
        OSError: the job's files can't be read.
    """
    if not (folder / results.INPUT).is_file():
        raise FileNotFoundError(2, "the submitted file is gone", str(folder / results.INPUT))
    writer = journal_writer.Writer(folder / results.JOURNAL, job.last_line)
    try:
        for bad in intake.rejects(folder):
            entry = journal.Entry(journal.Kind.FAILED, bad.number, data=_rejected(job.job_id, bad))
            if not writer.recovered.sealed and writer.recovered.add(entry):
                writer.append(entry)
        writer.commit()
    except (IndexError, TypeError, ValueError) as error:
        writer.close()
        raise journal.JournalError(f"{folder / intake.REJECTS} is damaged: {error}") from error
    except BaseException:
        writer.close()
        raise
    return writer
