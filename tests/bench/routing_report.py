"""The figures of the routing bench as a table."""

from collections.abc import Mapping
from typing import Any

from tests.bench import gateway_report


def tables(result: Mapping[str, Any]) -> str:
    """Return the Markdown of a run."""
    there = gateway_report.machine()
    before, after = result["load_average"]
    head = (
        f"{there['date']}, {there['cpu']}, {there['cores']} cores, Linux {there['kernel']}, CPython "
        f"{there['python']}, load {before:.1f} before and {after:.1f} after; {result['decisions']:,} "
        f"decisions of a kind, {result['runs']} runs."
    )
    rows = [
        "| µs of CPU | p50 | p99 | most | p99 of one run |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, took in result["decision_us"].items():
        keys = ("p50", "p99", "max", "p99_one_run")
        rows.append(f"| {name} | {' | '.join(f'{took[key]:,.0f}' for key in keys)} |")
    view, index = result["view_ms"], result["index"]
    prints = ", ".join(
        f"{int(size) // 1024} KB {took['p50']:.0f} (p99 {took['p99']:.0f})"
        for size, took in result["fingerprint_us"].items()
    )
    notes = (
        f"A view of {result['replicas']} replicas: {view['statistics']:.1f} ms with new statistics, "
        f"{view['a role']:.1f} ms where a role has changed. A fingerprint, µs: {prints}. A full index "
        f"({index['pairs']:,.0f} pairs of replica and chunk, nothing shared): {index['mb']:.0f} MB, "
        f"{index['bytes_per_pair']:.0f} bytes a pair."
    )
    return "\n\n".join([head, "\n".join(rows), notes])
