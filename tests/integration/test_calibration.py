"""The simulator's engine beside real vLLM: within a fifth on three loads that were not fitted."""

from pathlib import Path

import pytest

from tests.bench import calibration
from tests.contract import engine_vllm

pytestmark = [pytest.mark.vllm, pytest.mark.long, pytest.mark.alone, pytest.mark.timeout(1800)]


def test_simulated_ttft_and_throughput_are_those_of_real_vllm(tmp_path: Path) -> None:
    engine_vllm.require(engine_vllm.NEWEST)
    said = calibration.run(tmp_path, rounds=5)
    assert said["agrees"], calibration.section(said)
