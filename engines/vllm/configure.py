"""A replica's spec as vLLM's configuration, and this process set for it; vLLM's own parser judges the spec.

Written against vLLM 0.31 and 0.32 and importable only in an engine's environment.
"""

import argparse
import importlib.metadata
import os
from typing import Any, NoReturn

import torch._dynamo
from vllm import platforms
from vllm.engine import arg_utils
from vllm.entrypoints.launchers import cli_args
from vllm.model_executor.models import registry
from vllm.usage import usage_lib
from vllm.utils import argparse_utils

from engines.replica import launch
from engines.vllm import arguments, multinode, sleeping
from scheduler.contracts import fleet

_CPU_KV_BYTES = 256 * 1024 * 1024


class _Parser(argparse_utils.FlexibleArgumentParser):  # type: ignore[misc]  # vLLM is untyped here
    def error(self, message: str) -> NoReturn:
        raise arguments.ArgumentError(message)


def parse(spec: fleet.ReplicaSpec, rank: launch.Rank | None = None) -> argparse.Namespace:
    """Return the arguments of ``spec`` as vLLM's own parser understands them.

    Args:
        spec: the replica's.
        rank: which part of it, where it goes over several nodes.

    Raises:
        arguments.ArgumentError: Forebay refuses one, or vLLM does not know it or its value.
    """
    line = arguments.command_line(spec) if rank is None else multinode.command_line(spec, rank)
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
        if config.parallel_config.nnodes > 1:
            # vLLM tells its ranks' nodes apart by the devices of each, and counts one on CPUs.
            local = config.parallel_config.local_world_size
            config.parallel_config.assigned_physical_gpu_ids = list(range(local))
        if config.parallel_config.pipeline_parallel_size > 1:
            from engines.vllm import stages

            stages.prepare()
        if config.model_config.enforce_eager:
            # Else the first answer with logprobs waits 20 s for a small function to be compiled.
            torch._dynamo.config.disable = True


def configured(record: launch.Launch, *, headless: bool = False) -> tuple[argparse.Namespace, Any]:
    """Return vLLM's arguments and configuration for a replica, with this process set for it.

    Args:
        record: which, and how.
        headless: for a rank that serves no requests.

    Raises:
        arguments.ArgumentError: the spec's arguments can't be used.
    """
    args = parse(record.spec, record.rank)
    _inspect_here()
    _bound_cache(args, record.spec)
    if record.rank is None:
        sleeping.prepare(args, record.spec, platforms.current_platform)
    else:
        os.environ["VLLM_HOST_IP"] = (
            record.host
        )  # where ranks of other nodes find this one's queues
    context = usage_lib.UsageContext.OPENAI_API_SERVER
    try:
        engine_args = arg_utils.AsyncEngineArgs.from_cli_args(args)
        config = engine_args.create_engine_config(context, headless=headless)
    except (ValueError, TypeError, OSError) as error:
        raise arguments.ArgumentError(_first_words(record.spec.model, error)) from error
    _prepare_process(config)
    return args, config


def version() -> str:
    """Return vLLM's version."""
    return importlib.metadata.version("vllm")


def _first_words(model: str, error: Exception) -> str:
    words = " ".join(str(error).split())
    return f"model {model}: vLLM {version()} refuses its arguments: {words[:400]}"
