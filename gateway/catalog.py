"""Which models a caller may use, and how they are: for /v1/models and gRPC's ListModels."""

import dataclasses
from typing import Any

from gateway import resolve, waiting
from scheduler.contracts import requests
from scheduler.core import routing

_STATUS = {
    routing.Outlook.SERVING: "ready",
    routing.Outlook.COMING: "starting",
    routing.Outlook.NONE: "unavailable",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Model:
    """One model as a caller sees it; `status` is ready, starting or unavailable."""

    name: str
    versions: tuple[str, ...]
    adapters: tuple[str, ...]
    context_length: int
    tiers: tuple[str, ...]
    status: str

    def openai(self) -> list[dict[str, Any]]:
        """Return OpenAI's model objects: the model's, and one for each adapter."""
        forebay = {
            "versions": list(self.versions),
            "adapters": list(self.adapters),
            "tiers": list(self.tiers),
            "status": self.status,
        }
        common = {
            "object": "model",
            "created": 0,
            "owned_by": "forebay",
            "max_model_len": self.context_length,
        }
        base = {"id": self.name, **common, "forebay": forebay}
        adapters = [
            {"id": f"{self.name}:{adapter}", **common, "parent": self.name}
            for adapter in self.adapters
        ]
        return [base, *adapters]


def models(room: waiting.Room, caller: requests.Caller) -> list[Model]:
    """Return the caller's models by name.

    Raises:
        errors.NoReplica: nothing is known of the fleet yet.
    """
    view = room.view()
    return [
        Model(
            name,
            tuple(sorted(route.weights)),
            tuple(sorted(resolve.adapters_of(caller, route))),
            route.max_context,
            tuple(t.value for t in caller.tiers if not route.tiers or t.value in route.tiers),
            _STATUS[room.outlook(name)],
        )
        for name, route in sorted(view.routes.items())
        if resolve.may_use(caller, name, route)
    ]
