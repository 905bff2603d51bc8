"""fctl drain, resume, preempt, hold and release: what an operator does to the running fleet."""

from typing import Any, TextIO
from urllib import parse

from scheduler.contracts import command_line, ports
from scheduler.runtime import job_commands, several

_DRAIN = """examples:
  fctl drain r-0123456789ab         a replica: it finishes its streams, another one is started
  fctl drain l-0123456789ab         a lease: what is in it moves to others, then it is given back
  fctl drain n[3-4] fan noise       nodes: nothing new goes there, what is there moves away
What drains goes on until others serve in its place; `fctl resume` ends it. `fctl preempt` does not wait.
"""
_PREEMPT = """examples:
  fctl preempt r-0123456789ab --dry-run    who would be hit, and who takes over
  fctl preempt -y r-0123456789ab disk errors
Its streams go on at another replica, its batch lines go back to their jobs; both from the tokens so far.
"""


def add(commands: Any) -> None:
    """Add the commands to fctl's parser."""
    drain = commands.add_parser(
        "drain", help="let replicas, leases or nodes finish, and use others", epilog=_DRAIN
    )
    drain.add_argument("what", metavar="REPLICA|LEASE|NODE", help="one, or several with commas")
    drain.add_argument("reason", nargs="*", help="for those who look later")
    drain.add_argument("-y", "--yes", action="store_true", help="do not ask")
    resume = commands.add_parser(
        "resume", help="use drained nodes and leases again, or end a model's quarantine"
    )
    resume.add_argument("what", metavar="NODE|LEASE|MODEL", help="one, or several with commas")
    preempt = commands.add_parser("preempt", help="take a replica's GPUs at once", epilog=_PREEMPT)
    preempt.add_argument("replica", metavar="REPLICA")
    preempt.add_argument("reason", nargs="*", help="for those who look later")
    preempt.add_argument("--dry-run", action="store_true", help="only say what would happen")
    preempt.add_argument("-y", "--yes", action="store_true", help="do not ask")
    for name, text in (
        (
            "hold",
            "keep batch off everything (`batch`) or off a model, or hold batch jobs (12,13_4)",
        ),
        ("release", "let batch back, or release batch jobs"),
    ):
        made = commands.add_parser(name, help=text, description=text)
        made.add_argument("model", metavar="batch|MODEL|JOBS", help="one, or several with commas")
        made.add_argument("--json", action="store_true", help="print JSON")
        made.set_defaults(act=_hold)
    for made, act in ((drain, _drain), (resume, _resume), (preempt, _preempt)):
        made.add_argument("--json", action="store_true", help="print JSON")
        made.set_defaults(act=act)


def _drain(args: Any, api: ports.Api, out: TextIO, stdin: TextIO | None) -> None:
    named = several.names(args.what)
    if len(named) > 1:
        kind = "replicas" if named[0].startswith("r-") else "leases or nodes"
        command_line.confirm(f"Drain {len(named)} {kind}?", yes=args.yes, out=out, stdin=stdin)
    body = {"reason": " ".join(args.reason)}

    def drain(name: str) -> Any:
        kind = _kind(name)
        sent = None if kind == "replicas" else body
        return api.call("POST", f"/admin/{kind}/{_quoted(name)}/drain", json=sent).json

    several.change(named, drain, lambda _: "draining", out, as_json=args.json)


def _resume(args: Any, api: ports.Api, out: TextIO, stdin: TextIO | None) -> None:
    models = {model["model"] for model in api.call("GET", "/admin/models").json["models"]}
    named = [args.what] if args.what in models else several.names(args.what)

    def resume(name: str) -> Any:
        kind = "models" if name in models else _kind(name)
        if kind == "replicas":
            raise command_line.CommandError(f"{name}: a replica that drains does not come back")
        return api.call("POST", f"/admin/{kind}/{_quoted(name)}/resume").json

    def said(name: str) -> str:
        return "no longer quarantined" if name in models else "used again"

    several.change(named, resume, said, out, as_json=args.json)


def _preempt(args: Any, api: ports.Api, out: TextIO, stdin: TextIO | None) -> None:
    path = f"/admin/replicas/{_quoted(args.replica)}/preempt"
    told = api.call("POST", path, params={"dry_run": "true"}).json
    hit = told["streams"] + told["batch_lines"]
    if not args.dry_run:
        if hit > 1:
            command_line.confirm(
                f"{args.replica}: {told['streams']} streams and {told['batch_lines']} batch lines move. "
                "Take its GPUs?",
                yes=args.yes, out=out, stdin=stdin,
            )  # fmt: skip
        told = api.call("POST", path, json={"reason": " ".join(args.reason)}).json
    if args.json:
        command_line.print_json(told, out)
        return
    for line in _consequences(told):
        command_line.say(line, out)


def _consequences(told: dict[str, Any]) -> list[str]:
    """Return what preempting a replica does, a line each."""
    name = told["replica_id"]
    gives = "gives" if told["done"] else "would give"
    lines = [
        f"{name}: {told['model']} {told['version']}, {told['state']}, {told['role']}, {gives} "
        f"{told['gpus']} GPUs of lease {told['lease_id']} on {told['node'] or 'an unknown node'}",
        f"streams: {told['streams']} go on at {told['others_serving']} other replicas with "
        f"{told['free_seats']} free seats",
    ]
    if told["without_seat"]:
        lines.append(
            f"streams without a free seat there: {told['without_seat']}: they wait for one"
        )
    lines.append(f"batch lines: {told['batch_lines']} go back to their jobs, none is lost")
    after = "another one is started" if told["replaced"] else "none is started in its place"
    lines.append(f"replicas wanted of it: {told['wanted']}: {after}")
    if not told["done"]:
        lines.append("nothing done (--dry-run)")
    return lines


def _hold(args: Any, api: ports.Api, out: TextIO, stdin: TextIO | None) -> None:
    held = "held" if args.command == "hold" else "released"
    if args.model == "batch":
        answer = api.call("POST", f"/admin/batch/{args.command}").json
        _done(args, out, answer, f"batch: {held} everywhere")
    elif job_commands.is_jobs(args.model):
        job_commands.act(args.command, args.model, api, out, as_json=args.json)
    else:

        def change(model: str) -> Any:
            return api.call("POST", f"/admin/models/{_quoted(model)}/{args.command}").json

        named = list(dict.fromkeys(args.model.split(",")))
        several.change(named, change, lambda _: f"batch {held}", out, as_json=args.json)


def _kind(name: str) -> str:
    return {"r-": "replicas", "l-": "leases"}.get(name[:2], "nodes")


def _quoted(name: str) -> str:
    return parse.quote(name, safe="")


def _done(args: Any, out: TextIO, answer: Any, words: str) -> None:
    if args.json:
        command_line.print_json(answer, out)
    else:
        command_line.say(words, out)
