"""Starts the cluster's daemons, each after those that it needs, and waits until they serve."""

import contextlib
import os
import pwd
import shutil
import socket
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

from slurm_plugins.devcluster import accounts, processes, render, site

_NEEDED = ("munged", "slurmctld", "slurmd", "sinfo", "scontrol")
_NEEDED_FOR = {
    "rest": ("slurmrestd", "setpriv"),
    "accounting": ("slurmdbd", "sacctmgr", "mariadbd", "mariadb-install-db"),
}
_SEARCH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_READY_S = 60.0  # a daemon takes a second; the machine may be busy with engines
_LISTEN = "0A"  # the kernel's TCP_LISTEN, as /proc/net/tcp prints it


def missing(shape: site.Shape | None = None) -> tuple[str, ...]:
    """Return the programs that ``shape`` needs and this machine lacks."""
    shape = shape or site.Shape()
    names = [*_NEEDED]
    names += _NEEDED_FOR["rest"] if shape.rest else ()
    names += _NEEDED_FOR["accounting"] if shape.accounting else ()
    return tuple(name for name in names if shutil.which(name, path=_SEARCH) is None)


def program(name: str) -> str:
    """Return a program's path, looked for where daemons are too, whatever our own PATH is."""
    path = shutil.which(name, path=_SEARCH)
    if path is None:
        raise site.DevClusterError(
            f"{name} is not installed; run .ci/debian-packages --demo as root"
        )
    return path


def start(where: site.Layout, shape: site.Shape, result: site.Site) -> None:
    """Start what does not live, each daemon after those that it needs."""
    if shape.accounting:  # the slowest first, so that munged starts beside it
        _start_mariadb(where)
    _start_one(
        where,
        "munged",
        [
            program("munged"),
            "--foreground",
            f"--socket={where.munge_socket}",
            f"--key-file={where.etc}/munge.key",
            f"--pid-file={where.run}/munged.slurm.pid",
            f"--seed-file={where.run}/munged.seed",
            f"--log-file={where.log}/munged.log",
        ],
        ready=where.munge_socket.is_socket,
    )
    if shape.accounting:
        _await(where, "mariadbd", lambda: _connects(where.mysql_socket))
        _start_one(
            where,
            "slurmdbd",
            [program("slurmdbd"), "-D"],
            extra={"MYSQL_UNIX_PORT": str(where.mysql_socket)},
            ready=lambda: _listening(result.ports.slurmdbd),
        )
        accounts.create(result, shape.accounts, shape.service_users)
    _start_one(
        where,
        "slurmctld",
        [program("slurmctld"), "-D", "-f", str(where.slurm_conf)],
        ready=lambda: _listening(result.ports.slurmctld),
    )
    for node in shape.node_names:
        argv = [program("slurmd"), "-D", "-N", node, "-f", str(where.slurm_conf)]
        _start_one(where, f"slurmd-{node}", argv)
    if shape.rest:
        _start_one(where, "slurmrestd", _rest_argv(result), extra=_REST_ENVIRONMENT)
    _await_nodes(where, result)
    if shape.rest:
        _await(where, "slurmrestd", lambda: _listening(result.ports.slurmrestd))


# slurmrestd leaves namespaces alone: in a container without that right it would not start.
_REST_ENVIRONMENT = {
    "SLURM_JWT": "daemon",
    "SLURMRESTD_SECURITY": "disable_unshare_sysv,disable_unshare_files",
}


def _rest_argv(result: site.Site) -> list[str]:
    """Make its argv: slurmrestd refuses to run as root or as SlurmUser."""
    nobody = pwd.getpwnam("nobody")
    return [
        program("setpriv"),
        f"--reuid={nobody.pw_uid}",
        f"--regid={nobody.pw_gid}",
        "--clear-groups",
        "--",
        program("slurmrestd"),
        "-f",
        str(result.slurm_conf),
        "-a",
        "rest_auth/jwt",
        *(() if result.ports.slurmdbd else ("-s", _rest_without_accounting(result.version))),
        f"127.0.0.1:{result.ports.slurmrestd}",
    ]


def _rest_without_accounting(version: str) -> str:
    """Name slurmrestd's plugin for the controller alone: the one for slurmdbd is fatal without it."""
    major, minor = map(int, version.split(".")[:2])
    return "openapi/slurmctld" if (major, minor) >= (23, 11) else "openapi/v0.0.38"


def _start_mariadb(where: site.Layout) -> None:
    if processes.living(where, "mariadbd"):
        return
    if not where.db.exists():
        fresh = where.base / "db.new"  # renamed when whole: a cut installation is done again
        shutil.rmtree(fresh, ignore_errors=True)
        argv = [
            program("mariadb-install-db"),
            "--no-defaults",
            "--user=root",
            f"--datadir={fresh}",
            "--auth-root-authentication-method=socket",
            "--skip-test-db",
            "--skip-name-resolve",
        ]
        run = subprocess.run(
            argv,
            env=processes.environment(where, {}),
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        (where.log / "mariadb-install.log").write_text(run.stdout + run.stderr)
        if run.returncode:
            raise site.DevClusterError(
                f"mariadb-install-db failed: see {where.log}/mariadb-install.log"
            )
        fresh.rename(where.db)
    argv = [program("mariadbd"), *render.mariadb_options(where)]
    _start_one(where, "mariadbd", argv)


def _start_one(
    where: site.Layout,
    name: str,
    argv: list[str],
    *,
    extra: Mapping[str, str] | None = None,
    ready: Callable[[], bool] | None = None,
) -> None:
    if not processes.living(where, name):
        processes.spawn(where, name, argv, extra or {})
    if ready is not None:
        _await(where, name, ready)


def _await(where: site.Layout, name: str, ready: Callable[[], bool]) -> None:
    """Wait until a daemon serves; say so at once if it died instead."""
    done = processes.wait_until(lambda: processes.living(where, name) is None or ready(), _READY_S)
    if not done or processes.living(where, name) is None:
        raise site.DevClusterError(
            f"{name} did not come up: {_last_words(where, name)} (see {where.log}/{name}.log)"
        )


def _last_words(where: site.Layout, name: str) -> str:
    for path in (where.log / f"{name}.log", where.log / f"{name}.out"):
        with contextlib.suppress(FileNotFoundError):
            lines = path.read_text(errors="replace").strip().splitlines()
            wrong = [line for line in lines if "error" in line.lower() or "fatal" in line.lower()]
            if lines:
                return (wrong or lines)[-1]
    return "it said nothing"


def _connects(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0


def node_states(result: site.Site) -> dict[str, str]:
    """Return each node's state in Slurm's words; empty if the controller does not answer."""
    run = subprocess.run(
        [program("sinfo"), "-h", "-N", "-o", "%N %T"],
        env={**os.environ, **result.env()},
        capture_output=True,
        text=True,
        check=False,
        timeout=20,
    )
    pairs = (line.split() for line in run.stdout.splitlines())
    return {pair[0]: pair[1] for pair in pairs if len(pair) == 2}


_USABLE = ("idle", "mixed", "allocated", "completing", "planned")


def _await_nodes(where: site.Layout, result: site.Site) -> None:
    """Wait for every node; one that an earlier run left drained or down is resumed."""
    resumed: set[str] = set()

    def usable() -> bool:
        states = node_states(result)
        for node, state in states.items():
            if (
                state.startswith(("drain", "down"))
                and not state.endswith("*")
                and node not in resumed
            ):
                resumed.add(node)
                subprocess.run(
                    [program("scontrol"), "update", f"nodename={node}", "state=resume"],
                    env={**os.environ, **result.env()},
                    capture_output=True,
                    check=False,
                    timeout=20,
                )
        return bool(states) and all(state in _USABLE for state in states.values())

    if not processes.wait_until(usable, _READY_S, every_s=0.1):
        states = ", ".join(f"{node} {state}" for node, state in node_states(result).items())
        raise site.DevClusterError(f"nodes did not come up: {states or 'none'} (see {where.log})")


def _listening(port: int) -> bool:
    """Whether somebody listens on a port; looked up, since a daemon would log a bare connection."""
    wanted = f"{port:04X}"
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(FileNotFoundError):
            for line in Path(table).read_text().splitlines()[1:]:
                _, local, _, state = line.split()[:4]
                if state == _LISTEN and local.endswith(f":{wanted}"):
                    return True
    return False
