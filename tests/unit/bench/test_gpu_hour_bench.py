"""The arithmetic of `prove-gpu-hour --batch-tokens`: what batch got of the time that callers left."""

from typing import Any

from tests.bench import gpu_hour


def row(minute: int, kind: str, gpu_s: float, tier: str = "") -> dict[str, Any]:
    us = round(gpu_s * 1e6)
    return {"minute_us": minute * gpu_hour.MINUTE, "kind": kind, "tier": tier, "gpu_us": us}


def test_minutes_in_which_batch_began_or_ended_are_left_out_and_starts_are_apart() -> None:
    rows = [
        row(0, "idle", 60),
        row(1, "attributed", 10, "batch"),  # it begins
        row(1, "idle", 50),
        *(row(minute, "attributed", 40, "batch") for minute in (2, 3)),
        *(row(minute, "attributed", 15, "interactive") for minute in (2, 3)),
        row(2, "idle", 5),
        row(3, "start-up", 5),
        row(3, "waste", 1),
        row(4, "attributed", 3, "batch"),  # it ends
        row(5, "idle", 60),
    ]
    assert gpu_hour.in_gaps(rows) == {
        "minutes": 2,
        "lent_gpu_s": 80.0,
        "left_gpu_s": 85.0,
        "share": round(80 / 85, 4),
        "callers_gpu_s": 30.0,
        "start_gpu_s": 5.0,
        "waste_gpu_s": 1.0,
    }


def test_without_batch_there_is_no_figure() -> None:
    assert gpu_hour.in_gaps([row(0, "idle", 60), row(1, "attributed", 3, "interactive")]) is None
