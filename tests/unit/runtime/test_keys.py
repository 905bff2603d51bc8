"""Keys in the registry, the same on SQLite and PostgreSQL: shown once, told apart, good while it is down."""

import asyncio
import dataclasses
import threading

import pytest
import sqlalchemy as sa

from scheduler.contracts import clock, errors, requests
from scheduler.runtime.registry import keys, store, tables


def wish(**changes: object) -> keys.Key:
    base = keys.Key("", "physics", "ada", (requests.Tier.INTERACTIVE, requests.Tier.BATCH))
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type] # the test's own fields


def test_a_token_is_shown_once_and_kept_as_a_hash(registry: store.Registry) -> None:
    key, token = registry.keys.create(wish(comment="laptop"), 7)
    assert token.startswith(f"fbk_{key.key_id}_")
    assert registry.keys.find(token) == key
    assert registry.keys.list() == (key,)
    secret = token.rsplit("_", 1)[1]
    with registry.database.read() as session:
        row = session.get_one(tables.ApiKey, key.key_id)
        kept = [str(getattr(row, column.name)) for column in tables.ApiKey.__table__.columns]
    assert all(secret not in text for text in kept)
    for wrong in (token[:-1] + "x", "fbk_nope_" + secret, "sk-123", "", "fbk__", "a_b_c"):
        with pytest.raises(errors.Unauthenticated):
            registry.keys.find(wrong)
    with pytest.raises(errors.BadRequest, match="needs a team"):
        registry.keys.create(wish(team=""), 1)


async def test_the_key_store_tells_unknown_expired_and_revoked_apart(
    registry: store.Registry, fake_clock: clock.FakeClock
) -> None:
    found = keys.RegistryKeys(registry.keys, fake_clock)
    now = fake_clock.wall_us()
    key, token = registry.keys.create(wish(expires_us=now + 60_000_000, models=("chat",)), now)
    caller = await found.find(token)
    assert caller == requests.Caller(
        team="physics",
        user="ada",
        key_id=key.key_id,
        tiers=(requests.Tier.INTERACTIVE, requests.Tier.BATCH),
        models=("chat",),
    )
    await fake_clock.advance(61)
    with pytest.raises(errors.KeyExpired, match="has expired"):
        await found.find(token)
    second, other = registry.keys.create(wish(), now)
    assert (await found.find(other)).key_id == second.key_id
    registry.keys.revoke(second.key_id, now + 1)
    await fake_clock.advance(2.1)
    with pytest.raises(errors.KeyExpired, match="was revoked"):
        await found.find(other)
    with pytest.raises(errors.Unauthenticated, match="not known"):
        await found.find(keys.new_token())


async def test_known_keys_stay_good_while_the_registry_is_down(
    registry: store.Registry, fake_clock: clock.FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = keys.RegistryKeys(registry.keys, fake_clock)
    _, token = registry.keys.create(wish(), 1)
    caller = await found.find(token)

    def down(token: str) -> keys.Key:
        raise sa.exc.OperationalError("SELECT", {}, Exception("connection refused"))

    monkeypatch.setattr(registry.keys, "find", down)
    await fake_clock.advance(60)
    assert await found.find(token) == caller
    with pytest.raises(errors.Busy, match="registry does not answer"):
        await found.find(keys.new_token())


async def test_a_registry_that_hangs_is_waited_for_once(
    registry: store.Registry, fake_clock: clock.FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a machine that has stopped: no error ever comes, and every thread that asks it is lost."""
    monkeypatch.setattr(keys, "UNKNOWN_S", 60.0)
    monkeypatch.setattr(keys, "_LOOKUPS", 8)
    found = keys.RegistryKeys(registry.keys, fake_clock)
    _, token = registry.keys.create(wish(), 1)
    caller = await found.find(token)
    monkeypatch.setattr(keys, "PATIENCE_S", 0.05)
    monkeypatch.setattr(keys, "UNKNOWN_S", 0.05)
    asked, going = [], threading.Event()
    before = registry.keys.find

    def hangs(token: str) -> keys.Key:
        asked.append(token)
        going.wait()
        return before(token)

    monkeypatch.setattr(registry.keys, "find", hangs)
    for _ in range(5):
        await fake_clock.advance(60)
        assert await found.find(token) == caller
    assert asked == [token]
    for _ in range(10):
        with pytest.raises(errors.Busy, match="registry does not answer"):
            await found.find(keys.new_token())
    assert len(asked) <= 2  # the rest waits for a thread, or was not taken
    going.set()
    async with asyncio.timeout(10):
        while found._reading:  # noqa: ASYNC110 - the end of a thread rings no bell
            await asyncio.sleep(0.01)
    monkeypatch.setattr(keys, "PATIENCE_S", 60.0)
    registry.keys.revoke(caller.key_id, 5)
    await fake_clock.advance(60)
    with pytest.raises(errors.KeyExpired):  # it has caught up
        await found.find(token)


async def test_a_registry_that_is_late_each_time_is_heard(
    registry: store.Registry, fake_clock: clock.FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for its answers, and a key that was revoked must not stay good for ever."""
    found = keys.RegistryKeys(registry.keys, fake_clock)
    _, token = registry.keys.create(wish(), 1)
    caller = await found.find(token)
    registry.keys.revoke(caller.key_id, 5)
    going, before = threading.Event(), registry.keys.find

    def late(token: str) -> keys.Key:
        going.wait()
        return before(token)

    monkeypatch.setattr(registry.keys, "find", late)
    monkeypatch.setattr(keys, "PATIENCE_S", 0.0)
    await fake_clock.advance(60)
    assert await found.find(token) == caller
    going.set()
    async with asyncio.timeout(10):
        while found._reading:  # noqa: ASYNC110 - the end of a thread rings no bell
            await asyncio.sleep(0.01)
    with pytest.raises(errors.KeyExpired):
        await found.find(token)


async def test_who_guesses_keys_keeps_no_known_one_out(
    registry: store.Registry, fake_clock: clock.FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the registry hangs, guesses fill what may be looked up at once."""
    found = keys.RegistryKeys(registry.keys, fake_clock)
    _, token = registry.keys.create(wish(), 1)
    caller = await found.find(token)
    going, before = threading.Event(), registry.keys.find

    def hangs(token: str) -> keys.Key:
        going.wait()
        return before(token)

    monkeypatch.setattr(registry.keys, "find", hangs)
    monkeypatch.setattr(keys, "_LOOKUPS", 3)
    monkeypatch.setattr(keys, "PATIENCE_S", 0.0)
    monkeypatch.setattr(keys, "UNKNOWN_S", 0.0)
    await fake_clock.advance(60)
    for _ in range(5):
        with pytest.raises(errors.Busy):
            await found.find(keys.new_token())
    assert await found.find(token) == caller
    going.set()
    async with asyncio.timeout(10):
        while found._reading:  # noqa: ASYNC110 - the end of a thread rings no bell
            await asyncio.sleep(0.01)


def test_a_given_token_can_be_kept(registry: store.Registry) -> None:
    token = keys.new_token()
    key = registry.keys.put(wish(service=True), token, 3)
    registry.keys.put(wish(service=True, user="batchd"), token, 4)
    assert registry.keys.find(token).user == "batchd"
    assert registry.keys.find(token).caller().service
    assert [item.key_id for item in registry.keys.list()] == [key.key_id]
