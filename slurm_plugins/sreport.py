"""What Slurm's reports say: GPU time by account (sreport), and which account a job was charged to (sacct).

sreport reads sums that slurmdbd makes once an hour, so it can speak of whole past hours only.
"""

import datetime
import re
from collections.abc import Iterable, Mapping

from scheduler.contracts import ids, slurm
from slurm_plugins import cli

_HOUR_US = 3_600_000_000
_IDS_AT_ONCE = 500
_FIELDS = ("Account", "Login", "TRESName", "Used")


class AccountBooks(cli.CliClient):
    """Implements `slurm.AccountBooks` over sreport and sacct."""

    def accounts(self, job_ids: Iterable[ids.SlurmJobId]) -> Mapping[ids.SlurmJobId, str]:
        """Ask sacct for the account of each job; what it does not know is left out."""
        wanted = sorted(job_id for job_id in set(job_ids) if re.fullmatch(r"[0-9]+", job_id))
        found: dict[ids.SlurmJobId, str] = {}
        for first in range(0, len(wanted), _IDS_AT_ONCE):
            named = ",".join(wanted[first : first + _IDS_AT_ONCE])
            argv = ["sacct", "--allocations", "--noheader", "--parsable2", f"--jobs={named}"]
            answer = self._call([*argv, "--format=JobIDRaw,Account"])
            for line in answer.splitlines():
                job_id, bar, account = line.partition("|")
                if bar and account:
                    found[ids.SlurmJobId(job_id)] = account
        return found

    def gpu_seconds(self, start_us: int, end_us: int) -> Mapping[str, int]:
        """Ask sreport for each account's GPU-seconds between two whole UTC hours."""
        if start_us % _HOUR_US or end_us % _HOUR_US or start_us >= end_us:
            raise ValueError("sreport knows whole hours only")
        argv = [
            "sreport", "--noheader", "--parsable2", "-t", "Seconds", "--tres=gres/gpu",
            "cluster", "AccountUtilizationByUser", f"clusters={self.cluster}",
            f"start={_point(start_us)}", f"end={_point(end_us)}", f"format={','.join(_FIELDS)}",
        ]  # fmt: skip
        return by_account(self._call(argv))


def by_account(text: str) -> dict[str, int]:
    """Sum the users' rows of each account; an account's own row holds those of its children as well.

    Raises:
        slurm.SlurmGarbled: a row was cut.
    """
    found: dict[str, int] = {}
    for line in filter(None, text.splitlines()):
        cells = line.split("|")
        if len(cells) != len(_FIELDS) or not cells[3].isdigit():
            raise slurm.SlurmGarbled(f"sreport: can't read {line!r}")
        account, login, tres, used = cells
        if login and tres in {"gres/gpu", ""}:
            found[account] = found.get(account, 0) + int(used)
    return found


def _point(us: int) -> str:
    """Return a UTC time as sreport reads it (it runs with TZ=UTC)."""
    at = datetime.datetime.fromtimestamp(us // 1_000_000, datetime.UTC)
    return f"{at:%Y-%m-%dT%H:%M:%S}"
