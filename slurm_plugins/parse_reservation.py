"""Reads ``scontrol show reservation -o`` and slurmrestd's list of reservations. Pure."""

from collections.abc import Mapping
from typing import Any

from scheduler.contracts import slurm
from slurm_plugins import hostlist, parse_scontrol, parse_squeue

_NOTHING = frozenset({"", "(null)", "N/A", "n/a", "None"})


def text(said: str) -> tuple[slurm.Reservation, ...]:
    """Read ``scontrol show reservation -o``, printed with TZ=UTC.

    Raises:
        slurm.SlurmGarbled: it is empty, cut, or a time in it can't be read.
    """
    if said.startswith("No reservations"):
        return ()
    return tuple(_record(record) for record in parse_scontrol.records(said, "ReservationName"))


def _record(record: Mapping[str, str]) -> slurm.Reservation:
    name = record["ReservationName"]
    return _checked(
        slurm.Reservation(
            name=name,
            starts_us=parse_scontrol.point_us(record.get("StartTime", "")),
            ends_us=parse_scontrol.point_us(record.get("EndTime", "")),
            nodes=_nodes(record.get("Nodes", "")),
            flags=frozenset(word.upper() for word in _words(record.get("Flags", ""))),
            users=_words(record.get("Users", "")),
            accounts=_words(record.get("Accounts", "")),
        )
    )


def answer(value: Mapping[str, Any]) -> tuple[slurm.Reservation, ...]:
    """Read the answer of ``/slurm/v…/reservations`` in any data-parser version."""
    return tuple(_entry(raw) for raw in value["reservations"])


def _entry(raw: Mapping[str, Any]) -> slurm.Reservation:
    flags = raw.get("flags") or []
    return _checked(
        slurm.Reservation(
            name=str(raw["name"]),
            starts_us=(parse_squeue.number(raw.get("start_time")) or 0) * 1_000_000,
            ends_us=(parse_squeue.number(raw.get("end_time")) or 0) * 1_000_000,
            nodes=_nodes(str(raw.get("node_list") or "")),
            flags=frozenset(
                str(word).upper() for word in (_words(flags) if isinstance(flags, str) else flags)
            ),
            users=_words(str(raw.get("users") or "")),
            accounts=_words(str(raw.get("accounts") or "")),
        )
    )


def _checked(found: slurm.Reservation) -> slurm.Reservation:
    # Without an end it would never close a node, and a lease would run into it.
    if not found.ends_us:
        raise slurm.SlurmGarbled(f"reservation {found.name}: Slurm tells no end that can be read")
    return found


def _words(said: str) -> tuple[str, ...]:
    return () if said in _NOTHING else tuple(word for word in said.split(",") if word)


def _nodes(said: str) -> tuple[str, ...]:
    if said in _NOTHING:
        return ()
    try:
        return tuple(hostlist.expand(said))
    except hostlist.HostlistError as error:
        raise slurm.SlurmGarbled(
            f"Slurm printed a host list that can't be read: {error}"
        ) from error
