"""fctl weights: what nodes' disks hold of models, and what shall be staged, removed, verified."""

from typing import Any, TextIO

from scheduler.contracts import command_line, ports
from scheduler.runtime import listing

GB = 1_000_000_000


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
    for made in verbs.choices.values():
        made.add_argument("--json", action="store_true", help="print JSON")


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
        f"{args.verb} {answer['uri']} on {where}: asked ({answer['act_id']}); see fctl weights list",
        out,
    )
