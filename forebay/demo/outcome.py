"""What the demo measured: the closing table, its JSON, and which promises were not kept."""

import dataclasses
import json
from collections import Counter
from pathlib import Path
from typing import Any

from rich import console, table

from forebay.demo import load

RECLAIM_AT_MOST_S = 5.0
_SHOWN = 12  # lines of a report in the demo


@dataclasses.dataclass
class Outcome:
    """The figures of one run; filled as the story goes on.

    Attributes:
        leases: rows of `freport reconcile`, one a lease.
        reports: command and what it printed.
        complaints: what users were told instead of an answer.
    """

    slurm: str
    slurm_kind: str
    engine: dict[str, str] = dataclasses.field(default_factory=dict)
    ttft_ms: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    reclaim_s: list[float] = dataclasses.field(default_factory=list)
    sent: int = 0
    answered: int = 0
    complaints: list[str] = dataclasses.field(default_factory=list)
    lines: int = 0
    done: int = 0
    lost: int = 0
    duplicated: int = 0
    preempted: int = 0
    leases: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    reports: list[tuple[str, str]] = dataclasses.field(default_factory=list)

    def read_lines(self, answers: Path, lines: int) -> None:
        """Count the published answers: every custom_id has to be there exactly once."""
        seen: Counter[str] = Counter()
        for line in answers.read_text().splitlines():
            row = json.loads(line)
            if row["error"] is None and row["response"]["status_code"] == 200:
                seen[row["custom_id"]] += 1
        self.lines = lines
        self.done = len(seen)
        self.lost = lines - len(seen)
        self.duplicated = sum(count - 1 for count in seen.values())

    def reclaim(self) -> dict[str, float]:
        """Return p50 and maximum of the seconds from spike to capacity."""
        return {
            "p50": round(load.percentile(self.reclaim_s, 0.5), 3),
            "max": round(max(self.reclaim_s, default=0.0), 3),
        }

    def gpu_seconds(self) -> dict[str, float]:
        """Return GPU-seconds of all leases in both books."""
        return {
            "forebay": round(sum(row["forebay_us"] for row in self.leases) / 1e6, 1),
            "sacct": round(sum(row["sacct_us"] or 0 for row in self.leases) / 1e6, 1),
        }

    def to_json(self) -> dict[str, Any]:
        """Return the content of build/demo.json."""
        return {
            "slurm": {"kind": self.slurm_kind, "version": self.slurm},
            "engine": self.engine,
            "ttft_ms": self.ttft_ms,
            "reclaim_s": self.reclaim(),
            "interactive": {"sent": self.sent, "answered": self.answered},
            "batch": {
                "lines": self.lines,
                "done": self.done,
                "lost": self.lost,
                "duplicated": self.duplicated,
                "preempted": self.preempted,
            },
            "gpu_seconds": self.gpu_seconds(),
        }

    def faults(self) -> list[str]:
        """Return what is not as promised, one line each."""
        found = []
        if self.answered != self.sent:
            found.append(
                f"{self.sent - self.answered} of {self.sent} interactive requests were not "
                f"answered: {'; '.join(self.complaints)}"
            )
        if self.lost or self.duplicated or self.done != self.lines:
            found.append(
                f"batch: {self.done} of {self.lines} done, {self.lost} lost, "
                f"{self.duplicated} duplicated"
            )
        if not self.preempted:
            found.append("no batch line gave way, so the spike showed nothing")
        if self.reclaim()["max"] >= RECLAIM_AT_MOST_S:
            found.append(f"capacity came back in {self.reclaim()['max']} s at worst")
        for row in self.leases:
            if row["agrees"] is None:
                found.append(f"lease {row['lease_id']}: not in both books: {row['note']}")
            elif not row["agrees"]:
                apart = abs(row["forebay_us"] - row["sacct_us"]) / 1e6
                found.append(
                    f"lease {row['lease_id']}: {apart:.1f} GPU-seconds from sacct's figure"
                )
        return found

    def print(self, out: console.Console) -> None:
        """Print the closing table, then the reports."""
        grid = table.Table(title="Forebay demo", show_header=False)
        for name, value in self._rows():
            grid.add_row(name, value)
        out.print(grid)
        for command, text in self.reports:
            out.print(f"\n$ {command}", markup=False, style="bold")
            lines = text.rstrip("\n").splitlines()
            out.print("\n".join(lines[:_SHOWN]), markup=False, soft_wrap=True)
            if len(lines) > _SHOWN:
                out.print(f"… {len(lines) - _SHOWN} more lines", style="dim")

    def _rows(self) -> list[tuple[str, str]]:
        phases = ((name, self.ttft_ms.get(name, {})) for name in ("before", "during", "after"))
        ttft = [
            (f"TTFT {name} the spikes", f"p50 {value.get('p50')} ms, p95 {value.get('p95')} ms")
            for name, value in phases
        ]
        back, seconds = self.reclaim(), self.gpu_seconds()
        return [
            ("Slurm", " ".join(dict.fromkeys((self.slurm_kind, self.slurm)))),
            ("engine", f"{self.engine.get('name')} {self.engine.get('version')}"),
            *ttft,
            ("spike to reclaimed capacity", f"p50 {back['p50']} s, max {back['max']} s"),
            ("interactive requests", f"{self.answered} of {self.sent} answered"),
            (
                "batch lines",
                f"{self.done} of {self.lines} done, {self.lost} lost, {self.duplicated} "
                f"duplicated, {self.preempted} times preempted",
            ),
            ("GPU-seconds", f"Forebay {seconds['forebay']}, sacct {seconds['sacct']}"),
        ]
