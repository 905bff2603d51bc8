"""JSON objects that another release may have written: what only it knows is left out, as protobuf does.

Brokers of two releases take turns while a site is updated, agents run for as long as their leases, and files
outlive both. Not for what people write (a slip must be told), nor for money (a posting whose meaning is not
known whole must not be billed from).
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol, TypeVar


class _Dataclass(Protocol):
    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]


T = TypeVar("T", bound=_Dataclass)


def read(kind: type[T], value: Mapping[str, Any], **made: Any) -> T:
    """Return a dataclass from a JSON object.

    Args:
        kind: the dataclass.
        value: the object; members without a field in `kind` are left out.
        made: members that JSON has otherwise than the field: enums, tuples, dataclasses.

    Raises:
        TypeError: a field without default is missing, or it is no object.
    """
    if not isinstance(value, Mapping):
        raise TypeError(f"an object of {kind.__name__} is wanted")
    names = _names(kind)
    return kind(**{**{key: item for key, item in value.items() if key in names}, **made})


@functools.cache
def _names(kind: type[_Dataclass]) -> frozenset[str]:
    return frozenset(field.name for field in dataclasses.fields(kind))
