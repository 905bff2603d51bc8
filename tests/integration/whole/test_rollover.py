"""Leases near their walltime under load: successors come in time, no stream is cut, the overlap is told."""

import time
from collections.abc import Callable, Iterator

import pytest

from forebay import config as configs
from scheduler.contracts import ids
from slurm_plugins import devcluster, select
from slurm_plugins import settings as slurm_settings
from slurm_plugins.devcluster import accounts
from tests.integration.whole import drills, running, test_losses, waiting

NEAR_S = 20.0  # of a lease is left at least, and twice what the whole installation took to come up
WALLTIME_S = 120  # Slurm counts in minutes


@pytest.fixture(scope="module")
def laptop(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[running.Running]:
    """An installation on the embedded Slurm, whose limits are exact to the second."""
    slurm = {"client": "embedded", "embedded_kill_wait_s": 5.0}
    made = running.Running(
        tmp_path_factory.mktemp("rolling"), slurm, scheduler={"lease_walltime_s": 3600}
    )
    try:
        made.up()
        yield made
    finally:
        made.close()


def near_s(house: running.Running) -> float:
    """Return how much of a lease is left when it begins to count: two slow starts and a drain."""
    return max(NEAR_S, 2.5 * house.came_up_s)


def overlap(house: running.Running) -> tuple[int, float]:
    """Return how many leases were rolled over so far, and the GPU-seconds of overlap."""
    told = house.call("GET", "/admin/explain")["rollover"]
    return told["leases"], told["overlap_gpu_s"]


def rolled(house: running.Running, shorten: Callable[[], None]) -> None:
    """Let leases near their end under load and prove that nobody noticed and what it has cost."""
    old = {lease for lease, _ in test_losses.held(house)[1]}
    before = overlap(house)
    shorten()
    began = time.monotonic()
    loads: list[drills.Load] = []

    def replaced() -> bool:
        if not loads or not loads[-1].streaming:
            loads.append(drills.Load(house, house.key, streams=3, tokens=500, lines=40))
        now = {lease for lease, _ in test_losses.held(house)[1]}
        return not now & old and len(house.replicas()) == house.size

    waiting.eventually(replaced, "every lease to be replaced", WALLTIME_S + 4 * near_s(house))
    took = time.monotonic() - began
    for load in loads:
        load.whole()
        load.job.finished()
    house.settled()
    leases = {each["lease_id"]: each for each in house.leases(ended=True)}
    reasons = {lease_id: leases[lease_id]["reason"] for lease_id in old}
    assert {leases[lease_id]["state"] for lease_id in old} == {"ended"}
    assert not [why for why in reasons.values() if "TIMEOUT" in why], reasons

    def counted() -> bool:
        count, gpu_s = overlap(house)
        return count >= before[0] + len(old) and gpu_s > before[1]

    waiting.eventually(counted, "the overlap to be told")
    count, gpu_s = overlap(house)
    print(
        f"rollover of {count - before[0]} leases: {took:.0f} s, {len(loads) * 3} streams, "
        f"{gpu_s - before[1]:.1f} GPU-seconds of overlap"
    )
    # Each 4-GPU lease overlaps its successor by less than the time that was left.
    assert gpu_s - before[1] < len(old) * 4 * (WALLTIME_S + near_s(house))


@pytest.mark.timeout(900)
def test_on_the_embedded_slurm(laptop: running.Running) -> None:
    def shorten() -> None:
        table = configs.load(laptop.config_file).table(slurm_settings.SlurmSettings)
        port = select.connect(table, laptop.state).port
        for lease in laptop.leases():
            elapsed = time.time() - lease["started_us"] / 1e6
            port.update(
                ids.SlurmJobId(lease["slurm_job_id"]), time_limit_s=round(elapsed + near_s(laptop))
            )

    rolled(laptop, shorten)


@pytest.mark.long
@pytest.mark.slurm
@pytest.mark.timeout(1200)
def test_on_a_real_cluster(
    slurm_site: devcluster.Site, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Leases of two minutes, again and again: each is replaced before Slurm ends it."""
    accounts.create(slurm_site, {"physics": ["nobody"]}, [])
    slurm = {
        "conf": str(slurm_site.slurm_conf),
        "rest_url": slurm_site.rest_url,
        "rest_user": slurm_site.rest_user,
        "jwt_key_file": str(slurm_site.jwt_key),
        "account": "physics",
        "cluster": "rolling",
    }
    made = running.Running(
        tmp_path_factory.mktemp("rolling"),
        slurm,
        str(slurm_site.munge_socket),
        slurm_site.env(),
        scheduler={"lease_walltime_s": WALLTIME_S},
    )
    try:
        made.up()
        for _ in range(2):
            old = test_losses.held(made)[1]
            rolled(made, lambda: None)
            for lease_id, _ in old:
                drills.books_agree(made, lease_id)
    finally:
        made.close()
