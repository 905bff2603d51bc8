"""The batch runner's process."""

import asyncio
import os

from batch_jobs import daemon
from batch_jobs import settings as batch_settings
from batch_jobs import store as batch_store
from forebay import doors, installation, lifeline, slurm_fates
from gateway import settings as gateway_settings
from scheduler.contracts import clock
from scheduler.runtime.registry import database


async def batchd(here: installation.Installation, told: doors.Told) -> None:
    """Run the batch runner until SIGTERM; lines in flight are left to the next one."""
    options = here.config.table(batch_settings.BatchJobsSettings)
    os.nice(options.nice)
    jobs = batch_store.Store(database.Database(here.registry_url()))
    await asyncio.to_thread(jobs.migrate)
    url = os.environ.get("FOREBAY_URL") or doors.address(here.state)["http"]
    try:
        await lifeline.until_term(
            daemon.serve(
                options,
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
