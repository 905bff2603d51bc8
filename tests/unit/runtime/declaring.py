"""fctl as the tests of declared models type it, and a file of models."""

import io
import shlex

from scheduler.runtime import commands
from tests.unit.runtime import adminsite

FILE = """
profiles:
  big: {gres_type: H100, gpus: 4}
models:
  talk:
    tiers: [interactive]
    profile: big
    scaling: {floor: 1}
    versions:
      v1: {engine: simulated, seats: 4}
      v2:
        engine: simulated
        seats: 8
    route:
      versions: {v1: 90, v2: 10}
    adapters:
      law: {path: /adapters/law, rank: 8, team: legal}
"""


def fctl(site: adminsite.Site, line: str, stdin: str = "") -> tuple[int, str]:
    out, err = io.StringIO(), io.StringIO()
    code = commands.fctl(
        shlex.split(line),
        api=adminsite.SiteApi(site),
        out=out,
        err=err,
        stdin=io.StringIO(stdin),
    )
    return code, out.getvalue() + err.getvalue()


def done(site: adminsite.Site, line: str, stdin: str = "") -> str:
    code, told = fctl(site, line, stdin)
    assert code == 0, told
    return told
