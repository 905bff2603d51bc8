"""Nothing of GPU time is lost or made up, whatever the rows say: gaps, overlaps, clocks that step."""

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from accounting import apportion, shares, tiling

TIMES = st.integers(0, 60)
LEASES, REPLICAS = 2, 3  # replicas 0, 1 and 2 of each lease


@st.composite
def leased(draw: st.DrawFn) -> dict[str, int]:
    start, lease = draw(TIMES), draw(st.integers(0, LEASES - 1))
    return {
        "lease": lease,
        "run": 2 * lease + draw(st.integers(0, 1)),
        "parts": 1,
        "gpus": draw(st.integers(0, 8)),
        "start": start,
        "end": start + draw(st.integers(-5, 60)),  # a clock stepped back
    }


@st.composite
def held(draw: st.DrawFn) -> dict[str, int]:
    start, lease = draw(TIMES), draw(st.integers(0, LEASES - 1))
    return {
        "lease": lease,
        "replica": REPLICAS * lease + draw(st.integers(0, REPLICAS - 1)),
        "gpus": draw(st.integers(0, 8)),
        "start": start,
        "end": start + draw(st.integers(-5, 60)),
        "state": draw(st.sampled_from(list(apportion.State))),
        "busy_us": draw(st.integers(0, 80)),
        "measured": draw(st.booleans()),
    }


@st.composite
def work(draw: st.DrawFn) -> dict[str, int]:
    start = draw(TIMES)
    return {
        "replica": draw(st.integers(0, LEASES * REPLICAS)),  # one of them is nowhere
        "owner": draw(st.integers(-1, 3)),
        "start": start,
        "first": draw(st.one_of(st.just(0), st.integers(0, 130))),
        "end": start + draw(st.integers(1, 60)),
        "prefill": draw(st.integers(0, 10**12)),
        "decode": draw(st.integers(0, 10**12)),
    }


def arrays(kind: type[Any], rows: list[dict[str, int]]) -> Any:
    fields = [field.name for field in dataclasses.fields(kind)]
    made = {name: shares.ints([row[name] for row in rows]) for name in fields}
    if "measured" in made:
        made["measured"] = made["measured"].astype(bool)
    return kind(**made)


def truth(rows: list[dict[str, int]], start: int, end: int) -> int:
    """Allocated GPU-µs between two times, moment by moment: no moment of a run counts twice."""
    total = 0
    for at in range(start, end):
        runs: dict[int, dict[str, int]] = {}
        for row in sorted(rows, key=lambda each: (each["start"], each["end"])):
            if row["start"] <= at < row["end"]:
                runs.setdefault(row["run"], row)
        total += sum(row["gpus"] for row in runs.values())
    return total


@given(
    st.lists(leased(), max_size=5),
    st.lists(held(), max_size=8),
    st.lists(work(), max_size=10),
    st.lists(st.integers(0, 130), min_size=2, max_size=5, unique=True).map(sorted),
)
def test_allocated_is_attributed_and_idle_and_start_up_and_waste(
    leases: list[dict[str, int]],
    replicas: list[dict[str, int]],
    jobs: list[dict[str, int]],
    borders: list[int],
) -> None:
    lines = apportion.attribute(
        arrays(tiling.Leased, leases),
        arrays(tiling.Held, replicas),
        arrays(apportion.Activity, replicas),
        arrays(apportion.Work, jobs),
        shares.ints(borders),
    )
    assert (lines.gpu_us > 0).all()
    for lease in range(LEASES):
        rows = [row for row in leases if row["lease"] == lease]
        for period, (start, end) in enumerate(itertools.pairwise(borders)):
            of = (lines.lease == lease) & (lines.period == period)
            assert int(lines.gpu_us[of].sum()) == truth(rows, start, end)
            for replica in range(REPLICAS * lease, REPLICAS * (lease + 1)):
                mine = int(lines.gpu_us[of & (lines.replica == replica)].sum())
                spans = [row for row in replicas if row["replica"] == replica]
                most = max((row["gpus"] for row in spans), default=0) * _held_us(spans, start, end)
                assert mine <= most
    claimed = lines.item >= 0
    owners = arrays(apportion.Work, jobs).owner[lines.item[claimed]]
    kinds = lines.kind[claimed]
    assert ((owners == apportion.NOBODY) == (kinds == apportion.Kind.RECOMPUTED)).all()
    assert not np.isin(
        lines.kind[~claimed], [apportion.Kind.ATTRIBUTED, apportion.Kind.RECOMPUTED]
    ).any()


@given(
    st.lists(leased(), max_size=5),
    st.lists(held(), max_size=8),
    st.lists(work(), max_size=10),
    st.integers(2, 9),
)
def test_parts_of_a_gpu_are_its_fraction_and_add_up(
    leases: list[dict[str, int]],
    replicas: list[dict[str, int]],
    jobs: list[dict[str, int]],
    parts: int,
) -> None:
    """One lease counts parts and the other does not; a piece loses less than a µs to rounding."""
    for row in leases:
        row["parts"] = parts if row["lease"] == 0 else 1
    lines = apportion.attribute(
        arrays(tiling.Leased, leases),
        arrays(tiling.Held, replicas),
        arrays(apportion.Activity, replicas),
        arrays(apportion.Work, jobs),
        shares.ints([0, 60, 130]),
    )
    for lease in range(LEASES):
        rows = [row for row in leases if row["lease"] == lease]
        exact = truth(rows, 0, 130)
        found = int(lines.gpu_us[lines.lease == lease].sum())
        if lease:
            assert found == exact
        else:
            pieces = 2 * (len(leases) + len(replicas) + 2) * (REPLICAS + 1)
            assert exact / parts - pieces < found <= exact / parts


def _held_us(rows: list[dict[str, int]], start: int, end: int) -> int:
    return sum(
        any(row["start"] <= at < row["end"] and row["gpus"] > 0 for row in rows)
        for at in range(start, end)
    )


@given(
    st.lists(
        st.tuples(
            st.integers(0, shares.MOST), st.lists(st.integers(0, 10**15), min_size=1, max_size=6)
        ),
        min_size=1,
        max_size=5,
    )
)
def test_a_split_adds_up_and_is_fair(groups: list[tuple[int, list[int]]]) -> None:
    amounts = shares.ints([amount for amount, _ in groups])
    member = [index for index, (_, weights) in enumerate(groups) for _ in weights]
    flat = [weight for _, weights in groups for weight in weights]
    parts = shares.largest_remainder(amounts, shares.ints(member), shares.ints(flat))
    assert (parts >= 0).all()
    for index, (amount, weights) in enumerate(groups):
        mine = parts[shares.ints(member) == index]
        assert int(mine.sum()) == amount
        if total := sum(weights):
            # Weights are counted in 2⁻²⁸ of their sum (of what fits beside a large amount); a part is off by
            # so much of the amount, and one.
            room = 1 + (len(weights) + 1) * amount / min(2**28, 2**62 // max(1, amount))
            for part, weight in zip(mine, weights, strict=True):
                assert abs(int(part) - amount * weight / total) <= room


def test_a_minute_of_many_gpus_is_shared_out_and_others_change_no_part_of_it() -> None:
    large, weights = 5_000 * 60_000_000, [1, 2, 7]
    alone = shares.largest_remainder(
        shares.ints([large]), shares.ints([0, 0, 0]), shares.ints(weights)
    )
    assert alone.tolist() == pytest.approx([large * w / 10 for w in weights], rel=1e-6)
    beside = shares.largest_remainder(
        shares.ints([large, 3, shares.MOST]),
        shares.ints([0, 0, 0, 1, 2, 2]),
        shares.ints([*weights, 1, 1, 1]),
    )
    assert beside[:3].tolist() == alone.tolist()
    assert beside.sum() == large + 3 + shares.MOST


def test_more_than_any_replica_holds_is_refused_and_says_how_much() -> None:
    with pytest.raises(ValueError, match="GPU-µs of one replica"):
        shares.largest_remainder(shares.ints([shares.MOST + 1]), shares.ints([0]), shares.ints([1]))


@given(
    st.integers(0, 10**12),
    st.integers(0, 10**9),
    st.lists(st.integers(0, 10**9), min_size=2, max_size=8).map(sorted),
)
def test_pieces_of_an_interval_add_up_to_its_amount(
    amount: int, start: int, cuts: list[int]
) -> None:
    borders = shares.ints([start + cut for cut in cuts])
    size = len(borders) - 1
    total, begin, end = (np.full(size, each) for each in (amount, borders[0], borders[-1]))
    parts = shares.spread(total, begin, end, borders[:-1], borders[1:])
    assert (parts >= 0).all()
    if borders[-1] > borders[0]:
        assert int(parts.sum()) == amount
