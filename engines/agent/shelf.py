"""The node's weights, as the agent keeps them: staged ahead of need, and as an admin wants them.

One thing at a time, and never at a replica's cost: what is staged ahead of need evicts nothing.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence

from engines import settings
from engines.weights import stager
from scheduler.contracts import weights
from scheduler.contracts.v1 import control_pb2 as pb

LOOK_S = 10.0  # between two looks at the disk
KEPT = 64  # outcomes of acts that are still told
_log = logging.getLogger(__name__)


class Shelf:
    """Keeps the node's weights as they are wanted.

    Args:
        options: the [engines] settings.
        changed: called when the report is another one.
    """

    def __init__(self, options: settings.EnginesSettings, changed: Callable[[], None]) -> None:
        self._stager = stager.Stager(options)
        self._changed = changed
        self._stage: Sequence[pb.Weights] = ()
        self._acts: dict[str, pb.WeightsAct] = {}
        self._bell = asyncio.Event()
        self._given_up: dict[str, str] = {}
        self._waiting: dict[str, str] = {}
        self.held: tuple[weights.Held, ...] = ()
        self.done: dict[str, str] = {}

    def take(self, desired: pb.LeaseDesired) -> None:
        """Follow what the broker wants of the node's disk."""
        wanted = {act.act_id for act in desired.weights_acts}
        for act in desired.weights_acts:
            if act.act_id not in self.done:
                self._acts.setdefault(act.act_id, act)
        for act_id in self._acts.keys() - wanted:
            del self._acts[act_id]
        self._stage = list(desired.stage)
        self._bell.set()

    def report(self) -> list[pb.HeldWeights]:
        """Return what the disk holds, and what waits to come."""
        there = {item.uri for item in self.held if item.state == "staged"}
        waiting = [
            weights.Held(uri, "", "waiting", 0, reason=why)
            for uri, why in {**self._given_up, **self._waiting}.items()
            if uri not in there
        ]
        return [
            pb.HeldWeights(
                uri=item.uri,
                digest=item.digest,
                state=item.state,
                size=item.size,
                users=item.users,
                used_us=item.used_us,
                reason=item.reason,
            )
            for item in (*self.held, *waiting)
        ]

    async def run(self) -> None:
        """Work until cancelled."""
        while True:
            self._bell.clear()
            await self._look()
            work = self._next()
            if work is None:
                try:
                    await asyncio.wait_for(self._bell.wait(), LOOK_S)
                except TimeoutError:
                    self._given_up.clear()  # the disk may have room by now, the place be mended
                continue
            act, item = work
            await self._do(act, item)

    def _next(self) -> tuple[pb.WeightsAct | None, pb.Weights] | None:
        for act in self._acts.values():
            return act, act.weights
        there = {(item.uri, item.digest) for item in self.held if item.state == "staged"}
        places = {uri for uri, _ in there}
        for item in self._stage:
            known = (item.uri, item.digest) in there if item.digest else item.uri in places
            if not known and item.uri not in self._given_up:
                return None, item
        return None

    async def _do(self, act: pb.WeightsAct | None, item: pb.Weights) -> None:
        kind = "stage" if act is None else act.act
        try:
            outcome = await self._outcome(kind, item, ahead=act is None)
        except (stager.Refused, OSError) as error:
            outcome = str(error)
            if kind == "stage":
                self._given_up[item.uri] = outcome
        await self._look()  # what came of it is told with what the disk holds since
        if act is not None:
            self._acts.pop(act.act_id, None)
            self.done[act.act_id] = outcome
            for old in list(self.done)[:-KEPT]:
                del self.done[old]
        _log.info("weights: %s %s: %s", kind, item.uri, outcome)
        self._changed()

    async def _outcome(self, kind: str, item: pb.Weights, *, ahead: bool) -> str:
        if kind == "stage":
            try:
                done = await self._stager.fetch(
                    item.uri,
                    item.digest,
                    lambda line: self._tell(item.uri, line),
                    ahead=ahead,
                    patient=False,
                )
            finally:
                self._waiting.pop(item.uri, None)
            return f"staged, {done['fetched'] / stager.GB:.2f} GB in {done['seconds']:.1f} s"
        if kind == "rm":
            return await asyncio.to_thread(self._stager.remove, item.uri, item.digest)
        return await self._stager.verify(item.uri, item.digest)

    def _tell(self, uri: str, line: str) -> None:
        self._waiting[uri] = line
        self._changed()

    async def _look(self) -> None:
        try:
            found = await asyncio.to_thread(lambda: self._stager.open().held())
        except OSError as error:
            _log.warning("weights: %s", error)
            return
        if found != self.held:
            self.held = found
            self._changed()
