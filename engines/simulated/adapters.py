"""The simulated engine's adapters: a load takes its time, so many are held, each has its own answers."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from engines import lora
from engines.replica import adapters
from engines.simulated import core
from scheduler.contracts import clock


class Loras:
    """`adapters.AdapterPort` of the simulated engine.

    Args:
        options: how the engine is set up.
        time: the clock.
    """

    def __init__(self, options: core.Options, time: clock.Clock) -> None:
        self._options = options
        self._clock = time
        self._loaded: dict[str, str] = dict.fromkeys(options.adapters, "")

    @property
    def room(self) -> int:
        """How many it may hold."""
        options = self._options
        return max(options.adapter_slots, options.adapter_host) + len(options.adapters)

    @property
    def fixed(self) -> Mapping[str, str]:
        """Those of its spec."""
        return dict.fromkeys(self._options.adapters, "")

    def names(self) -> Iterable[str]:
        """Return the names that are served beside the model's own."""
        for name in self._loaded:
            yield name
            yield f"{self._options.model}:{name}"

    def named(self, model: str) -> str:
        """Return the adapter that a body's model names, "" for the base model."""
        bare = model.removeprefix(f"{self._options.model}:")
        return bare if bare in self._loaded and model != self._options.model else ""

    async def load(self, name: str, path: str) -> None:
        """Take the time that a load takes.

        Raises:
            adapters.AdapterFailed: a folder is there and holds no adapter.
        """
        await self._clock.sleep(
            self._options.adapter_load_ms / 1_000 * (self._options.time_scale or 0.0)
        )
        if Path(path).is_dir() and not (Path(path) / lora.CONFIG).is_file():
            raise adapters.AdapterFailed(f"{path}: no {lora.CONFIG} there")
        self._loaded[name] = path

    async def unload(self, name: str) -> None:
        """Forget it."""
        self._loaded.pop(name, None)
