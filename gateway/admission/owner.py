"""Admits for workers of other processes: each link is a worker, and its end gives back all that it holds."""

import asyncio
import hmac
import logging
from collections.abc import Callable

from gateway import local_room, local_waiter
from gateway.admission import link, messages
from scheduler.contracts import errors, fleet, quota, wire
from scheduler.contracts.v1 import control_pb2 as pb

HELLO_S = 5.0  # who has not said the token by then is no worker of ours
REGISTER_S = 1.0  # how long a new owner waits for workers to say what runs already
_log = logging.getLogger(__name__)


class Owner:
    """Serves a `LocalRoom` to workers.

    Args:
        room: the queues.
        token: what a worker must say first.
        name: this gateway's, for logs.
        workers: how many workers of this host will come; until then, or for a second, nobody gets a turn,
            since what runs already is not known yet.
    """

    def __init__(self, room: local_room.LocalRoom, token: str, name: str, workers: int = 0) -> None:
        self.room = room
        self._token = token
        self._name = name
        self._missing = workers
        self._sessions: dict[link.AnyLink, _Session] = {}
        if workers:
            room.hold(room.now + REGISTER_S)

    @property
    def workers(self) -> int:
        """How many workers are connected."""
        return sum(session.welcome for session in self._sessions.values())

    def accept(self) -> "link.Link[messages.FromWorker]":
        """Return the protocol of a new connection."""
        made = link.Link(messages.from_worker, self._heard, self._lost)
        self._sessions[made] = _Session(self.room, made)
        asyncio.get_running_loop().call_later(HELLO_S, self._expect, made)
        return made

    def close(self) -> None:
        """End every connection."""
        for one in list(self._sessions):
            one.close()

    def _heard(self, one: "link.Link[messages.FromWorker]", message: messages.FromWorker) -> None:
        session = self._sessions[one]
        if session.welcome:
            session.heard(message)
            return
        if not isinstance(message, messages.Hello):
            raise TypeError("the first word must be Hello")
        one.peer = message.worker
        given = message.token.encode("utf-8", "surrogatepass")
        if message.version != messages.VERSION or not hmac.compare_digest(
            given, self._token.encode()
        ):
            _log.error("admission: %s has another token or release; refused", message.worker)
            one.abort()
            return
        session.welcome = True
        one.say(messages.Welcome(self._name))
        _log.info("admission: worker %s has come", message.worker)
        # What it holds already follows in the same breath, and is read before anything is placed.
        self._missing -= 1
        if self._missing == 0:
            asyncio.get_running_loop().call_later(0.05, lambda: self.room.hold(self.room.now))

    def _expect(self, one: link.AnyLink) -> None:
        session = self._sessions.get(one)
        if session is not None and not session.welcome:
            one.abort()

    def _lost(self, one: link.AnyLink) -> None:
        session = self._sessions.pop(one, None)
        if session is not None:
            if session.welcome:
                _log.info("admission: worker %s has gone, with %d requests", one.peer, len(session))
            session.end()


class _Session:
    """What one worker has waiting and running."""

    def __init__(self, room: local_room.LocalRoom, to: link.AnyLink) -> None:
        self._room = room
        self._to = to
        self._waiters: dict[str, local_waiter.LocalWaiter] = {}
        self._numbers: dict[tuple[str, int, str], int] = {}
        self.welcome = False
        self._acts: dict[type, Callable[..., None]] = {
            messages.Enter: self._enter,
            messages.Adopt: self._adopt,
            messages.Again: self._again,
            messages.Close: self._close,
            messages.Prefilled: self._prefilled,
            messages.Passed: self._passed,
            messages.Leave: self._leave,
            messages.Full: lambda word: room.said_full(word.replica_id, word.tier, word.adapter),
            messages.Suspect: lambda word: room.suspected(word.replica_id, word.incarnation),
            messages.FirstToken: lambda word: room.first_token(word.model, word.ms),
            messages.Cancel: self._cancel,
        }

    def __len__(self) -> int:
        return len(self._waiters)

    def heard(self, message: messages.FromWorker) -> None:
        """Do what a worker says; of a request that has left meanwhile it may say anything."""
        self._acts[type(message)](message)

    def end(self) -> None:
        """Give back everything: the worker is gone, and with it its clients."""
        waiters, self._waiters = self._waiters, {}
        for waiter in waiters.values():
            waiter.ring = None
            self._room.leave(waiter)

    def _enter(self, word: messages.Enter) -> None:
        request_id = word.asking.request_id
        enter = self._room.rejoin if word.turned else self._room.enter
        try:
            waiter = enter(word.asking)
        except errors.ForebayError as error:
            self._refuse(request_id, error)
            return
        except Exception:
            # Not the link's fault: it would come back with the same request for ever.
            _log.exception("admission of %s failed", request_id)
            self._refuse(request_id, errors.Internal("admission failed; please report this"))
            return
        self._waiters[request_id] = waiter
        self._watch(waiter)

    def _watch(self, waiter: local_waiter.LocalWaiter) -> None:
        request_id = waiter.asking.request_id

        def settled() -> None:
            try:
                grant = waiter.collect()
            except errors.ForebayError as error:
                self._refuse(request_id, error)
                return
            if grant is not None:
                number = self._number(grant.replica)
                self._to.say(messages.Granted(request_id, number, grant.version, grant.limits))

        waiter.ring, waiter.end = settled, lambda name: self._to.say(messages.Ended(name))
        settled()

    def _adopt(self, word: messages.Adopt) -> None:
        replica = wire.replica_from_pb(pb.Replica.FromString(word.replica))
        try:
            waiter = self._room.adopt(word.asking, replica, word.served)
        except errors.ForebayError as error:
            # It runs all the same; its load shows in the replica's own statistics.
            _log.warning("admission: %s can't be counted: %s", word.asking.request_id, error)
            return
        self._waiters[word.asking.request_id] = waiter
        self._watch(waiter)

    def _again(self, word: messages.Again) -> None:
        waiter = self._waiters.get(word.request_id)
        if waiter is not None:
            self._room.again(waiter, word.version, word.avoid, lost=word.lost)

    def _prefilled(self, word: messages.Prefilled) -> None:
        waiter = self._waiters.get(word.request_id)
        if waiter is not None and waiter.open is not None:
            waiter.open.prefilled()

    def _passed(self, word: messages.Passed) -> None:
        waiter = self._waiters.get(word.request_id)
        if waiter is not None and waiter.open is not None:
            waiter.open.passed()

    def _close(self, word: messages.Close) -> None:
        waiter = self._waiters.get(word.request_id)
        if waiter is not None and waiter.open is not None:
            waiter.open.close()

    def _leave(self, word: messages.Leave) -> None:
        waiter = self._waiters.pop(word.request_id, None)
        if waiter is None:
            return
        waiter.ring = None
        spent = quota.Spent(
            word.uncached_prompt_tokens, word.cached_prompt_tokens, word.output_tokens
        )
        self._room.leave(waiter, spent)

    def _cancel(self, word: messages.Cancel) -> None:
        found = self._room.cancelled(word.request_id, word.team, word.user)
        self._to.say(messages.Cancelled(word.number, found))

    def _refuse(self, request_id: str, error: errors.ForebayError) -> None:
        self._to.say(
            messages.Refused(
                request_id,
                error.code,
                error.message,
                error.retry_after_s,
                error.param,
                error.limits,
                error.blame if isinstance(error, errors.ReplicaLost) else None,
            )
        )

    def _number(self, replica: fleet.Replica) -> int:
        """Return the number of a replica, telling the worker of it first if it is new."""
        key = (replica.replica_id, replica.incarnation, replica.address)
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self._numbers)
            bare = wire.replica_to_pb(replica).SerializeToString()
            self._to.say(messages.Known(number, bare))
        return number
