"""What tests start ends with them, also where a session is killed and runs no more of its own code."""

import contextlib
import subprocess
from collections.abc import Iterator, Sequence


def tied(number: str, argv: Sequence[object]) -> list[str]:
    """Return the command line of a process that the kernel signals when whoever started it dies.

    Args:
        number: the signal's name, `TERM`.
        argv: its own command line; it keeps its pid.
    """
    return ["setpriv", f"--pdeathsig={number}", "--", *map(str, argv)]


@contextlib.contextmanager
def afterwards(argv: Sequence[object]) -> Iterator[None]:
    """Run a command when the block is left, and also where this process dies inside it.

    For services that outlive who starts them. A shell waits for the end of its input, which the kernel closes
    with this process.

    Raises:
        subprocess.CalledProcessError: the command failed.
    """
    waits = ["sh", "-c", 'cat >/dev/null; exec "$@"', "sh", *map(str, argv)]
    with subprocess.Popen(waits, stdin=subprocess.PIPE, start_new_session=True) as shell:
        yield
    if shell.returncode:
        raise subprocess.CalledProcessError(shell.returncode, list(map(str, argv)))
