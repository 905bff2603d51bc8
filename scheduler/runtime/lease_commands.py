"""fctl lease --render: the job that Forebay would give to Slurm for a lease, on the host that would do so."""

import argparse
from collections.abc import Callable
from typing import Any, TextIO

from scheduler.contracts import command_line, fleet, ids

Render = Callable[[fleet.Lease], str]


def add(commands: Any) -> None:
    """Add the command to fctl's parser."""
    lease = commands.add_parser(
        "lease",
        help="print the job of a lease",
        description="Print the job that Forebay would submit for a lease: options, environment, script.",
    )
    lease.add_argument("--render", action="store_true", required=True, help="print the job's text")
    kinds = [kind.value for kind in fleet.LeaseKind]
    lease.add_argument("--kind", choices=kinds, default=kinds[0], help="%(default)s if not given")
    lease.add_argument("--gpus", type=_count, default=1, help="over all of its nodes")
    lease.add_argument(
        "--nodes", type=_count, default=0, help="whole nodes, for replicas on several"
    )
    lease.add_argument("--team", default="forebay", help="whom it would be charged to")
    lease.add_argument("--partition", default="", help="else those of forebay.toml")


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) > 100_000:
        raise argparse.ArgumentTypeError(f"{text!r}: a whole number")
    return int(text)


def run(args: Any, out: TextIO, render: Render | None) -> int:
    """Print the job; returns the exit code."""
    if render is None:
        raise command_line.CommandError("lease: run it on the broker's host, where forebay.toml is")
    if args.nodes and args.gpus % args.nodes:
        raise command_line.CommandError(
            f"lease: {args.gpus} GPUs do not spread evenly over {args.nodes} nodes: give a multiple"
        )
    lease = fleet.Lease(
        lease_id=ids.LeaseId("l-000000000000"),
        cluster="",
        kind=fleet.LeaseKind(args.kind),
        team=args.team,
        state=fleet.LeaseState.REQUESTED,
        gpus=args.gpus,
        partition=args.partition,
        whole_nodes=args.nodes,
    )
    out.write(render(lease))
    return 0
