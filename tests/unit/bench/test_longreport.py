"""The report of the long tests counts what JUnit files say."""

from pathlib import Path

import pytest

from tests import longreport

JUNIT = """<testsuites><testsuite>
<testcase classname="tests.integration.test_kill" name="test_killed[1]" time="1.5"/>
<testcase classname="tests.integration.test_kill" name="test_killed[2]" time="2"><failure/></testcase>
<testcase classname="tests.properties.test_plan" name="test_all" time="0.25"><skipped/></testcase>
</testsuite></testsuites>"""


def test_runs_are_counted_by_function(tmp_path: Path) -> None:
    (tmp_path / "a.xml").write_text(JUNIT)
    (tmp_path / "b.xml").write_text(JUNIT)
    (tmp_path / "torn.xml").write_text(JUNIT[:99])
    names = ("a", "b", "torn", "none")
    found, lacking = longreport.read([tmp_path / f"{name}.xml" for name in names])
    assert lacking == ["torn", "none"]
    assert found == {
        "integration.test_kill::test_killed": longreport.Tally(4, 2, 0, 7.0),
        "properties.test_plan::test_all": longreport.Tally(2, 0, 2, 0.5),
    }
    text = longreport.page(found, {"date": "today"})
    assert "- date: today\n" in text
    assert "| integration.test_kill::test_killed | 4 | 2 | 0 | 7 |\n" in text


@pytest.mark.parametrize(
    ("junit", "code"),
    [
        (JUNIT, 1),
        ("<testsuites/>", 1),
        (JUNIT[:99], 1),
        (JUNIT.replace("<failure/>", ""), 0),
    ],
)
def test_what_fails_is_cut_off_or_does_not_run_fails_the_report(
    tmp_path: Path, junit: str, code: int
) -> None:
    (tmp_path / "a.xml").write_text(junit)
    assert longreport.main([str(tmp_path / "out.md"), str(tmp_path / "a.xml")]) == code
