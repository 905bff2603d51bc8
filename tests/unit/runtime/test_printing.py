"""finfo and fctl print names that somebody else chose: none of them steers the terminal."""

import pytest

from scheduler.runtime import finfo, listing

EVIL = "\x1b]0;owned\x07m\n"


@pytest.mark.parametrize("layout", ["%m %N", "%.30m|%5N", "%30m"])
def test_a_line_of_finfo_is_one_harmless_line(layout: str) -> None:
    line = finfo._line(layout, {"m": EVIL, "N": "n1"})
    assert line.isprintable()
    assert line.count("owned") == 1


@pytest.mark.parametrize(
    ("units", "parts", "shown"),
    [(4, 1, "4"), (2, 4, "0.5"), (4, 4, "1"), (33, 100, "0.33"), (0, 1, "0")],
)
def test_parts_of_a_gpu_are_shown_as_parts(units: int, parts: int, shown: str) -> None:
    """A replica on two shards of four was two GPUs in fctl and finfo."""
    spec = {"gpus": units, "hardware": {"parts": parts}}
    assert str(listing.gpus(spec)) == shown
    lease = {
        "lease_id": "l-1", "slurm_job_id": "7", "kind": "serve", "team": "t", "state": "running",
        "nodes": [], "reason": "", "started_us": 0, "walltime_s": 0, **spec,
    }  # fmt: skip
    (row,) = listing.rows("leases", {"leases": [lease]})
    assert str(row["gpus"]) == shown
