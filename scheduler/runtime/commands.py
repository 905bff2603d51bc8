"""fctl: what scontrol and sacctmgr are to Slurm. It speaks HTTP to a gateway and decides nothing."""

import argparse
import dataclasses
import datetime
import functools
import os
from collections.abc import Callable, Sequence
from typing import Any, TextIO
from urllib import parse

from accounting import billing_commands
from scheduler.contracts import command_line, ports, requests, times
from scheduler.runtime import (
    examples,
    fleet_commands,
    job_commands,
    lease_commands,
    listing,
    model_commands,
    node_commands,
    quota_commands,
    rollout_commands,
    schedule_commands,
    show_commands,
    weights_commands,
)

Doctor = Callable[[TextIO, bool], int]
"""Prints to a stream what it found, as JSON or not, and returns the exit code."""
_EPILOG = """examples:
  fctl show leases              what Forebay holds in Slurm
  fctl explain chat             why the model's replicas are as they are
  fctl scale chat 3             keep three replicas warm
  fctl apply -f models.yaml --dry-run
  fctl drain n3 bad fan         move what is there; `resume` uses it again
  fctl quota set team=physics tokens_per_day=20M
  fctl doctor                   what in this Slurm would slow reclaiming
Each command has examples of its own: fctl COMMAND --help.
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Here:
    """What is done on this host, without a gateway; None: not on this one.

    Attributes:
        doctor: looks at the site's Slurm.
        rebuild: makes the rollups again.
        render: makes a lease's job text, as the settings here have it.
        looker: looks at weights where they lie.
    """

    doctor: Doctor | None = None
    rebuild: Doctor | None = None
    render: lease_commands.Render | None = None
    looker: weights_commands.Looker | None = None


def fctl(
    argv: Sequence[str],
    *,
    api: ports.Api,
    out: TextIO,
    err: TextIO,
    here: Here | None = None,
    stdin: TextIO | None = None,
) -> int:
    """Show and change what the broker does; return the exit code."""
    here = here or Here()

    def body() -> int:
        args = parser().parse_args(list(argv))
        if args.command == "doctor":
            if here.doctor is None:
                raise command_line.CommandError("doctor: run it on a host that reaches Slurm")
            return here.doctor(out, args.json)
        if args.command == "rebuild":
            if here.rebuild is None:
                raise command_line.CommandError("rebuild: run it on the accounting host")
            return here.rebuild(out, args.json)
        if args.command == "weights" and args.verb in weights_commands.LOCAL:
            return weights_commands.look(args, out, here.looker)
        if args.command == "lease":
            return lease_commands.run(args, api, out, here.render)
        return int(args.act(args, api, out, stdin) or 0)

    return command_line.run("fctl", body, err=err)


@functools.cache
def parser() -> command_line.Parser:
    """Return fctl's parser."""
    made = command_line.Parser(prog="fctl", description="Control Forebay.", epilog=_EPILOG)
    commands = made.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, text: str, act: Callable[..., Any]) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("--json", action="store_true", help="print JSON")
        command.set_defaults(act=act)
        return command

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
    add("doctor", "check the site's Slurm configuration", _update)
    add("rebuild", "make the rollups again from Parquet, on the accounting host", _update)
    _add_key(commands)
    show_commands.add(commands)
    fleet_commands.add(commands)
    billing_commands.add(commands)
    quota_commands.add(commands)
    job_commands.add(commands)
    node_commands.add(commands)
    schedule_commands.add(commands)
    weights_commands.add(commands)
    lease_commands.add(commands)
    model_commands.add(commands)
    rollout_commands.add(commands)
    command_line.exemplify(made, examples.FCTL)
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
    if job_commands.named(pairs):
        job_commands.update(pairs, api, out, as_json=args.json)
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
        try:
            number = _replicas(pairs["replicas"])
        except argparse.ArgumentTypeError as error:
            raise command_line.CommandError(f"update: replicas={error}") from error
        body = {"replicas": number, "version": pairs.get("version")}
        answer |= api.call("POST", _model(model, "scale"), json=body).json
    if "batch" in pairs:
        if pairs["batch"] not in {"hold", "release"}:
            raise command_line.CommandError("update: batch is hold or release")
        answer |= api.call("POST", _model(model, pairs["batch"])).json
    _done(args, out, answer, f"{model}: updated")


def _key_create(args: Any, api: ports.Api, out: TextIO, stdin: TextIO | None) -> None:
    tiers = [name for name in args.tiers.split(",") if name]
    for name in tiers:
        if name not in set(requests.Tier):
            known = ", ".join(requests.Tier)
            raise command_line.CommandError(f"--tiers {name}: no such tier; known are {known}")
    models = [name for name in args.models.split(",") if name]
    if args.models and not models:  # without one the key would be good for all
        raise command_line.CommandError(f"--models {args.models}: names no model")
    body = {
        "team": args.team,
        "user": args.user,
        "tiers": tiers,
        "models": models,
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
    now = datetime.datetime.now(datetime.UTC)
    try:
        at = times.point(text, now=now, tz=times.local_zone(os.environ))
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
