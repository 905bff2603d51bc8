"""The page that `make simulate-day REPORT=1` writes."""

from collections.abc import Mapping, Sequence
from typing import Any

from scheduler.sim import policies
from tests.bench import simulation

METHOD = """\
`make simulate-day REPORT=1` writes this page and the picture beside it.

Virtual time; every decision is made by `scheduler.core.plan`, the planner that the broker runs: the
simulator gives it the broker's snapshot and carries out its actions. Engines follow the step-time model t =
a + b·prefill + c·decode + d·KV (`scheduler/sim/engine.py`, held against the step-by-step engine in
`tests/unit/sim/test_engine.py`); its coefficients and their reasons stand in the scenario
(`scheduler/sim/data/large-site.toml`). They are chosen so that a replica gives the reference's rates (4k
decode and 30k prefill tokens/s a small GPU, 2.5k and 15k a large replica), not measured on a GPU. Prompts
and outputs are log-normal, arrivals Poisson around a raised cosine with correlated bursts and spikes; 30 %
of the prompt tokens are cached, the least that real vLLM gave behind Forebay's router (`prefix.md`). Cold
starts take 2 to 5 minutes, a wake out of host memory 2 s and the copy. Slurm has other users' jobs on nodes
of their own, passes two seconds apart, nodes that fail, walltimes that end.

Utilisation is what the work is worth over all GPU-seconds of the fleet, held or not: a request counts for
the GPU-seconds that it takes on a replica filled as far as 40 tokens/s a stream allow (`forebay plan`'s
formula), a batch token for what it takes on a replica that batch has to itself. Busy is the share of
GPU-seconds in which an engine stepped, less what was computed twice: a replica that steps all night for one
stream is busy and all but useless. A request's stream speed is (output - 1) over the time from its first to
its last token. TTFT is of prompts up to 4,096 tokens, longer ones stand in the table of models. `answered,
worst` is the least answered of the models.
"""

READING = """\
Static and lease-only replicas have no batch beside callers, so their first tokens come a little sooner than
where batch shares the step; the goal's tolerance is there for that. What it costs them is utilisation, and
the static partition also the deadlines of batch jobs. Without a forecast utilisation and TTFT are as good;
what suffers is the speed of streams while replicas start. White in the picture are GPUs that nobody held:
batch was done before the hour's next jobs came.
"""

GAPS = """\
Of a replica callers need the part of a 40 tokens/s step that their own prompts and tokens take, its base
included; the rest, and every GPU without a replica, is left. Lent is what is left of replicas in which batch
runs. Starts are neither; GPU time left while no batch job had work is apart too, for nobody could use it.
On the chat platform eleven of thirteen models have no batch work of their own, and no other model can use
what their callers leave of a replica: "beside callers" is that.
"""

CALIBRATION = """\
`make bench-calibration REPORT=1` fits the step-time model to real vLLM (CPU build, the tiny model) on some
loads and judges the simulator's engine by three others; TTFT p50 and tokens/s are to agree within 20 %.

<!-- calibration: written by the bench -->
Not measured yet.
<!-- end of calibration -->
"""

NOT_MEASURED = """\
- Nothing ran on a GPU: with other coefficients every figure moves. With twice the base time a step, a
  replica takes 39 to 47 % fewer requests at 40 tokens/s a stream.
- The router is the least loaded of at most sixteen replicas; prefix affinity is a share of cached tokens,
  not a tree.
- Batch sequences are a steady stream, not lines; the time that a preempted line's cache is computed again
  is counted.
- Without cached prompts the peak needs 1,439 GPUs of the 1,350 (`forebay plan large-site --cached 0`):
  streams would be slower than 40 tokens/s for the two hours around it.
- Rung 0 is the step under way when aborts are next counted, 0 where the engine was idle by then.
- An engine that is idle takes batch again at the next request, not at once; traces with long pauses show it.
- The code trace's answers have 28 tokens: one prompt in between halves a stream's speed, whatever the policy.
- Rung 1 is the wait for one step of the deep batch; the broker's tick and the agent's hop are `make
  bench-reclaim`'s.
"""


def page(found: Mapping[str, Any], picture: str, machine: str) -> str:
    """Return the page."""
    full = found["policies"]["full"]
    parts = [
        "# A simulated day, policies side by side",
        METHOD,
        f"Run on {machine}; {_cpu_s(found) / 60:.0f} minutes of CPU time in all.",
        f"## The large site, {full['gpus']} GPUs of it",
        _policies(found["policies"]),
        "\n".join(f"- `{name}`: {each.what}" for name, each in policies.POLICIES.items()),
        f"![GPUs by use over the day]({picture})",
        "## What it must show",
        _goals(found["goals"]),
        READING,
        "## By model and tier",
        _models(found["policies"]),
        "## Where the other GPU-seconds went",
        _table(
            ("policy", *full["waste_share"]),
            [
                (
                    name,
                    *(
                        f"{share:.2%} ({result['waste_gpu_s'][cause] / 3600:,.1f} h)"
                        for cause, share in result["waste_share"].items()
                    ),
                )
                for name, result in found["policies"].items()
            ],
        ),
        "In brackets GPU-hours of the simulated fleet. Successors that start beside their predecessors take "
        + ", ".join(f"{name} {r['overlap_gpu_h']:g}" for name, r in found["policies"].items())
        + " GPU-hours on top.",
        "## Batch in the gaps",
        GAPS,
        _gaps(found),
        "## From order to ready, p50 / p99 in seconds (how often)",
        _table(
            ("policy", *full["reclaim_s"]),
            [
                (name, *(_rung(each) for each in result["reclaim_s"].values()))
                for name, result in found["policies"].items()
            ],
        ),
        "## Scaled down, and at full scale",
        _scaled(found),
        "## The chat platform, half of it",
        _policies(found["chat_platform"]),
        _models(found["chat_platform"]),
        "## Recorded traces",
        _policies(found["traces"]),
        "## Held against real vLLM",
        CALIBRATION,
        "## Not measured, and what would change the figures",
        NOT_MEASURED,
    ]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _gaps(found: Mapping[str, Any]) -> str:
    """Return what batch got of the time that callers left, for every policy and the chat platform."""
    rows = []
    chat = {f"chat platform, {name}": each for name, each in found["chat_platform"].items()}
    for name, result in (found["policies"] | chat).items():
        gaps = result["gaps"]
        why = ", ".join(f"{cause} {s / 3600:,.1f}" for cause, s in gaps["unlent_gpu_s"].items())
        rows.append(
            (
                name,
                f"{gaps['share']:.2%}" if gaps["share"] is not None else "",
                f"{gaps['lent_gpu_s'] / 3600:,.1f} of {gaps['left_gpu_s'] / 3600:,.1f}",
                why,
                f"{gaps['start_gpu_s'] / 3600:,.1f}",
                f"{gaps['no_work_gpu_s'] / 3600:,.1f}",
            )
        )
    header = ("policy", "lent", "GPU-hours", "not lent", "starts", "left without batch work")
    return _table(header, rows)


def _cpu_s(found: Mapping[str, Any]) -> float:
    groups = ("policies", "convergence", "ten_minutes", "chat_platform", "traces")
    # The compared factor stands in two groups.
    parts = {id(each): each for group in groups for each in found[group].values()}
    return sum(float(each.get("cpu_s", 0.0)) for each in parts.values())


def _policies(results: Mapping[str, Mapping[str, Any]]) -> str:
    header = (
        "policy", "utilisation (busy)", "TTFT p50 / p95 / p99 ms", "time a token p99 ms", "tokens/s, p5",
        "answered, worst", "batch M tokens", "jobs in time",
    )  # fmt: skip
    rows = []
    for name, each in results.items():
        rows.append(
            (
                name,
                f"{each['utilisation']:.1%} ({each['busy']:.0%})",
                _times(each["ttft_ms"]),
                f"{each['tpot_ms_p99']:.1f}",
                f"{each['tokens_per_s_p5']:.1f}",
                f"{each['availability_min']:.3%}",
                f"{each['batch_tokens'] / 1e6:,.0f}",
                f"{each['batch_deadlines_met']:.0%}",
            )
        )
    return _table(header, rows)


def _times(ttft: Mapping[str, float]) -> str:
    return " / ".join(f"{ttft[percent]:.0f}" for percent in ("p50", "p95", "p99"))


def _models(results: Mapping[str, Mapping[str, Any]]) -> str:
    header = (
        "model", "policy", "TTFT p50 / p95 / p99 ms", "the same, longer prompts", "tokens/s, p50 and p5",
        "answered of requests", "tokens a GPU-hour: callers, batch",
    )  # fmt: skip
    rows = []
    for name, result in results.items():
        for model, hourly in result["tokens_per_gpu_hour"].items():
            each = result["models"].get(model)
            asked = each["answered"] + each["refused"] if each else 0
            rows.append(
                (
                    model,
                    name,
                    _times(each["ttft_ms"]) if each else "",
                    _times(each["ttft_long_ms"]) if each else "",
                    f"{each['tokens_per_s_p50']:.0f}, {each['tokens_per_s_p5']:.0f}"
                    if each
                    else "",
                    f"{each['availability']:.3%} of {asked:,}" if each else "",
                    f"{hourly['interactive']:,}, {hourly['batch']:,}",
                )
            )
    return _table(header, sorted(rows, key=lambda row: row[0]))


def _goals(goals: Mapping[str, bool]) -> str:
    texts = {name: text for name, (text, _) in simulation.GOALS.items()}
    texts |= {
        f"chat_{name}": f"chat platform: {text}"
        for name, (text, _) in simulation.CHAT_GOALS.items()
    }
    texts["no_worse_than_any"] = (
        "no worse than any other policy on utilisation (to a point) and TTFT p95 (to 5 ms)"
    )
    texts["better_on_one"] = (
        "better than each by more than that on one of these, or by 1 token/s on the slowest streams"
    )
    return _table(
        ("goal", "met"), [(texts[n], "yes" if met else "**no**") for n, met in goals.items()]
    )


def _scaled(found: Mapping[str, Any]) -> str:
    factors = sorted(found["convergence"], key=lambda name: int(name.split("/")[1]))
    rows = {name: found["convergence"][name] for name in factors}
    minutes = found["ten_minutes"]
    rows |= {f"{name}, ten minutes from 9:00": minutes[name] for name in sorted(minutes)}
    apart = ", ".join(f"{name} {share:.1%}" for name, share in found["apart"].items())
    text = f"\n\nThe two larger factors are apart by: {apart}." if apart else ""
    return _policies(rows) + text


def _rung(each: Mapping[str, float]) -> str:
    return f"{each['p50']:g} / {each['p99']:g} ({each['n']:g})" if each["n"] else ""


def _table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [header, tuple("---" for _ in header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
