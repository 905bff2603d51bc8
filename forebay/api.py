"""The commands' HTTP client: where the gateway is, who asks, and one-line errors.

The gateway's address comes from ``FOREBAY_URL``, else from ``gateway.json`` in the state folder. The
credential is ``FOREBAY_API_KEY``, else the file that ``FOREBAY_API_KEY_FILE`` names, else MUNGE: on a
login node the caller's Unix user is enough, and there is no key to keep.
"""

import contextlib
import json as jsonlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx

from scheduler.contracts import command_line, ports

_CHUNK = 1 << 20
_TIMEOUT = httpx.Timeout(60.0, connect=5.0)
_MUNGE_S = 10.0


class GatewayApi:
    """Implements `scheduler.contracts.ports.Api` over one gateway.

    Args:
        url: base URL of the gateway.
        authorization: makes the Authorization header's value, anew for each call.
    """

    def __init__(self, url: str, authorization: "Credential") -> None:
        self.url = url.rstrip("/")
        try:
            parsed = httpx.URL(self.url)
        except httpx.InvalidURL as error:
            raise command_line.CommandError(f"FOREBAY_URL: {url}: {error}") from error
        if parsed.scheme not in {"http", "https"} or not parsed.host:
            raise command_line.CommandError(f"FOREBAY_URL: {url}: give http://HOST:PORT")
        self._authorization = authorization

    def call(
        self,
        method: str,
        path: str,
        *,
        json: Any = None,
        params: Mapping[str, str] | None = None,
        upload: Path | None = None,
        download: Path | None = None,
    ) -> ports.ApiResponse:
        """Send one request; see `scheduler.contracts.ports.Api.call`."""
        content = _chunks(upload) if upload is not None else None
        # trust_env=False: a site's http_proxy is for the outside world, never for our own daemons.
        with httpx.Client(timeout=_TIMEOUT, trust_env=False) as client:
            request = client.build_request(
                method,
                self.url + path,
                params=None if params is None else dict(params),
                json=json,
                content=content,
                headers={"Authorization": self._authorization.header()},
            )
            try:
                response = client.send(request, stream=True)
                with contextlib.closing(response):
                    if download is not None and response.is_success:
                        with download.open("wb") as file:
                            for piece in response.iter_bytes(_CHUNK):
                                file.write(piece)
                        return ports.ApiResponse(response.status_code, None, b"")
                    body = response.read()
            except httpx.TransportError as error:
                reason = str(error) or type(error).__name__
                raise command_line.Unanswered(
                    f"gateway at {self.url} does not answer ({reason}): is it running? "
                    "FOREBAY_URL says where it is"
                ) from error
        if not response.is_success:
            unable = response.status_code >= 500
            kind = command_line.Unanswered if unable else command_line.CommandError
            raise kind(_message(response, body, path))
        try:
            return ports.ApiResponse(response.status_code, jsonlib.loads(body or b"null"), body)
        except ValueError:
            raise command_line.Unanswered(
                f"what answers at {self.url} is no gateway, or its answer was cut: FOREBAY_URL says where "
                "one is"
            ) from None


class Credential:
    """Who asks: an API key, or MUNGE."""

    def __init__(self, key: str = "", munge_socket: str = "") -> None:
        self._key = key
        self._munge_socket = munge_socket

    def header(self) -> str:
        """Return the Authorization header's value; a MUNGE credential is made anew each time.

        Raises:
            command_line.CommandError: there is no key, and MUNGE gives no credential.
        """
        if self._key:
            if not (self._key.isascii() and self._key.isprintable()):
                raise command_line.CommandError(
                    "the API key holds characters that none has: see FOREBAY_API_KEY, FOREBAY_API_KEY_FILE"
                )
            return f"Bearer {self._key}"
        if shutil.which("munge") is None:
            raise command_line.CommandError(
                "no credential: set FOREBAY_API_KEY or FOREBAY_API_KEY_FILE, or install munge"
            )
        argv = ["munge", "--no-input"]
        if self._munge_socket:
            argv.append(f"--socket={self._munge_socket}")
        try:
            done = subprocess.run(
                argv, capture_output=True, text=True, timeout=_MUNGE_S, check=False
            )
        except subprocess.TimeoutExpired:
            done = subprocess.CompletedProcess(argv, 1, "", f"no answer in {_MUNGE_S:g} s")
        if done.returncode != 0:  # nothing was asked: who waits for a job asks again
            raise command_line.Unanswered(
                f"munge gives no credential ({done.stderr.strip()}): is munged running? "
                "FOREBAY_API_KEY is the other way in"
            )
        return f"Munge {done.stdout.strip()}"


def connect(env: Mapping[str, str] | None = None) -> GatewayApi:
    """Make the client from the environment.

    Raises:
        command_line.CommandError: nothing says where the gateway is, or a file can't be read.
    """
    environ = os.environ if env is None else env
    url = environ.get("FOREBAY_URL", "")
    if not url:
        state = Path(environ.get("FOREBAY_FOREBAY_STATE_DIR", "/var/lib/forebay"))
        try:
            url = str(jsonlib.loads((state / "gateway.json").read_text())["http"])
        except (OSError, ValueError, KeyError) as error:
            raise command_line.CommandError(
                "no gateway known: set FOREBAY_URL (forebay up prints it)"
            ) from error
    key = environ.get("FOREBAY_API_KEY", "")
    if not key and (name := environ.get("FOREBAY_API_KEY_FILE", "")):
        try:
            key = Path(name).read_text(encoding="latin-1").strip()
        except OSError as error:
            raise command_line.CommandError(
                f"FOREBAY_API_KEY_FILE: {name}: {error.strerror}"
            ) from error
    return GatewayApi(url, Credential(key, environ.get("FOREBAY_MUNGE_SOCKET", "")))


def _chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(_CHUNK):
            yield piece


def _json(body: bytes) -> Any:
    try:
        return jsonlib.loads(body)
    except ValueError:
        return None


def _message(response: httpx.Response, body: bytes, path: str) -> str:
    parsed = _json(body)
    if isinstance(parsed, dict):
        error = parsed.get("error")
        if isinstance(error, dict) and error.get("message"):
            return str(error["message"])
        if response.status_code == 404 and parsed.get("detail") == "Not Found":
            return f"the gateway knows nothing at {path}: is the name right, and is it of this release?"
        if parsed.get("detail"):
            return str(parsed["detail"])
    return f"gateway answered {response.status_code} {response.reason_phrase}"
