"""Where vLLM's names are touched (as in `configure`, `resumed`, `steps`): its app around a thin `AsyncLLM`.

Chat templates, tools, logprobs and every byte of an answer are vLLM's. Added here: which tokens the
bytes stand for, abort by our request id, priority by tier, and the step's figures. Written against
vLLM 0.31 and 0.32 and importable only in an engine's environment; it must not know of seats or frames.
"""

import contextlib
import dataclasses
import functools
import importlib
import json
import time as timing
import types as type_of
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from typing import Any

import tokenizers
import vllm.exceptions
from starlette import responses, types
from tokenizers import decoders
from vllm import platforms, sampling_params
from vllm.entrypoints.launchers import app as launchers_app
from vllm.entrypoints.launchers.api_server import app_state
from vllm.usage import usage_lib
from vllm.v1.engine import async_llm

from engines.replica import engine, launch, steptime
from engines.vllm import calls, configure, ledger, loras, process, resumed, sleeping, steps
from scheduler.contracts import clock

_BAD_REQUEST = (vllm.exceptions.VLLMClientError, vllm.exceptions.GracefulHTTPError)

# What a replica on CPUs imports late; loaded before the fork instead, it costs each replica nothing.
_LATE_MODULES = (
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.executor.multiproc_executor",
    "vllm.lora.worker_manager",
    "vllm.v1.structured_output.backend_xgrammar",
    "vllm.model_executor.models.llama",
    "vllm.renderers.hf",
    "vllm.entrypoints.generate.api_router",
    "vllm.entrypoints.openai.chat_completion.serving",
    "vllm.entrypoints.openai.completion.serving",
    "vllm.entrypoints.openai.responses.serving",
    "vllm.entrypoints.serve.instrumentator.metrics",
    "vllm.plugins.lora_resolvers.filesystem_resolver",
    "vllm.model_executor.warmup.jit_warmup",
    "prometheus_fastapi_instrumentator",
    "model_hosting_container_standards.sagemaker",
)


def preload() -> None:
    """Import what a replica will need, in a process that will fork; a module that has moved is no harm."""
    if platforms.current_platform.is_cpu():
        for name in _LATE_MODULES:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)


class TappedLLM(async_llm.AsyncLLM):  # type: ignore[misc]  # vLLM is untyped here
    """vLLM's engine, telling the tap of each request what it does; `calls` is set before it serves."""

    calls: calls.Calls
    parsed = False  # whether chat answers pass a reasoning or tool parser

    async def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, **options: Any
    ) -> AsyncIterator[Any]:
        """Generate as vLLM does, with the tap listening."""
        params = sampling_params
        begun = self.calls.beginning(request_id)
        spelt = prompt if begun is None else dataclasses.asdict(begun)
        call = self.calls.begin(
            request_id, prompt, params.n or 1, functools.partial(self._speller, spelt, params)
        )
        if call is None:
            async with contextlib.aclosing(
                super().generate(prompt, params, request_id, **options)
            ) as plain:
                async for output in plain:
                    yield output
            return
        options["priority"] = call.priority  # a caller's own word on it does not count
        most = call.most_tokens
        if most and (params.max_tokens is None or params.max_tokens > most):
            params = params.clone()
            params.max_tokens = most
        call.cannot_go_on(resumed.why_not(request_id, params, parsed=self.parsed))
        if begun is not None:
            call.min_tokens = params.min_tokens
            prompt, params = resumed.engine_input(prompt, params, begun)
        if call.told_seldom:  # vLLM's own option: the first and the last token never wait
            params = params.clone()
            params.stream_interval = calls.TOGETHER
        # An answer that is not streamed comes in one piece; it is gathered here instead, so that its
        # tokens are counted as they are sampled and a preempted one can be resumed.
        whole, first = None, True
        final_only = params.output_kind is _kind().FINAL_ONLY
        if final_only:
            params = params.clone()
            params.output_kind = _kind().DELTA
        try:
            async with contextlib.aclosing(
                super().generate(prompt, params, request_id, **options)
            ) as deltas:
                async for output in deltas:
                    call.note(output)
                    if begun is not None:
                        resumed.as_one(output, begun, first=first)
                        first = False
                    if not final_only:
                        yield output
                        continue
                    call.release()
                    whole = _gather(whole, output)
        except _BAD_REQUEST:
            raise
        except Exception as error:
            call.failed(f"{type(error).__name__}: {error}")
            raise
        if whole is not None:
            yield whole

    async def encode(
        self, prompt: Any, pooling_params: Any, request_id: str, **options: Any
    ) -> AsyncIterator[Any]:
        """Embed or classify as vLLM does, with the tap counting."""
        call = self.calls.begin(request_id, None, 1, lambda: None)
        if call is not None:
            options["priority"] = call.priority
        inner = super().encode(prompt, pooling_params, request_id, **options)
        async with contextlib.aclosing(inner) as outputs:
            async for output in outputs:
                if call is not None:
                    call.note_pooled(output)
                yield output

    def _speller(self, prompt: Any, params: Any) -> ledger.Speller | None:
        """Return how one choice's tokens are spelt, as vLLM's own detokenizer does it."""
        fast = getattr(self.renderer.tokenizer, "_tokenizer", None)
        if not isinstance(fast, tokenizers.Tokenizer) or not params.detokenize:
            return None
        ids = list(prompt.get("prompt_token_ids") or ()) if isinstance(prompt, Mapping) else []
        skip = params.skip_special_tokens
        stream = decoders.DecodeStream(ids=ids, skip_special_tokens=skip)

        def spell(token_id: int) -> str | None:
            nonlocal stream
            try:
                piece: str | None = stream.step(fast, token_id)
            except Exception:  # tokenizers raises no other class: bytes that are no UTF-8 at all
                stream = decoders.DecodeStream(skip_special_tokens=skip)
                piece = stream.step(fast, token_id)
            return piece

        return spell


def _kind() -> Any:
    return sampling_params.RequestOutputKind


def _gather(whole: Any, output: Any) -> Any:
    """Add a delta to the answer so far; what is missing then is what vLLM gives with FINAL_ONLY."""
    if whole is None:
        return output
    whole.add(output, aggregate=True)
    whole.metrics = output.metrics
    whole.outputs.sort(key=lambda part: part.index)
    return whole


class VllmEngine:
    """`engines.replica.engine.Engine` for vLLM."""

    def __init__(
        self,
        llm: TappedLLM,
        inner: types.ASGIApp,
        taps: engine.Taps,
        log: steps.StepLog,
        adapters: loras.Loras | None = None,
        sleeper: sleeping.Sleeper | None = None,
    ) -> None:
        self._adapters = adapters
        self._sleeper = sleeper
        self._llm = llm
        self._taps = taps
        self._log = log
        self._app = calls.Releasing(inner, llm.calls)

    @property
    def app(self) -> types.ASGIApp:
        """The OpenAI app that vLLM itself builds."""
        return self._app

    @property
    def adapters(self) -> loras.Loras | None:
        """Its adapters; None: it was started without LoRA."""
        return self._adapters

    @property
    def sleeper(self) -> sleeping.Sleeper | None:
        """How it sleeps; None: it can't here, or is not to."""
        return self._sleeper

    def tap(self, request_id: str) -> engine.Tap:
        """Open the tap of a request that is about to enter."""
        self._log.meter.begin(timing.monotonic())
        return self._taps.open(request_id)

    def untap(self, request_id: str) -> None:
        """Forget a request that has left."""
        self._taps.close(request_id)
        self._llm.calls.forget(request_id)
        if not len(self._taps):
            self._log.meter.rest(timing.monotonic())

    async def abort(self, request_id: str) -> None:
        """End a request's sequences. The order is queued before any later request to the engine."""
        running = list(self._llm.calls.of(request_id))
        if running:
            await self._llm.abort(running)

    def observe(self, observer: Callable[[steptime.Step], None]) -> None:
        """Call ``observer`` after each step."""
        self._log.observer = observer

    def stats(self) -> engine.EngineStats:
        """Return the newest step's figures."""
        blocks = self._llm.vllm_config.cache_config.num_gpu_blocks or 0
        # An engine without work takes no step, so the last step's use would stand for ever.
        idle = self._llm.get_num_unfinished_requests() == 0
        used = 0.0 if idle else self._log.kv_usage
        return engine.EngineStats(
            kv_blocks=blocks,
            kv_free=blocks - round(blocks * used),
            output_tokens_total=self._log.output_tokens,
            step_ms=self._log.step_ms,
            steps_total=self._log.steps,
            failure="vLLM's engine core has died" if self._llm.errored else "",
            kv_block_tokens=self._llm.vllm_config.cache_config.block_size or 0,
            queued=0 if idle else self._log.queued,
            work=self._log.meter.read(timing.monotonic()),
            kv_preemptions=self._log.preemptions,
        )


class _AnyNumbers(responses.JSONResponse):
    """JSON that may hold NaN: the replica's stack puts null there, vLLM's own class fails every input."""

    def render(self, content: Any) -> bytes:
        """Return the bytes."""
        return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()


def _let_nan_pass(state: Any) -> None:
    for serving in vars(state)["_state"].values():
        if hasattr(serving, "json_response_cls"):
            serving.json_response_cls = _AnyNumbers


@contextlib.asynccontextmanager
async def open_engine(
    record: launch.Launch, time: clock.Clock, reporter: launch.Reporter
) -> AsyncIterator[VllmEngine]:
    """Run vLLM for one replica.

    Raises:
        arguments.ArgumentError: the spec's arguments can't be used.
        Exception: whatever vLLM raises when the model can't be loaded.
    """
    began = timing.monotonic()
    args, config = configure.configured(record)
    reporter.phase("configure", round(timing.monotonic() - began, 3))
    began = timing.monotonic()
    log = steps.StepLog(config)
    with process.deaf_to_sigterm():
        llm = TappedLLM.from_vllm_config(
            config,
            usage_context=usage_lib.UsageContext.OPENAI_API_SERVER,
            stat_loggers=[lambda vllm_config, index=0: log],
        )
    taps = engine.Taps(time.wall_us)
    llm.calls = calls.Calls(taps)
    llm.parsed = bool(args.reasoning_parser or args.tool_call_parser)
    resumed.prime_detokenizers(llm.output_processor, llm.calls)
    try:
        await llm.reset_mm_cache()
        tasks: Iterable[str] = await llm.get_supported_tasks()
        app = launchers_app.build_app(args, tasks, llm.model_config)
        await app_state.init_app_state(llm, app.state, args, tasks)
        # vLLM's handlers tell its server to end once the engine is dead; ours tells the slot, which ends it.
        app.state.server = type_of.SimpleNamespace(should_exit=False)
        models = app.state.openai_serving_models
        adapters = loras.Loras(llm, models, record.spec) if config.lora_config else None
        _let_nan_pass(app.state)
        reporter.phase("load", round(timing.monotonic() - began, 3))
        # Ranks of other nodes keep their GPUs while this process lives: such a replica parks by its end.
        sleeper = None if record.rank else sleeping.sleeper(llm, config, record.spec)
        yield VllmEngine(llm, app, taps, log, adapters, sleeper)
    finally:
        llm.shutdown(timeout=0)
