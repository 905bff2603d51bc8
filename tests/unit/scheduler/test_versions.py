"""Which version answers a conversation."""

import collections

import hypothesis
import pytest
from hypothesis import strategies as st

from scheduler.contracts import fleet
from scheduler.core import versions

KEYS = range(1, 4001)


def route(**weights: int) -> fleet.Route:
    return fleet.Route("chat", weights)


@hypothesis.given(
    st.dictionaries(st.sampled_from(["v1", "v2", "v3", "v4"]), st.integers(1, 100), min_size=1)
)
def test_shares_converge_on_the_weights(weights: dict[str, int]) -> None:
    found = collections.Counter(versions.pick(route(**weights), key) for key in KEYS)
    total = sum(weights.values())
    for version, weight in weights.items():
        expected = weight / total
        sigma = (expected * (1 - expected) / len(KEYS)) ** 0.5
        assert abs(found[version] / len(KEYS) - expected) <= 5 * sigma


@hypothesis.given(
    st.integers(0, 2**64 - 1), st.integers(0, 100), st.integers(0, 100), st.integers(0, 50)
)
def test_who_has_gone_over_stays_as_the_percent_grows(
    key: int, percent: int, more: int, third: int
) -> None:
    """Only the growing version gains: nobody changes between the others."""
    low, high = sorted((percent, more))
    before = versions.pick(fleet.Route("chat", {"v1": 100 - low, "v2": low, "v3": third}), key)
    after = versions.pick(fleet.Route("chat", {"v1": 100 - low, "v2": high, "v3": third}), key)
    assert after in {before, "v2"}
    two = versions.pick(fleet.Route("chat", {"v1": 100 - low, "v2": low}), key)
    later = versions.pick(fleet.Route("chat", {"v1": 100 - high, "v2": high}), key)
    assert later == "v2" or two == "v1"


def test_those_that_take_the_request_come_first() -> None:
    half = route(v1=50, v2=50)
    assert {versions.pick(half, key, lambda version: version == "v1") for key in KEYS} == {"v1"}
    assert {versions.pick(half, key, lambda _: False) for key in KEYS} == {"v1", "v2"}
    second = (lambda _: False, lambda version: version == "v2")
    assert {versions.pick(half, key, *second) for key in KEYS} == {"v2"}
    assert versions.pick(route(v1=0), 5) is None
    assert versions.pick(route(v1=0, v2=1), 5) == "v2"


def test_the_ends_of_the_range_are_keys_too() -> None:
    for key in (0, 2**64 - 1):
        assert versions.pick(route(v1=1, v2=99), key) in {"v1", "v2"}


POOLS = fleet.Route(
    "chat",
    {"v1": 100},
    max_context=131_072,
    pools=(fleet.Pool(4096, "long", 32_768), fleet.Pool(30_000, "longer", 131_072)),
    base_context=8192,
)


@pytest.mark.parametrize(
    ("prompt", "total", "found"),
    [
        (4095, 8192, None),
        (4096, 4100, "long"),
        (100, 8193, "long"),  # its output would not fit
        (29_999, 32_768, "long"),
        (29_999, 32_769, "longer"),
        (30_000, 30_001, "longer"),
    ],
)
def test_a_long_request_goes_to_the_pool_of_its_length(
    prompt: int, total: int, found: str | None
) -> None:
    pool = versions.pooled(POOLS, prompt, total)
    assert (pool.version if pool else None) == found
