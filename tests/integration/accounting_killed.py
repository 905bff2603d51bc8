"""Processes of the books that tests kill, and what must be there whatever became of them."""

import contextlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from accounting import books, rolling, rollup, ship
from scheduler.contracts import clock
from tests.integration import accounting_victims

ROOT = Path(__file__).parents[2]


@contextlib.contextmanager
def victim(*argv: str) -> Iterator[subprocess.Popen[bytes]]:
    module, *words = (
        ("accounting_writer", *argv[1:]) if argv[0] == "write" else ("accounting_victims", *argv)
    )
    command = [sys.executable, "-m", f"tests.integration.{module}", *words]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()


def closed(state: Path) -> list[tuple[str, str, int]]:
    with books.Books(state).reading() as reading:
        assert reading.problems == ()
        rows = reading.query("SELECT request_id, outcome, output_tokens FROM usage")
    return [(row["request_id"], row["outcome"], row["output_tokens"]) for row in rows]


PAGE_BYTES = 4096
ZERO_BYTES = 16  # no row has so many in a row
TORN = re.compile(r"\S+\.seg: (\d+) bytes from offset (\d+) are torn or damaged; \d+ rows are kept")


def shipped_whole(state: Path) -> None:
    """Ship what killed writers left: nothing stays behind, and no segment is found damaged.

    A kill within a write leaves the pages that the kernel had copied by then. That half of a row, which
    nobody was told of, is named; it ends where a page does (but for zeros, as the rest of the file has).
    """
    for line in ship.ship(state, clock.SystemClock()).problems:
        torn = TORN.fullmatch(line)
        assert torn is not None, line
        count, offset = map(int, torn.groups())
        border = -(-(offset + count) // PAGE_BYTES) * PAGE_BYTES
        assert offset < border < offset + count + ZERO_BYTES, line
    assert ship.segments(state) == []


def rolled_up(state: Path) -> int:
    """Bring the rollups up to date and return how many attempts they hold, at each level the same."""
    assert rolling.roll(books.Books(state), accounting_victims.LATER).problems == ()
    with rollup.opened(rollup.path_of(state)) as session:
        counts = [
            session.execute(f"SELECT sum(attempts) FROM usage_{level}").fetchall()[0][0]
            for level in ("hours", "days")
        ]
    assert counts[0] == counts[1]
    return int(counts[0])


def steps_of(what: str, state: Path) -> int:
    """Run a pass to its end and return how many steps it has."""
    with victim(what, str(state), "-1") as process:
        assert process.stdout is not None
        return int(process.stdout.read())
