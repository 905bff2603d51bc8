"""What every command prints: nothing that somebody else wrote steers the terminal or makes another line."""

import io

import pytest

from scheduler.contracts import command_line

EVIL = "\x1b[2J\x1b]0;owned\x07a\nb\x9b\u202e"


def test_a_table_keeps_its_lines_and_its_terminal() -> None:
    out = io.StringIO()
    command_line.table(["NAME", EVIL], [[EVIL, 1], ["naïve 漢字", 22]], out)
    text = out.getvalue()
    assert len(text.splitlines()) == 3
    assert all(char.isprintable() or char == "\n" for char in text)
    assert "naïve 漢字" in text
    assert "\\x1b[2J" in text


@pytest.mark.parametrize("text", ["", "plain", "naïve 漢字", "a|b"])
def test_what_is_printable_stays(text: str) -> None:
    assert command_line.printable(text) == text


def test_errors_are_one_harmless_line() -> None:
    def fail() -> None:
        raise command_line.CommandError(f"no team {EVIL}")

    err = io.StringIO()
    assert command_line.run("fctl", fail, err=err) == 1
    assert err.getvalue().count("\n") == 1
    assert err.getvalue().strip().isprintable()
