"""``python -P -m engines.slot --spec FILE``: a slot, where Forebay's command line is not installed."""

import sys
from pathlib import Path

from engines import slot

if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] != "--spec":
        sys.exit("usage: python -P -m engines.slot --spec FILE")
    sys.exit(slot.main(Path(sys.argv[2])))
