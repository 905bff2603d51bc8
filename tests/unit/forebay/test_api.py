"""The commands' HTTP client: one line for each way in which a gateway can fail to answer."""

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay import api
from scheduler.contracts import command_line


class _Handler(http.server.BaseHTTPRequestHandler):
    """Echoes what came; answers by path."""

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def _answer(self) -> None:
        size = self.headers.get("Content-Length")
        body = self.rfile.read(int(size)) if size else self._chunks()
        if self.path.startswith("/refused"):
            return self._send(404, {"error": {"message": "job 7: no such job; fqueue lists them"}})
        if self.path.startswith("/nowhere"):
            return self._send(404, {"detail": "Not Found"})
        if self.path.startswith("/page"):
            return self._send(200, b"<html>log in</html>")
        if self.path.startswith("/broken"):
            return self._send(502, b"")
        seen = {
            "path": self.path,
            "authorization": self.headers["Authorization"],
            "body": body.decode(),
        }
        return self._send(200, seen)

    def _chunks(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return b""
        whole = b""
        while size := int(self.rfile.readline(), 16):
            whole += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return whole

    def _send(self, status: int, value: object) -> None:
        data = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Be quiet."""


@pytest.fixture
def url() -> Iterator[str]:
    """A server that echoes."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_json_parameters_and_the_key_arrive(url: str) -> None:
    client = api.connect({"FOREBAY_URL": url, "FOREBAY_API_KEY": "fbk_a_b"})
    answer = client.call("GET", "/jobs", params={"team": "a b"})
    assert answer.json["path"] == "/jobs?team=a+b"
    assert answer.json["authorization"] == "Bearer fbk_a_b"


def test_files_are_streamed_both_ways(url: str, tmp_path: Path) -> None:
    source, target = tmp_path / "in", tmp_path / "out"
    source.write_text("line\n" * 1000)
    client = api.GatewayApi(url, api.Credential("k"))
    client.call("POST", "/upload", upload=source, download=target)
    assert json.loads(target.read_text())["body"] == source.read_text()


def test_the_gateways_own_words_are_the_error(url: str) -> None:
    client = api.GatewayApi(url, api.Credential("k"))
    with pytest.raises(command_line.CommandError, match=r"^job 7: no such job; fqueue lists them$"):
        client.call("GET", "/refused")
    with pytest.raises(command_line.CommandError, match="gateway answered 502 Bad Gateway"):
        client.call("GET", "/broken")


def test_a_path_that_a_gateway_does_not_have_is_named(url: str) -> None:
    with pytest.raises(command_line.CommandError, match="knows nothing at /nowhere/x: is the name"):
        api.GatewayApi(url, api.Credential("k")).call("GET", "/nowhere/x")


def test_an_answer_that_is_no_json_is_told_in_one_line(url: str) -> None:
    """A login page of a proxy; an answer that was cut."""
    with pytest.raises(command_line.Unanswered, match=r"is no gateway, or its answer was cut"):
        api.GatewayApi(url, api.Credential("k")).call("GET", "/page")


def test_e6_a_sites_proxy_is_not_used(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert api.GatewayApi(url, api.Credential("k")).call("GET", "/x").status == 200


def test_no_gateway_says_where_it_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(command_line.CommandError, match="set FOREBAY_URL"):
        api.connect({"FOREBAY_FOREBAY_STATE_DIR": str(tmp_path)})
    client = api.GatewayApi("http://127.0.0.1:9", api.Credential("k"))
    with pytest.raises(command_line.CommandError, match=r"127\.0\.0\.1:9 does not answer"):
        client.call("GET", "/x")


def test_address_and_key_come_from_files(url: str, tmp_path: Path) -> None:
    (tmp_path / "gateway.json").write_text(json.dumps({"http": url, "grpc": "x"}))
    (tmp_path / "key").write_text("fbk_c_d\n")
    env = {
        "FOREBAY_FOREBAY_STATE_DIR": str(tmp_path),
        "FOREBAY_API_KEY_FILE": str(tmp_path / "key"),
    }
    assert api.connect(env).call("GET", "/x").json["authorization"] == "Bearer fbk_c_d"
    env["FOREBAY_API_KEY_FILE"] = str(tmp_path / "missing")
    with pytest.raises(
        command_line.CommandError, match=r"FOREBAY_API_KEY_FILE: .*missing: No such"
    ):
        api.connect(env)


@pytest.mark.parametrize("key", ["fbk_\N{WATER WAVE}", "fbk_a\nb", "fbk_\u00e9"])
def test_a_key_that_no_header_can_carry_is_told_in_one_line(url: str, key: str) -> None:
    with pytest.raises(command_line.CommandError, match="characters that none has"):
        api.connect({"FOREBAY_URL": url, "FOREBAY_API_KEY": key}).call("GET", "/x")


def test_a_key_file_of_any_bytes_is_told_in_one_line(url: str, tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_bytes(b"\x7fELF\xd0\x00")
    with pytest.raises(command_line.CommandError, match="characters that none has"):
        api.connect({"FOREBAY_URL": url, "FOREBAY_API_KEY_FILE": str(file)}).call("GET", "/x")


def test_an_address_that_is_none_is_told_in_one_line() -> None:
    with pytest.raises(command_line.CommandError, match=r"^FOREBAY_URL: frob: give http://"):
        api.connect({"FOREBAY_URL": "frob", "FOREBAY_API_KEY": "fbk_a"})
    with pytest.raises(command_line.CommandError, match=r"^FOREBAY_URL: http://x:port: "):
        api.connect({"FOREBAY_URL": "http://x:port", "FOREBAY_API_KEY": "fbk_a"})


def test_without_a_key_munge_makes_the_credential(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake = tmp_path / "munge"
    fake.write_text(
        '#!/bin/sh\n[ "$2" = "--socket=/good" ] && echo "MUNGE:abc:" && exit 0\nexit 6\n'
    )
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert api.Credential(munge_socket="/good").header() == "Munge MUNGE:abc:"
    with pytest.raises(command_line.Unanswered, match="is munged running"):
        api.Credential(munge_socket="/bad").header()
    fake.write_text("#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr(api, "_MUNGE_S", 0.1)
    with pytest.raises(command_line.Unanswered, match=r"no answer in 0\.1 s"):
        api.Credential().header()
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(command_line.CommandError, match="set FOREBAY_API_KEY"):
        api.Credential().header()
