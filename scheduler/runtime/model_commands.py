"""fctl model, version, route, adapter, profile, apply, history, revert: what is declared of models."""

from collections.abc import Mapping, Sequence
from typing import Any, TextIO

import yaml

from scheduler.contracts import command_line, ports
from scheduler.runtime import listing
from scheduler.runtime.models import yaml_text

_PATH = "/admin/catalog"
_PARTS = {"version": "versions", "adapter": "adapters"}
_WORDS = {
    "model": "served names: who may call, how many replicas, which hardware",
    "version": "versions of a model: weights, engine, seats",
    "route": "which versions of a model answer, by percent",
    "adapter": "LoRA adapters on a model",
    "profile": "hardware that replicas run on",
}
_EXAMPLES = {
    "model": "fctl model add chat tiers=[interactive,batch] profile=h100 scaling.floor=2",
    "version": "fctl version add chat v2 weights=/weights/chat-v2 seats=64 engine_args.block-size=32",
    "route": "fctl route update chat v1=95 v2=5   and: shadow=v3:10, pools=16384:long, or none of them",
    "adapter": "fctl adapter add chat law path=/adapters/law rank=16 team=legal",
    "profile": "fctl profile add h100 gres_type=H100 gpus=4 memory_gb=200 constraint=nvlink",
}


def add(commands: Any) -> None:
    """Add the commands to fctl's parser."""
    for kind, text in _WORDS.items():
        _add_kind(commands, kind, text)
    apply = commands.add_parser(
        "apply",
        help="make models as a file says",
        epilog="models that the file does not name stay as they are, unless --prune is given",
    )
    apply.add_argument("-f", "--file", required=True, help="YAML or JSON; - reads standard input")
    apply.add_argument("--prune", action="store_true", help="remove what the file does not name")
    apply.add_argument("-y", "--yes", action="store_true", help="do not ask before several go")
    apply.set_defaults(act=_apply)
    history = commands.add_parser("history", help="who changed what of models, and why")
    history.add_argument("model", nargs="?", default="", help="only what touches it")
    history.add_argument("-n", dest="count", type=int, default=20, help="how many (%(default)s)")
    history.add_argument("--json", action="store_true", help="print JSON")
    history.set_defaults(act=_history)
    revert = commands.add_parser("revert", help="make models as they were at a revision")
    revert.add_argument("revision", type=int)
    revert.set_defaults(act=_revert)
    for made in (apply, revert):
        _signed(made)


def _add_kind(commands: Any, kind: str, text: str) -> None:
    top = commands.add_parser(kind, help=text, epilog=f"example:\n  {_EXAMPLES[kind]}")
    verbs = top.add_subparsers(dest="verb", required=True, metavar="VERB")
    words = {"add": "declare a new one", "update": "change fields", "rm": "take one away"}
    for verb, said in words.items():
        if kind == "route" and verb != "update":
            continue
        own = _EXAMPLES[kind].startswith(f"fctl {kind} {verb} ")
        epilog = f"example:\n  {_EXAMPLES[kind]}" if own else None
        made = verbs.add_parser(verb, help=said, epilog=epilog)
        _named(made, kind)
        if verb != "rm":
            made.add_argument("pairs", nargs="*" if verb == "add" else "+", metavar="K=V")
        _signed(made)
        made.set_defaults(act={"add": _add, "update": _update, "rm": _remove}[verb], kind=kind)
    for verb in ("show", "list"):
        made = verbs.add_parser(verb, help="print one" if verb == "show" else "list all")
        if verb == "show":
            _named(made, kind)
        elif kind in _PARTS:
            made.add_argument("model", nargs="?", default="", help="only this model's")
        made.add_argument("--json", action="store_true", help="print JSON")
        made.set_defaults(act=_show if verb == "show" else _list, kind=kind)


def _named(made: Any, kind: str) -> None:
    if kind != "profile":
        made.add_argument("model")
    if kind not in {"model", "route"}:
        made.add_argument("name")


def _signed(made: Any) -> None:
    made.add_argument("--reason", default="", help="kept in the history")
    made.add_argument("--dry-run", action="store_true", help="show the difference, change nothing")
    made.add_argument("--json", action="store_true", help="print JSON")


def _add(args: Any, api: ports.Api, out: TextIO, stdin: TextIO | None) -> None:
    body = {**_base(args), "spec": yaml_text.nested(_pairs(args.pairs))}
    _said(args, out, api.call("POST", f"{_PATH}/{args.kind}", json=body).json)


def _update(args: Any, api: ports.Api, out: TextIO, stdin: TextIO | None) -> None:
    given = _pairs(args.pairs)
    wanted = _route(args.model, given, api) if args.kind == "route" else given
    _said(
        args,
        out,
        api.call("PATCH", f"{_PATH}/{args.kind}", json={**_base(args), "set": wanted}).json,
    )


def _remove(args: Any, api: ports.Api, out: TextIO, stdin: TextIO | None) -> None:
    params = {key: str(value) for key, value in _base(args).items()}
    _said(args, out, api.call("DELETE", f"{_PATH}/{args.kind}", params=params).json)


def _base(args: Any) -> dict[str, Any]:
    return {
        "model": getattr(args, "model", ""),
        "name": getattr(args, "name", ""),
        "reason": args.reason,
        "dry_run": args.dry_run,
    }


def _route(model: str, given: Mapping[str, Any], api: ports.Api) -> dict[str, Any]:
    """Return a route's fields from `v1=95 v2=5 shadow=v3:10`: percentages replace all there were."""
    wanted: dict[str, Any] = {}
    shares: dict[str, Any] = {}
    for key, value in given.items():
        if key == "pools":
            wanted["pools"] = _pools(value)
        elif key != "shadow":
            shares[key] = value
        elif value in (None, "none", ""):  # a tuple: it may be a list
            wanted["shadow"] = None
        else:
            version, sign, percent = str(value).rpartition(":")
            if not sign or not percent.isdigit():
                raise command_line.CommandError(
                    f"shadow={value}: write shadow=VERSION:PERCENT, or none"
                )
            wanted["shadow"] = {"version": version, "percent": int(percent)}
    if shares:
        wanted["versions"] = shares
    return wanted


def _pools(value: Any) -> list[dict[str, Any]] | None:
    """Return a route's pools from `16384:long,65536:longer`."""
    if value in (None, "none", ""):
        return None
    found = []
    for word in str(value).split(","):
        tokens, sign, version = word.partition(":")
        if not sign or not version or not tokens.isdigit():
            raise command_line.CommandError(
                f"pools={value}: write pools=TOKENS:VERSION,... or none"
            )
        found.append({"from_tokens": int(tokens), "version": version})
    return found


def _pairs(words: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for word in words:
        key, sign, text = word.partition("=")
        if not sign or not key:
            raise command_line.CommandError(f"{word}: write KEY=VALUE")
        try:
            found[key] = yaml_text.value(text) if text else None
        except (yaml.YAMLError, ValueError) as error:
            raise command_line.CommandError(f"{word}: {' '.join(str(error).split())}") from error
    return found


def _apply(args: Any, api: ports.Api, out: TextIO, stdin: TextIO | None) -> None:
    source = yaml_text.read(args.file, stdin)
    body = {
        "document": source.document(),
        "prune": args.prune,
        "reason": args.reason,
        "dry_run": args.dry_run,
    }
    if args.prune and not args.dry_run:
        _ask(args, _applied(source, {**body, "dry_run": True}, api), out, stdin)
    _said(args, out, _applied(source, body, api))


def _applied(source: yaml_text.Source, body: Mapping[str, Any], api: ports.Api) -> Any:
    try:
        return api.call("POST", f"{_PATH}/apply", json=body).json
    except command_line.CommandError as error:
        raise command_line.CommandError(source.placed(error.message), error.code) from error


def _ask(args: Any, answer: Any, out: TextIO, stdin: TextIO | None) -> None:
    """Ask before several models or profiles go that a file does not name: it may be the wrong file."""
    gone = [
        f"{one['kind']} {one['model'] or one['name']}"
        for one in answer["changes"]
        if one["after"] is None and one["kind"] in {"model", "profile"}
    ]
    if len(gone) > 1:
        named = f"{', '.join(gone[:10])}{', …' if gone[10:] else ''}"
        question = command_line.printable(f"Remove {len(gone)} ({named})?")
        command_line.confirm(question, yes=args.yes, out=out, stdin=stdin)


def _history(args: Any, api: ports.Api, out: TextIO, stdin: TextIO | None) -> None:
    params = {"limit": str(args.count), "model": args.model}
    answer = api.call("GET", f"{_PATH}/history", params=params).json
    if args.json:
        command_line.print_json(answer, out)
        return
    for one in answer["history"]:
        why = f": {one['reason']}" if one["reason"] else ""
        command_line.say(
            f"{one['revision']}  {listing.when(one['at_us'])}  {one['author']}{why}", out
        )
        for line in one["text"]:
            command_line.say(f"    {line}", out)
    if not answer["history"]:
        print("no changes", file=out)


def _revert(args: Any, api: ports.Api, out: TextIO, stdin: TextIO | None) -> None:
    body = {"revision": args.revision, "reason": args.reason, "dry_run": args.dry_run}
    _said(args, out, api.call("POST", f"{_PATH}/revert", json=body).json)


def _said(args: Any, out: TextIO, answer: Any) -> None:
    if args.json:
        command_line.print_json(answer, out)
        return
    for line in answer["text"]:
        command_line.say(line, out)
    for note in answer.get("notes", ()):
        command_line.say(f"note: {note}", out)
    if not answer["text"]:
        print("nothing changes", file=out)
    elif answer["applied"]:
        print(f"revision {answer['revision']}", file=out)
    else:
        print("dry run: nothing was changed", file=out)


def _show(args: Any, api: ports.Api, out: TextIO, stdin: TextIO | None) -> None:
    found = api.call("GET", _PATH).json["document"]
    if args.kind == "profile":
        thing = found.get("profiles", {}).get(args.name)
    else:
        thing = found.get("models", {}).get(args.model)
        if thing is not None and args.kind == "route":
            thing = thing.get("route", {})
        elif thing is not None and args.kind in _PARTS:
            thing = thing.get(_PARTS[args.kind], {}).get(args.name)
    if thing is None:
        named = " ".join(filter(None, (getattr(args, "model", ""), getattr(args, "name", ""))))
        raise command_line.CommandError(
            f"{args.kind} {named}: not declared; `fctl {args.kind} list` lists what is"
        )
    told = []
    if args.kind == "route" and thing.get("shadow"):
        answer = api.call("GET", "/admin/shadows").json["shadows"]
        told = [one for one in answer if one["model"] == args.model]
    if args.json:
        command_line.print_json({**thing, "copies": told[0]} if told else thing, out)
        return
    print(yaml.safe_dump(thing, sort_keys=False, allow_unicode=True).rstrip(), file=out)
    for one in told:
        row = listing.shadow(one)
        header = [key.upper() for key in row]
        command_line.table(header, [list(row.values())], out)


def _list(args: Any, api: ports.Api, out: TextIO, stdin: TextIO | None) -> None:
    found = api.call("GET", _PATH).json["document"]
    rows = list(_rows(args.kind, found, getattr(args, "model", "")))
    if args.kind == "adapter" and rows:
        loaded = api.call("GET", f"{_PATH}/adapters").json["models"]
        rows = [{**row, **_where(loaded.get(row["model"], {}).get(row["adapter"]))} for row in rows]
    if args.kind == "version" and rows:
        known = {
            (model["model"], version["version"]): version
            for model in api.call("GET", "/admin/models").json["models"]
            for version in model["versions"]
        }
        rows = [
            {**row, "status": _status(known.get((row["model"], row["version"])))} for row in rows
        ]
    if args.json:
        command_line.print_json([dict(row) for row in rows], out)
    elif not rows:
        print(f"no {args.kind}s", file=out)
    else:
        header = [key.upper() for key in rows[0]]
        command_line.table(header, [list(row.values()) for row in rows], out)


def _rows(kind: str, found: Mapping[str, Any], model: str) -> Any:
    if kind == "profile":
        for name, one in sorted(found.get("profiles", {}).items()):
            yield {
                "name": name,
                "gres": one.get("gres") or f"{one.get('gres_type') or 'gpu'}:{one.get('gpus', 1)}",
                "memory_gb": one.get("memory_gb", ""),
                "constraint": one.get("constraint", ""),
            }
        return
    for name, one in sorted(found.get("models", {}).items()):
        if model not in {"", name}:
            continue
        shares = one.get("route", {}).get("versions", {})
        if kind == "model":
            yield {
                "model": name,
                "route": _shares(shares),
                "replicas": one.get("replicas", 1),
                "profile": one.get("profile", ""),
                "callers": ",".join(one.get("callers", [])) or "all",
                "adapters": len(one.get("adapters", {})),
            }
        elif kind == "route":
            shadow = one.get("route", {}).get("shadow")
            told = f"{shadow['version']}:{shadow['percent']}" if shadow else ""
            pools = one.get("route", {}).get("pools", ())
            yield {
                "model": name,
                "versions": _shares(shares),
                "shadow": told,
                "pools": " ".join(f"{pool['from_tokens']}:{pool['version']}" for pool in pools),
            }
        elif kind == "version":
            for version, each in sorted(one.get("versions", {}).items()):
                yield {
                    "model": name,
                    "version": version,
                    "percent": shares.get(version, 0),
                    "engine": each.get("engine", "vllm"),
                    "runner": each.get("runner", "generate"),
                    "weights": each.get("weights", ""),
                }
        else:
            for adapter, each in sorted(one.get("adapters", {}).items()):
                yield {
                    "model": name,
                    "adapter": adapter,
                    "rank": each.get("rank", ""),
                    "team": each.get("team", "") or "all",
                    "path": each["path"],
                }


def _where(known: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return on how many replicas an adapter is, and why it is not where it should be."""
    if known is None:
        return {"loaded": 0, "reason": ""}
    faults = [f"{version}: {fault['reason']}" for version, fault in known["faults"].items()]
    waiting = f"{known['waiting']} wait" if known["waiting"] else ""
    loaded = sum(state == "loaded" for state in known["states"].values())
    return {"loaded": loaded, "reason": "; ".join([*faults, *filter(None, [waiting])])}


def _status(known: Mapping[str, Any] | None) -> str:
    """Return how a version is: its replicas by state, or why it has none."""
    if known is None:
        return "off"
    found = [f"{count} {state}" for state, count in sorted(known["states"].items())]
    if known["quarantine_reason"]:
        found.append(f"quarantined: {known['quarantine_reason']}")
    target = known["target"]
    wanted = target["need"] + target["lent"] if target else known["wanted"]
    return ", ".join(found) or (f"{wanted} wanted" if wanted else "off")


def _shares(shares: Mapping[str, int]) -> str:
    return " ".join(
        f"{version}={percent}" for version, percent in sorted(shares.items()) if percent
    )
