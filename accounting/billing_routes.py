"""/admin/rates, /admin/adjustments and /admin/closings: what admins decide about money.

Everybody with a credential may read the rates; everything else is an admin's. There is no change and no
delete: what was wrong is put right by another posting. /admin/usage-metrics has the ledger's counters for
Prometheus; let it scrape one gateway, since all say the same.
"""

import dataclasses
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Annotated, Any

import fastapi
import pydantic

from accounting import answers, billing, exporter, money, rates, routes, settings
from scheduler.contracts import clock, errors, requests, times


def _printable(text: str) -> str:
    if not text.isprintable() or text != text.strip():
        raise ValueError("must be printable, on one line, without spaces at its ends")
    return text


Teams = Callable[[], Collection[str]]
Word = Annotated[
    str, pydantic.Field(min_length=1, max_length=256), pydantic.AfterValidator(_printable)
]


class NewRates(pydantic.BaseModel):
    """Prices from a moment on; amounts are decimal texts, per 1,000 tokens or per GPU-hour.

    `from_us` 0 means now.
    """

    model_config = pydantic.ConfigDict(extra="forbid")

    model: Word = rates.ANY
    tier: requests.Tier | None = None
    prices: dict[rates.Use, str] = pydantic.Field(min_length=1)
    from_us: int = pydantic.Field(0, ge=0, le=times.LAST_US)
    reason: Word


class NewAdjustment(pydantic.BaseModel):
    """An amount added to a team's bill (negative: a credit)."""

    model_config = pydantic.ConfigDict(extra="forbid")

    team: Word
    amount: str
    month: str
    reason: Word
    force: bool = False


class NewClosing(pydantic.BaseModel):
    """A month whose bill shall not change any more."""

    model_config = pydantic.ConfigDict(extra="forbid")

    month: str
    reason: str = ""


def router(
    state_dir: Path,
    *,
    table: settings.Accounting,
    time: clock.Clock,
    teams: Teams = frozenset,
) -> fastapi.APIRouter:
    """Return the routes; the app must set ``request.state.caller``.

    Args:
        state_dir: Forebay's state folder.
        table: the settings.
        time: the clock.
        teams: names the teams that exist although they have used nothing yet; it blocks, and raises
            `errors.NoReplica` where nobody can tell.
    """
    books = billing.Billing(state_dir, table)
    paths = fastapi.APIRouter(prefix="/admin", tags=["billing"])

    @paths.get("/rates")
    async def _rates() -> fastapi.Response:
        def body() -> dict[str, Any]:
            found = [dataclasses.asdict(rate) for rate in books.price_list().all]
            return {"rates": found, "currency": books.currency, "zone": str(books.tz)}

        return await answers.answered(body)

    @paths.post("/rates")
    async def _add(request: fastapi.Request, wish: NewRates) -> fastapi.Response:
        def body() -> dict[str, Any]:
            who, now_us = _admin(request), time.wall_us()
            prices = {use: _amount(text, use.value) for use, text in wish.prices.items()}
            since = wish.from_us or books.priced_until(now_us)
            wanted = rates.body(wish.model, wish.tier or rates.ANY, prices, since)
            made = books.add_rates(wanted, author=who, reason=wish.reason, now_us=now_us)
            return {"posting": made.number, **wanted}

        return await answers.answered(body, 201)

    @paths.post("/adjustments")
    async def _adjust(request: fastapi.Request, wish: NewAdjustment) -> fastapi.Response:
        def body() -> dict[str, Any]:
            who, month = _admin(request), routes.known_month(wish.month)
            micro = _amount(wish.amount, "amount", signed=True)
            if not wish.force and not books.knows(wish.team):
                _known(wish.team, teams)
            line = books.adjust(
                wish.team, micro, month, author=who, reason=wish.reason, now_us=time.wall_us()
            )
            return dataclasses.asdict(line)

        return await answers.answered(body, 201)

    @paths.get("/closings")
    async def _closings(request: fastapi.Request) -> fastapi.Response:
        def body() -> dict[str, Any]:
            _admin(request)
            return {"closings": [dataclasses.asdict(each) for each in books.closings()]}

        return await answers.answered(body)

    @paths.post("/closings")
    async def _close(request: fastapi.Request, wish: NewClosing) -> fastapi.Response:
        def body() -> dict[str, Any]:
            who, month = _admin(request), routes.known_month(wish.month)
            made = books.close(month, author=who, reason=wish.reason, now_us=time.wall_us())
            return dataclasses.asdict(made)

        return await answers.answered(body, 201)

    counters = exporter.UsageCounters(state_dir, table, time)

    @paths.get("/usage-metrics")
    async def _metrics(request: fastapi.Request) -> fastapi.Response:
        def body() -> dict[str, Any]:
            _admin(request)
            return {"text": counters.text()}

        return await answers.answered(body, text_type=exporter.PATH_TYPE)

    return paths


def _known(team: str, teams: Teams) -> None:
    if team not in teams():
        raise errors.BadRequest(
            f"team {team}: nothing is recorded of it, and it has no account in Slurm and no API key: "
            "check the name, or --force",
            param="team",
        )


def _admin(request: fastapi.Request) -> str:
    """Return the admin who asks."""
    caller: requests.Caller = request.state.caller
    if not caller.admin:
        raise errors.Forbidden(f"user {caller.user} is no admin: ask one to do this")
    return caller.user


def _amount(text: str, param: str, *, signed: bool = False) -> int:
    try:
        micro = money.read(text)
    except ValueError as error:
        raise errors.BadRequest(f"{param}: {error}", param=param) from error
    if micro < 0 and not signed:
        raise errors.BadRequest(f"{param}: a price can't be negative", param=param)
    if micro > money.MOST_PRICE and not signed:
        most = money.MOST_PRICE // money.MICRO
        raise errors.BadRequest(
            f"{param}: {text} is more than {most} for 1,000 tokens or a GPU-hour: check the price",
            param=param,
        )
    if signed and not micro:
        raise errors.BadRequest("an adjustment of nothing: give an amount", param=param)
    return micro
