"""fctl show and explain: what there is, what is expected, and why things are as they are."""

from collections.abc import Mapping, Sequence
from typing import Any, TextIO
from urllib import parse

from scheduler.contracts import command_line, ports
from scheduler.core import startup
from scheduler.runtime import listing, several

KINDS = (
    "models",
    "replicas",
    "leases",
    "nodes",
    "queue",
    "quotas",
    "shadows",
    "plan",
    "forecast",
    "schedules",
    "events",
)
# As scontrol has it: `show node n1` and `show nodes` are the same.
_SINGULAR = {kind.removesuffix("s"): kind for kind in KINDS}
_EPILOG = """examples:
  fctl show leases -a           ended ones too
  fctl show replica r-0123456789ab    all about one: how its start went, its last words
  fctl show forecast chat       what the ledger says of the next day
  fctl show schedules           floors, maintenance and Slurm's reservations
"""


def add(commands: Any) -> None:
    """Add the commands to fctl's parser."""
    show = commands.add_parser(
        "show",
        help=f"show {', '.join(KINDS)}",
        description="Show one kind of things; singular or plural.",
        epilog=_EPILOG,
    )
    show.add_argument(
        "what", choices=(*KINDS, *sorted(_SINGULAR.keys() - set(KINDS))), metavar="KIND",
        help=", ".join(KINDS),
    )  # fmt: skip
    show.add_argument(
        "name", nargs="?", default="", help="only what bears these names or ids: n[1-3], l-1,l-2"
    )
    show.add_argument("-a", "--all", action="store_true", help="ended leases and replicas too")
    show.add_argument("-o", "--oneliner", action="store_true", help="one line of K=V for each")
    explain = commands.add_parser("explain", help="say why things are as they are")
    explain.add_argument("model", nargs="?", default="")
    for made, act in ((show, _show), (explain, _explain)):
        made.add_argument("--json", action="store_true", help="print JSON")
        made.set_defaults(act=act)


def _show(args: Any, api: ports.Api, out: TextIO, stdin: TextIO | None) -> None:
    what = _SINGULAR.get(args.what, args.what)
    named = several.names(args.name) if args.name else []
    if args.what == "replica" and named:
        _replicas(named, args, api, out)
        return
    params = {"all": "true"} if args.all and what in {"leases", "replicas"} else None
    answer = api.call("GET", f"/admin/{what}", params=params).json
    if what == "schedules":
        answer["reservations"] = api.call("GET", "/admin/nodes").json.get("reservations", [])
    rows = listing.rows(what, answer, detail=bool(args.name))
    if named:
        cells = [{str(value) for value in row.values()} for row in rows]
        if absent := [name for name in named if not any(name in cell for cell in cells)]:
            raise command_line.CommandError(
                f"{', '.join(absent)}: no such thing in `fctl show {what}`"
            )
        rows = [row for row, cell in zip(rows, cells, strict=True) if not cell.isdisjoint(named)]
    if args.json:
        command_line.print_json(answer if not args.name else rows, out)
    elif args.oneliner:
        for row in rows:
            line = " ".join(f"{key}={_word(value)}" for key, value in row.items())
            command_line.say(line, out)
    elif not rows:
        print(f"no {what}", file=out)
    else:
        header = [key.upper() for key in rows[0]]
        command_line.table(header, [list(row.values()) for row in rows], out)


def _adapter(one: Mapping[str, Any]) -> str:
    """Return what a replica has of an adapter, as one line."""
    told = (
        f"adapter={_word(one['name'])} state={one['state']} running={one['running']} "
        f"uses={one['uses']} load_ms={one['load_ms']:.0f}"
    )
    return f"{told} reason={one['reason']}" if one["reason"] else told


def _replicas(named: Sequence[str], args: Any, api: ports.Api, out: TextIO) -> None:
    """Show replicas as scontrol shows jobs."""
    paths = [f"/admin/replicas/{parse.quote(name, safe='')}" for name in named]
    answers = [api.call("GET", path).json for path in paths]
    if args.json:
        told = answers[0] if len(answers) == 1 else {"replicas": answers}
        command_line.print_json(told, out)
        return
    for answer in answers:
        _replica(answer, out)


def _replica(answer: Mapping[str, Any], out: TextIO) -> None:
    replica = answer["replica"]
    row = listing.rows("replicas", {"replicas": [replica]})[0]
    lines = [
        " ".join(f"{key}={_word(row[key])}" for key in ("replica", "model", "version")),
        " ".join(f"{key}={_word(row[key])}" for key in ("state", "role", "seats", "gpus")),
        f"lease={replica['lease_id']} slot={replica['slot_id']} job={replica['slurm_job_id'] or '-'} "
        f"node={row['node'] or '-'} address={replica['address'] or '-'}",
        *[f"reason={line}" for line in replica["reason"].splitlines()],
        *_start(replica["phases_s"], answer["usual_s"]),
        *[_adapter(one) for one in replica.get("adapters") or ()],
        *[f"{listing.when(event['at_us'])} {event['text']}" for event in answer["events"]],
    ]
    for number, line in enumerate(lines):
        command_line.say(line if number == 0 else f"   {line}", out)


def _start(took: Mapping[str, float], usual: Mapping[str, Any]) -> list[str]:
    """Return how a start went, beside how starts of its model usually go."""
    known = [name for name in startup.PHASES if name in took] or list(took)
    if not known:
        return []
    parts = ", ".join(f"{name} {took[name]:.1f} s" for name in known)
    found = [f"start: {parts}; {sum(took[name] for name in known):.1f} s in all"]
    if usual.get("phases_s"):
        median = usual["phases_s"]
        parts = ", ".join(
            f"{name} {median[name]:.1f} s" for name in startup.PHASES if name in median
        )
        found.append(
            f"usually: {parts}; {usual['start_s']:.1f} s in all, by {len(usual['cold'])} starts"
        )
    return found


def _explain(args: Any, api: ports.Api, out: TextIO, stdin: TextIO | None) -> None:
    params = {"model": args.model} if args.model else None
    answer = api.call("GET", "/admin/explain", params=params).json
    if args.json:
        command_line.print_json(answer, out)
        return
    broker = answer["broker"]
    if broker is None:
        print("no broker has led here yet: start one with `forebay broker`", file=out)
    else:
        command_line.say(
            f"broker: epoch {broker['epoch']} at {broker['address']}, Slurm {broker['slurm']}", out
        )
    for line in listing.wished(answer["wishes"]):
        command_line.say(line, out)
    for model in answer["models"]:
        for version in model["versions"]:
            states = ", ".join(f"{n} {name}" for name, n in sorted(version["states"].items()))
            command_line.say(
                f"{model['model']} {version['version']}: {version['wanted']} wanted, "
                f"{states or 'none there'}",
                out,
            )
            target = version["target"]
            if target is not None:
                command_line.say(f"  {listing.target(target)}: {target['reason']}", out)
                if target.get("signal"):
                    command_line.say(f"  signals: {listing.signals(target['signal'])}", out)
    rolled = answer["rollover"]
    if rolled is not None and rolled["leases"]:
        command_line.say(
            f"rollover: {rolled['leases']} leases replaced since {listing.when(rolled['since_us'])}, "
            f"{rolled['overlap_gpu_s'] / 3600:.2f} GPU-hours of overlap",
            out,
        )
    for note in (broker or {}).get("notes", []):
        command_line.say(f"note: {note}", out)
    plan = answer["plan"]
    if plan is not None:
        print(f"last plan with actions, {listing.when(plan['at_us'])}:", file=out)
        for action in plan["actions"]:
            line = f"  {action['act']} {action['what']} [{action['outcome']}]"
            command_line.say(line, out)


def _word(value: object) -> str:
    text = str(value)
    return f'"{text}"' if any(character.isspace() for character in text) else text
