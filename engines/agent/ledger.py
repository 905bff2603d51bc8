"""A lease's GPU time by the agent's own clock: rows that tile its life, and what its replicas did meanwhile.

Wall time is read once; the rest is monotonic, so that a stepped clock neither loses time nor counts it
twice. Slurm's own numbers are never copied: they are what these are compared with. Between two cuts the
newest rows are written again and again with a later end, under the same key (`pulse`): what is appended
outlives a killed process, so an agent that is killed loses a second of its books and not a minute.
"""

import asyncio
import dataclasses
import logging

from engines.agent import spec
from engines.replica import work as works
from scheduler.contracts import clock, errors, fleet, usage

_R = fleet.ReplicaState
_SAID = {
    _R.STARTING: "starting",
    _R.WARM: "serving",
    _R.SERVING: "serving",
    _R.DRAINING: "draining",
    _R.ASLEEP: "asleep",
}
_NOTHING = works.Work()
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Held:
    """What a replica does now.

    Attributes:
        dedicated: the team whose floor it is, or "".
        work: its engine's counters; None if it does not tell. No change of it is a new interval.
    """

    model: str
    version: str
    gpus: int
    state: fleet.ReplicaState
    dedicated: str = ""
    work: works.Work | None = dataclasses.field(default=None, compare=False)


@dataclasses.dataclass(slots=True)
class _Interval:
    what: Held
    since_us: int
    seq: int
    seen: works.Work | None
    done: works.Work = _NOTHING

    def count(self, newest: works.Work | None) -> None:
        """Add what the engine has done since it was last seen; an engine that began anew starts at 0."""
        if newest is not None and self.seen is not None:
            before = self.seen if newest.steps >= self.seen.steps else works.Work()
            self.done = works.Work(
                self.done.busy_us + max(0, newest.busy_us - before.busy_us),
                self.done.prefill_tokens + max(0, newest.prefill_tokens - before.prefill_tokens),
                self.done.decode_tokens + max(0, newest.decode_tokens - before.decode_tokens),
                self.done.steps + newest.steps - before.steps,
            )
        self.seen = newest or self.seen


class Ledger:
    """Writes the rows.

    Args:
        told: the agent's spec.
        job: what Slurm says of the job.
        node: this node.
        sink: where the rows go.
        time: the clock.
    """

    def __init__(
        self,
        told: spec.AgentSpec,
        job: spec.Job,
        node: str,
        sink: usage.UsageSink,
        time: clock.Clock,
    ) -> None:
        self._told = told
        self._job = job
        self._node = node
        self._sink = sink
        self._clock = time
        self._wall_us, self._monotonic = time.wall_us(), time.monotonic()
        self.started_us = job.started_us or self._wall_us
        self._until_us = self.started_us
        self._seq = 0
        self._replicas: dict[str, _Interval] = {}
        self._next_seq: dict[str, int] = {}
        self._late: list[usage.Row] = []

    def now_us(self) -> int:
        """Return UTC µs on a clock that does not step."""
        elapsed = self._clock.monotonic() - self._monotonic
        return max(self.started_us, self._wall_us + round(elapsed * 1_000_000))

    def observe(self, replicas: dict[str, Held]) -> None:
        """Take what every replica of the lease does now; changes become rows."""
        now = self.now_us()
        for replica_id, interval in list(self._replicas.items()):
            what = replicas.get(replica_id)
            if what is not None:
                interval.count(what.work)
            if what != interval.what:
                self._close(replica_id, interval, now)
        for replica_id, what in replicas.items():
            if what.state in _SAID and replica_id not in self._replicas:
                seq = self._next_seq.get(replica_id, 0)
                self._replicas[replica_id] = _Interval(what, now, seq, what.work)

    def _close(self, replica_id: str, interval: _Interval, now: int) -> None:
        del self._replicas[replica_id]
        if now > interval.since_us:
            self._next_seq[replica_id] = interval.seq + 1
            self._append(self._replica_row(replica_id, interval, now))

    def _replica_row(self, replica_id: str, interval: _Interval, now: int) -> usage.ReplicaTimeRow:
        what, done = interval.what, interval.done
        return usage.ReplicaTimeRow(
            cluster=self._told.cluster,
            lease_id=self._told.lease_id,
            slurm_job_id=self._job.job_id,
            replica_id=replica_id,
            model=what.model,
            version=what.version,
            gpus=what.gpus,
            start_us=interval.since_us,
            end_us=now,
            state=_SAID[what.state],
            seq=interval.seq,
            # The counters are read a moment before the clock: never more than the interval has.
            busy_us=min(done.busy_us, now - interval.since_us),
            prefill_tokens=done.prefill_tokens,
            decode_tokens=done.decode_tokens,
            steps=done.steps,
            measured=int(interval.seen is not None),
            dedicated=what.dedicated,
        )

    def _gpu_row(self, now: int) -> usage.GpuRow:
        return usage.GpuRow(
            cluster=self._told.cluster,
            lease_id=self._told.lease_id,
            slurm_job_id=self._job.job_id,
            run=self._job.run,
            node=self._node,
            team=self._told.team,
            kind=self._told.kind,
            gpus=self._told.gpus,
            start_us=self._until_us,
            end_us=now,
            seq=self._seq,
            parts=self._told.parts,
        )

    def cut(self) -> None:
        """Append the rows of the time since the last cut, which ends now."""
        now = self.now_us()
        for replica_id, interval in list(self._replicas.items()):
            self._close(replica_id, interval, now)
            again = self._next_seq.get(replica_id, interval.seq)
            self._replicas[replica_id] = _Interval(interval.what, now, again, interval.seen)
        if now > self._until_us:
            self._append(self._gpu_row(now))
            self._until_us, self._seq = now, self._seq + 1

    def pulse(self) -> None:
        """Append the rows under way as they are now; the next ones have the same key and a later end."""
        if self._late:
            return  # there was no room for rows that matter more
        now = self.now_us()
        rows: list[usage.Row] = [
            self._replica_row(replica_id, interval, now)
            for replica_id, interval in self._replicas.items()
            if now > interval.since_us
        ]
        if now > self._until_us:
            rows.append(self._gpu_row(now))
        try:
            for row in rows:
                self._sink.append(row)
        except errors.RecordingUnavailable as error:
            _log.error("GPU time is not written at the moment: %s", error.message)

    def _append(self, row: usage.Row) -> None:
        """Append a row; where there is no room it is kept and tried again with the next."""
        self._late.append(row)
        try:
            while self._late:
                self._sink.append(self._late[0])
                self._late.pop(0)
        except errors.RecordingUnavailable as error:
            _log.error("%d rows of GPU time wait: %s", len(self._late), error.message)

    async def sync(self) -> None:
        """Bring the rows to disk, as far as it has room."""
        try:
            await self._sink.sync()
        except errors.RecordingUnavailable as error:
            _log.error("rows of GPU time are not on disk yet: %s", error.message)

    async def run(self, every_s: float, pulse_s: float) -> None:
        """Pulse again and again, cut and sync each ``every_s``."""
        cut_at = self._clock.monotonic() + every_s
        while True:
            await self._clock.sleep(min(pulse_s, every_s))
            if self._clock.monotonic() < cut_at:
                self.pulse()
                continue
            cut_at = self._clock.monotonic() + every_s
            self.cut()
            await asyncio.shield(self.sync())
