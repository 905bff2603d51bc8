"""The page docs/bench/reclaim.md, written from the figures of one run."""

from collections.abc import Mapping, Sequence
from typing import Any

from tests.contract import engine_vllm

GOALS = {"rung0": 0.3, "rung1": 1.0, "rung3": 5.0}
_RUNGS = {
    "rung0": "0 seat",
    "rung1": "1 role",
    "rung2": "2 swap (control path on CPUs)",
    "rung3": "3 lease",
}
_TTFT = {
    "quiet": "replica alone, no batch",
    "spike": "replica alone, batch on every seat that it may have",
    "quiet_long": "the same, long prompts, no batch",
    "spike_long": "the same, long prompts, batch",
    "spike_all": "batch on all three replicas, which share the cores",
}
_PAGE = """\
# Reclaiming GPUs from batch

{date}, {cpu}, {cores} cores, Linux {kernel}, CPython {python}, vLLM {vllm} on CPU, Slurm's own daemons.
Load before the run {load_before}; the run took {minutes} minutes. Written by `make bench-reclaim REPORT=1`.

## What runs

A real Slurm cluster of three nodes with four pretended GPUs each, Forebay on it, and vLLM with a tiny
model. `chat` has a replica in a protected lease (shared with batch) and one in a backfill lease that
batch was lent; `digest` has one in a backfill lease and only batch uses it. Two batch jobs keep every
seat of all three busy. Then callers come at once, and every trial waits until batch has all of it back.

- Time to first token, {seat_callers} callers at once: first with the shared replica alone (the other nodes
  drained, so that no other engine runs on these cores, as none would on a GPU node's): five crowds with
  batch held off the model (`fctl hold`), five with it, and so on, each first in turn, one crowd each
  {pace_s:g} s in both, and in both its processes run at nice {nice} (an engine on a GPU node has no gateway
  beside it); with prompts of a few words and with prompts of {words} random words, which no
  prefix cache holds. Then, in rung 0's trials, with batch on all three replicas.
- Rung 0, {seat_callers} callers: the shared replica aborts its youngest batch sequences. Decision: from
  the request's arrival to its dispatch. Ready: from the order to the abort until the seat is free, by
  the replica's clock; every seat that a caller took from batch counts, those of rung 1's trials too,
  since a replica that sees such arrivals often keeps seats free for them and has nothing to abort.
- Rung 1, {role_callers} callers, more than it has seats: the lent replica turns. Decision: until the
  plan that says so is applied. Ready: until the replica itself says that it has the role (asked every
  {poll_ms:g} ms).
- Rung 2: a batch replica is stopped and a parked one woken in the same slot. **Not measured on a GPU**:
  on CPUs vLLM's sleep frees nothing, so the parked replica's process ends and waking forks it anew. The
  broker is played by the bench, so there is no decision, and up to one tick (0.2 s) between the two
  orders is missing.
- Rung 3, {lease_callers} callers, more than both replicas of the model have seats: `digest`'s lease is
  taken back and a serve lease asked for in the same plan. The order: when that plan is written down, or
  when the old lease's agent says that it leaves, if that is earlier. Ready: until squeue (asked
  every {poll_ms:g} ms) shows the new lease running on the freed GPUs. First token: on every fourth
  trial the callers stay until the new replica answers; that is a cold start, imports and all. Here
  and for its peers all processes in `chat`'s leases run at nice {nice}: Slurm's daemons and the broker
  share no cores with engines on a cluster.
- Slurm's own preemption: a second cluster with the same settings, one node, in turn with rung 3; a job of
  partition `serve` takes the GPUs of one in `backfill` (PreemptMode=REQUEUE). From sbatch until squeue
  shows it running. Its victim is `sleep`, which ends at once and journals nothing. Without a grace time it
  is measured under the same spike: {role_callers} callers keep both replicas of `chat` busy. With one, the
  kill waits for the controller's pass anyway, and it runs beside the wait for the next trial's calm.
- The floor: `scancel` of that `sleep` while a job of its own partition waits for its GPUs, under the same
  callers; from scancel until squeue shows the waiting job running. Nothing is decided, asked or saved.

First tokens are the gateway's own usage rows. p99 of fewer than 100 trials is their maximum.

## Figures

{rungs}

| Slurm's own preemption | n | p50, s | max, s |
| --- | --- | --- | --- |
{peers}

Rung 3, worst of all trials, against the worst of Slurm's preemption: {ratio0} of it without a grace
time, {ratio3} of it with GraceTime 3; medians: {median0} and {median3}.

The floor, a bare scancel with a job that waits: p50 {floor_p50} s, at most {floor_max} s ({floor_n} times).

Where rung 3's time goes, from the order (the plan is written down) on; the means add up to the whole:

| until | mean, s | longest, s |
| --- | --- | --- |
{stages}

| interactive time to first token, ms | n | p50 | p95 | p99 | max |
| --- | --- | --- | --- | --- | --- |
{ttft}

p95 with batch over p95 without: {ttft_ratio}; with long prompts {ttft_ratio_long}. Medians: {ttft_median}
and {ttft_median_long}. Callers without a whole answer: {failed}.

Where a caller's time goes with the replica alone, means in ms:

| part | {part_arms} |
| --- | {part_rule} |
{parts}

Batch: {lines} lines in two jobs, cancelled at the end; lost {lost}, told twice {duplicated} (over
answers and errors of every line); {preempted} attempts aborted; {recomputed} of its tokens computed
again.
{throughput}
## Goals

{goals}

## What decides rung 3

{slurm}

These are the same for both sides. The plan that takes a lease back also asks for the new one, but that job
goes to Slurm when the old lease's agent has said farewell ({give_way_s:g} s later at the latest). Sent at
once, Slurm would preempt the old lease itself, and slurmd looks for the end of a job that it was told to
kill only 0.02, 0.07, 0.17, 0.67, 1.67 and 2.67 s later (Slurm 22.05: a job that ends 0.25 s after SIGTERM
frees its GPUs after 0.8 s, one that takes 0.8 s after 1.8 s, one that takes 1.8 s after 2.8 s). One that
has ended by itself frees them at once. Slurm's preemption stays behind it for an agent that does not leave.

A lease that is given back aborts batch at once (the gateway has every token that was sampled), its
replicas' rows are synced, and then nothing is waited for: engines and the process that forks them are
killed.

Tried and not kept: an agent that leaves at its slots' last word, while their steps are still ending. The
median was 0.92 s, 0.87 of Slurm's own, but 4 of 20 trials took 5.4 to 6.1 s: a step that is there when the
batch script ends is killed by the end of its job, which may wait for KillWait. So the agent waits for it.

## Not measured

GPUs: abort and role are control paths and engine steps, longer there only by the step; how long vLLM
takes to sleep, to wake and to load, and how long a driver takes to free memory, is not in these
figures. More than one lease at a time, leases of several nodes, a controller with other users' load.
Two cores run everything here, the callers too."""


def page(result: Mapping[str, Any]) -> str:
    """Return the report's text."""
    from scheduler.runtime import lease_acts
    from tests.bench import reclaim, reclaim_site, reclaim_trials, reclaim_ttft

    peers, rung3 = result["slurm_preemption_s"], result.get("rung3", {}).get("ready_s", {})
    ttft, batch = result["interactive_ttft_ms"], result["batch"]
    return _PAGE.format(
        **result["machine"],
        vllm=engine_vllm.NEWEST,
        minutes=result["minutes"],
        seat_callers=reclaim_trials.RUNG0_CALLERS,
        role_callers=reclaim_trials.RUNG1_CALLERS,
        lease_callers=reclaim_trials.RUNG3_CALLERS,
        poll_ms=reclaim_site.POLL_S * 1_000,
        rungs=_rungs(result),
        peers="\n".join(
            f"| GraceTime={name.removeprefix('grace')} | {each.get('n', 0)} | {_cell(each, 'p50')} "
            f"| {_cell(each, 'max')} |"
            for name, each in peers.items()
        ),
        ratio0=ratio(rung3, peers["grace0"], "max"),
        ratio3=ratio(rung3, peers["grace3"], "max"),
        median0=ratio(rung3, peers["grace0"], "p50"),
        median3=ratio(rung3, peers["grace3"], "p50"),
        nice=reclaim_site.NICE,
        pace_s=reclaim_ttft.PACE_S,
        words=reclaim.WORDS,
        give_way_s=lease_acts.GIVE_WAY_S,
        floor_n=result["scancel_floor_s"].get("n", 0),
        floor_p50=_cell(result["scancel_floor_s"], "p50"),
        floor_max=_cell(result["scancel_floor_s"], "max"),
        stages="\n".join(
            f"| {words} | {mean:.3f} | {longest:.3f} |"
            for words, mean, longest in result.get("rung3", {}).get("stages_s", ())
        ),
        ttft="\n".join(
            f"| {label} | {ttft[name].get('n', 0)} | "
            + " | ".join(_cell(ttft[name], key, 0) for key in ("p50", "p95", "p99", "max"))
            + " |"
            for name, label in _TTFT.items()
        ),
        ttft_ratio=ratio(ttft["spike"], ttft["quiet"], "p95"),
        ttft_ratio_long=ratio(ttft["spike_long"], ttft["quiet_long"], "p95"),
        ttft_median=ratio(ttft["spike"], ttft["quiet"], "p50"),
        ttft_median_long=ratio(ttft["spike_long"], ttft["quiet_long"], "p50"),
        **_parts(result["ttft_parts"]),
        failed=sum(result.get(name, {}).get("failed", 0) for name in _RUNGS),
        lines=batch["lines"],
        lost=batch["lost"],
        duplicated=batch["duplicated"],
        preempted=batch["preempted"],
        recomputed=f"{batch['recomputed_share']:.2%}",
        throughput=_throughput(batch),
        goals="\n".join(goals(result)),
        slurm="\n".join(f"- `{name}={value}`" for name, value in result["slurm"].items()),
    )


def _parts(told: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Return the table of a caller's time: its head's arms, the rule below it, and its lines."""
    from tests.bench import reclaim_ttft

    columns = [
        (
            f"{'short' if words == '0' else 'long'}, {'no batch' if arm == 'quiet' else 'batch'}",
            each,
        )
        for words, arms in told.items()
        for arm, each in arms.items()
    ]
    lines = [
        f"| {words} | " + " | ".join(f"{each['parts_ms'][part]:.1f}" for _, each in columns) + " |"
        for part, words in reclaim_ttft.PARTS.items()
    ]
    for key, words in (
        ("mean_ms", "**together**"),
        ("step_ms", "(the engine's step, median)"),
        ("batch_beside", "(batch sequences beside, mean)"),
    ):
        lines.append(f"| {words} | " + " | ".join(f"{each[key]:.1f}" for _, each in columns) + " |")
    return {
        "part_arms": " | ".join(label for label, _ in columns),
        "part_rule": " | ".join("---" for _ in columns),
        "parts": "\n".join(lines),
    }


def _rungs(result: Mapping[str, Any]) -> str:
    rows = [
        "| rung | trials | decision p50 / p99, s | ready p50 / p99, s | first token p50 / p99 (n), s |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, label in _RUNGS.items():
        if name not in result:
            continue
        each = result[name]
        token = each["first_token_s"]
        rows.append(
            f"| {label} | {each['trials']} | {_pair(each['decision_s'])} | {_pair(each['ready_s'])} | "
            f"{_pair(token)} ({token.get('n', 0)}) |"
        )
    return "\n".join(rows)


def _pair(spread: Mapping[str, float]) -> str:
    return f"{_cell(spread, 'p50')} / {_cell(spread, 'p99')}" if spread else "–"


def _cell(spread: Mapping[str, float], key: str, digits: int = 3) -> str:
    return f"{spread[key]:.{digits}f}" if key in spread else "–"


def ratio(ours: Mapping[str, float], theirs: Mapping[str, float], key: str) -> str:
    """Return ours over theirs, "–" where one is missing."""
    if not ours or not theirs or not theirs[key]:
        return "–"
    return f"{ours[key] / theirs[key]:.2f}"


def _throughput(batch: Mapping[str, Any]) -> str:
    if "throughput_vs_run_batch" not in batch:
        return ""
    rates = batch["tokens_per_s"]
    spelt = {arm: ", ".join(map(str, each)) for arm, each in rates.items()}
    return (
        f"With nobody calling, one replica of {_SEATS} seats does "
        f"{batch['throughput_vs_run_batch']:.0%} of what `vllm run-batch` does on the same file (tokens/s "
        f"by round: Forebay {spelt['forebay']}; run-batch {spelt['run_batch']}).\n"
    )


_SEATS = 32


def goals(result: Mapping[str, Any]) -> Sequence[str]:
    """Return each goal and whether this run met it, as lines of a list."""
    found = [
        (f"{_RUNGS[name]} p99 < {limit:g} s", result.get(name, {}).get("ready_s", {}), limit)
        for name, limit in GOALS.items()
    ]
    lines = [
        f"- {what}: {_met(spread.get('p99'), limit)}" for what, spread, limit in found if spread
    ]
    rung3 = result.get("rung3", {}).get("ready_s", {})
    for name, factor, what in (
        ("grace0", 1.0, "no slower than"),
        ("grace3", 0.2, "5× faster than"),
    ):
        theirs = result["slurm_preemption_s"].get(name, {})
        if rung3 and theirs:
            limit = factor * theirs["p50"]
            words = f"rung 3 {what} Slurm's own preemption, GraceTime={name.removeprefix('grace')}"
            lines.append(f"- {words} (medians): {_met(rung3['p50'], limit)}")
    ttft = result["interactive_ttft_ms"]
    for which, words in (("", "a few words"), ("_long", "long prompts")):
        limit = 1.1 * ttft[f"quiet{which}"]["p95"]
        met = _met(ttft[f"spike{which}"].get("p95"), limit)
        lines.append(f"- TTFT p95 within 1.1 of quiet, replica alone, {words}, ms: {met}")
    share = result["batch"].get("throughput_vs_run_batch")
    if share is not None:
        lines.append(f"- 95 % of run-batch: {'met' if share >= 0.95 else 'missed'} ({share:.1%})")
    late = sum(result.get(name, {}).get("late", 0) for name in _RUNGS)
    lines.append(f"- every trial came to its end: {'met' if not late else f'missed ({late})'}")
    wrong = result["batch"]["lost"] + result["batch"]["duplicated"]
    lines.append(f"- no line lost or told twice: {'met' if not wrong else f'missed ({wrong})'}")
    return lines


def _met(value: float | None, limit: float) -> str:
    if value is None:
        return "not measured"
    return f"{'met' if value <= limit else 'missed'} ({value:.3g} against {limit:.3g})"
