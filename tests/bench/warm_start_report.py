"""The page docs/bench/warm-start.md, written from the figures of one run."""

from collections.abc import Mapping
from typing import Any

from scheduler.core import startup
from tests.contract import engine_vllm

PARKED_S, COLD_S = 3.0, 30.0  # goals, medians
PHASES = ("stage", "load", "compile")  # of `core.startup`: the others are Slurm's and the rest
WAYS: Mapping[str, str] = {
    "parked": "out of a parked process: told to sleep before, its slot's fork server has vLLM imported",
    "next": "another replica of a slot that is there: imported, forked anew",
    "new_slot": "a new slot: nothing is imported yet",
    "plain": "a new slot, the replica a plain child, as on real GPUs",
    "compiled_first": "the same without eager mode, nothing in the compile cache",
    "compiled_cached": "the same, with what that start left beside the weights",
}
_PAGE = """\
# From order to first token

{date}, {cpu}, {cores} cores, Linux {kernel}, CPython {python}, vLLM {vllm} on CPU.
Load before the run {load_before}. Written by `make bench-warm-start REPORT=1`.

A real agent, a real slot and real vLLM with a tiny model; the broker and the caller are played by the
bench. The clock starts when the wish is sent to the agent and stops at the first frame with a token.
`parked` and `next` are taken in turn in one slot. Eager mode but for the last two.

| way | p50, s | least | most | trials |
| --- | --- | --- | --- | --- |
{ways}

{words}

Where the time of one start goes, by what `fctl show replica` tells, s:

| way | {phases} |
| --- | {rule} |
{parts}

## Goals

{goals}

## Not measured

GPUs: what a driver and tens of gigabytes of weights add, compiled graphs and vLLM's own sleep. A slot's
job step, which Slurm starts in some 0.1 s; a lease, which waits in Slurm's queue. Weights were on the
node's disk."""


def page(found: Mapping[str, Any]) -> str:
    """Return the report's text."""
    times, phases = found["order_to_first_token_s"], found["phases_s"]
    known = [way for way in WAYS if way in times]
    told = [way for way in known if way in phases]
    return _PAGE.format(
        **found["machine"],
        vllm=engine_vllm.NEWEST,
        ways="\n".join(
            f"| `{way}` | {each['p50']:.2f} | {each['least']:.2f} | {each['most']:.2f} | {each['trials']} |"
            for way, each in ((way, times[way]) for way in known)
        ),
        words="\n".join(f"- `{way}`: {WAYS[way]}" for way in known),
        phases=" | ".join(PHASES),
        rule=" | ".join("---" for _ in PHASES),
        parts="\n".join(_parts(way, phases[way]) for way in told),
        goals="\n".join(goals(times)),
    )


def _parts(way: str, told: Mapping[str, float]) -> str:
    """Return a start's line."""
    found = startup.phases(told, queue_s=0.0, allocate_s=0.0, total_s=0.0)
    cells = (f"{found[name]:.2f}" if found.get(name) else "" for name in PHASES)
    return f"| `{way}` | " + " | ".join(cells) + " |"


def goals(times: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return each goal and whether this run met it."""
    lines = []
    for way, limit, words in (
        ("parked", PARKED_S, "out of a parked process"),
        ("new_slot", COLD_S, "without one"),
    ):
        each = times.get(way)
        if each is None:
            lines.append(f"- {words}: not measured")
            continue
        met = "met" if each["p50"] <= limit else "missed"
        lines.append(
            f"- {words}, p50 at most {limit:g} s: {met} ({each['p50']:.2f}, {each['trials']} trials)"
        )
    return lines
