"""Figures between two marks of a page that is written by hand otherwise."""

from pathlib import Path


def put(report: Path, name: str, text: str) -> None:
    """Put ``text`` between the marks of ``name`` in ``report``.

    Raises:
        ValueError: the marks are not there.
    """
    begin, end = _marks(name)
    parts = _parts(report.read_text(encoding="utf-8"), name)
    if parts is None:
        raise ValueError(
            f"{report}: the marks {begin} and {end} are missing; put them where it belongs"
        )
    before, _, after = parts
    report.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")


def kept(report: Path, name: str, page: str) -> str:
    """Return ``page`` with what stands between the marks of ``name`` in the ``report`` that it replaces."""
    old = _parts(report.read_text(encoding="utf-8"), name) if report.exists() else None
    new = _parts(page, name)
    if old is None or new is None:
        return page
    begin, end = _marks(name)
    return f"{new[0]}{begin}{old[1]}{end}{new[2]}"


def _marks(name: str) -> tuple[str, str]:
    return f"<!-- {name}: written by the bench -->", f"<!-- end of {name} -->"


def _parts(page: str, name: str) -> tuple[str, str, str] | None:
    """Return what stands before, between and after the marks, None without them."""
    begin, end = _marks(name)
    before, first, rest = page.partition(begin)
    between, last, after = rest.partition(end)
    return (before, between, after) if first and last else None
