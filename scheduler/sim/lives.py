"""The lives of simulated replicas: started, woken, given a role, drained, parked, gone."""

from collections.abc import Callable

from scheduler.contracts import fleet, ids
from scheduler.core import actions, escalation, replicas, snapshot
from scheduler.sim import desk, state

WAKE_S = 2.0  # beside the copy of the weights: remap, KV cache, first step
COLD_S = 60.0  # a start that took longer was none out of a parked process
S = fleet.ReplicaState


class Lives(desk.Desk):
    """The agents and their slots."""

    def _start(self, action: actions.StartReplica) -> None:
        held = self.leases[action.lease_id]
        slot_id = action.slot_id
        if slot_id is None:
            held.number += 1
            slot_id = ids.SlotId(f"{action.lease_id}.s{held.number}")
            taken = sum(slot.gpus for slot in held.slots.values())
            if taken + action.spec.gpus > held.lease.gpus:
                raise AssertionError(f"{action.lease_id}: more GPUs than it has")
            held.slots[slot_id] = snapshot.Slot(
                slot_id, action.lease_id, action.spec.gpus, state=replicas.SlotState.READY
            )
        self.number += 1
        n = self.index[action.spec.model]
        replica = fleet.Replica(
            ids.ReplicaId(f"r-{self.number:012x}"),
            state.CLUSTER,
            action.lease_id,
            slot_id,
            held.job.job_id,
            held.lease.nodes[0] if held.lease.nodes else "",
            action.spec,
            S.STARTING,
            action.role,
        )
        known = snapshot.KnownReplica(replica, True, action.role)
        one = state.Running(known, n, self._engine(self.site.models[n]), self.now, role=action.role)
        one.engine.at = self.now
        self.replicas[replica.replica_id] = one
        takes = 0.0 if self.instant else float(self.draw.uniform(*self.site.fleet.start_s))
        one.ready_s = takes
        one.budget_s = escalation.budget_s(self.starts[n], self.site.fleet.start_s[1])
        self._later(one, takes, self._serving)

    def _wake(self, action: actions.WakeReplica) -> None:
        one = self.replicas[action.replica_id]
        one.state, one.run, one.parks = S.STARTING, True, False
        one.role, one.ordered = action.role, self.now
        one.ready_s = self._wake_s(one.model)
        one.budget_s = escalation.budget_s((), one.ready_s)
        self._later(one, one.ready_s, self._serving)
        if self.now >= self.books.begin_s:
            self.books.reclaim[2].append(one.ready_s)

    def _wake_s(self, n: int) -> float:
        shape = self.site.models[n].shape
        return WAKE_S + shape.weights_gb / shape.gpus / self.site.fleet.host_gb_per_s

    def _later(
        self, one: state.Running, seconds: float, act: Callable[[state.Running], None]
    ) -> None:
        """Do something to a replica later, unless it is told otherwise before."""
        one.due += 1
        due = one.due

        def happen(now: float) -> None:
            if one.due == due and one.known.replica.replica_id in self.replicas:
                act(one)

        if seconds <= 0:
            happen(self.now)
        else:
            self.at(self.now + seconds, happen)

    def _serving(self, one: state.Running) -> None:
        one.state = S.SERVING
        one.engine.advance(self.now)
        if one.ready_s > COLD_S:
            self.starts[one.model].append(one.ready_s)
            if self.now >= self.books.begin_s and one.role is not fleet.Role.BATCH:
                self.books.reclaim[3].append(self.now - one.ordered)
        self._role(one, one.role)

    def _role(self, one: state.Running, role: fleet.Role) -> None:
        before, one.role = one.role, role
        mine = self.open[one.model]
        takes = one.state is S.SERVING and role is not fleet.Role.BATCH
        if takes and one not in mine:
            mine.append(one)
        elif not takes and one in mine:
            mine.remove(one)
        if one.state is S.SERVING:
            turned = before is fleet.Role.BATCH and role is not fleet.Role.BATCH
            if turned and self.now >= self.books.begin_s:
                # One step of the deep batch, then its seats are free.
                self.books.reclaim[1].append(one.engine.step_ms / 1000)
            self.feed(one)
        if takes:
            self.serve(one.model)

    def feed(self, one: state.Running) -> None:
        """Give a replica the batch work that its role allows."""
        feed = "none"
        if one.state is S.SERVING and self.backlog[one.model]:
            if one.role is fleet.Role.BATCH:
                feed = "all"
            elif one.role is fleet.Role.SHARED and 0 in self.settings.rungs:
                feed = "shared"
        one.engine.set_feed(feed, self.now)
        self.schedule(one)

    def _drain(self, one: state.Running, seconds: float, parks: bool) -> None:
        one.run, one.parks = False, parks
        if one.state is not S.SERVING:
            self._gone(one)
            return
        one.state = S.DRAINING
        self._role(one, one.role)
        one.engine.set_feed("none", self.now)
        self.schedule(one)
        if one.engine.running == 0:
            self._later(one, 0.0, self._drained)
        else:
            self._later(one, seconds, self._drained)

    def _drained(self, one: state.Running) -> None:
        self.resume(one)
        if one.parks:
            one.state, one.run, one.parks = S.ASLEEP, True, False
            one.engine.advance(self.now)
        else:
            self._gone(one)

    def drained(self, one: state.Running) -> None:
        """The last stream of a draining replica has ended."""
        if one.state is S.DRAINING and one.engine.running == 0:
            self._later(one, 0.0, self._drained)

    def _gone(self, one: state.Running) -> None:
        if one.known.replica.replica_id not in self.replicas:
            return
        self.collect(one)
        del self.replicas[one.known.replica.replica_id]
        if one in self.open[one.model]:
            self.open[one.model].remove(one)
        one.state = S.STOPPED
        self.resume(one)
        one.event = -1

    def collect(self, one: state.Running) -> None:
        """Move a replica's running totals into the books."""
        held = one.engine
        held.advance(self.now)
        gpus = self.site.models[one.model].shape.gpus
        busy, wasted = held.busy_s - one.told_busy, held.wasted_s - one.told_wasted
        batch = held.batch_tokens - one.told_batch
        one.told_busy, one.told_wasted, one.told_batch = (
            held.busy_s,
            held.wasted_s,
            held.batch_tokens,
        )
        self._done(one.model, batch)
        if not self.books.counting:
            return
        if held.preempted > one.told_preempted:
            # An aborted sequence leaves its seat with the step that runs.
            self.books.reclaim[0].append(held.step_ms / 1000)
            one.told_preempted = held.preempted
        mine = self.books.models[one.model]
        mine.busy_s += max(0.0, busy - wasted) * gpus
        mine.useful_s += batch / self.batch_rate[one.model] * gpus
        mine.batch_tokens += batch
        self.books.waste["recompute"] += min(busy, wasted) * gpus

    def _done(self, n: int, tokens: float) -> None:
        """Take finished batch tokens off the jobs, the earliest deadline first."""
        jobs = self.backlog[n]
        while jobs and tokens > 0:
            deadline, left = jobs[0]
            if left > tokens:
                jobs[0] = (deadline, left - tokens)
                return
            tokens -= left
            jobs.pop(0)
            if self.now >= self.books.begin_s:
                if self.now <= deadline:
                    self.books.jobs_met += 1
                else:
                    self.books.jobs_missed += 1
