"""`forebay completion bash|zsh`: what a shell needs to complete every command's options, by shtab."""

import sys

import shtab

from accounting import facct, freport
from batch_jobs import commands as batch_commands
from batch_jobs import options
from forebay import cli
from scheduler.contracts import command_line
from scheduler.runtime import commands as admin_commands
from scheduler.runtime import finfo

_SHELLS = ("bash", "zsh")


def main(argv: list[str]) -> int:
    """Print one shell's completion of all commands; returns the exit code."""
    return command_line.run("forebay completion", lambda: _run(argv))


def _run(argv: list[str]) -> int:
    asked = command_line.Parser(
        prog="forebay completion",
        description="Print the completion of all of Forebay's commands.",
        epilog="examples:\n  forebay completion bash > /etc/bash_completion.d/forebay\n"
        "  source <(forebay completion zsh)      # in .zshrc, after compinit",
    )
    asked.add_argument("shell", choices=_SHELLS)
    shell = asked.parse_args(argv).shell
    for text in scripts(shell):
        sys.stdout.write(text + "\n")
    return 0


def scripts(shell: str) -> list[str]:
    """Return the completion of each command."""
    parsers = (
        options.parser(),
        batch_commands.fqueue_parser(),
        batch_commands.fcancel_parser(),
        facct.parser(),
        freport.parser(),
        finfo.parser(),
        admin_commands.parser(),
        cli.parser(),
    )
    return [shtab.complete(parser, shell) for parser in parsers]
