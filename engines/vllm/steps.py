"""The figures of vLLM's steps, as its own statistics logger hands them out."""

import collections
import statistics
import time as timing
from collections.abc import Callable
from typing import Any

from vllm.v1.metrics import loggers

from engines.replica import steptime, work


class StepLog(loggers.StatLoggerBase):  # type: ignore[misc]  # vLLM is untyped here
    """Keeps the newest figures of the engine's steps (vLLM calls this interface unstable).

    A step's time is the interval between two reports while work was running: the figure that vLLM
    itself gives (`iteration_details.elapsed_ms`) leaves the model's own time out on CPUs.
    """

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        self.steps = 0
        self.kv_usage = 0.0
        self.queued = 0
        self.output_tokens = 0
        self.preemptions = 0
        self._intervals: collections.deque[float] = collections.deque(maxlen=16)
        self._last = 0.0
        self.meter = work.Meter()
        self.observer: Callable[[steptime.Step], None] | None = None
        self._cache = vllm_config.cache_config

    @property
    def step_ms(self) -> float:
        """Median of the newest steps in milliseconds, 0 before the first two."""
        return round(statistics.median(self._intervals) * 1_000, 3) if self._intervals else 0.0

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        """Take the figures of one step."""
        if scheduler_stats is not None:
            now = timing.monotonic()
            took = now - self._last if self._last else 0.0
            if took:
                self._intervals.append(took)
            # An engine without work takes no step: the time until its next one is not a step's.
            self._last = now if scheduler_stats.num_running_reqs else 0.0
            self.steps += 1
            self.kv_usage = scheduler_stats.kv_cache_usage
            self.queued = scheduler_stats.num_waiting_reqs
            self._measure(now, took, iteration_stats, more=bool(scheduler_stats.num_running_reqs))
        if iteration_stats is not None:
            self.output_tokens += iteration_stats.num_generation_tokens
            self.preemptions += iteration_stats.num_preempted_reqs

    def _measure(self, now: float, took: float, iteration: Any, *, more: bool) -> None:
        prompt = getattr(iteration, "prompt_token_stats", None)
        # Releases without the breakdown tell whole prompts only: the cache's part is in it then.
        computed = getattr(prompt, "computed", getattr(iteration, "num_prompt_tokens", 0))
        sampled = getattr(iteration, "num_generation_tokens", 0)
        self.meter.step(now, prefill=computed, decode=sampled, more=more)
        if self.observer is not None and took:
            room = (self._cache.num_gpu_blocks or 0) * (self._cache.block_size or 0)
            held = round(self.kv_usage * room)
            self.observer(steptime.Step(took * 1_000, computed, sampled, held))

    def log_engine_initialized(self) -> None:
        """Say nothing: the replica's supervisor reports the start."""
