"""fctl schedule: floors that come again and again, as cron writes them."""

from typing import Any, TextIO
from urllib import parse

from scheduler.contracts import command_line, ports

_PATH = "/admin/schedules"
_COLUMNS = ("NAME", "MODEL", "FLOOR", "CRON", "UNTIL", "ZONE", "STATE", "NEXT", "LAST", "WARM")
_BEGAN = ("BEGAN", "ENDS", "NOTED", "WARM")
_EPILOG = """examples:
  fctl schedule add morning --model chat --floor 8 --cron "0 8 * * mon-fri" --until 18:00 --zone Europe/Berlin
  fctl schedule list
  fctl schedule next morning
  fctl schedule history morning         was it warm when it began?
  fctl schedule pause morning           and: resume, rm
The floor is warm when it begins: replicas are started as much earlier as they take to start. Weekdays count
as in cron: 0 and 7 are Sunday. What ends before it begins ends on the next day."""


def add(commands: Any) -> None:
    """Add the commands to fctl's parser."""
    schedule = commands.add_parser(
        "schedule", help="keep replicas warm at set times", epilog=_EPILOG
    )
    verbs = schedule.add_subparsers(dest="verb", required=True, metavar="VERB")
    new = verbs.add_parser("add", help="keep a new schedule")
    new.add_argument("name")
    new.add_argument("--model", required=True)
    new.add_argument("--floor", required=True, type=int, help="replicas kept warm")
    new.add_argument("--cron", required=True, help="minute hour day month weekday: when it begins")
    new.add_argument("--until", required=True, metavar="HH:MM", help="when it ends")
    new.add_argument("--zone", default="UTC", help="time zone of both (%(default)s)")
    new.add_argument("--reason", default="", help="kept with it")
    shown = verbs.add_parser("list", help="list schedules")
    began = verbs.add_parser("history", help="say when one began, and what was warm then")
    began.add_argument("name")
    began.add_argument("-n", dest="count", type=int, default=20, help="how many (%(default)s)")
    coming = verbs.add_parser("next", help="say when one begins next")
    coming.add_argument("name")
    coming.add_argument("-n", dest="count", type=int, default=5, help="how many (%(default)s)")
    verbs_of = {
        "add": (new, _add),
        "list": (shown, _list),
        "next": (coming, _next),
        "history": (began, _history),
    }
    for verb, text in (
        ("pause", "let one say nothing for now"),
        ("resume", "let a paused one go on"),
        ("rm", "forget one"),
    ):
        verbs_of[verb] = (verbs.add_parser(verb, help=text), _change)
        verbs_of[verb][0].add_argument("name")
    for made, act in verbs_of.values():
        made.add_argument("--json", action="store_true", help="print JSON")
        made.set_defaults(act=act)


def _add(args: Any, api: ports.Api, out: TextIO, stdin: TextIO | None) -> None:
    body = {
        key: getattr(args, key)
        for key in ("name", "model", "floor", "cron", "until", "zone", "reason")
    }
    answer = api.call("POST", _PATH, json=body).json
    _done(args, out, answer, f"schedule {args.name}: next at {answer['next']}")


def _list(args: Any, api: ports.Api, out: TextIO, stdin: TextIO | None) -> None:
    answer = api.call("GET", _PATH).json
    if args.json:
        command_line.print_json(answer, out)
        return
    rows = [
        (
            one["name"],
            one["model"],
            str(one["floor"]),
            one["cron"],
            one["until"],
            one["zone"],
            "paused" if one["paused"] else "in force" if one["in_force"] else "waiting",
            one["next"] or "never",
            one["last"]["begins"] if one["last"] else "-",
            _warm(one["last"]) if one["last"] else "-",
        )
        for one in answer["schedules"]
    ]
    command_line.table(_COLUMNS, rows, out)


def _next(args: Any, api: ports.Api, out: TextIO, stdin: TextIO | None) -> None:
    path = f"{_PATH}/{parse.quote(args.name, safe='')}/next"
    answer = api.call("GET", path, params={"count": str(args.count)}).json
    _done(args, out, answer, "\n".join(answer["next"]) or f"schedule {args.name}: never again")


def _history(args: Any, api: ports.Api, out: TextIO, stdin: TextIO | None) -> None:
    path = f"{_PATH}/{parse.quote(args.name, safe='')}/history"
    answer = api.call("GET", path, params={"count": str(args.count)}).json
    if args.json:
        command_line.print_json(answer, out)
        return
    rows = [(one["begins"], one["ends"], one["timing"], one["warm"]) for one in answer["began"]]
    command_line.table(_BEGAN, rows, out)


def _warm(one: Any) -> str:
    return str(one["warm"]) if one["timing"] == "on time" else f"{one['warm']} ({one['timing']})"


def _change(args: Any, api: ports.Api, out: TextIO, stdin: TextIO | None) -> None:
    path = f"{_PATH}/{parse.quote(args.name, safe='')}"
    if args.verb == "rm":
        answer = api.call("DELETE", path).json
    else:
        answer = api.call("POST", f"{path}/{args.verb}").json
    done = {"rm": "removed", "pause": "paused", "resume": "goes on"}[args.verb]
    _done(args, out, answer, f"schedule {args.name}: {done}")


def _done(args: Any, out: TextIO, answer: Any, words: str) -> None:
    if args.json:
        command_line.print_json(answer, out)
    else:
        print(words, file=out)
