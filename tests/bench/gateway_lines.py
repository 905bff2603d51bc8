"""Where a request's and a token's time goes, line by line: py-spy's samples of the gateway's own code.

`tests.bench.gateway_inside` runs under py-spy, which looks at it from outside: unlike under cProfile no
call becomes dearer by being watched. What is counted is the line that ran when it looked, of Forebay and of
the libraries in Python; time in C counts with the line that called it.

Usage: ``python -m tests.bench.gateway_lines [--rounds 400] [--report FILE]``, where ``.ci/bench-env`` has put
py-spy.
"""

import argparse
import collections
import linecache
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from tests.bench import report_marks

RATE = 500  # looks a second
MOST = 30  # lines in a table
_FRAME = re.compile(r"^(?P<function>.*) \((?P<file>.*):(?P<line>\d+)\)$")
_HARNESS = "tests/bench/"
_TRUNK = "gateway/trunk.py"
# Where a request's work begins: its bytes, its task, its replica's answer, the end of a sync, a turn.
_BEGIN = tuple(
    f"{name}.py"
    for name in (
        *("gateway/protocol", "gateway/exchange", "gateway/hop", "gateway/turns"),
        *("accounting/datasync", "accounting/spool"),
    )
)
_CODE_CHARS = 70


class Line(NamedTuple):
    """One line of code."""

    file: str
    number: int
    function: str


Looks = Mapping[Line, int]


def looks(raw: Iterable[str]) -> tuple[Looks, Looks]:
    """Return how often each line ran, for requests and for tokens.

    Args:
        raw: py-spy's raw output: frames of a stack from the outermost, parted by semicolons, and a count.

    Returns:
        Of a step of tokens all is below the trunk that brings it. What the bench did, and the start, are
        in neither.
    """
    found: tuple[collections.Counter[Line], ...] = (collections.Counter(), collections.Counter())
    for stack, count in _stacks(raw):
        inner = stack[-1]
        if inner is None or _HARNESS in inner.file:
            continue
        files = [frame.file for frame in stack if frame is not None]
        of_token = any(file.endswith(_TRUNK) for file in files)
        if of_token or any(file.endswith(_BEGIN) for file in files):
            found[of_token][inner] += count
    return found[False], found[True]


def _stacks(raw: Iterable[str]) -> Iterator[tuple[list[Line | None], int]]:
    for entry in raw:
        frames, _, count = entry.strip().rpartition(" ")
        if frames and count.isdigit():
            yield [_line(frame) for frame in frames.split(";")], int(count)


def _line(frame: str) -> Line | None:
    known = _FRAME.match(frame)
    return Line(known["file"], int(known["line"]), known["function"]) if known else None


def table(what: str, found: Looks) -> str:
    """Return one Markdown table, with a line before it."""
    whole = sum(found.values()) or 1
    dearest = collections.Counter(found).most_common(MOST)
    shown = sum(count for _, count in dearest)
    rows = [
        f"| {count / whole:.1%} | {line.file}:{line.number} | {line.function} | {_code(line)} |"
        for line, count in dearest
    ]
    return "\n".join(
        [
            f"{what}: {whole} looks found {len(found)} lines at work; these are {shown / whole:.0%} of it.",
            "",
            "| share | line | in | code |",
            "| --- | --- | --- | --- |",
            *rows,
        ]
    )


def _code(line: Line) -> str:
    places = [Path(line.file), *(Path(folder) / line.file for folder in sys.path)]
    file = next((each for each in places if each.is_file()), None)
    text = linecache.getline(str(file), line.number).strip() if file else ""
    text = text if len(text) <= _CODE_CHARS else text[: _CODE_CHARS - 1] + "…"
    return f"`{text.replace('|', chr(92) + '|')}`" if text else ""


def record(spy: Path, rounds: int, folder: Path) -> list[str]:
    """Return py-spy's raw output of a run.

    Raises:
        subprocess.CalledProcessError: it could not look, or the run failed.
    """
    out = folder / "looks.txt"
    watched = [sys.executable, "-m", "tests.bench.gateway_inside", "--rounds", str(rounds)]
    order = [str(spy), "record", "--gil", "-r", str(RATE), "-f", "raw", "-o", str(out), "--"]
    subprocess.run([*order, *watched], check=True, stdout=subprocess.DEVNULL)
    return out.read_text(encoding="utf-8").splitlines()


def main() -> int:
    """Run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--spy", type=Path, default=Path("build/bench-env/bin/py-spy"))
    parser.add_argument("--report", type=Path, help="write the tables into this file")
    asked = parser.parse_args()
    if not asked.spy.exists():
        print(f"{asked.spy}: no py-spy: run .ci/bench-env", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="forebay-lines-") as name:
        of_request, of_token = looks(record(asked.spy, asked.rounds, Path(name)))
    tables = f"{table('A request', of_request)}\n\n{table('A token', of_token)}"
    if asked.report:
        report_marks.put(asked.report, "lines", tables)
    else:
        print(tables)
    return 0


if __name__ == "__main__":
    sys.exit(main())
