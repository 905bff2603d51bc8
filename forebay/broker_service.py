"""The broker's process: what the leader does, and when."""

import asyncio
import datetime
import logging
import os
from collections.abc import Iterable

from accounting import books as recorded
from accounting import compact, demand, gpu_minutes, reconcile, rolling, stepcost, windows
from accounting import settings as accounting_settings
from accounting import ship as shipping
from batch_jobs import store as batch_store
from forebay import (
    batch_work,
    doors,
    installation,
    lease,
    lifeline,
    quotas,
    sinks,
)
from scheduler.contracts import clock, times, usage
from scheduler.runtime import apart, config, loop, serving
from scheduler.runtime import broker as brokers
from scheduler.runtime import settings as scheduler_settings
from scheduler.runtime.registry import database
from slurm_plugins import settings as slurm_settings

log = logging.getLogger(__name__)
_COMPACT_S = 600.0
_DAY_S = 86_400.0


async def broker(here: installation.Installation, told: doors.Told) -> None:
    """Run a broker until SIGTERM; leases and replicas go on without it."""
    # Those of the loop would hold up the end of this process where the registry hangs.
    asyncio.get_running_loop().set_default_executor(apart.Threads())
    time = clock.SystemClock()
    registry = await asyncio.to_thread(here.open_registry)
    port = await asyncio.to_thread(here.connect_slurm)
    jobs = batch_store.Store(database.Database(here.registry_url()))
    await asyncio.to_thread(jobs.migrate)
    noted = batch_work.Noted(here.state)
    books = here.config.table(accounting_settings.Accounting)

    async def ship(_period_us: int) -> None:
        done = await asyncio.to_thread(shipping.ship, here.state, time, takeover_s=books.takeover_s)
        _complain(done.problems)

    async def merge_files(_period_us: int) -> None:
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

    async def write_off(row: usage.GpuRow) -> None:
        # A spool for each: it is used once in weeks, and must not lie open meanwhile.
        sink = await asyncio.to_thread(sinks.open_spool, f"broker-{os.getpid()}")
        try:
            sink.append(row)
            await sink.sync()
        finally:
            sink.close()

    parts = brokers.Parts(
        options=here.config.table(scheduler_settings.Settings),
        registry=registry,
        slurm=port,
        lease_renderer=lease.Renderer(here, port),
        state_dir=here.state,
        time=time,
        cluster=port.cluster,
        models=here.config.models,
        batch_work=lambda: batch_work.of_jobs(jobs.active(), time.wall_us(), noted),
        ledger=demand.Ledger(here.state, port.cluster),
        zone=_zone(here.config.table(scheduler_settings.Settings).zone),
        write_off=write_off,
        service_users=frozenset(here.config.table(slurm_settings.SlurmSettings).service_users),
        where=lease.where(here.config),
    )
    periodic = (
        loop.Periodic("ship usage", books.ship_every_s, ship),
        loop.Periodic("roll usage up", books.roll_every_s, roll_up),
        loop.Periodic("merge past hours and days", _COMPACT_S, merge_files),
        loop.Periodic("GPU minutes", books.gpu_minutes_every_s, gpu_hours),
        loop.Periodic("compare with sacct", _DAY_S, nightly),
        quotas.check(here, registry, time),
    )
    try:
        await lifeline.until_term(
            serving.serve(parts, periodic=periodic, ready=lambda where: told({"control": where}))
        )
    finally:
        jobs.close()
        registry.close()


def _zone(name: str) -> datetime.tzinfo:
    if not name:
        return times.local_zone(os.environ)
    try:
        return windows.zone(name)
    except ValueError as error:
        raise config.ConfigError([f"[scheduler] zone = {name!r}: {error}"]) from error


def _complain(problems: Iterable[str]) -> None:
    for problem in problems:
        log.error("accounting: %s", problem)
