"""Who Forebay is to Slurm: by these names it knows its own jobs among everybody's."""

import os
import pwd


def name() -> str:
    """Return the login name of this process's effective user, or its number where there is no name."""
    uid = os.geteuid()
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def names(user: str = "") -> frozenset[str]:
    """Return how Slurm may write a user: by name, or by number where a daemon's host knows no name.

    Args:
        user: a login name; "" is this process's effective user.
    """
    if not user:
        return frozenset({name(), str(os.geteuid())})
    try:
        return frozenset({user, str(pwd.getpwnam(user).pw_uid)})
    except KeyError:  # known to Slurm's hosts alone
        return frozenset({user})
