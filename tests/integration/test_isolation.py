"""One team's load leaves another's latency as it was: eight simulated replicas, in virtual time.

The quiet team's figures are compared with those of the same requests without the other team. Time is virtual
(`tests.virtualtime`), so a busy machine changes nothing.
"""

import asyncio
import functools
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests import virtualtime
from tests.integration import isolation

pytestmark = pytest.mark.timeout(900)  # six runs a test, minutes on a busy machine
RATIO = 1.3
SHARES = {"ttft": 0.95, "gaps": 0.99}
# A load's p95 is that of its seven latest of 140: one draw of arrivals gave ratios from 1.03 to 1.27 of the
# same code. All seeds' requests together are some 420.
SEEDS = (1, 3, 5)
# A seventh of what eight replicas can prefill: streams share their steps with prompts as on any fleet in
# use. One that idles would have to stay idle to keep its figures; one that is full has no room to leave: with
# 20 requests a second, a quarter, the quiet team's TTFT p95 in the spike was 1.4 to 1.5 times that without.
QUIET = isolation.Load(rate=12, start=0, end=12, prompt=(600, 1400), output=(60, 140))
SPIKE = isolation.Load(rate=80, start=3, end=6, prompt=(600, 1400), output=(60, 140))
FLOOD = isolation.Load(rate=3, start=2, end=10, prompt=(16_000, 30_000), output=(20, 60))
POISON = isolation.Load(
    rate=1, start=2, end=8, prompt=(50, 60), output=(20, 60), first=isolation.POISON
)


def measure(
    noise: isolation.Load | None, seeds: Sequence[int] = SEEDS, **site_options: Any
) -> tuple[isolation.Heard, isolation.Heard, int]:
    """Return what both teams got of all seeds, and how many engines died."""
    quiet, noisy, died = isolation.Heard(), isolation.Heard(), 0
    for seed in seeds:
        some, others, dead = virtualtime.run(measure_one(noise, seed, **site_options))
        quiet, noisy, died = quiet.beside(some), noisy.beside(others), died + dead
    return quiet, noisy, died


async def measure_one(
    noise: isolation.Load | None, seed: int, **site_options: Any
) -> tuple[isolation.Heard, isolation.Heard, int]:
    """Return the same of one seed."""
    with tempfile.TemporaryDirectory() as folder:
        random.seed(seed + 4)  # ties among equal replicas
        async with isolation.running(Path(folder), **site_options) as site:
            loads = [isolation.drive(site, "quiet", QUIET, seed)]
            if noise is not None:
                loads.append(isolation.drive(site, "noisy", noise, seed + 1))
            quiet, *others = await asyncio.gather(*loads)
            assert site.gateway.path.live == 0
            died = sum(one.lives for one in site.replicas)
            return quiet, others[0] if others else isolation.Heard(), died


@functools.cache
def alone_once(seed: int, chunk: int) -> isolation.Heard:
    return measure(None, (seed,), chunk=chunk)[0]


def alone(seeds: Sequence[int] = SEEDS, chunk: int = isolation.CHUNK) -> isolation.Heard:
    heard = isolation.Heard()
    for seed in seeds:
        heard = heard.beside(alone_once(seed, chunk))
    return heard


def ratio(quiet: isolation.Heard, without: isolation.Heard, of: str) -> float:
    """Return the quiet team's TTFT p95, or p99 of its tokens' gaps, over that without noise."""
    share = SHARES[of]
    before = isolation.quantile(getattr(without, of), share)
    return isolation.quantile(getattr(quiet, of), share) / before


def compare(quiet: isolation.Heard, seeds: Sequence[int] = SEEDS) -> None:
    without = alone(seeds)
    assert not quiet.failed
    assert quiet.whole == without.whole
    found = {of: ratio(quiet, without, of) for of in SHARES}
    assert max(found.values()) <= RATIO, found


def test_a_spike() -> None:
    quiet, noisy, _ = measure(SPIKE)
    compare(quiet)
    assert noisy.whole > 200 * len(SEEDS)
    assert not noisy.failed


@pytest.mark.long  # doubles what these tests take, and proves the tests rather than the gateway
def test_the_spike_is_one_that_fairness_is_needed_for() -> None:
    """As one team's load it makes first tokens 3.8 times as late."""
    quiet, _, _ = measure(SPIKE, one_team=True)
    assert ratio(quiet, alone(), "ttft") > 2 * RATIO


def test_a_flood_of_long_prompts() -> None:
    quiet, noisy, _ = measure(FLOOD)
    compare(quiet)
    assert noisy.whole > 10 * len(SEEDS)
    assert not noisy.failed


@pytest.mark.long
def test_the_flood_is_one_that_chunked_prefill_is_needed_for() -> None:
    """With a whole prompt in a step the gaps between tokens are 8.9 times as long."""
    quiet, _, _ = measure(FLOOD, chunk=isolation.CONTEXT)
    assert ratio(quiet, alone(chunk=isolation.CONTEXT), "gaps") > 2 * RATIO


def test_a_poisonous_request_kills_two_engines_and_no_stream_of_others() -> None:
    quiet, noisy, died = measure(POISON, SEEDS[:1])
    compare(quiet, SEEDS[:1])
    assert noisy.whole == 0
    assert 0 < died <= 2 * len(noisy.failed)
    assert all("set aside" in said for said in noisy.failed)


def test_who_stands_beside_one_poisonous_request_after_the_other_is_not_set_aside() -> None:
    """Engines die faster than they come back, some four for each such request; the quiet team has to wait."""
    quiet, noisy, died = measure(POISON, SEEDS[1:])
    assert not quiet.failed
    assert quiet.whole == alone(SEEDS[1:]).whole
    assert noisy.whole == 0
    assert 0 < died <= 4 * len(noisy.failed)
