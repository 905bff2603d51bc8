"""A job's open lines in the order in which they run: looked through by thousands, read again one by one.

Lines are put in order far ahead of where they are sent, whatever their size: of each that was looked at
only its key and its place in the file stay in memory, and its text is read a second time when its turn
is near. Documents of 40 KB share as well as prompts of a sentence do. Each model's lines have an order of
their own, and all models' lines come at once. Where a model takes none for long, its lines are passed over in
search of the others' and come in the next round through the file: no fleet waits for another's, however the
file is mixed. Blocks: used in a thread.
"""

import collections
import os
import struct
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from batch_jobs import client, grouping, intake, journal, lines, results

_FIRST = 2_048  # lines that are looked through before the first is sent
_MOST = 32_768  # and later: 3 MB of keys, half a second
_PASSED = 8_192  # lines of a model that is not asked for are in order; more of it are passed over
_SCAN_BYTES = 256 * 1024 * 1024  # of the file at once, where lines are long
_PLACE = struct.Struct("!QQQ")  # number, where it begins, how long it is
_NONE: Collection[str] = frozenset()


class Reader:
    """Reads a job's lines.

    Args:
        source: the job's files.
        done: what its journal knows; lines that have a result are passed over.
    """

    def __init__(self, source: results.Source, done: journal.Recovered) -> None:
        self._source = source
        self._path: Path = source.folder / results.INPUT
        self._done = done
        self._at = 0  # the line that was looked at last
        self._raws = self._open()
        self._all = False  # this round through the file is over
        self._window = _FIRST
        self._plan: dict[str, list[bytes]] = {}  # by model: keys and places, the next line last
        self._bad: list[lines.BadLine] = []
        noted = intake.models(source.folder)
        self._noted = noted is not None
        self._numbers = {name: number for number, name in enumerate(noted or (), 1)}
        # Lines of each model that are to be looked at still; an earlier runner may have had answers.
        self._left: collections.Counter[str] = collections.Counter(noted or {})
        for name, number in self._numbers.items():
            self._left[name] -= done.answered[number]
        self._passed: set[str] = set()  # models of lines that were passed over in this round
        self._taken: bytearray | None = (
            None  # by line, once some were passed over: those that were not
        )

    @property
    def models(self) -> Collection[str]:
        """The models of the lines that are in order."""
        return self._plan.keys()

    @property
    def exhausted(self) -> bool:
        """Whether every line was given out."""
        return self._all and not (self._plan or self._bad or self._passed)

    def number(self, name: str) -> int:
        """Return by which number results of a model's lines are noted, for the next reader to count."""
        return self._numbers.get(name) or self._numbers.get(intake.OTHERS, 0)

    def more(self, enough: Collection[str]) -> bool:
        """Whether reading brings lines of models that are not among ``enough``, or comes nearer to them."""
        if self._bad or any(name not in enough for name in self._plan):
            return True
        if self._all:
            return any(name not in enough for name in self._passed)
        if not (self._plan or enough):
            return True  # the end of the file, if nothing else
        if any(count > 0 and name not in enough for name, count in self._left.items()):
            return True
        return not self._noted and sum(map(len, self._plan.values())) < _PASSED

    def read(self, enough: Collection[str] = _NONE) -> list[client.Work | lines.BadLine]:
        """Return the next lines, of each model some; none: see `more` and `exhausted`.

        Args:
            enough: models of which none are wanted now.

        Raises:
            OSError: it can't be read now; the next call goes on from there.
        """
        wanted = self._wanted(enough)
        if not wanted and self.more(enough):
            self._look(enough)
            wanted = self._wanted(enough)
        found: list[client.Work | lines.BadLine] = []
        share, size = max(1, len(wanted)), 0
        with self._path.open("rb") as file:
            try:
                for name in wanted:
                    for work in self._next(file.fileno(), name, share):
                        found.append(work)
                        size += len(work.payload) if isinstance(work, client.Work) else 0
                    if len(found) >= grouping.LINES or size >= grouping.BYTES:
                        break
            except OSError:
                if not found:
                    raise
        bad, self._bad = self._bad, []
        return [*bad, *found]

    def _wanted(self, enough: Collection[str]) -> Sequence[str]:
        return [name for name in self._plan if name not in enough]

    def _next(self, file: int, name: str, share: int) -> Iterator[client.Work | lines.BadLine]:
        """Yield a model's next lines, one part in ``share`` of what is read at once."""
        plan, size = self._plan[name], 0
        for _ in range(max(1, grouping.LINES // share)):
            if not plan or size * share >= grouping.BYTES:
                break
            number, begin, length = _PLACE.unpack(plan[-1][-_PLACE.size :])
            data = os.pread(file, length, begin)
            plan.pop()
            size += length
            line = lines.parse(lines.RawLine(number, data), self._source.rules)
            if isinstance(line, lines.Line):
                yield client.Work.of(line)
            elif line is not None:  # the file is no longer what it was
                yield line
        del self._plan[name]
        if plan:
            self._plan[name] = plan  # behind the others, where not all have their turn at once

    def _look(self, enough: Collection[str]) -> None:
        """Look lines through and put them in order."""
        if self._all:
            self._all, self._at = False, 0
            self._passed.clear()
            self._raws = self._open()
        held = sum(map(len, self._plan.values()))
        # What is in order of models that take none has its part of the memory.
        count, size = min(held, max(0, self._window - _FIRST)), 0
        most = _PASSED if held < _MOST else 1
        try:
            for raw in self._raws:
                if raw.number <= self._at:
                    continue
                self._at = raw.number
                if not self._known(raw.number):
                    count += self._take(raw, enough, most)
                    size += len(raw.data)
                if count >= self._window or size >= _SCAN_BYTES:
                    break
            else:
                self._all = True
        except OSError:
            self._raws = self._open()  # from there: one that has failed gives nothing more
            if not self._bad and not self._wanted(enough):
                raise
        for plan in self._plan.values():
            plan.sort(reverse=True)
        self._window = min(_MOST, 2 * self._window)

    def _known(self, number: int) -> bool:
        """Whether a line has its result, or was put in order or given out before."""
        return bool(self._done.states[number] or (self._taken is not None and self._taken[number]))

    def _take(self, raw: lines.RawLine, enough: Collection[str], most: int) -> bool:
        """Put a line in order; False: it is none, a bad one, or one that is passed over."""
        line = lines.parse(raw, self._source.rules)
        good = isinstance(line, lines.Line)
        if isinstance(line, lines.Line):
            plan = self._plan.setdefault(line.model, [])
            if line.model in enough and len(plan) >= most:
                self._pass(raw.number, line.model)
                return False
            plan.append(grouping.key(line.body) + _PLACE.pack(raw.number, raw.at, len(raw.data)))
            self._left[line.model if line.model in self._left else intake.OTHERS] -= 1
        elif isinstance(line, lines.BadLine):  # the site's limits have changed since intake
            self._bad.append(line)
        if self._taken is not None:
            self._taken[raw.number] = 1
        return good

    def _pass(self, number: int, name: str) -> None:
        self._passed.add(name)
        if self._taken is None:
            self._taken = bytearray(len(self._done.states))
            self._taken[:number] = b"\1" * number

    def _open(self) -> Iterator[lines.RawLine]:
        first = max(1, self._done.states.find(0, 1), self._at + 1)
        return results.read_input(self._path, self._source.max_line_bytes, self._done.marks, first)
