"""vLLM's adapters while it serves: the engine client's own calls load them; no port or route is opened.

A name is put where vLLM's server looks names up only once its engine has the weights, and taken from there
before the engine lets them go.
"""

import contextlib
from collections.abc import Mapping
from typing import Any

from vllm import platforms
from vllm.lora import request

from engines.replica import adapters
from engines.vllm import arguments
from scheduler.contracts import fleet


class Names(dict[str, Any]):
    """Loaded adapters by ``model:adapter``; found by their own names too, and listed once."""

    def __init__(self, loaded: Mapping[str, Any], model: str) -> None:
        super().__init__(loaded)
        self._model = model

    def _full(self, name: object) -> object:
        full = arguments.adapter_name(self._model, str(name))
        return full if name != self._model and super().__contains__(full) else name

    def __contains__(self, name: object) -> bool:
        return super().__contains__(self._full(name))

    def __getitem__(self, name: str) -> Any:
        return super().__getitem__(str(self._full(name)))


class Loras:
    """`adapters.AdapterPort` of vLLM.

    Args:
        llm: the engine's client.
        models: vLLM's `OpenAIServingModels`, which knows names.
        spec: the replica's.
    """

    def __init__(self, llm: Any, models: Any, spec: fleet.ReplicaSpec) -> None:
        self._llm = llm
        self._models = models
        self._spec = spec
        models.lora_requests = Names(models.lora_requests, spec.model)

    @property
    def room(self) -> int:
        """How many it may hold.

        On CPUs no more than the slots that a batch may use: vLLM's last slot must stay empty there, since
        rows of the base model read its weights (index -1), and every held adapter may come into a slot.
        """
        spec = self._spec
        if platforms.current_platform.is_cpu():
            return spec.adapter_slots + len(spec.adapters)
        return max(spec.adapter_slots, spec.adapter_host) + len(spec.adapters)

    @property
    def fixed(self) -> Mapping[str, str]:
        """Those that it was started with."""
        return self._spec.adapters

    async def load(self, name: str, path: str) -> None:
        """Bring an adapter's weights into the engine, then serve its name.

        Raises:
            adapters.AdapterFailed: vLLM refuses it; nothing of it is left there.
        """
        full = arguments.adapter_name(self._spec.model, name)
        made = request.LoRARequest(
            lora_name=full, lora_int_id=self._models.lora_id_counter.inc(1), lora_path=path
        )
        try:
            there = await self._llm.add_lora(made)
        except Exception as error:  # whatever the engine's core raised comes as a plain Exception
            # Half an adapter may be registered by now, in a slot whose weights are not whole.
            with contextlib.suppress(Exception):
                await self._llm.remove_lora(made.lora_int_id)
            raise adapters.AdapterFailed(f"vLLM does not load it: {error}") from error
        if not there:
            raise adapters.AdapterFailed("vLLM does not load it and does not say why: see its log")
        self._models.lora_requests[full] = made

    async def unload(self, name: str) -> None:
        """Stop serving a name, then let its weights go.

        Raises:
            adapters.AdapterFailed: the engine does not answer as it should.
        """
        full = arguments.adapter_name(self._spec.model, name)
        made = self._models.lora_requests.pop(full, None)
        if made is None:
            return
        try:
            await self._llm.remove_lora(made.lora_int_id)
        except Exception as error:
            raise adapters.AdapterFailed(f"vLLM does not let it go: {error}") from error
