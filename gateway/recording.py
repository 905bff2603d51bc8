"""The gateway's side of the usage record: OPEN at the dispatch, CLOSE exactly once."""

import dataclasses
import logging
from typing import TYPE_CHECKING

from gateway import comparing, emitted, metrics, waiting
from scheduler.contracts import clock, errors, fleet, frames, quota, requests, usage

if TYPE_CHECKING:
    from gateway import dispatch

_log = logging.getLogger(__name__)
_FORGIVEN = frozenset({usage.Outcome.OK, usage.Outcome.REPLICA_LOST})  # if all fails in the end
_OURS = frozenset({usage.Outcome.PREEMPTED, usage.Outcome.REPLICA_LOST, usage.Outcome.ERROR})
_LEFT = {
    usage.Outcome.CANCELLED: "its batch job was cancelled",
    usage.Outcome.EXPIRED: "its batch job's time was over",
    usage.Outcome.PREEMPTED: "its batch job was put back into the queue",
}
# Of a batch line: its team gets a whole answer or nothing, and pays for the try that comes to one. What its
# runner left is the team's only where the team itself has ended the job, see `Recorder.left`.
_OURS_OF_LINES = _OURS | {
    usage.Outcome.CLIENT_GONE, usage.Outcome.CANCELLED, usage.Outcome.EXPIRED,
}  # fmt: skip


def outcome_of(error: errors.ForebayError) -> usage.Outcome:
    """Return how an attempt that ended in ``error`` is recorded."""
    match error:
        case errors.Cancelled():
            return usage.Outcome.CANCELLED
        case errors.Preempted():
            return usage.Outcome.PREEMPTED
        case errors.ReplicaLost():
            return usage.Outcome.REPLICA_LOST
        case errors.Expired():
            return usage.Outcome.EXPIRED
        case errors.BadRequest() | errors.NotFound() | errors.Shed() | errors.NoReplica():
            return usage.Outcome.REFUSED
        case errors.QuotaExceeded():
            return usage.Outcome.REFUSED
        case _:
            return usage.Outcome.ERROR


def own_doing(why: errors.ForebayError, request: requests.InferenceRequest) -> bool:
    """Return whether a request ended as its caller wanted: cancelled, unread, or past the time it named."""
    named = request.deadline_us is not None
    return isinstance(why, errors.Cancelled) or (named and isinstance(why, errors.Expired))


class Attempt:
    """One dispatch's record, from OPEN to CLOSE.

    Args:
        recorder: where its rows go.
        identity: which attempt it is.
        sent: what the request's client has got, this attempt's part included as it comes.
        resumed: it goes on from what earlier attempts of the request have sent and recorded.
    """

    def __init__(
        self,
        recorder: "Recorder",
        identity: usage.Identity,
        sent: emitted.Emitted,
        *,
        resumed: bool,
    ) -> None:
        self._recorder = recorder
        self._sent = sent
        self._resumed = resumed
        self._had = sent.tokens  # when it began: this attempt computes none of them but as a prompt
        self._start = (
            self._had if resumed else 0
        )  # a whole answer from a runner's journal is paid whole
        self._computed = 0  # prompt tokens, and cached ones among them, as its PROMPT frame says
        self._cached = 0
        self.identity = identity
        self.life = ""  # its replica and which start of that
        self.closed = False
        self.first_token_us = 0

    def prompt(self, frame: frames.Frame) -> None:
        """Take the PROMPT frame."""
        self._sent.begin(frame)
        self._cached = frame.chars
        self._computed = self._sent.prompt_tokens + self._had

    def first_token(self) -> None:
        """Note when the first token came."""
        self.first_token_us = self._recorder.clock.wall_us()

    def close(
        self,
        outcome: usage.Outcome,
        reason: str = "",
        counted: frames.End | frames.Error | None = None,
        *,
        payer: usage.Payer | None = None,
        planned: bool = False,
        died: bool = False,
    ) -> usage.UsageRow | None:
        """Append the CLOSE row, and return it; only the first call does.

        Args:
            outcome: how it ended.
            reason: one line on why it did not end ok.
            counted: what the replica counted; without it, what came through here.
            payer: who pays, if not who usually does for this outcome.
            planned: its replica left as it was told to, which says nothing of the version.
            died: its replica was lost, and with it all that it had.

        Raises:
            errors.RecordingUnavailable: the row can't be kept.
        """
        if self.closed:
            return None
        self.closed = True
        ours = _OURS_OF_LINES if self.identity.batch_job_id else _OURS
        payer = self._recorder.payer or payer
        payer = payer or (usage.Payer.PLATFORM if outcome in ours else usage.Payer.TEAM)
        prompt, cached, output, waste = self._counts(counted)
        if payer is usage.Payer.PLATFORM:
            output, waste = output + waste, 0  # it pays all of it anyway
        if self._resumed:  # an earlier attempt's row has the prompt: this is the recomputation
            prompt, cached, waste = 0, 0, waste + max(0, prompt - cached)
        spent = quota.Spent(max(0, prompt - cached), cached, output)
        row = usage.UsageRow(
            kind=usage.RowKind.CLOSE,
            identity=self.identity,
            outcome=outcome,
            uncached_prompt_tokens=spent.uncached_prompt_tokens,
            cached_prompt_tokens=spent.cached_prompt_tokens,
            output_tokens=spent.output_tokens,
            first_token_us=self.first_token_us,
            ended_us=self._recorder.clock.wall_us(),
            payer=payer,
            reason=reason,
            waste_tokens=waste,
        )
        if payer is usage.Payer.TEAM:
            self._sent.spend(spent)
            if outcome in _FORGIVEN:
                self._sent.owed += (row,)
        elif outcome is usage.Outcome.CLIENT_GONE:
            self._sent.left = row
        self._recorder.count(self.identity, spent, waste)
        if not planned:
            self._recorder.comparing.note(row, self.life if died else "")
        self._recorder.append(row)
        return row

    def refused(self) -> None:
        """Note that the replica had no seat: nothing was done, and the attempt is made elsewhere or later."""
        self.closed = True
        served = self._recorder.numbers.served(self.identity.model, self.identity.tier)
        served.no_seat.inc()

    def _counts(self, counted: frames.End | frames.Error | None) -> tuple[int, int, int, int]:
        """Return its prompt tokens, cached ones among them, new output, and output lost on the way."""
        known = max(0, self._sent.tokens - self._had)
        if isinstance(counted, frames.End):
            output = counted.output_tokens - self._start
            if self._resumed:
                return self._computed, self._cached, output, 0
            return counted.prompt_tokens, counted.cached_tokens, output, 0
        if counted is not None:
            lost = max(0, counted.output_tokens - known)
            return counted.prompt_tokens, counted.cached_tokens, known, lost
        if not self.first_token_us:
            return 0, 0, 0, 0
        return self._computed, self._cached, known, 0


class Recorder:
    """Appends rows for one gateway worker.

    Args:
        sink: where they go.
        time: the worker's clock.
        cluster: of rows without a replica.
        numbers: where Prometheus is told.
        payer: of all rows, None: as each outcome says.
    """

    def __init__(
        self,
        sink: usage.UsageSink,
        time: clock.Clock,
        cluster: str,
        numbers: metrics.Numbers,
        payer: usage.Payer | None = None,
    ) -> None:
        self.numbers = numbers
        self.payer = payer
        self._sink = sink
        self._cluster = cluster
        self._unsynced = False
        self._troubled = False  # the disk, as far as it was logged
        self.clock = time
        self.comparing = comparing.Comparing()

    def beside(self, numbers: metrics.Numbers, payer: usage.Payer) -> "Recorder":
        """Return a recorder into the same sink for what ``payer`` pays whatever comes of it."""
        return Recorder(self._sink, self.clock, self._cluster, numbers, payer)

    def ready(self) -> None:
        """Raise `errors.RecordingUnavailable` if a row could not be kept now."""
        self._sink.ready()

    def count(self, identity: usage.Identity, spent: quota.Spent, waste: int) -> None:
        """Tell Prometheus what an attempt has computed."""
        if spent.tokens or waste:
            cached = spent.cached_prompt_tokens
            prompt = spent.uncached_prompt_tokens + cached
            served = self.numbers.served(identity.model, identity.tier)
            served.tokens.add(prompt, cached, spent.output_tokens, waste)

    def append(self, row: usage.UsageRow) -> None:
        """Buffer a row for the next `sync`."""
        self._sink.append(row)
        self._unsynced = True

    def forgive(self, sent: emitted.Emitted) -> None:
        """Let the platform pay for the parts of an answer that was not completed by no fault of its team's.

        A second CLOSE of each attempt, a µs later: readers take the later one (`accounting.merge`).
        """
        owed, sent.owed = sent.owed, ()
        for row in owed:
            spent = quota.Spent(
                row.uncached_prompt_tokens, row.cached_prompt_tokens, row.output_tokens
            )
            ok = row.outcome is usage.Outcome.OK
            amended = dataclasses.replace(
                row,
                outcome=usage.Outcome.ERROR if ok else row.outcome,
                reason="its end could not be given" if ok else row.reason,
                payer=usage.Payer.PLATFORM,
                output_tokens=row.output_tokens + row.waste_tokens,
                waste_tokens=0,
                ended_us=row.ended_us + 1,
            )
            try:
                self.append(amended)
            except errors.RecordingUnavailable as error:
                _log.error("%s stays on its team's bill: %s", row.identity.request_id, error)
            else:
                sent.spend(spent, -1)

    def left(self, sent: emitted.Emitted, why: usage.Outcome) -> None:
        """Say why a batch line's runner left it, in a second CLOSE of the attempt as in `forgive`.

        Args:
            sent: the line's.
            why: `CLIENT_GONE` if nobody knows; then the row stays as it is.
        """
        row, sent.left = sent.left, None
        words = _LEFT.get(why)
        if row is None or words is None:
            return
        if why is not usage.Outcome.PREEMPTED and row.payer is usage.Payer.PLATFORM:
            self._charge(sent, row, why, words)
            return
        amended = dataclasses.replace(row, outcome=why, reason=words, ended_us=row.ended_us + 1)
        try:
            self.append(amended)
        except errors.RecordingUnavailable as error:
            _log.error("why %s was left is not kept: %s", row.identity.request_id, error)

    def _charge(
        self, sent: emitted.Emitted, row: usage.UsageRow, why: usage.Outcome, words: str
    ) -> None:
        """Let its team pay for what was computed of a batch line that it gave up itself.

        As much as of any answer that is left: the prompt, and all tokens so far, those of the runner's
        journal among them, whose tries the platform paid.
        """
        cached = min(sent.cached_tokens, sent.prompt_tokens)
        spent = quota.Spent(sent.prompt_tokens - cached, cached, sent.tokens)
        amended = dataclasses.replace(
            row,
            outcome=why,
            payer=usage.Payer.TEAM,
            reason=words,
            uncached_prompt_tokens=spent.uncached_prompt_tokens,
            cached_prompt_tokens=spent.cached_prompt_tokens,
            output_tokens=spent.output_tokens,
            ended_us=row.ended_us + 1,
        )
        try:
            self.append(amended)
        except errors.RecordingUnavailable as error:
            _log.error("%s is not on its team's bill: %s", row.identity.request_id, error)
        else:
            sent.spend(spent)

    async def sync(self) -> None:
        """Return when all rows are on disk.

        Raises:
            errors.RecordingUnavailable: the disk refused them.
        """
        self._unsynced = False
        try:
            await self._sink.sync()
        except BaseException:
            self._unsynced = True  # also where who waited has left: `flush` waits instead
            raise

    async def flush(self) -> None:
        """Sync what nobody waits for."""
        if self._unsynced:
            await self.kept()

    async def kept(self) -> None:
        """Wait for all rows as `sync` does; a disk in trouble is logged once, and refuses requests itself."""
        try:
            await self.sync()
        except errors.RecordingUnavailable as error:
            if not self._troubled:
                _log.error("usage rows are not on disk yet: %s", error.message)
            self._troubled = True
        else:
            self._troubled = False

    def open(self, job: "dispatch.Job", grant: waiting.Grant) -> Attempt:
        """Append the OPEN row of a dispatch.

        Raises:
            errors.RecordingUnavailable: it can't be kept; dispatch nothing.
        """
        identity = self._identity(job.request, job.number, job.version, grant.replica)
        self.append(usage.UsageRow(usage.RowKind.OPEN, identity))
        made = Attempt(self, identity, job.sent, resumed=job.resumed)
        made.life = f"{grant.replica.replica_id}.{grant.replica.incarnation}"
        return made

    def undispatched(
        self,
        request: requests.InferenceRequest,
        number: int,
        outcome: usage.Outcome,
        reason: str,
    ) -> usage.UsageRow | None:
        """Append the row of a request that ended before it reached a replica; it costs nothing."""
        identity = self._identity(request, number, request.version or "", None)
        try:
            return Attempt(self, identity, emitted.Emitted(), resumed=False).close(
                outcome, reason, payer=usage.Payer.TEAM
            )
        except errors.RecordingUnavailable as error:
            _log.error("row of %s is not kept: %s", request.request_id, error.message)
            return None

    def _identity(
        self,
        request: requests.InferenceRequest,
        number: int,
        version: str,
        replica: fleet.Replica | None,
    ) -> usage.Identity:
        caller, batch = request.caller, request.batch
        return usage.Identity(
            request_id=request.request_id,
            attempt=number,
            cluster=replica.cluster if replica else self._cluster,
            team=caller.team,
            user=caller.user,
            key_id=caller.key_id,
            model=request.model,
            version=version,
            adapter=request.adapter or "",
            endpoint=request.endpoint._value_,
            tier=request.tier._value_,
            replica_id=replica.replica_id if replica else "",
            lease_id=replica.lease_id if replica else "",
            slurm_job_id=replica.slurm_job_id if replica else "",
            arrived_us=request.arrived_us,
            started_us=self.clock.wall_us() if replica else 0,
            batch_job_id=batch.job_id if batch else 0,
            custom_id=batch.custom_id if batch else "",
            caller_request_id=request.caller_request_id or "",
        )
