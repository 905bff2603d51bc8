"""What the doctor knows of a site, and what it says about it: plain data and the reading of its text."""

import dataclasses
import enum
import re
from collections.abc import Mapping

from scheduler.contracts import slurm


class Severity(enum.IntEnum):
    """How bad it is; a higher one is worse."""

    NOTE = 1
    SLOW = 2
    ERROR = 3


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """One thing to change.

    Attributes:
        severity: ERROR: leases fail or are never given back; SLOW: reclaiming takes longer, or less is
            known than could be; NOTE: worth a look.
        what: what was found, with its value.
        why: what it does to Forebay.
        where: the file to change, or `shell` for a command to run.
        line: the exact line.
    """

    severity: Severity
    what: str
    why: str
    where: str
    line: str


@dataclasses.dataclass(frozen=True, slots=True)
class Survey:
    """What was read of a site; None where it could not be found out.

    Attributes:
        config: `scontrol show config`.
        serve, backfill: the partitions that Forebay's leases go to.
        clock_skew_s: the controller's clock minus this machine's.
        munge: what is wrong with munge; "" if it works.
        jobs: how many jobs the controller knows.
    """

    config: Mapping[str, str]
    partitions: tuple[slurm.Partition, ...]
    nodes: tuple[slurm.Node, ...]
    serve: tuple[str, ...] = ("serve",)
    backfill: tuple[str, ...] = ("backfill",)
    clock_skew_s: float | None = None
    munge: str | None = None
    jobs: int | None = None

    def text(self, key: str) -> str:
        """Return a setting; "" where Slurm prints that it is not set."""
        value = self.config.get(key, "").strip()
        return "" if value in {"(null)", "None", "none", "N/A"} else value

    def words(self, key: str) -> frozenset[str]:
        """Return a comma list, in lower case."""
        return frozenset(word.strip().lower() for word in self.text(key).split(",") if word.strip())

    def seconds(self, key: str) -> float | None:
        """Return a time (`30 sec`, `00:01:00`); None if it is not set or not a number."""
        value = self.text(key)
        clock = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d+):(\d+)", value)
        if clock is not None:
            days, hours, minutes, seconds = (int(part or 0) for part in clock.groups())
            return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
        plain = re.match(r"(\d+(?:\.\d+)?)", value)
        return float(plain.group(1)) if plain else None

    def option(self, key: str, name: str) -> str | None:
        """Return ``name``'s value in a list such as SchedulerParameters; "" if it has none."""
        for word in self.text(key).split(","):
            option, _, value = word.strip().partition("=")
            if option.lower() == name:
                return value
        return None

    def leases(self, names: tuple[str, ...]) -> tuple[slurm.Partition, ...]:
        """Return those of the named partitions that exist."""
        return tuple(partition for partition in self.partitions if partition.name in names)
