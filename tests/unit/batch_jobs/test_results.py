"""Result files: built from the journal, the same each time."""

import json
from pathlib import Path

import pytest

from batch_jobs import journal, journal_writer, lines, model, results
from tests.unit.batch_jobs import world


def parsed(number: int) -> lines.Line:
    line = lines.parse(lines.RawLine(number, world.line(f"c{number}")), lines.Rules())
    assert isinstance(line, lines.Line)
    return line


@pytest.fixture
def source(tmp_path: Path) -> results.Source:
    """Five lines, of which 3, 1 and 4 have results, in that order, and line 2 is blank."""
    rows = [world.line("c1"), b"\n", world.line("c3"), world.line("c4"), world.line("c5")]
    (tmp_path / results.INPUT).write_bytes(b"".join(rows))
    writer = journal_writer.Writer(tmp_path / results.JOURNAL, 5)
    for number in (3, 1):
        data = results.answered(8, parsed(number), "req", {"text": "naïve 漢字 🦀"})
        writer.append(journal.Entry(journal.Kind.SUCCEEDED, number, 1, data))
    bad = results.failed(
        8, 4, "c4", "bad_request", "no", status=400, request_id="r", body={"error": {}}
    )
    writer.append(journal.Entry(journal.Kind.FAILED, 4, 1, bad))
    writer.append(journal.Entry(journal.Kind.SUCCEEDED, 4, 2, b"a second result is void\n"))
    writer.close()
    return results.Source(tmp_path, 8, 5, lines.Rules(), 1 << 20)


def read(source: results.Source, name: str) -> list[dict[str, object]]:
    return [json.loads(text) for text in (source.folder / name).read_bytes().splitlines()]


@pytest.mark.parametrize(
    ("order", "answers", "errors"),
    [
        (model.Order.COMPLETION, ["c3", "c1"], ["c4", "c5"]),
        (model.Order.INPUT, ["c1", "c3"], ["c4", "c5"]),
    ],
)
def test_both_orders_hold_each_line_once(
    source: results.Source, order: model.Order, answers: list[str], errors: list[str]
) -> None:
    built = results.build(source, model.Ending.CANCELLED, order)
    assert built == results.Built(ok=2, failed=2)
    assert [line["custom_id"] for line in read(source, results.OUTPUT)] == answers
    assert [line["custom_id"] for line in read(source, results.ERRORS)] == errors


def test_building_twice_gives_the_same_bytes(source: results.Source) -> None:
    results.build(source, model.Ending.EXPIRED, model.Order.INPUT)
    first = [(source.folder / name).read_bytes() for name in (results.OUTPUT, results.ERRORS)]
    (source.folder / ".output.jsonl.part").write_bytes(b"left by a runner that died")
    results.build(source, model.Ending.EXPIRED, model.Order.INPUT)
    assert first == [
        (source.folder / name).read_bytes() for name in (results.OUTPUT, results.ERRORS)
    ]
    assert not list(source.folder.glob("*.part"))


def test_the_lines_have_openais_shape(source: results.Source) -> None:
    results.build(source, model.Ending.EXPIRED, model.Order.INPUT)
    assert read(source, results.OUTPUT)[0] == {
        "id": "batch_req_8_1",
        "custom_id": "c1",
        "response": {"status_code": 200, "request_id": "req", "body": {"text": "naïve 漢字 🦀"}},
        "error": None,
    }
    refused, expired = read(source, results.ERRORS)
    assert refused["response"] == {"status_code": 400, "request_id": "r", "body": {"error": {}}}
    assert refused["error"] == {"code": "bad_request", "message": "line 4: no", "line": 4}
    assert expired["response"] is None
    assert expired["error"] == {
        "code": "batch_expired",
        "message": "line 5: the batch job's time was over before this line was answered",
        "line": 5,
    }


@pytest.mark.parametrize("order", list(model.Order))
def test_a_drained_job_with_an_open_line_is_a_fault_and_said_so(
    source: results.Source, order: model.Order
) -> None:
    with pytest.raises(journal.JournalError, match="line 5 has no result"):
        results.build(source, model.Ending.DRAINED, order)
    assert not (source.folder / results.OUTPUT).exists()


def test_a_file_without_lines_is_not_there(tmp_path: Path) -> None:
    (tmp_path / results.INPUT).write_bytes(world.line("c1"))
    (tmp_path / results.OUTPUT).write_bytes(b"of another time\n")
    writer = journal_writer.Writer(tmp_path / results.JOURNAL, 1)
    writer.append(journal.Entry(journal.Kind.FAILED, 1, data=b"{}\n"))
    writer.close()
    source = results.Source(tmp_path, 1, 1, lines.Rules(), 1 << 20)
    assert results.build(source, model.Ending.DRAINED, model.Order.INPUT) == results.Built(0, 1)
    assert not (tmp_path / results.OUTPUT).exists()


def test_who_follows_gets_large_answers_a_few_at_a_time(
    source: results.Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "_FOLLOWED_BYTES", 1)
    told: list[str] = []
    after, calls = 0, 0
    while True:
        found, after = results.following(source.folder, after)
        if not found:
            break
        told += found
        calls += 1
    assert (len(told), calls) == (4, 4)
    monkeypatch.undo()
    assert results.following(source.folder, 0) == (told, after)
