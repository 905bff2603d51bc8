"""The figures of the batch bench: the JSON's arithmetic, and the report. Pure."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

PREEMPTIONS = 10
ARMS = ("run_batch", "forebay", "forebay_preempted")
POOLED = ("run_batch", "forebay")  # arms of the small pool
SMALL = "small_pool_"
Runs = Mapping[str, Sequence[Mapping[str, Any]]]


def recomputed(rows: Sequence[Mapping[str, Any]]) -> float:
    """Return the share of a run's tokens that were computed again, by the replica's own rows.

    Args:
        rows: in the order in which sequences left the engine.
    """
    seen: set[str] = set()
    again = total = 0
    for row in rows:
        if row.get("tier") != "batch":
            continue
        computed = row["uncached_prompt_tokens"]
        total += computed + row["output_tokens"]
        again += computed if row["custom_id"] in seen else 0
        seen.add(row["custom_id"])
    return again / max(1, total)


def rate(run: Mapping[str, Any]) -> float:
    """Return a run's output tokens a second, from its first output to its last."""
    return float(run["tokens"] / run["seconds"])


def rates(runs: Runs, arm: str) -> list[float]:
    """Return the rates of all rounds of an arm."""
    return [rate(each) for each in runs.get(arm, ())]


def medians(runs: Runs) -> dict[str, float]:
    """Return each arm's median rate."""
    return {arm: round(statistics.median(rates(runs, arm)), 1) for arm in runs if runs[arm]}


def ratios(runs: Runs) -> dict[str, float]:
    """Return each of our arms' rate over run-batch's of the same round and pool, the median of rounds."""
    found = {}
    for arm in runs:
        small = SMALL if arm.startswith(SMALL) else ""
        pairs = zip(rates(runs, arm), rates(runs, small + ARMS[0]), strict=False)
        each = [ours / theirs for ours, theirs in pairs]
        if each and arm != small + ARMS[0]:
            found[arm] = round(statistics.median(each), 3)
    return found


def result(runs: Runs, alone: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON of the last line."""
    found = medians(runs)
    ours = [each for arm in runs if not arm.endswith(ARMS[0]) for each in runs[arm]]
    preempted = runs.get(ARMS[2], ())
    count = alone.get("lines")
    name = "1m_lines" if count in (1_000_000, None) else f"{count}_lines"
    return {
        "tokens_per_s": {arm: found.get(arm) for arm in ARMS},
        "recomputed_share": round(max((each["recomputed"] for each in preempted), default=0.0), 4)
        if preempted
        else None,
        "lines_per_cpu_s": alone.get("lines_per_cpu_s"),
        "rss_mb": {name: alone.get("rss_mb")},
        "lost": sum(each["lost"] for each in ours) + alone.get("lost", 0),
        "duplicated": sum(each["duplicated"] for each in ours) + alone.get("duplicated", 0),
    }


_TEXT = """\
# Batch jobs

Written by `make bench-batch REPORT=1`. {date}, {cpu}, {cores} cores, Linux {kernel}, CPython {python}, load
{load_before} before the run. vLLM {vllm} on CPU, float32, a random Llama of 1.7 million parameters.

## Beside `vllm run-batch`

One file of {lines} chat lines, in random order: every second one begins with one of {prefixes} texts of
about 400 tokens, answers are 16 to 64 tokens. `vllm run-batch`, Forebay, and Forebay while {preemptions}
interactive requests each take a seat from a batch line; {rounds} round(s), the arms interleaved, a fresh
engine for each, {seats} sequences at once for all. The first three share a KV pool of {pool} into which all
shared texts fit; the last two run the same file with {small_pool}, which they exceed: run-batch sends lines
as they stand in the file, Forebay those with the same beginning one after the other.

Timed from the first output to the last; Forebay's last is when the job's last result was on disk.

| arm | tokens/s (median) | of run-batch | each round |
| --- | --- | --- | --- |
{rows}

| what | measured | goal |
| --- | --- | --- |
| undisturbed | {undisturbed} | ≥ 95 % |
| shared texts exceed the pool | {grouped} | > 100 % |
| with {preemptions} preemptions | {disturbed} | ≥ 90 % |
| lines that gave their seat back, each round | {preempted} | |
| tokens computed again, worst round | {recomputed} | < 5 % |
| CPU of gateway and runner a line | {overhead} ms | |
| prompt tokens from the prefix cache, small pool: Forebay | {cached} | |
| memory: run-batch, with its engine; our runner | {peer_rss} MiB; {our_rss} MiB | |

## The runner alone

Lines on an instant engine: a process that answers each with the same 200. The runner is killed half-way and
resumed. Its own CPU is read from /proc, threads included.

| what | {alone_lines} lines | {big_lines} lines | goal |
| --- | --- | --- | --- |
| lines a CPU-second of the runner | {lines_per_cpu_s} | | ≥ 3,000 |
| lines a second | {lines_per_s} | | |
| most memory of the runner, MiB | {rss} | {big_rss} | < 300 |
| taking the file in: lines a CPU-second | {intake} | {big_intake} | |
| most memory of that process, MiB | {intake_rss} | {big_intake_rss} | < 300 |
| journal: lines a CPU-second | | {big_journal} | |
| reading the journal with its checkpoint, s | {checkpoint} | {big_checkpoint} | seconds |
| the same without, s | {journal} | | |
| from a runner's start to its first new answer, s | {resume} | {big_resume} | seconds |
| custom ids lost, twice | {lost}, {twice} | {big_lost}, – | 0, 0 |

The {big_lines} lines are taken in, validated and journalled by the runner's own code without an engine,
all but the last thousand; a runner then resumes and journals these. No results are written: at a million they
take one byte of memory a line.

Not measured: GPUs, several replicas, a network between the parts. The spikes are of one token each: longer
ones keep the seat for longer, which is their gain and no cost of resuming. With more cores the gateway
and the runner no longer share them with the engine, which would favour Forebay.
"""


def report(said: Mapping[str, Any]) -> str:
    """Return the report's text."""
    runs: Runs = said["runs"]
    alone, big = said["alone"], said["big"]
    middle, over = medians(runs), ratios(runs)
    rows = [
        f"| {arm.replace('_', ' ')} | {rate} | {_percent(over.get(arm))} | "
        f"{', '.join(f'{each:.1f}' for each in rates(runs, arm))} |"
        for arm, rate in middle.items()
    ]
    small = runs.get(SMALL + ARMS[1], ())
    ours = [each for arm in runs if not arm.endswith(ARMS[0]) for each in runs[arm]]
    return _TEXT.format(
        **said["machine"],
        **{name: said[name] for name in ("vllm", "lines", "prefixes", "rounds", "seats")},
        pool=said["pool"],
        small_pool=said["small_pool"],
        preemptions=PREEMPTIONS,
        rows="\n".join(rows),
        undisturbed=_percent(over.get(ARMS[1])),
        grouped=_percent(over.get(SMALL + ARMS[1])),
        disturbed=_percent(over.get(ARMS[2])),
        preempted=", ".join(str(each["preempted"]) for each in runs.get(ARMS[2], ())) or "–",
        recomputed=_percent(result(runs, alone)["recomputed_share"]),
        overhead=_most(1_000 * each["cpu_s"] / max(1, each["lines"]) for each in ours),
        cached=_percent(max((each["cached"] for each in small), default=None)),
        peer_rss=_most(each["rss_mb"] for each in runs.get(ARMS[0], ())),
        our_rss=_most(each["rss_mb"] for each in ours),
        alone_lines=_shown(alone.get("lines")),
        big_lines=_shown(big.get("lines")),
        lines_per_cpu_s=_shown(alone.get("lines_per_cpu_s")),
        lines_per_s=_shown(alone.get("lines_per_s")),
        rss=_shown(alone.get("rss_mb")),
        big_rss=_shown(big.get("rss_mb")),
        intake=_shown(alone.get("intake_lines_per_cpu_s")),
        big_intake=_shown(big.get("intake_lines_per_cpu_s")),
        intake_rss=_shown(alone.get("intake_rss_mb")),
        big_intake_rss=_shown(big.get("intake_rss_mb")),
        big_journal=_shown(big.get("journal_lines_per_cpu_s")),
        checkpoint=_shown(alone.get("recover_s", {}).get("checkpoint")),
        big_checkpoint=_shown(big.get("recover_s", {}).get("checkpoint")),
        journal=_shown(alone.get("recover_s", {}).get("journal_alone")),
        resume=_shown(alone.get("resume_s")),
        big_resume=_shown(big.get("resume_s")),
        lost=_shown(alone.get("lost")),
        twice=_shown(alone.get("duplicated")),
        big_lost=_shown(big.get("lost")),
    )


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.1%}"


def _most(values: Any) -> str:
    found = list(values)
    return f"{max(found):.1f}" if found else "–"


def _shown(value: float | None) -> str:
    return "–" if value is None else f"{value:,}"
