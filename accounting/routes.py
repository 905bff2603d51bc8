"""The usage API below ``/forebay/v1/usage``, mounted by the gateway behind its authentication.

| path | rows |
| --- | --- |
| ``/requests`` | requests, attempts summed; ``attempts=1``: every attempt; ``lines=0``: no batch lines |
| ``/jobs`` | batch jobs |
| ``/leases`` | leases with GPU-µs |
| ``/rollup`` | tokens, GPU-µs, cost; ``by`` cluster, team, user, model, tier, endpoint; by ``unit`` |
| ``/waste`` | GPU time that answered nobody, by period and cause (admins) |
| ``/reconcile`` | leases in Forebay's and in Slurm's books; ``by=account``: accounts, in sreport's too |
| ``/bill`` | the lines of a month's bill; ``month`` as 2026-11 |

Parameters: ``start_us``, ``end_us`` (UTC µs); ``cluster``, ``team``, ``user``, ``model``, ``tier``,
``outcome``, ``job`` (`accounting.lists`); ``unit`` hour, day or month, and ``tz`` for a rollup's days;
``gpu=1`` adds to requests and jobs their share of the GPU time. An answer is ``{"window", "rows",
"truncated", "problems"}``; money is in micro-units.
Users see their own rows, coordinators their team's, admins all. GPU time that a lease held is the team's
business: for it a plain user is refused.
"""

import dataclasses
import datetime
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import fastapi

from accounting import (
    account_books,
    answers,
    billing,
    books,
    desk,
    lists,
    quantities,
    reconcile,
    reports,
    settings,
    summaries,
    waste,
    windows,
)
from scheduler.contracts import command_line, errors, requests, slurm

_Query = Annotated[str, fastapi.Query()]


@dataclasses.dataclass(frozen=True, slots=True)
class _Asked:
    """The parameters that every path takes, and who asks."""

    caller: requests.Caller
    window: windows.Window
    wanted: reports.Filter

    @property
    def scope(self) -> reports.Scope:
        if self.caller.admin:
            return reports.Scope()
        if self.caller.coordinator:
            return reports.Scope(self.caller.team)
        return reports.Scope(self.caller.team, self.caller.user)

    def team_scope(self) -> reports.Scope:
        scope = self.scope
        if scope.user is not None:
            raise errors.Forbidden(
                "leases and their GPU time are shown to coordinators and admins: ask your team's coordinator"
            )
        return scope


def _asked(request: fastapi.Request) -> _Asked | errors.ForebayError:
    given = request.query_params
    try:
        window = windows.Window(
            int(given.get("start_us", "0")), int(given.get("end_us", str(books.MAX_US)))
        )
    except ValueError:
        return errors.BadRequest("start_us and end_us are UTC microseconds, whole numbers")
    if not 0 <= window.start_us < window.end_us <= books.MAX_US:
        return errors.BadRequest("start_us must be before end_us", param="start_us")

    def listed(name: str) -> tuple[str, ...]:
        return lists.read(given.get(name, ""))

    try:
        wanted = reports.Filter(
            teams=listed("team"),
            users=listed("user"),
            models=listed("model"),
            tiers=listed("tier"),
            clusters=listed("cluster"),
            outcomes=listed("outcome"),
            jobs=listed("job"),
            lines=given.get("lines", "1") != "0",
        )
    except ValueError as error:
        return errors.BadRequest(str(error))
    caller: requests.Caller = request.state.caller
    return _Asked(caller, window, wanted)


_Ask = Annotated[_Asked | errors.ForebayError, fastapi.Depends(_asked)]
_Work = Callable[[_Asked], dict[str, Any]]


class _Usage:
    """The work behind the paths; every method blocks and runs in a thread."""

    def __init__(
        self,
        state_dir: Path,
        table: settings.Accounting,
        port: slurm.SlurmPort | None,
        accounts: slurm.AccountBooks | None,
        overlaps: waste.Overlaps,
    ) -> None:
        self._state_dir, self._table, self._overlaps = state_dir, table, overlaps
        self._books = books.Books(
            state_dir, memory_mb=table.memory_mb, at_most_s=table.report_at_most_s
        )
        self._billing = billing.Billing(state_dir, table)
        self._limit = table.rows_at_most
        self._weights = reports.Weights(table.prefill_weight, table.decode_weight)
        self._slurm = port
        self._accounts = accounts

    def requests(self, asked: _Asked, each_attempt: bool, gpu: bool) -> dict[str, Any]:
        window = asked.window
        with self._books.reading(window.start_us, window.end_us) as reading:
            rows = reports.requests(
                reading,
                asked.scope,
                asked.wanted,
                self._billing.price_list(),
                each_attempt=each_attempt,
                limit=self._limit + 1,
            )
            answer = self._answer(asked, rows, reading)
        return self._with_gpu(answer, window, gpu, each_attempt=each_attempt)

    def jobs(self, asked: _Asked, gpu: bool) -> dict[str, Any]:
        window, known = asked.window, self._billing.price_list()
        with self._books.reading(window.start_us, window.end_us) as reading:
            rows = reports.jobs(reading, asked.scope, asked.wanted, known, limit=self._limit + 1)
            answer = self._answer(asked, rows, reading)
        return self._with_gpu(answer, window, gpu)

    def _with_gpu(
        self,
        answer: dict[str, Any],
        window: windows.Window,
        wanted: bool,
        *,
        each_attempt: bool = False,
    ) -> dict[str, Any]:
        """Add each row's share of the GPU time; who ran beside it has to be read too, for hours around."""
        if wanted and answer["rows"]:
            arrived = [row["arrived_us"] for row in answer["rows"]]
            span = max(window.start_us, min(arrived)), min(window.end_us, max(arrived) + 1)
            first = max(0, span[0] - reports.LONGEST_REQUEST_US)
            last = min(span[1] + reports.LONGEST_REQUEST_US, books.MAX_US)
            with self._books.reading(first, last) as reading:
                problems = reports.add_gpu(
                    reading, answer["rows"], span, self._weights, each_attempt=each_attempt
                )
                answer["problems"] = _once((*answer["problems"], *reading.problems, *problems))
        return answer

    def leases(self, asked: _Asked) -> dict[str, Any]:
        scope, window = asked.team_scope(), asked.window
        with self._books.reading(window.start_us, window.end_us) as reading:
            clip = window.start_us, window.end_us
            found = reports.lease_times(reading, scope, asked.wanted, clip)
            return self._answer(asked, [dataclasses.asdict(each) for each in found], reading)

    def rollup(
        self, asked: _Asked, by: str, unit: str, tz: str, idle: str = "none"
    ) -> dict[str, Any]:
        if idle not in {"none", "use"}:
            raise errors.BadRequest("idle is none or use", param="idle")
        if by not in summaries.GROUPS:
            raise errors.BadRequest(f"by is one of {', '.join(summaries.GROUPS)}", param="by")
        try:
            cuts = windows.periods(asked.window, unit, windows.zone(tz))
        except ValueError as error:
            raise errors.BadRequest(str(error), param="unit") from error
        first = max(0, asked.window.start_us - reports.LONGEST_REQUEST_US)
        with self._books.reading(first, asked.window.end_us) as reading:
            known = self._billing.price_list()

            def made(rolled_us: int) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
                told = summaries.told(by, asked.scope, asked.wanted)
                taken = quantities.take(reading, cuts, known, self._weights, rolled_us, told)
                if idle == "use":
                    taken = quantities.share_idle(taken)
                rows = summaries.summary(
                    reading,
                    asked.scope,
                    asked.wanted,
                    by=by,
                    cuts=cuts,
                    taken=taken,
                    rolled_us=rolled_us,
                )
                return rows, taken.problems

            rows, unread = quantities.with_rollups(reading, cuts[0], made)
            answer = self._answer(asked, rows, reading)
            problems = _once((*reading.problems, *unread))
            more = {"problems": problems, "currency": self._billing.currency}
            return {**answer, **more, "whole": summaries.holds_nobodys(asked.scope, asked.wanted)}

    def waste(self, asked: _Asked, unit: str, tz: str) -> dict[str, Any]:
        if not summaries.holds_nobodys(asked.scope, asked.wanted):
            raise errors.Forbidden(
                "GPU time that is nobody's is shown to admins, and without -A, -u, -M, --model or --tier"
            )
        try:
            cuts = windows.periods(asked.window, unit, windows.zone(tz))
        except ValueError as error:
            raise errors.BadRequest(str(error), param="unit") from error
        rows, problems = waste.by_cause(
            self._state_dir, self._table, asked.window, cuts, self._overlaps()
        )
        return {
            "window": _window(asked),
            "rows": rows[: self._limit],
            "truncated": len(rows) > self._limit,
            "problems": _once(problems),
        }

    def reconcile(self, asked: _Asked) -> dict[str, Any]:
        scope = asked.team_scope()
        if self._slurm is None:
            raise errors.NotFound(
                "this gateway has no way to Slurm's accounting: ask the broker's host"
            )
        window = asked.window
        with self._books.reading(window.start_us, window.end_us) as reading:
            names = {lease.lease_id for lease in reports.lease_times(reading, scope, asked.wanted)}
            problems = reading.problems
        with self._books.reading() as reading:  # whole lives: Slurm's figure is of the whole job
            leases = reports.lease_times(reading, scope, reports.Filter(jobs=tuple(names)))
            problems = (*problems, *reading.problems)
        compared = reconcile.reconcile(self._slurm, leases if names else [])
        rows = [dataclasses.asdict(each) for each in compared]
        return {
            "window": _window(asked),
            "rows": rows,
            "truncated": False,
            "problems": _once(problems),
        }

    def by_account(self, asked: _Asked) -> dict[str, Any]:
        if not asked.caller.admin:
            raise errors.Forbidden("accounts are shown to admins: others compare their own leases")
        if self._slurm is None or self._accounts is None:
            raise errors.NotFound(
                "this gateway has no way to sreport: is Slurm's client installed?"
            )
        span = account_books.whole_hours(asked.window.start_us, asked.window.end_us)
        if span[0] >= span[1]:
            raise errors.BadRequest("sreport knows whole hours only: take a longer window")
        with self._books.reading(*span) as reading:
            leases = reports.lease_times(reading, asked.scope, asked.wanted, span)
            problems = reading.problems
        found = account_books.compare(self._slurm, self._accounts, leases, span)
        return {
            "window": {"start_us": span[0], "end_us": span[1]},
            "rows": [dataclasses.asdict(each) for each in found],
            "truncated": False,
            "problems": _once(problems),
        }

    def bill(self, asked: _Asked, month: str) -> dict[str, Any]:
        made = self._billing.month(known_month(month))
        wanted, scope = asked.wanted, asked.scope
        rows = [
            dataclasses.asdict(line)
            for line in made.lines
            if scope.sees(line.team, line.user)
            and (not wanted.teams or line.team in wanted.teams)
            and (not wanted.users or line.user in wanted.users)
            and (not wanted.models or line.model in wanted.models)
            and (not wanted.tiers or line.tier in wanted.tiers)
        ]
        return {
            "window": {"start_us": made.start_us, "end_us": made.end_us},
            "month": made.month,
            "zone": str(self._billing.tz),
            "scope_user": scope.user or "",
            "currency": self._billing.currency,
            "closed_us": 0 if made.closed is None else made.closed.at_us,
            "rows": rows[: self._limit],
            "total": sum(row["cost"] for row in rows),
            "truncated": len(rows) > self._limit,
            "problems": _once((*made.problems, *made.doubtful)),
        }

    def _answer(
        self, asked: _Asked, rows: list[dict[str, Any]], reading: books.Reading
    ) -> dict[str, Any]:
        return {
            "window": _window(asked),
            "rows": rows[: self._limit],
            "truncated": len(rows) > self._limit,
            "problems": _once(reading.problems),
        }


def router(
    state_dir: Path,
    *,
    table: settings.Accounting | None = None,
    port: slurm.SlurmPort | None = None,
    accounts: slurm.AccountBooks | None = None,
    overlaps: waste.Overlaps = dict,
) -> fastapi.APIRouter:
    """Return the routes over one state folder.

    Args:
        state_dir: Forebay's state folder, readable here.
        table: the settings; the defaults if not given.
        port: Slurm, for ``/reconcile``; without it that path answers 404.
        accounts: Slurm's books by account, for ``/reconcile?by=account``, likewise.
        overlaps: GPU-µs that rollovers held twice, by the hour's begin; blocks.
    """
    chosen = table or settings.Accounting()
    work = _Usage(state_dir, chosen, port, accounts, overlaps)
    places = desk.Desk(chosen.reports_at_once, chosen.reports_each, chosen.report_wait_s)

    async def _run(asked: _Asked | errors.ForebayError, act: _Work) -> fastapi.Response:
        if isinstance(asked, errors.ForebayError):
            return answers.refused(asked)
        try:
            async with places.place((asked.caller.team, asked.caller.user)):
                return await answers.answered(lambda: act(asked))
        except errors.Busy as error:
            return answers.refused(error)

    routes = fastapi.APIRouter(prefix="/forebay/v1/usage", tags=["usage"])

    @routes.get("/requests")
    async def _requests(asked: _Ask, attempts: _Query = "0", gpu: _Query = "0") -> fastapi.Response:
        return await _run(asked, lambda ask: work.requests(ask, attempts == "1", gpu == "1"))

    @routes.get("/jobs")
    async def _jobs(asked: _Ask, gpu: _Query = "0") -> fastapi.Response:
        return await _run(asked, lambda ask: work.jobs(ask, gpu == "1"))

    @routes.get("/leases")
    async def _leases(asked: _Ask) -> fastapi.Response:
        return await _run(asked, work.leases)

    @routes.get("/rollup")
    async def _rollup(
        asked: _Ask,
        by: _Query = "team",
        unit: _Query = "day",
        tz: _Query = "UTC",
        idle: _Query = "none",
    ) -> fastapi.Response:
        return await _run(asked, lambda ask: work.rollup(ask, by, unit, tz, idle))

    @routes.get("/bill")
    async def _bill(asked: _Ask, month: _Query = "") -> fastapi.Response:
        return await _run(asked, lambda ask: work.bill(ask, month))

    @routes.get("/waste")
    async def _waste(asked: _Ask, unit: _Query = "day", tz: _Query = "UTC") -> fastapi.Response:
        return await _run(asked, lambda ask: work.waste(ask, unit, tz))

    @routes.get("/reconcile")
    async def _reconcile(asked: _Ask, by: _Query = "lease") -> fastapi.Response:
        if by not in {"lease", "account"}:
            wrong = errors.BadRequest("by is lease or account", param="by")
            return await _run(wrong, work.reconcile)
        return await _run(asked, work.reconcile if by == "lease" else work.by_account)

    return routes


def known_month(text: str) -> str:
    """Return ``YYYY-MM`` if it is a month from 1970 on; raises `errors.BadRequest`."""
    try:
        windows.of_month(text, datetime.UTC)
    except command_line.CommandError as error:
        raise errors.BadRequest(error.message, param="month") from error
    return text


def _window(asked: _Asked) -> dict[str, int]:
    return {"start_us": asked.window.start_us, "end_us": asked.window.end_us}


def _once(lines: tuple[str, ...]) -> list[str]:
    return list(dict.fromkeys(lines))
