"""What a submission is checked against besides its own words: the site's models, teams and prices.

Ports: `forebay` gives them what the fleet's view, Slurm and the price list say. A site that can't tell
refuses nothing.
"""

import dataclasses
import difflib
from collections.abc import Callable, Collection, Mapping


@dataclasses.dataclass(frozen=True, slots=True)
class Served:
    """A model that has a route.

    Attributes:
        adapters: that may be named behind a colon.
        prompt_gpu_s: GPU-seconds that a prompt token takes now, 0 where no replica says so.
        output_gpu_s: the same for a token of an answer.
    """

    adapters: frozenset[str] = frozenset()
    prompt_gpu_s: float = 0.0
    output_gpu_s: float = 0.0


Models = Callable[[], Mapping[str, Served] | None]
"""The models by name; None: nobody can tell now."""

Teams = Callable[[], Collection[str]]
"""The teams that exist; blocks, and raises `errors.NoReplica` where nobody can tell."""

Price = Callable[[Mapping[str, tuple[int, int]]], str]
"""What prompt and output tokens, by model, cost at tier batch now, in words; "": no price is set. Blocks."""


def _unknown_models() -> Mapping[str, Served] | None:
    return None


def _free(tokens: Mapping[str, tuple[int, int]]) -> str:
    del tokens
    return ""


@dataclasses.dataclass(frozen=True, slots=True)
class Site:
    """The site's answers; without them a submission is checked by its own words alone.

    Attributes:
        teams: None: any name is a team.
    """

    models: Models = _unknown_models
    teams: Teams | None = None
    price: Price = _free


def split(name: str, models: Mapping[str, Served]) -> tuple[str, str]:
    """Return model and adapter of a name; a model whose own name holds a colon goes first."""
    if name in models or ":" not in name:
        return name, ""
    model, _, adapter = name.rpartition(":")
    return model, adapter


def fault(name: str, models: Mapping[str, Served], *, near: bool = False) -> str:
    """Return why a name is none of the models, in one line, or "".

    Args:
        name: ``model`` or ``model:adapter``.
        models: those that there are.
        near: look for a name that was meant, which takes milliseconds: not for each of a million lines.
    """
    model, adapter = split(name, models)
    served = models.get(model)
    if served is None:
        return f"there is no model {model[:80]!r}: {_instead(model, models, near)}"
    if adapter and adapter not in served.adapters:
        return f"model {model} has no adapter {adapter[:80]!r}: {_instead(adapter, served.adapters, near)}"
    return ""


def _instead(name: str, known: Collection[str], near: bool) -> str:
    names = sorted(known)
    if near and (meant := difflib.get_close_matches(name[:80], names, n=3)):
        return f"did you mean {' or '.join(meant)}?"
    return (
        f"there are {', '.join(names[:5])}{', …' if names[5:] else ''}"
        if names
        else "there is none"
    )


def gpu_seconds(
    tokens: Mapping[str, tuple[int, int]], models: Mapping[str, Served] | None
) -> float | None:
    """Return the GPU-seconds of prompt and output tokens, by model; None where one can't be told."""
    found = 0.0
    for name, (prompt, output) in tokens.items():
        served = (models or {}).get(split(name, models or {})[0])
        if served is None or not served.output_gpu_s:
            return None
        found += prompt * served.prompt_gpu_s + output * served.output_gpu_s
    return found
