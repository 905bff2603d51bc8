"""Engine settings that Forebay knows by type: what a version may say of them, and what they cost.

`docs/engine-settings.md` says when each helps. Everything else is `engine_args`, judged by the engine alone.
"""

from collections.abc import Mapping
from typing import Any, Literal

import pydantic

_STRICT = pydantic.ConfigDict(extra="forbid", frozen=True)


class Speculative(pydantic.BaseModel):
    """Guessing tokens ahead, while few sequences run.

    Attributes:
        method: ngram (guesses from the sequence itself), or draft (a small model of the same tokenizer).
        tokens: guessed a step.
        most_batch: with more sequences than this in a step nothing is guessed: the GPU has no time to spare.
        model: the draft model's folder.
        lookup: longest run of tokens that ngram looks for.
    """

    model_config = _STRICT

    method: Literal["ngram", "draft"]
    tokens: int = pydantic.Field(4, ge=1, le=16)
    most_batch: int = pydantic.Field(4, ge=1, le=256)
    model: str = ""
    lookup: int = pydantic.Field(4, ge=1, le=16)

    @pydantic.model_validator(mode="after")
    def _fits(self) -> "Speculative":
        if (self.method == "draft") != bool(self.model):
            need = (
                "needs `model`, the draft's folder"
                if self.method == "draft"
                else "takes no `model`"
            )
            raise ValueError(f"speculative.method {self.method} {need}")
        return self


class Tuning(pydantic.BaseModel):
    """A version's engine settings.

    Attributes:
        chunk_tokens: prompt and output tokens of one step at most (chunked prefill).
        prefix_caching: keep KV blocks of prompts for others that begin the same.
        kv_offload_gb: host memory of a replica for KV blocks that leave the GPU, in 10^9 bytes; 0: none.
        speculative: guessing ahead; None: none.
        quantization_approval: who allowed fp8 for this version, and where it is written down.
        parking: what becomes of a parked replica (rung 2): the engine sleeps at that level, or its process
            ends; auto: level 1 where the engine sleeps and the host has room, else the process ends.
    """

    model_config = _STRICT

    chunk_tokens: int = pydantic.Field(2048, ge=512, le=2048)
    prefix_caching: bool = True
    kv_offload_gb: float = pydantic.Field(0.0, ge=0, le=10_000)
    speculative: Speculative | None = None
    quantization_approval: str = ""
    parking: Literal["auto", "level-1", "level-2", "process"] = "auto"


def read(given: Mapping[str, Any]) -> Tuning:
    """Return a spec's tuning.

    Raises:
        ValueError: one line that names the field at fault.
    """
    try:
        return Tuning.model_validate(dict(given))
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        where = ".".join(["tuning", *(str(part) for part in first["loc"])])
        said = first["msg"].removeprefix("Value error, ")
        raise ValueError(f"{where}: {said} (got {first['input']!r:.60})") from error
