"""Keeps an owner's book of quotas in step with the registry.

About every second, off the event loop: what was settled goes to the registry as differences, and limits
and sums that others have changed come back. While the registry does not answer, the last known limits
stay in force and differences gather. An owner that dies loses the differences of the last second and
what was in flight; the check against the ledger makes that good.
"""

import asyncio
import logging
import os
import secrets
import socket
from collections.abc import Callable

from sqlalchemy import exc

from scheduler.contracts import clock, quota
from scheduler.core import quota as books
from scheduler.core import quota_limits as limits
from scheduler.runtime import apart, quota_metrics
from scheduler.runtime.registry import quotas

log = logging.getLogger(__name__)
RUNNING_TICKS = 2  # exchanges between two words on what runs now: for people, not for decisions
NOTICES = 1000
CLOSE_S = 5.0  # for the last differences: no database that hangs keeps a gateway from its end
_DAY_US = 86_400_000_000
_FORGET_US = 32 * _DAY_US  # sums of windows that no claim can fall into any more


class Keeper:
    """The book of this process, and the task that carries its news.

    Attributes:
        book: takes claims.
        numbers: what Prometheus may ask of it.

    Args:
        registry: the registry's quotas.
        time: this process's clock.
        pricing: what tokens cost, for budgets.
        refresh_prices: called in a thread before each exchange, to take in new rates; what it raises is
            logged, and the last rates stay.
        refresh_s: seconds between two exchanges.
        warn_percent: share of a day's or month's limit at which to warn.
    """

    def __init__(
        self,
        registry: quotas.Quotas,
        time: clock.Clock,
        pricing: quota.Pricing | None = None,
        *,
        refresh_prices: Callable[[], None] = lambda: None,
        refresh_s: float = 1.0,
        warn_percent: int = 80,
    ) -> None:
        self._registry = registry
        self._time = time
        self._notices: list[books.Notice] = []
        self._refresh_prices = refresh_prices
        self._refresh_s = refresh_s
        self.book = books.Book(
            pricing,
            self._heard,
            warn_percent=warn_percent,
            steady_us=lambda: int(time.monotonic() * 1_000_000),
        )
        # Host and process number come again after a reboot: the batches of two lives must not be mixed up.
        self.owner = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self.numbers = quota_metrics.Numbers()
        self._batch = 0
        self._sent = False  # the newest batch may be written already
        self._seen = (-1, 0)
        self._told: dict[limits.Key, int] = {}
        self._ticks = 0
        self._task: asyncio.Task[None] | None = None
        self._silent = False

    async def start(self) -> None:
        """Load limits and sums, ask for a check of what a former owner left, and begin to exchange.

        Raises:
            sqlalchemy.exc.SQLAlchemyError: the registry does not answer; no limit is known yet.
        """
        await self.exchange()
        await asyncio.wrap_future(apart.call(self._registry.wish_check))
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Tell the last differences and end, after `CLOSE_S` without them."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
            self._task = None
        try:
            async with asyncio.timeout(CLOSE_S):
                # A batch that was under way is sent again and not counted again.
                await self.exchange()
                if self.book.collect():
                    await self.exchange()
        except (exc.SQLAlchemyError, TimeoutError) as error:
            why = _line(error) or f"no answer for {CLOSE_S:g} s"
            log.warning("quotas: the last second's use is not in the registry: %s", why)

    async def exchange(self) -> None:
        """Tell what was settled, and take in what has changed.

        Raises:
            sqlalchemy.exc.SQLAlchemyError: the registry does not answer; the same is told next time.
        """
        now_us = self._time.wall_us()
        differences = self.book.collect()
        if differences and not self._sent:
            self._batch += 1
            self._sent = True
        running = self._running(now_us)
        notices = list(self._notices)
        report = quotas.Report(
            owner=self.owner,
            batch=self._batch,
            differences=differences,
            running=running,
            notices=[(notice.at_us, str(notice)) for notice in notices],
        )
        news = await asyncio.wrap_future(apart.call(lambda: self._call(report, now_us)))
        if differences:
            self._sent = False
        if running is not None:
            self._told = running
        del self._notices[: len(notices)]
        if news.rules is not None:
            self.book.set_limits(news.rules)
        for (key, _), drift in news.drifts.items():
            self.numbers.drift(key, drift)
        self.book.learn(news.sums, collected=bool(differences))
        self._seen = news.seen
        self.numbers.show(self.book, now_us)

    def _call(self, report: quotas.Report, now_us: int) -> quotas.News:
        try:
            self._refresh_prices()
        except Exception as error:
            log.warning("quotas: the last prices stay: %s", _line(error))
        return self._registry.exchange(report, self._seen, now_us)

    def _running(self, now_us: int) -> dict[limits.Key, int] | None:
        """Return what is used of quotas over a minute and at once, None if that is known or not due."""
        self._ticks += 1
        if self._ticks % RUNNING_TICKS:
            return None
        self.book.forget(now_us - _FORGET_US)
        used = self.book.used(now_us)
        found = {key: amount for key, amount in used.items() if amount and not key.kind.kept}
        return None if found == self._told and not found else found

    def _heard(self, notice: books.Notice) -> None:
        log.warning("quota: %s", notice)
        self.numbers.notice(notice.level)
        if len(self._notices) < NOTICES:  # without a registry they would gather for ever
            self._notices.append(notice)

    async def _run(self) -> None:
        while True:
            await self._time.sleep(self._refresh_s)
            try:
                await self.exchange()
                self._silent = False
            except exc.SQLAlchemyError as error:
                if not self._silent:
                    log.warning(
                        "quotas: registry does not answer, the last limits stay in force: %s",
                        _line(error),
                    )
                self._silent = True
            except Exception:
                # Whatever it is: without this task no counter would be kept any more.
                log.exception("quotas: the exchange with the registry failed, tried again")


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
