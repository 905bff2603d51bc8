"""The sequential test: how often it is wrong, and how soon it is right."""

import copy
import math
import random

import pytest

from scheduler.contracts import observed
from scheduler.core import trials


def trial(
    version: str, *, failed: bool = False, ttft: float = 50, itl: float = 5
) -> observed.Trial:
    return observed.Trial("chat", version, failed, ttft, itl)


def run(seed: int, rounds: int, *, slower: float = 1.0, failing: float = 0.02) -> int:
    """Return after how many rounds of one v2 and three v1 requests a verdict comes, 0 for none."""
    draw = random.Random(seed)
    found = trials.Comparison("v2", alpha=0.05)
    for at in range(1, rounds + 1):
        mixed = ["v2", "v1", "v1", "v1"]
        draw.shuffle(mixed)
        found.note(
            observed.Trial(
                "chat",
                version,
                draw.random() < (failing if version == "v2" else 0.02),
                draw.lognormvariate(4, 0.5) * (slower if version == "v2" else 1),
                draw.lognormvariate(1, 0.2) * (slower if version == "v2" else 1),
            )
            for version in mixed
        )
        if found.verdict:
            return at
    return 0


def test_an_equal_version_is_judged_worse_no_more_often_than_alpha() -> None:
    """Looked at after every request of 100, over 100 rollouts; a third of alpha goes to each measure."""
    wrong = sum(bool(run(seed, 100, slower=1.0)) for seed in range(100))
    assert wrong <= 100 * 0.05


def test_at_the_edge_of_the_null_the_wealth_stays_within_villes_bound() -> None:
    """Fair coins, the worst that "not worse" allows: 1/alpha is reached in at most alpha of the runs."""
    draw, reached = random.Random(1), 0
    for _ in range(200):
        wealth = trials.Wealth()
        for _ in range(150):
            wealth.note(worse=draw.random() < 0.5)
            if wealth.proven(0.05):
                reached += 1
                break
    assert reached <= 200 * 0.05 + 3 * (200 * 0.05 * 0.95) ** 0.5


def test_the_wealth_is_a_martingale_at_a_half() -> None:
    """The mean over both outcomes of a next pair is the wealth now."""
    wealth = trials.Wealth()
    for worse in (True, True, False, True):
        up, down = copy.deepcopy(wealth), copy.deepcopy(wealth)
        up.note(worse=True)
        down.note(worse=False)
        assert (math.exp(up.log) + math.exp(down.log)) / 2 == pytest.approx(math.exp(wealth.log))
        wealth.note(worse=worse)


@pytest.mark.parametrize(
    ("slower", "failing", "within"), [(3.0, 0.02, 60), (1.0, 1.0, 40), (1.0, 0.5, 120)]
)
def test_a_worse_version_is_found_soon(slower: float, failing: float, within: int) -> None:
    took = sorted(run(seed, 300, slower=slower, failing=failing) for seed in range(10))
    assert all(took)
    assert took[5] <= within


def test_the_verdict_names_the_measure_and_stays() -> None:
    found = trials.Comparison("v2")
    found.note([trial("v1") for _ in range(30)])
    found.note([trial("v2", failed=True) for _ in range(30)])
    assert found.verdict.startswith("error rate is worse in")
    said = found.verdict
    found.note([trial("v1", failed=True), trial("v2")])
    assert found.verdict == said
    assert found.counts(new=True).failed == 30
    assert trials.Comparison("v2").verdict == ""


def test_what_the_old_version_left_serves_when_it_gets_nothing_any_more() -> None:
    found = trials.Comparison("v2")
    found.note([trial("v1") for _ in range(100)])
    found.note([trial("v2", ttft=500) for _ in range(40)])
    assert found.verdict.startswith("TTFT is worse in")


def test_a_replicas_death_is_one_event_however_many_requests_it_has_cost() -> None:
    """A node that dies under a rollout must not count as so many independent failures of the version."""
    found = trials.Comparison("v2")
    dead = observed.Trial("chat", "v2", True, death="r-1.1@5")
    found.note([trial("v1") for _ in range(100)])
    found.note([dead] * 100)
    assert found.counts(new=True) == trials.Counts(requests=1, failed=1)
    assert found.verdict == ""
    found.note(
        [trial("v2", failed=True) for _ in range(20)]
    )  # what lives and fails counts each time
    assert found.verdict.startswith("error rate")


def test_a_version_whose_replicas_die_again_and_again_is_found() -> None:
    found = trials.Comparison("v2")
    found.note([trial("v1") for _ in range(100)])
    found.note(observed.Trial("chat", "v2", True, death=f"r-1.{life}@5") for life in range(20))
    assert found.verdict.startswith("error rate")
