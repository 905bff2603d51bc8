"""What the batch bench has measured, on disk as soon as it is known: no part that fails costs another one."""

import json
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.bench import gateway_report

_ROOT = Path(__file__).resolve().parents[2]
PLACE = _ROOT / "build" / "bench" / "batch.json"


class Kept:
    """The parts of a bench, those of earlier runs among them; each knows when it was measured and of what.

    Args:
        place: where they are kept.
        told: called with all of them after each, to write a report.
    """

    def __init__(self, place: Path, told: Callable[[Mapping[str, Any]], None]) -> None:
        self._place = place
        self._told = told
        self.failed: list[str] = []
        self.parts: dict[str, Any] = {}
        if place.exists():
            self.parts = json.loads(place.read_text())

    def keep(self, part: str, figures: Mapping[str, Any], at: Mapping[str, str]) -> None:
        """Keep what is known of a part so far.

        Args:
            part: its name.
            figures: all of them; what was kept of it before is forgotten.
            at: the machine before the part began, see `machine`.
        """
        self.parts[part] = {"at": dict(at), "figures": dict(figures)}
        self._place.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self._place.with_suffix(".part")
        unfinished.write_text(json.dumps(self.parts))
        unfinished.replace(self._place)
        self.attempt("report", lambda: self._told(self.parts))

    def attempt(self, part: str, measure: Callable[[], Any]) -> Any:
        """Return what a part comes to; None: it failed, which is said, and the others go on."""
        try:
            return measure()
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # what the tests' services fail by is no Exception
            self.failed += [part] if part not in self.failed else []
            print(f"{part} failed:\n{traceback.format_exc()}", flush=True)
            return None


def machine() -> dict[str, str]:
    """Return what figures depend on, the commit among it."""
    argv = ["git", "describe", "--always", "--dirty"]
    done = subprocess.run(argv, cwd=_ROOT, capture_output=True, text=True, check=False)
    return {**gateway_report.machine(), "commit": done.stdout.strip() or "?"}


def ended(kept: Kept, said: Mapping[str, Any]) -> int:
    """Print the last line, of this run's figures alone; returns the exit code."""
    print(json.dumps({**said, "failed": kept.failed}))
    sys.stdout.flush()
    return 1 if kept.failed else 0
