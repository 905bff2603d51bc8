"""Which version of a model answers a conversation: by the route's percent, the same one each time. Pure.

Weighted rendezvous hashing (Schindelhauer and Schomaker, 2005): each version draws a number from the
conversation's key, and -weight / ln(draw) decides. A version's share of keys is its share of the weights, and
as one weight grows, keys only move to that version: a conversation that has gone over stays there.
"""

import math
from collections.abc import Callable

import xxhash

from scheduler.contracts import fleet

_UNIT = 2.0**-64


def pick(route: fleet.Route, key: int, *likes: Callable[[str], bool]) -> str | None:
    """Return the version that answers ``key``, None where the route names none.

    Args:
        route: the weights; they need not add up to 100.
        key: of the conversation, 64 bits; equal keys get equal versions under equal weights.
        likes: what a version should be, the best first; those alone count that are the first of it that any
            is: a rollout's next version may not be up yet, or lack the adapter, or be in quarantine.
    """
    versions = [version for version, weight in route.weights.items() if weight > 0]
    if len(versions) > 1:
        liked = ([version for version in versions if like(version)] for like in likes)
        versions = next(filter(None, liked), versions)
    if len(versions) < 2:
        return versions[0] if versions else None
    return max(
        versions, key=lambda version: (_claim(version, key, route.weights[version]), version)
    )


def pooled(route: fleet.Route, prompt_tokens: int, all_tokens: int) -> fleet.Pool | None:
    """Return the pool of a request's length, None where the versions by percent take it.

    Args:
        route: with its pools, rising.
        prompt_tokens: of one sequence, estimated where it is not known.
        all_tokens: prompt and output that it may need.
    """
    found, room = None, route.base_context or route.max_context
    for pool in route.pools:
        if prompt_tokens >= pool.from_tokens or all_tokens > room:
            found, room = pool, pool.max_context
    return found


def _claim(version: str, key: int, weight: int) -> float:
    drawn = (xxhash.xxh3_64_intdigest(version.encode(), key) + 0.5) * _UNIT
    return -weight / math.log(min(drawn, 1 - _UNIT * 2048))  # 1 - 2^-53: ln(1) is no divisor
