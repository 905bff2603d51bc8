"""``python -P -m engines.replica --spec FILE``: a replica where Forebay's command line is not installed.

Its usage sink is made by the function that the launch record names.
"""

import sys
from pathlib import Path

from engines.replica import child, launch


def _main(argv: list[str]) -> int:
    if len(argv) != 2 or argv[0] != "--spec":
        print("usage: python -P -m engines.replica --spec FILE", file=sys.stderr)
        return 2
    path = Path(argv[1])
    return child.run(path, lambda _: launch.Launch.read(path).open_sink())


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
