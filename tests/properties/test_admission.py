"""Whatever comes, goes, is taken, sent back, expires or moves: no ticket is lost or doubled, bounds hold."""

import collections
import dataclasses

import hypothesis
from hypothesis import stateful
from hypothesis import strategies as st

from scheduler.contracts import requests
from scheduler.core import admission

TIERS = list(requests.Tier)
TEAMS = ["a", "b", "c"]
SHAPES = ["v1", "v2", "v1-long"]
BOUNDS = {
    requests.Tier.INTERACTIVE: admission.Bound(6, 900),
    requests.Tier.STANDARD: admission.Bound(5, 700),
    requests.Tier.BATCH: admission.Bound(4, 500),
}
TOTAL = admission.Bound(9, 1500)
_NEVER = float("inf")


@dataclasses.dataclass
class Known:
    """What a ticket of the model is, told apart from what the queue says."""

    ticket: admission.Ticket
    where: str  # waiting, taken, gone


class QueueMachine(stateful.RuleBasedStateMachine):
    """Compares the queue with a dictionary of what should wait."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = admission.Queue(
            admission.Rules(BOUNDS, TOTAL, half_life_s=20.0, age_s=5.0, age_turns=3, credit=50.0)
        )
        self.known: dict[str, Known] = {}
        self.now = 0.0

    def names(self, where: str) -> list[str]:
        return sorted(name for name, one in self.known.items() if one.where == where)

    @stateful.rule(
        tier=st.sampled_from(TIERS),
        team=st.sampled_from(TEAMS),
        shape=st.sampled_from(SHAPES),
        size=st.integers(0, 600),
        cost=st.floats(1, 500),
        left=st.none() | st.floats(0.5, 30),
        rate=st.none() | st.floats(0.1, 10),
    )
    def offer(
        self,
        tier: requests.Tier,
        team: str,
        shape: str,
        size: int,
        cost: float,
        left: float | None,
        rate: float | None,
    ) -> None:
        name = str(len(self.known))
        deadline = None if left is None else self.now + left
        ticket = admission.Ticket(name, tier, team, self.now, deadline, shape, size, cost)
        answer = self.queue.offer(ticket, now=self.now, drain_per_s=rate)
        if isinstance(answer, admission.Refused):
            assert 1 <= answer.retry_after_s <= 60
            self.known[name] = Known(ticket, "gone")
            return
        self.known[name] = Known(ticket, "waiting")
        for victim in answer.shed:
            assert victim.tier.band >= tier.band
            assert victim.team != team or victim.tier is not tier
            # Who has had its turn is never sent away; a line of batch is sent again by its runner.
            where = self.known[victim.request_id].where
            assert where == "waiting" or (where == "again" and victim.tier is requests.Tier.BATCH)
            self.known[victim.request_id].where = "gone"
        # Bounds hold right after every offer that was granted (a requeue may exceed them).
        if not any(one.where == "again" for one in self.known.values()):
            mine = [one.ticket for one in self.known.values() if one.where == "waiting"]
            here = [one for one in mine if one.tier is tier]
            assert len(here) <= BOUNDS[tier].requests
            assert sum(one.size for one in here) <= BOUNDS[tier].size

    @stateful.rule(blocked=st.sets(st.sampled_from(SHAPES)), closed=st.sets(st.sampled_from(TIERS)))
    def take(self, blocked: set[str], closed: set[requests.Tier]) -> None:
        asked: list[admission.Ticket] = []

        def place(ticket: admission.Ticket) -> bool | None:
            asked.append(ticket)
            return None if ticket.shape in blocked else True

        taken = self.queue.take(place, self.now, frozenset(closed))
        could = [
            one.ticket
            for one in self.known.values()
            if one.where in {"waiting", "again"}
            and one.ticket.shape not in blocked
            and one.ticket.tier not in closed
        ]
        assert (taken is None) == (not could)
        assert len({(one.tier, one.shape) for one in asked}) >= len(asked) - 1  # aged: asked twice
        if taken is None:
            return
        ticket = taken[0]
        own = [
            one
            for one in could
            if (one.tier, one.team, one.shape) == (ticket.tier, ticket.team, ticket.shape)
        ]
        soonest = min(_NEVER if one.deadline is None else one.deadline for one in own)
        assert (_NEVER if ticket.deadline is None else ticket.deadline) == soonest  # EDF in a team
        self.known[ticket.request_id].where = "taken"

    @stateful.precondition(lambda self: self.names("taken"))
    @stateful.rule(pick=st.integers(0, 99))
    def requeue(self, pick: int) -> None:
        names = self.names("taken")
        one = self.known[names[pick % len(names)]]
        self.queue.requeue(one.ticket, self.now)
        one.where = "again"

    @stateful.precondition(lambda self: self.names("taken"))
    @stateful.rule(pick=st.integers(0, 99), cost=st.floats(0, 900))
    def settle(self, pick: int, cost: float) -> None:
        names = self.names("taken")
        one = self.known[names[pick % len(names)]]
        self.queue.settle(one.ticket, cost, self.now)
        one.where = "gone"

    @stateful.precondition(lambda self: self.known)
    @stateful.rule(pick=st.integers(0, 99))
    def leave(self, pick: int) -> None:
        names = sorted(self.known)
        one = self.known[names[pick % len(names)]]
        removed = self.queue.remove(one.ticket.request_id)
        assert (removed is not None) == (one.where in {"waiting", "again"})
        if removed is not None:
            one.where = "gone"

    @stateful.rule(seconds=st.floats(0, 40))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        late = {
            name
            for name, one in self.known.items()
            if one.where in {"waiting", "again"}
            and one.ticket.deadline is not None
            and one.ticket.deadline <= self.now
        }
        assert {ticket.request_id for ticket in self.queue.expire(self.now)} == late
        for name in late:
            self.known[name].where = "gone"

    @stateful.rule(seconds=st.floats(10_000, 1e6))
    def pass_days(self, seconds: float) -> None:
        self.pass_time(seconds)

    @stateful.rule(shape=st.sampled_from(SHAPES))
    def drop(self, shape: str) -> None:
        gone = {ticket.request_id for ticket in self.queue.drop(shape)}
        for name in gone:
            assert self.known[name].where in {"waiting", "again"}
            self.known[name].where = "gone"

    @stateful.rule(old=st.sampled_from(SHAPES), new=st.sampled_from(SHAPES))
    def reshape(self, old: str, new: str) -> None:
        self.queue.reshape(lambda one: new if one.shape == old else one.shape, self.now)

    @stateful.invariant()
    def the_queue_holds_what_waits(self) -> None:
        here = [one.ticket for one in self.known.values() if one.where in {"waiting", "again"}]
        assert len(self.queue) == len(here)
        assert self.queue.size == sum(one.size for one in here)
        counts = collections.Counter(one.tier.value for one in here)
        assert self.queue.waiting() == {tier.value: counts[tier.value] for tier in TIERS}
        assert self.queue.shapes() == {one.shape for one in here}
        for tier in TIERS:
            oldest = self.queue.oldest(tier)
            assert (oldest is None) == (not counts[tier.value])
        for one in self.known.values():
            waits = one.where in {"waiting", "again"}
            assert (one.ticket.request_id in self.queue) == waits

    def teardown(self) -> None:
        """Everything returns to nothing."""
        while self.queue.take(lambda one: True, self.now) is not None:
            pass
        assert len(self.queue) == 0
        assert self.queue.size == 0
        assert self.queue.shapes() == set()
        assert self.queue.expire(float("inf")) == ()


QueueMachine.TestCase.settings = hypothesis.settings(stateful_step_count=40, deadline=None)
TestQueue = QueueMachine.TestCase


@hypothesis.settings(deadline=None)
@hypothesis.given(
    costs=st.lists(st.floats(10, 3000), min_size=2, max_size=6),
    draw=st.randoms(use_true_random=False),
)
def test_backlogged_teams_get_equal_service(costs: list[float], draw: object) -> None:
    """Shares of teams that always wait differ by one dearest request at most, whatever theirs cost."""
    waiting = _wide()
    teams = {f"t{n}": cost for n, cost in enumerate(costs)}
    counts: collections.Counter[str] = collections.Counter()
    had: dict[str, float] = dict.fromkeys(teams, 0.0)

    def refill(team: str) -> None:
        counts[team] += 1
        name = f"{team}-{counts[team]}"
        cost = teams[team] * draw.uniform(0.5, 1.0)  # type: ignore[attr-defined]  # a Random
        ticket = admission.Ticket(name, requests.Tier.INTERACTIVE, team, 0.0, None, "s", 1, cost)
        waiting.offer(ticket, now=0.0, drain_per_s=None)

    for team in teams:
        refill(team)
        refill(team)
    for _ in range(300):
        taken = waiting.take(lambda one: one, 0.0)
        assert taken is not None
        had[taken[0].team] += taken[0].cost
        refill(taken[0].team)
    assert max(had.values()) - min(had[team] for team in teams) <= 2 * max(costs)


@hypothesis.settings(deadline=None)
@hypothesis.given(flood=st.integers(1, 200), share=st.integers(2, 12), age_s=st.floats(0, 50))
def test_standard_never_starves(flood: int, share: int, age_s: float) -> None:
    """A standard request goes after `age_s` and at most `share` turns for each that is before it."""
    waiting = _wide(age_s=age_s, age_turns=share)
    name = "mine"
    for n in range(3):
        who = admission.Ticket(
            name if n == 2 else f"s{n}", requests.Tier.STANDARD, "a", 0.0, None, "s", 1, 1.0
        )
        waiting.offer(who, now=0.0, drain_per_s=None)
    now, turns, fresh = age_s, 0, 0
    while name in waiting:
        while waiting.waiting()["interactive"] < flood:  # interactive requests never end
            fresh += 1
            extra = admission.Ticket(
                f"i{fresh}", requests.Tier.INTERACTIVE, "b", now, None, "s", 1, 1.0
            )
            waiting.offer(extra, now=now, drain_per_s=None)
        assert waiting.take(lambda one: one, now) is not None
        now += 0.01
        turns += 1
        assert turns <= 3 * share


def _wide(**rules: float) -> admission.Queue:
    bound = admission.Bound(10_000, 10_000)
    made = dict.fromkeys(requests.Tier, bound)
    return admission.Queue(admission.Rules(made, bound, **rules))  # type: ignore[arg-type]  # by name
