"""One command over several things, as scontrol takes them: `n[1-3]`, `l-1,l-2`, `chat,digest`."""

from collections.abc import Callable, Sequence
from typing import Any, TextIO

from scheduler.contracts import command_line
from slurm_plugins import hostlist


def names(text: str) -> list[str]:
    """Return what a list names, each once, in order; nodes may be written as Slurm writes them.

    Raises:
        command_line.CommandError: it can't be read, or names nothing.
    """
    try:
        named = list(dict.fromkeys(hostlist.expand(text)))
    except hostlist.HostlistError as error:
        raise command_line.CommandError(str(error)) from error
    if not named:
        raise command_line.CommandError(f"{text!r}: names nothing")
    return named


def change(
    named: Sequence[str],
    act: Callable[[str], Any],
    said: Callable[[str], str],
    out: TextIO,
    *,
    as_json: bool,
) -> None:
    """Change each of some things; one that can't be stops none of the others.

    Args:
        named: the things.
        act: changes one and returns the gateway's answer.
        said: what is printed of one that was changed, after its name.
        out: where it is printed.
        as_json: print one JSON document: the answer, or of several
            ``{"done": {name: answer}, "errors": […]}``.

    Raises:
        command_line.CommandError: those that could not be, and why.
    """
    done: dict[str, Any] = {}
    faults: list[command_line.CommandError] = []
    for name in named:
        try:
            done[name] = act(name)
        except command_line.CommandError as error:
            faults.append(error)
            continue
        if not as_json:
            command_line.say(f"{name}: {said(name)}", out)
    if as_json and len(named) > 1:
        told = {"done": done, "errors": [fault.message for fault in faults]}
        command_line.print_json(told, out)
    elif as_json and done:
        command_line.print_json(done[named[0]], out)
    if faults:
        raise command_line.CommandError("; ".join(fault.message for fault in faults))
