"""Pipeline stages on CPUs: the buffers that vLLM's own warm-up makes, where there is no warm-up.

A stage past the first copies what the one before has computed into tensors that `_dummy_run` allocates. On
CPUs in eager mode vLLM 0.31 and 0.32 never call it (`CPUModelRunner.warming_up_model` returns at once), and
the first request then dies of `assert self.intermediate_tensors is not None`.
"""

from typing import Any

from vllm.distributed import parallel_state
from vllm.v1.worker import cpu_worker


def prepare() -> None:
    """Have each stage past the first make its buffers when it loads the model, in this process's workers."""
    runner: Any = cpu_worker.CPUModelRunner
    load = runner.load_model

    def load_model(self: Any, *args: Any, **options: Any) -> None:
        load(self, *args, **options)
        if self.intermediate_tensors is None and not parallel_state.get_pp_group().is_first_rank:
            self.intermediate_tensors = self.model.make_empty_intermediate_tensors(
                batch_size=self.max_num_tokens, dtype=self.model_config.dtype, device=self.device
            )

    runner.load_model = load_model
