"""fbatch's way from files to jobs: scripts and requests found, uploaded, and withdrawn if they changed."""

import contextlib
import dataclasses
import json
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from batch_jobs import arrays, directives, options
from batch_jobs import companion as companions
from scheduler.contracts import clock as clocks
from scheduler.contracts import command_line, ports, times

JOBS = "/forebay/v1/jobs"
_HEAD = 1 << 16


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
    companion: companions.Submit | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Submitted:
    """A job that the gateway took, and what was said of it, scripts and environment included."""

    said: Mapping[str, Any]
    answer: Mapping[str, Any]


def submit(files: Sequence[str], said: Mapping[str, Any], around: Surroundings) -> list[Submitted]:
    """Submit a job, or each task of an array; if one fails, those before it are cancelled."""
    done: list[Submitted] = []
    try:
        _submit(files, said, around, done)
    except KeyboardInterrupt:
        if words := withdraw(done, around):
            command_line.say(f"fbatch: {words}", around.err)
        raise
    except (command_line.CommandError, OSError) as error:
        words = withdraw(done, around)
        if isinstance(error, OSError):  # a file that was there a moment ago
            fault = command_line.CommandError(f"{error.filename or files}: {error.strerror}")
        elif words:
            fault = command_line.CommandError(error.message, error.code)
        else:
            raise
        fault.message += f"; {words}" if words else ""
        raise fault from error
    return done


def _submit(
    files: Sequence[str], said: Mapping[str, Any], around: Surroundings, done: list[Submitted]
) -> None:
    """Submit one after the other; ``done`` grows by each that was taken."""
    if not any("%a" in name for name in files):
        with _sources(files, around) as (script, found):
            wanted = options.array(_merged(script, said, around))
            for task in wanted.tasks if wanted else (-1,):
                done.append(_one(script, found, said, around, (wanted, task, done)))
        return
    wanted = options.array({**options.environment(around.env), **said})
    if wanted is None:
        raise command_line.CommandError(
            "%a in a file's name is the task of an array: give --array beside it",
            options.USAGE_CODE,
        )
    for task in wanted.tasks:
        names = [name.replace("%a", str(task)) for name in files]
        with _sources(names, around) as (script, found):
            done.append(_one(script, found, said, around, (wanted, task, done)))


def withdraw(done: Sequence[Submitted], around: Surroundings) -> str:
    """Cancel what was submitted, since what belongs to it was refused; returns what became of it, or ""."""
    cancelled: list[str] = []
    left: list[str] = []
    for each in done:
        job_id = each.answer["job_id"]
        if job_id is None:
            continue
        try:
            around.api.call("POST", f"{JOBS}/{job_id}/cancel")
        except command_line.CommandError:  # the others are cancelled all the same
            left.append(str(job_id))
        else:
            cancelled.append(str(job_id))
    words = [f"batch job {', '.join(cancelled)} was cancelled"] if cancelled else []
    if left:
        words.append(f"batch job {', '.join(left)} was not cancelled: fcancel {','.join(left)}")
    return "; ".join(words)


def accompany(done: Sequence[Submitted], around: Surroundings) -> str:
    """Submit the Slurm job that ends as these do, and return its id; refused, they are cancelled.

    Raises:
        command_line.CommandError: Slurm's refusal.
    """
    try:
        if around.companion is None:
            raise command_line.CommandError("--companion: there is no Slurm here")
        return around.companion([int(each.answer["job_id"]) for each in done])
    except command_line.CommandError as error:
        raise command_line.CommandError(
            f"{error.message}; {withdraw(done, around)}", error.code
        ) from error


def _merged(
    script: Sequence[directives.Directive], said: Mapping[str, Any], around: Surroundings
) -> dict[str, Any]:
    return {**options.directive_lines(script), **options.environment(around.env), **said}


def _one(
    script: Sequence[directives.Directive],
    found: "_Requests",
    said: Mapping[str, Any],
    around: Surroundings,
    place: tuple[arrays.Array | None, int, Sequence[Submitted]],
) -> Submitted:
    merged = _merged(script, said, around)
    now_us = clocks.SystemClock().wall_us()
    wish = options.submission(merged, now_us=now_us, tz=times.local_zone(around.env))
    wish.setdefault("name", found.name[:256])
    wish.update(cwd=str(around.cwd), umask=_umask(), source=str(found.shown))
    wanted, task, before = place
    if wanted is not None:
        array_id = before[0].answer["job_id"] if before else None
        wish.update(array_id=array_id or 0, array_task=task, array_limit=wanted.limit)
    for option in ("output", "error"):
        if option in merged:
            path = os.path.join(around.cwd, merged[option])  # noqa: PTH118 - as it is
            _refuse_place(option, path, found.shown)
    stamp = _stamp(found.path)
    answer = around.api.call(
        "POST", JOBS, params={"options": json.dumps(wish)}, upload=found.path
    ).json
    if stamp is None or _stamp(found.path) != stamp:
        what = withdraw([Submitted(merged, answer)], around) or "nothing was submitted"
        raise command_line.CommandError(  # what was read may be half of each version
            f"{found.shown} changed while it was read, {what}: submit it again when it is whole"
        )
    return Submitted(merged, answer)


def _refuse_place(option: str, path: str, submitted: str) -> None:
    """Refuse now what would refuse the results after hours of work; what patterns name is not known yet."""
    folder = os.path.dirname(path)  # noqa: PTH120 - the user's text as it is
    if "%" not in folder:
        if not Path(folder).is_dir():
            raise command_line.CommandError(
                f"--{option}: {folder}: there is no such folder: make it"
            )
        if not os.access(folder, os.W_OK | os.X_OK):
            raise command_line.CommandError(
                f"--{option}: {folder}: you may not write there: name a folder of yours"
            )
    if "%" not in path and Path(path).is_symlink():
        raise command_line.CommandError(
            f"--{option}: {path}: is a symbolic link, which results never go through: name its target"
        )
    with contextlib.suppress(OSError):
        if Path(path).samefile(submitted):
            raise command_line.CommandError(
                f"--{option}: {path}: is the submitted file itself: name another"
            )


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """Return what changes whenever a file is written or replaced; None if it is gone."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


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
