"""Where a request's or a token's time goes, by module: cProfile's own times, built-ins with their callers.

The profiler makes every call dearer, so small functions weigh more here than they do; shares, no times.
"""

import collections
import cProfile
import pstats
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

_LEAST = 0.01  # smaller shares are added up
_HARNESS = ("gateway_inside.py", "gateway_load.py", "gateway_mock.py")


class Part(NamedTuple):
    """One module.

    Attributes:
        name: the module, as a path.
        share: of the time, 0 to 1.
        calls: of its functions, for each request or token.
    """

    name: str
    share: float
    calls: float


def parts(stats: Mapping[Any, Any], count: int) -> list[Part]:
    """Return the modules of a profile, the dearest first.

    Args:
        stats: `pstats.Stats.stats`.
        count: how many requests or tokens it covers.
    """
    times: collections.Counter[str] = collections.Counter()
    calls: collections.Counter[str] = collections.Counter()
    for (file, _, _), (_, number, own, _, callers) in stats.items():
        if file != "~":
            times[named(file)] += own
            calls[named(file)] += number
            continue
        for (caller, _, _), (_, _, within, _) in callers.items():
            times["libraries, called by libraries" if caller == "~" else named(caller)] += within
    for name in [name for name in times if name.endswith(_HARNESS)]:
        del times[name]
    whole = sum(times.values()) or 1.0
    found = [Part(name, took / whole, calls[name] / count) for name, took in times.most_common()]
    small = [part for part in found if part.share < _LEAST]
    rest = Part(f"{len(small)} others", sum(p.share for p in small), sum(p.calls for p in small))
    return [part for part in found if part.share >= _LEAST] + [rest] * bool(small)


def named(file: str) -> str:
    """Return a file's name as a reader of the report knows it."""
    path = Path(file)
    if "site-packages" in path.parts:
        return "/".join(path.parts[path.parts.index("site-packages") + 1 :])
    root = Path(__file__).resolve().parents[2]
    if path.is_relative_to(root):
        return str(path.relative_to(root))
    return f"Python's {path.name}"


def table(what: str, figures: Mapping[str, float], profile: cProfile.Profile, count: int) -> str:
    """Return one Markdown table, with a line before it.

    Args:
        what: a request, or a token.
        figures: its least and median time without the profiler, in µs.
        profile: what was seen.
        count: how many requests or tokens were.
    """
    stats: Any = pstats.Stats(profile)
    found = parts(stats.stats, count)
    lines = [
        f"{what}, without sockets: {figures['least']:g} µs at least, median {figures['median']:g}; "
        f"{sum(part.calls for part in found):.0f} calls of Python functions.",
        "",
        "| module | share, % | calls |",
        "| --- | --- | --- |",
        *[f"| {part.name} | {part.share * 100:.1f} | {part.calls:.1f} |" for part in found],
    ]
    return "\n".join(lines)
