"""Adapters of one replica: what is told comes and goes, busy ones stay, broken ones harm nothing."""

import asyncio
import dataclasses
from collections.abc import Mapping

import pytest
from starlette import types

from engines.replica import adapters, gate
from scheduler.contracts import clock, usage
from tests.unit.engines import asgi, scripted


class Port:
    """`adapters.AdapterPort` that does as a test says."""

    def __init__(self, room: int = 2, fixed: Mapping[str, str] | None = None) -> None:
        self.room = room
        self.fixed = fixed or {}
        self.inside: dict[str, str] = {}
        self.most = 0
        self.broken: set[str] = set()
        self.go = asyncio.Event()
        self.go.set()
        self.leave = asyncio.Event()
        self.leave.set()

    async def load(self, name: str, path: str) -> None:
        await self.go.wait()
        if name in self.broken:
            raise adapters.AdapterFailed("of another rank\nthan is served")
        assert name not in self.inside
        self.inside[name] = path
        self.most = max(self.most, len(self.inside))

    async def unload(self, name: str) -> None:
        del self.inside[name]
        await self.leave.wait()


def states(held: adapters.Adapters) -> dict[str, str]:
    return {one["name"]: one["state"] for one in held.report() or ()}


@pytest.fixture
def port() -> Port:
    return Port()


@pytest.fixture
def held(port: Port) -> adapters.Adapters:
    return adapters.Adapters(port, clock.FakeClock())


async def test_what_is_told_comes_and_what_is_not_goes(port: Port, held: adapters.Adapters) -> None:
    held.want([("law", "/a/law"), ("tax", "/a/tax")])
    await held.settled(5)
    assert port.inside == {"law": "/a/law", "tax": "/a/tax"}
    held.want([("poet", "/a/poet"), ("tax", "/a/tax")])
    await held.settled(5)
    assert port.inside == {"tax": "/a/tax", "poet": "/a/poet"}
    assert port.most == 2, "room for one more is made before it comes"
    held.end()


async def test_a_busy_one_stays_until_its_last_sequence_and_takes_nothing_new(
    port: Port, held: adapters.Adapters
) -> None:
    held.want([("law", "/a/law"), ("tax", "/a/tax")])
    await held.settled(5)
    with held.using("law"):
        held.want([("poet", "/a/poet"), ("tax", "/a/tax")])
        await held.settled(5)
        assert states(held) == {"law": "leaving", "tax": "loaded"}
        with pytest.raises(gate.Full, match="adapter law is leaving here"), held.using("law"):
            pass
        assert "law" in port.inside
    await held.settled(5)
    assert states(held) == {"poet": "loaded", "tax": "loaded"}
    held.end()


async def test_one_that_is_wanted_again_before_it_went_stays(
    port: Port, held: adapters.Adapters
) -> None:
    held.want([("law", "/a/law")])
    await held.settled(5)
    with held.using("law"):
        held.want([])
        assert states(held) == {"law": "leaving"}
        held.want([("law", "/a/law")])
        assert states(held) == {"law": "loaded"}
    (said,) = held.report() or [{}]
    assert (said["uses"], said["running"]) == (1, 0)
    held.end()


async def test_one_that_is_wanted_again_while_it_goes_comes_anew(
    port: Port, held: adapters.Adapters
) -> None:
    """The engine has forgotten it already: no request may run on it meanwhile."""
    held.want([("law", "/a/law")])
    await held.settled(5)
    port.leave.clear()
    held.want([])
    while port.inside:  # noqa: ASYNC110 - the fake engine rings no bell
        await asyncio.sleep(0)
    held.want([("law", "/a/law")])
    assert states(held) == {"law": "leaving"}
    with pytest.raises(gate.Full), held.using("law"):
        pass
    port.leave.set()
    await held.settled(5)
    assert (states(held), port.inside) == ({"law": "loaded"}, {"law": "/a/law"})
    held.end()


async def test_a_broken_one_is_told_once_and_the_others_come(
    port: Port, held: adapters.Adapters
) -> None:
    port.broken = {"law"}
    held.want([("law", "/a/law"), ("tax", "/a/tax")])
    await held.settled(5)
    assert states(held) == {"law": "failed", "tax": "loaded"}
    assert [one["reason"] for one in held.report() or ()] == ["of another rank than is served", ""]
    held.want([("law", "/a/law"), ("tax", "/a/tax")])
    await held.settled(5)
    assert states(held)["law"] == "failed", "not tried again before it is told otherwise"
    port.broken = set()
    held.want([("tax", "/a/tax")])
    held.want([("law", "/a/law"), ("tax", "/a/tax")])
    await held.settled(5)
    assert states(held) == {"law": "loaded", "tax": "loaded"}
    held.end()


async def test_another_path_is_another_adapter(port: Port, held: adapters.Adapters) -> None:
    held.want([("law", "/a/law")])
    await held.settled(5)
    held.want([("law", "/b/law")])
    await held.settled(5)
    assert port.inside == {"law": "/b/law"}
    held.end()


async def test_one_given_up_while_it_loads_goes(port: Port, held: adapters.Adapters) -> None:
    port.go.clear()
    held.want([("law", "/a/law")])
    await asyncio.sleep(0)
    assert states(held) == {"law": "loading"}
    held.want([])
    port.go.set()
    await held.settled(5)
    assert (states(held), port.inside) == ({}, {})
    held.end()


async def test_those_that_came_with_the_engine_stay() -> None:
    port = Port(fixed={"formal": "/f"})
    held = adapters.Adapters(port, clock.FakeClock())
    held.want([])
    await held.settled(5)
    assert states(held) == {"formal": "loaded"}
    held.end()


async def test_an_engine_that_takes_none_says_so() -> None:
    held = adapters.Adapters(None, clock.FakeClock())
    assert (held.report(), held.room) == (None, 0)
    with held.using("anything"):
        pass


async def order(app: types.ASGIApp, wanted: list[list[str]]) -> dict[str, str]:
    body = {"wanted": wanted}
    call = await asgi.run(app, "POST", "/forebay/adapters", asgi.headers(framed=False), body)
    assert call.status == 200, bytes(call.body)
    return {one["name"]: one["state"] for one in call.json["adapters"]}


async def test_a_request_for_one_that_is_not_there_is_sent_back_to_wait(
    sink: usage.MemorySink, port: Port
) -> None:
    """Never an answer by the base model."""
    _, app = scripted.build(scripted.whole, sink, port=port)
    asks = dataclasses.replace(asgi.identity(), adapter="law")
    refused = await asgi.post(app, asks)
    assert (refused.status, refused.json["error"]["code"]) == (429, "adapter_missing")
    assert await order(app, [["law", "/a/law"]]) == {"law": "loaded"}
    assert (await asgi.post(app, asks)).status == 200
    (row,) = [row for row in sink.rows if isinstance(row, usage.UsageRow)]
    assert row.identity.adapter == "law"
    state = await asgi.run(app, "GET", "/forebay/state", asgi.headers(framed=False))
    (said,) = state.json["adapters"]
    assert (said["name"], said["uses"], said["running"]) == ("law", 1, 0)
    assert state.json["adapter_room"] == 2
    assert await order(app, []) == {}
    assert (await asgi.post(app, asks)).status == 429


async def test_a_wrong_order_is_refused_in_one_line(sink: usage.MemorySink, port: Port) -> None:
    _, app = scripted.build(scripted.whole, sink, port=port)
    for body in ({}, {"wanted": "law"}, {"wanted": ["law"]}, {"wanted": [["a", "b", "c"]]}):
        call = await asgi.run(app, "POST", "/forebay/adapters", asgi.headers(framed=False), body)
        assert call.status == 400, body
        assert "\n" not in call.json["error"]["message"]
