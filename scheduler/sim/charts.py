"""A day as a picture: in the terminal and as PNG."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Line = Sequence[tuple[float, float, float, float, float, float]]
ROWS, COLUMNS = 12, 72
MARKS = ("█", "▒", "░")  # interactive, batch, starting


def terminal(line: Line, gpus: int) -> str:
    """Return a chart of GPUs by hour: interactive, batch and starting, one over the other."""
    if not line:
        return "nothing was measured\n"
    points = _thinned(line, COLUMNS)
    rows: list[str] = []
    for row in range(ROWS, 0, -1):
        level = (row - 0.5) / ROWS * gpus
        cells = []
        for _, interactive, batch, starting, _, _ in points:
            edges = (interactive, interactive + batch, interactive + batch + starting)
            mark = next((m for m, edge in zip(MARKS, edges, strict=True) if level <= edge), " ")
            cells.append(mark)
        rows.append(f"{round(row / ROWS * gpus):6d} |{''.join(cells)}")
    first, last = points[0][0], points[-1][0]
    rows.append(f"{'GPUs':>6} +{'-' * len(points)}")
    rows.append(f"{'':8}{first % 24:.1f} h{' ' * max(1, len(points) - 14)}{last % 24:.1f} h")
    rows.append(
        f"{'':8}{MARKS[0]} interactive and shared  {MARKS[1]} batch alone  {MARKS[2]} starting"
    )
    return "\n".join(rows) + "\n"


def figures(result: Mapping[str, Any]) -> str:
    """Return a policy's figures, a line each."""
    ttft = result["ttft_ms"]
    waste = ", ".join(f"{cause} {share:.1%}" for cause, share in result["waste_share"].items())
    rungs = ", ".join(
        f"{rung} {each['p50']:g}/{each['p99']:g} s ({each['n']})"
        for rung, each in result["reclaim_s"].items()
    )
    return "\n".join(
        [
            f"  utilisation          {result['utilisation']:.1%} useful, {result['busy']:.1%} busy; "
            f"lost to {waste}",
            f"  TTFT p50/p95/p99     {ttft['p50']:g} / {ttft['p95']:g} / {ttft['p99']:g} ms",
            f"  time a token p99     {result['tpot_ms_p99']:g} ms; "
            f"19 of 20 streams at {result['tokens_per_s_p5']:g} tokens/s or more",
            f"  answered, worst      {result['availability_min']:.4%}; {result['requests']} requests in all",
            f"  batch                {result['batch_tokens']:,} tokens, "
            f"{result['batch_deadlines_met']:.1%} of jobs in time; lent {_share(result['gaps']['share'])} "
            "of the GPU time that callers left",
            f"  order to ready       p50/p99 {rungs}",
        ]
    )


def _share(share: float | None) -> str:
    return "none" if share is None else f"{share:.1%}"


def png(lines: Mapping[str, Line], gpus: int, path: Path) -> None:
    """Write one panel a policy: GPUs by use, and the request rate."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(
        len(lines), 1, figsize=(10, 2.6 * len(lines)), sharex=True, squeeze=False
    )
    for (name, line), panel in zip(lines.items(), panels[:, 0], strict=True):
        hours = [point[0] for point in line]
        stack = [[point[n] for point in line] for n in (1, 2, 3)]
        panel.stackplot(
            hours,
            stack,
            labels=("interactive and shared", "batch alone", "starting"),
            colors=("#2b6cb0", "#9ccc65", "#f6ad55"),
        )
        panel.set_ylim(0, gpus * 1.05)
        panel.set_ylabel("GPUs")
        panel.set_title(name, loc="left", fontsize=10)
        rate = panel.twinx()
        rate.plot(hours, [point[4] for point in line], color="black", linewidth=0.8)
        rate.set_ylim(bottom=0)
        rate.set_ylabel("requests/s")
    panels[0, 0].legend(loc="upper left", fontsize=8)
    panels[-1, 0].set_xlabel("hour of the day")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _thinned(line: Line, most: int) -> Line:
    step = max(1, len(line) / most)
    return [line[int(n * step)] for n in range(int(len(line) / step))]
