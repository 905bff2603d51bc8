"""Chooses how to reach Slurm, and says why."""

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

from scheduler.contracts import slurm
from slurm_plugins import cli, embedded, pyslurm_client, rest, settings, sreport, tokens


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """The client that was chosen, and why in one line."""

    port: slurm.SlurmPort
    reason: str


def connect(table: settings.SlurmSettings, state_dir: Path) -> Choice:
    """Return a client that answers.

    Args:
        table: ``[slurm]``; with ``client = "auto"`` the first that works of pyslurm, slurmrestd, the
            command line and the embedded Slurm is taken.
        state_dir: where the embedded Slurm keeps its jobs.

    Raises:
        slurm.SlurmError: the client that was asked for by name does not work, and why.
    """
    makers: dict[str, Callable[[], slurm.SlurmPort]] = {
        "pyslurm": lambda: _pyslurm(table),
        "slurmrestd": lambda: _rest(table),
        "cli": lambda: _cli(table),
        "embedded": lambda: _embedded(table, state_dir),
    }
    if table.client != "auto":
        if table.client not in makers:
            raise slurm.SlurmRefused(
                f"[slurm] client is {table.client!r}: give auto, {', '.join(makers)}"
            )
        port = makers[table.client]()
        port.versions()
        return Choice(port, f"{table.client}: as [slurm] client says")
    refused: list[str] = []
    for name in ("pyslurm", "slurmrestd", "cli"):
        try:
            port = makers[name]()
            found = port.versions()
        except slurm.SlurmError as error:
            refused.append(f"no {name} ({error})")
            continue
        if name == "pyslurm" and _release(found.client) != _release(found.controller):
            # Slurm's library and its Python face pass structures by layout: another release can crash.
            refused.append(f"no pyslurm ({found.client} is not for Slurm {found.controller})")
            continue
        return Choice(port, "; ".join([f"{name}: it answers, Slurm {found.controller}", *refused]))
    return Choice(makers["embedded"](), "; ".join(["embedded: no Slurm here", *refused]))


def _release(version: str) -> tuple[str, ...]:
    """Return year and month of a version: what must match between Slurm and pyslurm."""
    return tuple(version.split(".")[:2])


def _conf(table: settings.SlurmSettings) -> Path | None:
    return Path(table.conf) if table.conf else None


def _pyslurm(table: settings.SlurmSettings) -> slurm.SlurmPort:
    lacking = pyslurm_client.available()
    if lacking:
        raise slurm.SlurmUnavailable(lacking)
    return pyslurm_client.PyslurmClient(_conf(table), cluster=table.cluster)


def _rest(table: settings.SlurmSettings) -> slurm.SlurmPort:
    if not table.rest_url:
        raise slurm.SlurmUnavailable("[slurm] rest_url is not set")
    if table.jwt_key_file:
        token = tokens.from_key(Path(table.jwt_key_file), table.rest_user)
    elif table.jwt_token_file:
        token = tokens.from_file(Path(table.jwt_token_file))
    else:
        raise slurm.SlurmRefused("slurmrestd needs [slurm] jwt_key_file or jwt_token_file")
    return rest.RestClient(
        table.rest_url,
        user=table.rest_user,
        token=token,
        cluster=table.cluster,
        timeout_s=table.call_timeout_s,
    )


def _cli(table: settings.SlurmSettings) -> slurm.SlurmPort:
    if shutil.which("sbatch") is None:
        raise slurm.SlurmUnavailable("sbatch is not on PATH")
    return cli.CliClient(_conf(table), cluster=table.cluster, timeout_s=table.call_timeout_s)


def account_books(table: settings.SlurmSettings) -> slurm.AccountBooks | None:
    """Return the way to sreport; None where Slurm's client is not installed or not used."""
    if table.client == "embedded" or shutil.which("sreport") is None:
        return None
    return sreport.AccountBooks(_conf(table), cluster=table.cluster, timeout_s=table.call_timeout_s)


def _embedded(table: settings.SlurmSettings, state_dir: Path) -> slurm.SlurmPort:
    shape = embedded.Shape(
        nodes=table.embedded_nodes,
        gpus=table.embedded_gpus,
        cpus=table.embedded_cpus,
        partitions=tuple(dict.fromkeys([*table.serve_partitions, *table.backfill_partitions])),
        gres_type=table.gres_type,
    )
    return embedded.EmbeddedClient(
        state_dir / "slurm",
        cluster=table.cluster or "embedded",
        shape=shape,
        kill_wait_s=table.embedded_kill_wait_s,
    )
