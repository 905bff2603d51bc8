"""How a site's nodes get the software that a lease needs: modules, Spack, a venv, proxies. Pure.

Renders lines of shell for a lease's batch script; each that fails says which and ends the job, since an
agent in half an environment would fail later and less plainly.
"""

import dataclasses
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence

_INITS = (
    "/etc/profile.d/lmod.sh",
    "/etc/profile.d/modules.sh",
    '"${MODULESHOME:-/usr/share/modules}/init/bash"',
)
EXIT = 78  # EX_CONFIG of sysexits.h
_MODULE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+/@:-]*")
_SPEC = re.compile(r"/?[A-Za-z0-9][A-Za-z0-9._+/@:%=~^ -]*")
_PROXY = re.compile(r"(https?|socks5h?)://[^\s/@]+(:\d+)?/?")


class LaunchError(ValueError):
    """A template that can't be rendered; one line: which setting, and what to write."""


@dataclasses.dataclass(frozen=True, slots=True)
class Template:
    """A site's way; see the settings of the same names."""

    modules: Sequence[str] = ()
    spack_root: str = ""
    spack: Sequence[str] = ()
    venv: str = ""
    prolog: Sequence[str] = ()
    proxy: str = ""
    no_proxy: str = ""


def lines(template: Template) -> list[str]:
    """Return the lines that stand before the agent in a lease's script.

    Raises:
        LaunchError: a value that would be read as more than it is.
    """
    return [
        *_modules(template.modules),
        *_spack(template.spack_root, template.spack),
        *_venv(template.venv),
        *_prolog(template.prolog),
    ]


def environment(template: Template) -> Mapping[str, str]:
    """Return the variables by which programs find the site's proxy; both spellings, as programs differ.

    Raises:
        LaunchError: the proxy is no URL, or holds a password, which would stand in the job's script.
    """
    if not template.proxy:
        return {}
    if not _PROXY.fullmatch(template.proxy):
        raise LaunchError(
            "[slurm] proxy: write http://host:port, without a user or password: a job's script "
            "is no place for one"
        )
    # Forebay's own links stay inside: broker, agents, gateways and replicas never go through a proxy.
    without = ",".join(filter(None, ["localhost,127.0.0.1,::1", template.no_proxy]))
    both = {"http_proxy": template.proxy, "https_proxy": template.proxy, "no_proxy": without}
    return both | {name.upper(): value for name, value in both.items()}


def _or_end(command: str, what: str) -> str:
    told = shlex.quote(f"forebay: {what}")
    return f"{command} || {{ echo {told} >&2; exit {EXIT}; }}"


def _modules(names: Sequence[str]) -> Iterator[str]:
    if not names:
        return
    # Lmod and Environment Modules define `module` at login, which a batch job's shell is not.
    yield "if ! command -v module >/dev/null; then"
    yield f"  for init in {' '.join(_INITS)}; do"
    yield '    if [ -r "$init" ]; then . "$init"; break; fi'
    yield "  done"
    yield "fi"
    for name in names:
        if not _MODULE.fullmatch(name):
            raise LaunchError(f"[slurm] modules: {name!r} is no module's name")
        yield _or_end(
            f"module load {shlex.quote(name)}", f"module {name} can not be loaded; see module avail"
        )


def _spack(root: str, specs: Sequence[str]) -> Iterator[str]:
    if not specs:
        return
    if not root.startswith("/"):
        raise LaunchError("[slurm] spack_root: write the absolute folder of the site's Spack")
    setup = f"{root.rstrip('/')}/share/spack/setup-env.sh"
    yield _or_end(f". {shlex.quote(setup)}", f"Spack is not in {root}")
    for spec in specs:
        if not _SPEC.fullmatch(spec):
            raise LaunchError(f"[slurm] spack: {spec!r} is no spec of Spack's")
        yield _or_end(f"spack load {shlex.quote(spec)}", f"Spack has not installed {spec}")


def _venv(folder: str) -> Iterator[str]:
    if not folder:
        return
    if not folder.startswith("/"):
        raise LaunchError("[slurm] venv: write an absolute folder that the nodes see")
    activate = f"{folder.rstrip('/')}/bin/activate"
    yield _or_end(f". {shlex.quote(activate)}", f"there is no virtual environment in {folder}")


def _prolog(given: Sequence[str]) -> Iterator[str]:
    for line in given:
        if "\n" in line:
            raise LaunchError(
                f"[slurm] script_prolog: {line!r} holds a line break; give a line each"
            )
        yield line
