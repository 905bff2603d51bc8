"""The dated report of `make test-long`: what ran, how often, for how long, and whether it held.

Reads the JUnit files that pytest wrote. Run as ``python -m tests.longreport REPORT FILE…``.
"""

import dataclasses
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Sequence
from pathlib import Path

from tests.bench import gateway_report


@dataclasses.dataclass(slots=True)
class Tally:
    """The runs of one test function with all its parameters."""

    runs: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0


def read(files: Iterable[Path]) -> tuple[dict[str, Tally], list[str]]:
    """Return what ran, by module and function, and which files a pytest that was cut off did not write."""
    found: dict[str, Tally] = {}
    lacking: list[str] = []
    for file in files:
        try:
            cases = list(ET.parse(file).iter("testcase"))
        except (OSError, ET.ParseError):
            lacking.append(file.stem)
            continue
        for case in cases:
            module = case.get("classname", "").removeprefix("tests.")
            function = case.get("name", "").partition("[")[0]
            tally = found.setdefault(f"{module}::{function}", Tally())
            tally.runs += 1
            tally.seconds += float(case.get("time", "0"))
            tally.failed += case.find("failure") is not None or case.find("error") is not None
            tally.skipped += case.find("skipped") is not None
    return found, lacking


def page(found: dict[str, Tally], facts: dict[str, str]) -> str:
    """Return the report; `facts` are the lines above its table."""
    lines = ["# The long tests", "", "`make test-long` wrote this page.", ""]
    lines += [f"- {name}: {value}" for name, value in facts.items()]
    lines += ["", "| test | runs | failed | skipped | seconds |", "| --- | --- | --- | --- | --- |"]
    lines += [
        f"| {name} | {each.runs} | {each.failed} | {each.skipped} | {each.seconds:.0f} |"
        for name, each in sorted(found.items())
    ]
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str]) -> int:
    """Write the report; returns 1 if something failed, was cut off, or did not run."""
    report, *files = map(Path, argv)
    found, lacking = read(files)
    on = gateway_report.machine()
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=True
    ).stdout.strip()
    failed = sum(each.failed for each in found.values())
    facts = {
        "date": on["date"],
        "commit": commit,
        "machine": f"{on['cpu']}, {on['cores']} cores, Linux {on['kernel']}, Python {on['python']}",
        "runs": f"{sum(each.runs for each in found.values())}, {failed} failed",
        "cut off": ", ".join(lacking) or "nothing",
    }
    report.write_text(page(found, facts), encoding="utf-8")
    return 1 if failed or lacking or not found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
