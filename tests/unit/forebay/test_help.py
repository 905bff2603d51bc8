"""`--help` of every command, and of every one below it: it says what it does, and shows how it is typed."""

import argparse
import re
import shlex
from collections.abc import Callable, Iterator

import pytest

from accounting import facct, freport
from batch_jobs import commands as batch_commands
from batch_jobs import options
from forebay import cli, commands
from scheduler.contracts import command_line
from scheduler.runtime import commands as admin_commands
from scheduler.runtime import finfo

PARSERS: tuple[argparse.ArgumentParser, ...] = (
    cli.parser(),
    admin_commands.parser(),
    facct.parser(),
    freport.parser(),
    finfo.parser(),
    options.parser(),
    batch_commands.fqueue_parser(),
    batch_commands.fcancel_parser(),
)
ELSEWHERE = ("devcluster", "completion", "plan", "simulate", "sql")  # read by parsers of their own


def below(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yield a parser and those of all commands below it, each once."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in dict.fromkeys(action.choices.values()):
                yield from below(command)


COMMANDS = {command.prog: command for parser in PARSERS for command in below(parser)}


def shown(prog: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """Return what `PROG --help` prints, by the entry point that people call."""
    name, *words = prog.split()
    main: Callable[[], int] = cli.main if name == "forebay" else getattr(commands, name)
    monkeypatch.setattr("sys.argv", [name, *words, "--help"])
    assert main() == 0
    return capsys.readouterr().out


def examples(prog: str, text: str) -> list[str]:
    """Return the lines of a help text that show a command as it is typed, without what they say of it."""
    lines = [line.strip() for line in text.splitlines() if line.startswith("  ")]
    own = [line for line in lines if re.search(rf"(^|[ (]){re.escape(prog)}( |$)", line)]
    return [re.split(r"\s{2,}", line)[0] for line in own]


@pytest.mark.parametrize("prog", COMMANDS)
def test_help_says_what_it_does_and_shows_how(
    prog: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = shown(prog, monkeypatch, capsys)
    assert examples(prog, text), f"{prog} --help has no example: see command_line.exemplify"
    usage, _, rest = text.partition("\n\n")
    assert usage.startswith("usage: ")
    assert not rest.startswith(("options:", "positional arguments:")), (
        "it does not say what it does"
    )
    assert max(map(len, text.splitlines())) <= 120


def typed() -> list[str]:
    """Return the examples of the commands that have others below them."""
    roots = {parser.prog: parser for parser in PARSERS[:2]}
    found: dict[str, None] = {}
    for command in (each for root in roots.values() for each in below(root)):
        for line in examples(command.prog, command.format_help()):
            words = line.split()
            if words[0] in roots and words[1] not in (*ELSEWHERE, "COMMAND"):
                found[line] = None
    return list(found)


@pytest.mark.parametrize("line", typed())
def test_an_example_is_taken_as_it_stands(line: str) -> None:
    prog, *words = shlex.split(line.partition(" > ")[0])
    COMMANDS[prog].parse_args(words)


def test_an_example_of_its_own_is_not_written_twice() -> None:
    made = command_line.Parser("tool", epilog="examples:\n  tool go 1")
    verbs = made.add_subparsers()
    go = verbs.add_parser("go", help="go on", epilog="examples:\n  tool go 2\nMind the gap.")
    gone = verbs.add_parser("gone", help="say who left")
    command_line.exemplify(made, "tool go 3\ntool gone  who left\ntool going")
    assert (go.description, go.epilog) == ("go on", "examples:\n  tool go 2\nMind the gap.")
    assert (gone.description, gone.epilog) == ("say who left", "examples:\n  tool gone  who left")
