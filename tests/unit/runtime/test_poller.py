"""The leader's look at Slurm: what one bad answer keeps it from, and what not."""

import dataclasses

import pytest

from scheduler.contracts import clock, ids, slurm
from scheduler.runtime import entries, live, polling
from tests import fakeslurm

STAMP = slurm.Stamp("alpha", ids.LeaseId("l-1"), "serve", "forebay")
SPEC = slurm.JobSpec("lease", "", ("serve",), 600, "/dev/null", "/", stamp=STAMP)


async def test_a_reservation_that_can_not_be_read_hides_no_job(
    fake_clock: clock.FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = fakeslurm.FakeSlurm(fake_clock)
    port.reserved = (slurm.Reservation("patch", 5, 9, ("n1",)),)
    picture = live.Live(1, "alpha", entries.Pauses(1, 60), fake_clock.monotonic())
    poller = polling.Poller(port, picture, fake_clock, 1.0)
    await poller.poll()
    assert (picture.reservations, poller.error, poller.unread) == (port.reserved, "", "")

    def garbled() -> tuple[slurm.Reservation, ...]:
        raise slurm.SlurmGarbled("reservation odd: Slurm tells no end that can be read")

    with monkeypatch.context() as patched:
        patched.setattr(port, "reservations", garbled)
        await fake_clock.advance(polling.RESERVED_S + 1)
        await poller.poll()
        # Leases are followed on; what was known of reservations counts until there is more.
        assert picture.polls == 2
        assert picture.jobs is not None
        assert picture.reservations == port.reserved
        assert (poller.error, "reservation odd" in poller.unread) == ("", True)
    await fake_clock.advance(polling.RESERVED_S + 1)
    await poller.poll()
    assert poller.unread == ""
    await poller.close()


async def test_whatever_goes_wrong_what_was_read_before_is_not_slurms_word_of_now(
    fake_clock: clock.FakeClock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A job that no parser was made for left the last answer in force, with nobody told."""
    port = fakeslurm.FakeSlurm(fake_clock)
    picture = live.Live(1, "alpha", entries.Pauses(1, 60), fake_clock.monotonic())
    poller = polling.Poller(port, picture, fake_clock, 1.0)
    await poller.poll()
    assert picture.jobs == ()

    def odd() -> tuple[slurm.Job, ...]:
        raise KeyError("gres_detail")

    with monkeypatch.context() as patched:
        patched.setattr(port, "jobs", odd)
        for _ in range(2):
            await poller.poll()
    assert picture.jobs is None
    assert "gres_detail" in poller.error
    assert len(caplog.messages) == 1
    await poller.poll()
    assert (picture.jobs, poller.error) == ((), "")
    await poller.close()


async def test_somebody_elses_job_is_no_lease_whatever_its_comment_says(
    fake_clock: clock.FakeClock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where Slurm has no job_submit.lua anybody can copy a stamp out of squeue."""
    port = fakeslurm.FakeSlurm(fake_clock)
    ours = port.add(SPEC)
    before = dataclasses.replace(ours, job_id=ids.SlurmJobId("7"), user="forebay-old")
    forged = dataclasses.replace(ours, job_id=ids.SlurmJobId("8"), user="mallory")
    over = dataclasses.replace(forged, state=slurm.JobState.FAILED)
    plain = dataclasses.replace(forged, job_id=ids.SlurmJobId("9"), stamp=None)
    theirs = dataclasses.replace(plain, stamp=dataclasses.replace(STAMP, cluster="beta"))
    named = [over, plain, theirs, before, ours]
    monkeypatch.setattr(port, "jobs", lambda: tuple(named))
    picture = live.Live(1, "alpha", entries.Pauses(1, 60), fake_clock.monotonic())
    poller = polling.Poller(port, picture, fake_clock, 1.0, frozenset({"forebay-old"}))
    await poller.poll()
    assert picture.jobs == (before, ours)
    assert caplog.messages == []
    named[0] = forged
    for _ in range(2):
        await poller.poll()
    assert picture.jobs == (before, ours)
    (said,) = caplog.messages
    assert "job 8 of user mallory" in said
    assert "run as forebay, forebay-old" in said
    await poller.close()
