"""The leading broker: serves agents and gateways, makes plans and carries them out."""

import asyncio
import dataclasses
import datetime
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from grpc import aio
from sqlalchemy import exc

from scheduler.contracts import clock, fleet, ports, slurm, wire
from scheduler.contracts.v1 import control_pb2_grpc
from scheduler.core import grounds, members, plan, snapshot, targets
from scheduler.runtime import (
    adapter_pools,
    address,
    agents,
    apart,
    applier,
    config,
    entries,
    firings,
    forecasts,
    guard,
    lease_acts,
    live,
    node_weights,
    overlap,
    polling,
    recalling,
    rolling,
    settings,
    snapshots,
    telling,
    watch,
    writeoff,
)
from scheduler.runtime.registry import database, store, watcher, weight_acts

log = logging.getLogger(__name__)
CATALOG_S = 1.0  # an admin's wish counts within so long
FACTS_S = 2.0
ADAPTERS_S = 0.05  # between two placements: reports of many replicas come within that
WORK_S = 5.0  # between two looks at what batch jobs want; shares move far more slowly
STOP_S = 1.0
DAY_US = 86_400_000_000


@dataclasses.dataclass(frozen=True, slots=True)
class Parts:
    """What a broker is made of; the composition root fills it.

    Attributes:
        lease_renderer: makes a lease's job.
        models: forebay.toml's `[[models]]`.
        batch_work: what batch jobs still want, by model; blocks, and raises `SQLAlchemyError`.
        ledger: what callers asked for so far, which forecasts learn from.
        zone: whose clock the days of callers follow.
        write_off: where the last GPU time of a lease goes whose node died.
        service_users: whose jobs may be leases, beside the user that `slurm` submits as.
        where: partitions, GPU type and features that `lease_renderer` asks for.
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
    write_off: writeoff.WriteOff = writeoff.nowhere
    service_users: frozenset[str] = frozenset()
    where: grounds.Grounds = grounds.Grounds()  # noqa: RUF009 - frozen


class Leader:
    """A broker that leads: one epoch from `start` to `stop`.

    `tick` may be called by hand (tests with a fake clock do); `serving.serve` calls it from the loop.
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
        self.poller = polling.Poller(
            parts.slurm, self.live, parts.time, options.slurm_poll_s, parts.service_users
        )
        self.applier = applier.Applier(
            self.live,
            parts.registry,
            parts.slurm,
            parts.lease_renderer,
            options,
            parts.time,
            parts.write_off,
        )
        self.forecasts = forecasts.Forecasts(parts.ledger, parts.zone, options.forecast_days)
        self._overlap = overlap.Overlap(None, parts.time.monotonic(), parts.time.wall_us())
        self._watcher = watcher.Watcher(parts.registry.database, parts.registry.declared.serial)
        self._rolling = rolling.Rolling(self.live, parts.registry, parts.time)
        self._server: aio.Server | None = None
        # Who speaks, and what rests: both change with time alone.
        self._known: tuple[frozenset[object], ...] = (frozenset(), frozenset())
        self._catalog_due = float("-inf")
        self._work_due = float("-inf")
        self._look_due = float("-inf")
        self._facts_due = float("-inf")
        self._weight_acts = weight_acts.WeightActs(parts.registry.database)
        self.live.weights.most = options.prestage_models
        self.live.adapters.retry_s = options.adapter_retry_s
        self._whole_at = parts.time.monotonic()  # the end of the last tick that had its registry
        self._bridging = False
        self.address = ""
        self.notes: tuple[str, ...] = ()
        self.wanted: Mapping[tuple[str, str], targets.Target] = {}

    async def start(self) -> str:
        """Read the registry, serve, and tell everybody where; return the address."""
        parts = self._parts
        await asyncio.to_thread(parts.registry.catalog.declare, parts.models, parts.time.wall_us())
        await recalling.held(parts.registry, self.live, parts.time.monotonic())
        await self._read_catalog()
        self._overlap = await recalling.overlapped(parts.registry, parts.time)
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
        where = address.Address(f"{host}:{port}", self.live.epoch)
        # Whoever took the lead meanwhile has said so in broker.json, and that must stay.
        await asyncio.to_thread(parts.registry.lead.confirm, self.live.epoch)
        await asyncio.to_thread(address.publish, parts.state_dir, where)
        self.address = where.address
        log.info("leading with epoch %d at %s", self.live.epoch, self.address)
        return self.address

    async def announce(self) -> None:
        """Say anew where this leader is, if broker.json names an older one, or nobody.

        One that was stopped between its last look at who leads and its word in that file says it when it
        wakes up, and agents and gateways would leave this leader for it.
        """
        folder, epoch = self._parts.state_dir, self.live.epoch
        where = await asyncio.to_thread(address.read, folder)
        if where is None or where.epoch < epoch:
            log.warning("%s names %s: written anew", address.FILE, where or "nobody")
            await asyncio.to_thread(address.publish, folder, address.Address(self.address, epoch))

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
            await self._read_batch_work()
            self._work_due = now + WORK_S
        self._note_silence(now)
        self._place_adapters()
        await self.applier.flush()
        picture = self._picture()
        made = plan.plan(picture, self._parts.options)
        results = await self.applier.apply(made)
        await self.applier.flush()
        if results:
            await self._record(results, made.notes)
            self.poller.soon()
        self.notes = made.notes
        self.wanted = made.wanted
        sizes = {
            each.key: members.gpus(each.spec, self._parts.options.node_gpus)
            for each in picture.deployments
        }
        wanted_gpus = sum(each.total * sizes.get(key, 0) for key, each in made.wanted.items())
        self._overlap.note(picture, self._parts.options, wanted_gpus)
        if now >= self._facts_due or results:
            await self._tell(now)
            self._facts_due = now + FACTS_S
        self._whole_at, self._bridging = self._time.monotonic(), False
        return made

    async def bridge(self) -> None:
        """Go on with what is in memory while ticks wait for the registry; nothing is done while they do not.

        Links go on by themselves. What is begun, stopped or asked of Slurm is written down and fenced first,
        so it waits; of a plan is done what agents fence themselves (`Applier.apply_unwritten`).

        Raises:
            database.Fenced: broker.json names a newer leader, which a registry that hangs can't say.
        """
        now, options = self._time.monotonic(), self._parts.options
        waited = now - self._whole_at
        if waited <= options.registry_patience_s or not self.live.settled:
            return
        folder = self._parts.state_dir
        where = await asyncio.wrap_future(apart.call(lambda: address.read(folder)))
        if where is not None and where.epoch > self.live.epoch:
            raise database.Fenced(f"{address.FILE} names epoch {where.epoch}: another broker leads")
        if not self._bridging:
            log.warning(
                "no answer of the registry for %.1f s: roles turn, nothing else is begun", waited
            )
        self._bridging = True
        self.poller.kick()
        self._note_silence(now)
        picture = self._picture()
        self.applier.apply_unwritten(plan.plan(picture, options))

    def _picture(self) -> snapshot.Snapshot:
        parts = self._parts
        return snapshots.collect(self.live, self._time, parts.options, parts.zone, parts.where)

    async def follow_adapters(self) -> None:
        """Place adapters as soon as somebody waits for one, or one has come or gone; until cancelled."""
        while True:
            rung = self.live.heard.current()
            if self.live.adapters.dirty:
                self._place_adapters(every=False)
                await asyncio.sleep(ADAPTERS_S)
            await rung.wait()

    def _place_adapters(self, *, every: bool = True) -> None:
        """Place adapters; whatever is wrong there must not keep replicas and leases from being planned."""
        if not self.live.settled:
            return
        try:
            self.live.place_adapters(self._time.monotonic(), self._time.wall_us(), every=every)
        except Exception:
            log.exception("adapters stay as they are")

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

    async def tidy(self) -> None:
        """Let the registry forget leases that are long over, and versions that nobody declares any more."""
        options, registry = self._parts.options, self._parts.registry
        before_us = self._time.wall_us() - round(options.lease_history_days * DAY_US)
        more = True
        while more:
            done = await asyncio.to_thread(
                registry.retention.forget, self.live.epoch, before_us, options.lease_history_rows
            )
            more = done.more
        await asyncio.to_thread(registry.declared.forget, self.live.epoch)

    async def note_firings(self) -> None:
        """Note what schedules began, and what was warm by then."""
        await firings.note(self._parts.registry, self.live, self._time)

    def view(self) -> fleet.FleetView:
        """Return what gateways are told now."""
        return snapshots.view(self.live, self._time, self._parts.options)

    async def _outrank(self) -> None:
        """Begin a newer epoch if an agent follows one: the registry was lost, or is an old copy."""
        over = self.live.outranked_by
        if over <= self.live.epoch:
            return
        await asyncio.to_thread(self._parts.registry.lead.lift, self.live.epoch, over)
        raise database.Fenced(f"agents follow epoch {over}: this registry is older, leading anew")

    async def _read_catalog(self) -> None:
        """Take up what admins wish: scaling, schedules, holds, drains."""
        await recalling.wishes(self._parts.registry, self._weight_acts, self.live, self._time)

    async def _read_batch_work(self) -> None:
        """Look at what batch jobs want; whatever is wrong there must not keep anything from being planned."""
        try:
            self.live.batch_work = await asyncio.to_thread(self._parts.batch_work)
        except exc.SQLAlchemyError:
            raise
        except Exception:
            log.exception("batch work counts as it was last read")

    def _note_silence(self, now: float) -> None:
        """Tell gateways when somebody goes silent or a quarantine ends: nothing else would change then."""
        speaking = frozenset(
            lease_id
            for lease_id, entry in self.live.leases.items()
            if entry.seen is not None and now - entry.seen <= self._parts.options.agent_silent_s
        )
        now_us = self._time.wall_us()
        resting = (each.key for each in self.live.deployments if each.quarantined_until_us > now_us)
        known = (speaking, frozenset(resting))
        if self.live.gateways.changed(now) or known != self._known:
            self._known = known
            self.live.touch()

    async def _record(self, results: Sequence[applier.Result], notes: Sequence[str]) -> None:
        await asyncio.to_thread(
            self._parts.registry.journal.add_plan,
            self.live.epoch,
            self._time.wall_us(),
            telling.plan(results, notes),
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
            "nodes": telling.nodes(self.live, self.poller.error or self.poller.unread),
            node_weights.FACT: self.live.weights.fact(),
            **self._overlap.facts(now),
            adapter_pools.FACT: self.live.adapters.fact(),
            "queue": {name: dataclasses.asdict(item) for name, item in demand.items()},
            "starts": self.live.starts.told(),
            "rollouts": self._rolling.facts(),
            "shadows": {"shadows": self.live.shadows.told(self.live.routes)},
            "broker": {
                "epoch": self.live.epoch,
                "address": self.address,
                "notes": list(self.notes),
                "targets": telling.wanted(self.wanted),
                "tick_ms": round((now - began) * 1000, 2),
                "slurm": self.poller.error or "answers",
                "reports_refused": self.live.reports_refused,
            },
        }
        await asyncio.to_thread(
            self._parts.registry.journal.set_facts, self.live.epoch, self._time.wall_us(), facts
        )
