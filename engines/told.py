"""What agents and slots are told at their start: JSON files, which another release may have written."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from engines import settings
from scheduler.contracts import stored


class SpecError(ValueError):
    """The spec can't be used; the message says which file and why."""


@dataclasses.dataclass(frozen=True, slots=True)
class Spec:
    """Base of such a file's dataclass; its lists are tuples, and its `options` the [engines] settings."""

    def to_json(self) -> dict[str, Any]:
        """Return the spec as JSON values."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {**fields, "options": fields["options"].to_json()}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Read what `to_json` wrote; fields of a newer release are left out.

        Raises:
            SpecError: a field is missing or wrong.
        """
        try:
            lists = {
                key: tuple(item) if isinstance(item, list) else item for key, item in value.items()
            }
            options = settings.EnginesSettings.from_json(value.get("options", {}))
            return stored.read(cls, lists, options=options)
        except (AttributeError, TypeError, ValueError) as error:
            raise SpecError(str(error)) from error

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the spec from a file.

        Raises:
            SpecError: it can't be read, or is wrong.
        """
        try:
            return cls.from_json(json.loads(path.read_bytes()))
        except (OSError, ValueError) as error:
            raise SpecError(f"{path}: {error}") from error
