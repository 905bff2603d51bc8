"""How two states of the catalog differ, told to people and kept for going back. Pure."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from scheduler.runtime.models import document


@dataclasses.dataclass(frozen=True, slots=True)
class Change:
    """One entry's change; None: it was not there, or is no more."""

    key: document.Key
    before: Mapping[str, Any] | None
    after: Mapping[str, Any] | None

    @property
    def text(self) -> str:
        """Return it as one line."""
        return describe(self)

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON."""
        kind, model, name = self.key
        return {
            "kind": kind,
            "model": model,
            "name": name,
            "before": None if self.before is None else dict(self.before),
            "after": None if self.after is None else dict(self.after),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Change":
        """Return a change from JSON."""
        return cls((value["kind"], value["model"], value["name"]), value["before"], value["after"])


def between(before: document.Entries, after: document.Entries) -> tuple[Change, ...]:
    """Return what has changed, in the entries' order."""
    return tuple(
        Change(key, before.get(key), after.get(key))
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key)
    )


def undone(now: document.Entries, later: Sequence[Sequence[Change]]) -> dict[document.Key, Any]:
    """Return the entries as they were before ``later``, whose newest changes come first."""
    found: dict[document.Key, Any] = dict(now)
    for changes in later:
        for change in changes:
            if change.before is None:
                found.pop(change.key, None)
            else:
                found[change.key] = dict(change.before)
    return found


def describe(change: Change) -> str:
    """Return a change as one line: `+ version chat v2`, `~ route chat: versions.v2 5 → 25`."""
    name = document.key_text(change.key)
    if change.before is None:
        said = ", ".join(f"{key}={_short(value)}" for key, value in _leaves(change.after or {}))
        return f"+ {name}{f': {said}' if said else ''}"
    if change.after is None:
        return f"- {name}"
    old, new = dict(_leaves(change.before)), dict(_leaves(change.after))
    told = [
        f"{key} {_short(old.get(key))} → {_short(new.get(key))}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
    ]
    return f"~ {name}: {', '.join(told)}"


def _leaves(body: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in body.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _short(value: Any) -> str:
    if value is None:
        return "default"
    text = str(value)
    return text if len(text) <= 40 else text[:37] + "..."
