"""Brings the cluster up and down; everything is looked at first, and only what is missing is started."""

import contextlib
import dataclasses
import fcntl
import os
import pwd
import random
import re
import secrets
import shutil
import socket
import subprocess
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Unpack

from slurm_plugins.devcluster import daemons, processes, render, site

HOOKS = ("job_submit.lua", "leftovers.sh", "prolog.sh", "epilog.sh")


@dataclasses.dataclass(frozen=True, slots=True)
class Daemon:
    """One daemon, as `status` tells of it; `pid` is None where it does not live."""

    name: str
    pid: int | None
    log: Path


@dataclasses.dataclass(frozen=True, slots=True)
class Status:
    """What of a cluster lives.

    Attributes:
        site: as recorded by the last `up`; None if there was none.
        daemons: those that should live, in the order in which they are started.
        nodes: each node's state in Slurm's words; empty without a controller.
    """

    site: site.Site | None
    daemons: tuple[Daemon, ...]
    nodes: Mapping[str, str]

    @property
    def up(self) -> bool:
        """Whether every daemon lives."""
        return bool(self.daemons) and all(daemon.pid for daemon in self.daemons)


def up(folder: Path, **options: Unpack[site.Options]) -> site.Site:
    """Bring a cluster up, or mend the one that is there, and wait until its nodes are usable.

    Args:
        folder: where all of its files go; made if it is missing.
        **options: see `site.Shape`. Another shape than the living cluster's restarts its daemons.

    Raises:
        site.DevClusterError: not root, a program is missing, or a daemon does not come up.
    """
    shape = site.Shape(**options)
    if os.geteuid() != 0:
        raise site.DevClusterError("a Slurm cluster needs root here; without it use SLURM=embedded")
    if lacking := daemons.missing(shape):
        raise site.DevClusterError(
            f"not installed: {', '.join(lacking)}; run .ci/debian-packages --demo as root"
        )
    where = site.layout(folder)
    _make_folders(where)
    with _locked(where):
        known = site.load(where)
        if known is not None and known[1] != shape.to_json():
            _stop_all(where)
        living = [name for name in _names(shape) if processes.living(where, name)]
        ports = known[0].ports if known and living else _choose_ports(shape, known)
        result = _describe(where, shape, ports)
        if not living:
            processes.sweep(where)
        _write_files(where, shape, result)
        site.save(where, result, shape)
        daemons.start(where, shape, result)
    return result


def down(folder: Path, *, purge: bool = False) -> None:
    """End everything of the cluster, its jobs too; no error if nothing lives.

    Args:
        folder: as given to `up`.
        purge: also remove the cluster's files, but for the logs.
    """
    where = site.layout(folder)
    if not where.base.exists():
        return
    with _locked(where):
        if purge:  # nothing is kept, so nothing need be written down before the end
            processes.sweep(where)
            _remove_files(where)
        else:
            _stop_all(where)


def status(folder: Path) -> Status:
    """Look at the cluster of ``folder`` and change nothing."""
    where = site.layout(folder)
    known = site.load(where)
    if known is None:
        return Status(None, (), {})
    names = _recorded_names(known[0])
    found = tuple(
        Daemon(name, processes.living(where, name), where.log / f"{name}.log") for name in names
    )
    alive = any(daemon.pid for daemon in found if daemon.name == "slurmctld")
    return Status(known[0], found, daemons.node_states(known[0]) if alive else {})


def _names(shape: site.Shape) -> list[str]:
    """Daemons in the order in which they start."""
    names = ["munged"]
    names += ["mariadbd", "slurmdbd"] if shape.accounting else []
    names += ["slurmctld", *(f"slurmd-{node}" for node in shape.node_names)]
    names += ["slurmrestd"] if shape.rest else []
    return names


def _recorded_names(known: site.Site) -> list[str]:
    shape = site.Shape(
        nodes=len(known.nodes), rest=bool(known.rest_url), accounting=bool(known.ports.slurmdbd)
    )
    return _names(shape)


def _make_folders(where: site.Layout) -> None:
    """Make the folders; one below /tmp must be ours alone, since root's daemons will trust it."""
    where.folder.mkdir(parents=True, exist_ok=True)
    where.base.mkdir(mode=0o755, exist_ok=True)
    info = where.base.lstat()
    if where.base.is_symlink() or info.st_uid != os.geteuid():
        raise site.DevClusterError(f"{where.base} belongs to somebody else: remove it")
    for path in (where.etc, where.run, where.log, where.state, where.spool, where.dev):
        path.mkdir(mode=0o755, exist_ok=True)
        path.chmod(0o755)
    if where.base != where.folder:
        link = where.folder / "cluster"
        if not link.is_symlink():
            link.symlink_to(where.base)


@contextlib.contextmanager
def _locked(where: site.Layout) -> Iterator[None]:
    """Let one `up` or `down` at a time touch the cluster."""
    with (where.base / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _choose_ports(shape: site.Shape, known: tuple[site.Site, str] | None) -> site.Ports:
    """Keep the recorded ports if they still fit and are free, else choose new ones."""
    if (
        known
        and known[1] == shape.to_json()
        and all(map(_free, filter(None, known[0].ports.all())))
    ):
        return known[0].ports
    # Below the range that outgoing connections take, so that a daemon can come back to its port.
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    candidates = random.sample(range(10_000, max(low, 20_000)), 2_000)
    found = (port for port in candidates if _free(port))
    return site.Ports(
        slurmctld=next(found),
        slurmdbd=next(found) if shape.accounting else 0,
        slurmrestd=next(found) if shape.rest else 0,
        slurmd=tuple(next(found) for _ in shape.node_names),
    )


def _free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))  # on every address: more may be taken than loopback's
        except OSError:
            return False
    return True


def _describe(where: site.Layout, shape: site.Shape, ports: site.Ports) -> site.Site:
    return site.Site(
        folder=where.folder,
        cluster=shape.name,
        slurm_conf=where.slurm_conf,
        munge_socket=where.munge_socket,
        rest_url=f"http://127.0.0.1:{ports.slurmrestd}" if shape.rest else "",
        rest_user=shape.service_users[0],
        jwt_key=where.jwt_key,
        logs=where.log,
        version=_version(),
        ports=ports,
        nodes=shape.node_names,
    )


def _version() -> str:
    """Return Slurm's version, `22.05.8`."""
    run = subprocess.run(
        [daemons.program("slurmctld"), "-V"], capture_output=True, text=True, check=True, timeout=20
    )
    found = re.search(r"\d+\.\d+\.\d+", run.stdout)
    if found is None:
        raise site.DevClusterError(f"slurmctld -V says {run.stdout.strip()!r}: no version in it")
    return found.group()


def _host() -> render.Host:
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        address = ""
    short = name.partition(".")[0]
    if address.startswith("127."):
        return render.Host(short, address, loopback_only=True)
    return render.Host(short, "127.0.0.1", loopback_only=False)


def _write_files(where: site.Layout, shape: site.Shape, result: site.Site) -> None:
    major, minor = map(int, result.version.split(".")[:2])
    ports, version, host = result.ports, (major, minor), _host()
    _put(where.slurm_conf, render.slurm_conf(shape, ports, where, host=host, version=version))
    _put(where.etc / "gres.conf", render.gres_conf(shape, where))
    if text := render.cgroup_conf(version):
        _put(where.etc / "cgroup.conf", text)
    if shape.accounting:
        _put(where.etc / "mariadb-init.sql", render.MARIADB_INIT)
        _put(where.etc / "slurmdbd.conf", render.slurmdbd_conf(ports, where, host=host), 0o600)
    _put(where.etc / "forebay_hooks.conf", render.hooks_conf(shape, where, _uids(shape)))
    hooks = resources.files("slurm_plugins.hooks")
    for name in HOOKS:
        _put(where.etc / name, hooks.joinpath(name).read_text(), 0o755)
    for path, size in ((where.etc / "munge.key", 128), (where.jwt_key, 32)):
        if not path.exists():
            path.touch(0o600)
            path.write_bytes(secrets.token_bytes(size))
    for node in shape.node_names:
        folder = where.dev / node
        folder.mkdir(exist_ok=True)
        (where.spool / node).mkdir(exist_ok=True)
        for index in range(shape.gpus_per_node):
            device = folder / f"gpu{index}"
            if not device.is_symlink():
                device.symlink_to("/dev/null")


def _put(path: Path, text: str, mode: int = 0o644) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.touch(mode)
    temporary.chmod(mode)
    temporary.write_text(text)
    temporary.rename(path)


def _uids(shape: site.Shape) -> dict[str, int]:
    try:
        return {user: pwd.getpwnam(user).pw_uid for user in shape.service_users}
    except KeyError as error:
        raise site.DevClusterError(
            f"service user: {error.args[0]}; create it or name another"
        ) from None


def _stop_all(where: site.Layout) -> None:
    """Controller before nodes, so that it sees none of them fail; then whatever is left."""
    known = site.load(where)
    if known is not None:
        names = _recorded_names(known[0])
        order = ["slurmrestd", "slurmctld"]
        order += [name for name in names if name.startswith("slurmd-")]
        order += ["slurmdbd", "mariadbd", "munged"]
        processes.stop(where, [name for name in order if name in names])
    processes.sweep(where)


def _remove_files(where: site.Layout) -> None:
    for path in (where.etc, where.run, where.state, where.spool, where.db, where.dev):
        shutil.rmtree(path, ignore_errors=True)
    where.record.unlink(missing_ok=True)
    if where.base != where.folder:
        shutil.rmtree(where.folder / "log", ignore_errors=True)
        shutil.copytree(where.log, where.folder / "log")
        shutil.rmtree(where.base)
        (where.folder / "cluster").unlink(missing_ok=True)
