"""Against thrash: no batch line is preempted a third time while one that is not pinned runs beside it."""

import hypothesis
from hypothesis import strategies as st

from engines.replica import seats
from scheduler.contracts import fleet, requests

I, B = requests.Tier.INTERACTIVE, requests.Tier.BATCH  # noqa: E741 - tiers
LINES = 4
BEFORE = st.lists(st.integers(0, 3), min_size=LINES, max_size=LINES)  # elsewhere, by line
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["line", "line", "person", "shed", "gone", "ended"]),
        st.integers(0, LINES - 1),
        st.sampled_from([1, 1, 2, 3]),
    ),
    min_size=12,
    max_size=60,
)


class World:
    """A replica, and lines that come back as their runner sends them: with how often they were preempted."""

    def __init__(self, total: int, before: list[int]) -> None:
        self.table = seats.Seats(total, 0, fleet.Role.SHARED)
        self.preempted = {f"line{which}": count for which, count in enumerate(before)}
        self.running: dict[str, int] = {}  # when each line that is not leaving sat down
        self.leaving: list[str] = []
        self.needs: dict[str, int] = {}
        self.people: list[str] = []
        self.serial = 0

    def take(self, step: str, which: int, count: int) -> None:
        """Do one step; lines are named by ``which``, and tried again under their own name."""
        self.serial += 1
        if step == "line":
            self._line(f"line{which}", count)
        elif step == "person":
            self._person(count)
        elif step == "shed":
            leaving = sum(self.needs[name] for name in self.leaving)
            self._left(self.table.shed(leaving + count))
        elif step == "gone" and self.leaving:
            self.table.give_back(self.leaving.pop(which % len(self.leaving)))
        elif step == "ended":
            self._ended(which)

    def _line(self, name: str, need: int) -> None:
        if name in self.table:
            return
        answer = self.table.ask(name, B, need, self.preempted[name])
        assert answer.victims == ()
        if answer.verdict is seats.Verdict.SEATED:
            self.running[name] = self.serial
            self.needs[name] = min(need, self.table.total)

    def _person(self, need: int) -> None:
        name = f"person{self.serial}"
        answer = self.table.ask(name, I, need)
        self._left(answer.victims)
        if answer.verdict is not seats.Verdict.FULL:
            self.people.append(name)

    def _ended(self, which: int) -> None:
        names = [*self.people, *self.running]
        if names:
            name = names[which % len(names)]
            self.table.give_back(name)
            self.running.pop(name, None)
            self.people = [each for each in self.people if each != name]

    def _left(self, victims: tuple[str, ...]) -> None:
        for name in victims:
            sat = self.running.pop(name)
            third = self.preempted[name] >= 2
            alike = {n: at for n, at in self.running.items() if (self.preempted[n] >= 2) == third}
            assert all(at < sat for at in alike.values()), "the youngest first"
            if third:
                assert set(alike) == set(self.running), f"{name} is pinned, and others were there"
            self.preempted[name] += 1
            self.leaving.append(name)


@hypothesis.settings(max_examples=max(300, hypothesis.settings().max_examples), deadline=None)
@hypothesis.given(st.integers(1, 5), BEFORE, STEPS)
def test_no_line_is_preempted_a_third_time_while_one_that_is_not_pinned_runs(
    total: int, before: list[int], steps: list[tuple[str, int, int]]
) -> None:
    world = World(total, before)
    for step in steps:
        world.take(*step)
        assert world.table.interactive + world.table.batch >= len(world.table)


def test_a_lone_line_is_preempted_as_often_as_people_come() -> None:
    world = World(1, [0])
    for _ in range(4):
        for step in ("line", "person", "gone", "ended"):
            world.take(step, 0, 1)
    assert world.preempted["line0"] == 4, "interactive work goes first"
