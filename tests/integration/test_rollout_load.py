"""Rollouts of a failing, a slow and a good version under load on a whole installation; nobody notices."""

from pathlib import Path

import pytest

from tests.bench import models


@pytest.mark.long
@pytest.mark.timeout(900)
def test_no_request_fails_and_both_bad_versions_go_back_by_themselves(tmp_path: Path) -> None:
    found = models.measure(tmp_path, 1)
    assert found["failures"] == []
    assert found["failed_requests"] == 0
    assert found["requests"] > 100
    assert {name: one["outcome"] for name, one in found["automatic"].items()} == {
        "failing": "rolled back",
        "slow": "rolled back",
    }
    assert found["rollout"] == "done"
    assert found["rollback_s"]["most"] < 2.0
