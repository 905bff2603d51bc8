"""Processes that read and then write the registry in one transaction, again and again.

Arguments: URL, seconds, and a number of processes, or `hold` for one that stops for ever between a
write and its commit. Each process prints how often it wrote. They are forked from one that has the
libraries loaded, so that they start together.
"""

import os
import sys
import threading
import time

from scheduler.runtime.registry import database, tables


def count_up(url: str, seconds: float, *, hold: bool) -> int:
    """Count one row up until the time is over; return how often."""
    base = database.Database(url)
    ends = time.monotonic() + seconds
    done = 0
    while time.monotonic() < ends:
        with base.write() as session:
            row = session.get_one(tables.Fact, "count")
            row.body = {"n": row.body["n"] + 1}
            session.flush()
            if hold:
                print("written", flush=True)
                threading.Event().wait()
        done += 1
    return done


def main(url: str, seconds: float, how: str) -> None:
    """Count up in one process or several."""
    if how == "hold":
        count_up(url, seconds, hold=True)
        return
    children = []
    for _ in range(int(how)):
        child = os.fork()
        if child == 0:
            print(count_up(url, seconds, hold=False), flush=True)
            os._exit(0)
        children.append(child)
    codes = [os.waitpid(child, 0)[1] for child in children]
    sys.exit(max(codes) != 0)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), sys.argv[3])
