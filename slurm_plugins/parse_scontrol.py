"""Reads ``scontrol show node|partition -o`` and ``scontrol show config``. Pure."""

import datetime
import re
from collections.abc import Mapping

from scheduler.contracts import slurm, times
from slurm_plugins import hostlist, states, tres

# A key stands at the start or behind a blank; values may hold blanks (Reason, OS) but no new key.
_KEY = re.compile(r"(?:^|\s)([A-Z][A-Za-z0-9/:_()-]*)=")
_CONFIG = re.compile(r"^([A-Za-z][\w()/.-]*)\s*=\s?(.*)$")
_NOTHING = frozenset({"", "(null)", "N/A", "n/a", "None"})


def records(text: str, first: str) -> list[dict[str, str]]:
    """Split ``-o`` output into one mapping a line.

    Args:
        text: the output.
        first: the key with which each record begins (`NodeName`); other lines are notices.

    Raises:
        slurm.SlurmGarbled: the output is empty, or its last line was cut.
    """
    if not text.strip():
        raise slurm.SlurmGarbled(f"scontrol: the answer is empty, expected {first}=…; try again")
    if not text.endswith("\n"):
        raise slurm.SlurmGarbled("scontrol: the answer was cut in the middle of a line; try again")
    found = []
    for line in text.splitlines():
        if not line.startswith(f"{first}="):
            continue
        marks = list(_KEY.finditer(line))
        record: dict[str, str] = {}
        for mark, after in zip(marks, [*marks[1:], None], strict=True):
            end = after.start() if after is not None else len(line)
            record.setdefault(mark[1], line[mark.end() : end].strip())
        found.append(record)
    return found


def nodes(text: str) -> tuple[slurm.Node, ...]:
    """Read ``scontrol show node -o``; "No nodes in the system" is an empty list."""
    if text.startswith("No nodes"):
        return ()
    return tuple(node(record) for record in records(text, "NodeName"))


def node(record: Mapping[str, str]) -> slurm.Node:
    """Build a node from its keys as scontrol names them."""
    reading = states.node(record.get("State", ""))
    cfg, alloc = record.get("CfgTRES", ""), record.get("AllocTRES", "")
    has = tres.node_gpus(gres_text=record.get("Gres", ""), cfg_tres=cfg)
    total = None if has is None else has.count
    free = tres.free_gpus(total, gres_used=record.get("GresUsed"), cfg_tres=cfg, alloc_tres=alloc)
    cpus = _int(record.get("CPUEfctv") or record.get("CPUTot"))
    return slurm.Node(
        name=record["NodeName"],
        state=reading.state,
        flags=reading.flags,
        usable=reading.usable,
        partitions=tuple(_clean(record.get("Partitions")).split(","))
        if _clean(record.get("Partitions"))
        else (),
        gpus=total,
        gpus_free=free if reading.usable else 0,
        gres_type="" if has is None else has.gres_type,
        cpus=cpus,
        cpus_free=max(0, cpus - _int(record.get("CPUAlloc"))) if reading.usable else 0,
        memory_mb=_int(record.get("RealMemory")),
        reason=_clean(record.get("Reason")),
        unknown_flags=reading.unknown,
        shared=tres.shared(record.get("Gres")),
        features=tuple(filter(None, _clean(record.get("AvailableFeatures")).split(","))),
    )


def partitions(text: str) -> tuple[slurm.Partition, ...]:
    """Read ``scontrol show partition -o``."""
    if text.startswith("No partitions"):
        return ()
    return tuple(partition(record) for record in records(text, "PartitionName"))


def partition(record: Mapping[str, str]) -> slurm.Partition:
    """Build a partition from its keys as scontrol names them."""
    return slurm.Partition(
        name=record["PartitionName"],
        up=record.get("State", "UP").upper() == "UP",
        nodes=tuple(hostlist.expand(_clean(record.get("Nodes")))),
        max_time_s=duration_s(record.get("MaxTime", "UNLIMITED")),
        preempt_mode=_clean(record.get("PreemptMode")),
        priority_tier=_int(record.get("PriorityTier") or "1"),
        grace_time_s=_int(record.get("GraceTime")),
    )


def config(text: str) -> dict[str, str]:
    """Read ``scontrol show config``: ``Key = value`` lines, headings left out.

    Raises:
        slurm.SlurmGarbled: there is no such line.
    """
    found = {}
    for line in text.splitlines():
        match = _CONFIG.match(line)
        if match is not None:
            found[match[1]] = match[2].strip()
    if "ClusterName" not in found:
        raise slurm.SlurmGarbled("scontrol show config: no ClusterName in the answer; try again")
    return found


def duration_s(text: str) -> int | None:
    """Read a duration as Slurm prints it, ``[D-]HH:MM:SS``; None for unlimited or not set."""
    if text.upper() in {
        "UNLIMITED",
        "INFINITE",
        "INVALID",
        "NOT_SET",
        "PARTITION_LIMIT",
        "N/A",
        "NONE",
        "",
    }:
        return None
    days, dash, clock = text.rpartition("-")
    parts = [int(part) for part in clock.split(":")] if clock.replace(":", "").isdecimal() else []
    if not 1 <= len(parts) <= 3 or (dash and not days.isdecimal()):
        raise slurm.SlurmGarbled(f"Slurm printed a duration that can't be read: {text!r}")
    if dash:
        parts = parts + [0] * (3 - len(parts))
    seconds = 0
    for part in parts:
        seconds = seconds * 60 + part
    return seconds + (int(days) * times.DAY if dash else 0)


def point_us(text: str) -> int:
    """Read a time that Slurm printed with TZ=UTC, or as seconds; 0 for unknown or not yet."""
    if text.isdecimal():
        return int(text) * 1_000_000
    try:
        moment = datetime.datetime.strptime(text, "%Y-%m-%dT%H:%M:%S")
    except ValueError:
        return 0
    return int(moment.replace(tzinfo=datetime.UTC).timestamp()) * 1_000_000


def _clean(value: str | None) -> str:
    return "" if value is None or value in _NOTHING else value


def _int(value: str | None) -> int:
    match = re.match(r"\d+", value or "")
    return int(match[0]) if match else 0
