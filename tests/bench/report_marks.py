"""Figures between two marks of a page that is written by hand otherwise."""

from pathlib import Path


def put(report: Path, name: str, text: str) -> None:
    """Put ``text`` between the marks of ``name`` in ``report``.

    Raises:
        ValueError: the marks are not there.
    """
    begin, end = f"<!-- {name}: written by the bench -->", f"<!-- end of {name} -->"
    page = report.read_text(encoding="utf-8")
    before, first, rest = page.partition(begin)
    _, last, after = rest.partition(end)
    if not first or not last:
        raise ValueError(
            f"{report}: the marks {begin} and {end} are missing; put them where it belongs"
        )
    report.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")
