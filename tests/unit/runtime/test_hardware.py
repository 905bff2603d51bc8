"""A profile that no node can satisfy is refused."""

from typing import Any

import pytest

from scheduler.contracts import clock, errors
from scheduler.runtime.models import document, hardware, service
from scheduler.runtime.registry import store

NODES: list[dict[str, Any]] = [
    {"name": "n1", "gres_type": "A100", "gpus": 4, "memory_mb": 500_000},
    {"name": "n2", "gres_type": "H100", "gpus": 8, "memory_mb": 2_000_000},
    {"name": "n3", "gres_type": "", "gpus": None, "memory_mb": 0},
]


@pytest.mark.parametrize(
    ("profile", "said"),
    [
        (document.Profile(gres_type="h100", gpus=8, memory_gb=2000), ""),
        (document.Profile(gpus=9), ""),  # of n3 nothing is known
    ],
)
def test_what_may_fit_is_taken(profile: document.Profile, said: str) -> None:
    assert hardware.fault(profile, NODES) == said
    assert hardware.fault(profile, []) == ""


@pytest.mark.parametrize(
    ("profile", "said"),
    [
        (document.Profile(gres_type="B200"), "no node has it; nodes have A100, H100"),
        (document.Profile(gres_type="A100", gpus=8), "the largest node has 4"),
        (document.Profile(gpus=8, memory_gb=3000), "the largest such node has 2097"),
    ],
)
def test_what_fits_nowhere_is_refused_with_what_there_is(
    profile: document.Profile, said: str
) -> None:
    assert said in hardware.fault(profile, NODES[:2])


def test_it_is_asked_at_registration(registry: store.Registry, fake_clock: clock.FakeClock) -> None:
    epoch = registry.lead.take("me", 0, 10_000_000)
    assert epoch is not None
    registry.journal.set_facts(epoch, 1, {"nodes": {"nodes": NODES[:2]}})
    site = service.Site(registry, fake_clock)
    with pytest.raises(errors.BadRequest, match=r"profiles.big.gpus 16: the largest node"):
        service.add(site, ("profile", "", "big"), {"gpus": 16}, service.Wish("ada"))
    service.add(site, ("profile", "", "big"), {"gpus": 8}, service.Wish("ada"))
