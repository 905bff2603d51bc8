"""`make bench-reclaim`: how fast batch GPUs come back, by rung; real Slurm, real vLLM on CPUs.

Batch runs on every GPU of the fleet, then callers come. Rung 0: as many as one shared replica has to
abort batch for. Rung 1: more than that replica has seats, so that one which batch was lent turns. Rung 3:
more than both have, so that another model's backfill lease is taken back and a serve lease asked for at the
same time; its clock stops when Slurm has given the GPUs to the new lease. Rung 2 is measured on one lease,
for its control path. The peer is Slurm's own preemption, interleaved with rung 3. The last line is JSON.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent import futures
from pathlib import Path
from typing import Any

from tests.bench import (
    gateway_report,
    reclaim_peer,
    reclaim_report,
    reclaim_site,
    reclaim_swap,
    reclaim_timeline,
    reclaim_trials,
    reclaim_ttft,
)
from tests.integration.whole import running

say = reclaim_trials.say
LINES, TOKENS = 20_000, 200  # of a batch job that outlasts every trial
WORDS = 150  # of a long prompt: some 500 tokens, half of what a sequence may have here


def main() -> int:
    """Run it; see the module."""
    asked = _parser().parse_args()
    began = time.monotonic()
    result: dict[str, Any] = {"machine": gateway_report.machine()}
    beside: dict[str, Any] = {}
    if asked.rounds:  # the short parts come first: what breaks them costs no long one
        say("batch beside vllm run-batch")
        compared = reclaim_peer.throughput(asked.lines, asked.rounds)
        rates = compared["tokens_per_s"]
        medians = {arm: statistics.median(each) for arm, each in rates.items()}
        beside = {
            "throughput_vs_run_batch": round(medians["forebay"] / medians["run_batch"], 3),
            "tokens_per_s": rates,
            "file_wrong": compared["wrong"],
        }
    if asked.rung2:
        result["rung2"] = _spreads(reclaim_swap.measure(asked.rung2))
    with reclaim_site.opened(rehearsed=asked.rehearse) as house:
        result |= _rungs(house, asked)
    result["batch"] |= beside
    result["minutes"] = round((time.monotonic() - began) / 60, 1)
    if asked.report and not asked.rehearse:
        asked.report.write_text(reclaim_report.page(result), encoding="utf-8")
    print(json.dumps(result))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trials", type=int, default=100, help="of rungs 0 and 1")
    parser.add_argument("--leases", type=int, default=20, help="trials of rung 3")
    parser.add_argument("--rung2", type=int, default=20, help="trials of rung 2; 0: not")
    parser.add_argument(
        "--peers", type=int, default=5, help="trials of preemption with a GraceTime"
    )
    parser.add_argument("--lines", type=int, default=1_000, help="of the file for run-batch")
    parser.add_argument("--rounds", type=int, default=1, help="of run-batch; 0: not")
    parser.add_argument(
        "--rehearse",
        action="store_true",
        help="simulated engines: tries the bench out, its figures mean nothing",
    )
    parser.add_argument("--report", type=Path, help="write the report there")
    return parser


def _rungs(house: reclaim_site.House, asked: argparse.Namespace) -> dict[str, Any]:
    """Run the trials of rungs 0, 1 and 3, and of preemption between the latter."""
    house.up()
    key = house.key
    trials = reclaim_trials.Trials(house, key)
    trials.quiet(3)  # the first answers of an engine are slow
    reclaim_ttft.alone(house)
    jobs = [house.submit(key, running.MODEL, LINES, TOKENS)]
    batch_us = time.time_ns() // 1_000
    alone = {words: _turns(house, words, asked.trials) for words in (0, WORDS)}
    reclaim_ttft.alone(house, resume=True)
    jobs.append(house.submit(key, reclaim_site.DIGEST, LINES, TOKENS))
    rung0 = trials.rung0(asked.trials)
    rung1 = trials.rung1(asked.trials, rung0)
    rung3, peers, settings = _leases(trials, asked)
    ended = [job.ended() for job in jobs]
    rows = house.attempts(tier="batch", start_us=str(batch_us))
    return {
        "rung0": _spreads(rung0),
        "rung1": _spreads(rung1),
        "rung3": _spreads(rung3) | {"stages_s": reclaim_timeline.table(rung3.stages)},
        "slurm_preemption_s": {name: peers[name] for name in ("grace0", "grace3")},
        "scancel_floor_s": peers["floor"],
        "slurm": settings,
        "interactive_ttft_ms": {
            "quiet": spread(alone[0]["quiet"].ttft_ms),
            "spike": spread(alone[0]["filled"].ttft_ms),
            "quiet_long": spread(alone[WORDS]["quiet"].ttft_ms),
            "spike_long": spread(alone[WORDS]["filled"].ttft_ms),
            "spike_all": spread(rung0.ttft_ms),
        },
        "ttft_parts": {str(words): reclaim_ttft.told(arms) for words, arms in alone.items()},
        "batch": {
            "lost": sum(each["lost"] for each in ended),
            "duplicated": sum(each["duplicated"] for each in ended),
            "lines": sum(each["lines"] for each in ended),
            "preempted": sum(row["outcome"] == "preempted" for row in rows),
            "recomputed_share": round(recomputed(rows), 4),
        },
    }


def _turns(house: reclaim_site.House, words: int, trials: int) -> dict[str, reclaim_ttft.Arm]:
    """Return both arms of the time to first token, each with about a quarter as many crowds."""
    say(f"time to first token, prompts of {words or 'a few'} words, batch held and not in turn")
    turns = reclaim_ttft.Turns(house, reclaim_trials.RUNG0_CALLERS, words)
    return turns.measure(max(1, trials // (4 * reclaim_ttft.CROWDS)))


def _leases(
    trials: reclaim_trials.Trials, asked: argparse.Namespace
) -> tuple[reclaim_trials.Times, dict[str, Any], dict[str, str]]:
    """Interleave rung 3, Slurm's preemption without and with a grace time, and the floor of both.

    Preemption without a grace time and the floor are measured while callers keep the same replicas busy.
    With a grace time it takes so long that it runs beside the wait for the next trial's calm.
    """
    found, orders = reclaim_trials.Times(), list[reclaim_trials.Order]()
    took: dict[str, list[float]] = {"grace0": [], "grace3": [], "floor": []}
    since_us = time.time_ns() // 1_000
    with reclaim_site.cluster(1) as site, futures.ThreadPoolExecutor(1) as beside:
        peer = reclaim_peer.Preemption(site)
        for number in range(asked.leases):
            with found.bearing():
                trials.rung3(number % 4 == 0, found, orders)
            late = None
            if number * asked.peers // asked.leases < (number + 1) * asked.peers // asked.leases:
                late = beside.submit(peer.trial, 3)
            trials.calm()
            if late is not None:
                took["grace3"].append(late.result())
            with found.bearing(), trials.spike():
                for name in ("grace0", "floor") if number % 2 == 0 else ("floor", "grace0"):
                    took[name].append(peer.floor() if name == "floor" else peer.trial(0))
            say("; ".join(f"{name} {each[-1]:.2f} s" for name, each in took.items() if each))
        settings = peer.settings()
    found.first_token_s = trials.first_tokens(orders, since_us)
    return found, {name: spread(each) for name, each in took.items()}, settings


def recomputed(rows: Sequence[Mapping[str, Any]]) -> float:
    """Return the share of batch's tokens that were computed again: prompts and answers of later tries."""
    again = total = 0
    seen: set[tuple[str, str]] = set()
    for row in sorted(rows, key=lambda row: int(row["arrived_us"])):
        line = (str(row["batch_job_id"]), str(row["custom_id"]))
        prompt = int(row["uncached_prompt_tokens"])
        again += int(row["waste_tokens"]) + (prompt if line in seen else 0)
        total += prompt + int(row["waste_tokens"]) + int(row["output_tokens"])
        seen.add(line)
    return again / max(1, total)


def _spreads(times: reclaim_trials.Times) -> dict[str, Any]:
    return {
        "decision_s": spread(times.decision_s),
        "ready_s": spread(times.ready_s),
        "first_token_s": spread(times.first_token_s),
        "trials": times.trials,
        "failed": times.failed,
        "late": times.late,
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return count, median, p95, p99 and maximum; p99 of fewer than 100 values is the maximum."""
    if not values:
        return {}
    ranked = sorted(values)

    def at(share: float) -> float:
        return round(ranked[min(len(ranked) - 1, int(share * len(ranked)))], 3)

    return {
        "n": len(ranked),
        "p50": round(statistics.median(ranked), 3),
        "p95": at(0.95),
        "p99": at(0.99),
        "max": round(ranked[-1], 3),
    }


if __name__ == "__main__":
    sys.exit(main())
