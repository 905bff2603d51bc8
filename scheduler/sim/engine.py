"""One replica's engine in virtual time, between events instead of step by step.

The step-time model is `sizing.StepTime`. Between two events (a request comes, a prompt is computed, an answer
ends) the batch does not change, so every step takes equally long and the engine jumps to the next event:
exact for decoding, and for prefill up to the last, shorter chunk. A prompt that comes in the middle of a step
waits for its end. Prompts are computed in their order and in chunks; those behind that fit into the first
one's last chunk are computed with it.

Batch sequences are not simulated one by one: `batch` of them decode at any time, each one followed by another
as long as there is work, so that their prompts are a steady part of every step. How many is decided as a
shared replica does: as many as keep the step within the stream speed that interactive callers are promised.
"""

import dataclasses
import heapq
import math
from collections import deque

from scheduler.core import sizing

SETTLE_S = 20.0  # how long the share of prefill is averaged over


@dataclasses.dataclass(slots=True)
class Call:
    """One request: seconds of the day, tokens, and how far it is.

    Attributes:
        computed: prompt tokens to compute (what no prefix cache holds).
        queued: when it came to the replica that has it now.
        first: when its first token went out, negative before.
        done: tokens sampled before it moved here from a replica that died.
    """

    model: int
    arrival: float
    prompt: int
    computed: int
    output: int
    first: float = -1.0
    done: int = 0
    ends: float = 0.0
    seen: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class BatchShape:
    """Mean tokens of a batch line."""

    prompt: float
    output: float


class Engine:
    """A replica's engine; times in seconds.

    Attributes:
        at: the moment that its figures are of.
        next_at: when something happens next, infinity if nothing does.
        batch: batch sequences that run (a mean, so not always whole).
        feed: `none`, `shared` (within the stream speed) or `all` (as fast as it goes).
        busy_s, wasted_s: seconds of steps, and of these, of work that was thrown away.
        batch_tokens: output tokens of batch lines so far.
        preempted: batch sequences aborted for interactive ones.
    """

    __slots__ = (
        "_group",
        "_group_tokens",
        "_head",
        "_heap",
        "_kv",
        "_line_ms",
        "_mean",
        "_order",
        "_prompts",
        "_share",
        "_step_s",
        "_steps",
        "_whole",
        "at",
        "backlog",
        "batch",
        "batch_tokens",
        "busy_s",
        "chunk",
        "decode_tokens",
        "feed",
        "fresh",
        "itl_s",
        "kv_tokens",
        "next_at",
        "preempted",
        "prefill_tokens",
        "reserve",
        "reserved",
        "running",
        "seats",
        "shape",
        "step",
        "wasted_s",
    )  # fmt: skip

    def __init__(
        self,
        step: sizing.StepTime,
        *,
        kv_tokens: int,
        seats: int,
        chunk: int,
        itl_s: float,
        shape: BatchShape,
    ) -> None:
        self.step = step
        self.kv_tokens = kv_tokens
        self.seats = seats
        self.chunk = chunk
        self.itl_s = itl_s  # time per token that shared batch leaves to interactive streams
        self.shape = shape
        self.at = 0.0
        self.next_at = math.inf
        self.feed = "none"
        self.reserve = 4  # seats that batch never takes
        self.running = 0  # interactive sequences, prompts under way included
        self.backlog = 0  # prompt tokens to compute
        self.reserved = 0  # KV tokens that interactive sequences may come to need
        self.batch = 0.0
        self.busy_s = self.wasted_s = self.batch_tokens = 0.0
        self.decode_tokens = self.prefill_tokens = 0
        self.preempted = 0.0
        self._kv = 0.0  # tokens of decoding sequences
        self._prompts: deque[Call] = deque()
        self._head = 0.0  # steps until the first prompts are computed
        self._group = 0  # how many these are
        self._group_tokens = 0
        self._heap: list[tuple[float, int, Call]] = []
        self._order = 0
        self._steps = 0.0
        self._step_s = 0.0
        self._share = 0.0  # of the time, spent in prefill
        s = step
        self._whole = shape.prompt + shape.output
        self._mean = mean = shape.prompt + shape.output / 2
        # What one batch sequence adds to a step: its token, its KV, and its part of the next prompt.
        self._line_ms = s.decode + s.kv * mean + s.prefill * shape.prompt / max(1.0, shape.output)
        self.fresh = True

    def fits(self, call: Call) -> bool:
        """Return whether a seat and its KV cache are there; batch gives way, so it does not count."""
        return (
            self.running < self.seats
            and self.reserved + call.prompt + call.output <= self.kv_tokens
        )

    @property
    def load(self) -> float:
        """Return what routing compares: milliseconds of prompts in front, then streams."""
        return self.backlog * self.step.prefill + self.running * (self.step.decode + 0.1)

    @property
    def step_ms(self) -> float:
        """Return the present step time, 0 when nothing runs."""
        return self._step_s * 1000

    @property
    def spare(self) -> float:
        """Return the part of the promised step that interactive sequences leave over, from 0 to 1."""
        return max(0.0, self._room_ms()) / (self.itl_s * 1000) if self.running else 1.0

    def add(self, call: Call, now: float) -> None:
        """Take a request."""
        self.advance(now)
        self.running += 1
        self.reserved += call.prompt + call.output
        call.seen = now
        tokens = call.computed + call.done
        self.backlog += tokens
        self._prompts.append(call)
        if len(self._prompts) == 1:
            rest = (math.ceil(self._steps) - self._steps) * self._step_s
            self._next_prompts()
            self.renew()
            if self._step_s > 0:
                self._head += rest / self._step_s
                self._when()
        else:
            self.renew()

    def pop(self, now: float) -> tuple[Call, bool] | None:
        """Let the due event happen; returns its request, and whether it has ended (else: first token)."""
        self.advance(now)
        if self._prompts and self._head <= 1e-9:
            call = self._prompts.popleft()
            tokens = call.computed + call.done
            self.backlog -= tokens
            self.prefill_tokens += tokens
            self._group -= 1
            if self._prompts and not self._group:
                self._next_prompts()
            if call.first < 0:
                call.first = now
            call.done += 1
            self.decode_tokens += 1
            left = call.output - call.done
            if left <= 0:
                self._leave(call)
                self.renew()
                return call, True
            self._order += 1
            call.ends = self._steps + left
            self._kv += call.prompt + call.output / 2
            heapq.heappush(self._heap, (call.ends, self._order, call))
            self.renew()
            return call, False
        if self._heap and self._heap[0][0] <= self._steps + 1e-6:
            call = heapq.heappop(self._heap)[2]
            self.decode_tokens += call.output - call.done
            call.done = call.output
            self._kv -= call.prompt + call.output / 2
            self._leave(call)
            self.renew()
            return call, True
        self.renew()
        return None

    def clear(self, now: float) -> list[Call]:
        """Drop everything, as when the node dies; returns the requests with what they had got."""
        self.advance(now)
        found = list(self._prompts)
        for ends, _, call in self._heap:
            call.done = max(1, call.output - max(1, math.ceil(ends - self._steps)))
            found.append(call)
        self._prompts.clear()
        self._heap.clear()
        self.running = self.backlog = self.reserved = 0
        self._kv = 0.0
        self.abort_batch()
        self.feed = "none"
        self.renew()
        return found

    def abort_batch(self, keep: float = 0.0) -> None:
        """Abort batch sequences down to ``keep``; their tokens are kept, their KV is computed again."""
        gone = self.batch - keep
        if gone <= 0:
            return
        again = self.shape.prompt + self.shape.output / 2
        self.wasted_s += gone * again * self.step.prefill / 1000
        self.preempted += gone
        self.batch = keep

    def set_feed(self, feed: str, now: float) -> None:
        """Change what batch may take."""
        if feed != self.feed:
            self.advance(now)
            self.feed = feed
            if feed == "none":
                self.abort_batch()
            self.renew()

    def advance(self, now: float) -> None:
        """Bring the figures up to ``now``."""
        passed = now - self.at
        if passed <= 0:
            return
        self.at = now
        step_s = self._step_s
        if step_s <= 0:
            self._share *= max(0.0, 1 - passed / SETTLE_S)
            return
        steps = passed / step_s
        self._steps += steps
        self.busy_s += passed
        if self.batch:
            self.batch_tokens += steps * self.batch
        share = 0.0
        if self._prompts:
            self._head -= steps
            share = min(self.chunk, self._group_tokens) * self.step.prefill / step_s / 1000
        self._share += (share - self._share) * min(1.0, passed / SETTLE_S)

    def renew(self) -> None:
        """Work out batch, step time and next event anew."""
        step = self.step
        decoding = len(self._heap)
        if self.feed == "none":
            self.batch = 0.0
        else:
            self._feed()
        ms = 0.0
        batch = self.batch
        if self._prompts:
            ms = (
                step.base
                + step.prefill * min(self.chunk, self._group_tokens)
                + step.decode * (decoding + batch)
                + step.kv * (self._kv + batch * self._mean)
            )
        elif decoding or batch > 0:
            ms = step.base + step.decode * decoding + step.kv * self._kv + batch * self._line_ms
        self._step_s = ms / 1000
        self._when()

    def _when(self) -> None:
        if self._step_s <= 0 or not (self._prompts or self._heap):
            self.next_at = math.inf
            return
        due = self._head if self._prompts else math.inf
        if self._heap:
            left = self._heap[0][0] - self._steps
            due = min(due, left)
        self.next_at = self.at + due * self._step_s if due > 0 else self.at

    def _room_ms(self) -> float:
        """Return what interactive sequences leave of the promised step, in ms; below 0: nothing."""
        step = self.step
        return (
            (1 - self._share) * self.itl_s * 1000
            - step.base
            - step.decode * len(self._heap)
            - step.kv * self._kv
        )

    def _feed(self) -> None:
        hard = float(self.seats - self.running - (0 if self.feed == "all" else self.reserve))
        room = (self.kv_tokens - self.reserved) / self._whole
        hard = min(hard, room)
        if hard < 0:
            hard = 0.0
        if self.batch > hard:
            self.abort_batch(hard)
        if self.feed == "all":
            self.batch = hard
            return
        soft = self._room_ms() / self._line_ms
        if soft > hard:
            soft = hard
        elif soft < 0:
            soft = 0.0
        # Those that run beyond what the step leaves room for end by themselves and are not followed.
        slower = self.batch * 0.98
        self.batch = soft if soft > slower else slower

    def _next_prompts(self) -> None:
        """Take the first prompt, and those behind it that its last chunk has room for."""
        group = tokens = 0
        room = self.chunk
        for call in self._prompts:
            more = call.computed + call.done
            if not group:
                room *= math.ceil(more / self.chunk)
            elif tokens + more > room:
                break
            tokens += more
            group += 1
        self._group, self._group_tokens = group, tokens
        self._head = max(1.0, tokens / self.chunk)

    def _leave(self, call: Call) -> None:
        self.running -= 1
        self.reserved -= call.prompt + call.output
