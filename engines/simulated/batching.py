"""Continuous batching by a step-time model, one step at a time. No clock: a step returns its duration.

A step runs decodes first, then chunks of prefill within a token budget, then admits from the queue by
(band, arrival). A KV shortage preempts the running sequence of the lowest tier, youngest first; it
recomputes later. The duration is ``a + b·prefill tokens + c·decoding sequences + d·KV tokens read``.
"""

import dataclasses
import hashlib
import itertools

from engines.simulated import blocks, tokens


@dataclasses.dataclass(frozen=True, slots=True)
class StepTime:
    """The four coefficients, in milliseconds.

    The defaults are of the order of a 70B-class model on four 80 GB GPUs: 8 ms to read the weights
    once, about 12,000 prefill tokens/s, and the KV cache read at the memory's bandwidth.

    Attributes:
        base: a, per step.
        prefill: b, per prompt token computed in the step.
        decode: c, per sequence that decodes.
        kv: d, per token of KV cache read.
    """

    base: float = 8.0
    prefill: float = 0.08
    decode: float = 0.05
    kv: float = 0.00005

    def milliseconds(self, prefill: int, decoding: int, kv_tokens: int) -> float:
        """Return a step's duration."""
        return self.base + self.prefill * prefill + self.decode * decoding + self.kv * kv_tokens


@dataclasses.dataclass(slots=True)
class Sequence:
    """One sequence: what it asks, and how far it is.

    Attributes:
        key: its name; one life each.
        prompt: prompt token ids.
        max_tokens: tokens to sample at most; 0 computes the prompt only (embeddings).
        band: `requests.Tier.band`: lower goes first.
        salt: mixed into the choice of tokens (seed, choice number); b"" for neither.
        ignore_eos: go on to ``max_tokens``.
        min_tokens: do not end before these.
        given: of ``output``, what it began with: it goes on behind that.
    """

    key: str
    prompt: tuple[int, ...]
    max_tokens: int
    band: int = 0
    salt: bytes = b""
    ignore_eos: bool = False
    min_tokens: int = 0
    given: int = 0
    output: list[int] = dataclasses.field(default_factory=list)
    computed: int = 0
    cached: int = 0
    held: list[int] = dataclasses.field(default_factory=list)
    order: int = 0
    _state: bytes = b""
    _sealed: bytes = b""
    _seals: int = 0

    @property
    def length(self) -> int:
        """Tokens so far."""
        return len(self.prompt) + len(self.output)

    def ids(self, start: int, end: int) -> list[int]:
        """Return the token ids from ``start`` to ``end``."""
        return [*self.prompt, *self.output][start:end]

    def sample(self) -> int | None:
        """Return the next token, or None for the end; it depends on all ids before it and the salt."""
        if not self._state:
            self._state = _mix(self.salt, *self.prompt, *self.output)
        choice = int.from_bytes(_mix(self._state)[:8], "big")
        may_end = not self.ignore_eos and len(self.output) >= self.min_tokens
        if may_end and choice % 128 == 0:
            return None
        token = tokens.BYTES + (choice >> 8) % len(tokens.WORDS)
        self._state = _mix(self._state, token)
        self.output.append(token)
        return token


def _mix(state: bytes, *token_ids: int) -> bytes:
    for token_id in token_ids:
        state = hashlib.blake2b(state + token_id.to_bytes(4, "big"), digest_size=16).digest()
    return state or hashlib.blake2b(state, digest_size=16).digest()


@dataclasses.dataclass(frozen=True, slots=True)
class Output:
    """What a step did for a sequence.

    Attributes:
        key: which sequence.
        token: the sampled id, or None.
        finish_reason: why it ended now (`stop`, `length`), or "".
        prefilled: prompt tokens, told once with the first output; 0 otherwise.
        cached: of these, from the prefix cache.
    """

    key: str
    token: int | None
    finish_reason: str = ""
    prefilled: int = 0
    cached: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """One step's outputs, duration, prompt tokens that it computed, and KV tokens that it read."""

    outputs: tuple[Output, ...]
    ms: float
    prefill: int = 0
    kv_tokens: int = 0


class Batch:
    """The engine's queue and running batch.

    Args:
        seats: sequences that run at once.
        pool: the KV blocks.
        budget: tokens computed in a step at most.
        times: the step-time model.
    """

    def __init__(self, seats: int, pool: blocks.BlockPool, budget: int, times: StepTime) -> None:
        self.pool = pool
        self.preemptions = 0
        self._seats = seats
        self._budget = max(budget, seats)
        self._times = times
        self._order = itertools.count()
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""
        return bool(self.running or self.waiting)

    def fits(self, tokens_needed: int) -> bool:
        """Whether a sequence of that length can ever run."""
        return tokens_needed <= self.pool.count * self.pool.size

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        sequence.order = next(self._order)
        self.waiting.append(sequence)

    def remove(self, key: str) -> bool:
        """Drop a sequence wherever it is; returns whether it was here."""
        for where in (self.running, self.waiting):
            for sequence in where:
                if sequence.key == key:
                    where.remove(sequence)
                    self._release(sequence)
                    return True
        return False

    def step(self) -> Step:
        """Run one step."""
        budget = self._budget
        prefill = decoding = kv_tokens = 0
        self._admit()
        advanced: list[Sequence] = []
        for sequence in sorted(self.running, key=lambda s: (s.length - s.computed > 1, s.order)):
            if sequence not in self.running:
                continue  # preempted for an earlier one in this step
            chunk = min(sequence.length - sequence.computed, budget)
            if chunk <= 0 or not self._reserve(sequence, sequence.computed + chunk):
                continue
            budget -= chunk
            if len(sequence.output) > sequence.given and chunk == 1:
                decoding += 1
            else:
                prefill += chunk
            sequence.computed += chunk
            kv_tokens += sequence.computed
            self._seal(sequence)
            advanced.append(sequence)
        outputs = [
            self._advance(s) for s in advanced if s in self.running and s.computed == s.length
        ]
        ms = self._times.milliseconds(prefill, decoding, kv_tokens)
        return Step(tuple(outputs), ms, prefill, kv_tokens)

    def _admit(self) -> None:
        self.waiting.sort(key=lambda s: (s.band, s.order))
        while self.waiting and len(self.running) < self._seats:
            sequence = self.waiting[0]
            matched = self.pool.match(sequence.ids(0, sequence.length))
            need = -(-(sequence.length + 1) // self.pool.size) - len(matched)
            if need > self.pool.free and self.running:
                self.pool.release(matched)
                return
            sequence.held = matched
            sequence.computed = len(matched) * self.pool.size
            sequence.cached = min(sequence.computed, len(sequence.prompt) + sequence.given)
            sequence._sealed, sequence._seals = b"", 0
            self.running.append(self.waiting.pop(0))

    def _reserve(self, sequence: Sequence, length: int) -> bool:
        """Make room for ``length`` tokens, preempting others or, at last, the sequence itself."""
        while True:
            need = -(-length // self.pool.size) - len(sequence.held)
            if need <= 0:
                return True
            got = self.pool.allocate(need)
            if got is not None:
                sequence.held += got
                return True
            victim = max(self.running, key=lambda s: (s.band, s.order))
            self._preempt(victim)
            if victim is sequence:
                return False

    def _preempt(self, victim: Sequence) -> None:
        self.preemptions += 1
        self.running.remove(victim)
        self._release(victim)
        self.waiting.append(victim)

    def _release(self, sequence: Sequence) -> None:
        self.pool.release(sequence.held)
        sequence.held = []
        sequence.computed = 0

    def _seal(self, sequence: Sequence) -> None:
        size = self.pool.size
        while (sequence._seals + 1) * size <= sequence.computed:
            start = sequence._seals * size
            sequence._sealed = blocks.chain(sequence._sealed, sequence.ids(start, start + size))
            self.pool.seal(sequence.held[sequence._seals], sequence._sealed)
            sequence._seals += 1

    def _advance(self, sequence: Sequence) -> Output:
        """Sample for a sequence whose tokens are all computed."""
        first = len(sequence.output) == sequence.given
        token = sequence.sample() if sequence.max_tokens else None
        reason = ""
        if token is None:
            reason = "stop"
        elif len(sequence.output) >= sequence.max_tokens:
            reason = "length"
        if reason:
            self.remove(sequence.key)
        return Output(
            sequence.key,
            token,
            reason,
            prefilled=len(sequence.prompt) + sequence.given if first else 0,
            cached=sequence.cached if first else 0,
        )
