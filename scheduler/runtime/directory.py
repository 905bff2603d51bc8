"""Which team a Unix user charges: Slurm's associations, read now and then in a thread."""

import asyncio
import dataclasses
import logging
from collections.abc import Mapping, Sequence

from scheduler.contracts import clock, errors, requests, slurm
from scheduler.runtime import settings

log = logging.getLogger(__name__)
KEY_ID = "munge"
EVERYBODY = "*"
ROOT = "root"


@dataclasses.dataclass(frozen=True, slots=True)
class _Person:
    team: str
    coordinator: bool = False
    admin: bool = False


class AssociationDirectory:
    """`ports.Directory` on Slurm's accounting, or on `user_teams` where the cluster keeps none.

    While Slurm does not answer, what was read last counts.
    """

    def __init__(
        self, port: slurm.SlurmPort, options: settings.Settings, time: clock.Clock
    ) -> None:
        self._port = port
        self._options = options
        self._time = time
        self._people: Mapping[str, _Person] = {}
        self._read_at = float("-inf")
        self._accounting = True
        self._lock = asyncio.Lock()

    async def caller(self, user: str) -> requests.Caller:
        """Return the caller for a Unix user.

        Raises:
            errors.Forbidden: the user has no association, or no team in `user_teams`.
            errors.Internal: Slurm has never answered yet.
        """
        await self._refresh()
        admin = user == ROOT or user in self._options.admins
        person = self._people.get(user)
        if person is None and (not self._accounting or user in self._options.user_teams):
            teams = self._options.user_teams
            team = teams.get(user, teams.get(EVERYBODY, ""))
            person = _Person(team) if team else None
        if person is None and admin:
            person = _Person(self._options.lease_team)
        if person is None:
            where = "association in Slurm" if self._accounting else "team in [scheduler] user_teams"
            raise errors.Forbidden(f"user {user} has no {where}: ask an admin for one")
        return requests.Caller(
            team=person.team,
            user=user,
            key_id=KEY_ID,
            tiers=tuple(requests.Tier),
            admin=admin or person.admin,
            coordinator=person.coordinator,
        )

    async def _refresh(self) -> None:
        async with self._lock:
            now = self._time.monotonic()
            if now - self._read_at < self._options.directory_refresh_s:
                return
            try:
                found = await asyncio.to_thread(self._port.associations)
            except slurm.AccountingOff:
                self._people, self._accounting = {}, False
            except slurm.SlurmError as error:
                log.warning("associations can't be read, the last ones count: %s", error)
                if self._read_at == float("-inf"):
                    raise errors.Internal(
                        "Slurm's accounting does not answer: try again later, or use an API key"
                    ) from error
            else:
                self._people, self._accounting = _people(found), True
            self._read_at = now


def _people(associations: Sequence[slurm.Association]) -> dict[str, _Person]:
    """Return user to team: the default account, else the only or first one by name."""
    found: dict[str, list[slurm.Association]] = {}
    for item in associations:
        if item.user:
            found.setdefault(item.user, []).append(item)
    people: dict[str, _Person] = {}
    for user, rows in found.items():
        first = min(rows, key=lambda row: (not row.default, row.account))
        people[user] = _Person(
            team=first.account,
            # A coordinator sees the whole team: only of the team that the user charges.
            coordinator=any(row.coordinator for row in rows if row.account == first.account),
            admin=any(row.admin for row in rows),
        )
    return people
