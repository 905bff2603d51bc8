"""What a replica needs of an engine, whichever it is, and the tap through which the engine's tokens are seen.

The engine formats its own OpenAI answers; Forebay's stack around it only wants to know which tokens
the bytes stand for, to end a sequence, and to ask how it is. Knows nothing of seats, tiers or frames.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol

from starlette import types

from engines.replica import adapters, steptime
from engines.replica import work as works
from scheduler.contracts import resume

SOME = (
    64  # ids handed out after which `Tap.on_some` is called: a lost seat costs no more than these
)


class Refused(Exception):
    """Raised by an engine's app when the request itself is at fault and its answer had begun already."""


@dataclasses.dataclass(slots=True)
class Tap:
    """Where an engine notes what it did for one request; read by the response's wrapper.

    Attributes:
        now_us: the clock for `first_token_us`.
        prompt_token_ids: the prompt's ids; empty if the engine does not know them, or if the request
            holds several prompts (such a request can't be resumed).
        prompt_tokens: prompt tokens computed so far, cached ones included, over all prompts.
        cached_tokens: of these, taken from the prefix cache.
        output_tokens: tokens sampled so far, over all choices.
        first_token_us: UTC µs of the first sampled token, 0 before it.
        finish_reasons: by choice, as the engine says.
        failure: why the engine gave up on the request, or "".
        band: `requests.Tier.band` of the request, set before it enters: an engine that orders its
            queue by priority takes the lower first.
        begun: the beginning of the answer, set before it enters: the engine goes on from there. It
            samples and counts new tokens only, and hands out what the beginning has held back.
        single: whether it has one prompt and one choice, set before it enters.
        why_not: why this answer could not go on elsewhere, or "".
        ahead: ids of the first choice's tokens behind those handed out, whose text is held back.
        estimated: the counts are a guess: the engine tells none.
        most_tokens: bound of each sequence's output, set before it enters; 0: what the body says.
        on_first: called at the first sampled token: the prompt has been computed.
        on_some: called when `SOME` ids or more wait for `take`.
    """

    now_us: Callable[[], int]
    prompt_token_ids: tuple[int, ...] = ()
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    first_token_us: int = 0
    finish_reasons: dict[int, str] = dataclasses.field(default_factory=dict)
    failure: str = ""
    band: int = 0
    begun: resume.Resume | None = None
    single: bool = True
    why_not: str = ""
    ahead: Sequence[int] = ()
    estimated: bool = False
    most_tokens: int = 0
    on_first: list[Callable[[], None]] = dataclasses.field(default_factory=list)
    on_some: Callable[[], None] | None = None
    _waiting: int = 0
    _prompts: int = 0
    _pending: dict[int, list[int]] = dataclasses.field(default_factory=dict)
    _chars: int = 0

    def prompt(self, token_ids: Sequence[int]) -> None:
        """Note a prompt's ids, once for each prompt of the request, before its first token."""
        self._prompts += 1
        self.prompt_token_ids = tuple(token_ids) if self._prompts == 1 else ()

    def prefilled(self, count: int, *, cached: int = 0) -> None:
        """Note that a prompt of ``count`` tokens was computed, ``cached`` of them from the cache."""
        self.prompt_tokens += count
        self.cached_tokens += cached

    def sampled(self, count: int) -> None:
        """Count sampled tokens whose ids are handed out later by `released`."""
        if count and not self.first_token_us:
            self.first_token_us = self.now_us()
            for call in self.on_first:
                call()
        self.output_tokens += count

    def released(self, choice: int, token_ids: Sequence[int], chars: int = 0) -> None:
        """Hand out ids whose text is about to be sent, and count its code points.

        Text that is held back (a possible stop string, half a character) must hold back its ids too: a
        client that reads ids would otherwise see a stop string. They belong in `ahead` meanwhile.
        """
        if token_ids:
            self._pending.setdefault(choice, []).extend(token_ids)
            self._waiting += len(token_ids)
        self._chars += chars
        if self.on_some is not None and self._waiting >= SOME:
            self.on_some()

    @property
    def pending(self) -> bool:
        """Whether ids or text were handed out since `take`."""
        return bool(self._pending or self._chars)

    def emitted(self, choice: int, token_ids: Sequence[int]) -> None:
        """Count tokens and hand out their ids at once: for engines that hold no text back."""
        self.sampled(len(token_ids))
        self.released(choice, token_ids)

    def finished(self, choice: int, reason: str) -> None:
        """Note why a choice ended."""
        self.finish_reasons[choice] = reason

    def failed(self, reason: str) -> None:
        """Note that the engine can't go on with this request; the answer will end in an error."""
        self.failure = self.failure or reason

    def take(self) -> dict[int, tuple[int, ...]]:
        """Return the ids handed out since the last call, by choice."""
        taken = {choice: tuple(token_ids) for choice, token_ids in self._pending.items()}
        self._pending.clear()
        self._waiting = 0
        return taken

    def take_chars(self) -> int:
        """Return the code points of the text handed out since the last call."""
        chars, self._chars = self._chars, 0
        return chars


class Taps:
    """The open taps by request id, for engines that must find theirs from inside a call."""

    def __init__(self, now_us: Callable[[], int]) -> None:
        self._now_us = now_us
        self._open: dict[str, Tap] = {}

    def open(self, request_id: str) -> Tap:
        """Return a new tap for the request that enters with this ``X-Request-Id``."""
        tap = Tap(self._now_us)
        self._open[request_id] = tap
        return tap

    def find(self, request_id: str) -> Tap | None:
        """Return the open tap, or None for a request that did not come through the stack."""
        return self._open.get(request_id)

    def close(self, request_id: str) -> None:
        """Forget the tap; no error if it is unknown."""
        self._open.pop(request_id, None)

    def __len__(self) -> int:
        return len(self._open)


@dataclasses.dataclass(frozen=True, slots=True)
class EngineStats:
    """What an engine says of itself.

    Attributes:
        kv_blocks: KV blocks in all, 0 if it does not say.
        kv_free: of these, free or evictable.
        output_tokens_total: tokens sampled since start.
        step_ms: newest step's time, 0 if it does not say.
        steps_total: steps since start; standing still with work in it means that it hangs.
        failure: why it can't serve any more, or "".
        kv_block_tokens: tokens that a KV block holds, 0 if it does not say.
        queued: sequences that wait inside it.
        work: busy time and tokens since start; None if the engine does not tell its steps.
        kv_preemptions: times since start that a running sequence gave its KV blocks to another.
    """

    kv_blocks: int = 0
    kv_free: int = 0
    output_tokens_total: int = 0
    step_ms: float = 0.0
    steps_total: int = 0
    failure: str = ""
    kv_block_tokens: int = 0
    queued: int = 0
    work: works.Work | None = None
    kv_preemptions: int = 0


class SleepError(Exception):
    """An engine did not sleep or wake as it was told; the message is one line. Its process has to end."""


@dataclasses.dataclass(frozen=True, slots=True)
class Slept:
    """What a sleep came to.

    Attributes:
        level: 1: the weights are in host memory; 2: they are dropped.
        freed_bytes: of GPU memory over all its GPUs, as measured.
    """

    level: int
    freed_bytes: int


class SleepPort(Protocol):
    """An engine that gives its GPUs' memory back and keeps its process."""

    async def sleep(self) -> Slept:
        """Free GPU memory while nothing runs and nothing enters; raises `SleepError` if none was freed."""
        ...

    async def wake(self) -> None:
        """Be able to serve again, with nothing cached; raises `SleepError`."""
        ...


class Engine(Protocol):
    """An engine inside a replica."""

    @property
    def app(self) -> types.ASGIApp:
        """The OpenAI-compatible ASGI app; a request's id is its ``X-Request-Id`` header."""
        ...

    @property
    def adapters(self) -> adapters.AdapterPort | None:
        """How it takes LoRA adapters while it serves; None: it does not."""
        ...

    @property
    def sleeper(self) -> SleepPort | None:
        """How it sleeps; None: it can't, and is parked by the end of its process."""
        ...

    def tap(self, request_id: str) -> Tap:
        """Open the tap of a request that is about to enter `app`."""
        ...

    def untap(self, request_id: str) -> None:
        """Close it; the request has left."""
        ...

    async def abort(self, request_id: str) -> None:
        """End all sequences of a request; returns when the engine has let go of them, or soon after."""
        ...

    def observe(self, observer: Callable[[steptime.Step], None]) -> None:
        """Call ``observer`` after each step; an engine that tells no steps never does."""
        ...

    def stats(self) -> EngineStats:
        """Return how it is; cheap, never blocks."""
        ...
