"""fctl: what scontrol and sacctmgr are to Slurm. It speaks HTTP to a gateway and decides nothing."""

import argparse
import datetime
from collections.abc import Callable, Sequence
from typing import Any, TextIO
from urllib import parse

from accounting import billing_commands
from scheduler.contracts import command_line, ports, requests, times
from scheduler.runtime import (
    job_commands,
    listing,
    model_commands,
    node_commands,
    quota_commands,
    schedule_commands,
    weights_commands,
)

KINDS = ("models", "replicas", "leases", "nodes", "queue", "quotas", "plan", "events")
Doctor = Callable[[TextIO], int]  # what is done on this host, without a gateway
_EXAMPLES = """examples:
  fctl show leases              what Forebay holds in Slurm
  fctl explain chat             why the model's replicas are as they are
  fctl scale chat 3             keep three replicas warm
  fctl update model=chat replicas=3 batch=hold
  fctl hold 12,13_4             batch jobs; release, requeue and top likewise
  fctl update job=12 priority=500 time=2-0
  fctl key create --team physics --user ada --tiers interactive,batch --expires now+30days
  fctl quota set team=physics tokens_per_day=20M
  fctl apply -f models.yaml --dry-run
  fctl drain r-0123456789ab     take a replica away, another one is started
  fctl resume chat              end a model's quarantine
  fctl cordon n[3-4] fan noise  keep off nodes; uncordon: use them again
  fctl rate add output=1.50 from=2026-12-01 reason='list of December'
  fctl doctor                   what in this Slurm would slow reclaiming
  fctl rebuild                  make accounting.duckdb again from the Parquet files
"""


def fctl(
    argv: Sequence[str],
    *,
    api: ports.Api,
    out: TextIO,
    err: TextIO,
    doctor: Doctor | None = None,
    rebuild: Doctor | None = None,
    stdin: TextIO | None = None,
) -> int:
    """Show and change what the broker does; return the exit code."""

    def body() -> int:
        args = parser().parse_args(list(argv))
        if args.command == "doctor":
            if doctor is None:
                raise command_line.CommandError("doctor: run it on a host that reaches Slurm")
            return doctor(out)
        if args.command == "rebuild":
            if rebuild is None:
                raise command_line.CommandError("rebuild: run it on the accounting host")
            return rebuild(out)
        return int(args.act(args, api, out, stdin) or 0)

    return command_line.run("fctl", body, err=err)


def parser() -> command_line.Parser:
    """Return fctl's parser."""
    made = command_line.Parser(prog="fctl", description="Control Forebay.", epilog=_EXAMPLES)
    commands = made.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, text: str, act: Callable[..., Any]) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("--json", action="store_true", help="print JSON")
        command.set_defaults(act=act)
        return command

    show = add("show", f"show {', '.join(KINDS)}", _show)
    show.add_argument("what", choices=KINDS)
    show.add_argument("name", nargs="?", default="", help="only what bears this name or id")
    show.add_argument("-a", "--all", action="store_true", help="ended leases and replicas too")
    show.add_argument("-o", "--oneliner", action="store_true", help="one line of K=V for each")
    explain = add("explain", "say why things are as they are", _explain)
    explain.add_argument("model", nargs="?", default="")
    scale = add("scale", "set how many replicas are kept warm", _scale)
    scale.add_argument("model")
    scale.add_argument(
        "replicas",
        type=_replicas,
        metavar="N|auto",
        help="a fixed number, or auto: as forebay.toml says",
    )
    scale.add_argument("--version", default=None)
    update = add(
        "update", "change a model: model=NAME replicas=N version=V batch=hold|release", _update
    )
    update.add_argument("pairs", nargs="+", metavar="K=V")
    for name, text in (
        ("hold", "keep batch off a model, or hold batch jobs (12,13_4)"),
        ("release", "let batch back, or release batch jobs"),
    ):
        add(name, text, _hold).add_argument("model")
    resume = add("resume", "end a model's quarantine", _resume)
    resume.add_argument("model")
    drain = add("drain", "take replicas away; others are started", _drain)
    drain.add_argument("replicas", help="one id, or several with commas")
    drain.add_argument("-y", "--yes", action="store_true", help="do not ask")
    add("doctor", "check the site's Slurm configuration", _explain)
    add("rebuild", "make the rollups again from Parquet, on the accounting host", _explain)
    _add_key(commands)
    billing_commands.add(commands)
    quota_commands.add(commands)
    job_commands.add(commands)
    node_commands.add(commands)
    schedule_commands.add(commands)
    weights_commands.add(commands)
    model_commands.add(commands)
    return made


def _add_key(commands: Any) -> None:
    key = commands.add_parser("key", help="create, list or revoke API keys")
    verbs = key.add_subparsers(dest="verb", required=True, metavar="VERB")
    create = verbs.add_parser("create", help="make a key; its token is shown once")
    create.add_argument("--team", required=True, help="who pays: the Slurm account")
    create.add_argument("--user", required=True, help="who asks, as the bill shows it")
    create.add_argument(
        "--tiers",
        default="interactive,standard",
        help="of interactive, standard, batch (%(default)s)",
    )
    create.add_argument("--models", default="", help="with commas; empty: all")
    create.add_argument("--expires", default="", help="as sacct's -S: now+30days, 2027-01-01")
    create.add_argument("--comment", default="", help="kept with the key")
    create.add_argument("--admin", action="store_true", help="may do all that fctl does")
    create.add_argument(
        "--coordinator", action="store_true", help="may see and cancel all of its team's"
    )
    create.set_defaults(act=_key_create)
    listing = verbs.add_parser("list", help="list keys, without their secrets")
    listing.set_defaults(act=_key_list)
    revoke = verbs.add_parser("revoke", help="make a key invalid for good")
    revoke.add_argument("key_id")
    revoke.set_defaults(act=_key_revoke)
    for verb in (create, listing, revoke):
        verb.add_argument("--json", action="store_true", help="print JSON")


def _show(args: Any, api: ports.Api, out: TextIO, stdin: TextIO | None) -> None:
    params = {"all": "true"} if args.all and args.what in {"leases", "replicas"} else None
    answer = api.call("GET", f"/admin/{args.what}", params=params).json
    rows = listing.rows(args.what, answer)
    if args.name:
        rows = [row for row in rows if args.name in {str(value) for value in row.values()}]
        if not rows:
            raise command_line.CommandError(
                f"{args.name}: no such thing in `fctl show {args.what}`"
            )
    if args.json:
        command_line.print_json(answer if not args.name else rows, out)
    elif args.oneliner:
        for row in rows:
            line = " ".join(f"{key}={_word(value)}" for key, value in row.items())
            command_line.say(line, out)
    elif not rows:
        print(f"no {args.what}", file=out)
    else:
        header = [key.upper() for key in rows[0]]
        command_line.table(header, [list(row.values()) for row in rows], out)


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
    for model in answer["models"]:
        for version in model["versions"]:
            states = ", ".join(f"{n} {name}" for name, n in sorted(version["states"].items()))
            command_line.say(
                f"{model['model']} {version['version']}: {version['wanted']} wanted, "
                f"{states or 'none there'}",
                out,
            )
    for target in (broker or {}).get("targets", []):
        if args.model in {"", target["model"]}:
            lent = f", {target['lent']} lent to batch" if target["lent"] else ""
            text = f"{target['model']} {target['version']}: {target['need']} needed{lent}"
            command_line.say(f"{text}: {target['reason']}", out)
    notes = (broker or {}).get("notes", [])
    for note in notes:
        command_line.say(f"note: {note}", out)
    plan = answer["plan"]
    if plan is not None:
        print(f"last plan with actions, {listing.when(plan['at_us'])}:", file=out)
        for action in plan["actions"]:
            line = f"  {action['act']} {action['what']} [{action['outcome']}]"
            command_line.say(line, out)


def _replicas(text: str) -> int | None:
    """Return a number of replicas; None for auto."""
    if text == "auto":
        return None
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r}: a number of replicas, or auto")
    return int(text)


def _scale(args: Any, api: ports.Api, out: TextIO, stdin: TextIO | None) -> None:
    body = {"replicas": args.replicas, "version": args.version}
    answer = api.call("POST", _model(args.model, "scale"), json=body).json
    wanted = "as forebay.toml says" if args.replicas is None else f"{args.replicas} replicas wanted"
    _done(args, out, answer, f"{args.model}: {wanted}")


def _update(args: Any, api: ports.Api, out: TextIO, stdin: TextIO | None) -> None:
    pairs = _pairs(args.pairs)
    if "job" in pairs:
        job_commands.update(pairs, api, out)
        return
    model = pairs.pop("model", "")
    if not model or not pairs:
        raise command_line.CommandError("update: write model=NAME and what to change")
    unknown = set(pairs) - {"replicas", "version", "batch"}
    if unknown:
        raise command_line.CommandError(
            f"update: unknown key {sorted(unknown)[0]}; known are model, replicas, version, batch"
        )
    answer: dict[str, Any] = {}
    if "replicas" in pairs:
        if not pairs["replicas"].isdigit():
            raise command_line.CommandError(f"update: replicas={pairs['replicas']}: not a number")
        body = {"replicas": int(pairs["replicas"]), "version": pairs.get("version")}
        answer |= api.call("POST", _model(model, "scale"), json=body).json
    if "batch" in pairs:
        if pairs["batch"] not in {"hold", "release"}:
            raise command_line.CommandError("update: batch is hold or release")
        answer |= api.call("POST", _model(model, pairs["batch"])).json
    _done(args, out, answer, f"{model}: updated")


def _hold(args: Any, api: ports.Api, out: TextIO, stdin: TextIO | None) -> None:
    if job_commands.is_jobs(args.model):
        job_commands.act(args.command, args.model, api, out)
        return
    answer = api.call("POST", _model(args.model, args.command)).json
    word = "held" if args.command == "hold" else "released"
    _done(args, out, answer, f"{args.model}: batch {word}")


def _resume(args: Any, api: ports.Api, out: TextIO, stdin: TextIO | None) -> None:
    answer = api.call("POST", _model(args.model, "resume")).json
    _done(args, out, answer, f"{args.model}: no longer quarantined")


def _drain(args: Any, api: ports.Api, out: TextIO, stdin: TextIO | None) -> None:
    named = [name for name in args.replicas.split(",") if name]
    if len(named) > 1:
        command_line.confirm(f"Drain {len(named)} replicas?", yes=args.yes, out=out, stdin=stdin)
    for replica_id in named:
        path = f"/admin/replicas/{parse.quote(replica_id, safe='')}/drain"
        _done(args, out, api.call("POST", path).json, f"{replica_id}: draining")


def _key_create(args: Any, api: ports.Api, out: TextIO, stdin: TextIO | None) -> None:
    tiers = [name for name in args.tiers.split(",") if name]
    for name in tiers:
        if name not in set(requests.Tier):
            known = ", ".join(requests.Tier)
            raise command_line.CommandError(f"--tiers {name}: no such tier; known are {known}")
    body = {
        "team": args.team,
        "user": args.user,
        "tiers": tiers,
        "models": [name for name in args.models.split(",") if name],
        "admin": args.admin,
        "coordinator": args.coordinator,
        "comment": args.comment,
        "expires_us": _expiry(args.expires),
    }
    answer = api.call("POST", "/admin/keys", json=body).json
    _done(args, out, answer, f"{answer['token']}\nThis token is shown once: keep it now.")


def _key_list(args: Any, api: ports.Api, out: TextIO, stdin: TextIO | None) -> None:
    answer = api.call("GET", "/admin/keys").json
    if args.json:
        command_line.print_json(answer, out)
        return
    rows = [
        (
            key["key_id"],
            key["team"],
            key["user"],
            ",".join(key["tiers"]),
            ",".join(key["models"]) or "all",
            listing.when(key["expires_us"]) if key["expires_us"] else "never",
            "revoked" if key["revoked_us"] else "valid",
        )
        for key in answer["keys"]
    ]
    header = ("KEY", "TEAM", "USER", "TIERS", "MODELS", "EXPIRES", "STATE")
    command_line.table(header, rows, out)


def _key_revoke(args: Any, api: ports.Api, out: TextIO, stdin: TextIO | None) -> None:
    path = f"/admin/keys/{parse.quote(args.key_id, safe='')}"
    _done(args, out, api.call("DELETE", path).json, f"{args.key_id}: revoked")


def _model(name: str, verb: str) -> str:
    return f"/admin/models/{parse.quote(name, safe='')}/{verb}"


def _pairs(words: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for word in words:
        key, sign, value = word.partition("=")
        if not sign or not key or not value:
            raise command_line.CommandError(f"update: {word}: write KEY=VALUE")
        found[key.lower()] = value
    return found


def _expiry(text: str) -> int:
    if not text:
        return 0
    now = datetime.datetime.now().astimezone()
    try:
        at = times.point(text, now=now, tz=now.tzinfo or datetime.UTC)
    except times.TimeError as error:
        raise command_line.CommandError(f"--expires {error}") from error
    if at <= now:
        raise command_line.CommandError(f"--expires {text}: is in the past")
    return round(at.timestamp() * 1_000_000)


def _done(args: Any, out: TextIO, answer: Any, text: str) -> None:
    if args.json:
        command_line.print_json(answer, out)
    else:
        print(text, file=out)


def _word(value: object) -> str:
    text = str(value)
    return f'"{text}"' if any(character.isspace() for character in text) else text
