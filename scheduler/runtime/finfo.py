"""finfo: sinfo's view of the fleet, with the tier in the partition's place."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TextIO

from scheduler.contracts import command_line, fleet, ports, requests
from scheduler.runtime import listing, several
from slurm_plugins import hostlist

_EXAMPLES = """examples:
  finfo                     tiers, models, replicas, seats and GPUs by state
  finfo -N                  one line for each node and replica
  finfo -s                  one line for each tier and model: serving/starting/other/total
  finfo -t serving -o "%P %m %N"
format: %P tier, %m model, %v version, %a up, %D replicas, %c seats, %G GPUs, %t state, %r role, %N nodes
"""
_FIELD = re.compile(r"%(\.?)(\d*)([A-Za-z])")
DEFAULT = "%.12P %.16m %.5a %.8D %.8c %.5G %.9t %N"
BY_NODE = "%16N %.12P %.16m %.9t %.11r %.8c %.5G"
SUMMARY = "%.12P %.16m %.5a %.18D %.5G %N"
_HEADS = {
    "P": "TIER",
    "m": "MODEL",
    "v": "VERSION",
    "a": "AVAIL",
    "D": "REPLICAS",
    "c": "SEATS",
    "G": "GPUS",
    "t": "STATE",
    "r": "ROLE",
    "N": "NODELIST",
}


def finfo(argv: Sequence[str], *, api: ports.Api, out: TextIO, err: TextIO) -> int:
    """Print the fleet; return the exit code."""

    def body() -> int:
        args = parser().parse_args(list(argv))
        states = _known("-t", args.states, [*fleet.ReplicaState, "absent"])
        tiers = _known("-p", args.partition, list(requests.Tier))
        nodes = frozenset(several.names(args.nodes)) if args.nodes else frozenset()
        models = api.call("GET", "/admin/models").json["models"]
        replicas = api.call("GET", "/admin/replicas").json["replicas"]
        rows = [
            row
            for row in _rows(models, replicas)
            if (not states or row["t"] in states)
            and (not tiers or row["P"] in tiers)
            and (not nodes or row["N"] in nodes)
        ]
        if args.json:
            command_line.print_json({"replicas": [_named(row) for row in rows]}, out)
            return 0
        layout = args.format or (BY_NODE if args.Node else SUMMARY if args.summarize else DEFAULT)
        _check(layout)
        keys: Callable[[Mapping[str, Any]], tuple[object, ...]] = _by_state
        if args.Node:
            keys = _by_replica
        elif args.summarize:
            keys = _by_model
        lines = _group(rows, keys, slashes=args.summarize)
        if not args.noheader:
            print(_line(layout, _HEADS), file=out)
        for line in lines:
            print(_line(layout, line), file=out)
        return 0

    return command_line.run("finfo", body, err=err)


def parser() -> command_line.Parser:
    """Return finfo's parser."""
    made = command_line.Parser(
        prog="finfo",
        add_help=False,  # sinfo's -h is another thing
        description="Show the fleet.",
        epilog=_EXAMPLES,
    )
    made.add_argument("-N", "--Node", action="store_true", help="one line for each node")
    made.add_argument("-s", "--summarize", action="store_true", help="one line for each model")
    made.add_argument("-t", "--states", default="", help="only replicas in these states")
    made.add_argument("-p", "--partition", default="", help="only these tiers")
    made.add_argument("-o", "--format", default="", help="columns, see below")
    made.add_argument("-n", "--nodes", default="", help="only what is on these: n[1-3],n7")
    made.add_argument("-h", "--noheader", action="store_true", help="no header line")
    made.add_argument("--help", action="help", help="this text")
    made.add_argument("--json", action="store_true", help="print JSON")
    return made


def _known(option: str, text: str, words: Sequence[str]) -> frozenset[str]:
    """Return the words of a list; a wrong one would show an empty fleet."""
    found = frozenset(word for word in text.lower().split(",") if word)
    for word in sorted(found.difference(words)):
        known = ", ".join(str(each) for each in words)
        raise command_line.CommandError(f"{option} {word}: no such thing; known are {known}")
    return found


def _rows(
    models: Iterable[Mapping[str, Any]], replicas: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return one row for each tier and replica; a model without replicas has one row, `absent`."""
    found: list[dict[str, Any]] = []
    for model in models:
        mine = [item for item in replicas if item["spec"]["model"] == model["model"]]
        for tier in model["tiers"]:
            for item in mine:
                if tier == "batch" and item["role"] == "interactive":
                    continue  # it takes none now
                found.append(
                    {
                        "P": tier,
                        "m": model["model"],
                        "v": item["spec"]["version"],
                        "a": "up",
                        "D": 1,
                        "c": item["spec"]["seats"],
                        "G": listing.gpus(item["spec"]),
                        "t": item["state"],
                        "r": item["role"],
                        "N": item["node"],
                        "id": item["replica_id"],
                    }
                )
            if not mine:
                found.append(
                    {
                        "P": tier,
                        "m": model["model"],
                        "v": "",
                        "a": "down",
                        "D": 0,
                        "c": 0,
                        "G": 0,
                        "t": "absent",
                        "r": "",
                        "N": "",
                        "id": "",
                    }
                )
    return found


def _named(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row with words for keys, for JSON."""
    return {"replica_id": row["id"], **{_HEADS[key].lower(): row[key] for key in _HEADS}}


def _by_state(row: Mapping[str, Any]) -> tuple[object, ...]:
    return (row["P"], row["m"], row["v"], row["t"])


def _by_replica(row: Mapping[str, Any]) -> tuple[object, ...]:
    return (row["N"], row["P"], row["m"], row["id"])


def _by_model(row: Mapping[str, Any]) -> tuple[object, ...]:
    return (row["P"], row["m"])


def _group(
    rows: Sequence[Mapping[str, Any]],
    keys: Callable[[Mapping[str, Any]], tuple[object, ...]],
    *,
    slashes: bool,
) -> list[dict[str, Any]]:
    groups: dict[tuple[object, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(keys(row), []).append(row)
    found: list[dict[str, Any]] = []
    for members in groups.values():
        nodes = sorted({row["N"] for row in members if row["N"]})
        line = {
            **members[0],
            "D": sum(row["D"] for row in members),
            "c": sum(row["c"] for row in members),
            "G": listing.whole(sum(row["G"] for row in members)),
            "N": hostlist.compress(nodes) if nodes else "",
        }
        if slashes:
            line["D"] = _slashes(members)
        found.append(line)
    return found


def _slashes(members: Sequence[Mapping[str, Any]]) -> str:
    """Return serving/starting/other/total, as sinfo -s has A/I/O/T."""
    serving = sum(row["D"] for row in members if row["t"] == "serving")
    starting = sum(row["D"] for row in members if row["t"] in {"starting", "warm"})
    total = sum(row["D"] for row in members)
    return f"{serving}/{starting}/{total - serving - starting}/{total}"


def _check(layout: str) -> None:
    for _, _, letter in _FIELD.findall(layout):
        if letter not in _HEADS:
            known = " ".join(f"%{key}" for key in _HEADS)
            raise command_line.CommandError(f"-o %{letter}: no such column; known are {known}")


def _line(layout: str, values: Mapping[str, Any]) -> str:
    """Fill a layout in: `%.8D` is right-aligned in 8, `%8D` left-aligned; too wide is cut, as sinfo does."""

    def cell(match: "re.Match[str]") -> str:
        right, width, letter = match.groups()
        text = command_line.printable(str(values[letter]))
        if not width:
            return text
        text = text[: int(width)]
        return text.rjust(int(width)) if right else text.ljust(int(width))

    return _FIELD.sub(cell, layout).rstrip()
