"""Where this process runs: the node's name, and the address to listen on."""

import os
import socket
from pathlib import Path


def node() -> str:
    """Return the node's name as Slurm knows it, else the host's."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def machine() -> str:
    """Return a name that two processes share if they see each other's pids.

    The host's name is not enough: a step in a container may not see its node's processes.
    """
    return f"{socket.gethostname()} {Path('/proc/self/ns/pid').readlink()}"


def listen_host(wish: str) -> str:
    """Return the address to listen on for the setting ``engines.host``.

    Raises:
        OSError: the node's name does not resolve.
    """
    if wish != "node":
        return wish
    return str(socket.getaddrinfo(node(), None, type=socket.SOCK_STREAM)[0][4][0])


def meeting(host: str) -> str:
    """Return an address of this node that nothing listens on now, as ``host:port``.

    Whoever is told it listens there within seconds; that another process takes it meanwhile is as likely as
    that the kernel gives the same port twice in a row.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as free:
        return f"{host}:{free.getsockname()[1]}"
