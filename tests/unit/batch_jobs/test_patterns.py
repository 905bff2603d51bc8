"""Output patterns, as sbatch expands them."""

import pytest

from batch_jobs import patterns


@pytest.mark.parametrize(
    ("pattern", "expanded"),
    [
        ("fbatch-%j.jsonl", "fbatch-42.jsonl"),
        ("%6j", "000042"),
        ("%A", "42"),
        ("%x", "my_job"),
        ("%u/%x", "eve/my_job"),
        ("100%%", "100%"),
        ("%%j", "%j"),
        ("plain", "plain"),
        ("%a", "3"),
        ("%A_%4a", "42_0003"),
        ("%2000000000j", "0000000042"),  # 2 GB of zeros once, in a gateway
    ],
)
def test_each_specifier(pattern: str, expanded: str) -> None:
    found = patterns.expand(pattern, job_id=42, name="my/job", user="eve", task_id=3)
    assert found == expanded


@pytest.mark.parametrize(
    ("pattern", "why"), [("%a", "without --array"), ("%N", "no pattern"), ("x%", "no pattern")]
)
def test_what_has_no_meaning_is_refused(pattern: str, why: str) -> None:
    with pytest.raises(patterns.PatternError, match=why):
        patterns.check(pattern)


@pytest.mark.parametrize(
    ("output", "error"),
    [
        ("fbatch-%j.jsonl", "fbatch-%j.err.jsonl"),
        ("out", "out.err"),
        ("dir.d/out", "dir.d/out.err"),
        ("a.b.jsonl", "a.b.err.jsonl"),
        (".hidden", ".hidden.err"),
    ],
)
def test_the_error_file_stands_beside_the_output(output: str, error: str) -> None:
    assert patterns.error_beside(output) == error


def test_a_pattern_tells_an_arrays_tasks_apart_or_they_would_write_over_each_other() -> None:
    found = {each: patterns.tells_tasks(each) for each in ("o-%a", "o-%j", "o-%A", "o-%x", "o")}
    assert found == {"o-%a": True, "o-%j": True, "o-%A": False, "o-%x": False, "o": False}
