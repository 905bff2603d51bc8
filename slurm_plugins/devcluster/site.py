"""What a development cluster is: the shape asked for, the site that came of it, and where its files lie.

Knows paths and names; starts nothing.
"""

import dataclasses
import hashlib
import json
import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

PARTITIONS = ("serve", "backfill", "user")

# Slurm's longest socket name below the base is `spool/<node>/<node>_<job>.<step>.<part>`, and a Unix
# socket's path has room for 107 bytes.
_LONGEST_BASE = 60


class DevClusterError(Exception):
    """The cluster can't be brought up or down; the message is one line with what to do."""


class Options(TypedDict, total=False):
    """Keyword arguments of `devcluster.up`; defaults and meaning are those of `Shape`."""

    nodes: int
    gpus_per_node: int
    shards_per_gpu: int
    cpus_per_node: int
    gres_type: str
    name: str
    rest: bool
    accounting: bool
    fast: bool
    accounts: Mapping[str, Sequence[str]]
    service_users: Sequence[str]
    extra_conf: Mapping[str, str]
    partition_conf: Mapping[str, Mapping[str, str]]


@dataclasses.dataclass(frozen=True)
class Shape:
    """What to bring up.

    Attributes:
        nodes: how many slurmd, named n1, n2 …
        gpus_per_node: pretend GPUs of each node; 0 for none.
        shards_per_gpu: shares of each GPU that jobs may ask for instead of whole ones; 0 for none.
        cpus_per_node: CPUs that Slurm believes in, however few the machine has.
        gres_type: a GPU type as a site would spell it (`H100`), "" for untyped.
        name: the cluster's name.
        rest: whether slurmrestd runs.
        accounting: whether slurmdbd and its MariaDB run.
        fast: short intervals, so that tests need not wait; False leaves Slurm's defaults.
        accounts: Slurm accounts to create, with their users.
        service_users: Unix users that may submit leases; they may charge every account.
        extra_conf: slurm.conf keys to set or replace; an empty value removes the key.
        partition_conf: the same for a partition's line.
    """

    nodes: int = 4
    gpus_per_node: int = 4
    shards_per_gpu: int = 0
    cpus_per_node: int = 8
    gres_type: str = ""
    name: str = "forebay"
    rest: bool = True
    accounting: bool = True
    fast: bool = True
    accounts: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)
    service_users: Sequence[str] = ("root",)
    extra_conf: Mapping[str, str] = dataclasses.field(default_factory=dict)
    partition_conf: Mapping[str, Mapping[str, str]] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse what Slurm would only refuse later and less clearly."""
        if self.nodes < 1 or self.gpus_per_node < 0 or self.cpus_per_node < 1:
            raise DevClusterError("a cluster needs at least one node, one CPU and no negative GPUs")
        if not self.name.isidentifier() or not self.name.islower():
            raise DevClusterError(
                f"cluster name {self.name!r}: use lower-case letters, digits and underscores"
            )

    @property
    def node_names(self) -> tuple[str, ...]:
        """The nodes' names."""
        return tuple(f"n{index + 1}" for index in range(self.nodes))

    def to_json(self) -> str:
        """Return a stable text of the shape; equal texts mean equal shapes."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True, default=list)


@dataclasses.dataclass(frozen=True, slots=True)
class Ports:
    """TCP ports on loopback, all free when they were chosen."""

    slurmctld: int
    slurmdbd: int
    slurmrestd: int
    slurmd: tuple[int, ...]

    def all(self) -> tuple[int, ...]:
        """Return every port."""
        return (self.slurmctld, self.slurmdbd, self.slurmrestd, *self.slurmd)


@dataclasses.dataclass(frozen=True, slots=True)
class Site:
    """A running cluster, and how to reach it.

    Attributes:
        folder: the folder given to `up`.
        cluster: Slurm's ClusterName.
        slurm_conf: its slurm.conf; `env` sets it.
        munge_socket: the cluster's own munged.
        rest_url: slurmrestd's base URL, "" if none runs.
        rest_user: the user whose tokens reach slurmrestd (the first service user).
        jwt_key: HS256 key (root only) with which tokens may be made for anybody.
        logs: folder with every daemon's log.
        version: Slurm's version text.
        ports: where the daemons listen.
    """

    folder: Path
    cluster: str
    slurm_conf: Path
    munge_socket: Path
    rest_url: str
    rest_user: str
    jwt_key: Path
    logs: Path
    version: str
    ports: Ports
    nodes: tuple[str, ...]
    partitions: tuple[str, ...] = PARTITIONS
    serve: str = "serve"
    backfill: str = "backfill"
    user: str = "user"

    def env(self) -> dict[str, str]:
        """Return the variables that point Slurm's commands at this cluster."""
        return {"SLURM_CONF": str(self.slurm_conf)}


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """Where a cluster's files lie.

    ``base`` is the folder itself, or a short folder below /tmp where the folder's path is too long
    for sockets or closed to the other users that daemons run as; ``folder`` then holds links.
    """

    folder: Path
    base: Path

    @property
    def etc(self) -> Path:
        """Configuration, keys and the hooks' copies."""
        return self.base / "etc"

    @property
    def run(self) -> Path:
        """Sockets and pid files."""
        return self.base / "run"

    @property
    def log(self) -> Path:
        """Every daemon's log."""
        return self.base / "log"

    @property
    def state(self) -> Path:
        """The controller's saved state."""
        return self.base / "state"

    @property
    def spool(self) -> Path:
        """One folder for each slurmd."""
        return self.base / "spool"

    @property
    def db(self) -> Path:
        """MariaDB's data."""
        return self.base / "db"

    @property
    def dev(self) -> Path:
        """The pretend GPUs' device files."""
        return self.base / "dev"

    @property
    def slurm_conf(self) -> Path:
        """The cluster's slurm.conf."""
        return self.etc / "slurm.conf"

    @property
    def munge_socket(self) -> Path:
        """The munged's socket."""
        return self.run / "munge.socket"

    @property
    def mysql_socket(self) -> Path:
        """MariaDB's socket."""
        return self.run / "mysqld.sock"

    @property
    def jwt_key(self) -> Path:
        """Key of the JSON web tokens."""
        return self.etc / "jwt_hs256.key"

    @property
    def record(self) -> Path:
        """What `up` decided, for the next `up`, `status` and `down`."""
        return self.base / "site.json"


def layout(folder: Path) -> Layout:
    """Return where the cluster of ``folder`` keeps its files; makes nothing."""
    folder = folder.resolve()
    if len(os.fsencode(folder)) <= _LONGEST_BASE and _open_to_others(folder):
        return Layout(folder, folder)
    digest = hashlib.sha256(os.fsencode(folder)).hexdigest()[:12]
    return Layout(folder, Path("/tmp") / f"forebay-dc-{digest}")  # noqa: S108 - owner is checked when made


def _open_to_others(folder: Path) -> bool:
    """Whether every user can walk into ``folder``, judged by what of it exists."""
    for path in (folder, *folder.parents):
        try:
            mode = path.stat().st_mode
        except FileNotFoundError:
            continue
        if not mode & stat.S_IXOTH:
            return False
    return True


def save(where: Layout, site: Site, shape: Shape) -> None:
    """Record ``site`` atomically."""
    document = {"site": dataclasses.asdict(site), "shape": shape.to_json()}
    temporary = where.record.with_suffix(".tmp")
    temporary.write_text(json.dumps(document, default=str, indent=1))
    temporary.rename(where.record)


def load(where: Layout) -> tuple[Site, str] | None:
    """Return the recorded site and its shape's text, or None if there is none."""
    try:
        document = json.loads(where.record.read_text())
    except FileNotFoundError:
        return None
    fields: dict[str, Any] = document["site"]
    for name in ("folder", "slurm_conf", "munge_socket", "jwt_key", "logs"):
        fields[name] = Path(fields[name])
    for name in ("nodes", "partitions"):
        fields[name] = tuple(fields[name])
    ports = fields["ports"]
    fields["ports"] = Ports(**{**ports, "slurmd": tuple(ports["slurmd"])})
    return Site(**fields), str(document["shape"])
