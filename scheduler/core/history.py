"""Which quarters of an hour of the past are worth learning from: pure.

A quarter without a request is a quarter in which nobody asked, and says so, unless nobody asked for anything
at all for a while at a time at which other days of its kind were busy: then the site was down, or it was a
holiday, and neither says anything of next week. Before a model's first request nothing is known of it.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from scheduler.core import forecast

QUARTER_US = forecast.SLOT_S * 1_000_000
SILENT = 4  # quarters in a row without any request that may be an outage


def samples(
    counts: Mapping[int, float],
    first_us: int,
    last_us: int,
    local_s: Callable[[int], float],
    holes: Collection[int] = (),
) -> Iterator[tuple[float, float]]:
    """Yield what `forecast.learn` takes of one model: (local second since a Monday, mean requests/s).

    Args:
        counts: begin of a quarter (UTC µs) → requests that arrived in it; 0 where absent.
        first_us: begin of the past that is looked at, a whole quarter.
        last_us: its end.
        local_s: UTC µs → seconds of the wall clock since some Monday 00:00.
        holes: quarters that say nothing; see `holes`.
    """
    known = [at_us for at_us, count in counts.items() if count > 0 and at_us >= first_us]
    if not known:
        return
    for at_us in range(min(known), last_us, QUARTER_US):
        if at_us not in holes:
            yield local_s(at_us), counts.get(at_us, 0.0) / forecast.SLOT_S


def holes(
    totals: Mapping[int, float], first_us: int, last_us: int, local_s: Callable[[int], float]
) -> frozenset[int]:
    """Return the quarters in which the site was down, or had a holiday.

    Args:
        totals: as `counts` of `samples`, over all models.
        first_us: as for `samples`.
        last_us: as for `samples`.
        local_s: as for `samples`.
    """
    known = [at_us for at_us, count in totals.items() if count > 0 and at_us >= first_us]
    if not known:
        return frozenset()
    quarters = range(min(known), last_us, QUARTER_US)
    slots = {at_us: forecast.slot_of(local_s(at_us)) for at_us in quarters}
    busy: dict[tuple[bool, int], list[int]] = {}
    for at_us in quarters:
        met = busy.setdefault(slots[at_us], [0, 0])
        met[0] += 1
        met[1] += totals.get(at_us, 0.0) > 0
    found: list[int] = []
    for run in _silences(totals, quarters):
        for at_us in run if len(run) >= SILENT else ():
            days, active = busy[slots[at_us]]
            if active * 2 > days - 1:
                found.append(at_us)
    return frozenset(found)


def _silences(totals: Mapping[int, float], quarters: Sequence[int]) -> Iterator[list[int]]:
    run: list[int] = []
    for at_us in quarters:
        if totals.get(at_us, 0.0) > 0:
            if run:
                yield run
            run = []
        else:
            run.append(at_us)
    if run:
        yield run
