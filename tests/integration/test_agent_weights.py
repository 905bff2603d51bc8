"""Staged weights, two ranks, guessed tokens: for real, vLLM on CPUs, and one answer from all of them."""

import json
from pathlib import Path
from typing import Any

import pytest

from engines import tinymodel
from engines.weights import store
from scheduler.contracts import frames
from tests.contract import engine_vllm
from tests.integration import lease_site

pytestmark = [pytest.mark.vllm, pytest.mark.long, pytest.mark.timeout(1200)]


async def test_staged_weights_two_ranks_and_guessed_tokens_give_one_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine_vllm.require(engine_vllm.NEWEST)
    monkeypatch.setattr(lease_site, "PATIENCE_S", 500.0)
    tinymodel.make(tmp_path / "tiny")
    options: dict[str, Any] = {
        "vllm_python": str(engine_vllm.python(engine_vllm.NEWEST)),
        "fork_server": "on",
        "weights_dir": str(tmp_path / "disk"),
        "weights_reserve_gb": 0.0,
    }
    place = f"file://{tmp_path / 'tiny'}"
    one: dict[str, Any] = {"weights": place, "gpus": 1, **engine_vllm.ARGUMENTS}
    two: dict[str, Any] = {**one, "gpus": 2, "tensor-parallel-size": 2}
    async with lease_site.opened(tmp_path, **options) as site:
        site.want(lease_site.desired("r-one", **one))
        alone = _ids(await site.ask(await site.serving("r-one"), "q1", temperature=0))
        assert len(alone) == 8

        (tmp_path / "tiny").rename(tmp_path / "gone")  # its place is down from here on
        site.want(lease_site.desired("r-one", run=False, **one))
        await site.broker.until(lambda r: lease_site.state(r, "r-one") == "stopped")
        site.want(lease_site.desired("r-two", **two))
        replica = await site.serving("r-two")
        assert replica.phases_s["stage"] < 5.0, "from the disk"
        assert replica.spec.weights == place
        assert _ids(await site.ask(replica, "q2", temperature=0)) == alone
        said = (tmp_path / "run" / "logs" / "r-two.log").read_text()
        assert "Worker_TP0" in said
        assert "Worker_TP1" in said
        (held,) = store.Store(tmp_path / "disk").held()
        assert (held.uri, held.users) == (place, 1)
        report = site.broker.last.weights
        assert [(item.uri, item.state) for item in report] == [(place, "staged")]

        site.want(lease_site.desired("r-two", run=False, **two))
        await site.broker.until(lambda r: lease_site.state(r, "r-two") == "stopped")
        tuned = lease_site.desired("r-tuned", **one)
        guess = {"method": "ngram", "tokens": 3, "most_batch": 2}
        tuned.spec.tuning_json = json.dumps({"chunk_tokens": 512, "speculative": guess})
        site.want(tuned)
        assert _ids(await site.ask(await site.serving("r-tuned"), "q3", temperature=0)) == alone


def _ids(found: list[frames.Frame]) -> list[int]:
    return [token for each in found if each.kind is frames.Kind.DATA for token in each.token_ids]
