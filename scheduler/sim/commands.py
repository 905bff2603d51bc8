"""`forebay plan` and `forebay simulate`: arguments in, text or JSON out."""

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from scheduler.contracts import command_line
from scheduler.sim import charts, pair, plan, policies, run, scenario


def plan_main(argv: Sequence[str], *, out: TextIO, err: TextIO) -> int:
    """Size a fleet from its traffic; return the exit code."""

    def body() -> int:
        made = command_line.Parser(
            "forebay plan",
            description="Size a fleet from its traffic; every formula and assumption is printed.",
            epilog="examples:\n  forebay plan large-site\n  forebay plan my-site.toml --cached 0 --json\n",
        )
        made.add_argument("scenario", metavar="SCENARIO", help="a .toml file or a shipped name")
        made.add_argument("--cached", type=float, help="share of prompt tokens that are cached")
        made.add_argument("--peak", type=float, help="requests/s at peak; the day grows with it")
        made.add_argument("--json", action="store_true", help="print JSON")
        asked = made.parse_args(list(argv))
        site = _changed(_load(asked.scenario), asked.cached, asked.peak)
        (plan.dump if asked.json else plan.show)(site, out)
        return 0

    return command_line.run("forebay plan", body, err=err)


def simulate_main(argv: Sequence[str], *, out: TextIO, err: TextIO) -> int:
    """Simulate a scenario under one policy or several; return the exit code."""

    def body() -> int:
        asked = _simulate_parser().parse_args(list(argv))
        site = _load(asked.scenario)
        changes = {
            name: getattr(asked, name)
            for name in ("hours", "start_hour", "seed")
            if getattr(asked, name) is not None
        }
        if not 0 < changes.get("hours", 1) < math.inf or not 0 < asked.factor <= 1:
            raise command_line.CommandError(
                "--hours and --factor: more than 0, the factor at most 1"
            )
        if not 0 <= changes.get("start_hour", 0) < math.inf:
            raise command_line.CommandError("--start-hour: a number of hours from 0")
        site = dataclasses.replace(site, **changes).scaled(asked.factor)
        names = [name for name in asked.policy.split(",") if name]
        if not names:
            raise command_line.CommandError(
                f"--policy: name some of {', '.join(policies.POLICIES)}"
            )
        for name in names:
            if name not in policies.POLICIES:
                known = ", ".join(policies.POLICIES)
                raise command_line.CommandError(
                    f"--policy {name}: no such policy; known are {known}"
                )
        try:
            if asked.beside:
                other = dataclasses.replace(_load(asked.beside), hours=site.hours)
                other = dataclasses.replace(other, start_hour=site.start_hour).scaled(asked.factor)
                _beside(site, other, names[0], out)
                return 0
            done = {name: run.simulate(site, name) for name in names}
        except scenario.ScenarioError as error:
            raise command_line.CommandError(str(error)) from error
        if asked.plot is not None:
            lines = {name: books.line for name, (_, books) in done.items()}
            charts.png(lines, site.fleet.gpus, asked.plot)
        if asked.json:
            found = {name: result for name, (result, _) in done.items()}
            data = {"scenario": site.name, "gpus": site.fleet.gpus, "factor": asked.factor}
            print(json.dumps({**data, "policies": found}), file=out)
            return 0
        for name, (result, books) in done.items():
            print(
                f"{site.name}, {site.fleet.gpus} GPUs, {name}: {policies.POLICIES[name].what}",
                file=out,
            )
            print(charts.terminal(books.line, site.fleet.gpus), file=out)
            print(charts.figures(result), file=out)
        return 0

    return command_line.run("forebay simulate", body, err=err)


def _beside(site: scenario.Scenario, other: scenario.Scenario, policy: str, out: TextIO) -> None:
    """Run two clusters side by side, with overflow of batch and without."""
    found = {
        "overflow": pair.simulate((site, other), policy),
        "apart": pair.simulate((site, other), policy, overflows=False),
    }
    print(json.dumps(found), file=out)


def _simulate_parser() -> command_line.Parser:
    made = command_line.Parser(
        "forebay simulate",
        description="Run a scenario in virtual time, with the planner that the broker runs.",
        epilog="examples:\n  forebay simulate large-site --factor 0.02\n"
        "  forebay simulate azure-code --policy static,full --json\n"
        "  forebay simulate my-site.toml --hours 2 --start-hour 8 --plot morning.png\n",
    )
    made.add_argument("scenario", metavar="SCENARIO", help="a .toml file or a shipped name")
    made.add_argument(
        "--policy",
        default="full",
        help=f"with commas: {', '.join(policies.POLICIES)} (%(default)s)",
    )
    made.add_argument(
        "--factor", type=float, default=1.0, help="of fleet and traffic (%(default)s)"
    )
    made.add_argument("--hours", type=float, help="how long; the scenario says otherwise")
    made.add_argument("--start-hour", type=float, help="hour of the day at which it begins")
    made.add_argument("--seed", type=int, help="of everything random")
    made.add_argument(
        "--beside",
        metavar="SCENARIO",
        help="a second cluster; batch may overflow to it; prints JSON",
    )
    made.add_argument("--plot", type=Path, metavar="FILE", help="write a PNG")
    made.add_argument("--json", action="store_true", help="print JSON")
    return made


def _load(name: str) -> scenario.Scenario:
    try:
        return scenario.load(scenario.find(name))
    except scenario.ScenarioError as error:
        raise command_line.CommandError(str(error)) from error


def _changed(
    site: scenario.Scenario, cached: float | None, peak: float | None
) -> scenario.Scenario:
    traffic = site.traffic
    if cached is not None:
        if not 0 <= cached < 1:
            raise command_line.CommandError(f"--cached {cached:g}: a share below 1 is wanted")
        traffic = dataclasses.replace(traffic, cached=cached)
    if peak is not None:
        if not 0 < peak < 1e9:
            raise command_line.CommandError(f"--peak {peak:g}: more than 0 is wanted")
        grown = peak / traffic.peak_rps if traffic.peak_rps else 1.0
        traffic = dataclasses.replace(
            traffic, peak_rps=peak, day_requests=traffic.day_requests * grown
        )
    return dataclasses.replace(site, traffic=traffic)
