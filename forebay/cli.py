"""`forebay`: starts the parts of an installation, or all of them."""

import argparse
import asyncio
import dataclasses
import importlib
import logging
import os
import re
import sys
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

import uvloop

from forebay import config as configs
from forebay import installation, lifeline, ready
from scheduler.contracts import command_line, slurm
from scheduler.runtime import config, config_text

_SERVICES = ("broker", "gateway", "batchd")
_INNER = (
    "gateway-admission",
    "gateway-worker",
)  # started by `forebay gateway` with several workers
_EXAMPLES = """\
forebay up --config forebay.toml
forebay up --demo-cluster
forebay demo
forebay config check --config forebay.toml
forebay config example > forebay.toml
forebay devcluster up --nodes 4
forebay completion bash
forebay plan large-site
forebay simulate large-site --factor 0.02
forebay sql 'SELECT team, sum(cost) / 1e6 FROM bill GROUP BY team'
forebay broker --config /etc/forebay/forebay.toml
forebay gateway --config /etc/forebay/forebay.toml --workers 4
forebay batchd --config /etc/forebay/forebay.toml
forebay gateway-admission --config /etc/forebay/forebay.toml
forebay gateway-worker --config /etc/forebay/forebay.toml
forebay agent --spec /var/lib/forebay/leases/l-0123456789ab/agent.json
forebay slot --spec /var/lib/forebay/leases/l-0123456789ab/l-0123456789ab.s0.json
forebay replica --spec /var/lib/forebay/leases/l-0123456789ab/r-0123456789ab.json
"""
_BODIES = {  # where each service's body is; loaded once it is asked for, with what it needs
    "broker": "forebay.broker_service:broker",
    "gateway": "forebay.doors:gateway",
    "batchd": "forebay.batch_service:batchd",
    "gateway-worker": "forebay.gateway_service:worker",
    "gateway-admission": "forebay.admission_service:admission",
}
IN_LEASES = ("agent", "slot", "replica")


def main(argv: list[str] | None = None) -> int:
    """Run one subcommand; returns the exit code."""
    words = sys.argv[1:] if argv is None else argv
    if words[:1] == ["devcluster"]:
        from slurm_plugins.devcluster import commands

        return commands.main(words[1:], out=sys.stdout, err=sys.stderr)
    if words[:1] == ["completion"]:
        from forebay import completion

        return completion.main(words[1:])
    if words[:1] == ["sql"]:
        from forebay import sql

        return sql.main(words[1:])
    if words[:1] in (["plan"], ["simulate"]):
        from scheduler.sim import commands as sim_commands

        body = sim_commands.plan_main if words[0] == "plan" else sim_commands.simulate_main
        return body(words[1:], out=sys.stdout, err=sys.stderr)
    return command_line.run("forebay", lambda: _run(parser().parse_args(words)))


def parser() -> command_line.Parser:
    """Return forebay's parser."""
    made = command_line.Parser(
        "forebay",
        description="Warm LLM replicas on Slurm, batch in every gap, a bill per team.",
        epilog="examples:\n  forebay up --config forebay.toml\n  forebay config check\n"
        "  forebay devcluster up --nodes 4\n",
    )
    kinds = made.add_subparsers(dest="what", required=True, metavar="COMMAND")
    up = kinds.add_parser("up", help="run broker, gateway and batch runner here until Ctrl-C")
    up.add_argument("--config", default="", metavar="FILE", help="forebay.toml")
    up.add_argument(
        "--demo-cluster", action="store_true", help="on a Slurm cluster and model of its own"
    )
    kinds.add_parser("demo", help="show the whole loop, and what it measured")
    checked = kinds.add_parser("config", help="check or show the configuration")
    checked.add_argument("act", choices=("check", "show", "example"))
    checked.add_argument("--config", default="", metavar="FILE", help="forebay.toml")
    kinds.add_parser("devcluster", help="a real Slurm cluster in a folder: up, down, status")
    kinds.add_parser("completion", help="print the commands' completion for bash or zsh")
    kinds.add_parser("plan", help="size a fleet from its traffic, formulas printed")
    kinds.add_parser("simulate", help="run a scenario in virtual time, policies side by side")
    kinds.add_parser("sql", help="query the recorded tables, or export them as Parquet")
    for name in (*_SERVICES, *_INNER):
        if name in _INNER:
            text = "a part of `forebay gateway`, which starts it itself"
            service = kinds.add_parser(name, description=text)  # without help: not listed
        else:
            service = kinds.add_parser(name, help=f"run the {name} alone")
        service.add_argument("--config", default="", metavar="FILE", help="forebay.toml")
        if name == "gateway":
            service.add_argument(
                "--workers",
                type=int,
                metavar="N",
                help="processes on the same ports (default: [gateway] workers)",
            )
        service.add_argument("--ready-fd", type=int, default=-1, help=argparse.SUPPRESS)
        service.add_argument("--parent", type=int, default=0, help=argparse.SUPPRESS)
    for name in IN_LEASES:
        inside = kinds.add_parser(name, help=f"run a lease's {name} (Forebay starts it itself)")
        inside.add_argument("--spec", type=Path, required=True, metavar="FILE", help="its papers")
    command_line.exemplify(made, _EXAMPLES)
    return made


def _run(asked: argparse.Namespace) -> int:
    if asked.what in (*_SERVICES, *_INNER):
        return _service(asked)
    if asked.what in IN_LEASES:
        return _in_lease(asked)
    if asked.what == "config":
        return _config(asked)
    if asked.what == "demo":
        from forebay.demo import scenario

        return scenario.main()
    return _up(asked)


def service(name: str) -> Callable[..., Coroutine[Any, Any, None]]:
    """Return the body of a service, loaded with what it needs and nothing else."""
    module, _, function = _BODIES[name].partition(":")
    body: Callable[..., Coroutine[Any, Any, None]] = getattr(
        importlib.import_module(module), function
    )
    return body


def _service(asked: argparse.Namespace) -> int:
    if asked.parent:
        lifeline.tie(asked.parent)
    _log()
    lifeline.open_files()
    if getattr(asked, "workers", None) is not None:
        os.environ["FOREBAY_GATEWAY_WORKERS"] = str(asked.workers)  # for its processes too
    body = service(asked.what)
    here = installation.Installation.open(_load(asked.config))

    def told(news: Mapping[str, str]) -> None:
        ready.tell(asked.ready_fd, news)
        asked.ready_fd = -1  # a broker that leads a second time has nobody left to tell

    try:
        uvloop.run(body(here, told))
    except OSError as error:
        from scheduler.contracts import webserver

        if not isinstance(error, webserver.CannotListen):
            raise
        raise command_line.CommandError(str(error)) from error
    if asked.what.startswith(("gateway", "broker")):
        _gone(0)  # the interpreter would wait for calls to a registry that hangs
    return 0


def _in_lease(asked: argparse.Namespace) -> int:
    _log()
    from forebay import in_lease

    body: Callable[[Path], int] = getattr(in_lease, asked.what)
    code = body(asked.spec)
    if asked.what != "replica":
        _gone(code)
    return code


def _gone(code: int) -> None:
    """End this process now, its work being done and written down.

    To take an interpreter with gRPC down in good order lasts from 0.1 s to 1 s on a busy node, and others get
    the lease's GPUs only after its last process.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _config(asked: argparse.Namespace) -> int:
    if asked.act == "example":
        print(config_text.document(configs.TABLES), end="")
        return 0
    path = configs.find(asked.config)
    try:
        loaded = configs.load(path)
    except config.ConfigError as error:
        for fault in error.faults:
            print(fault, file=sys.stderr)
        return 1
    if asked.act == "check":
        print(f"{path or 'defaults and environment'}: {len(loaded.models)} models, no fault")
        return 0
    shown = [(f"[{name}]", table) for name, table in loaded.tables.items()]
    for head, table in [*shown, *(("[[models]]", model) for model in loaded.models)]:
        print(head)
        for field in dataclasses.fields(table):
            print(f"{field.name} = {_shown(getattr(table, field.name))}")
    return 0


def _shown(value: object) -> str:
    """Return a setting as people read it; a password in a URL stays where it is."""
    return re.sub(r"(?<=://)([^:@/]*):[^@/]*@", r"\1:***@", str(value)) or '""'


def _up(asked: argparse.Namespace) -> int:
    from forebay import tree, up
    from forebay.demo import site

    async def serve() -> int:
        if not asked.demo_cluster:
            return await stay(_found(asked.config))
        async with site.prepared(_say) as demo:
            os.environ.update(demo.env)
            return await stay(demo.config_file)

    async def stay(path: Path) -> int:
        here = installation.Installation.open(_load(str(path)))
        model = here.config.models[0].name if here.config.models else "MODEL"
        async with up.running(here, path, _say) as addresses:
            print(up.examples(addresses, here.state, path, model), flush=True)
            _say("Requests wait until a replica is warm. Ctrl-C ends everything.")
            await asyncio.Event().wait()
        return 0

    try:
        return up.interruptible(serve())
    except tree.StartError as error:
        print(f"forebay up: error: {error}", file=sys.stderr)  # with the log's end: several lines
        return 1
    except slurm.SlurmError as error:
        raise command_line.CommandError(f"Slurm can't be used: {error}") from error
    except OSError as error:
        if error.filename is None:
            raise
        what = f"{error.filename}: {error.strerror}"
        if isinstance(error, PermissionError):
            what += "; run as a user who may write there, or set [forebay] state_dir"
        raise command_line.CommandError(what) from error


def _found(given: str) -> Path:
    path = configs.find(given)
    if path is None:
        raise command_line.CommandError(
            "no forebay.toml: give --config FILE (`forebay config example` prints one)"
        )
    return path


def _load(given: str) -> config.Config:
    try:
        return configs.load(configs.find(given))
    except config.ConfigError as error:
        raise command_line.CommandError("; ".join(error.faults)) from error


def _log() -> None:
    level = os.environ.get("FOREBAY_LOG", "INFO").upper()
    if level not in logging.getLevelNamesMapping():
        raise command_line.CommandError(f"FOREBAY_LOG: {level!r} is no level: use INFO or DEBUG")
    handler = logging.StreamHandler(sys.stderr)
    match os.environ.get("FOREBAY_LOG_FORMAT", "text"):
        case "text":
            form = logging.Formatter("%(asctime)s %(levelname).1s %(name)s %(message)s")
        case "json":
            from pythonjsonlogger.json import JsonFormatter

            # What a record carries beside its text (`extra=`: request_id, model, team) is in it too.
            form = JsonFormatter(
                "{asctime}{levelname}{name}{message}",
                style="{",
                rename_fields={"asctime": "time", "levelname": "level", "name": "logger"},
                static_fields={"pid": os.getpid()},
            )
        case other:
            raise command_line.CommandError(f"FOREBAY_LOG_FORMAT: {other!r}: use text or json")
    handler.setFormatter(form)
    logging.basicConfig(level=level, handlers=[handler])
    for talker in ("httpx", "alembic"):  # a line for each poll of Slurm, and for each plugin
        logging.getLogger(talker).setLevel(max(logging.WARNING, logging.root.level))


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
