"""What batch submissions are checked against, from what a gateway knows: fleet, Slurm's accounts, prices."""

import functools
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from accounting import billing, money, rates
from accounting import settings as accounting_settings
from batch_jobs import model, sites
from batch_jobs import store as batch_store
from scheduler.contracts import clock as clocks
from scheduler.contracts import fleet, ports, requests, usage

_BATCH = requests.Tier.BATCH.value
_TAKES = frozenset({fleet.Role.SHARED, fleet.Role.BATCH})


def site(
    source: ports.FleetSource,
    state: Path,
    table: accounting_settings.Accounting,
    teams: Callable[[], Collection[str]],
    time: clocks.Clock,
) -> sites.Site:
    """Return the site's answers."""
    books = billing.Billing(state, table)
    return sites.Site(
        models=lambda: models(source.view(), table),
        teams=teams,
        price=functools.partial(price, books, time),
    )


def models(
    view: fleet.FleetView | None, table: accounting_settings.Accounting
) -> Mapping[str, sites.Served] | None:
    """Return the models that have a route, with what a token of each takes of a GPU now.

    A step gives each of a replica's seats one token, so a full one needs ``gpus * step / seats`` GPU-seconds
    for each; a prompt's token takes less by accounting's weights. The most of the replicas' figures counts: a
    step of few sequences is shorter than a full one.
    """
    if view is None:
        return None
    each: dict[str, list[float]] = {}
    for replica in view.replicas:
        stats = replica.stats
        serves = replica.state is fleet.ReplicaState.SERVING and replica.role in _TAKES
        if serves and stats is not None and stats.step_ms > 0 and stats.seats:
            gpus = replica.spec.gpus / replica.spec.hardware.parts
            gpu_s = gpus * stats.step_ms / 1_000 / stats.seats
            each.setdefault(replica.spec.model, []).append(gpu_s)
    weight = table.prefill_weight / table.decode_weight if table.decode_weight else 1.0
    found = {}
    for name, route in view.routes.items():
        gpu_s = max(each.get(name, ()), default=0.0)
        found[name] = sites.Served(frozenset(route.adapters), weight * gpu_s, gpu_s)
    return found


def fate(jobs: batch_store.Store, time: clocks.Clock, job_id: int) -> usage.Outcome:
    """Return why a batch job's runner leaves its lines, see `gateway.dependencies`. Blocks.

    A runner that ends, or dies, leaves them too: then nothing is said here of the job.
    """
    job = jobs.get(job_id)
    if job is None:
        return usage.Outcome.CLIENT_GONE
    if job.cancel_us:
        return usage.Outcome.CANCELLED
    if model.overdue(job, time.wall_us()):
        return usage.Outcome.EXPIRED
    put_back = job.requeue_us or (job.requeues and job.state is model.State.PENDING)
    return usage.Outcome.PREEMPTED if put_back else usage.Outcome.CLIENT_GONE


def price(books: billing.Billing, time: clocks.Clock, tokens: Mapping[str, tuple[int, int]]) -> str:
    """Return what tokens cost at tier batch by the rates of now, none of them cached; "" without rates."""
    known, now_us = books.price_list(), time.wall_us()
    total, priced = 0, False
    for name, (prompt, output) in tokens.items():
        for use, amount in ((rates.Use.UNCACHED, prompt), (rates.Use.OUTPUT, output)):
            rate = known.find(name.partition(":")[0], _BATCH, use, now_us)
            priced = priced or rate is not None
            total += rates.cost(amount, use, rate.micro if rate else 0)
    return f"{money.show(total)} {books.currency}" if priced else ""
