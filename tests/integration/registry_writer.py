"""A process that reads and then writes the registry in one transaction, again and again.

Arguments: URL, seconds, and `hold` to stop for ever between a write and its commit.
"""

import sys
import threading
import time

from scheduler.runtime.registry import store, tables


def main(url: str, seconds: float, hold: bool) -> None:
    """Count one row up; print how often."""
    registry = store.Registry.open(url, migrate=False)
    print("ready", flush=True)
    sys.stdin.readline()
    ends = time.monotonic() + seconds
    done = 0
    while time.monotonic() < ends:
        with registry.database.write() as session:
            row = session.get(tables.Fact, "count")
            assert row is not None
            row.body = {"n": row.body["n"] + 1}
            session.flush()
            if hold:
                print("written", flush=True)
                threading.Event().wait()
        done += 1
    print(done, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), sys.argv[3:] == ["hold"])
