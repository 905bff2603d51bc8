"""`fctl doctor`: reads a site's Slurm configuration and says what would slow reclaiming, and what to write.

The rules are pure and live in `doctor_rules`; here the site is looked at and the findings are printed.
"""

import datetime
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from scheduler.contracts import slurm
from slurm_plugins.doctor_rules import examine
from slurm_plugins.doctor_survey import Finding, Severity, Survey

__all__ = ["Finding", "Severity", "Survey", "collect", "examine", "failed", "report", "survey"]

_TIMEOUT_S = 20
_AS_OF = re.compile(r"as of (\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)")


def collect(
    port: slurm.SlurmPort,
    *,
    serve: Sequence[str] = ("serve",),
    backfill: Sequence[str] = ("backfill",),
) -> tuple[Finding, ...]:
    """Look at a site and return what should be changed, the worst first.

    Args:
        port: the client that Forebay uses there.
        serve: partitions of protected leases.
        backfill: partitions of preemptible leases.
    """
    try:
        return examine(survey(port, serve=serve, backfill=backfill))
    except slurm.SlurmError as error:
        munge = munge_fault("")
        why = f"munge: {munge}" if munge else "no lease can be asked for or given back"
        return (Finding(Severity.ERROR, f"Slurm: {error}", why, "shell", "scontrol ping"),)


def survey(port: slurm.SlurmPort, *, serve: Sequence[str], backfill: Sequence[str]) -> Survey:
    """Read everything that the rules look at.

    Raises:
        slurm.SlurmError: the controller does not answer.
    """
    config = port.config()
    conf = config.get("SLURM_CONF", "")
    real = port.kind != "embedded"
    munge = None
    if real and config.get("AuthType", "").endswith("munge"):
        munge = munge_fault(config.get("AuthInfo", ""))
    return Survey(
        config=config,
        partitions=port.partitions(),
        nodes=port.nodes(),
        serve=tuple(serve),
        backfill=tuple(backfill),
        clock_skew_s=clock_skew_s(conf) if real else None,
        munge=munge,
        jobs=len(port.jobs()),
    )


def clock_skew_s(conf: str = "") -> float | None:
    """Return the controller's clock minus ours, to about a second; None if it can't be told.

    Args:
        conf: slurm.conf as the controller names it, used where this machine has that file.
    """
    environment = {**os.environ, "TZ": "UTC", "LC_ALL": "C"}
    if conf and Path(conf).is_file():
        environment["SLURM_CONF"] = conf
    before = datetime.datetime.now(datetime.UTC)
    text = _run(["scontrol", "show", "config"], environment)
    after = datetime.datetime.now(datetime.UTC)
    found = _AS_OF.search(text or "")
    if found is None:
        return None
    theirs = datetime.datetime.fromisoformat(found.group(1)).replace(tzinfo=datetime.UTC)
    # Printed in whole seconds, at some moment of the call.
    if before.replace(microsecond=0) <= theirs <= after:
        return 0.0
    return (theirs - before).total_seconds()


def munge_fault(auth_info: str) -> str | None:
    """Return what is wrong with munge on this machine: "" if it works, None if it is not installed.

    Args:
        auth_info: Slurm's AuthInfo, which may name the socket.
    """
    if shutil.which("munge") is None or shutil.which("unmunge") is None:
        return None
    found = re.search(r"socket=([^,\s]+)", auth_info)
    socket = ["-S", found.group(1)] if found else []
    try:
        credential = _checked(["munge", "-n", *socket], "")
        _checked(["unmunge", "-n", *socket], credential)
    except subprocess.CalledProcessError as error:
        said = " ".join(str(error.stderr).split())
        return said or f"{error.cmd[0]} ended with {error.returncode}"
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return ""


def _checked(argv: Sequence[str], text: str) -> str:
    done = subprocess.run(
        argv, input=text, capture_output=True, text=True, check=True, timeout=_TIMEOUT_S
    )
    return done.stdout


def _run(argv: Sequence[str], environment: dict[str, str]) -> str | None:
    """Return what a command printed, None if it could not be run."""
    try:
        done = subprocess.run(
            argv,
            env=environment,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def failed(findings: Sequence[Finding]) -> bool:
    """Return whether one of them is an error."""
    return any(finding.severity is Severity.ERROR for finding in findings)


def report(findings: Sequence[Finding], out: TextIO) -> int:
    """Print findings for a person.

    Returns:
        1 if one of them is an error, else 0.
    """
    for finding in findings:
        print(f"{finding.severity.name}: {finding.what}", file=out)
        print(f"  why:  {finding.why}", file=out)
        print(f"  {finding.where}:  {finding.line}", file=out)
    counts = [
        f"{sum(finding.severity == severity for finding in findings)} {severity.name}"
        for severity in sorted(Severity, reverse=True)
    ]
    print(", ".join(counts) if findings else "nothing to change", file=out)
    return int(failed(findings))
