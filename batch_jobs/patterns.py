"""Patterns in the names of output files, as sbatch knows them: %j %A %a %x %u and %%."""

import re

_SPECIFIER = re.compile(r"%(\d*)(.?)")
KNOWN = "jAaxu%"
_WIDEST = 10  # as sbatch: a larger width counts as that


class PatternError(ValueError):
    """A pattern that can't be expanded."""


def check(pattern: str, *, array: bool = False) -> None:
    """Refuse a pattern that `expand` could not fill.

    Raises:
        PatternError: an unknown specifier, or %a outside an array.
    """
    expand(pattern, job_id=1, name="x", user="x", task_id=0 if array else None)


def expand(
    pattern: str,
    *,
    job_id: int,
    name: str,
    user: str,
    task_id: int | None = None,
    array_id: int | None = None,
) -> str:
    """Fill in a pattern.

    Args:
        pattern: the file name; ``%5j`` pads with zeros to five places, ten at most, as sbatch does.
        job_id: for %j.
        array_id: for %A; None: no array, whose own id is the job's.
        name: for %x; a slash in it becomes an underscore, so that it stays one path component.
        user: for %u.
        task_id: for %a, in an array.

    Raises:
        PatternError: an unknown specifier, or %a outside an array.
    """

    def fill(match: re.Match[str]) -> str:
        digits, letter = match.groups()
        width = min(int(digits or 0), _WIDEST)
        if letter == "%" and not digits:
            return "%"
        if letter in {"j", "A"}:
            number = job_id if letter == "j" or array_id is None else array_id
            return str(number).zfill(width)
        if letter == "a":
            if task_id is None:
                raise PatternError(f"%a in {pattern!r} has no meaning without --array: take %j")
            return str(task_id).zfill(width)
        if letter == "x":
            return name.replace("/", "_")
        if letter == "u":
            return user.replace("/", "_")
        raise PatternError(
            f"{match.group()!r} in {pattern!r} is no pattern: use one of %j %A %a %x %u %%"
        )

    return _SPECIFIER.sub(fill, pattern)


def tells_tasks(pattern: str) -> bool:
    """Whether each task of an array gets a file of its own."""
    one, other = (
        expand(pattern, job_id=number, array_id=1, name="x", user="x", task_id=number)
        for number in (1, 2)
    )
    return one != other


def error_beside(output: str) -> str:
    """Return the error file's pattern that goes with ``output``: ``x.jsonl`` → ``x.err.jsonl``."""
    stem, dot, ending = output.rpartition(".")
    return f"{stem}.err.{ending}" if dot and "/" not in ending and stem else f"{output}.err"
