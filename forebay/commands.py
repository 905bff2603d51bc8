"""Entry points of the users' and admins' commands: surroundings in, exit code out."""

import dataclasses
import datetime
import functools
import io
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from accounting import facct as facct_command
from accounting import freport as freport_command
from accounting import settings as accounting_settings
from batch_jobs import commands as batch_commands
from forebay import api, batch_companion
from forebay import config as configs
from forebay import settings as forebay_settings
from scheduler.contracts import clock, command_line, fleet, ports, slurm, times
from scheduler.runtime import commands as admin_commands
from scheduler.runtime import config
from scheduler.runtime import finfo as fleet_commands
from slurm_plugins import doctor, sbatch, select
from slurm_plugins import settings as slurm_settings


class _Late:
    """A gateway that is looked for at the first call: `--help` must work without one."""

    def call(self, method: str, path: str, **options: Any) -> ports.ApiResponse:
        """Find the gateway and pass the call on."""
        return api.connect().call(method, path, **options)


def fbatch() -> int:
    """Submit a batch job."""
    companion = functools.partial(batch_companion.submit, env=os.environ)
    return batch_commands.fbatch(sys.argv[1:], companion=companion, **_batch())


def fqueue() -> int:
    """List batch jobs."""
    return batch_commands.fqueue(sys.argv[1:], **_batch())


def fcancel() -> int:
    """Cancel batch jobs."""
    return batch_commands.fcancel(sys.argv[1:], **_batch())


def facct() -> int:
    """Show what requests, jobs and leases used."""
    return facct_command.facct(sys.argv[1:], **_books())


def freport() -> int:
    """Report usage by cluster, team, user and model."""
    return freport_command.freport(sys.argv[1:], **_books())


def finfo() -> int:
    """Show tiers, replicas, seats and GPUs."""
    return fleet_commands.finfo(sys.argv[1:], api=_Late(), out=sys.stdout, err=sys.stderr)


def fctl() -> int:
    """Administer Forebay."""
    return admin_commands.fctl(
        sys.argv[1:],
        api=_Late(),
        out=sys.stdout,
        err=sys.stderr,
        here=admin_commands.Here(examine, rebuild, render, look),
    )


def examine(out: TextIO, as_json: bool = False) -> int:
    """Read the site's Slurm configuration and say what would slow reclaiming (`fctl doctor`)."""
    try:
        loaded = configs.load(configs.find(""))
    except config.ConfigError as error:
        raise command_line.CommandError("; ".join(error.faults)) from error
    table = loaded.table(slurm_settings.SlurmSettings)
    state = loaded.table(forebay_settings.ForebaySettings).state_dir
    try:
        choice = select.connect(table, state)
    except slurm.SlurmError as error:
        raise command_line.CommandError(f"Slurm: {error}") from error
    embedded = choice.port.kind == "embedded"
    findings: tuple[doctor.Finding, ...] = ()
    if not embedded:
        findings = doctor.collect(
            choice.port, serve=table.serve_partitions, backfill=table.backfill_partitions
        )
    # Where the site's own was looked for and not found, that is a fault.
    code = int(table.client != "embedded") if embedded else int(doctor.failed(findings))
    if as_json:
        told = [
            {**dataclasses.asdict(one), "severity": one.severity.name.lower()} for one in findings
        ]
        answer = {"client": choice.reason, "examined": not embedded, "findings": told}
        command_line.print_json(answer, out)
        return code
    print(f"Slurm by {choice.reason}", file=out)
    if embedded:
        print("the embedded Slurm has no configuration that could be examined", file=out)
    else:
        doctor.report(findings, out)
    return code


def render(asked: fleet.Lease, units: int) -> str:
    """Return the text of the job that the broker here would submit for a lease (`fctl lease --render`).

    Args:
        asked: what is said of the lease; ``hardware`` is one replica's.
        units: of it, one replica's.
    """
    from engines import container
    from forebay import installation, lease
    from scheduler.runtime import lease_commands
    from scheduler.runtime import settings as scheduler_settings

    try:
        loaded = configs.load(configs.find(""))
    except config.ConfigError as error:
        raise command_line.CommandError("; ".join(error.faults)) from error
    state = loaded.table(forebay_settings.ForebaySettings).state_dir.absolute()
    here = installation.Installation(loaded, state)
    try:
        port = here.connect_slurm()
    except slurm.SlurmError as error:
        raise command_line.CommandError(f"Slurm: {error}") from error
    options = loaded.table(scheduler_settings.Settings)
    named = dataclasses.replace(asked, cluster=port.cluster)
    planned = lease_commands.planned(named, units, options)
    renderer = lease.Renderer(here, port)
    try:
        return sbatch.job_text(renderer.job(planned)) + renderer.engine(planned)
    except container.ContainerError as error:
        raise command_line.CommandError(str(error)) from error


def look(place: str, *, manifest: bool, write: bool) -> Mapping[str, Any]:
    """Look at a place of weights from this host (`fctl weights check|manifest`)."""
    from engines import settings as engine_settings
    from forebay import inspecting

    try:
        loaded = configs.load(configs.find(""))
    except config.ConfigError as error:
        raise command_line.CommandError("; ".join(error.faults)) from error
    options = loaded.table(engine_settings.EnginesSettings)
    return inspecting.look(place, options, manifest=manifest, write=write)


def rebuild(out: TextIO, as_json: bool = False) -> int:
    """Make the rollups again from the Parquet files of this host (`fctl rebuild`)."""
    from accounting import books, manifest, rolling

    try:
        loaded = configs.load(configs.find(""))
    except config.ConfigError as error:
        raise command_line.CommandError("; ".join(error.faults)) from error
    table = loaded.table(accounting_settings.Accounting)
    state = loaded.table(forebay_settings.ForebaySettings).state_dir.absolute()
    if not (state / "parquet").is_dir():
        raise command_line.CommandError(
            f"{state}/parquet is not there: run fctl rebuild on the accounting host"
        )
    try:
        done = rolling.rebuild(
            books.Books(state, memory_mb=table.memory_mb),
            clock.SystemClock(),
            minutes_kept_s=table.minutes_kept_h * 3600,
        )
    except (manifest.ManifestDamaged, OSError) as error:
        raise command_line.CommandError(str(error)) from error
    if as_json:
        command_line.print_json({"days": done.days, "problems": list(done.problems)}, out)
        return int(bool(done.problems))
    for problem in done.problems:
        print(problem, file=out)
    print(f"{done.days} days summed anew", file=out)
    return int(bool(done.problems))


def _batch() -> dict[str, Any]:
    return {
        "api": _Late(),
        "out": sys.stdout,
        "err": sys.stderr,
        "env": os.environ,
        "cwd": Path.cwd(),
        "stdin": sys.stdin,
    }


def _books() -> dict[str, Any]:
    for stream in (
        sys.stdout,
        sys.stderr,
    ):  # a name that the terminal can't show must not end a report
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    return {
        "api": _Late(),
        "out": sys.stdout,
        "err": sys.stderr,
        "env": os.environ,
        "now": datetime.datetime.now(datetime.UTC),
        "tz": times.local_zone(os.environ),
    }
