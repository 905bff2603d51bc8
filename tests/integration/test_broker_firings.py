"""What schedules began, noted once over all brokers: on time, late by a leader that came late, or missed."""

import dataclasses
import datetime
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from scheduler.runtime import broker, firings, schedules, settings
from scheduler.runtime.registry import timetable
from tests import brokersite

CHAT = dataclasses.replace(brokersite.CHAT, scaling={"floor": 1, "maximum": 3})
QUICK = settings.Settings(scale_down_s=10.0, idle_lease_s=5.0, lease_backoff_s=0.0)
NIGHT = schedules.Schedule(
    "night", "chat", 2, "0 23 * * *", "23:30"
)  # the fake clock begins at 22:13


async def until(site: brokersite.Site, leader: broker.Leader, hour: int, minute: int) -> None:
    """Step up to a minute of the day, UTC, looking for what began at each step as the loop does."""
    while True:
        await leader.note_firings()
        now = schedules.utc(site.clock.wall_us())
        left = now.replace(hour=hour, minute=minute, second=0, microsecond=0) - now
        if left <= datetime.timedelta():
            return
        await site.step(leader, min(left.total_seconds(), 60.0))


def told(site: brokersite.Site) -> list[tuple[str, str, str]]:
    """Return what the registry has of it, oldest first: begin, timing, warm."""
    return [
        (schedules.utc(each.begins_us).strftime("%H:%M"), each.timing.value, each.warm)
        for each in reversed(site.registry.timetable.began("night", 100))
    ]


def add(site: brokersite.Site, schedule: schedules.Schedule = NIGHT) -> None:
    site.registry.timetable.add(schedule, "root", "", site.clock.wall_us())


async def test_a_beginning_is_noted_with_what_was_warm(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    site = brokersite.Site(tmp_path, CHAT, options=QUICK)
    async with site.lead() as leader:
        await site.settle(leader)
        add(site)
        with caplog.at_level(logging.INFO, firings.__name__):
            await until(site, leader, 23, 10)
        assert told(site) == [("23:00", "on time", "2/2")]
        assert [each.message for each in caplog.records] == [
            "schedule night: began 2023-11-14T23:00:00+00:00, on time, warm: 2/2 of chat"
        ]
        assert site.registry.timetable.last()["night"].serving == 2
        site.registry.timetable.remove("night")
        assert site.registry.timetable.last() == {}


async def test_a_floor_that_was_not_warm_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    short = dataclasses.replace(CHAT, scaling={"floor": 1, "maximum": 1})
    site = brokersite.Site(tmp_path, short, options=QUICK)
    async with site.lead() as leader:
        await site.settle(leader)
        add(site)
        await until(site, leader, 23, 1)
        assert told(site) == [("23:00", "on time", "1/2")]
        assert [each.levelname for each in caplog.records if each.name == firings.__name__] == [
            "WARNING"
        ]


async def test_a_leader_that_comes_late_notes_what_began_without_one(tmp_path: Path) -> None:
    """Half an hour late, then after the end: a day and more is made up for, each beginning once."""
    site = brokersite.Site(tmp_path, CHAT, options=QUICK)
    async with site.lead() as leader:
        await site.settle(leader)
        add(site)
    await site.clock.advance(57 * 60.0)  # 23:10
    async with site.lead() as leader:
        await site.settle(leader)
        await leader.note_firings()
        assert [each[:2] for each in told(site)] == [("23:00", "late")]
    await site.clock.advance(2 * 86_400.0)
    async with site.lead() as leader:
        await site.settle(leader)
        await leader.note_firings()
        await site.step(leader, 1.0)
        await leader.note_firings()
    assert [each[:2] for each in told(site)] == [
        ("23:00", "late"), ("23:00", "missed"), ("23:00", "late"),
    ]  # fmt: skip


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[brokersite.Site]:
    url = request.getfixturevalue("postgres_url") if request.param == "postgres" else ""
    made = brokersite.Site(tmp_path, CHAT, options=QUICK, url=url)
    yield made
    made.registry.close()


async def test_two_brokers_note_a_beginning_once_and_a_former_leader_nothing(
    site: brokersite.Site,
) -> None:
    """The old leader is paused over the beginning, and wakes before and after the new one has looked."""
    async with site.lead() as old:
        await site.settle(old)
        add(site)
        await until(site, old, 22, 59)
        await site.clock.advance(60 + site.options.leader_ttl_s)  # stopped, as by SIGSTOP
        epoch = site.registry.lead.take("new", site.clock.wall_us(), 60_000_000)
        assert epoch == old.live.epoch + 1
        with pytest.raises(brokersite.Fenced):
            await old.note_firings()
        assert told(site) == []
        begins = schedules.utc(site.clock.wall_us()).replace(hour=23, minute=0, second=0)
        begins_us = round(begins.timestamp()) * 1_000_000
        mine = schedules.Firing("night", "chat", 2, begins_us, begins_us + 1, begins_us, 2)
        assert site.registry.timetable.note(epoch, [mine, mine]) == (mine,)
        assert site.registry.timetable.note(epoch, [mine]) == ()
        with pytest.raises(brokersite.Fenced):
            await old.note_firings()
        assert len(told(site)) == 1
        site.registry.lead.release(epoch)


async def test_what_was_paused_did_not_begin(tmp_path: Path) -> None:
    site = brokersite.Site(tmp_path, CHAT, options=QUICK)
    async with site.lead() as leader:
        await site.settle(leader)
        add(site)
        await until(site, leader, 22, 50)
        site.registry.timetable.pause("night", True, site.clock.wall_us())
        await until(site, leader, 23, 10)
        site.registry.timetable.pause("night", False, site.clock.wall_us())
        await site.step(leader, 60.0)
        await until(site, leader, 23, 20)
        assert told(site) == []


async def test_old_beginnings_are_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timetable, "KEPT", 3)
    site = brokersite.Site(tmp_path, CHAT, options=QUICK)
    async with site.lead() as leader:
        await site.settle(leader)
        add(site)
        for _ in range(5):
            await site.clock.advance(86_400.0)
            await site.step(leader, 1.0)
            await leader.note_firings()
        assert len(told(site)) == 3
