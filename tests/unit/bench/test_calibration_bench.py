"""What the calibration bench makes of what it has measured; the engine here is the simulator's own."""

from pathlib import Path

import pytest

from scheduler.core import sizing
from tests.bench import calibration, report_marks

KNOWN = calibration.Fit(sizing.StepTime(5.0, 0.05, 0.3, 0.0005), 0.003)


def answers(load: calibration.Load) -> list[calibration.Seen]:
    """Return what the engine does with equal requests, each token at an even pace."""
    return [
        calibration.Seen(
            seen.sent,
            seen.first,
            seen.end,
            seen.output,
            tuple(
                seen.first + (seen.end - seen.first) * n / (seen.output - 1)
                for n in range(seen.output)
            ),
        )
        for seen in calibration.predict(load, KNOWN)
    ]


def test_coefficients_are_found_again() -> None:
    measured = calibration.Measured()
    for count, prompt in calibration.DECODING:
        ms = KNOWN.step.ms(0, count, count * (prompt + calibration.TOKENS / 2))
        measured.steps[count, prompt] = [ms, ms * 50, ms]
    for prompt in calibration.PROMPTS:
        ms = KNOWN.step.ms(prompt, 0, 0) + KNOWN.overhead_s * 1000
        measured.alone[prompt] = [ms, ms, 900.0]
    found = measured.fit()
    assert found.step.base == pytest.approx(5.0, rel=0.01)
    assert found.step.prefill == pytest.approx(0.05, rel=0.01)
    assert found.step.decode == pytest.approx(0.3, rel=0.01)
    assert found.step.kv == pytest.approx(0.0005, rel=0.01)
    assert found.overhead_s == pytest.approx(0.003, rel=0.01)


def test_a_coefficient_that_would_be_negative_is_left_out() -> None:
    found = calibration._least_squares([(1, 1), (1, 2), (1, 3)], [3.0, 2.0, 1.0])
    assert found[1] == 0.0
    assert found[0] > 0


def test_the_steps_of_equal_requests_are_seen_from_their_tokens() -> None:
    load = calibration.Load((calibration.Ask(0.0, 32, 64),) * 8)
    steps = calibration.steps_of(answers(load))
    assert len(steps) > 50
    wanted = KNOWN.step.ms(0, 8, 8 * 64)
    assert all(ms == pytest.approx(wanted, rel=0.1) for ms in steps)


def test_a_closed_load_keeps_so_many_at_once_and_an_open_one_keeps_its_times() -> None:
    asks = tuple(calibration.Ask(0.0, 100, 20) for _ in range(12))
    seen = sorted(
        calibration.predict(calibration.Load(asks, 2, closed=True), KNOWN), key=lambda s: s.sent
    )
    assert len(seen) == 12
    for n, each in enumerate(seen[2:], 2):
        assert each.sent >= min(other.end for other in seen[n - 2 : n]) - 1e-9
    late = tuple(calibration.Ask(float(n), 100, 20) for n in range(3))
    assert [s.sent for s in calibration.predict(calibration.Load(late), KNOWN)] == [0.0, 1.0, 2.0]
    waits = calibration.predict(calibration.Load(asks, 1), KNOWN)
    assert max(s.first - s.sent for s in waits) > 11 * min(s.end - s.first for s in waits)


def test_a_fifth_off_in_one_load_is_no_agreement() -> None:
    good, off = calibration.Figures(100, 200, 50), calibration.Figures(125, 200, 50)
    said = calibration.summed(KNOWN, {"a": good, "b": good}, {"a": [good], "b": [good, good, off]})
    assert said["agrees"]
    said = calibration.summed(KNOWN, {"a": good, "b": off}, {"a": [good], "b": [good, good, off]})
    assert not said["agrees"]
    assert "| b | TTFT p50 ms | 125 | 100 (100 to 125) | 1.25 |" in calibration.section(said)


def test_a_page_that_is_written_anew_keeps_what_another_bench_wrote(tmp_path: Path) -> None:
    page = "old\n<!-- x: written by the bench -->\nnot yet\n<!-- end of x -->\n"
    report = tmp_path / "page.md"
    assert report_marks.kept(report, "x", page) == page
    report.write_text(page)
    report_marks.put(report, "x", "figures")
    again = report_marks.kept(report, "x", page.replace("old", "new"))
    assert again == "new\n<!-- x: written by the bench -->\nfigures\n<!-- end of x -->\n"
    with pytest.raises(ValueError, match="missing"):
        report_marks.put(report, "y", "figures")
