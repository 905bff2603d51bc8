"""The cluster's configuration files as text: pure functions of shape, ports and paths."""

import dataclasses
from collections.abc import Mapping

from slurm_plugins.devcluster import site

Version = tuple[int, int]


@dataclasses.dataclass(frozen=True, slots=True)
class Host:
    """This machine.

    Attributes:
        name: its short name.
        address: where its daemons are reached, on loopback.
        loopback_only: whether they may be told to listen there and nowhere else. Slurm can only be told
            to listen at the address that its host's name has, so that name must be on loopback.
    """

    name: str
    address: str
    loopback_only: bool


_MEMORY_PER_CPU_MB = 2048

# Chosen so that a test sees Slurm act at once; a site would not poll so often.
_FAST = {
    "KillWait": "5",
    "SchedulerParameters": "bf_interval=1,sched_interval=5,batch_sched_delay=0,bf_continue",
}


def slurm_conf(
    shape: site.Shape, ports: site.Ports, where: site.Layout, *, host: Host, version: Version
) -> str:
    """Return slurm.conf.

    Args:
        shape: what the cluster shall be.
        ports: where its daemons listen.
        where: its folders.
        host: this machine: the controller and every slurmd run here.
        version: of the Slurm that will read it.
    """
    settings = {
        "ClusterName": shape.name,
        "SlurmctldHost": f"{host.name}({host.address})",
        "SlurmctldPort": str(ports.slurmctld),
        "SlurmUser": "root",
        "AuthType": "auth/munge",
        "AuthInfo": f"socket={where.munge_socket}",
        "AuthAltTypes": "auth/jwt",
        "AuthAltParameters": f"jwt_key={where.jwt_key}",
        "CommunicationParameters": "NoInAddrAny,NoCtldInAddrAny" if host.loopback_only else "",
        "StateSaveLocation": str(where.state),
        "SlurmdSpoolDir": f"{where.spool}/%n",
        "SlurmctldPidFile": f"{where.run}/slurmctld.slurm.pid",
        "SlurmdPidFile": f"{where.run}/slurmd-%n.slurm.pid",
        "SlurmctldLogFile": f"{where.log}/slurmctld.log",
        "SlurmdLogFile": f"{where.log}/slurmd-%n.log",
        "LogTimeFormat": "iso8601_ms",
        "ProctrackType": "proctrack/linuxproc",
        "TaskPlugin": "task/none",
        "MpiDefault": "none",
        "MailProg": "/usr/bin/true",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_Core_Memory",
        "DefMemPerCPU": str(_MEMORY_PER_CPU_MB // 2),
        "SlurmdParameters": "config_overrides",
        "PropagateResourceLimits": "NONE",
        "ReturnToService": "2",
        "PreemptType": "preempt/partition_prio",
        "PreemptMode": "REQUEUE",
        "JobSubmitPlugins": "lua",
        "Prolog": f"{where.etc}/prolog.sh",
        "Epilog": f"{where.etc}/epilog.sh",
        "GresTypes": "gpu,shard" if shape.shards_per_gpu else "gpu",
        **(_FAST if shape.fast else {}),
        **(_accounting(shape, ports, where, host) if shape.accounting else {}),
    }
    lines = [f"{key}={value}" for key, value in _changed(settings, shape.extra_conf).items()]
    lines += _nodes(shape, ports, host=host)
    lines += _partitions(shape)
    if version < (22, 5):
        raise site.DevClusterError(
            f"Slurm {version[0]:02}.{version[1]:02} is too old: 22.05 at least"
        )
    return "\n".join(lines) + "\n"


def _accounting(
    shape: site.Shape, ports: site.Ports, where: site.Layout, host: Host
) -> dict[str, str]:
    return {
        "AccountingStorageType": "accounting_storage/slurmdbd",
        "AccountingStorageHost": host.address,
        "AccountingStoragePort": str(ports.slurmdbd),
        "AccountingStoragePass": str(where.munge_socket),
        "AccountingStoreFlags": "job_comment",
        "AccountingStorageTRES": "gres/gpu,gres/shard" if shape.shards_per_gpu else "gres/gpu",
    }


def _changed(settings: Mapping[str, str], changes: Mapping[str, str]) -> dict[str, str]:
    """Return ``settings`` with ``changes``; an empty value takes a key away."""
    return {key: value for key, value in {**settings, **changes}.items() if value}


def _nodes(shape: site.Shape, ports: site.Ports, *, host: Host) -> list[str]:
    gres = f" Gres={_gres(shape)}" if shape.gpus_per_node else ""
    return [
        f"NodeName={name} NodeHostname={host.name} NodeAddr={host.address} Port={port} "
        f"CPUs={shape.cpus_per_node} RealMemory={shape.cpus_per_node * _MEMORY_PER_CPU_MB}"
        f"{gres} State=UNKNOWN"
        for name, port in zip(shape.node_names, ports.slurmd, strict=True)
    ]


def _gres(shape: site.Shape) -> str:
    kind = f"{shape.gres_type}:" if shape.gres_type else ""
    shards = shape.shards_per_gpu * shape.gpus_per_node
    return f"gpu:{kind}{shape.gpus_per_node}" + (f",shard:{shards}" if shards else "")


def _partitions(shape: site.Shape) -> list[str]:
    """Serve may not be preempted, user is where people's own jobs go, backfill gives way to both."""
    base: dict[str, dict[str, str]] = {
        "serve": {"PriorityTier": "100", "PreemptMode": "OFF"},
        "user": {"PriorityTier": "50", "PreemptMode": "OFF", "Default": "YES"},
        "backfill": {"PriorityTier": "1", "PreemptMode": "REQUEUE", "GraceTime": "0"},
    }
    lines = []
    for name, options in base.items():
        merged = _changed(
            {"Nodes": "ALL", "MaxTime": "INFINITE", "State": "UP", **options},
            shape.partition_conf.get(name, {}),
        )
        text = " ".join(f"{key}={value}" for key, value in merged.items())
        lines.append(f"PartitionName={name} {text}")
    return lines


def gres_conf(shape: site.Shape, where: site.Layout) -> str:
    """Return gres.conf: a device file for each pretend GPU, so that jobs get CUDA_VISIBLE_DEVICES."""
    lines = ["AutoDetect=off"]
    kind = f" Type={shape.gres_type}" if shape.gres_type else ""
    for name in shape.node_names:
        lines += [
            f"NodeName={name} Name=gpu{kind} File={where.dev}/{name}/gpu{index}"
            for index in range(shape.gpus_per_node)
        ]
        if shape.shards_per_gpu:
            # Without a File they are spread evenly over the node's GPUs.
            shards = shape.shards_per_gpu * shape.gpus_per_node
            lines.append(f"NodeName={name} Name=shard Count={shards}")
    return "\n".join(lines) + "\n"


def cgroup_conf(version: Version) -> str:
    """Return cgroup.conf, "" where Slurm can do without: later ones look for cgroups unless told."""
    return "CgroupPlugin=disabled\n" if version >= (23, 11) else ""


def slurmdbd_conf(ports: site.Ports, where: site.Layout, *, host: Host) -> str:
    """Return slurmdbd.conf; `localhost` means the socket that MYSQL_UNIX_PORT names."""
    settings = {
        "AuthType": "auth/munge",
        "AuthInfo": f"socket={where.munge_socket}",
        "AuthAltTypes": "auth/jwt",
        "AuthAltParameters": f"jwt_key={where.jwt_key}",
        **({"CommunicationParameters": "NoInAddrAny"} if host.loopback_only else {}),
        "DbdHost": host.name,
        "DbdAddr": host.address,
        "DbdPort": str(ports.slurmdbd),
        "SlurmUser": "root",
        "StorageType": "accounting_storage/mysql",
        "StorageHost": "localhost",
        "StorageUser": "root",
        "StorageLoc": "slurm_acct_db",
        "LogFile": f"{where.log}/slurmdbd.log",
        "PidFile": f"{where.run}/slurmdbd.slurm.pid",
    }
    return "".join(f"{key}={value}\n" for key, value in settings.items())


def hooks_conf(shape: site.Shape, where: site.Layout, uids: Mapping[str, int]) -> str:
    """Return forebay_hooks.conf, which `job_submit.lua` and the shell hooks read beside slurm.conf."""
    numbers = " ".join(str(uids[user]) for user in shape.service_users)
    return (
        f"cluster = {shape.name}\n"
        f"service_uids = {numbers}\n"
        "serve_partitions = serve\n"
        "backfill_partitions = backfill\n"
        f"hook_log = {where.log}/hooks.log\n"
    )


# Slurmdbd would create its database, after a connection that fails for want of it; with Debian 13's
# libmariadb every query on that connection then fails too ("maximum allowed number of columns (=0)").
MARIADB_INIT = "CREATE DATABASE IF NOT EXISTS slurm_acct_db;\n"


def mariadb_options(where: site.Layout) -> tuple[str, ...]:
    """Return mariadbd's options: own data, own socket, no network, no syncing of throw-away data."""
    return (
        "--no-defaults",
        "--user=root",
        f"--datadir={where.db}",
        f"--socket={where.mysql_socket}",
        f"--pid-file={where.run}/mariadbd.slurm.pid",
        f"--log-error={where.log}/mariadbd.log",
        f"--init-file={where.etc}/mariadb-init.sql",
        "--skip-networking",
        "--skip-log-bin",
        "--performance-schema=OFF",
        "--innodb-buffer-pool-size=64M",
        "--innodb-log-file-size=64M",
        "--innodb-flush-log-at-trx-commit=0",
        "--innodb-lock-wait-timeout=900",
        "--max-allowed-packet=16M",
    )
