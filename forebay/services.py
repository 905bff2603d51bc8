"""The long-running parts of an installation: each function is the body of one process."""

import asyncio
import contextlib
import json
import logging
import os
import signal
from collections.abc import Callable, Coroutine, Iterable, Mapping
from pathlib import Path
from typing import Any

from accounting import billing_routes, compact, gpu_minutes, stepcost
from accounting import routes as accounting_routes
from accounting import settings as accounting_settings
from accounting import ship as shipping
from batch_jobs import daemon
from batch_jobs import routes as batch_routes
from batch_jobs import settings as batch_settings
from batch_jobs import store as batch_store
from forebay import installation, lease, quotas, sinks, telemetry
from gateway import auth, dependencies, server
from gateway import settings as gateway_settings
from scheduler.contracts import clock
from scheduler.runtime import admin, client, directory, loop, quota_routes
from scheduler.runtime import broker as brokers
from scheduler.runtime import settings as scheduler_settings
from scheduler.runtime.registry import database, keys

Told = Callable[[Mapping[str, str]], None]
Service = Callable[[installation.Installation, Told], Coroutine[Any, Any, None]]
log = logging.getLogger(__name__)
GATEWAY_FILE = "gateway.json"
_COMPACT_S = 3600.0


async def broker(here: installation.Installation, told: Told) -> None:
    """Run a broker until SIGTERM; leases and replicas go on without it."""
    time = clock.SystemClock()
    registry = await asyncio.to_thread(here.open_registry)
    port = await asyncio.to_thread(here.connect_slurm)
    books = here.config.table(accounting_settings.Accounting)

    async def ship(_period_us: int) -> None:
        done = await asyncio.to_thread(shipping.ship, here.state, time, takeover_s=books.takeover_s)
        _complain(done.problems)

    async def merge_days(_period_us: int) -> None:
        done = await asyncio.to_thread(compact.compact, here.state, time)
        _complain(done.problems)

    async def gpu_hours(_period_us: int) -> None:
        cost = stepcost.Cost(books.prefill_weight, books.decode_weight)
        done = await asyncio.to_thread(gpu_minutes.roll, here.state, time, cost)
        _complain(done.problems)

    parts = brokers.Parts(
        options=here.config.table(scheduler_settings.Settings),
        registry=registry,
        slurm=port,
        lease_renderer=lease.Renderer(here, port),
        state_dir=here.state,
        time=time,
        cluster=port.cluster,
        models=here.config.models,
    )
    periodic = (
        loop.Periodic("ship usage", books.ship_every_s, ship),
        loop.Periodic("merge past days", _COMPACT_S, merge_days),
        loop.Periodic("GPU minutes", books.gpu_minutes_every_s, gpu_hours),
        quotas.check(here, registry, time),
    )
    try:
        await _until_term(
            brokers.serve(parts, periodic=periodic, ready=lambda where: told({"control": where}))
        )
    finally:
        registry.close()


async def gateway(here: installation.Installation, told: Told) -> None:
    """Run a gateway until SIGTERM."""
    time = clock.SystemClock()
    table = here.config.table(gateway_settings.GatewaySettings)
    registry = await asyncio.to_thread(here.open_registry)
    port = await asyncio.to_thread(here.connect_slurm)
    sink = sinks.open_spool(f"gateway-{os.getpid()}")
    fleet = client.FleetClient(here.state, f"gateway-{os.getpid()}", time)
    people = directory.AssociationDirectory(
        port, here.config.table(scheduler_settings.Settings), time
    )
    jobs = batch_store.Store(database.Database(here.registry_url()))
    await asyncio.to_thread(jobs.migrate)
    routers = (
        batch_routes.router(
            jobs,
            state_dir=here.state,
            options=here.config.table(batch_settings.BatchJobsSettings),
            clock=time,
        ),
        accounting_routes.router(
            here.state, table=here.config.table(accounting_settings.Accounting), port=port
        ),
        billing_routes.router(
            here.state, table=here.config.table(accounting_settings.Accounting), time=time
        ),
        admin.router(registry, fleet, time),
        quota_routes.router(quotas.routes(here, registry, port.associations, time)),
    )
    keeper = quotas.keeper(here, registry, time)
    deps = dependencies.Dependencies(
        settings=table,
        authenticator=auth.Credentials(keys.RegistryKeys(registry.keys, time), people, time, table),
        fleet=fleet,
        sink=sink,
        clock=time,
        cluster=port.cluster,
        tracer=telemetry.tracer("forebay-gateway"),
        quotas=keeper.book,
    )

    def ready(where: server.Addresses) -> None:
        news = {"http": f"http://{where.http}", "grpc": where.grpc}
        _publish(here.state / GATEWAY_FILE, news)
        told(news)

    await keeper.start()
    fleet.start()
    try:
        await server.serve(deps, routers=routers, ready=ready)
    finally:
        await fleet.close()
        await keeper.close()
        await asyncio.to_thread(sink.close)
        jobs.close()
        registry.close()


async def batchd(here: installation.Installation, told: Told) -> None:
    """Run the batch runner until SIGTERM; lines in flight are left to the next one."""
    jobs = batch_store.Store(database.Database(here.registry_url()))
    await asyncio.to_thread(jobs.migrate)
    url = os.environ.get("FOREBAY_URL") or gateway_address(here.state)["http"]
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
            )
        )
    finally:
        jobs.close()


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


def gateway_address(state: Path) -> dict[str, str]:
    """Return what the gateway on this state folder said of its addresses.

    Raises:
        OSError: it never ran.
    """
    found: dict[str, str] = json.loads((state / GATEWAY_FILE).read_text())
    return found


def _publish(path: Path, news: Mapping[str, str]) -> None:
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.write_text(json.dumps(dict(news)))
    fresh.replace(path)
