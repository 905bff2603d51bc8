"""What is declared of adapters: how many a replica takes, and what is refused at once."""

from typing import Any

import pytest

from scheduler.contracts import fleet
from scheduler.runtime.models import checks, compiled, document

FOLDERS = ("/adapters", "s3://site/adapters")


def declared(
    version: dict[str, Any] | None = None, adapters: dict[str, Any] | None = None
) -> document.Document:
    fields = {"engine": "simulated", **(version or {})}
    model = {
        "versions": {"v1": fields},
        "route": {"versions": {"v1": 100}},
        "adapters": adapters or {},
    }
    return document.Document.model_validate({"models": {"chat": model}})


def faults(found: document.Document) -> list[str]:
    changed = frozenset(document.entries(found))
    return list(checks.faults(found, checks.Unseen(), changed, FOLDERS))


def spec(found: document.Document) -> fleet.ReplicaSpec:
    return compiled.spec("chat", "v1", found.models["chat"], None)


@pytest.mark.parametrize(
    ("version", "count", "slots"),
    [
        ({}, 0, 0),
        ({}, 3, 3),
        ({}, 30, 8),
        ({"adapter_slots": 0}, 3, 0),
        ({"adapter_slots": 12}, 0, 12),
        ({"engine": "http", "weights": "http://127.0.0.1:1"}, 3, 0),
    ],
)
def test_how_many_a_replica_takes(version: dict[str, Any], count: int, slots: int) -> None:
    adapters = {f"a{number}": {"path": f"/adapters/{number}"} for number in range(count)}
    made = spec(declared(version, adapters))
    assert made.adapter_slots == slots
    assert len(made.adapters) == count
    assert len(made.started.adapters) == (0 if slots else count), "it starts without any"


@pytest.mark.parametrize(
    ("version", "adapters", "told"),
    [
        (
            {"engine": "http", "weights": "http://127.0.0.1:1", "adapter_slots": 2},
            {},
            "an external server's adapters are its own affair",
        ),
        ({"adapter_slots": 4, "adapter_host": 2}, {}, "adapter_host 2 is below adapter_slots"),
        ({}, {"chat": {"path": "/adapters/chat"}}, "bears its model's name"),
        ({}, {"law": {"path": "/etc"}}, "is outside the allowed folders"),
        ({}, {"law": {"path": "file:///etc"}}, "is outside the allowed folders"),
        (
            {},
            {"law": {"path": "s3://site/adapters-of-others/law"}},
            "is outside the allowed folders",
        ),
        ({}, {"law": {"path": "s3://site/adapters/../secrets"}}, "is outside the allowed folders"),
        ({}, {"law": {"path": "adapters/law"}}, "must be absolute"),
    ],
)
def test_what_is_refused(version: dict[str, Any], adapters: dict[str, Any], told: str) -> None:
    (fault,) = faults(declared(version, adapters))
    assert told in fault
    assert "\n" not in fault


def test_what_is_taken() -> None:
    paths = ("/adapters/law", "file:///adapters/law", "s3://site/adapters/law")
    adapters = {f"a{number}": {"path": path} for number, path in enumerate(paths)}
    assert faults(declared({"adapter_slots": 2, "adapter_host": 40}, adapters)) == []
