"""The two answers to a copied request: the caller's, heard on its way, and the shadow version's."""

from collections.abc import Callable

from gateway import dispatch, said
from scheduler.contracts import clock, frames, observed, quota


class Answer:
    """One answer as it comes: when, and its bytes as long as they are few."""

    __slots__ = ("_behind", "_clock", "_first", "_limit", "_over", "_parts", "_size", "began")

    def __init__(self, time: clock.Clock, limit: int) -> None:
        self._clock = time
        self._limit = limit
        self._parts: list[bytes] = []
        self._size = 0
        self._first = 0.0
        self._over = 0.0
        self._behind = False
        self.began = 0.0

    def dispatched(self) -> None:
        """Note a dispatch: its time began with the first, and goes on with each."""
        self._over = 0.0
        if not self.began:
            self.began = self._clock.monotonic()

    def restart(self) -> None:
        """Forget what came: another replica begins anew."""
        self._parts, self._size, self._first, self._over = [], 0, 0.0, 0.0

    def over(self) -> None:
        """Note that its last frame has come; what its reader still gets is no time of the replica's."""
        self._over = self._clock.monotonic()

    def behind(self) -> None:
        """Note that its reader keeps it up: when the replica would have ended is not known then."""
        self._behind = self._behind or not self._over

    def let_go(self) -> None:
        """Keep none of its bytes: there is nothing to compare them with."""
        self._limit, self._parts = -1, []

    def add(self, frame: frames.Frame) -> None:
        """Take a DATA frame."""
        if not self._first and (frame.payload or frame.packed):
            self._first = self._clock.monotonic()
        self._size += len(frame.payload)
        if self._size <= self._limit:
            self._parts.append(frame.payload)
        elif self._parts:
            self._parts = []

    def fared(self, end: frames.End | None) -> observed.Fared:
        """Return how it went; without an ``end`` it has failed."""
        now = self._over or self._clock.monotonic()
        tokens = end.output_tokens if end is not None else 0
        first = self._first or now
        timed = not self._behind
        return observed.Fared(
            end is None,
            1000 * (first - self.began) if self._first else 0.0,
            1000 * (now - first) / (tokens - 1) if timed and self._first and tokens > 1 else 0.0,
            1000 * (now - self.began) if timed else 0.0,
            tokens,
        )

    def text(self) -> str | None:
        """Return what it says, None if that is not known."""
        return said.text(b"".join(self._parts)) if self._parts else None


class Tee:
    """The caller's outlet, which a copy listens to."""

    __slots__ = ("_answer", "_begun", "_inner")

    def __init__(self, inner: dispatch.Outlet, answer: Answer, begun: Callable[[], None]) -> None:
        self._inner = inner
        self._answer = answer
        self._begun: Callable[[], None] | None = begun

    @property
    def begun(self) -> bool:
        """Whether the client has got anything of this answer."""
        return self._inner.begun

    def prompt(self, frame: frames.Frame, version: str) -> None:
        """Hear of the prompt's ids."""
        self._inner.prompt(frame, version)
        self._come()

    def data(self, frame: frames.Frame) -> bool:
        """Pass on one DATA frame."""
        going = self._inner.data(frame)
        self._answer.add(frame)
        self._come()
        return going

    def quotas(self, told: quota.Headers) -> None:
        """Tell what is left of the caller's quotas."""
        self._inner.quotas(told)

    async def drained(self) -> None:
        """Return once the client has read enough."""
        self._answer.behind()
        await self._inner.drained()

    def restart(self) -> None:
        """Forget what a lost replica said."""
        self._inner.restart()
        self._answer.restart()

    def _come(self) -> None:
        begun, self._begun = self._begun, None
        if begun is not None:
            begun()


class Sink:
    """Where a copy's answer goes: nowhere."""

    begun = False

    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    def prompt(self, frame: frames.Frame, version: str) -> None:
        """Nobody asked for the prompt's ids."""

    def data(self, frame: frames.Frame) -> bool:
        """Keep a little of it."""
        self._answer.add(frame)
        return True

    def quotas(self, told: quota.Headers) -> None:
        """It has none."""

    async def drained(self) -> None:
        """Memory is never behind."""

    def restart(self) -> None:
        """It is not tried again."""
