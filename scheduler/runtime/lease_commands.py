"""fctl lease --render: the job that Forebay would give to Slurm for a lease, on the host that would do so."""

import argparse
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TextIO

import pydantic

from scheduler.contracts import command_line, fleet, ids, ports
from scheduler.core import asks
from scheduler.runtime import settings
from scheduler.runtime.models import compiled, document, yaml_text

Render = Callable[[fleet.Lease, int], str]
"""Makes the text of a lease's job; see `planned` for the arguments."""


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
    lease.add_argument(
        "--gpus",
        type=_some,
        default=0,
        help="over all of its nodes; shards or such with a profile of them. Else 1, or what the planner "
        "asks for where a replica on the profile has no room",
    )
    lease.add_argument(
        "--nodes", type=_count, default=0, help="whole nodes, for replicas on several"
    )
    lease.add_argument(
        "--profile", default="", metavar="NAME", help="for replicas on this hardware"
    )
    lease.add_argument(
        "--file", default="", metavar="FILE", help="where the profile stands, if it is not declared"
    )
    lease.add_argument("--team", default="forebay", help="whom it would be charged to")
    lease.add_argument("--partition", default="", help="else those of forebay.toml")


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) > 100_000:
        raise argparse.ArgumentTypeError(f"{text!r}: a whole number")
    return int(text)


def _some(text: str) -> int:
    if not _count(text):
        raise argparse.ArgumentTypeError("at least 1; for one on CPUs name its profile alone")
    return int(text)


def run(args: Any, api: ports.Api, out: TextIO, render: Render | None) -> int:
    """Print the job; returns the exit code."""
    if render is None:
        raise command_line.CommandError("lease: run it on the broker's host, where forebay.toml is")
    if args.file and not args.profile:
        raise command_line.CommandError("lease: --file: say which of its profiles: --profile NAME")
    profile = _profile(args, api) if args.profile else None
    hardware = compiled.hardware(profile)
    units = 1 if profile is None else compiled.units(profile)
    _check(args, hardware, units)
    gpus = args.gpus or (1 if profile is None else 0)
    if args.nodes and gpus % args.nodes:
        raise command_line.CommandError(
            f"lease: {gpus} GPUs do not spread evenly over {args.nodes} nodes: give a multiple"
        )
    lease = fleet.Lease(
        lease_id=ids.LeaseId("l-000000000000"),
        cluster="",
        kind=fleet.LeaseKind(args.kind),
        team=args.team,
        state=fleet.LeaseState.REQUESTED,
        gpus=gpus,
        hardware=hardware,
        partition=args.partition,
        whole_nodes=args.nodes,
    )
    out.write(render(lease, units))
    return 0


def planned(asked: fleet.Lease, units: int, options: settings.Settings) -> fleet.Lease:
    """Return a lease as the broker would ask for it.

    Args:
        asked: what was said of it: without ``gpus`` it gets as many as the planner would ask for;
            ``hardware`` is one replica's.
        units: of that hardware, one replica's.
        options: the broker's settings.
    """
    gpus, nodes = asked.gpus, asked.whole_nodes
    if not gpus:
        gpus, nodes = asks.size(options, units, asked.hardware)
    return dataclasses.replace(
        asked,
        gpus=gpus,
        whole_nodes=nodes,
        hardware=asks.of_lease(asked.hardware, fleet.taken(units, gpus // max(1, nodes)), gpus),
        gres_type=asked.hardware.gres_type or options.lease_gres_type,
        partition=asked.partition or options.lease_partition,
        walltime_s=options.lease_walltime_s,
    )


def _profile(args: Any, api: ports.Api) -> document.Profile:
    """Return the profile that is named, of the registry or of a file.

    Raises:
        command_line.CommandError: there is none, or it is no profile.
    """
    source = yaml_text.read(args.file) if args.file else None
    declared = source.document() if source else api.call("GET", "/admin/catalog").json["document"]
    known = declared.get("profiles") or {}
    if not isinstance(known, Mapping):
        raise command_line.CommandError(f"{args.file}: profiles: must be a mapping of names")
    if args.profile not in known:
        there = ", ".join(sorted(map(str, known))) or "none"
        raise command_line.CommandError(
            f"lease: --profile {args.profile}: {args.file or 'the registry'} has {there}"
        )
    try:
        return document.Profile.model_validate(known[args.profile])
    except pydantic.ValidationError as error:
        fault = document.fault(error, f"profiles.{args.profile}")
        raise command_line.CommandError(source.placed(fault) if source else fault) from error


def _check(args: Any, hardware: fleet.Hardware, units: int) -> None:
    """Refuse what the planner would never ask for: Slurm would refuse it too, or no replica would fit.

    Raises:
        command_line.CommandError: it says which option, and what to write.
    """
    on = f"profile {args.profile}"
    if hardware.gres == "none" and (args.gpus or args.nodes):
        raise command_line.CommandError(
            f"lease: {on} runs on CPUs: leave out --{'gpus' if args.gpus else 'nodes'}"
        )
    if hardware.shared and args.nodes:
        raise command_line.CommandError(f"lease: {on} takes parts of one GPU: leave out --nodes")
    if hardware.shared and args.gpus > hardware.parts:
        raise command_line.CommandError(
            f"lease: --gpus {args.gpus}: a GPU has {hardware.parts} {hardware.gres}, and a job gets parts "
            "of one GPU: lower it"
        )
    if args.nodes and not args.gpus and args.profile:
        raise command_line.CommandError("lease: --nodes: say how many GPUs they have: --gpus N")
    if args.gpus and args.gpus < units:
        raise command_line.CommandError(
            f"lease: --gpus {args.gpus}: a replica on {on} takes {units}: give as many or more"
        )
