"""Runs one scenario under one policy: the event loop, the planner's ticks, the books."""

import dataclasses
import heapq
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from scheduler.contracts import fleet
from scheduler.core import forecast, plan
from scheduler.sim import gaps, policies, scenario, state, tally, traffic, world

CALM_TICK_S = 5.0  # between two plans while nothing presses; 0.2 s as soon as something does
TICK_S = 0.2
WARMUP_S = 1800.0
SAMPLE_S = 60.0
HISTORY_DAYS = 14
STARTED = fleet.ReplicaState.STARTING


def simulate(
    site: scenario.Scenario, name: str, *, tick_s: float = CALM_TICK_S
) -> tuple[dict[str, Any], tally.Tally]:
    """Run a scenario under a policy; returns its figures and the books behind them."""
    here, slices = begin(site, name, tick_s)
    for _ in slices:
        pass
    return finish(here), here.books


def finish(here: world.World) -> dict[str, Any]:
    """Close a run's books, jobs that were not done by their deadline among them; returns the figures."""
    for jobs in here.backlog:
        here.books.jobs_missed += sum(deadline <= here.now for deadline, _ in jobs)
    return here.books.result()


def begin(
    site: scenario.Scenario, name: str, tick_s: float = CALM_TICK_S
) -> tuple[world.World, Iterator[float]]:
    """Return a warm site, and what runs it one slice after another (each yields its end)."""
    policy = policies.POLICIES[name]
    start = site.start_hour * 3600
    counted = start + min(WARMUP_S, site.hours * 3600 * 0.1)
    end = counted + site.hours * 3600
    books = tally.Tally(site, counted)
    leases = math.ceil(site.fleet.gpus / site.fleet.gpus_per_node)
    settings = policies.Planner(
        rungs=policy.rungs,
        use_forecast=policy.forecast,
        ttft_slo_ms=site.slo.ttft_ms,
        itl_slo_ms=1000 / site.slo.tokens_per_s,
        lease_gpus=site.fleet.gpus_per_node if 2 in policy.rungs else 0,
        node_gpus=site.fleet.gpus_per_node,
        lease_walltime_s=site.fleet.lease_walltime_s,
        pending_leases=max(4, site.fleet.gpus // 16),
        rollover_at_once=max(1, leases // 20),
    )
    here = world.World(site, policy, settings, start, books)
    if policy.forecast:
        here.curves = history(site)
    if policy.fixed:
        here.fixed = partition(site, here)
    _batch_work(here, start, end)
    _warm(here)
    here.cluster.begin(start)
    return here, _loop(here, start, end, tick_s)


def history(site: scenario.Scenario) -> dict[str, forecast.Curve]:
    """Return what two weeks of the same curve teach; each day has a level of its own, and some noise."""
    draw = np.random.default_rng(site.seed + 77)
    found: dict[str, forecast.Curve] = {}
    levels = draw.normal(1, 0.05, HISTORY_DAYS)
    for model in site.models:
        if not model.share or site.traffic.trace:
            continue
        samples = [
            (
                float(at),
                site.traffic.curve((at + forecast.SLOT_S / 2) % scenario.DAY_S)
                * model.share
                * max(0.1, float(levels[at // scenario.DAY_S]))
                * float(draw.normal(1, 0.02)),
            )
            for at in range(0, HISTORY_DAYS * scenario.DAY_S, forecast.SLOT_S)
        ]
        found[model.name] = forecast.learn(samples)
    return found


def partition(site: scenario.Scenario, here: world.World) -> dict[int, tuple[int, int]]:
    """Return a static partition: interactive sized for the peak, what is left for batch by its work."""
    found: dict[int, tuple[int, int]] = {}
    left = site.fleet.gpus
    sizes = [model.shape.gpus for model in site.models]
    peak = site.traffic.peak_rps
    for n, model in enumerate(site.models):
        if not model.share:
            need = 0
        else:
            # A twentieth above the plan, as a site would that pays for its peak.
            rate = here.capacity[n].requests_per_s
            need = max(1, model.floor, math.ceil(peak * model.share / rate))
        found[n] = (min(need, left // sizes[n]), 0)
        left -= found[n][0] * sizes[n]
    total = sum(model.batch.share for model in site.models)
    spare = left
    order = sorted(range(len(sizes)), key=lambda n: -sizes[n])
    for n in order:
        share = site.models[n].batch.share / total if total else 0.0
        count = min(left // sizes[n], round(spare * share / sizes[n]))
        found[n] = (found[n][0], count)
        left -= count * sizes[n]
    for n in order:  # what rounding has left
        while site.models[n].batch.share and left >= sizes[n]:
            found[n] = (found[n][0], found[n][1] + 1)
            left -= sizes[n]
    return found


def _batch_work(here: world.World, start: float, end: float) -> None:
    """Let batch jobs come at their hours; each is the work of its part of the day."""
    for n, model in enumerate(here.site.models):
        batch = model.batch
        if not batch.share:
            continue
        hours = batch.submit_hours or tuple(float(hour) for hour in range(24))
        gpu_s = batch.share * here.site.fleet.gpus * scenario.DAY_S / len(hours)
        tokens = gpu_s / model.shape.gpus * here.batch_rate[n]

        def come(
            now: float, n: int = n, tokens: float = tokens, hours_left: float = batch.deadline_h
        ) -> None:
            here.backlog[n].append((now + hours_left * 3600, tokens))
            here.backlog[n].sort()

        for day in range(int(start // scenario.DAY_S), int(end // scenario.DAY_S) + 1):
            for hour in hours:
                when = day * scenario.DAY_S + hour * 3600
                if start < when < end:
                    here.at(when, come)
        come(start)


def _warm(here: world.World) -> None:
    """Begin with a fleet that has been running: starts and leases take no time before the first request."""
    here.cluster.instant = True
    here.rates = [
        here.site.traffic.curve(here.now % scenario.DAY_S) * model.share
        if not here.site.traffic.trace
        else traffic.opening_rate(here.site) * model.share
        for model in here.site.models
    ]
    for _ in range(40):
        made = plan.plan(here.picture(), here.settings)
        here.apply(made)
        here.cluster.schedule(here.now)
        if not made.actions:
            break
    for one in here.replicas.values():
        one.ordered -= 3600
    here.instant = here.cluster.instant = False


def _loop(here: world.World, start: float, end: float, tick_s: float) -> Iterator[float]:
    """Run until ``end``: requests, engines, Slurm and plans in the order of their times."""
    events = here.events
    arrived = here.arrived
    next_tick = start
    sample = start
    for edge, part in traffic.calls(here.site, seed=here.site.seed, start_s=start, end_s=end):
        position, count = 0, len(part)
        while True:
            arrival = part[position].arrival if position < count else math.inf
            due = events[0][0] if events else math.inf
            if min(arrival, next_tick, due) > edge:
                break
            if next_tick <= arrival and next_tick <= due:
                here.now = max(here.now, next_tick)
                pressed = _tick(here)
                if here.now >= sample:
                    _sample(here)
                    sample += SAMPLE_S
                next_tick = here.now + (TICK_S if pressed else tick_s)
            elif arrival <= due:
                here.now = arrival
                call = part[position]
                position += 1
                arrived[call.model] += 1
                here.route(call)
                if here.waiting[call.model] and next_tick > here.now + TICK_S:
                    next_tick = here.now + TICK_S
            else:
                at, _, what, version = heapq.heappop(events)
                if version < 0:
                    here.now = max(here.now, at)
                    what(here.now)
                elif what.event == version:
                    here.now = at
                    _step(here, what)
        yield edge


def _step(here: world.World, one: state.Running) -> None:
    """Let a replica's due event happen: a first token, or the end of an answer."""
    at, books = here.now, here.books
    done = one.engine.pop(at)
    here.schedule(one)
    if done is None:
        return
    call, ended = done
    if (call.done <= 1 and not ended) or call.output <= 1:
        here.newest[call.model].append((call.first - call.arrival) * 1000)
        books.first(call)
    if not ended:
        return
    books.last(call, at)
    here.flying[call.model] -= 1
    if here.waiting[call.model]:
        here.serve(call.model)
    if one.engine.running == 0:
        here.drained(one)


def _tick(here: world.World) -> bool:
    """Plan and apply; return whether something presses."""
    passed = here.now - here.ticked
    if passed > 0:
        keep = math.exp(-passed / 60)
        for n, count in enumerate(here.arrived):
            here.rates[n] = here.rates[n] * keep + count / passed * (1 - keep)
            here.arrived[n] = 0
        _account(here, passed)
    here.ticked = here.now
    here.refuse()
    for one in list(here.replicas.values()):
        here.collect(one)
        here.feed(one)
    here.books.counting = here.now >= here.books.begin_s
    made = plan.plan(here.picture(), here.settings)
    here.apply(made)
    return any(here.waiting) or any(memory.ticks for memory in made.ladder_memory.values())


def _account(here: world.World, passed: float) -> None:
    """Book what every GPU of the fleet did since the last tick."""
    books = here.books
    if not books.counting:
        return
    books.counted_s += passed
    held = sum(one.lease.gpus for one in here.leases.values() if one.job.state == "RUNNING")
    fleet_gpus = here.site.fleet.gpus
    books.waste["not_held"] += max(0, fleet_gpus - held) * passed
    books.overlap_s += max(0, held - fleet_gpus) * passed
    used = 0
    work = any(here.backlog)
    for one in here.replicas.values():
        gpus = here.site.models[one.model].shape.gpus
        if one.state is fleet.ReplicaState.ASLEEP:
            continue
        used += gpus
        books.models[one.model].gpu_s += gpus * passed
        if one.state is STARTED:
            books.waste["cold_start"] += gpus * passed
            books.gaps.starting(gpus * passed)
            continue
        _account_gap(books.gaps, one, gpus * passed, work=work)
        if one.state is fleet.ReplicaState.DRAINING:
            books.waste["drain"] += gpus * passed
        elif one.engine.step_ms == 0:
            books.waste["idle"] += gpus * passed
    books.waste["idle"] += max(0, held - used) * passed
    for cause, count in (("unassigned", held - used), ("not held", fleet_gpus - held)):
        books.gaps.left(max(0, count) * passed, lent=False, work=work, cause=cause)


def _account_gap(books: gaps.Gaps, one: state.Running, gpu_s: float, *, work: bool) -> None:
    """Book what a replica that has started leaves over."""
    if one.state is fleet.ReplicaState.DRAINING:
        cause = "draining"
    else:
        cause = "beside callers" if one.engine.running else "idle"
    books.left(gpu_s * one.engine.spare, lent=one.engine.batch > 0, work=work, cause=cause)


def _sample(here: world.World) -> None:
    """Note a point of the plot: hour, interactive GPUs, batch GPUs, starting, requests/s, waiting."""
    counts = _Point()
    for one in here.replicas.values():
        gpus = here.site.models[one.model].shape.gpus
        if one.state is STARTED:
            counts.starting += gpus
        elif one.state is fleet.ReplicaState.SERVING:
            if one.role is fleet.Role.BATCH:
                counts.batch += gpus
            else:
                counts.interactive += gpus
    if not here.books.counting:
        return
    here.books.line.append(
        (
            here.now / 3600,
            counts.interactive,
            counts.batch,
            counts.starting,
            sum(here.rates),
            sum(len(queue) for queue in here.waiting),
        )
    )


@dataclasses.dataclass(slots=True)
class _Point:
    interactive: int = 0
    batch: int = 0
    starting: int = 0
