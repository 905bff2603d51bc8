"""API keys: made once, shown once, kept as a hash; and the store that finds their callers.

Token: ``fbk_<id>_<secret>``. The id is public (it is in every usage record), the secret has 192 bits,
so a plain SHA-256 is enough: there is nothing to guess.
"""

import asyncio
import concurrent.futures
import dataclasses
import hashlib
import hmac
import secrets

import sqlalchemy as sa
from sqlalchemy import exc

from scheduler.contracts import clock, errors, requests
from scheduler.runtime.registry import database, tables

_TIERS = frozenset(requests.Tier)
PREFIX = "fbk"
PATIENCE_S = 0.5  # a key that is known waits so long for the registry's newest word
UNKNOWN_S = 5.0  # one that is not waits so long for any
RETRY_S = 2.0
_LOOKUPS = 1_000  # at once, of keys not known yet: whoever guesses keys must not fill memory
ID_BYTES = 6
SECRET_BYTES = 24


@dataclasses.dataclass(frozen=True, slots=True)
class Key:
    """An API key without its secret."""

    key_id: str
    team: str
    user: str
    tiers: tuple[requests.Tier, ...]
    models: tuple[str, ...] = ()
    admin: bool = False
    coordinator: bool = False
    service: bool = False
    comment: str = ""
    created_us: int = 0
    expires_us: int = 0
    revoked_us: int = 0

    def caller(self) -> requests.Caller:
        """Return who this key stands for."""
        return requests.Caller(
            team=self.team,
            user=self.user,
            key_id=self.key_id,
            tiers=self.tiers,
            models=self.models,
            admin=self.admin,
            coordinator=self.coordinator,
            service=self.service,
        )


class Keys:
    """The registry's API keys."""

    def __init__(self, base: database.Database) -> None:
        self._base = base

    def create(self, wish: Key, now_us: int) -> tuple[Key, str]:
        """Make a key as ``wish`` says; return it and its token, which nobody can see again."""
        if not wish.team or not wish.user or not wish.tiers:
            raise errors.BadRequest("an API key needs a team, a user and at least one tier")
        secret = secrets.token_hex(SECRET_BYTES)
        key = dataclasses.replace(
            wish, key_id=secrets.token_hex(ID_BYTES), created_us=now_us, revoked_us=0
        )
        with self._base.write() as session:
            if session.get(tables.Team, key.team) is None:
                session.add(tables.Team(name=key.team, created_us=now_us))
                session.flush()
            session.add(
                tables.ApiKey(
                    key_id=key.key_id,
                    secret_sha256=_digest(secret),
                    team=key.team,
                    user=key.user,
                    comment=key.comment,
                    tiers=[tier.value for tier in key.tiers],
                    models=list(key.models),
                    admin=key.admin,
                    coordinator=key.coordinator,
                    service=key.service,
                    created_us=now_us,
                    expires_us=key.expires_us,
                    revoked_us=0,
                )
            )
        return key, f"{PREFIX}_{key.key_id}_{secret}"

    def put(self, wish: Key, token: str, now_us: int) -> Key:
        """Keep a key whose token is already written somewhere (the batch runner's service key)."""
        key_id, secret = _split(token)
        with self._base.write() as session:
            if session.get(tables.Team, wish.team) is None:
                session.add(tables.Team(name=wish.team, created_us=now_us))
                session.flush()
            row = session.get(tables.ApiKey, key_id)
            if row is None:
                row = tables.ApiKey(key_id=key_id, created_us=now_us)
                session.add(row)
            row.secret_sha256 = _digest(secret)
            row.team, row.user, row.comment = wish.team, wish.user, wish.comment
            row.tiers = [tier.value for tier in wish.tiers]
            row.models = list(wish.models)
            row.admin, row.coordinator, row.service = wish.admin, wish.coordinator, wish.service
            row.expires_us, row.revoked_us = wish.expires_us, 0
        return dataclasses.replace(wish, key_id=key_id)

    def revoke(self, key_id: str, now_us: int) -> None:
        """Make a key invalid for good; raises `errors.NotFound`."""
        with self._base.write() as session:
            row = session.get(tables.ApiKey, key_id)
            if row is None:
                raise errors.NotFound(f"{key_id}: no such API key; `fctl key list` shows them")
            row.revoked_us = row.revoked_us or now_us

    def list(self) -> tuple[Key, ...]:
        """Return every key, the oldest first."""
        query = sa.select(tables.ApiKey).order_by(tables.ApiKey.created_us, tables.ApiKey.key_id)
        with self._base.read() as session:
            return tuple(_key(row) for row in session.scalars(query))

    def find(self, token: str) -> Key:
        """Return the key of ``token``; raises `errors.Unauthenticated`."""
        key_id, secret = _split(token)
        with self._base.read() as session:
            row = session.get(tables.ApiKey, key_id)
        # Compared even for an unknown id, so that the time taken does not tell ids apart.
        good = hmac.compare_digest(row.secret_sha256 if row else _digest(""), _digest(secret))
        if row is None or not good:
            raise errors.Unauthenticated("API key not known: create one with `fctl key create`")
        return _key(row)


class RegistryKeys:
    """`ports.KeyStore` on the registry, with a short memory.

    A revoked key is refused within `fresh_s`. While the registry does not answer, keys that were good
    when last seen stay good; where it hangs, as a machine does that has stopped, it is waited for once.
    Lookups have threads of their own: those that hang must not keep anything else waiting.
    """

    def __init__(self, keys: Keys, time: clock.Clock, *, fresh_s: float = 2.0) -> None:
        self._keys = keys
        self._time = time
        self._fresh_s = fresh_s
        self._seen: dict[bytes, tuple[float, Key]] = {}
        self._threads = concurrent.futures.ThreadPoolExecutor(2, "keys")
        self._reading: dict[bytes, asyncio.Future[Key]] = {}
        self._late: set[asyncio.Future[Key]] = set()  # was waited for in vain

    async def find(self, token: str) -> requests.Caller:
        """Return the key's caller.

        Raises:
            errors.Unauthenticated: not known; `errors.KeyExpired`: expired or revoked;
                `errors.Busy`: the registry does not answer and the key was never seen.
        """
        name = hashlib.sha256(token.encode()).digest()
        seen = self._seen.get(name)
        if seen is None or self._time.monotonic() - seen[0] > self._fresh_s:
            seen = await self._read(token, name, seen)
        key = seen[1]
        if key.revoked_us:
            raise errors.KeyExpired(f"API key {key.key_id} was revoked: ask for a new one")
        if key.expires_us and key.expires_us <= self._time.wall_us():
            raise errors.KeyExpired(f"API key {key.key_id} has expired: ask for a new one")
        return key.caller()

    async def _read(
        self, token: str, name: bytes, seen: tuple[float, Key] | None
    ) -> tuple[float, Key]:
        lookup = self._reading.get(name)
        if lookup is None:
            if seen is None and len(self._reading) >= _LOOKUPS:
                raise _silent()
            lookup = self._begin(token, name)
        if seen is not None and lookup in self._late:
            return seen
        wait_s = UNKNOWN_S if seen is None else PATIENCE_S
        await asyncio.wait({lookup}, timeout=wait_s)
        if not lookup.done():
            self._late.add(lookup)
        elif (error := lookup.exception()) is None:
            return self._time.monotonic(), lookup.result()
        elif not isinstance(error, exc.SQLAlchemyError):
            raise error
        if seen is None:
            raise _silent()
        return seen

    def _begin(self, token: str, name: bytes) -> "asyncio.Future[Key]":
        """Look a key up, once for all who wait for it.

        What comes of it is kept, also where nobody waits for it any more: a registry that answers late
        each time must still be heard.
        """
        loop = asyncio.get_running_loop()
        lookup = loop.run_in_executor(self._threads, self._keys.find, token)
        self._reading[name] = lookup

        def done(ended: "asyncio.Future[Key]") -> None:
            self._reading.pop(name, None)
            self._late.discard(ended)
            if ended.cancelled():
                return
            if (error := ended.exception()) is None:
                self._seen[name] = (self._time.monotonic(), ended.result())
            elif isinstance(error, errors.Unauthenticated):
                self._seen.pop(name, None)

        lookup.add_done_callback(done)
        return lookup


def _silent() -> errors.Busy:
    return errors.Busy("registry does not answer: try again later", retry_after_s=RETRY_S)


def new_token() -> str:
    """Return a fresh token, for `Keys.put`."""
    return f"{PREFIX}_{secrets.token_hex(ID_BYTES)}_{secrets.token_hex(SECRET_BYTES)}"


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def _split(token: str) -> tuple[str, str]:
    parts = token.split("_")
    if len(parts) != 3 or parts[0] != PREFIX or not parts[1] or not parts[2]:
        raise errors.Unauthenticated(f"not an API key: they look like {PREFIX}_<id>_<secret>")
    return parts[1], parts[2]


def _key(row: tables.ApiKey) -> Key:
    return Key(
        key_id=row.key_id,
        team=row.team,
        user=row.user,
        # One that only a newer release knows has no door here.
        tiers=tuple(requests.Tier(tier) for tier in row.tiers if tier in _TIERS),
        models=tuple(row.models),
        admin=row.admin,
        coordinator=row.coordinator,
        service=row.service,
        comment=row.comment,
        created_us=row.created_us,
        expires_us=row.expires_us,
        revoked_us=row.revoked_us,
    )
