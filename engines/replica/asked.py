"""What a request's body asks of a replica beside the engine's own business. Pure."""

import dataclasses
import json
from typing import Any

from scheduler.contracts import resume


@dataclasses.dataclass(frozen=True, slots=True)
class Asked:
    """A body that was read.

    Attributes:
        body: as the engine shall see it.
        sequences: how many sequences it runs at once: choices times prompts; 1 if unclear.
        begun: the beginning of the answer, if it goes on from one.
        why_not: why its answer can't go on elsewhere, or "".
    """

    body: bytes
    sequences: int = 1
    begun: resume.Resume | None = None
    why_not: str = ""


def read(raw: bytes) -> Asked:
    """Read a body.

    Raises:
        ValueError: it asks to go on with an answer that can't be, or from no beginning.
    """
    try:
        value = json.loads(raw)
    except ValueError:
        return Asked(raw)  # the engine will refuse it, in its own words
    if not isinstance(value, dict):
        return Asked(raw)
    why_not = resume.why_not(value)
    if resume.FIELD not in value:
        return Asked(raw, _sequences(value), None, why_not)
    begun = resume.Resume.from_json(value.pop(resume.FIELD))
    if why_not:
        raise ValueError(f"{resume.FIELD}: the answer can't be resumed: {why_not}")
    return Asked(json.dumps(value).encode(), 1, begun)


def _sequences(value: dict[str, Any]) -> int:
    choices = value.get("n")
    prompts = value.get("prompt")
    many = isinstance(prompts, list) and bool(prompts) and isinstance(prompts[0], str | list)
    count = len(prompts) if many and isinstance(prompts, list) else 1
    whole = isinstance(choices, int) and not isinstance(choices, bool) and choices > 0
    return count * (choices if whole and isinstance(choices, int) else 1)
