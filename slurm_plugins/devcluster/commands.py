"""The command `forebay devcluster up|down|status`."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from scheduler.contracts import command_line
from slurm_plugins.devcluster import cluster, site

_EXAMPLES = """examples:
  forebay devcluster up --folder build/slurm --account physics=alice,bob
  eval "$(forebay devcluster status --env)"; sinfo
  forebay devcluster down --purge
"""


def _parser() -> command_line.Parser:
    parser = command_line.Parser(
        prog="forebay devcluster",
        description="Bring a real Slurm cluster with pretend GPUs up and down, in one folder.",
        epilog=_EXAMPLES,
    )
    parser.add_argument("action", choices=("up", "down", "status"))
    parser.add_argument(
        "--folder", default="build/devcluster", help="folder of the cluster (default %(default)s)"
    )
    parser.add_argument("--nodes", type=int, default=4, help="up: nodes (default %(default)s)")
    parser.add_argument(
        "--gpus", type=int, default=4, help="up: pretend GPUs of each node (default %(default)s)"
    )
    parser.add_argument("--name", default="forebay", help="up: the cluster's name")
    parser.add_argument(
        "--account", action="append", default=[], metavar="TEAM[=USER,…]", help="up: repeatable"
    )
    parser.add_argument("--no-rest", action="store_true", help="up: without slurmrestd")
    parser.add_argument("--no-accounting", action="store_true", help="up: without slurmdbd")
    parser.add_argument("--purge", action="store_true", help="down: remove all files but the logs")
    parser.add_argument(
        "--env", action="store_true", help="status: print shell exports and no more"
    )
    parser.add_argument("--json", action="store_true", help="up, status: print JSON")
    return parser


def main(argv: Sequence[str], *, out: TextIO, err: TextIO) -> int:
    """Run the command.

    Returns:
        0 if the cluster is as asked; 1 on an error, or from `status` if any daemon is missing.
    """

    def body() -> int:
        options = _parser().parse_args(list(argv))
        folder = Path(options.folder)
        try:
            if options.action == "up":
                cluster.up(
                    folder,
                    nodes=options.nodes,
                    gpus_per_node=options.gpus,
                    name=options.name,
                    rest=not options.no_rest,
                    accounting=not options.no_accounting,
                    accounts=_accounts(options.account),
                )
            elif options.action == "down":
                cluster.down(folder, purge=options.purge)
                return 0
            return _show(cluster.status(folder), out, env=options.env, as_json=options.json)
        except site.DevClusterError as error:
            raise command_line.CommandError(str(error)) from None

    return command_line.run("forebay devcluster", body, err=err)


def _accounts(words: Sequence[str]) -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for word in words:
        team, _, users = word.partition("=")
        if not team:
            raise command_line.CommandError(f"--account {word!r}: write TEAM or TEAM=USER,USER")
        found[team] = tuple(user for user in users.split(",") if user)
    return found


def _show(status: cluster.Status, out: TextIO, *, env: bool, as_json: bool) -> int:
    known = status.site
    if known is None:
        raise command_line.CommandError(
            "no cluster in this folder: forebay devcluster up --folder …"
        )
    if env:
        for key, value in known.env().items():
            print(f"export {key}={value}", file=out)
    elif as_json:
        document = {
            "cluster": known.cluster,
            "version": known.version,
            "env": known.env(),
            "rest_url": known.rest_url,
            "logs": str(known.logs),
            "nodes": dict(status.nodes),
            "daemons": {daemon.name: daemon.pid for daemon in status.daemons},
        }
        command_line.print_json(document, out)
    else:
        print(f"cluster {known.cluster}, Slurm {known.version}, logs in {known.logs}", file=out)
        rows = [
            (
                daemon.name,
                daemon.pid or "-",
                status.nodes.get(daemon.name.removeprefix("slurmd-"), ""),
                os.path.relpath(daemon.log, known.logs),
            )
            for daemon in status.daemons
        ]
        command_line.table(("DAEMON", "PID", "STATE", "LOG"), rows, out)
    return 0 if status.up else 1
