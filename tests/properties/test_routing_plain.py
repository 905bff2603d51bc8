"""What is kept up to date in steps decides as looking at every replica anew would."""

import copy
import dataclasses
import random
from typing import Any

import pytest

from scheduler.contracts import fleet, ids, requests
from scheduler.core import candidates, groups, holders, load, prefixes, routing
from tests import plain_routing
from tests.unit.scheduler.test_routing import replica

STEPS = 250
POLICY = routing.Policy(slack_tokens=300)


class Drive:
    """A fleet that views, requests and time go through, all drawn from one seed."""

    def __init__(self, seed: int) -> None:
        self.draws = random.Random(seed)
        self.count = self.draws.choice([2, 5, 40])
        # Some fleets are crowded, some nearly idle, some hear nothing for long.
        self.most = self.count * self.draws.choice([1, 3, 6])
        self.pause_s = self.draws.choice([0.01, 0.6])
        self.loads = load.Loads()
        self.fleet = candidates.Fleet(self.loads)
        self.guards: list[load.Guard] = []
        self.now = 0.0
        self.turn = 0
        self.view: list[fleet.Replica] = [self.replica(n) for n in range(self.count)]
        self.fleet.observe(self.view, 0.0)

    def replica(self, number: int) -> fleet.Replica:
        """Return a replica as some view may have it."""
        pick = self.draws.choice
        return replica(
            f"r{number:02}",
            version=pick("1112"),
            role=pick([*fleet.Role, fleet.Role.SHARED, fleet.Role.SHARED]),
            state=pick([fleet.ReplicaState.SERVING] * 5 + [fleet.ReplicaState.DRAINING]),
            seats=pick([1, 4, 8]),
            reserved_seats=pick([0, 1]),
            max_context=pick([2000, 4000]),
            adapters=pick([{}, {"a": "/p"}, {"a": "/p", "b": "/q"}]),
            incarnation=pick([1, 1, 2]),
            stats=self.stats(),
        )

    def stats(self) -> fleet.ReplicaStats | None:
        """Return statistics, now and then none."""
        pick = self.draws.choice
        if not self.draws.randrange(8):
            return None
        return fleet.ReplicaStats(
            at_us=self.turn, seats=8, interactive=pick([0, 2]), batch=pick([0, 1]),
            kv_blocks=pick([0, 200]), kv_free=self.draws.randrange(201), kv_block_tokens=16,
            batch_room=pick([-1, -1, 0, 2]),
        )  # fmt: skip

    def ask(self) -> routing.Ask:
        """Return a request."""
        pick = self.draws.choice
        return routing.Ask(
            "chat",
            pick("1112"),
            pick([requests.Tier.INTERACTIVE] * 3 + [requests.Tier.BATCH]),
            adapter=pick([None, None, "a", "b"]),
            context_tokens=pick([0, 0, 3000]),
            seats=pick([1, 1, 1, 2]),
            prompt_tokens=pick([0, 50, 400, 2500]),
            output_tokens=pick([0, 100]),
            long=pick([False, False, True]),
            left=pick([0.0, 0.0, 0.4]),
            hint=pick([None, None, "h", "k"]),
        )

    def situation(self) -> routing.Situation:
        """Return what is known besides."""
        pick, names = (
            self.draws.choice,
            [one.replica_id for one in self.view] or [ids.ReplicaId("x")],
        )
        held = {pick(names): pick([0.05, 0.3, 0.9]) for _ in range(pick([0, 0, 3, 40]))}
        return routing.Situation(
            self.fleet,
            self.now,
            holders.Holders.of(held),
            key=pick([None, self.draws.getrandbits(64)]),
            adapter_share=pick([0.0, 0.3, 1.0]),
            dead={pick(names): pick([0, 1, 2]) for _ in range(pick([0, 0, 1]))},
            full=frozenset(pick(names) for _ in range(pick([0, 0, 2]))),
            draw=self.draws.random(),
            after=pick(["", pick(names)]),
        )

    def step(self) -> routing.Choice | None:
        """Let one thing happen; a decision is compared."""
        self.turn += 1
        self.now += self.draws.random() * self.pause_s
        kind = self.draws.random()
        if kind < 0.05:
            self.view = [self.replica(n) for n in range(self.count) if self.draws.random() < 0.9]
            self.fleet.observe(self.view, self.now)
        elif kind < 0.2:
            self.view = [dataclasses.replace(one, stats=self.stats()) for one in self.view]
            self.fleet.observe(self.view, self.now)
        elif kind < 0.35 and self.guards:
            self.draws.choice(self.guards).prefilled()
        else:
            return self.decide()
        return None

    def decide(self) -> routing.Choice | None:
        """Decide both ways, compare, and count the request where it went."""
        ask, at = self.ask(), self.situation()
        choice = routing.choose(ask, at, POLICY)
        assert choice == plain_routing.choose(ask, at, POLICY)
        if choice is not None:
            prefill = round(ask.prompt_tokens * (1 - choice.cached_share))
            self.guards.append(
                self.loads.open(
                    ask.model, choice.replica.replica_id, ask.tier, ask.seats,
                    tokens=prefill + ask.output_tokens, prefill=prefill, kv_tokens=ask.kv_tokens,
                )
            )  # fmt: skip
        while len(self.guards) > self.most or (choice is None and self.guards):
            self.guards.pop(self.draws.randrange(len(self.guards))).close()
            if choice is None:
                break
        return choice


@pytest.mark.parametrize("seed", range(16))
def test_decisions_are_those_of_the_plain_way(seed: int) -> None:
    drive = Drive(seed)
    reasons = set()
    for _ in range(STEPS):
        choice = drive.step()
        reasons.add(choice.reason if choice else "")
        for pool in drive.fleet.pools():
            _as_if_made_anew(pool)
    for guard in drive.guards:
        guard.close()
    assert drive.loads.idle
    assert len(reasons) > 2  # else it has shown little


def _as_if_made_anew(pool: groups.Pool) -> None:
    kept = _lists(pool)
    pool.refresh()
    assert kept == _lists(pool)


def _lists(pool: groups.Pool) -> dict[str, Any]:
    names = ("total", "keys", "order", "room", "resting", "newest", "_parts")
    return {name: copy.deepcopy(getattr(pool, name)) for name in names}


def test_the_plain_way_is_met_by_every_kind_of_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """The drives above reach every rule: a comparison of nothing would always hold."""
    sought = {True: 0, False: 0}  # many holders of one share, among those that are not saturated
    really = holders.Holders.has

    def has(held: holders.Holders, mask: int, replica_id: ids.ReplicaId) -> bool:
        sought[found := really(held, mask, replica_id)] += 1
        return found

    monkeypatch.setattr(holders.Holders, "has", has)
    reasons: set[str] = set()
    for seed in range(12):
        drive = Drive(seed)
        for _ in range(STEPS):
            choice = drive.step()
            if choice is not None:
                reasons.add(choice.reason)
    assert reasons == {
        routing.STALE, "prefix is there", "cache hint", "adapter is there", "least work in flight",
    }  # fmt: skip
    assert min(sought.values()) > 10


def test_holders_say_each_share_once() -> None:
    index = prefixes.Index()
    names = [ids.ReplicaId(f"r{n}") for n in range(5)]
    draws = random.Random(2)
    for _ in range(60):
        chain = tuple(range(draws.randint(1, 6)))
        index.dispatched(
            prefixes.Prefix(chain, prefixes.ends(6)[len(chain) - 1]), draws.choice(names)
        )
    whole = prefixes.Prefix(tuple(range(6)), prefixes.ends(6)[-1])
    found = index.holders(whole)
    shares = [share for share, _ in found.levels()]
    assert shares == sorted(set(shares), reverse=True)
    assert found.shares() == {name: found.share(name) for name in names if found.share(name)}
    assert holders.Holders.of(found.shares()).shares() == found.shares()
    assert found.share(ids.ReplicaId("nobody")) == 0.0
