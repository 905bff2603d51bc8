"""The journal: what is durable, what a torn end costs, who may write."""

import errno
import logging
import os
import struct
import zlib
from pathlib import Path

import pytest

from batch_jobs import journal, journal_writer
from batch_jobs.journal import Entry, Kind


def written(path: Path, *entries: Entry, last_line: int = 9) -> journal.Recovered:
    writer = journal_writer.Writer(path, last_line)
    for entry in entries:
        writer.append(entry)
    writer.close()
    return journal.recover(path, last_line)


def test_states_and_histories_come_back(tmp_path: Path) -> None:
    found = written(
        tmp_path / "j",
        Entry(Kind.DISPATCHED, 1, 1),
        Entry(Kind.PREEMPTED, 1),
        Entry(Kind.DISPATCHED, 1, 2),
        Entry(Kind.RETRIED, 1),
        Entry(Kind.DISPATCHED, 2, 1),
        Entry(Kind.SUCCEEDED, 2, data=b"answer\n"),
        Entry(Kind.DISPATCHED, 3, 1),
        Entry(Kind.LOST, 3),
        Entry(Kind.FAILED, 4, data=b"error\n"),
    )
    assert list(found.states[:6]) == [0, 0, Kind.SUCCEEDED, 0, Kind.FAILED, 0]
    assert found.histories == {
        1: journal.History(attempts=2, failures=1, preempted=1),
        3: journal.History(attempts=1, lost=1),
    }
    assert (found.ok, found.failed, found.preempted, found.retried) == (1, 1, 1, 2)
    assert found.sealed == ""


def test_the_first_result_of_a_line_stands(tmp_path: Path) -> None:
    found = written(
        tmp_path / "j", Entry(Kind.SUCCEEDED, 1, data=b"a"), Entry(Kind.FAILED, 1, data=b"b")
    )
    assert (found.states[1], found.ok, found.failed) == (Kind.SUCCEEDED, 1, 0)


@pytest.mark.parametrize(
    "tail", [b"\0" * 64, b"\0\0\0\x10", b"garbage of some length, no entry", b"x"]
)
def test_a_torn_end_is_cut_and_writing_goes_on(tmp_path: Path, tail: bytes) -> None:
    path = tmp_path / "j"
    written(path, Entry(Kind.SUCCEEDED, 1, data=b"a"))
    whole = path.read_bytes()
    path.write_bytes(whole + tail)
    found = written(path, Entry(Kind.SUCCEEDED, 2, data=b"b"))
    assert path.read_bytes().startswith(whole)
    assert found.ok == 2


def test_a_flipped_bit_ends_what_is_believed(tmp_path: Path) -> None:
    path = tmp_path / "j"
    written(path, Entry(Kind.SUCCEEDED, 1, data=b"a" * 50), Entry(Kind.SUCCEEDED, 2, data=b"b"))
    damaged = bytearray(path.read_bytes())
    damaged[len(journal.MAGIC) + 40] ^= 1
    path.write_bytes(damaged)
    assert journal.recover(path, 9).ok == 0


def test_a_journal_that_was_torn_while_it_was_made_is_empty(tmp_path: Path) -> None:
    path = tmp_path / "j"
    path.write_bytes(journal.MAGIC[:5])
    assert written(path, Entry(Kind.SUCCEEDED, 1)).ok == 1
    assert path.read_bytes().startswith(journal.MAGIC)


def test_another_file_is_no_journal(tmp_path: Path) -> None:
    path = tmp_path / "j"
    path.write_bytes(b"something else that is long enough")
    with pytest.raises(journal.JournalError, match="is no journal"):
        journal_writer.Writer(path, 9)
    assert path.read_bytes().startswith(b"something")


def test_a_journal_of_a_longer_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "j"
    written(path, Entry(Kind.SUCCEEDED, 9))
    with pytest.raises(journal.JournalError, match="line 9"):
        journal.recover(path, 8)


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    first = journal_writer.Writer(tmp_path / "j")
    with pytest.raises(journal_writer.JournalBusy):
        journal_writer.Writer(tmp_path / "j")
    first.close()
    first.close()  # twice is harmless
    journal_writer.Writer(tmp_path / "j").close()


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "j").symlink_to(tmp_path / "other")
    with pytest.raises(OSError, match="j"):
        journal_writer.Writer(tmp_path / "j")


def test_a_full_disk_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "j"
    writer = journal_writer.Writer(path, 9)
    writer.append(Entry(Kind.SUCCEEDED, 1, data=b"a"))
    writer.commit()
    real = os.pwrite

    def full(fd: int, data: bytes, offset: int) -> int:
        if offset > len(journal.MAGIC) + 30:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, data[:10], offset)  # half of it goes in first

    monkeypatch.setattr(os, "pwrite", full)
    writer.append(Entry(Kind.SUCCEEDED, 2, data=b"b" * 100))
    with pytest.raises(OSError, match="No space left"):
        writer.commit()
    assert journal.recover(path, 9).ok == 1
    monkeypatch.setattr(os, "pwrite", real)
    writer.append(Entry(Kind.SUCCEEDED, 3, data=b"c"))
    writer.close()
    assert journal.recover(path, 9).ok == 3


def test_an_entry_is_read_back_by_its_offset(tmp_path: Path) -> None:
    path = tmp_path / "j"
    written(path, Entry(Kind.SUCCEEDED, 1, data=b"a"), Entry(Kind.FAILED, 2, 3, b"b"))
    with path.open("rb") as file:
        offsets = [at for at, _ in journal.entries(file)]
        assert journal.read_at(file, offsets[1]) == Entry(Kind.FAILED, 2, 3, b"b")
        with pytest.raises(journal.JournalError, match="damaged"):
            journal.read_at(file, offsets[1] + 1)


def test_an_entry_of_another_version_is_never_cut_away(tmp_path: Path) -> None:
    path = tmp_path / "j"
    written(path, Entry(Kind.SUCCEEDED, 1, data=b"a"))
    payload = struct.pack("!BIQ", 200, 0, 2)
    newer = path.read_bytes() + struct.pack("!II", len(payload), zlib.crc32(payload)) + payload
    path.write_bytes(newer)
    with pytest.raises(journal.JournalError, match="kind 200: run the version"):
        journal_writer.Writer(path, 9)
    assert path.read_bytes() == newer


def test_what_is_cut_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "j"
    written(path, Entry(Kind.SUCCEEDED, 1, data=b"a"))
    with caplog.at_level(logging.WARNING):
        journal_writer.Writer(path, 9).close()
        assert not caplog.records
        path.write_bytes(path.read_bytes() + b"torn")
        journal_writer.Writer(path, 9).close()
    assert "4 bytes after its last whole entry are cut" in caplog.text
