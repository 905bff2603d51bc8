"""fctl rollout and rollback: a new version in steps, and back."""

import functools
import json
import re
import time
from collections.abc import Callable
from typing import Any, TextIO
from urllib import parse

from scheduler.contracts import command_line, ports

_EPILOG = """examples:
  fctl rollout chat v2 --steps 1,5,25,50,100 --hold 10m
  fctl rollout chat v2 --percent 5          stays there; again with more to go on
  fctl rollout                              how rollouts fare
  fctl rollout chat v2 --steps 5,100 --gate
  fctl gate chat pass --reason "0.81 of 0.80"
  fctl rollback chat"""
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_LOOK_S = 1.0


def add(commands: Any) -> None:
    """Add the commands to fctl's parser."""
    made = commands.add_parser(
        "rollout", help="move requests to a version in steps", epilog=_EPILOG
    )
    made.add_argument("model", nargs="?", default="")
    made.add_argument("version", nargs="?", default="")
    made.add_argument("--steps", default="", help="percents with commas, e.g. 1,5,25,50,100")
    made.add_argument("--percent", type=int, default=None, help="one step that stays")
    made.add_argument("--hold", default=None, help="how long each step holds at least (10m)")
    made.add_argument(
        "--least", type=int, default=None, help="requests that each step waits for (20)"
    )
    made.add_argument(
        "--keep", default="10m", help="how long the old version is kept (%(default)s)"
    )
    made.add_argument(
        "--warm", default="30m", help="limit for its replicas to come up (%(default)s)"
    )
    made.add_argument(
        "--gate", action="store_true", help="wait for fctl gate before the second step"
    )
    made.add_argument(
        "--wait",
        action="store_true",
        help="follow it to its last step; exit 1 if it is taken back, 75 if no gateway answers for a minute",
    )
    made.set_defaults(act=_rollout)
    back = commands.add_parser("rollback", help="take a rollout back: requests go where they went")
    back.add_argument("model")
    back.set_defaults(act=_back)
    gate = commands.add_parser("gate", help="tell a rollout what an offline evaluation says")
    gate.add_argument("model")
    gate.add_argument("verdict", choices=("pass", "fail"))
    gate.set_defaults(act=_gate)
    for each in (made, back, gate):
        each.add_argument("--reason", default="", help="kept in the history")
        each.add_argument("--json", action="store_true", help="print JSON")


def _rollout(args: Any, api: ports.Api, out: TextIO, stdin: TextIO | None) -> int:
    if not args.version:
        return _show(args, api, out)
    if bool(args.steps) == (args.percent is not None):
        raise command_line.CommandError("rollout: give --steps 1,5,25,50,100 or --percent N")
    body: dict[str, Any] = {
        "version": args.version,
        "keep_s": seconds("--keep", args.keep),
        "warm_s": seconds("--warm", args.warm),
        "gate": args.gate,
        "reason": args.reason,
    }
    if args.hold is not None:
        body["hold_s"] = seconds("--hold", args.hold)
    if args.least is not None:
        body["least"] = args.least
    if args.percent is not None:
        body["percent"] = args.percent
    else:
        body["steps"] = [_percent(word) for word in args.steps.split(",")]
    answer = api.call("POST", _path(args.model, "rollout"), json=body).json
    if args.json:
        command_line.print_json(answer, out)
    else:
        command_line.say(f"{args.model} {args.version}: {answer['state']}, {_steps(answer)}", out)
    if not args.wait:
        return 0
    return follow(args.model, args.version, api=api, out=out, quiet=args.json)


def follow(
    model: str,
    version: str,
    *,
    api: ports.Api,
    out: TextIO,
    quiet: bool = False,
    pause: Callable[[float], None] = time.sleep,
) -> int:
    """Follow a rollout until nothing more comes of itself; return 0, or 1 if it was taken back.

    Args:
        model: whose rollout.
        version: the one that it moves requests to; another one is another rollout.
        api: the gateway; one that restarts meanwhile is asked again for a minute.
        out: where each change is printed.
        quiet: nothing on ``out``.
        pause: waits for so many seconds.

    Raises:
        command_line.CommandError: nobody answered for a minute (code `command_line.UNANSWERED`), or
            somebody has begun another rollout of the model.
    """
    ask = functools.partial(api.call, "GET", "/admin/rollouts")
    told = ""
    while True:
        found = command_line.patiently(ask, pause).json["rollouts"]
        one = next((each for each in found if each["model"] == model), None)
        if one is None or one["version"] != version:
            now = f"that of {one['version']}" if one else "none"
            raise command_line.CommandError(
                f"{model} {version}: this rollout is no more, now there is {now}: see `fctl rollout`"
            )
        line = f"{one['percent']} %: {one['outcome'] or one['state']}: {one['reason']}"
        if line != told and not quiet:
            command_line.say(line, out)
        told = line
        if one["state"] == "over":
            return 0 if one["outcome"] == "done" else 1
        if one.get("stays"):  # with --percent, or steps below 100: nothing more comes of itself
            return 0
        pause(_LOOK_S)


def _show(args: Any, api: ports.Api, out: TextIO) -> int:
    found = api.call("GET", "/admin/rollouts").json["rollouts"]
    rows = [each for each in found if args.model in {"", each["model"]}]
    if args.json:
        command_line.print_json({"rollouts": rows}, out)
        return 0
    for one in rows:
        state = one["outcome"] or one["state"]
        command_line.say(
            f"{one['model']} {one['version']}: {one['percent']} %, {state}, {_steps(one)}", out
        )
        command_line.say(f"    {one.get('waits_for') or one['reason']}", out)
        for name in ("new", "old"):
            if name in one:
                fared = json.dumps(one[name]).replace('"', "").strip("{}")
                command_line.say(f"    {name}: {fared}", out)
    if not rows:
        print("no rollouts", file=out)
    return 0


def _back(args: Any, api: ports.Api, out: TextIO, stdin: TextIO | None) -> None:
    answer = api.call("POST", _path(args.model, "rollback"), json={"reason": args.reason}).json
    _said(args, out, answer, f"{args.model}: {answer['version']} is taken back")


def _gate(args: Any, api: ports.Api, out: TextIO, stdin: TextIO | None) -> None:
    body = {"passed": args.verdict == "pass", "reason": args.reason}
    answer = api.call("POST", _path(args.model, "gate"), json=body).json
    _said(args, out, answer, f"{args.model}: the gate says {args.verdict}")


def seconds(option: str, text: str) -> float:
    """Return a time such as `90`, `10m`, `1h` in seconds."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text)
    if found is None:
        raise command_line.CommandError(f"{option} {text}: write 30s, 10m, 1h or 1d")
    return float(found[1]) * _UNITS[found[2] or "s"]


def _percent(word: str) -> int:
    if not word.strip().isdigit():
        raise command_line.CommandError(
            f"--steps {word}: whole percents with commas, e.g. 1,5,25,50,100"
        )
    return int(word)


def _steps(one: Any) -> str:
    return "steps " + ",".join(str(step) for step in one["steps"])


def _path(model: str, verb: str) -> str:
    return f"/admin/models/{parse.quote(model, safe='')}/{verb}"


def _said(args: Any, out: TextIO, answer: Any, text: str) -> None:
    if args.json:
        command_line.print_json(answer, out)
    else:
        command_line.say(text, out)
