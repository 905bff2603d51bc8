"""A real vLLM replica takes adapters while it serves: loads, lets go, refuses what is broken, and goes on."""

import concurrent.futures
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from engines import lora, tinymodel
from tests.contract import engine_vllm

SLOTS = 3
ADAPTERS = 5
BODY = {"prompt": "The river", "max_tokens": 8, "temperature": 0}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    made = tmp_path_factory.mktemp("adapters")
    names = [f"a{number}" for number in range(ADAPTERS)]
    for number, name in enumerate(names):
        tinymodel.make_lora(made / name, seed=100 + number)
    return {name: str(made / name) for name in names}


@pytest.fixture(scope="module")
def bare(server: engine_vllm.ForkServer) -> Iterator[engine_vllm.Replica]:
    """A replica that was started without any adapter, with room for some."""
    begun = engine_vllm.begin(server, engine_vllm.spec(server.folder, adapter_slots=SLOTS))
    yield engine_vllm.listening(server, begun)
    engine_vllm.stop(server, begun)


def order(replica: engine_vllm.Replica, wanted: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Say which adapters it shall hold; returns what it then says of each."""
    answer = httpx.post(
        f"{replica.url}/forebay/adapters",
        headers={"authorization": f"Bearer {engine_vllm.SECRET}"},
        json={"wanted": list(wanted.items())},
        timeout=60,
        trust_env=False,
    )
    assert answer.status_code == 200, answer.text
    return {one["name"]: one for one in answer.json()["adapters"]}


def text(replica: engine_vllm.Replica, model: str) -> str:
    answer = httpx.post(
        f"{replica.url}/v1/completions",
        headers={"authorization": f"Bearer {engine_vllm.SECRET}"},
        json={"model": model, **BODY},
        timeout=60,
        trust_env=False,
    )
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def test_adapters_come_and_go_and_answer_as_themselves(
    bare: engine_vllm.Replica, folders: dict[str, str]
) -> None:
    base = text(bare, "chat")
    alone: dict[str, str] = {}
    for name, folder in folders.items():
        held = order(bare, {name: folder})
        assert held[name]["state"] == "loaded", held
        assert list(held) == [name]
        alone[name] = text(bare, f"chat:{name}")
    assert len({base, *alone.values()}) == 1 + ADAPTERS
    for first in range(ADAPTERS):
        names = [f"a{(first + n) % ADAPTERS}" for n in range(SLOTS)]
        held = order(bare, {name: folders[name] for name in names})
        assert {name: one["state"] for name, one in held.items()} == dict.fromkeys(names, "loaded")
        asked = ["chat", *[f"chat:{name}" for name in names]] * 2
        with concurrent.futures.ThreadPoolExecutor(len(asked)) as pool:
            found = list(pool.map(lambda model: text(bare, model), asked))
        expected = [base, *[alone[name] for name in names]] * 2
        assert found == expected


def test_an_adapter_that_is_not_loaded_is_not_answered_by_the_base(
    bare: engine_vllm.Replica, folders: dict[str, str]
) -> None:
    order(bare, {"a0": folders["a0"]})
    for name in ("chat:a1", "a1"):
        answer = httpx.post(
            f"{bare.url}/v1/completions",
            headers={"authorization": f"Bearer {engine_vllm.SECRET}"},
            json={"model": name, **BODY},
            timeout=60,
            trust_env=False,
        )
        assert answer.status_code == 404, answer.text


def test_a_broken_adapter_is_told_and_harms_nothing(
    bare: engine_vllm.Replica, folders: dict[str, str], tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(folders["a1"], broken)
    config = json.loads((broken / lora.CONFIG).read_text())
    (broken / lora.CONFIG).write_text(json.dumps({**config, "r": 64}))
    before = text(bare, "chat")
    held = order(bare, {"broken": str(broken), "a0": folders["a0"]})
    assert held["broken"]["state"] == "failed"
    assert "vLLM does not load it" in held["broken"]["reason"]
    assert held["a0"]["state"] == "loaded"
    assert text(bare, "chat") == before
    assert text(bare, "chat:a0") != before
    assert "broken" not in order(bare, {"a0": folders["a0"]})


def test_vllms_own_routes_for_adapters_are_not_there(
    bare: engine_vllm.Replica, folders: dict[str, str]
) -> None:
    for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
        answer = httpx.post(
            f"{bare.url}{path}",
            headers={"authorization": f"Bearer {engine_vllm.SECRET}"},
            json={"lora_name": "mine", "lora_path": folders["a0"]},
            timeout=60,
            trust_env=False,
        )
        assert answer.status_code == 404
