"""`forebay plan` and `forebay simulate`: arguments in, text or JSON out."""

import dataclasses
from collections.abc import Sequence
from typing import TextIO

from scheduler.contracts import command_line
from scheduler.sim import plan, scenario


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
