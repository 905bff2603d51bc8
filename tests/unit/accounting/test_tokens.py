"""Tokens summed as files lie and by SQL are the same, wherever the rows are and however they are cut."""

import dataclasses
import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from accounting import books, compact, manifest, merge, owner_runs, reports, runs, ship, tokens
from scheduler.contracts import clock, usage
from tests.unit.accounting import samples
from tests.unit.accounting.test_ship import write

DAY = samples.DAY_US
MIDNIGHT = samples.NOON - DAY // 2
LATER = clock.FakeClock(samples.NOON + 9 * DAY)
KEYS = ("team", "model", "tier")
SPANS = [
    (MIDNIGHT, MIDNIGHT + DAY),
    (MIDNIGHT + DAY, MIDNIGHT + DAY + 7_000_000_123),
    (MIDNIGHT + DAY + 7_000_000_123, MIDNIGHT + 2 * DAY - 1),
    (MIDNIGHT + 3 * DAY - 5, MIDNIGHT + 4 * DAY),
]


def made(seed: int, number: int) -> list[usage.Row]:
    """Return rows of five days, each attempt with one of OPEN, CLOSE and REPLICA at least."""
    chance = random.Random(seed)
    rows: list[usage.Row] = []
    for n in range(number):
        about = {
            "team": chance.choice(["007", "7", "", "NULL", "é|b"]),
            "model": chance.choice(["a", "b"]),
            "tier": chance.choice(["batch", "interactive"]),
            "arrived_us": MIDNIGHT + chance.randrange(5 * DAY),
        }
        payer = chance.choice(list(usage.Payer))
        for kind in chance.sample(["open", "close", "replica"], chance.randrange(1, 4)):
            counts = {name: chance.randrange(10**6) for name in runs.SUMS} if kind != "open" else {}
            rows.append(samples.row(kind, f"q{n}", 1 + n % 3, payer=payer, **about, **counts))
    return rows


def expected(
    rows: Sequence[usage.Row], keys: tuple[str, ...] = KEYS
) -> Counter[tuple[object, ...]]:
    found: Counter[tuple[object, ...]] = Counter()
    for row in merge.merge(row for row in rows if isinstance(row, usage.UsageRow)):
        flat = row.flat()
        for number, (first, last) in enumerate(SPANS):
            if first <= flat["arrived_us"] < last and flat["payer"] == "team":
                key = number, *(flat[name] for name in keys)
                for name in runs.SUMS:
                    found[*key, name] += flat[name]
    return found


def taken(state: Path, keys: tuple[str, ...] = KEYS) -> Counter[tuple[object, ...]]:
    answer = tokens.take(books.Books(state), SPANS, keys)
    assert answer.problems == ()
    found: Counter[tuple[object, ...]] = Counter()
    for each in answer.sums:
        for name in runs.SUMS:
            assert (each.span, *each.keys, name) not in found
            found[each.span, *each.keys, name] = getattr(each, name)
    return found


@pytest.mark.parametrize("seed", range(3))
def test_sums_are_those_of_the_merged_rows_wherever_they_are(seed: int, tmp_path: Path) -> None:
    rows = made(seed, 300)
    early, late = rows[:400], rows[400:]
    write(tmp_path, early)
    assert taken(tmp_path) == expected(early)
    ship.ship(tmp_path, LATER)
    assert taken(tmp_path) == expected(early)
    compact.compact(tmp_path, LATER, piece_rows=50)
    closed = given_up(early)
    assert taken(tmp_path) == closed
    assert taken(tmp_path, ("team",)) == regrouped(closed)
    assert taken(tmp_path, ("cluster",)) == given_up(
        early, ("cluster",)
    )  # one value: it is not read
    write(tmp_path, late)
    ship.ship(tmp_path, LATER)
    taken(tmp_path)
    compact.compact(tmp_path, LATER, piece_rows=50)
    assert taken(tmp_path) == given_up(rows)


def test_a_file_of_more_parts_than_are_kept_is_summed_like_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "_AT_ONCE", 2)
    rows = made(7, 200)
    write(tmp_path, rows)
    ship.ship(tmp_path, LATER)
    compact.compact(tmp_path, LATER, piece_rows=10)
    assert taken(tmp_path) == given_up(rows)


def given_up(rows: list[usage.Row], keys: tuple[str, ...] = KEYS) -> Counter[tuple[object, ...]]:
    """Return what is expected when the platform pays for what nobody closed."""
    names = Counter(
        (row.identity.request_id, row.kind) for row in rows if isinstance(row, usage.UsageRow)
    )
    found = []
    for row in rows:
        assert isinstance(row, usage.UsageRow)
        name = row.identity.request_id
        if not names[name, usage.RowKind.CLOSE] and not names[name, usage.RowKind.REPLICA]:
            row = dataclasses.replace(row, payer=usage.Payer.PLATFORM)
        found.append(row)
    return expected(found, keys)


def regrouped(found: Counter[tuple[object, ...]]) -> Counter[tuple[object, ...]]:
    """Return sums by team of sums by `KEYS`."""
    answer: Counter[tuple[object, ...]] = Counter()
    for (span, *keys, name), amount in found.items():
        answer[span, keys[KEYS.index("team")], name] += amount
    return answer


def test_compacted_days_are_summed_without_sql(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = made(5, 50)
    write(tmp_path, rows)
    ship.ship(tmp_path, LATER)
    compact.compact(tmp_path, LATER)
    monkeypatch.setattr(books.Books, "opened", None)
    assert taken(tmp_path) == given_up(rows)


@pytest.mark.parametrize("name", runs.SUMS)
def test_sums_beyond_64_bits_are_exact(name: str, tmp_path: Path) -> None:
    largest = 2**63 - 1
    for n in range(3):
        write(
            tmp_path,
            [samples.row("close", f"q{n}", started_us=MIDNIGHT + n * DAY // 2, **{name: largest})],
        )
    ship.ship(tmp_path, LATER)
    compact.compact(tmp_path, LATER)
    span = [(MIDNIGHT, MIDNIGHT + 2 * DAY)]
    (found,) = tokens.take(books.Books(tmp_path), span, ("team",)).sums
    assert getattr(found, name) == 3 * largest


def test_a_damaged_file_is_named_and_not_summed(tmp_path: Path) -> None:
    write(tmp_path, [samples.row("close", "q1", output_tokens=5)])
    ship.ship(tmp_path, LATER)
    compact.compact(tmp_path, LATER)
    current = manifest.load(tmp_path / "parquet")
    assert current is not None
    path = tmp_path / "parquet" / current.files[0].path
    path.write_bytes(path.read_bytes()[:-9] + b"123456789")
    found = tokens.take(books.Books(tmp_path), SPANS, KEYS)
    assert found.sums == []
    assert path.name in found.problems[0]


def rewritten(state: Path, change: Callable[[pa.Table], pa.Table], **how: bool) -> None:
    """Write the only file anew as another release would have."""
    folder = state / "parquet"
    current = manifest.load(folder)
    assert current is not None
    (file,) = current.files
    path = folder / file.path
    pq.write_table(change(pq.read_table(path)), path, **how)
    entry = dataclasses.replace(file, sha256=manifest.digest(path), bytes=path.stat().st_size)
    manifest.save(folder, dataclasses.replace(current, files=(entry,)))


def test_a_file_of_a_release_with_fewer_columns_is_summed(tmp_path: Path) -> None:
    write(tmp_path, [samples.row("close", "q1", output_tokens=5, waste_tokens=3)])
    ship.ship(tmp_path, LATER)
    compact.compact(tmp_path, LATER)
    rewritten(tmp_path, lambda table: table.drop_columns(["waste_tokens"]))
    (found,) = tokens.take(books.Books(tmp_path), SPANS, KEYS).sums
    assert found.output_tokens == 5


def test_a_file_that_says_nothing_of_its_numbers_is_summed_by_sql(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, [samples.row("close", "q1", output_tokens=5)])
    ship.ship(tmp_path, LATER)
    compact.compact(tmp_path, LATER)
    rewritten(tmp_path, lambda table: table, write_statistics=False)
    (found,) = tokens.take(books.Books(tmp_path), SPANS, KEYS).sums
    assert found.output_tokens == 5
    monkeypatch.setattr(books.Books, "opened", None)
    with pytest.raises(TypeError):
        tokens.take(books.Books(tmp_path), SPANS, KEYS)


def test_what_the_platform_pays_is_not_summed_whatever_the_file(tmp_path: Path) -> None:
    ours: list[usage.Row] = [
        samples.row("close", f"q{n}", payer="platform", output_tokens=7) for n in range(3)
    ]
    write(tmp_path, ours)
    assert tokens.take(books.Books(tmp_path), SPANS, KEYS).sums == []
    ship.ship(tmp_path, LATER)
    compact.compact(tmp_path, LATER)
    assert tokens.take(books.Books(tmp_path), SPANS, KEYS).sums == []
    write(tmp_path, [samples.row("close", "q9", output_tokens=5, started_us=samples.NOON + DAY)])
    ship.ship(tmp_path, LATER)
    compact.compact(tmp_path, LATER)
    (found,) = tokens.take(books.Books(tmp_path), SPANS, KEYS).sums
    assert found.output_tokens == 5


def test_files_that_a_compaction_replaced_meanwhile_are_looked_up_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, [samples.row("close", "q1", output_tokens=5)])
    ship.ship(tmp_path, LATER)
    compact.compact(tmp_path, LATER)
    really = runs.of_file
    gone: list[Path] = []

    def of_file(path: Path, *given: Any) -> runs.Summed | None:
        if not gone:
            gone.append(path)
            raise FileNotFoundError(path)
        return really(path, *given)

    monkeypatch.setattr(runs, "of_file", of_file)
    (found,) = tokens.take(books.Books(tmp_path), SPANS, KEYS).sums
    assert found.output_tokens == 5
    monkeypatch.setattr(runs, "of_file", lambda *_: (_ for _ in ()).throw(FileNotFoundError))
    with pytest.raises(manifest.ManifestDamaged, match="missing"):
        tokens.take(books.Books(tmp_path), SPANS, KEYS)


def test_rows_in_any_order_have_the_same_sums() -> None:
    wanted = runs.Wanted(("team", "tier"), [(0, 10), (20, 30)])
    payers = ["team"] * 6 + ["platform"]
    table = pa.table(
        {
            "team": pa.array(["a", "b", "a", "b", "a", "c", "a"]).dictionary_encode(),
            "payer": pa.array(payers).dictionary_encode(),
            "arrived_us": [0, 9, 10, 20, 29, 30, 5],
            **{name: [1, 2, 4, 8, 16, 32, 64] for name in runs.SUMS},
        }
    )
    its = owner_runs.found(table, ("team", "tier", "payer"), {"tier": "batch"})
    parts = [runs._summed(lambda name: table[name].to_numpy(), its, wanted, None)] * 2
    found = runs.added_up(parts, wanted.keys)
    rows = {
        (row["span"], row["team"], row["tier"]): row["output_tokens"] for row in found.to_pylist()
    }
    assert rows == {
        (0, "a", "batch"): 2,
        (0, "b", "batch"): 4,
        (1, "b", "batch"): 16,
        (1, "a", "batch"): 32,
    }


class Columns:
    """Notes which columns are read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.read: set[str] = set()
        really = pq.ParquetFile.read_row_group

        def read_row_group(*given: Any, columns: list[str], **how: Any) -> Any:
            self.read.update(columns)
            return really(*given, columns=columns, **how)

        monkeypatch.setattr(pq.ParquetFile, "read_row_group", read_row_group)


def test_of_a_file_that_says_which_rows_are_whose_only_numbers_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = made(11, 60)
    write(tmp_path, rows)
    ship.ship(tmp_path, LATER)
    compact.compact(tmp_path, LATER, piece_rows=20)
    columns = Columns(monkeypatch)
    assert taken(tmp_path) == given_up(rows)
    assert columns.read == {*runs.SUMS, "arrived_us"}  # some spans begin within a day


@pytest.mark.parametrize("keys", [KEYS, ("team",), ("tier", "user"), (*reports.OWNER, "payer")])
def test_a_file_that_does_not_say_it_is_summed_by_its_columns(
    keys: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = made(12, 60)
    write(tmp_path, rows)
    ship.ship(tmp_path, LATER)
    compact.compact(tmp_path, LATER, piece_rows=20)
    known = taken(tmp_path, keys)
    assert known == given_up(rows, keys)
    monkeypatch.setattr(owner_runs, "stored", lambda *_: None)
    columns = Columns(monkeypatch)
    assert taken(tmp_path, keys) == known
    assert columns.read & {"team", "payer", "tier"}


def test_runs_that_are_too_many_are_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner_runs, "_MOST_BYTES", 10)
    rows = made(13, 30)
    write(tmp_path, rows)
    ship.ship(tmp_path, LATER)
    compact.compact(tmp_path, LATER)
    columns = Columns(monkeypatch)
    assert taken(tmp_path) == given_up(rows)
    assert "payer" in columns.read


def one_day(state: Path) -> list[usage.Row]:
    """Compact a day of two teams' requests into one file."""
    rows: list[usage.Row] = [
        samples.row("close", f"q{n}", team=f"t{n % 2}", output_tokens=2**n) for n in range(6)
    ]
    write(state, rows)
    ship.ship(state, LATER)
    assert compact.compact(state, LATER).problems == ()
    return rows


@pytest.mark.parametrize("change", [lambda t: t.slice(1), lambda t: pa.concat_tables([t, t])])
def test_a_file_whose_runs_are_not_those_of_its_rows_is_named_and_not_summed(
    change: Callable[[pa.Table], pa.Table], tmp_path: Path
) -> None:
    """As where a tool took rows out, or put some in, and kept the notes on the file."""
    one_day(tmp_path)
    rewritten(tmp_path, change)
    found = tokens.take(books.Books(tmp_path), SPANS, KEYS)
    assert found.sums == []
    (problem,) = found.problems
    assert "not those of its rows" in problem
    assert "6 usage rows of" in problem


@pytest.mark.parametrize(
    "told",
    [
        b"",
        b"[]",
        b'{"kind": "<i8", "count": 1, "data": ""}',
        b'{"kind": "<i1", "count": 1, "data": "no base64", "words": ["a"], "groups": [1]}',
        b'{"kind": "<i1", "count": 1, "data": "EAE=", "words": [], "groups": [1]}',
        b'{"kind": "<i1", "count": 1, "data": "EAE=", "words": ["a"], "groups": [2]}',
        b'{"kind": "<i1", "count": 1, "data": "EAA=", "words": ["a"], "groups": [1]}',
    ],
)
def test_runs_that_cannot_be_read_are_named(told: bytes, tmp_path: Path) -> None:
    one_day(tmp_path)
    names = [
        f"{len(keys)}:{name}"
        for keys in (owner_runs.KEYS, owner_runs.BILLED)
        for name in (*keys, "rows")
    ]
    noted = {owner_runs.NAME + name.encode(): told for name in names}
    rewritten(tmp_path, lambda table: table.replace_schema_metadata(noted))
    found = tokens.take(books.Books(tmp_path), SPANS, KEYS)
    assert found.sums == []
    assert "can't be read" in found.problems[0]


def test_a_compaction_that_would_note_other_runs_leaves_the_day_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = made(14, 40)
    write(tmp_path, rows)
    ship.ship(tmp_path, LATER)
    before = {path: path.stat().st_size for path in (tmp_path / "parquet").rglob("*.parquet")}
    really = owner_runs.kept

    def shifted(groups: Sequence[owner_runs.Runs]) -> dict[bytes, bytes]:
        """As many rows, and each run's are the next one's."""
        wrong = []
        for each in groups:
            owners = {
                name: (np.roll(codes, 1), words) for name, (codes, words) in each.owners.items()
            }
            wrong.append(dataclasses.replace(each, owners=owners))
        return really(wrong)

    monkeypatch.setattr(owner_runs, "kept", shifted)
    problems = compact.compact(tmp_path, LATER).problems
    assert len(problems) == 5
    assert all("not those of its rows" in each for each in problems)
    after = {path: path.stat().st_size for path in (tmp_path / "parquet").rglob("*.parquet")}
    assert after == before
    assert taken(tmp_path) == expected(rows)
