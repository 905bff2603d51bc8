"""Several brokers: one leads; the leader is killed, or stopped and woken, under load. Nothing notices."""

import os
import signal
from collections.abc import Iterator

import pytest

from scheduler.runtime import settings
from tests.integration.whole import drills, running, test_losses, waiting

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]
GOAL_S = 10.0


@pytest.fixture
def standbys(house: running.Running) -> Iterator[list[drills.Standby]]:
    """Two brokers beside the installation's own; one of the two leads."""
    made = [drills.Standby(house, number) for number in range(2)]
    try:
        for _ in range(4):
            epoch, pid = drills.leader(house)
            if pid in {each.process.pid for each in made}:
                break
            os.kill(pid, signal.SIGKILL)  # the installation starts its own anew, as a standby
            drills.next_leader(house, epoch)
        else:
            raise AssertionError("no standby ever leads")
        house.settled()
        yield made
    finally:
        for each in made:
            each.close()
        house.settled()


def test_the_leader_is_killed(
    house: running.Running, key: str, standbys: list[drills.Standby]
) -> None:
    """Within 10 s a standby leads: the lead runs out after `leader_ttl_s` and is looked at each renewal.

    The house has 2 s and 0.5 s, so that a loaded machine has 7.5 s to run one process; the defaults are
    asserted as numbers.
    """
    defaults = settings.Settings()
    assert defaults.leader_ttl_s + defaults.leader_renew_s <= GOAL_S / 1.5
    before, jobs = test_losses.held(house), house.slurm_jobs()
    load = drills.Load(house, key)
    epoch, pid = drills.leader(house)
    os.kill(pid, signal.SIGKILL)
    took = drills.next_leader(house, epoch)
    print(f"killed leader: the next one leads after {took:.2f} s")
    assert took < GOAL_S
    load.over(at_once=True)
    assert test_losses.held(house) == before
    assert house.slurm_jobs() == jobs


def test_the_leader_is_stopped_and_wakes_up(
    house: running.Running, key: str, standbys: list[drills.Standby]
) -> None:
    """It hangs up on nobody, and finds when it wakes that another one leads: it only stands by."""
    before, jobs = test_losses.held(house), house.slurm_jobs()
    load = drills.Load(house, key)
    epoch, pid = drills.leader(house)
    (old,) = (each for each in standbys if each.process.pid == pid)
    os.kill(pid, signal.SIGSTOP)
    try:
        took = drills.next_leader(house, epoch)
        assert took < GOAL_S

        def heard() -> bool:
            told = house.call("GET", "/admin/explain")
            return bool(told["broker"]["epoch"] > epoch and told["view_age_s"] < 2.0)

        moved = drills.until(heard, "a gateway that hears of the new leader")
        print(f"stopped leader: the next one leads after {took:.2f} s, heard {moved:.2f} s later")
        assert len(house.replicas()) == running.REPLICAS
    finally:
        os.kill(pid, signal.SIGCONT)
    waiting.eventually(lambda: f"epoch {epoch} is over" in old.said(), "the old leader to find out")
    waiting.eventually(
        lambda: old.said().rstrip().endswith("standing by"), "the old leader to stand by"
    )
    load.over(at_once=True)
    assert drills.leader(house)[0] > epoch
    assert test_losses.held(house) == before
    assert house.slurm_jobs() == jobs
