"""However rows are cut, ordered and owned: sums by the runs in a file are those of every row of it."""

import pathlib
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow.parquet as pq
from hypothesis import given, settings
from hypothesis import strategies as st

from accounting import footers, pieces, runs, schema
from scheduler.contracts import usage
from tests.unit.accounting import samples

DAY = "2026-11-07"
TEXTS = st.sampled_from(["a", "b", "é|", ""])
KEYS = st.lists(
    st.sampled_from(["team", "model", "tier", "user", "endpoint", "adapter", "payer"]), unique=True
)


@st.composite
def rows(draw: st.DrawFn) -> usage.UsageRow:
    counts = st.integers(0, 2**40)
    return samples.row(
        "close",
        "q",
        payer=draw(st.sampled_from(list(usage.Payer))),
        team=draw(TEXTS),
        model=draw(TEXTS),
        user=draw(TEXTS),
        adapter=draw(TEXTS),
        arrived_us=draw(st.integers(0, 50)),
        uncached_prompt_tokens=draw(counts),
        cached_prompt_tokens=draw(counts),
        output_tokens=draw(counts),
    )


class Piece:
    """Rows as a merge hands them over."""

    def __init__(self, some: Sequence[usage.UsageRow]) -> None:
        self._rows = schema.to_arrow(schema.USAGE, some)

    def to_arrow_reader(self, _: int) -> Any:
        return self._rows.to_reader()


@settings(deadline=None)
@given(
    st.lists(st.lists(rows(), min_size=1, max_size=12), min_size=1, max_size=4),
    KEYS,
    st.lists(st.integers(0, 51), unique=True, min_size=2, max_size=6).map(sorted),
    st.booleans(),
)
def test_sums_by_runs_are_sums_over_rows(
    groups: list[list[usage.UsageRow]], keys: list[str], cuts: list[int], whole: bool
) -> None:
    spans = [(0, 99)] if whole else list(zip(cuts[::2], cuts[1::2], strict=False))
    wanted = runs.Wanted(tuple(keys), spans)
    with tempfile.TemporaryDirectory() as folder:
        made = pieces.write(pathlib.Path(folder), schema.USAGE, DAY, iter(map(Piece, groups)))
        path = pathlib.Path(folder) / made.path
        span = 0 if whole else None
        by_runs = summed(path, wanted, span)
        pq.write_table(pq.read_table(path).replace_schema_metadata(None), path)
        assert pq.read_metadata(path).metadata.keys() == {b"ARROW:schema"}
        assert by_runs == summed(path, wanted, span) == counted(groups, wanted)


def summed(path: pathlib.Path, wanted: runs.Wanted, span: int | None) -> Counter[Any]:
    found = runs.of_file(path, wanted, span, footers.Footers(), "")
    assert found is not None
    table = runs.added_up(found.parts, wanted.keys)
    answer: Counter[Any] = Counter()
    for number, owner, amounts in runs.rows_of(table, wanted.keys):
        for name, amount in zip(runs.SUMS, amounts, strict=True):
            assert (number, owner, name) not in answer
            answer[number, owner, name] = amount
    return answer


def counted(groups: Sequence[Sequence[usage.UsageRow]], wanted: runs.Wanted) -> Counter[Any]:
    answer: Counter[Any] = Counter()
    for row in _flat(groups):
        for number, (first, last) in enumerate(wanted.spans):
            if first <= row["arrived_us"] < last and row["payer"] == "team":
                owner = tuple(row[name] for name in wanted.keys)
                for name in runs.SUMS:
                    answer[number, owner, name] += row[name]
    return answer


def _flat(groups: Sequence[Sequence[usage.UsageRow]]) -> Iterator[dict[str, Any]]:
    for group in groups:
        for row in group:
            yield row.flat()
