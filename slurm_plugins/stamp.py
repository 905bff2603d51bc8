"""The stamp in a job's comment by which a broker knows its leases again; `job_submit.lua` checks it.

One line of ``key=value`` words after a marker that carries the form's version. Values are
percent-encoded, so that no team's name can add a word of its own.
"""

import urllib.parse

from scheduler.contracts import ids, slurm

MARKER = "forebay/1"
KINDS = frozenset({"serve", "backfill"})
_KEYS = ("cluster", "lease", "kind", "team")


def render(stamp: slurm.Stamp) -> str:
    """Return the comment for a lease's job: ``forebay/1 cluster=… lease=… kind=… team=…``."""
    if stamp.kind not in KINDS:
        raise ValueError(f"stamp: kind is {stamp.kind!r}; it must be serve or backfill")
    values = (stamp.cluster, stamp.lease_id, stamp.kind, stamp.team)
    if not all(values):
        raise ValueError("stamp: cluster, lease and team must not be empty")
    words = (
        f"{key}={urllib.parse.quote(value, safe='')}"
        for key, value in zip(_KEYS, values, strict=True)
    )
    return " ".join((MARKER, *words))


def parse(comment: str) -> slurm.Stamp | None:
    """Return the stamp that a comment holds, or None if it holds none that is whole.

    Words that are not known are left aside (a later version may add some); a key given twice, an
    unknown kind or a missing value makes it no stamp at all.
    """
    words = comment.split()
    if not words or words[0] != MARKER:
        return None
    found: dict[str, str] = {}
    for word in words[1:]:
        key, equals, value = word.partition("=")
        if not equals or key not in _KEYS:
            continue
        if key in found:
            return None
        found[key] = urllib.parse.unquote(value)
    if any(not found.get(key) for key in _KEYS) or found["kind"] not in KINDS:
        return None
    return slurm.Stamp(
        cluster=found["cluster"],
        lease_id=ids.LeaseId(found["lease"]),
        kind=found["kind"],
        team=found["team"],
    )
