"""The figures of the prefix bench as a table."""

from collections.abc import Mapping
from typing import Any

from tests.bench import gateway_report

_NAMES = {
    "random": "random",
    "round_robin": "round-robin",
    "vllm_router": "vllm-router",
    "forebay": "Forebay",
    "forebay_events": "Forebay, hearing KV events",
    "random_direct": "random, no router",
    "round_robin_direct": "round-robin, no router",
    "forebay_direct_2048": "Forebay's choices, no hop",
}


def tables(result: Mapping[str, Any]) -> str:
    """Return the Markdown of a run."""
    there = gateway_report.machine()
    head = (
        f"{there['date']}, {there['cpu']}, {there['cores']} cores, Linux {there['kernel']}, CPython "
        f"{there['python']}, load {result['load_average']:.1f} at the end; vLLM {result['versions']['vllm']} "
        f"(CPU), vllm-router {result['versions']['vllm_router']}. "
        f"{result['requests']} requests, {result['blocks']} KV blocks a replica, {result['at_once']} at once."
    )
    arms = list(result["ttft_ms_mean"])
    columns = [_NAMES.get(arm, arm) for arm in arms]
    rows = [f"| | {' | '.join(columns)} |", f"| --- |{' --- |' * len(arms)}"]

    def row(name: str, cells: Mapping[str, str]) -> None:
        rows.append(f"| {name} | {' | '.join(cells.get(arm, '') for arm in arms)} |")

    def each(key: str) -> dict[str, str]:
        return {arm: f"{result[key][arm]:,.0f}" for arm in arms}

    row("prompt tokens from cache", {a: f"{result['prefix_hit_share'][a]:.1%}" for a in arms})
    row("of the oracle's", {arm: f"{share:.1%}" for arm, share in result["of_oracle"].items()})
    row("TTFT, mean, ms", each("ttft_ms_mean"))
    row("TTFT, p95, ms", each("ttft_ms_p95"))
    row("its spread over slices (σ), ms", each("ttft_ms_slices_stdev"))
    row("whole answer, mean, ms", each("whole_ms_mean"))
    engine = result["engine"]
    row("TTFT as the engine measures it, ms", {a: f"{engine[a]['first_ms']:,.0f}" for a in arms})
    row("of this computing the prompt, ms", {a: f"{engine[a]['prefill_ms']:,.0f}" for a in arms})
    row(
        "what lies before and after the engine, ms",
        {a: f"{result['ttft_ms_mean'][a] - engine[a]['first_ms']:,.0f}" for a in arms},
    )
    row("requests of the busiest replica", {a: f"{engine[a]['busiest']:.0%}" for a in arms})
    notes = f"The oracle: {result['prefix_hit_share']['oracle']:.1%}. Failed: {_failed(result['failed'])}."
    if (gateway := engine.get("forebay", {})).get("gateway_first_ms"):
        notes += (
            f" In Forebay's gateway a request was dispatched {gateway['gateway_dispatched_ms']:.1f} ms after "
            f"it had come, and had its first token after {gateway['gateway_first_ms']:.0f} ms."
        )
    return "\n\n".join([head, "\n".join(rows), notes])


def _failed(failed: Mapping[str, int]) -> str:
    return ", ".join(f"{_NAMES.get(arm, arm)} {n}" for arm, n in failed.items() if n) or "none"
