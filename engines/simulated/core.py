"""Runs the simulated batch on a clock and hands each request its tokens."""

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from engines.replica import engine, steptime, work
from engines.simulated import batching, blocks
from scheduler.contracts import clock, fleet

_log = logging.getLogger(__name__)


class EngineDead(Exception):
    """The engine has failed and answers nothing more."""


class ArgumentError(ValueError):
    """An engine argument is unknown or wrong; the message names it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """How the simulated engine is set up.

    Attributes:
        model: the served name.
        seats: sequences that run at once.
        max_context: tokens of prompt plus output.
        kv_blocks: KV blocks in all.
        block_size: tokens in a block.
        budget: tokens computed in a step at most.
        times: the step-time model.
        time_scale: seconds of the clock for one simulated second; 0 runs as fast as it can.
        adapters: names of adapters that are served too.
        adapter_slots, adapter_host: how many more it takes while it serves; see `fleet.ReplicaSpec`.
        adapter_load_ms: that loading one takes.
    """

    model: str
    seats: int = 8
    max_context: int = 2048
    kv_blocks: int = 4096
    block_size: int = 16
    budget: int = 2048
    times: batching.StepTime = dataclasses.field(default_factory=batching.StepTime)
    time_scale: float = 1.0
    adapters: tuple[str, ...] = ()
    adapter_slots: int = 0
    adapter_host: int = 0
    adapter_load_ms: float = 50.0

    @classmethod
    def from_spec(cls, spec: fleet.ReplicaSpec) -> "Options":
        """Read a replica's spec; its ``engine_args`` are this class's and the step times' own names.

        Raises:
            ArgumentError: an argument is not known, or not a number.
        """
        known = {
            "kv-blocks": "kv_blocks",
            "block-size": "block_size",
            "max-num-batched-tokens": "budget",
            "time-scale": "time_scale",
            "adapter-load-ms": "adapter_load_ms",
        }
        steps = {
            "step-base-ms": "base",
            "step-prefill-ms": "prefill",
            "step-decode-ms": "decode",
            "step-kv-ms": "kv",
        }
        for name in spec.engine_args:
            if name not in known and name not in steps:
                allowed = ", ".join(sorted([*known, *steps]))
                raise ArgumentError(
                    f"simulated engine: unknown argument {name!r}; it has {allowed}"
                )
        fields: dict[str, Any] = _numbers(spec.engine_args, known)
        for whole in ("kv_blocks", "block_size", "budget"):
            if whole in fields:
                fields[whole] = max(1, int(fields[whole]))
        return cls(
            model=spec.model,
            seats=spec.seats,
            max_context=spec.max_context,
            times=batching.StepTime(**_numbers(spec.engine_args, steps)),
            adapters=tuple(spec.adapters),
            adapter_slots=spec.adapter_slots,
            adapter_host=spec.adapter_host,
            **fields,
        )


def _numbers(given: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, field in names.items():
        if name in given:
            try:
                found[field] = float(given[name])
            except (TypeError, ValueError) as error:
                raise ArgumentError(f"simulated engine: {name} must be a number") from error
            if found[field] < 0:
                raise ArgumentError(f"simulated engine: {name} must not be negative")
    return found


@dataclasses.dataclass(slots=True)
class _Request:
    tap: engine.Tap | None
    open: set[str]
    queue: asyncio.Queue[batching.Output | str] = dataclasses.field(default_factory=asyncio.Queue)


class SimulatedCore:
    """The batch, the loop that steps it, and the requests that wait for its outputs.

    Args:
        options: how it is set up.
        time: the clock.
    """

    def __init__(self, options: Options, time: clock.Clock) -> None:
        self.options = options
        self.taps = engine.Taps(time.wall_us)
        self.batch = batching.Batch(
            options.seats,
            blocks.BlockPool(options.kv_blocks, options.block_size),
            options.budget,
            options.times,
        )
        self._clock = time
        self._requests: dict[str, _Request] = {}
        self._owner: dict[str, str] = {}
        self._work = asyncio.Event()
        self._steps = 0
        self._output_tokens = 0
        self._step_ms = 0.0
        self._meter = work.Meter()
        self._failure = ""
        self.observer: Callable[[steptime.Step], None] | None = None

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Step the batch while there is work."""
        loop = asyncio.create_task(self._loop())
        try:
            yield
        finally:
            loop.cancel()
            await asyncio.wait({loop})
            self.die("the engine was stopped")

    async def _loop(self) -> None:
        try:
            await self._step_for_ever()
        except Exception as error:
            _log.exception("simulated engine")
            self.die(f"{type(error).__name__}: {error}")

    async def _step_for_ever(self) -> None:
        while not self._failure:
            if not self.batch.busy:
                self._meter.rest(self._clock.monotonic())
                self._work.clear()
                await self._work.wait()
                continue
            self._meter.begin(self._clock.monotonic())
            step = self.batch.step()
            await self._clock.sleep(step.ms / 1_000 * self.options.time_scale)
            self._steps += 1
            self._step_ms = step.ms
            sampled = sum(output.token is not None for output in step.outputs)
            now = self._clock.monotonic()
            self._meter.step(now, prefill=step.prefill, decode=sampled, more=self.batch.busy)
            if self.observer is not None:
                took = step.ms * self.options.time_scale
                self.observer(steptime.Step(took, step.prefill, sampled, step.kv_tokens))
            for output in step.outputs:
                self._hand_out(output)

    def _hand_out(self, output: batching.Output) -> None:
        if output.token is not None:
            self._output_tokens += 1
        request = self._requests.get(self._owner.get(output.key, ""))
        if request is None:
            return  # aborted while the step ran
        if request.tap is not None:
            request.tap.sampled(0 if output.token is None else 1)
            if output.prefilled:
                request.tap.prefilled(output.prefilled, cached=output.cached)
        if output.finish_reason:
            self._owner.pop(output.key, None)
            request.open.discard(output.key)
        request.queue.put_nowait(output)

    async def generate(
        self, request_id: str, sequences: Sequence[batching.Sequence]
    ) -> AsyncIterator[batching.Output]:
        """Run sequences and yield their outputs until all have ended; leaving early aborts them.

        Raises:
            EngineDead: the engine failed before or meanwhile.
        """
        if self._failure:
            raise EngineDead(self._failure)
        if request_id in self._requests:
            raise EngineDead(f"request id {request_id} is running already")
        request = _Request(self.taps.find(request_id), {s.key for s in sequences})
        self._requests[request_id] = request
        told: list[tuple[int, ...]] = []
        for sequence in sequences:
            if request.tap is not None:
                sequence.band = request.tap.band
                if sequence.prompt not in told:  # choices share their prompt
                    told.append(sequence.prompt)
                    request.tap.prompt(sequence.prompt)
            self._owner[sequence.key] = request_id
            self.batch.add(sequence)
        self._work.set()
        try:
            while request.open or not request.queue.empty():
                output = await request.queue.get()
                if isinstance(output, str):
                    raise EngineDead(output)
                yield output
        finally:
            self.drop(request_id)

    def finish(self, key: str) -> None:
        """End one sequence whose stop string was found."""
        self.batch.remove(key)
        request = self._requests.get(self._owner.pop(key, ""))
        if request is not None:
            request.open.discard(key)

    def drop(self, request_id: str) -> None:
        """Abort what is left of a request; no error if nothing is."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            for key in request.open:
                self._owner.pop(key, None)
                self.batch.remove(key)

    def abort(self, request_id: str) -> None:
        """End a request; whoever waits for its outputs gets `EngineDead`."""
        request = self._requests.get(request_id)
        self.drop(request_id)
        if request is not None:
            request.queue.put_nowait("aborted")

    def die(self, reason: str) -> None:
        """Fail as an engine does whose process was killed: errors for all, and no more requests."""
        self._failure = self._failure or reason
        for request in self._requests.values():
            request.queue.put_nowait(reason)

    def stats(self) -> engine.EngineStats:
        """Return how it is."""
        return engine.EngineStats(
            kv_blocks=self.batch.pool.count,
            kv_free=self.batch.pool.free,
            output_tokens_total=self._output_tokens,
            step_ms=self._step_ms,
            steps_total=self._steps,
            failure=self._failure,
            kv_block_tokens=self.batch.pool.size,
            queued=len(self.batch.waiting),
            work=self._meter.read(self._clock.monotonic()),
            kv_preemptions=self.batch.preemptions,
        )
