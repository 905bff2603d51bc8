"""What fbatch may be told, and who wins: directive < environment (FBATCH_…) < command line."""

import argparse
import datetime
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from batch_jobs import arrays, directives
from scheduler.contracts import command_line, times

USAGE_CODE = 255  # sbatch's for a bad option
ENVIRONMENT = "FBATCH_"
_REFUSED = {
    "mail-type": ("", True),
    "mail-user": ("", True),
    "partition": ("-p", True),
    "time-min": ("", True),
}
_WHY = {
    "mail-type": "mail is not configured here: leave it out, or wait with --wait",
    "mail-user": "mail is not configured here: leave it out, or wait with --wait",
    "partition": "batch jobs have no partition: leave it out",
    "time-min": "a job runs as long as its lines take: leave it out, or give --time",
}
_EPILOG = """\
SCRIPT begins with #! and may hold #FBATCH lines and, after them, request lines; FILE is JSONL in the
OpenAI batch format. Options: #FBATCH < FBATCH_<OPTION> in the environment < command line.

examples:
  fbatch --model=chat --wait requests.jsonl && next-step
  fbatch --test-only requests.jsonl
  fbatch -J night --begin=22:00 --deadline=tomorrow --output=out-%j.jsonl requests.jsonl
  id=$(fbatch --parsable --companion requests.jsonl); sbatch -d afterok:${id##*:} next.sh
"""


class _Refused(argparse.Action):
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        del namespace, values, option_string
        raise command_line.CommandError(f"--{self.dest}: {_WHY[self.dest]}", USAGE_CODE)


@functools.cache
def parser() -> command_line.Parser:
    """Return fbatch's parser; what is not given is not in its namespace."""
    found = command_line.Parser(
        "fbatch",
        usage="fbatch [options] [SCRIPT] [FILE.jsonl]",
        description="Submit a file of requests; each line's answer lands in the output file once.",
        epilog=_EPILOG,
        usage_code=USAGE_CODE,
        spelled_out=("--companion",),  # sbatch takes --com for --comment
        argument_default=argparse.SUPPRESS,
    )
    flag: dict[str, Any] = {"action": "store_true", "default": argparse.SUPPRESS}
    found.add_argument("files", nargs="*", default=[], help=argparse.SUPPRESS)
    found.add_argument("-J", "--job-name", metavar="NAME", help="name of the job")
    found.add_argument("-A", "--account", metavar="TEAM", help="team that pays")
    found.add_argument("--comment", metavar="TEXT", help="kept with the job")
    found.add_argument("--model", metavar="NAME", help="for lines that name none")
    found.add_argument("--endpoint", metavar="PATH", help="for lines without url")
    found.add_argument(
        "-o", "--output", metavar="FILE", help="answers (fbatch-%%j.jsonl); %%j %%A %%x %%u"
    )
    found.add_argument("-e", "--error", metavar="F", help="failed lines (OUTPUT with .err)")
    found.add_argument(
        "--order",
        metavar="ORDER",
        choices=("input", "completion"),
        help="input or completion (default)",
    )
    found.add_argument("-b", "--begin", metavar="T", help="not before")
    found.add_argument("--deadline", metavar="TIME", help="of no use after")
    found.add_argument("-t", "--time", metavar="T", help="minutes, HH:MM:SS, D-HH…")
    found.add_argument("-a", "--array", metavar="IDX", help="0-15:4%%2; %%a in FILE is the task")
    found.add_argument(
        "-d", "--dependency", metavar="WHAT", help="afterok:12,afterany:13; ? for or; slurm:4711"
    )
    found.add_argument("-q", "--qos", metavar="NAME", help="of the site's")
    found.add_argument("--priority", metavar="N", help="above 0: admins only")
    found.add_argument("--requeue", dest="requeue", help=argparse.SUPPRESS, **flag)
    found.add_argument("--no-requeue", dest="no_requeue", help="may not be put back", **flag)
    found.add_argument(
        "--format", metavar="FORMAT", choices=("jsonl", "parquet"), help="of answers"
    )
    found.add_argument("-H", "--hold", help="submit held", **flag)
    found.add_argument("--strict", help="refuse the file if one line is bad", **flag)
    found.add_argument("--test-only", help="check, submit nothing", **flag)
    found.add_argument(
        "-W", "--wait", help="until it ends; exit 0 only if every line succeeded", **flag
    )
    found.add_argument("--follow", help="as --wait, and print answers as they come", **flag)
    found.add_argument("--companion", help="a Slurm job that ends with it, to depend on", **flag)
    found.add_argument("--parsable", help="print the id alone", **flag)
    found.add_argument("-Q", "--quiet", help="print errors alone", **flag)
    for name, (short, takes) in _REFUSED.items():
        names = [short, f"--{name}"] if short else [f"--{name}"]
        nargs = None if takes else 0
        found.add_argument(*names, dest=name, action=_Refused, nargs=nargs, help=argparse.SUPPRESS)
    return found


def command(argv: Sequence[str]) -> dict[str, Any]:
    """Return what the command line says, the file names in ``files``.

    Raises:
        command_line.CommandError: with sbatch's exit code for a bad option, 255.
    """
    return vars(parser().parse_intermixed_args(list(argv)))


def environment(env: Mapping[str, str]) -> dict[str, Any]:
    """Return what FBATCH_… variables say; a flag is set unless its value is 0, no or false."""
    words = []
    for action in parser()._actions:
        long = next((name for name in action.option_strings if name.startswith("--")), "")
        value = env.get(ENVIRONMENT + long[2:].upper().replace("-", "_")) if long else None
        if value is None or long == "--help":
            continue
        if action.nargs != 0:
            words.append(f"{long}={value}")
        elif value.strip().lower() not in {"0", "no", "false"}:
            words.append(long)
    said = command(words)
    del said["files"]
    return said


def directive_lines(found: Sequence[directives.Directive]) -> dict[str, Any]:
    """Return what a script's directives say; the last duplicate wins.

    Raises:
        command_line.CommandError: the line's number is in the message.
    """
    said: dict[str, Any] = {}
    for directive in found:
        try:
            line = command(directive.words)
        except command_line.CommandError as error:
            raise command_line.CommandError(
                f"line {directive.line}: {error.message}", error.code
            ) from None
        if stray := line.pop("files"):
            raise command_line.CommandError(
                f"line {directive.line}: {stray[0]!r} is no option", USAGE_CODE
            )
        said.update(line)
    return said


def submission(said: Mapping[str, Any], *, now_us: int, tz: datetime.tzinfo) -> dict[str, Any]:
    """Return the submission's options as the API takes them.

    Raises:
        command_line.CommandError: a time that can't be read (255).
    """
    now = datetime.datetime.fromtimestamp(now_us / 1_000_000, tz)
    wish: dict[str, Any] = {}
    for option, field in (
        ("job_name", "name"),
        ("account", "account"),
        ("comment", "comment"),
        ("model", "model"),
        ("endpoint", "endpoint"),
        ("output", "output"),
        ("error", "error"),
        ("order", "order"),
        ("hold", "hold"),
        ("strict", "strict_lines"),
        ("test_only", "test_only"),
        ("dependency", "dependency"),
        ("qos", "qos"),
        ("format", "format"),
    ):
        if option in said:
            wish[field] = said[option]
    if said.get("no_requeue"):
        wish["requeue"] = False
    if "priority" in said:
        wish["priority"] = _whole(said["priority"])
    try:
        for option in ("begin", "deadline"):
            if option in said:
                moment = times.point(said[option], now=now, tz=tz)
                wish[f"{option}_us"] = round(moment.timestamp() * 1_000_000)
        if "time" in said:
            wish["time_limit_s"] = times.duration(said["time"]) or 0
    except times.TimeError as error:
        raise command_line.CommandError(str(error), USAGE_CODE) from None
    return wish


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise command_line.CommandError(
            f"--priority: {text[:40]!r} is no whole number", USAGE_CODE
        ) from None


def array(said: Mapping[str, Any]) -> arrays.Array | None:
    """Return the array that was asked for, or None.

    Raises:
        command_line.CommandError: it can't be read (255).
    """
    if "array" not in said:
        return None
    try:
        return arrays.read(said["array"])
    except arrays.ArrayError as error:
        raise command_line.CommandError(f"--array: {error}", USAGE_CODE) from None
