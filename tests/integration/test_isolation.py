"""One team's load leaves another's latency as it was: eight simulated replicas, in virtual time.

The quiet team's figures are compared with those of the same requests without the other team. Time is virtual
(`tests.virtualtime`), so a busy machine changes nothing.
"""

import asyncio
import functools
import random
import tempfile
from pathlib import Path

from tests import virtualtime
from tests.integration import isolation

RATIO = 1.3
# A seventh of what eight replicas can prefill: streams share their steps with prompts as on any fleet in
# use. One that idles would have to stay idle to keep its figures; one that is full has no room to leave: with
# 20 requests a second, a quarter, the quiet team's TTFT p95 in the spike was 1.4 to 1.5 times that without.
QUIET = isolation.Load(rate=12, start=0, end=12, prompt=(600, 1400), output=(60, 140))
SPIKE = isolation.Load(rate=80, start=3, end=6, prompt=(600, 1400), output=(60, 140))
FLOOD = isolation.Load(rate=3, start=2, end=10, prompt=(16_000, 30_000), output=(20, 60))
POISON = isolation.Load(
    rate=1, start=2, end=8, prompt=(50, 60), output=(20, 60), first=isolation.POISON
)


async def measure(noise: isolation.Load | None) -> tuple[isolation.Heard, isolation.Heard, int]:
    """Return what both teams got, and how many engines died."""
    with tempfile.TemporaryDirectory() as folder:
        random.seed(5)  # ties among equal replicas
        async with isolation.running(Path(folder)) as site:
            loads = [isolation.drive(site, "quiet", QUIET, 1)]
            if noise is not None:
                loads.append(isolation.drive(site, "noisy", noise, 2))
            quiet, *others = await asyncio.gather(*loads)
            assert site.gateway.path.live == 0
            died = sum(one.lives for one in site.replicas)
            return quiet, others[0] if others else isolation.Heard(), died


@functools.cache
def alone() -> isolation.Heard:
    return virtualtime.run(measure(None))[0]


def compare(quiet: isolation.Heard) -> None:
    assert not quiet.failed
    assert quiet.whole == alone().whole
    for of, share in (("ttft", 0.95), ("gaps", 0.99)):
        with_noise = isolation.quantile(getattr(quiet, of), share)
        without = isolation.quantile(getattr(alone(), of), share)
        assert with_noise <= RATIO * without, (of, with_noise, without)


def test_a_spike() -> None:
    quiet, noisy, _ = virtualtime.run(measure(SPIKE))
    compare(quiet)
    assert noisy.whole > 200
    assert not noisy.failed


def test_a_flood_of_long_prompts() -> None:
    quiet, noisy, _ = virtualtime.run(measure(FLOOD))
    compare(quiet)
    assert noisy.whole > 10
    assert not noisy.failed


def test_a_poisonous_request_kills_two_engines_and_no_stream_of_others() -> None:
    quiet, noisy, died = virtualtime.run(measure(POISON))
    compare(quiet)
    assert noisy.whole == 0
    assert 0 < died <= 2 * len(noisy.failed)
    assert all("set aside" in said for said in noisy.failed)
