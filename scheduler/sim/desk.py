"""Requests of a simulated site: routed, waiting, refused, moved when their replica goes."""

import math

from scheduler.sim import engine, state

CANDIDATES = 16  # replicas that are compared for a request; the real router compares all


class Desk(state.State):
    """The gateways."""

    def route(self, call: engine.Call) -> None:
        """Send a request to the least loaded replica that has room, or let it wait."""
        if self.waiting[call.model] or not self._place(call):
            self.waiting[call.model].append(call)

    def _place(self, call: engine.Call) -> bool:
        mine = self.open[call.model]
        best: state.Running | None = None
        least = math.inf
        if len(mine) > CANDIDATES:
            start = self.order % len(mine)
            mine = (mine + mine)[start : start + CANDIDATES]
        for one in mine:
            held = one.engine
            load = held.backlog * held.step.prefill + held.running * 0.2
            if load < least and held.fits(call):
                best, least = one, load
        if best is None:
            return False
        best.engine.add(call, self.now)
        self.flying[call.model] += 1
        self.schedule(best)
        return True

    def serve(self, n: int) -> None:
        """Send what waits to replicas that have room."""
        queue = self.waiting[n]
        while queue and self._place(queue[0]):
            queue.popleft()

    def refuse(self) -> None:
        """Refuse what has waited too long."""
        for n, queue in enumerate(self.waiting):
            while queue and self.now - queue[0].arrival > self.site.slo.patience_s:
                call = queue.popleft()
                if call.arrival >= self.books.begin_s:
                    self.books.models[n].refused += 1

    def resume(self, one: state.Running) -> None:
        """Move what runs on a replica elsewhere: from prompt plus tokens already sent."""
        moved = one.engine.clear(self.now)
        self.schedule(one)
        for call in moved:
            self.flying[call.model] -= 1
            if call.arrival >= self.books.begin_s:
                self.books.models[call.model].resumed += 1
            self.waiting[call.model].appendleft(call)
        if moved:
            self.serve(one.model)
