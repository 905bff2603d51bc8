"""Unix users to teams."""

import pytest

from scheduler.contracts import clock, errors, requests, slurm
from scheduler.runtime import directory, settings
from tests import fakeslurm


def make(
    time: clock.FakeClock, *people: slurm.Association, options: settings.Settings | None = None
) -> tuple[fakeslurm.FakeSlurm, directory.AssociationDirectory]:
    port = fakeslurm.FakeSlurm(time)
    port.people = people or None
    return port, directory.AssociationDirectory(port, options or settings.Settings(), time)


async def test_the_default_account_is_the_team(fake_clock: clock.FakeClock) -> None:
    _, people = make(
        fake_clock,
        slurm.Association("", "physics"),
        slurm.Association("ada", "biology", coordinator=True),
        slurm.Association("ada", "physics", default=True),
        slurm.Association("bob", "biology", coordinator=True),
    )
    ada = await people.caller("ada")
    assert ada == requests.Caller("physics", "ada", "munge", tuple(requests.Tier))
    assert (await people.caller("bob")).coordinator
    with pytest.raises(errors.Forbidden, match="user eve has no association in Slurm"):
        await people.caller("eve")


async def test_root_and_named_admins_are_admins(fake_clock: clock.FakeClock) -> None:
    options = settings.Settings(admins=("ops",))
    _, people = make(fake_clock, slurm.Association("ada", "p", admin=True), options=options)
    for user, team in (("root", "forebay"), ("ops", "forebay"), ("ada", "p")):
        caller = await people.caller(user)
        assert (caller.team, caller.admin) == (team, True)


async def test_without_accounting_the_configured_map_counts(fake_clock: clock.FakeClock) -> None:
    options = settings.Settings(user_teams={"ada": "physics", "*": "guests"})
    _, people = make(fake_clock, options=options)
    assert (await people.caller("ada")).team == "physics"
    assert (await people.caller("eve")).team == "guests"
    _, nobody = make(fake_clock)
    with pytest.raises(errors.Forbidden, match=r"no team in \[scheduler\] user_teams"):
        await nobody.caller("ada")


async def test_what_was_read_counts_while_slurm_is_down(fake_clock: clock.FakeClock) -> None:
    port, people = make(fake_clock, slurm.Association("ada", "physics"))
    port.down = True
    with pytest.raises(errors.Internal, match="accounting does not answer"):
        await people.caller("ada")
    port.down = False
    assert (await people.caller("ada")).team == "physics"
    port.down = True
    await fake_clock.advance(61)
    assert (await people.caller("ada")).team == "physics"
    port.down = False
    port.people = (slurm.Association("ada", "chemistry"),)
    assert (await people.caller("ada")).team == "physics"  # read again after a while
    await fake_clock.advance(61)
    assert (await people.caller("ada")).team == "chemistry"
