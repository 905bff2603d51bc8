"""fctl weights: what nodes' disks hold of models, and what shall be staged, removed, verified."""

from collections.abc import Mapping
from typing import Any, Protocol, TextIO

from scheduler.contracts import command_line, ports, weights
from scheduler.runtime import listing

GB = 1_000_000_000
LOCAL = ("check", "manifest")  # verbs that need no gateway


class Looker(Protocol):
    """Looks at a place from the host where fctl runs."""

    def __call__(self, place: str, *, manifest: bool, write: bool) -> Mapping[str, Any]:
        """Return what the place holds.

        Raises:
            weights.WeightsError: it can't be used as it is, or does not answer.
        """
        ...


def add(commands: Any) -> None:
    """Add the command to fctl's parser."""
    command = commands.add_parser("weights", help="weights on nodes' disks")
    verbs = command.add_subparsers(dest="verb", required=True, metavar="VERB")
    shown = verbs.add_parser("list", help="what each node holds, and what waits for what")
    shown.add_argument("node", nargs="?", default="", help="only this node")
    shown.set_defaults(act=_list)
    for verb, text in (
        ("stage", "have weights on nodes before a replica wants them"),
        ("rm", "remove weights that nothing uses, with what was compiled for them"),
        ("verify", "read staged weights anew and compare them with their manifest"),
    ):
        made = verbs.add_parser(verb, help=text, description=text)
        made.add_argument("name", help="a model, or a place: file://, s3://, hf://")
        made.add_argument("--version", default="", help="of a model with several")
        made.add_argument("--node", default="", help="only there; else on every node with a lease")
        made.set_defaults(act=_ask)
    for verb, text in (
        (
            "check",
            "look at a place from here: nothing missing, nothing cut off, shapes as config.json says",
        ),
        ("manifest", "read a place from here, and print what nodes are to insist on"),
    ):
        made = verbs.add_parser(verb, help=text, description=text)
        made.add_argument(
            "place", help="file:///folder, s3://bucket/prefix or hf://owner/name@revision"
        )
        if verb == "manifest":
            made.add_argument(
                "--write", action="store_true", help="put it beside the weights (file:// only)"
            )
    for made in verbs.choices.values():
        made.add_argument("--json", action="store_true", help="print JSON")


def look(args: Any, out: TextIO, looker: Looker | None) -> int:
    """Do what needs no gateway: look at a place from here; returns the exit code."""
    if looker is None:
        raise command_line.CommandError(
            f"weights {args.verb}: run it on a host that holds forebay.toml"
        )
    try:
        found = looker(
            args.place, manifest=args.verb == "manifest", write=getattr(args, "write", False)
        )
    except weights.WeightsError as error:
        raise command_line.CommandError(str(error)) from error
    if args.json:
        command_line.print_json(found, out)
    else:
        command_line.say(
            ", ".join(f"{key} {value}" for key, value in found.items() if key != "files"), out
        )
    return 0


def _list(args: Any, api: ports.Api, out: TextIO, stdin: TextIO | None) -> None:
    answer = api.call("GET", "/admin/weights").json
    nodes = answer["nodes"]
    if args.node:
        if args.node not in nodes:
            known = ", ".join(nodes) or "none"
            raise command_line.CommandError(
                f"{args.node}: no lease there; there are some on: {known}"
            )
        nodes = {args.node: nodes[args.node]}
    if args.json:
        command_line.print_json({**answer, "nodes": nodes}, out)
        return
    rows = [
        (
            node,
            item["state"],
            f"{item['size'] / GB:.2f}",
            item["users"],
            listing.when(item["used_us"]) if item["used_us"] else "-",
            item["uri"],
            item["digest"][:12] or "-",
            item["reason"] or "-",
        )
        for node, items in nodes.items()
        for item in items
    ]
    if rows:
        header = ("NODE", "STATE", "GB", "USERS", "USED", "PLACE", "DIGEST", "REASON")
        command_line.table(header, rows, out)
    else:
        print("no weights on any node's disk", file=out)
    for act in answer["asked"]:
        done = answer["done"].get(act["act_id"], {})
        for node, outcome in sorted(done.items()):
            command_line.say(f"{act['act']} {act['uri']} on {node}: {outcome}", out)
        if not done:
            command_line.say(
                f"{act['act']} {act['uri']} on {act['node'] or 'every node'}: asked", out
            )


def _ask(args: Any, api: ports.Api, out: TextIO, stdin: TextIO | None) -> None:
    body = {"act": args.verb, "name": args.name, "version": args.version, "node": args.node}
    answer = api.call("POST", "/admin/weights", json=body).json
    if args.json:
        command_line.print_json(answer, out)
        return
    where = args.node or "every node with a lease"
    command_line.say(
        f"{args.verb} {answer['uri']} on {where}: asked ({answer['act_id']}); see fctl weights "
        "list",
        out,
    )
