"""The beginnings of unfinished answers: kept in the journal and its checkpoint, given to the next replica."""

import json
from array import array
from pathlib import Path

import pytest

from batch_jobs import checkpoint, journal, journal_writer, lines, partial, results
from batch_jobs.journal import Entry, Kind
from scheduler.contracts import frames, resume
from tests.unit.batch_jobs import world

PROMPT = partial.Partial("7", frames.pack((1, 2, 3)), 2)


def data(*ids: int, ahead: tuple[int, ...] = ()) -> frames.Frame:
    return frames.Frame.of(frames.Kind.DATA, b"", ids, ahead=ahead)


def told(*items: frames.Frame) -> partial.Partial:
    found = partial.Partial.of_prompt(PROMPT.prompt_data())
    for item in items:
        found.take(found.tokens_data(item))
    return found


def test_ids_follow_each_other_and_those_ahead_come_once() -> None:
    found = told(data(7, 8), data(9, ahead=(10, 11)), data(10, ahead=(11,)))
    assert found.known == 5
    assert frames.unpack(found.tokens + found.ahead) == (7, 8, 9, 10, 11)
    body = json.loads(found.into(b'{"model":"chat"}'))
    assert body["model"] == "chat"
    begun = resume.Resume.from_json(body[resume.FIELD])
    assert begun == resume.Resume((1, 2, 3), (7, 8, 9, 10, 11), 4, 0, 0, 2)


@pytest.mark.parametrize("raw", [b"", b"\0" * 7, b"\0\0\0\x09\0\0\0\x09\0\0\0\x01"])
def test_tokens_that_do_not_follow_are_refused(raw: bytes) -> None:
    with pytest.raises(partial.PartialError):
        told(data(7)).take(raw)


def test_a_damaged_beginning_costs_the_beginning_alone() -> None:
    found = journal.Recovered(bytearray(5))
    found.add(Entry(Kind.PROMPT, 1, data=PROMPT.prompt_data()))
    found.add(Entry(Kind.PROMPT, 2, data=b"\0\0\0\0\0\0nonsense"))
    found.add(Entry(Kind.TOKENS, 1, data=b"x"))
    assert found.partials == {}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_writer, "_CHECKPOINT_BYTES", 200)


def fill(path: Path, *entries: Entry) -> None:
    writer = journal_writer.Writer(path, 9)
    for entry in entries:
        writer.recovered.add(entry)
        writer.append(entry)
        due = writer.due()
        writer.commit()
        if due is not None:
            writer.keep(due)
    writer.close()


ENTRIES = (
    Entry(Kind.DISPATCHED, 1, 1),
    Entry(Kind.PROMPT, 1, data=PROMPT.prompt_data()),
    Entry(Kind.TOKENS, 1, data=partial.Partial("", b"").tokens_data(data(7, 8))),
    Entry(Kind.PREEMPTED, 1),
    Entry(Kind.SUCCEEDED, 2, data=b"answer" * 30),
    Entry(Kind.RETRIED, 3),
    Entry(Kind.FAILED, 4, data=b"error" * 30),
    Entry(Kind.DISPATCHED, 5, 1),
    Entry(Kind.DISPATCHED, 6, 1),
    Entry(Kind.LOST, 6),
)


@pytest.mark.usefixtures("small")
def test_a_checkpoint_gives_what_the_whole_journal_would(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    fill(path, *ENTRIES)
    kept = checkpoint.read(tmp_path, 9)
    assert kept is not None
    assert 0 < kept.size < path.stat().st_size
    short = journal.recover(path, 9)
    (tmp_path / checkpoint.NAME).unlink()
    whole = journal.recover(path, 9)
    assert short == whole
    assert frames.unpack(whole.partials[1].tokens) == (7, 8)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("harm", ["flip", "cut", "empty", "journal", "longer"])
def test_a_checkpoint_that_is_not_sound_is_not_there(tmp_path: Path, harm: str) -> None:
    path, kept = tmp_path / "journal", tmp_path / checkpoint.NAME
    fill(path, *ENTRIES)
    whole = journal.recover(path, 9)
    raw = bytearray(kept.read_bytes())
    if harm == "flip":
        raw[40] ^= 1
    kept.write_bytes({"cut": raw[:50], "empty": bytearray()}.get(harm, raw))
    if harm == "journal":  # another one under the same name
        path.unlink()
        fill(path, Entry(Kind.SUCCEEDED, 8, data=b"other" * 100), *ENTRIES)
        kept.write_bytes(raw)
    if harm == "longer":
        assert checkpoint.read(tmp_path, 10) is None
    else:
        assert checkpoint.read(tmp_path, 9) is None
        found = journal.recover(path, 9)
        assert found.states[2] == whole.states[2]
        assert (found.states[8] != 0) == (harm == "journal")


def test_a_file_is_read_on_from_the_block_of_its_first_open_line(tmp_path: Path) -> None:
    path = tmp_path / "input.jsonl"
    path.write_bytes(b"".join(b'{"n": %d}\r\n' % n for n in range(1, 10_001)))
    marks = array("Q", [0])
    every = list(results.read_input(path, 100, marks))
    assert len(marks) == 3
    late = list(results.read_input(path, 100, marks, first=9_000))
    assert late == every[2 * checkpoint.MARK_LINES :]
    assert late[0].number == 2 * checkpoint.MARK_LINES + 1
    early = list(results.read_input(path, 100, array("Q", [0]), first=9_000))
    assert early == every


@pytest.mark.parametrize("field", ["forebay_resume", "forebay_priority", "forebay_anything"])
def test_a_line_may_not_speak_for_the_runner(field: str) -> None:
    raw = lines.RawLine(1, world.line("a", **{field: {"prompt_token_ids": [1]}}))
    found = lines.parse(raw, lines.Rules())
    assert isinstance(found, lines.BadLine)
    assert f"body.{field} is set by the batch job" in found.message
