"""Where vLLM's names are touched (and in `resumed`, `steps`): its own OpenAI app around a thin `AsyncLLM`.

Chat templates, tools, logprobs and every byte of an answer are vLLM's. Added here: which tokens the
bytes stand for, abort by our request id, priority by tier, and the step's figures. Written against
vLLM 0.31 and 0.32 and importable only in an engine's environment; it must not know of seats or frames.
"""

import argparse
import contextlib
import dataclasses
import functools
import importlib
import importlib.metadata
import json
import os
import time as timing
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from typing import Any, NoReturn

import tokenizers
import torch._dynamo
import vllm.exceptions
from starlette import responses, types
from tokenizers import decoders
from vllm import platforms, sampling_params
from vllm.engine import arg_utils
from vllm.entrypoints.launchers import app as launchers_app
from vllm.entrypoints.launchers import cli_args
from vllm.entrypoints.launchers.api_server import app_state
from vllm.model_executor.models import registry
from vllm.usage import usage_lib
from vllm.utils import argparse_utils
from vllm.v1.engine import async_llm

from engines.replica import engine, launch, steptime
from engines.vllm import arguments, calls, ledger, resumed, steps
from scheduler.contracts import clock, fleet

_BAD_REQUEST = (vllm.exceptions.VLLMClientError, vllm.exceptions.GracefulHTTPError)

_CPU_KV_BYTES = 256 * 1024 * 1024
# What a replica on CPUs imports late; loaded before the fork instead, it costs each replica nothing.
_LATE_MODULES = (
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
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


def version() -> str:
    """Return vLLM's version."""
    return importlib.metadata.version("vllm")


class _Parser(argparse_utils.FlexibleArgumentParser):  # type: ignore[misc]  # vLLM is untyped here
    def error(self, message: str) -> NoReturn:
        raise arguments.ArgumentError(message)


def parse(spec: fleet.ReplicaSpec) -> argparse.Namespace:
    """Return the arguments of ``spec`` as vLLM's own parser understands them.

    Raises:
        arguments.ArgumentError: Forebay refuses one, or vLLM does not know it or its value.
    """
    line = arguments.command_line(spec)
    parser = cli_args.make_arg_parser(_Parser(prog="vllm", add_help=False, allow_abbrev=False))
    try:
        args: argparse.Namespace = parser.parse_args(line)
        cli_args.validate_parsed_serve_args(args)
    except (ValueError, TypeError, argparse.ArgumentError) as error:
        words = " ".join(str(error).split())
        raise arguments.ArgumentError(
            f"model {spec.model}: engine_args: vLLM {version()} says: {words}"
        ) from error
    return args


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
        self, llm: TappedLLM, inner: types.ASGIApp, taps: engine.Taps, log: steps.StepLog
    ) -> None:
        self._llm = llm
        self._taps = taps
        self._log = log
        self._app = calls.Releasing(inner, llm.calls)

    @property
    def app(self) -> types.ASGIApp:
        """The OpenAI app that vLLM itself builds."""
        return self._app

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


class _Adapters(dict[str, Any]):
    """Loaded adapters by ``model:adapter``; found by their own names too, and listed once."""

    def __init__(self, loaded: Mapping[str, Any], names: Mapping[str, str]) -> None:
        super().__init__(loaded)
        self._names = names

    def __contains__(self, name: object) -> bool:
        return super().__contains__(self._names.get(str(name), name))

    def __getitem__(self, name: str) -> Any:
        return super().__getitem__(self._names.get(name, name))


def _name_adapters(models: Any, spec: fleet.ReplicaSpec) -> None:
    """Serve each adapter under its own name too, unless a base model has it."""
    names = {
        name: arguments.adapter_name(spec.model, name)
        for name in spec.adapters
        if not models.is_base_model(name)
    }
    models.lora_requests = _Adapters(models.lora_requests, names)


class _AnyNumbers(responses.JSONResponse):
    """JSON that may hold NaN: the replica's stack puts null there, vLLM's own class fails every input."""

    def render(self, content: Any) -> bytes:
        """Return the bytes."""
        return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()


def _let_nan_pass(state: Any) -> None:
    for serving in vars(state)["_state"].values():
        if hasattr(serving, "json_response_cls"):
            serving.json_response_cls = _AnyNumbers


def _bound_cache(args: argparse.Namespace, spec: fleet.ReplicaSpec) -> None:
    """Give a replica on CPUs a modest KV cache if the spec says nothing.

    vLLM would take nine tenths of the machine's memory, and the next replica would not start.
    """
    said = any("gpu-memory-utilization" in name.replace("_", "-") for name in spec.engine_args)
    if platforms.current_platform.is_cpu() and args.kv_cache_memory_bytes is None and not said:
        args.kv_cache_memory_bytes = _CPU_KV_BYTES


def _inspect_here() -> None:
    """Let vLLM look at a model's class in this process.

    It starts a second Python for that (14 s, once a machine), lest CUDA be initialised here.
    """
    if platforms.current_platform.is_cpu() and hasattr(registry, "_run_in_subprocess"):
        registry._run_in_subprocess = lambda inspect: inspect()


def _prepare_process(config: Any) -> None:
    """Choose how the engine core's process is made, once vLLM has chosen for itself.

    vLLM forces "spawn" on CPUs, which imports everything again (12 s) in the core's process. Forking is
    sound here: this process has run no kernel and started no thread of its own yet.
    """
    if platforms.current_platform.is_cpu():
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
        if config.parallel_config.world_size == 1:
            # The worker lives in the engine core's process: one process fewer to pay for.
            config.parallel_config.distributed_executor_backend = "uni"
        if config.model_config.enforce_eager:
            # Else the first answer with logprobs waits 20 s for a small function to be compiled.
            torch._dynamo.config.disable = True


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
    args = parse(record.spec)
    _inspect_here()
    _bound_cache(args, record.spec)
    context = usage_lib.UsageContext.OPENAI_API_SERVER
    try:
        config = arg_utils.AsyncEngineArgs.from_cli_args(args).create_engine_config(context)
    except (ValueError, TypeError, OSError) as error:
        raise arguments.ArgumentError(_first_words(record.spec.model, error)) from error
    _prepare_process(config)
    reporter.phase("configure", round(timing.monotonic() - began, 3))
    began = timing.monotonic()
    log = steps.StepLog(config)
    llm = TappedLLM.from_vllm_config(
        config, usage_context=context, stat_loggers=[lambda vllm_config, index=0: log]
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
        _name_adapters(app.state.openai_serving_models, record.spec)
        _let_nan_pass(app.state)
        reporter.phase("load", round(timing.monotonic() - began, 3))
        yield VllmEngine(llm, app, taps, log)
    finally:
        llm.shutdown(timeout=0)


def _first_words(model: str, error: Exception) -> str:
    words = " ".join(str(error).split())
    return f"model {model}: vLLM {version()} refuses its arguments: {words[:400]}"
