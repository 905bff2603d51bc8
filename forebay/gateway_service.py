"""The gateway's processes: a whole one, or a worker beside the process that admits for all workers."""

import asyncio
import contextlib
import functools
import gc
import os
from collections.abc import AsyncIterator

import fastapi

from accounting import billing_routes
from accounting import routes as accounting_routes
from accounting import settings as accounting_settings
from batch_jobs import openai_api
from batch_jobs import routes as batch_routes
from batch_jobs import settings as batch_settings
from batch_jobs import store as batch_store
from engines import settings as engine_settings
from forebay import (
    admission_service,
    batch_site,
    doors,
    inspecting,
    installation,
    quota_books,
    sinks,
    telemetry,
)
from gateway import auth, dependencies, server
from gateway import settings as gateway_settings
from gateway.admission import place as places
from scheduler.contracts import clock, quota, slurm, usage
from scheduler.runtime import (
    admin,
    client,
    directory,
    fleet_routes,
    guard,
    model_routes,
    overlap,
    quota_keeper,
    quota_routes,
    rollout_routes,
    schedule_routes,
    weights_routes,
)
from scheduler.runtime import settings as scheduler_settings
from scheduler.runtime.models import service
from scheduler.runtime.registry import database, keys, store
from slurm_plugins import select
from slurm_plugins import settings as slurm_settings


async def whole(here: installation.Installation, told: doors.Told) -> None:
    """Run a gateway of one process until SIGTERM."""
    table = here.config.table(gateway_settings.GatewaySettings)
    parts = _Parts(here, table)
    where: places.Place | None = None
    if table.admission_listen:
        where = places.Place(
            admission_service.name_of(table),
            guard.token(here.state),
            owns=True,
            listen=table.admission_listen,
            advertise=table.admission_advertise,
            told=parts.tell_admission,
        )

    def ready(addresses: server.Addresses) -> None:
        news = spoken(addresses)
        _settle()
        doors.publish(here.state / doors.FILE, news)
        told(news)

    async with parts.open(admission_service.name_of(table)) as opened, opened.keeping() as keeper:
        deps = opened.dependencies(keeper, where)
        await server.serve(deps, routers=opened.routers(), ready=ready)


async def worker(here: installation.Installation, told: doors.Told) -> None:
    """Run one of several workers until SIGTERM; another process admits."""
    table = here.config.table(gateway_settings.GatewaySettings)
    parts = _Parts(here, table)
    where = admission_service.place(here, table, owns=False, told=parts.tell_admission)

    def ready(addresses: server.Addresses) -> None:
        _settle()
        told(spoken(addresses))

    async with parts.open(f"{where.gateway}-{os.getpid()}") as opened:
        deps = opened.dependencies(None, where)
        await server.serve(deps, routers=opened.routers(), ready=ready)


def _settle() -> None:
    """Take what was made at the start from the garbage collector's rounds: it stays to the end.

    A round over the modules of a gateway stops every stream for a tenth of a second.
    """
    gc.collect()
    gc.freeze()


def spoken(addresses: server.Addresses) -> dict[str, str]:
    """Return a gateway's addresses as they are told and kept in a file."""
    return {"http": f"http://{addresses.http}", "grpc": addresses.grpc}


class _Parts:
    """What a gateway's process opens, and closes in the end."""

    def __init__(
        self, here: installation.Installation, table: gateway_settings.GatewaySettings
    ) -> None:
        self._here = here
        self._table = table
        self._time = clock.SystemClock()
        self._registry: store.Registry
        self._port: slurm.SlurmPort
        self._sink: usage.UsageSink
        self._fleet: client.FleetClient
        self._jobs: batch_store.Store

    def tell_admission(self, address: str) -> None:
        """Let the broker tell other hosts where this one admits."""
        self._fleet.admission = address

    @contextlib.asynccontextmanager
    async def open(self, name: str) -> AsyncIterator["_Parts"]:
        """Open registry, Slurm, spool and the link to the broker, known there as ``name``."""
        here, time = self._here, self._time
        self._registry = await asyncio.to_thread(here.open_registry)
        self._port = await asyncio.to_thread(here.connect_slurm)
        sink = sinks.open_spool(f"gateway-{os.getpid()}")
        self._sink = sink
        self._fleet = client.FleetClient(here.state, name, time)
        self._jobs = batch_store.Store(database.Database(here.registry_url()))
        await asyncio.to_thread(self._jobs.migrate)
        self._fleet.start()
        try:
            yield self
        finally:
            await self._fleet.close()
            await asyncio.to_thread(sink.close)
            self._jobs.close()
            self._registry.close()

    @contextlib.asynccontextmanager
    async def keeping(self) -> AsyncIterator[quota_keeper.Keeper]:
        """Keep the book of quotas: the work of whoever owns the queues."""
        keeper = quota_books.keeper(self._here, self._registry, self._time)
        await keeper.start()
        try:
            yield keeper
        finally:
            await keeper.close()

    def dependencies(
        self, keeper: quota_keeper.Keeper | None, where: places.Place | None
    ) -> dependencies.Dependencies:
        """Return the gateway's ports; only whoever owns the queues has a keeper."""
        people = directory.AssociationDirectory(
            self._port, self._here.config.table(scheduler_settings.Settings), self._time
        )
        known = keys.RegistryKeys(self._registry.keys, self._time)
        return dependencies.Dependencies(
            settings=self._table,
            authenticator=auth.Credentials(known, people, self._time, self._table),
            fleet=self._fleet,
            sink=self._sink,
            clock=self._time,
            cluster=self._port.cluster,
            tracer=telemetry.tracer("forebay-gateway"),
            quotas=keeper.book if keeper else quota.Unlimited(),
            place=where,
            collectors=(keeper.numbers.registry,) if keeper else (),
            job_fate=functools.partial(batch_site.fate, self._jobs, self._time),
        )

    def routers(self) -> tuple[fastapi.APIRouter, ...]:
        """Return the routes of batch, accounting, administration and quotas."""
        here, registry, time = self._here, self._registry, self._time
        books = here.config.table(accounting_settings.Accounting)
        batch = here.config.table(batch_settings.BatchJobsSettings)
        scheduling = here.config.table(scheduler_settings.Settings)
        teams = frozenset({*scheduling.user_teams.values(), scheduling.lease_team})
        site = quota_routes.Site(
            registry, time, self._port.associations, teams, scheduling.quota_warn_percent
        )
        folders = scheduling.adapter_folders
        declared = service.Site(
            registry,
            time,
            inspector=inspecting.Inspector(
                here.config.table(engine_settings.EnginesSettings), folders, scheduling.node_gpus
            ),
            adapter_folders=folders,
            node_gpus=scheduling.node_gpus,
        )
        checks = batch_site.site(self._fleet, here.state, books, site.known_teams, time)
        return (
            batch_routes.router(
                self._jobs,
                state_dir=here.state,
                options=batch,
                clock=time,
                shares=self._table.team_shares,
                site=checks,
            ),
            openai_api.router(
                self._jobs, state_dir=here.state, options=batch, clock=time, site=checks
            ),
            accounting_routes.router(
                here.state,
                table=books,
                port=self._port,
                accounts=select.account_books(here.config.table(slurm_settings.SlurmSettings)),
                overlaps=lambda: overlap.of_registry(registry),
            ),
            billing_routes.router(here.state, table=books, time=time, teams=site.known_teams),
            admin.router(registry, self._fleet, time),
            quota_routes.router(site),
            schedule_routes.router(registry, time),
            fleet_routes.router(registry, self._fleet, time),
            weights_routes.router(registry, time),
            model_routes.router(declared),
            rollout_routes.router(declared),
        )
