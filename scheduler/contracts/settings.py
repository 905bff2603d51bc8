"""How a setting is declared: once, typed, with its unit, default and reason.

Each folder has a ``settings.py`` with one frozen dataclass for its table of ``forebay.toml``; every
field is made with `setting`. `scheduler.runtime.config` reads the file, lets the environment override
it (``FOREBAY_<TABLE>_<KEY>``) and names the line at fault.
"""

import dataclasses
from typing import Any


def setting(
    default: Any,
    doc: str,
    *,
    unit: str = "",
    least: float | None = None,
    most: float | None = None,
) -> Any:
    """Declare one setting of a frozen dataclass.

    Args:
        default: the value if the file and the environment say nothing; a list, dict or other
            mutable default is copied for each instance.
        doc: one sentence: what it does, and why the default is what it is.
        unit: the unit in which the file gives it (`s`, `ms`, `bytes`, `tokens`), if it has one.
        least: the smallest value allowed, for numbers.
        most: the largest.
    """
    metadata = {"doc": doc, "unit": unit, "least": least, "most": most}
    if isinstance(default, list | dict | set):
        return dataclasses.field(default_factory=lambda: type(default)(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)
