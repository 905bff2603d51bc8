"""The stack in front of an engine that makes it a replica: secret, seats, roles, frames, usage rows.

Loads inside an engine's own environment: the standard library, starlette and uvicorn only.
"""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engines.replica import launch


def main(spec_path: Path, sink_factory: "launch.SinkFactory") -> int:
    """Run one replica in this process: the body of ``forebay replica --spec FILE``.

    Args:
        spec_path: the launch record.
        sink_factory: makes the usage sink from this process's writer name.

    Returns:
        The exit code: 0 after SIGTERM, 1 if it could not start or its engine failed.
    """
    from engines.replica import child

    return child.run(spec_path, sink_factory)
