"""Manners that every command shares: one-line errors, Slurm's exit codes, questions, JSON, tables.

Commands are functions ``main(argv, *, api, out, err, …) -> int`` in their own folder; they print
nothing by any other way, so that tests call them without a process.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, NoReturn, TextIO, TypeVar

UNANSWERED = 75  # exit code: nobody answered, so nobody knows; as sendmail's EX_TEMPFAIL
_EACH_S = 0.5
_PATIENCE_S = 60.0  # a gateway that restarts is no reason to give up

T = TypeVar("T")


class CommandError(Exception):
    """Ends a command with ``prog: error: message`` on stderr and ``code``."""

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.message = " ".join(message.split())
        self.code = code


class Unanswered(CommandError):
    """Nobody answered, or only to say that they can't now: what was asked may come true all the same."""


class Parser(argparse.ArgumentParser):
    """An argument parser with Slurm's manners: unambiguous prefixes, one-line errors, no `exit`.

    Args:
        usage_code: exit code for a bad option (sbatch's is 255, the others' is 1).
        spelled_out: options that Slurm's command does not have and that make prefixes of its own ones
            ambiguous: they are written whole, so that what sbatch takes is taken.
    """

    def __init__(
        self, *args: Any, usage_code: int = 1, spelled_out: Collection[str] = (), **kwargs: Any
    ) -> None:
        kwargs.setdefault("allow_abbrev", True)
        kwargs.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(*args, **kwargs)
        self.usage_code = usage_code
        self._spelled_out = frozenset(spelled_out)

    def _get_option_tuples(self, option_string: str) -> Any:
        # argparse asks here what a prefix may mean, once it is no option's whole name.
        found: list[Any] = super()._get_option_tuples(option_string)
        return [each for each in found if each[1] not in self._spelled_out]

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if value == "" and action.nargs is None and not action.option_strings:
            raise argparse.ArgumentError(action, "must not be empty")
        super()._check_value(action, value)

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing the usage and leaving."""
        raise CommandError(f"{message}; see {self.prog} --help", self.usage_code)


def exemplify(parser: argparse.ArgumentParser, examples: str) -> None:
    """Give each command below a parser the examples that are of it, and its short help as its description.

    Args:
        parser: of the whole command; its own epilog stays.
        examples: one a line, as it is typed. A command whose epilog has one of its own keeps that.
    """
    for action in parser._actions:  # argparse has no other way to what was added
        if not isinstance(action, argparse._SubParsersAction):
            continue
        said = {each.dest: each.help for each in action._choices_actions}
        for name, command in action.choices.items():
            command.description = command.description or said.get(name)
            exemplify(command, examples)
            own = [
                line for line in examples.splitlines() if f"{line} ".startswith(f"{command.prog} ")
            ]
            if own and f"\n  {command.prog}" not in f"\n{command.epilog or ''}":
                listed = "\n".join(f"  {line}" for line in own)
                command.epilog = "\n".join(filter(None, (command.epilog, f"examples:\n{listed}")))


def run(prog: str, body: Any, *, err: TextIO | None = None) -> int:
    """Call ``body()`` and turn what it raises into an exit code and one line on stderr."""
    stream = sys.stderr if err is None else err
    try:
        return int(body() or 0)
    except CommandError as error:
        say(f"{prog}: error: {error.message}", stream)
        return error.code
    except SystemExit as error:  # argparse: --help and --version
        return int(error.code or 0)
    except KeyboardInterrupt:
        print(f"{prog}: interrupted", file=stream)
        return 130
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115 - the reader has left; be quiet
        return 141


def patiently(
    ask: Callable[[], T],
    pause: Callable[[float], None],
    clock: Callable[[], float] = time.monotonic,
    tell: Callable[[str], None] = lambda words: None,
) -> T:
    """Ask again for a minute, the time of answers that never came included; returns the answer.

    Args:
        ask: asks; it must do no harm to ask twice.
        pause: waits for so many seconds.
        clock: seconds that only grow.
        tell: hears once that there is no answer, and once that there is one again.

    Raises:
        CommandError: there was none; where nobody answered its code is `UNANSWERED`.
    """
    failing_s = 0.0
    while True:
        began = clock()
        try:
            answer = ask()
        except CommandError as error:
            if not failing_s:
                tell(f"{error}; waiting, a minute at most")
            failing_s += clock() - began + _EACH_S
            if failing_s >= _PATIENCE_S:
                if isinstance(error, Unanswered):
                    error.code = UNANSWERED
                raise
            pause(_EACH_S)
        else:
            if failing_s:
                tell("the gateway answers again")
            return answer


def printable(text: str) -> str:
    """Return a text in which nothing steers a terminal or breaks the line: a name may come from anybody."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


def say(text: str, out: TextIO) -> None:
    """Print one line that holds words of others."""
    print(printable(text), file=out)


def colour(stream: TextIO) -> bool:
    """Return whether colour and progress bars may go to ``stream``."""
    return stream.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"


def confirm(question: str, *, yes: bool, out: TextIO, stdin: TextIO | None = None) -> None:
    """Ask before a destructive act on more than one item.

    Raises:
        CommandError: the answer was not yes, or nobody is there to ask.
    """
    if yes:
        return
    source = sys.stdin if stdin is None else stdin
    if not source.isatty():
        raise CommandError(f"{question} Nobody to ask here: repeat with -y")
    print(f"{question} [y/N] ", end="", file=out, flush=True)
    if source.readline().strip().lower() not in {"y", "yes"}:
        raise CommandError("nothing done")


def print_json(value: Any, out: TextIO) -> None:
    """Print stable JSON: sorted keys, one document."""
    print(json.dumps(value, indent=2, sort_keys=True, default=str), file=out)


def table(header: Sequence[str], rows: Sequence[Sequence[object]], out: TextIO) -> None:
    """Print left-aligned columns wide enough for every cell."""
    cells = [[printable(str(cell)) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    for row in cells:
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print(line.rstrip(), file=out)
