"""fbatch, fqueue and fcancel, with the manners of sbatch, squeue and scancel."""

import argparse
import contextlib
import dataclasses
import datetime
import json
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from batch_jobs import directives, listing, model, options, waiting
from scheduler.contracts import clock as clocks
from scheduler.contracts import command_line, ports

_JOBS = "/forebay/v1/jobs"
_HEAD = 1 << 16
_ACTIVE = ",".join(sorted(model.ACTIVE))


@dataclasses.dataclass(frozen=True, slots=True)
class Surroundings:
    """What a command may touch besides its arguments."""

    api: ports.Api
    out: TextIO
    err: TextIO
    env: Mapping[str, str]
    cwd: Path
    stdin: TextIO
    pause: Callable[[float], None]


def fbatch(  # noqa: PLR0913 - a command's surroundings, and time
    argv: Sequence[str],
    *,
    api: ports.Api,
    out: TextIO,
    err: TextIO,
    env: Mapping[str, str],
    cwd: Path,
    stdin: TextIO,
    pause: Callable[[float], None] = time.sleep,
) -> int:
    """Submit a batch job; returns the exit code."""
    around = Surroundings(api, out, err, env, cwd, stdin, pause)
    return command_line.run("fbatch", lambda: _fbatch(argv, around), err=err)


def _fbatch(argv: Sequence[str], around: Surroundings) -> int:
    said = options.command(argv)
    with _sources(said.pop("files"), around) as (script, requests_file):
        said = {**options.directive_lines(script), **options.environment(around.env), **said}
        now_us = clocks.SystemClock().wall_us()
        wish = options.submission(said, now_us=now_us, tz=options.zone(around.env))
        wish.setdefault("name", requests_file.name[:256])
        wish.update(cwd=str(around.cwd), umask=_umask(), source=str(requests_file.shown))
        before = _stamp(requests_file.path)
        answer = around.api.call(
            "POST", _JOBS, params={"options": json.dumps(wish)}, upload=requests_file.path
        ).json
        if before is None or _stamp(requests_file.path) != before:
            _withdraw(answer, requests_file.shown, around)
    if said.get("test_only"):
        return _tested(answer, around)
    if answer["bad_lines"] and not said.get("quiet"):
        first = answer["errors"][0]
        print(
            f"fbatch: warning: {answer['bad_lines']} of {answer['lines']} lines can't be run, the first is "
            f"line {first['number']}: {first['message']}",
            file=around.err,
        )
    if said.get("parsable"):
        print(answer["job_id"], file=around.out, flush=True)
    elif not said.get("quiet"):
        print(f"Submitted batch job {answer['job_id']}", file=around.out, flush=True)
    if said.get("wait"):
        return waiting.until_done(
            answer["job_id"],
            api=around.api,
            err=around.err,
            pause=around.pause,
            folder=around.cwd,
            quiet=bool(said.get("quiet")),
        )
    if not answer["output_path"] and not said.get("quiet"):
        print(
            f"fbatch: note: {answer['user']} is no Unix user whose files Forebay may write: "
            f"fetch the results from {_JOBS}/{answer['job_id']}/output, or submit with --wait",
            file=around.err,
        )
    return 0


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """Return what changes whenever a file is written or replaced; None if it is gone."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def _withdraw(answer: Mapping[str, Any], shown: str, around: Surroundings) -> None:
    """Cancel a job whose file was written to meanwhile: what was read may be half of each version."""
    done = "nothing was submitted"
    if answer["job_id"] is not None:
        around.api.call("POST", f"{_JOBS}/{answer['job_id']}/cancel")
        done = f"job {answer['job_id']} was cancelled"
    raise command_line.CommandError(
        f"{shown} changed while it was read, {done}: submit it again when it is whole"
    )


def _tested(answer: Mapping[str, Any], around: Surroundings) -> int:
    for bad in answer["errors"]:
        command_line.say(f"line {bad['number']}: {bad['message']}", around.err)
    hidden = answer["bad_lines"] - len(answer["errors"])
    if hidden > 0:
        print(f"and {hidden} bad lines more", file=around.err)
    good = answer["lines"] - answer["bad_lines"]
    print(f"{good} of {answer['lines']} lines can be run; nothing was submitted", file=around.out)
    return 1 if answer["bad_lines"] or not answer["lines"] else 0


@dataclasses.dataclass(frozen=True, slots=True)
class _Requests:
    path: Path  # what is uploaded
    shown: str  # as the user knows it
    name: str


@contextlib.contextmanager
def _sources(
    files: Sequence[str], around: Surroundings
) -> Iterator[tuple[tuple[directives.Directive, ...], _Requests]]:
    """Find the script's directives and the file with the requests."""
    if len(files) > 2:
        raise command_line.CommandError(
            f"{files[2]!r} is one file too many: give a script, a JSONL file, or both",
            options.USAGE_CODE,
        )
    with tempfile.TemporaryDirectory(prefix="fbatch-") as folder:
        script: directives.Script | None = None
        found: _Requests | None = None
        for name in files or ["-"]:
            path, shown = _file(name, Path(folder), around)
            if _is_requests(path, shown):
                if found is not None:
                    raise command_line.CommandError(f"{shown}: a job has one file of requests")
                found = _Requests(path, shown, Path(shown).name)
                continue
            if script is not None:
                raise command_line.CommandError(f"{shown}: a job has one script")
            script, body = _script(path, shown, Path(folder))
            if body is not None:
                if found is not None:
                    raise command_line.CommandError(
                        f"{shown}: requests stand in it and in a file too"
                    )
                found = _Requests(body, shown, Path(shown).name)
        if found is None:
            raise command_line.CommandError(
                "no requests: name a JSONL file, or put lines into the script"
            )
        yield (script.directives if script else ()), found


def _file(name: str, folder: Path, around: Surroundings) -> tuple[Path, str]:
    if name != "-":
        path = around.cwd / name
        try:
            with path.open("rb") as file:
                if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    return path, str(path)
                # A pipe, such as bash's <(…), gives its bytes once, and they are read twice.
                copied = folder / f"copy-{len(list(folder.iterdir()))}"
                with copied.open("wb") as copy:
                    shutil.copyfileobj(file, copy)
                return copied, str(path)
        except OSError as error:
            raise command_line.CommandError(f"{name}: {error.strerror}") from None
    if around.stdin.isatty():
        raise command_line.CommandError(
            "no file given: name a JSONL file or a script", options.USAGE_CODE
        )
    path = folder / "stdin"
    with path.open("wb") as copy:
        source = getattr(around.stdin, "buffer", None)
        if source is not None:
            shutil.copyfileobj(source, copy)
        else:
            copy.write(around.stdin.read().encode())
    return path, "stdin"


def _is_requests(path: Path, shown: str) -> bool:
    with path.open("rb") as file:
        head = file.read(_HEAD)
    named = shown.endswith((".jsonl", ".ndjson"))
    if not head.strip() and named:
        raise command_line.CommandError(f"{shown}: the file is empty")
    return named or directives.is_requests(head)


def _script(path: Path, shown: str, folder: Path) -> tuple[directives.Script, Path | None]:
    text = path.read_bytes()
    try:
        script = directives.read(text)
    except directives.ScriptError as error:
        raise command_line.CommandError(f"{shown}: {error}") from None
    body = text.split(b"\n")[script.header_lines :]
    if not any(line.strip() for line in body):
        return script, None
    # The head becomes blank lines, so that line numbers stay those of the script.
    target = folder / "body"
    target.write_bytes(b"\n" * script.header_lines + b"\n".join(body))
    return script, target


def _umask() -> int:
    """Return this process's umask without changing it, as `os.umask` would."""
    match = re.search(r"^Umask:\s*([0-7]+)", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(match[1], 8) if match else 0o077


def fqueue(  # noqa: PLR0913 - a command's surroundings, and time
    argv: Sequence[str],
    *,
    api: ports.Api,
    out: TextIO,
    err: TextIO,
    env: Mapping[str, str],
    cwd: Path,
    stdin: TextIO,
    pause: Callable[[float], None] = time.sleep,
) -> int:
    """List batch jobs; returns the exit code."""
    around = Surroundings(api, out, err, env, cwd, stdin, pause)
    return command_line.run("fqueue", lambda: _fqueue(argv, around), err=err)


def fqueue_parser() -> command_line.Parser:
    """Return fqueue's parser."""
    parser = command_line.Parser(
        "fqueue",
        add_help=False,  # squeue's -h is another thing
        description="List batch jobs; without -t those that have not ended.",
        epilog="examples:\n  fqueue --me\n  fqueue -t all -o '%i %T %D %r'\n  fqueue -j 12 -i 2\n",
    )
    _add_filters(parser)
    parser.add_argument("-j", "--jobs", default="", metavar="IDS", help="these ids, comma list")
    parser.add_argument("--help", action="help", help="this text")
    parser.add_argument("-h", "--noheader", action="store_true", help="no header")
    parser.add_argument(
        "-o",
        "--format",
        default="",
        help="squeue's letters; default " + listing.DEFAULT.replace("%", "%%"),
    )
    parser.add_argument(
        "-i", "--iterate", type=_seconds, default=0, metavar="SECS", help="again and again"
    )
    parser.add_argument("--json", action="store_true", help="stable JSON")
    return parser


def _fqueue(argv: Sequence[str], around: Surroundings) -> int:
    known = fqueue_parser().parse_args(list(argv))
    text = known.format or around.env.get("FQUEUE_FORMAT", "") or listing.DEFAULT
    zone = options.zone(around.env)
    form = listing.Format(text, zone)
    params = _params(known, states=_ACTIVE if not known.jobs else "")
    if known.jobs:
        params["ids"] = _ids(known.jobs)
    while True:
        jobs = around.api.call("GET", _JOBS, params=params).json["jobs"]
        if known.json:
            command_line.print_json({"jobs": jobs}, around.out)
        else:
            if known.iterate:
                now = datetime.datetime.fromtimestamp(clocks.SystemClock().wall_us() / 1e6, zone)
                print(now.strftime("%a %b %d %H:%M:%S %Y"), file=around.out)
            for line in listing.lines(jobs, form, header=not known.noheader):
                print(line, file=around.out)
        if not known.iterate:
            return 0
        around.out.flush()
        around.pause(known.iterate)


def _add_filters(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--me", action="store_true", help="only my jobs")
    parser.add_argument("-u", "--user", default="", metavar="USERS", help="of these users")
    parser.add_argument("-A", "--account", default="", metavar="TEAMS", help="of these teams")
    parser.add_argument("-n", "--name", default="", metavar="NAMES", help="with these names")
    parser.add_argument(
        "-t", "--states", "--state", default="", help="in these states (PD,R,… or all)"
    )


def _params(known: argparse.Namespace, states: str) -> dict[str, str]:
    params = {"user": known.user, "account": known.account, "name": known.name}
    if known.me:
        params["me"] = "1"
    params["state"] = ",".join(listing.states(known.states)) if known.states else states
    return {name: value for name, value in params.items() if value}


def _ids(text: str) -> str:
    words = [word.strip() for word in text.split(",")]
    for word in words:
        if not re.fullmatch(r"[0-9]{1,18}", word):
            raise command_line.CommandError(f"invalid job id {word!r}: ids are whole numbers")
    return ",".join(words)


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < 1e6:
        raise ValueError(text)
    return seconds


def fcancel(
    argv: Sequence[str],
    *,
    api: ports.Api,
    out: TextIO,
    err: TextIO,
    env: Mapping[str, str],
    cwd: Path,
    stdin: TextIO,
) -> int:
    """Cancel batch jobs; returns the exit code."""
    around = Surroundings(api, out, err, env, cwd, stdin, time.sleep)
    return command_line.run("fcancel", lambda: _fcancel(argv, around), err=err)


def fcancel_parser() -> command_line.Parser:
    """Return fcancel's parser."""
    parser = command_line.Parser(
        "fcancel",
        description="Cancel batch jobs: answers stay, lines without one end as batch_cancelled.",
        epilog="examples:\n  fcancel 12\n  fcancel --me -t PD -y\n",
    )
    parser.add_argument("jobs", nargs="*", metavar="ID", help="job ids")
    _add_filters(parser)
    parser.add_argument("-i", "--interactive", action="store_true", help="ask for each")
    parser.add_argument("-y", "--yes", action="store_true", help="don't ask")
    parser.add_argument(
        "-Q", "--quiet", action="store_true", help="no word on jobs that have ended"
    )
    return parser


def _fcancel(argv: Sequence[str], around: Surroundings) -> int:
    known = fcancel_parser().parse_intermixed_args(list(argv))
    filters = known.me or known.user or known.account or known.name or known.states
    if not known.jobs and not filters:
        raise command_line.CommandError("which jobs? Give ids, or one of --me -u -A -n -t")
    targets = [word for text in known.jobs for word in text.split(",") if word]
    for word in targets:
        if not re.fullmatch(r"[0-9]{1,18}(_[0-9]{1,9})?", word):
            raise command_line.CommandError(f"invalid job id {word!r}: give 12, or 12_3 for a task")
    if filters:
        params = _params(known, states=_ACTIVE)
        if targets:
            params["ids"] = _ids(",".join(targets))
        jobs = around.api.call("GET", _JOBS, params=params).json["jobs"]
        targets = [str(job["job_id"]) for job in jobs]
    if len(targets) > 1 and not known.interactive:
        question = f"Cancel {len(targets)} jobs ({', '.join(targets[:10])}{', …' if targets[10:] else ''})?"
        command_line.confirm(question, yes=known.yes, out=around.err, stdin=around.stdin)
    return max((_cancel(target, known, around) for target in targets), default=0)


def _cancel(target: str, known: argparse.Namespace, around: Surroundings) -> int:
    if known.interactive and not known.yes:
        print(f"Cancel job {target}? [y/N] ", end="", file=around.err, flush=True)
        if around.stdin.readline().strip().lower() not in {"y", "yes"}:
            return 0
    try:
        answer = around.api.call("POST", f"{_JOBS}/{target}/cancel").json
    except command_line.CommandError as error:
        print(f"fcancel: error: {error.message}", file=around.err)
        return error.code
    if answer["ended"] and not known.quiet:
        print(f"fcancel: error: job {target} has ended already", file=around.err)
        return 1
    return 0
