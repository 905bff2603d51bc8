"""The figures of the batch bench: the JSON's arithmetic, and the report. Pure."""

import statistics
from collections.abc import Callable, Mapping, Sequence
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
    return float(run["tokens"] / max(1e-6, run["seconds"]))


def line_ms(run: Mapping[str, Any]) -> float:
    """Return the milliseconds of a line, from the first output to the last."""
    return float(1_000 * run["seconds"] / max(1, run["lines"]))


def rates(runs: Runs, arm: str) -> list[float]:
    """Return the rates of all rounds of an arm."""
    return [rate(each) for each in runs.get(arm, ())]


def medians(runs: Runs) -> dict[str, float]:
    """Return each arm's median rate."""
    return {arm: round(statistics.median(rates(runs, arm)), 1) for arm in runs if runs[arm]}


def ratios(runs: Runs) -> dict[str, float]:
    """Return each of our arms' rate over run-batch's of the same round and pool, the median of rounds."""
    return _beside(runs, lambda ours, theirs: rate(ours) / rate(theirs))


def overheads_ms(runs: Runs) -> dict[str, float]:
    """Return what a line takes longer in each of our arms than in run-batch's, the median of rounds."""
    return _beside(runs, lambda ours, theirs: line_ms(ours) - line_ms(theirs))


def _beside(
    runs: Runs, compared: Callable[[Mapping[str, Any], Mapping[str, Any]], float]
) -> dict[str, float]:
    found = {}
    for arm in runs:
        peer = (SMALL if arm.startswith(SMALL) else "") + ARMS[0]
        theirs = {each["round"]: each for each in runs.get(peer, ())}
        each = [compared(run, theirs[run["round"]]) for run in runs[arm] if run["round"] in theirs]
        if each and arm != peer:
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
        "of_run_batch": ratios(runs),
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

Written by `make bench-batch REPORT=1`: {cpu}, {cores} cores, Linux {kernel}, CPython {python}. Parts may be
of several runs:

| part | measured | commit | load before |
| --- | --- | --- | --- |
{parts}

## Beside `vllm run-batch`

vLLM {vllm} on CPU, float32, a random Llama of 1.7 million parameters.
One file of {lines} chat lines, in random order: every second one begins with one of {prefixes} texts of
about 1,400 tokens (a system prompt with a page of rules, or a short document), answers are 16 to 64
tokens. `vllm run-batch`, Forebay, and Forebay while {preemptions} interactive requests each take a seat
from a batch line; {rounds} round(s), the arms interleaved, a fresh
engine for each, {seats} sequences at once for all. The first three share a KV pool of {pool} into which all
shared texts fit; the last two run the same file with {small_pool}, which they exceed: run-batch sends lines
as they stand in the file, Forebay those with the same beginning one after the other.

Timed from the first output to the last; Forebay's last is when the job's last result was on disk.

| arm | tokens/s (median) | of run-batch | each round | s, each round | ms a line more | prompts cached |
| --- | --- | --- | --- | --- | --- | --- |
{rows}

| what | measured | goal |
| --- | --- | --- |
| undisturbed | {undisturbed} | ≥ 95 % |
| shared texts exceed the pool | {grouped} | > 100 % |
| with {preemptions} preemptions | {disturbed} | ≥ 90 % |
| lines that gave their seat back, each round | {preempted} | |
| tokens computed again, worst round | {recomputed} | < 5 % |
| CPU of a line on its way, replicas that answer at once: gateway; runner | {gateway} ms; {runner} ms | |
| memory: run-batch, with its engine; our runner | {peer_rss} MiB; {our_rss} MiB | |
| custom ids lost, twice, all rounds | {runs_lost}, {runs_twice} | 0, 0 |

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


def report(parts: Mapping[str, Any]) -> str:
    """Return the report's text.

    Args:
        parts: as they are kept: of each, the machine before it began (``at``) and its ``figures``.
    """
    said, alone, big, path = (
        parts.get(name, {}).get("figures", {}) for name in ("vllm", "alone", "big", "path")
    )
    newest = max((each["at"] for each in parts.values()), key=lambda at: str(at["date"]))
    runs: Runs = said.get("runs", {})
    over = ratios(runs)
    ours = [each for arm in runs if not arm.endswith(ARMS[0]) for each in runs[arm]]
    about = ("vllm", "lines", "prefixes", "rounds", "seats", "pool", "small_pool")
    return _TEXT.format(
        **{name: newest[name] for name in ("cpu", "cores", "kernel", "python")},
        parts="\n".join(_part(name, each["at"]) for name, each in parts.items()),
        **{name: _shown(said.get(name)) for name in about},
        preemptions=PREEMPTIONS,
        rows="\n".join(_rows(runs)) or "| – | – | – | – | – | – | – |",
        undisturbed=_percent(over.get(ARMS[1])),
        grouped=_percent(over.get(SMALL + ARMS[1])),
        disturbed=_percent(over.get(ARMS[2])),
        preempted=", ".join(str(each["preempted"]) for each in runs.get(ARMS[2], ())) or "–",
        recomputed=_percent(result(runs, alone)["recomputed_share"]),
        gateway=_shown(path.get("gateway_ms")),
        runner=_shown(path.get("runner_ms")),
        peer_rss=_most(each["rss_mb"] for each in runs.get(ARMS[0], ())),
        our_rss=_most(each["rss_mb"] for each in ours),
        runs_lost=sum(each["lost"] for each in ours) if ours else "–",
        runs_twice=sum(each["duplicated"] for each in ours) if ours else "–",
        **{name: _shown(alone.get(key)) for name, key in _ALONE.items()},
        **{f"big_{name}": _shown(big.get(key)) for name, key in _BIG.items()},
        checkpoint=_shown(alone.get("recover_s", {}).get("checkpoint")),
        big_checkpoint=_shown(big.get("recover_s", {}).get("checkpoint")),
        journal=_shown(alone.get("recover_s", {}).get("journal_alone")),
    )


_BOTH = {
    "rss": "rss_mb",
    "intake": "intake_lines_per_cpu_s",
    "intake_rss": "intake_rss_mb",
    "resume": "resume_s",
    "lost": "lost",
}
_BIG = {**_BOTH, "lines": "lines", "journal": "journal_lines_per_cpu_s"}
_ALONE = {
    **_BOTH,
    "alone_lines": "lines",
    "lines_per_cpu_s": "lines_per_cpu_s",
    "lines_per_s": "lines_per_s",
    "twice": "duplicated",
}
_PARTS = {
    "vllm": "beside `vllm run-batch`",
    "path": "CPU of a line on its way",
    "alone": "the runner alone",
    "big": "the runner alone, the larger file",
}


def _part(name: str, at: Mapping[str, str]) -> str:
    return f"| {_PARTS.get(name, name)} | {at['date']} | {at['commit']} | {at['load_before']} |"


def _rows(runs: Runs) -> list[str]:
    """Return a row of the table for each arm that has run."""
    over, more = ratios(runs), overheads_ms(runs)
    found = []
    for arm, middle in medians(runs).items():
        each = ", ".join(f"{one:.1f}" for one in rates(runs, arm))
        seconds = ", ".join(f"{run['seconds']:.1f}" for run in runs[arm])
        cells = [
            arm.replace("_", " "),
            str(middle),
            _percent(over.get(arm)),
            each,
            seconds,
            _shown(more.get(arm)),
            _range(runs[arm]),
        ]
        found.append(f"| {' | '.join(cells)} |")
    return found


def _range(each: Sequence[Mapping[str, Any]]) -> str:
    """Return the least and the most of the rounds' cached shares."""
    shares = [run["cached"] for run in each]
    least, most = _percent(min(shares)), _percent(max(shares))
    return least if least == most else f"{least} – {most}"


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.1%}"


def _most(values: Any) -> str:
    found = list(values)
    return f"{max(found):.1f}" if found else "–"


def _shown(value: float | str | None) -> str:
    if value is None:
        return "–"
    return value if isinstance(value, str) else f"{value:,}"
