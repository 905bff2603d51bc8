"""`forebay plan`: how many GPUs a scenario's traffic needs, with every formula and assumption in the open."""

import dataclasses
import json
import math
from typing import Any, TextIO

from scheduler.core import sizing
from scheduler.sim import scenario


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One model's figures; `reference_*` is the simple count (prefill and decode each at its own rate)."""

    model: str
    gpus_a_replica: int
    kv_bytes_a_token: int
    kv_tokens: int
    sequences_that_fit: int
    requests_per_s: float
    sequences_at_speed: float
    decode_tokens_per_s: float
    bound: str
    peak_rps: float
    replicas_peak: int
    gpus_peak: int
    replicas_night: int
    gpus_night: int
    reference_replicas: float
    reference_gpus: float


def rows(site: scenario.Scenario) -> list[Row]:
    """Return a row for each model that takes requests."""
    load = site.traffic.load
    found: list[Row] = []
    for model in site.models:
        if not model.share:
            continue
        room = sizing.capacity(
            model.step,
            load,
            kv_tokens=model.shape.kv_tokens,
            seats=model.seats,
            tokens_per_s=site.slo.tokens_per_s,
        )
        peak = site.traffic.peak_rps * model.share
        most = max(model.floor, _ceil(peak / room.requests_per_s))
        least = max(model.floor, _ceil(peak * site.traffic.night() / room.requests_per_s))
        plain = 0.0
        if model.reference_decode and model.reference_prefill:
            plain = peak * (
                load.prompt / model.reference_prefill + load.output / model.reference_decode
            )
        found.append(
            Row(
                model=model.name,
                gpus_a_replica=model.shape.gpus,
                kv_bytes_a_token=model.shape.kv_bytes,
                kv_tokens=model.shape.kv_tokens,
                sequences_that_fit=int(model.shape.kv_tokens // (load.prompt + load.output)),
                requests_per_s=round(room.requests_per_s, 2),
                sequences_at_speed=round(room.sequences, 1),
                decode_tokens_per_s=round(
                    sizing.decode_rate(model.step, room.sequences, load.length), 0
                ),
                bound=room.bound,
                peak_rps=peak,
                replicas_peak=most,
                gpus_peak=most * model.shape.gpus,
                replicas_night=least,
                gpus_night=least * model.shape.gpus,
                reference_replicas=round(plain, 1),
                reference_gpus=round(plain * model.shape.gpus, 1),
            )
        )
    return found


def as_json(site: scenario.Scenario) -> dict[str, Any]:
    """Return the plan as plain data."""
    found = rows(site)
    return {
        "scenario": site.name,
        "assumptions": assumptions(site),
        "models": [dataclasses.asdict(row) for row in found],
        "gpus": {
            "peak": sum(row.gpus_peak for row in found),
            "night": sum(row.gpus_night for row in found),
            "reference": round(sum(row.reference_gpus for row in found), 1),
            "fleet": site.fleet.gpus,
        },
        "why_it_differs": reasons(site, found),
    }


def assumptions(site: scenario.Scenario) -> list[str]:
    """Return what the plan takes for granted, one line each."""
    traffic, slo = site.traffic, site.slo
    return [
        f"peak {traffic.peak_rps:g} requests/s, {traffic.day_requests:g} a day, so the night has "
        f"{traffic.night():.1%} of the peak",
        f"a request: {traffic.prompt:g} prompt tokens of which {traffic.cached:.0%} are cached, "
        f"{traffic.output:g} output tokens",
        f"every stream gets {slo.tokens_per_s:g} tokens/s on average; nothing is kept for bursts or failures",
        "a step takes a + b*prefill tokens + c*sequences + d*KV tokens (ms), per model in the scenario",
        "a GPU's overhead (activations, graphs, runtime) is the scenario's; GB are 10^9 bytes",
    ]


FORMULAS = (
    "KV bytes a token = 2 x layers x KV heads x head dim x bytes a value",
    "KV tokens = (GPUs x (memory - overhead) - weights) / KV bytes a token",
    "sequences that fit = KV tokens / (prompt + output)",
    "s(n) = a + n (c + d (prompt + output / 2))",
    "v s(n) = 1 - rate x computed prompt x b, with n = rate x output / v   (v: tokens/s of a stream)",
    "requests/s a replica = (1 - v a) / (computed prompt x b + output (c + d (prompt + output / 2)))",
    "replicas = max(floor, ceil(requests/s / requests/s a replica)), GPUs = replicas x GPUs a replica",
    "reference: replicas = requests/s x (prompt / prefill rate + output / decode rate)",
)


def reasons(site: scenario.Scenario, found: list[Row]) -> list[str]:
    """Return why the plan is not the simple count, one line a model."""
    lines: list[str] = []
    for row, model in zip(found, [m for m in site.models if m.share], strict=True):
        if not row.reference_replicas:
            continue
        decoding = row.decode_tokens_per_s
        change = row.replicas_peak / row.reference_replicas - 1
        cached = (
            f"; {site.traffic.cached:.0%} of the prompt is cached, which the reference counts in full"
            if site.traffic.cached
            else ""
        )
        lines.append(
            f"{row.model}: {row.gpus_peak} GPUs, reference {row.reference_gpus:.0f} ({change:+.0%}): at "
            f"{site.slo.tokens_per_s:g} tokens/s a stream {row.sequences_at_speed:g} sequences share a step, "
            f"which decodes {decoding:g} tokens/s where the reference takes "
            f"{model.reference_decode:g}{cached}"
        )
    return lines


def show(site: scenario.Scenario, out: TextIO) -> None:
    """Print the plan."""
    data = as_json(site)
    print(f"Plan for {site.name}", file=out)
    print("\nFormulas", file=out)
    for line in FORMULAS:
        print(f"  {line}", file=out)
    print("\nAssumptions", file=out)
    for line in data["assumptions"]:
        print(f"  {line}", file=out)
    for model in data["models"]:
        print(f"\n{model['model']}", file=out)
        kib = model["kv_bytes_a_token"] / 1024
        print(f"  KV cache            {kib:g} KiB a token, {model['kv_tokens']:,} tokens", file=out)
        print(f"  sequences           {model['sequences_that_fit']} fit", file=out)
        print(
            f"  a replica           {model['requests_per_s']:g} requests/s, "
            f"{model['sequences_at_speed']:g} sequences at once (bound by {model['bound']}), "
            f"{model['gpus_a_replica']} GPUs",
            file=out,
        )
        print(
            f"  at {model['peak_rps']:g} requests/s  {model['replicas_peak']} replicas, "
            f"{model['gpus_peak']} GPUs; at night {model['replicas_night']} and {model['gpus_night']}",
            file=out,
        )
    gpus = data["gpus"]
    print(
        f"\nGPUs: {gpus['peak']} at peak, {gpus['night']} at night, of {gpus['fleet']}; "
        f"reference {gpus['reference']:g}",
        file=out,
    )
    for line in data["why_it_differs"]:
        print(f"  {line}", file=out)


def dump(site: scenario.Scenario, out: TextIO) -> None:
    """Print the plan as JSON."""
    print(json.dumps(as_json(site), indent=2), file=out)


def _ceil(value: float) -> int:
    return math.ceil(value - 1e-9)
