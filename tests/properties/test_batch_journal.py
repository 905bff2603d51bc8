"""Whatever a journal held and wherever it was cut: what was whole comes back, and results are exact."""

import collections
import json
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from batch_jobs import directives, journal, journal_writer, lines, model, results
from tests.unit.batch_jobs import world

LINES = 8
ENTRIES = st.lists(
    st.builds(
        journal.Entry,
        kind=st.sampled_from([kind for kind in journal.Kind if kind is not journal.Kind.SEALED]),
        line=st.integers(1, LINES),
        attempt=st.integers(0, 2**32 - 1),
        data=st.binary(max_size=40),
    ),
    max_size=30,
)


def result(entry: journal.Entry) -> journal.Entry:
    """Give an entry the data that a runner would: results are lines of JSON with the id."""
    if entry.kind not in journal.RESULTS:
        return entry
    data = json.dumps({"custom_id": f"c{entry.line}"}).encode() + b"\n"
    return journal.Entry(entry.kind, entry.line, entry.attempt, data)


def write(path: Path, entries: list[journal.Entry]) -> None:
    writer = journal_writer.Writer(path, LINES)
    for entry in entries:
        writer.append(entry)
    writer.close()


@given(entries=ENTRIES, cut=st.floats(0, 1), tail=st.binary(max_size=20))
@settings(deadline=None)
def test_a_cut_anywhere_leaves_a_prefix(
    entries: list[journal.Entry], cut: float, tail: bytes
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal"
        write(path, entries)
        whole = path.read_bytes()
        path.write_bytes(whole[: round(cut * len(whole))])
        with path.open("rb") as file:
            kept = [entry for _, entry in journal.entries(file)]
        assert kept == entries[: len(kept)]
        expected = journal.Recovered(bytearray(LINES + 1))
        for entry in kept:
            expected.add(entry)
        writer = journal_writer.Writer(path, LINES)
        assert writer.recovered.states == expected.states
        assert writer.recovered.histories == expected.histories
        writer.append(journal.Entry(journal.Kind.SUCCEEDED, 1, data=tail))
        writer.close()
        with path.open("rb") as file:
            assert [entry for _, entry in journal.entries(file)][: len(kept)] == kept
            file.seek(0)
            assert sum(1 for _ in journal.entries(file)) == len(kept) + 1


@given(
    entries=ENTRIES,
    cut=st.floats(0, 1),
    order=st.sampled_from(list(model.Order)),
    ending=st.sampled_from([model.Ending.CANCELLED, model.Ending.EXPIRED]),
)
@settings(deadline=None)
def test_every_id_stands_once_in_the_results_of_a_cut_journal(
    entries: list[journal.Entry], cut: float, order: model.Order, ending: model.Ending
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / results.INPUT).write_bytes(world.many(LINES))
        path = folder / results.JOURNAL
        write(path, [result(entry) for entry in entries])
        whole = path.read_bytes()
        path.write_bytes(whole[: round(cut * len(whole))])
        writer = journal_writer.Writer(path, LINES)
        writer.append(journal.Entry(journal.Kind.SEALED, data=ending.encode()))
        writer.close()
        source = results.Source(folder, 1, LINES, lines.Rules(), 1 << 20)
        built = results.build(source, ending, order)
        rows = [
            json.loads(text)["custom_id"]
            for file in (results.OUTPUT, results.ERRORS)
            if (folder / file).exists()
            for text in (folder / file).read_bytes().splitlines()
        ]
        assert collections.Counter(rows) == collections.Counter(
            f"c{n}" for n in range(1, LINES + 1)
        )
        recovered = journal.recover(path, LINES)
        assert built.ok == recovered.ok
        assert built.failed == LINES - recovered.ok


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "custom_id": st.text() | JSON,
        "method": st.just("POST") | JSON,
        "url": st.just("/v1/chat/completions") | JSON,
        "body": st.dictionaries(st.sampled_from(["model", "stream", "messages"]), JSON) | JSON,
    },
)


@given(data=st.binary(max_size=200) | JSON.map(lambda value: json.dumps(value).encode()))
@settings(deadline=None)
def test_no_bytes_break_the_parser(data: bytes) -> None:
    found = lines.parse(lines.RawLine(1, data), lines.Rules())
    assert found is None or found.number == 1


@given(fields=FIELDS)
@settings(deadline=None)
def test_no_fields_break_the_parser(fields: dict[str, object]) -> None:
    found = lines.parse(lines.RawLine(1, json.dumps(fields).encode()), lines.Rules())
    if isinstance(found, lines.Line):
        assert found.custom_id == fields["custom_id"]
        assert found.endpoint == fields["url"]
    else:
        assert isinstance(found, lines.BadLine)
        assert "\n" not in found.message


@given(data=st.binary(max_size=300), steps=st.lists(st.integers(1, 50), min_size=1, max_size=20))
def test_chunks_never_change_the_lines(data: bytes, steps: list[int]) -> None:
    whole = lines.Splitter(64)
    expected = [*whole.feed(data), *whole.close()]
    cut = lines.Splitter(64)
    found: list[lines.RawLine] = []
    at = 0
    while at < len(data):
        for step in steps:
            found.extend(cut.feed(data[at : at + step]))
            at += step
    found.extend(cut.close())
    assert found == expected


@given(
    words=st.lists(
        st.text(st.characters(exclude_characters="\0\n", exclude_categories=["Cs"])), max_size=5
    )
)
def test_quoted_words_come_back_as_they_were(words: list[str]) -> None:
    quoted = [
        '"' + "".join("\\" + letter if letter in '\\"' else letter for letter in word) + '"'
        for word in words
    ]
    assert directives.split(" ".join(quoted)) == words
