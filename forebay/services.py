"""The long-running parts of an installation: each function is the body of one process."""

import asyncio
import contextlib
import datetime
import logging
import os
import signal
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any

from accounting import books as recorded
from accounting import compact, demand, gpu_minutes, reconcile, rolling, stepcost, windows
from accounting import settings as accounting_settings
from accounting import ship as shipping
from batch_jobs import daemon
from batch_jobs import settings as batch_settings
from batch_jobs import store as batch_store
from forebay import batch_work, crowd, gateway_service, installation, lease, quotas, slurm_fates
from gateway import settings as gateway_settings
from scheduler.contracts import clock
from scheduler.runtime import broker as brokers
from scheduler.runtime import config, loop
from scheduler.runtime import settings as scheduler_settings
from scheduler.runtime.registry import database

Told = Callable[[Mapping[str, str]], None]
Service = Callable[[installation.Installation, Told], Coroutine[Any, Any, None]]
log = logging.getLogger(__name__)
_COMPACT_S = 3600.0
_DAY_S = 86_400.0


async def broker(here: installation.Installation, told: Told) -> None:
    """Run a broker until SIGTERM; leases and replicas go on without it."""
    time = clock.SystemClock()
    registry = await asyncio.to_thread(here.open_registry)
    port = await asyncio.to_thread(here.connect_slurm)
    jobs = batch_store.Store(database.Database(here.registry_url()))
    await asyncio.to_thread(jobs.migrate)
    sampled = batch_work.Sampled(here.state)
    books = here.config.table(accounting_settings.Accounting)

    async def ship(_period_us: int) -> None:
        done = await asyncio.to_thread(shipping.ship, here.state, time, takeover_s=books.takeover_s)
        _complain(done.problems)

    async def merge_days(_period_us: int) -> None:
        done = await asyncio.to_thread(
            compact.compact, here.state, time, open_at_most_s=books.open_at_most_s
        )
        _complain(done.problems)

    records = recorded.Books(here.state, memory_mb=books.memory_mb)

    async def roll_up(_period_us: int) -> None:
        kept_s = books.minutes_kept_h * 3600
        done = await asyncio.to_thread(rolling.roll, records, time, minutes_kept_s=kept_s)
        _complain(done.problems)

    async def gpu_hours(_period_us: int) -> None:
        cost = stepcost.Cost(books.prefill_weight, books.decode_weight)
        done = await asyncio.to_thread(gpu_minutes.roll, here.state, time, cost)
        _complain(done.problems)

    async def nightly(period_us: int) -> None:
        folder = here.state / gpu_minutes.FOLDER
        apart = await asyncio.to_thread(reconcile.nightly, records, port, period_us, folder)
        _complain(apart)

    parts = brokers.Parts(
        options=here.config.table(scheduler_settings.Settings),
        registry=registry,
        slurm=port,
        lease_renderer=lease.Renderer(here, port),
        state_dir=here.state,
        time=time,
        cluster=port.cluster,
        models=here.config.models,
        batch_work=lambda: batch_work.of_jobs(jobs.active(), time.wall_us(), sampled),
        ledger=demand.Ledger(here.state, port.cluster),
        zone=_zone(here.config.table(scheduler_settings.Settings).zone),
    )
    periodic = (
        loop.Periodic("ship usage", books.ship_every_s, ship),
        loop.Periodic("roll usage up", books.roll_every_s, roll_up),
        loop.Periodic("merge past days", _COMPACT_S, merge_days),
        loop.Periodic("GPU minutes", books.gpu_minutes_every_s, gpu_hours),
        loop.Periodic("compare with sacct", _DAY_S, nightly),
        quotas.check(here, registry, time),
    )
    try:
        await _until_term(
            brokers.serve(parts, periodic=periodic, ready=lambda where: told({"control": where}))
        )
    finally:
        jobs.close()
        registry.close()


async def gateway(here: installation.Installation, told: Told) -> None:
    """Run a gateway until SIGTERM: one process, or as many workers as the site has set."""
    if here.config.table(gateway_settings.GatewaySettings).workers > 1:
        await crowd.gateway(here, told)
    else:
        await gateway_service.whole(here, told)


async def batchd(here: installation.Installation, told: Told) -> None:
    """Run the batch runner until SIGTERM; lines in flight are left to the next one."""
    jobs = batch_store.Store(database.Database(here.registry_url()))
    await asyncio.to_thread(jobs.migrate)
    url = os.environ.get("FOREBAY_URL") or gateway_service.gateway_address(here.state)["http"]
    try:
        await _until_term(
            daemon.serve(
                here.config.table(batch_settings.BatchJobsSettings),
                store=jobs,
                state_dir=here.state,
                gateway_url=url,
                service_key=here.secret(installation.SERVICE_KEY),
                clock=clock.SystemClock(),
                ready=lambda: told({"gateway": url}),
                shares=here.config.table(gateway_settings.GatewaySettings).team_shares,
                slurm=slurm_fates.Fates(here),
            )
        )
    finally:
        jobs.close()


def _zone(name: str) -> datetime.tzinfo:
    if not name:
        return windows.local_zone(os.environ)
    try:
        return windows.zone(name)
    except ValueError as error:
        raise config.ConfigError([f"[scheduler] zone = {name!r}: {error}"]) from error


def _complain(problems: Iterable[str]) -> None:
    for problem in problems:
        log.error("accounting: %s", problem)


async def _until_term(body: Coroutine[Any, Any, None]) -> None:
    """Run ``body`` until it ends or SIGTERM or SIGINT cancels it."""
    task = asyncio.ensure_future(body)
    events = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        events.add_signal_handler(number, task.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await task
