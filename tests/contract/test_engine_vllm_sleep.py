"""Rung 2 on real vLLM: on CPUs its sleep frees nothing and says that it sleeps; that must be found out."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.contract import engine_vllm
from tests.contract.vllm_answers import COMPLETIONS

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def sleepy(server: engine_vllm.ForkServer) -> Iterator[engine_vllm.Replica]:
    """A replica whose version asks for a level, whatever the platform says of itself."""
    what = engine_vllm.spec(server.folder, tuning={"parking": "level-2"})
    begun = engine_vllm.begin(server, what)
    yield engine_vllm.listening(server, begun)
    engine_vllm.stop(server, begun)


def post(http: httpx.Client, path: str, **fields: Any) -> dict[str, Any]:
    said: dict[str, Any] = http.post(path, json=fields).raise_for_status().json()
    return said


def test_a_sleep_that_freed_nothing_is_found_out_and_waking_goes_the_documented_way(
    sleepy: engine_vllm.Replica,
) -> None:
    asked = {"model": "chat", "prompt": "The water", "max_tokens": 9, "temperature": 0}
    with sleepy.client() as http:
        before = post(http, COMPLETIONS, **asked)["choices"][0]["text"]
        assert http.post("/forebay/sleep", json={}).status_code == 400  # it serves
        assert post(http, "/forebay/drain")["sleeps"]
        said = post(http, "/forebay/sleep")
        assert said["failed"].startswith("nothing was freed: vLLM says that it sleeps")
        # The keeper would end it now. Its wake is real all the same: the weights are loaded in place.
        assert post(http, "/forebay/wake", role="shared", incarnation=2) == {"failed": ""}
        assert post(http, COMPLETIONS, **asked)["choices"][0]["text"] == before
    assert sleepy.state()["incarnation"] == 2
    assert "sleep mode is not supported on CPU" in sleepy.log.read_text()


def test_by_default_an_engine_without_a_sleep_mode_has_no_way_to_sleep(
    replica: engine_vllm.Replica,
) -> None:
    assert not replica.state()["sleeps"]
    with replica.client() as http:
        answer = http.post("/forebay/sleep", json={})
    assert answer.status_code == 400
    assert "does not sleep" in answer.json()["error"]["message"]
