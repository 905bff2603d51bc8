"""The broker: stands by until it leads, then serves agents and gateways and carries out plans."""

import asyncio
import dataclasses
import datetime
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from grpc import aio

from scheduler.contracts import clock, fleet, ports, slurm, wire
from scheduler.contracts.v1 import control_pb2_grpc
from scheduler.core import plan, targets
from scheduler.runtime import (
    address,
    agents,
    applier,
    config,
    entries,
    forecasts,
    guard,
    leadership,
    lease_acts,
    live,
    loop,
    node_weights,
    overlap,
    rolling,
    schedules,
    settings,
    snapshots,
    watch,
)
from scheduler.runtime.registry import database, store, watcher, weight_acts

log = logging.getLogger(__name__)
CATALOG_S = 1.0  # an admin's wish counts within so long
FACTS_S = 2.0
WORK_S = 5.0  # between two looks at what batch jobs want; shares move far more slowly
LOOK_S = 30.0  # between two tries to read the ledger, and how late a look back may be
STOP_S = 1.0
PERIOD_LOOK_S = 10.0  # a new leader finds a period that was left half done within so long


@dataclasses.dataclass(frozen=True, slots=True)
class Parts:
    """What a broker is made of; the composition root fills it.

    Attributes:
        lease_renderer: makes a lease's job.
        models: forebay.toml's `[[models]]`.
        batch_work: what batch jobs still want, by model; blocks, and raises `SQLAlchemyError`.
        ledger: what callers asked for so far, which forecasts learn from.
        zone: whose clock the days of callers follow.
    """

    options: settings.Settings
    registry: store.Registry
    slurm: slurm.SlurmPort
    lease_renderer: lease_acts.LeaseRenderer
    state_dir: Path
    time: clock.Clock
    cluster: str
    models: Sequence[config.ModelSettings] = ()
    batch_work: Callable[[], Mapping[str, ports.BatchWork]] = dict
    ledger: ports.DemandLedger = dataclasses.field(default_factory=ports.NoLedger)
    zone: datetime.tzinfo = datetime.UTC


class Leader:
    """A broker that leads: one epoch from `start` to `stop`.

    `tick` may be called by hand (tests with a fake clock do); `serve` calls it from the loop.
    """

    def __init__(self, parts: Parts, epoch: int) -> None:
        options = parts.options
        self._parts = parts
        self._time = parts.time
        self.live = live.Live(
            epoch,
            parts.cluster,
            entries.Pauses(options.restart_backoff_s, options.restart_backoff_max_s),
            parts.time.monotonic(),
        )
        self.poller = snapshots.Poller(parts.slurm, self.live, parts.time, options.slurm_poll_s)
        self.applier = applier.Applier(
            self.live, parts.registry, parts.slurm, parts.lease_renderer, options, parts.time
        )
        self.forecasts = forecasts.Forecasts(parts.ledger, parts.zone, options.forecast_days)
        self._overlap = overlap.Overlap(None, parts.time.monotonic(), parts.time.wall_us())
        self._watcher = watcher.Watcher(parts.registry.database, parts.registry.declared.serial)
        self._rolling = rolling.Rolling(self.live, parts.registry, parts.time)
        self._server: aio.Server | None = None
        self._speaking: frozenset[str] = frozenset()
        self._catalog_due = float("-inf")
        self._work_due = float("-inf")
        self._look_due = float("-inf")
        self._facts_due = float("-inf")
        self._weight_acts = weight_acts.WeightActs(parts.registry.database)
        self.live.weights.most = options.prestage_models
        self.address = ""
        self.notes: tuple[str, ...] = ()
        self.wanted: Mapping[tuple[str, str], targets.Target] = {}

    async def start(self) -> str:
        """Read the registry, serve, and tell everybody where; return the address."""
        parts = self._parts
        await asyncio.to_thread(parts.registry.catalog.declare, parts.models, parts.time.wall_us())
        held = await asyncio.to_thread(parts.registry.holdings.load)
        self.live.restore(held, parts.time.monotonic())
        starts = await asyncio.to_thread(parts.registry.journal.fact, "starts")
        if starts is not None:
            self.live.starts.restore(starts.body)
        await self._read_catalog()
        told = await asyncio.to_thread(parts.registry.journal.fact, overlap.FACT)
        body = told.body if told is not None else None
        self._overlap = overlap.Overlap(body, parts.time.monotonic(), parts.time.wall_us())
        keeper = guard.Guard(await asyncio.to_thread(guard.token, parts.state_dir))
        server = aio.server(options=wire.SERVER_OPTIONS)
        control_pb2_grpc.add_AgentLinkServicer_to_server(
            agents.AgentLink(self.live, parts.time, keeper), server
        )
        control_pb2_grpc.add_FleetServicer_to_server(
            watch.Fleet(self.live, parts.time, keeper, parts.options), server
        )
        port = server.add_insecure_port(parts.options.listen)
        await server.start()
        self._server = server
        host = parts.options.advertise or parts.options.listen.rsplit(":", 1)[0]
        self.address = f"{host}:{port}"
        where = address.Address(self.address, self.live.epoch)
        await asyncio.to_thread(address.publish, parts.state_dir, where)
        log.info("leading with epoch %d at %s", self.live.epoch, self.address)
        return self.address

    async def stop(self) -> None:
        """End every link; leases, replicas and streams go on without us."""
        self._watcher.close()
        await self.poller.close()
        await self.applier.close(STOP_S)
        if self._server is not None:
            await self._server.stop(STOP_S)

    async def tick(self) -> plan.Plan:
        """Plan once and apply it; return the plan.

        Raises:
            database.Fenced: another broker leads.
        """
        now = self._time.monotonic()
        await self._outrank()
        if self.live.hung_up:
            self.live.hung_up.clear()
            self.poller.soon()
        self.poller.kick()
        # Looked at first, so that a change that comes during the reading is seen by the next look.
        if await asyncio.to_thread(self._watcher.moved) or now >= self._catalog_due:
            await self._read_catalog()
            self._catalog_due = now + CATALOG_S
        if self.live.settled and await self._rolling.step(self.wanted):
            await self._read_catalog()
        if now >= self._work_due:
            self.live.batch_work = await asyncio.to_thread(self._parts.batch_work)
            self._work_due = now + WORK_S
        self._note_silence(now)
        await self.applier.flush()
        picture = snapshots.collect(self.live, self._time, self._parts.options, self._parts.zone)
        made = plan.plan(picture, self._parts.options)
        results = await self.applier.apply(made)
        await self.applier.flush()
        if results:
            await self._record(results, made.notes)
            self.poller.soon()
        self.notes = made.notes
        self.wanted = made.wanted
        sizes = {each.key: each.spec.gpus for each in picture.deployments}
        wanted_gpus = sum(each.total * sizes.get(key, 0) for key, each in made.wanted.items())
        self._overlap.note(picture, self._parts.options, wanted_gpus)
        if now >= self._facts_due or results:
            await self._tell(now)
            self._facts_due = now + FACTS_S
        return made

    async def look_back(self) -> None:
        """Learn from what the ledger has by now, and leave what it teaches for `fctl show forecast`.

        Does nothing until it is time, or if the ledger could not be read, until the next call.
        """
        if self._time.monotonic() < self._look_due:
            return
        now_us = self._time.wall_us()
        learned = await asyncio.to_thread(self.forecasts.refresh, now_us)
        self.live.learned = learned
        if learned.error:
            log.warning("the ledger can't be read, forecasts stay as they are: %s", learned.error)
        else:
            self._look_due = self._time.monotonic() + self._parts.options.forecast_every_s
        told = await asyncio.to_thread(
            forecasts.told, learned, self._parts.zone, now_us, self._parts.options.forecast_days
        )
        await asyncio.to_thread(
            self._parts.registry.journal.set_facts, self.live.epoch, now_us, {"forecast": told}
        )

    def view(self) -> fleet.FleetView:
        """Return what gateways are told now."""
        return snapshots.view(self.live, self._time.monotonic(), self._parts.options)

    async def _outrank(self) -> None:
        """Begin a newer epoch if an agent follows one: the registry was lost, or is an old copy."""
        over = self.live.outranked_by
        if over <= self.live.epoch:
            return
        await asyncio.to_thread(self._parts.registry.lead.lift, self.live.epoch, over)
        raise database.Fenced(f"agents follow epoch {over}: this registry is older, leading anew")

    async def _read_catalog(self) -> None:
        """Take up what admins wish: scaling, schedules, holds, drains."""
        registry = self._parts.registry
        deployments = await asyncio.to_thread(registry.catalog.deployments)
        routes = await asyncio.to_thread(registry.catalog.routes, self.live.cluster)
        self.live.rollouts = await asyncio.to_thread(registry.rollouts.all, under_way=True)
        drains = await asyncio.to_thread(registry.holdings.drains)
        self.live.cordons = await asyncio.to_thread(registry.cordons.all)
        self.live.weights.acts = await asyncio.to_thread(self._weight_acts.all)
        self.live.standing = await asyncio.to_thread(registry.wishes.read)
        timetable = await asyncio.to_thread(registry.timetable.all)
        self.live.scheduled = schedules.in_force(timetable, self._time.wall_us())
        for replica_id in drains & self.live.replicas.keys():
            self.live.replicas[replica_id].drain_asked = True
        if (deployments, routes) != (self.live.deployments, self.live.routes):
            self.live.deployments, self.live.routes = deployments, routes
            self.live.touch()

    def _note_silence(self, now: float) -> None:
        """Tell gateways when an agent or another gateway goes silent: nothing else would change then."""
        speaking = frozenset(
            lease_id
            for lease_id, entry in self.live.leases.items()
            if entry.seen is not None and now - entry.seen <= self._parts.options.agent_silent_s
        )
        if self.live.gateways.changed(now) or speaking != self._speaking:
            self._speaking = speaking
            self.live.touch()

    async def _record(self, results: Sequence[applier.Result], notes: Sequence[str]) -> None:
        body: dict[str, Any] = {
            "actions": [
                {
                    "act": type(result.action).__name__,
                    "what": applier.describe(result.action),
                    "outcome": result.outcome,
                }
                for result in results
            ],
            "notes": list(notes),
        }
        await asyncio.to_thread(
            self._parts.registry.journal.add_plan,
            self.live.epoch,
            self._time.wall_us(),
            body,
            keep=self._parts.options.plan_history,
        )

    async def _tell(self, began: float) -> None:
        """Leave what other processes show: nodes, queues, why nothing is done, how long a tick takes."""
        now = self._time.monotonic()
        demand = snapshots.demand(self.live, now, self._parts.options)
        self.live.weights.keep(list(self.live.leases))
        if over := self.live.weights.over(self._time.wall_us()):
            await asyncio.to_thread(
                self._weight_acts.end, over, self.live.epoch, self._time.wall_us()
            )
        facts: dict[str, dict[str, Any]] = {
            "nodes": {
                "nodes": [
                    {
                        **dataclasses.asdict(node),
                        "flags": sorted(node.flags),
                        "unknown_flags": sorted(node.unknown_flags),
                    }
                    for node in self.live.nodes
                ],
                "reservations": [
                    {**dataclasses.asdict(kept), "flags": sorted(kept.flags)}
                    for kept in self.live.reservations
                ],
                "error": self.poller.error or self.poller.unread,
            },
            node_weights.FACT: self.live.weights.fact(),
            overlap.FACT: self._overlap.fact(),
            "queue": {name: dataclasses.asdict(item) for name, item in demand.items()},
            "starts": self.live.starts.told(),
            "rollouts": self._rolling.facts(),
            "broker": {
                "epoch": self.live.epoch,
                "address": self.address,
                "notes": list(self.notes),
                "targets": [
                    {"model": model, "version": version, **dataclasses.asdict(target)}
                    for (model, version), target in self.wanted.items()
                ],
                "tick_ms": round((now - began) * 1000, 2),
                "slurm": self.poller.error or "answers",
            },
        }
        await asyncio.to_thread(
            self._parts.registry.journal.set_facts, self.live.epoch, self._time.wall_us(), facts
        )


async def serve(
    parts: Parts,
    *,
    periodic: Sequence[loop.Periodic] = (),
    ready: Callable[[str], None] | None = None,
) -> None:
    """Run a broker until cancelled: stand by, lead, and stand by again if another one takes over.

    Args:
        parts: what it is made of.
        periodic: work for the leader alone.
        ready: called with the address each time this broker begins to lead.
    """
    claim = leadership.Leadership(parts.registry.lead, parts.options, parts.time)
    while True:
        epoch = await claim.acquire()
        over = asyncio.Event()
        leader = Leader(parts, epoch)
        runner = loop.Loop(over.set)
        try:
            where = await leader.start()
            runner.every("tick", parts.options.tick_s, leader.tick)
            runner.every("renew the lead", parts.options.leader_renew_s, claim.renew)
            runner.every("look back", LOOK_S, leader.look_back)
            for work, job in loop.periodic_jobs(periodic, parts.registry.lead, epoch, parts.time):
                runner.every(work.name, min(work.every_s, PERIOD_LOOK_S), job)
            runner.start()
            if ready is not None:
                ready(where)
            await over.wait()
            log.warning("epoch %d is over: another broker leads", epoch)
        finally:
            await runner.close()
            await leader.stop()
            await claim.release()
