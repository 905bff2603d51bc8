"""fbatch, fqueue and fcancel, with the manners of sbatch, squeue and scancel."""

import argparse
import contextlib
import datetime
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from batch_jobs import companion as companions
from batch_jobs import foretold, listing, model, options, submitting, waiting
from scheduler.contracts import clock as clocks
from scheduler.contracts import command_line, ports, times

_JOBS = "/forebay/v1/jobs"
_TIER = "batch"
_ENDING = frozenset({"KILL", "TERM", "INT", "9", "15", "2"})  # signals that mean to cancel
_ID = r"[0-9]{1,18}(_[0-9]{1,9})?"
_ACTIVE = ",".join(sorted(model.ACTIVE))


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
    companion: companions.Submit | None = None,
) -> int:
    """Submit a batch job; returns the exit code."""
    around = submitting.Surroundings(api, out, err, env, cwd, stdin, pause, companion)
    return command_line.run("fbatch", lambda: _fbatch(argv, around), err=err)


def _fbatch(argv: Sequence[str], around: submitting.Surroundings) -> int:
    said = options.command(argv)
    files = said.pop("files")
    answers = submitting.submit(files, said, around)
    if answers[0].said.get("test_only"):
        return max(_tested(each.answer, around) for each in answers)
    said, first = dict(answers[0].said), answers[0].answer
    for each in answers:
        bad = each.answer["bad_lines"]
        if bad and not said.get("quiet"):
            one = each.answer["errors"][0]
            command_line.say(
                f"fbatch: warning: {bad} of {each.answer['lines']} lines can't be run, the first is "
                f"line {one['number']}: {one['message']}",
                around.err,
            )
    slurm_id = submitting.accompany(answers, around) if said.get("companion") else ""
    if said.get("parsable"):
        behind = f";slurm:{slurm_id}" if slurm_id else ""
        print(f"{first['job_id']}{behind}", file=around.out, flush=True)
    elif not said.get("quiet"):
        print(f"Submitted batch job {first['job_id']}", file=around.out, flush=True)
        if slurm_id:
            print(f"Slurm job {slurm_id} ends as it does", file=around.out, flush=True)
    if said.get("wait") or said.get("follow"):
        return max(
            waiting.until_done(
                each.answer["job_id"],
                api=around.api,
                err=around.err,
                pause=around.pause,
                folder=around.cwd,
                quiet=bool(said.get("quiet")),
                follow=around.out if said.get("follow") else None,
            )
            for each in answers
        )
    if not first["output_path"] and not said.get("quiet"):
        print(
            f"fbatch: note: {first['user']} is no Unix user whose files Forebay may write: "
            f"fetch the results from {_JOBS}/{first['job_id']}/output, or submit with --wait",
            file=around.err,
        )
    return 0


def _tested(answer: Mapping[str, Any], around: submitting.Surroundings) -> int:
    for bad in answer["errors"]:
        command_line.say(f"line {bad['number']}: {bad['message']}", around.err)
    hidden = answer["bad_lines"] - len(answer["errors"])
    if hidden > 0:
        print(f"and {hidden} bad lines more", file=around.err)
    good = answer["lines"] - answer["bad_lines"]
    print(f"{good} of {answer['lines']} lines can be run; nothing was submitted", file=around.out)
    for line in estimated(answer.get("estimate"), times.local_zone(around.env)):
        print(line, file=around.out)
    return 1 if answer["bad_lines"] or not answer["lines"] else 0


def estimated(found: Mapping[str, Any] | None, tz: datetime.tzinfo) -> list[str]:
    """Return what --test-only says of the work: an estimate, since nothing has tokenized the lines."""
    if not found:
        return []
    tokens = found["prompt_tokens"] + found["output_tokens"]
    lines = [
        f"about {tokens} tokens: {found['prompt_tokens']} of prompts, at most {found['output_tokens']} "
        "of answers"
    ]
    if found.get("gpu_seconds") is not None:
        lines.append(f"about {found['gpu_seconds']:g} GPU-seconds")
    if found.get("cost") is not None:
        lines.append(f"about {found['cost']}")
    if found["seconds"] is not None:
        lines.append(
            f"about {found['seconds']:g} s at the {found['tokens_per_s']:g} tokens/s of now"
        )
    if found["start_us"] is not None:
        lines.append(f"would start {times.print_point(found['start_us'], tz)}")
    else:
        lines.append("when it would start can't be told: nothing has run lately")
    return lines


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
    around = submitting.Surroundings(api, out, err, env, cwd, stdin, pause)
    return command_line.run("fqueue", lambda: _fqueue(argv, around), err=err)


def fqueue_parser() -> command_line.Parser:
    """Return fqueue's parser."""
    parser = command_line.Parser(
        "fqueue",
        add_help=False,  # squeue's -h is another thing
        description="List batch jobs; without -t those that have not ended.",
        epilog="examples:\n  fqueue --me\n  fqueue -t all -o '%i %T %D %r'\n  fqueue -j 12 -i 2\n"
        "  sbatch -d afterok:$(sbatch --parsable --wrap 'fqueue --wait -j 12') next.sh\n",
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
        "-O", "--Format", dest="long", default="", metavar="FIELDS", help="by names: jobid,name:30"
    )
    parser.add_argument(
        "-i", "--iterate", type=_seconds, default=0, metavar="SECS", help="again and again"
    )
    parser.add_argument(
        "--wait", action="store_true", help="until the jobs of -j end; exit 0 only if all succeeded"
    )
    parser.add_argument(
        "-r", "--array", action="store_true", help="a row for each task of an array"
    )
    parser.add_argument("--start", action="store_true", help="when they are expected to start")
    parser.add_argument(
        "-S", "--sort", default="", metavar="KEYS", help="as -p,i: by letter, - for down"
    )
    parser.add_argument("--json", action="store_true", help="stable JSON")
    return parser


def _fqueue(argv: Sequence[str], around: submitting.Surroundings) -> int:
    known = fqueue_parser().parse_args(list(argv))
    text = listing.long_format(known.long) if known.long else known.format
    text = text or around.env.get("FQUEUE_FORMAT", "")
    text = text or (listing.START if known.start else listing.DEFAULT)
    zone = times.local_zone(around.env)
    form = listing.Format(text, zone)
    params = _params(known, states=_ACTIVE if not known.jobs else "")
    if known.jobs:
        params["ids"] = _ids(known.jobs)
    if known.wait:
        return _awaited(known, around)
    if known.start:
        params["estimates"] = "1"
    while True:
        try:
            _list(known, form, zone, params, around)
        except command_line.Unanswered as error:
            if not known.iterate:
                raise
            command_line.say(f"fqueue: error: {error}", around.err)  # and looks again, as squeue
        if not known.iterate:
            return 0
        around.out.flush()
        around.pause(known.iterate)


def _list(
    known: argparse.Namespace,
    form: listing.Format,
    zone: datetime.tzinfo,
    params: Mapping[str, str],
    around: submitting.Surroundings,
) -> None:
    """Print the jobs as they are now."""
    said = around.api.call("GET", _JOBS, params=params).json
    found = listing.within(said["jobs"], _states(known))
    said["jobs"] = jobs = _tasks(form.sorted(found, known.sort), known.jobs)
    if not jobs and params.keys() <= {"ids", "estimates"}:
        raise command_line.CommandError(f"there is no job {known.jobs}, or it is not yours")
    if not known.array:
        jobs = form.sorted(listing.collapsed(jobs), known.sort)
    if known.json:
        command_line.print_json(said, around.out)
        return
    if known.iterate:
        now = datetime.datetime.fromtimestamp(clocks.SystemClock().wall_us() / 1e6, zone)
        print(now.strftime("%a %b %d %H:%M:%S %Y"), file=around.out)
    for line in listing.lines(jobs, form, header=not known.noheader):
        print(line, file=around.out)
    # What reads a pipe expects jobs alone; a gateway of an older release tells nothing.
    if known.start and around.out.isatty() and "estimates" in said:
        print(foretold.words(said["estimates"]), file=around.out)


def _awaited(known: argparse.Namespace, around: submitting.Surroundings) -> int:
    """Wait for jobs that were submitted before, such as from inside a Slurm job; return the worst code."""
    if not known.jobs:
        raise command_line.CommandError("--wait: for which jobs? Give -j with their ids")
    params = {"ids": _ids(known.jobs)}
    listed = command_line.patiently(
        lambda: around.api.call("GET", _JOBS, params=params).json["jobs"],
        around.pause,
        tell=lambda words: command_line.say(f"fqueue: {words}", around.err),
    )
    for word in known.jobs.split(","):
        if not _tasks(listed, word):
            raise command_line.CommandError(
                f"--wait: there is no job {word.strip()}, or it is not yours"
            )
    return max(
        waiting.until_done(
            job["job_id"], api=around.api, err=around.err, pause=around.pause, folder=None
        )
        for job in _tasks(listed, known.jobs)
    )


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
    wanted = _states(known)
    params["state"] = ",".join(listing.asked(wanted)) if wanted else states
    return {name: value for name, value in params.items() if value}


def _states(known: argparse.Namespace) -> Sequence[model.State]:
    return listing.states(known.states) if known.states else ()


def _ids(text: str) -> str:
    """Return the ids of jobs and arrays that a comma list names, without its tasks' numbers."""
    words = [word.strip() for word in text.split(",")]
    for word in words:
        if not re.fullmatch(_ID, word):
            raise command_line.CommandError(f"invalid job id {word!r}: give 12, or 12_3 for a task")
    return ",".join(dict.fromkeys(word.partition("_")[0] for word in words))


def _tasks(jobs: Sequence[listing.Job], named: str) -> list[listing.Job]:
    """Return the jobs that a list of ids names: of ``12_3`` the one task, of ``12`` all of an array."""
    if not named:
        return list(jobs)
    words = {word.strip() for word in named.split(",")}

    def wanted(job: listing.Job) -> bool:
        return bool(words & {str(job["job_id"]), str(job["array_id"]), job["shown_id"]})

    return [job for job in jobs if wanted(job)]


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < float(text) < 1e6:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r}: give seconds, more than 0")


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
    around = submitting.Surroundings(api, out, err, env, cwd, stdin, time.sleep)
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
    parser.add_argument("-p", "--partition", default="", metavar="TIER", help="in this tier: batch")
    parser.add_argument(
        "-s",
        "--signal",
        default="KILL",
        metavar="NAME",
        help="KILL, TERM or INT, which are one here",
    )
    parser.add_argument("-i", "--interactive", action="store_true", help="ask for each")
    parser.add_argument("-y", "--yes", action="store_true", help="don't ask")
    parser.add_argument(
        "-Q", "--quiet", action="store_true", help="no word on jobs that have ended"
    )
    return parser


def _fcancel(argv: Sequence[str], around: submitting.Surroundings) -> int:
    known = fcancel_parser().parse_intermixed_args(list(argv))
    if known.signal.upper().removeprefix("SIG") not in _ENDING and known.signal not in _ENDING:
        raise command_line.CommandError(
            f"--signal: {known.signal[:20]!r}: requests get no signals: leave it out to cancel, or hold "
            "a job that waits by fctl hold ID"
        )
    if known.partition and known.partition != _TIER:
        raise command_line.CommandError(
            f"--partition: {known.partition[:40]!r}: batch jobs are of tier {_TIER} alone"
        )
    filters = known.me or known.user or known.account or known.name or known.states
    filters = filters or known.partition
    if not known.jobs and not filters:
        raise command_line.CommandError("which jobs? Give ids, or one of --me -u -A -n -t")
    targets = [word for text in known.jobs for word in text.split(",") if word]
    for word in targets:
        if not re.fullmatch(_ID, word):
            raise command_line.CommandError(f"invalid job id {word!r}: give 12, or 12_3 for a task")
    if filters:
        params = _params(known, states=_ACTIVE)
        if targets:
            params["ids"] = _ids(",".join(targets))
        jobs = listing.within(
            around.api.call("GET", _JOBS, params=params).json["jobs"], _states(known)
        )
        targets = [str(job["job_id"]) for job in _tasks(jobs, ",".join(targets))]
    if len(targets) > 1 and not known.interactive:
        question = f"Cancel {len(targets)} jobs ({', '.join(targets[:10])}{', …' if targets[10:] else ''})?"
        command_line.confirm(question, yes=known.yes, out=around.err, stdin=around.stdin)
    return max((_cancel(target, known, around) for target in targets), default=0)


def _cancel(target: str, known: argparse.Namespace, around: submitting.Surroundings) -> int:
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
