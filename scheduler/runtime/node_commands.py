"""fctl cordon and uncordon: nodes that Forebay is to keep off, or to use again."""

from typing import Any, TextIO
from urllib import parse

from scheduler.contracts import ports
from scheduler.runtime import several


def add(commands: Any) -> None:
    """Add the commands to fctl's parser."""
    cordon = commands.add_parser(
        "cordon",
        help="keep off nodes: no lease is asked for there, nothing new starts",
        description="Keep off nodes. What runs there goes on; `fctl drain` takes it away.",
    )
    cordon.add_argument("nodes", help="one, or several as Slurm writes them: n[1-3],n7")
    cordon.add_argument("reason", nargs="+", help="for those who look later")
    uncordon = commands.add_parser("uncordon", help="use nodes again")
    uncordon.add_argument("nodes", help="as for cordon")
    for made, act in ((cordon, _cordon), (uncordon, _uncordon)):
        made.add_argument("--json", action="store_true", help="print JSON")
        made.set_defaults(act=act)


def _cordon(args: Any, api: ports.Api, out: TextIO, stdin: TextIO | None) -> None:
    body = {"reason": " ".join(args.reason)}
    several.change(
        several.names(args.nodes),
        lambda node: api.call("POST", _path(node, "cordon"), json=body).json,
        lambda _: "cordoned",
        out,
        as_json=args.json,
    )


def _uncordon(args: Any, api: ports.Api, out: TextIO, stdin: TextIO | None) -> None:
    several.change(
        several.names(args.nodes),
        lambda node: api.call("POST", _path(node, "uncordon")).json,
        lambda _: "used again",
        out,
        as_json=args.json,
    )


def _path(node: str, verb: str) -> str:
    return f"/admin/nodes/{parse.quote(node, safe='')}/{verb}"
