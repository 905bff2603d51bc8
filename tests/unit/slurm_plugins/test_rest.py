"""The REST client against servers that are slow, refuse, stop in the middle or say nothing."""

import base64
import hashlib
import hmac
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from scheduler.contracts import clock, ids, slurm
from slurm_plugins import rest, rest_versions, stamp, tokens

STAMP = slurm.Stamp("alpha", ids.LeaseId("l-0123456789ab"), "serve", "physics")
SPEC = slurm.JobSpec(
    name="lease", script="#!/bin/sh\n", partitions=("serve",), time_limit_s=61,
    output="/dev/null", directory="/", stamp=STAMP, gpus_per_node=4, gres_type="H100",
    memory_mb=100, time_min_s=60, environment={"A": "1,2"},
)  # fmt: skip
Handler = Callable[[httpx.Request], httpx.Response]


def _client(handler: Handler, version: str = "0.0.45", **options: Any) -> rest.RestClient:
    return rest.RestClient(
        "http://slurm.invalid",
        user="broker",
        token=lambda: "t0ken",
        cluster="alpha",
        version=version,
        transport=httpx.MockTransport(handler),
        **options,
    )


def _lease(version: str = "0.0.45") -> dict[str, Any]:
    told = {"job_id": 17, "job_state": ["RUNNING"], "nodes": "n1", "user_name": "broker"}
    return {**told, "comment": stamp.render(STAMP)}


def test_the_newest_common_version_is_taken() -> None:
    paths: dict[str, object] = {f"/slurm/v0.0.{n}/jobs/": {} for n in (40, 42, 43, 99)}
    assert rest_versions.newest(paths).version == "0.0.43"
    with pytest.raises(slurm.SlurmRefused, match="client = cli"):
        rest_versions.newest({"/slurm/v0.0.99/jobs/": {}})
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.path)
        return httpx.Response(200, json={"paths": paths, "jobs": []})

    port = _client(answer, version="")
    assert port.jobs() == ()
    assert port.jobs() == ()
    assert asked == ["/openapi/v3", "/slurm/v0.0.43/jobs/", "/slurm/v0.0.43/jobs/"]


@pytest.mark.parametrize("version", list(rest_versions.ADAPTERS))
def test_a_submission_as_each_version_spells_it(version: str) -> None:
    sent: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        sent.append(request)
        return httpx.Response(200, json={"job_id": 4711, "errors": []})

    assert _client(answer, version).submit(SPEC) == slurm.Submitted(ids.SlurmJobId("4711"), "alpha")
    (request,) = sent
    body = json.loads(request.content)
    assert request.headers["X-SLURM-USER-TOKEN"] == "t0ken"
    assert request.url.path == f"/slurm/v{version}/job/submit"
    assert body["script"] == SPEC.script
    job = body["job"]
    assert (job["comment"], job["requeue"]) == (stamp.render(STAMP), False)
    if version == "0.0.38":
        assert (job["gres"], job["time_limit"], job["environment"]["A"]) == ("gpu:H100:4", 2, "1,2")
    else:
        assert job["tres_per_node"] == "gres/gpu:H100:4"
        assert job["time_limit"] == {"set": True, "infinite": False, "number": 2}
        assert "A=1,2" in job["environment"]
    assert "account" not in job


@pytest.mark.parametrize("trouble", ["timeout", "cut", "no id", "reset"])
def test_l1_without_an_answer_the_stamp_is_looked_up(trouble: str) -> None:
    submissions = 0

    def answer(request: httpx.Request) -> httpx.Response:
        nonlocal submissions
        if request.method == "GET":
            return httpx.Response(200, json={"jobs": [_lease()]})
        submissions += 1
        if trouble == "timeout":
            raise httpx.ReadTimeout("slow", request=request)
        if trouble == "reset":
            raise httpx.RemoteProtocolError("reset", request=request)
        text = '{"job_id": 1' if trouble == "cut" else "{}"
        return httpx.Response(200, text=text, headers={"content-type": "application/json"})

    assert _client(answer).submit(SPEC).job_id == "17"
    assert submissions == 1


def test_l1_what_is_not_found_is_uncertain() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            return httpx.Response(200, json={"jobs": []})
        raise httpx.ReadTimeout("slow", request=request)

    with pytest.raises(slurm.SubmitUncertain):
        _client(answer).submit(SPEC)


def _text(status: int, text: str, kind: str = "application/json") -> Handler:
    return lambda request: httpx.Response(status, text=text, headers={"content-type": kind})


def _raise(error: type[httpx.TransportError]) -> Handler:
    def answer(request: httpx.Request) -> httpx.Response:
        raise error("no", request=request)

    return answer


@pytest.mark.parametrize(
    ("handler", "error"),
    [
        (_raise(httpx.ConnectError), slurm.SlurmUnavailable),
        (_raise(httpx.ReadTimeout), slurm.SlurmTimeout),
        (_raise(httpx.RemoteProtocolError), slurm.SlurmUnavailable),
        (_text(200, ""), slurm.SlurmGarbled),
        (_text(200, '{"jobs": [{"job_id": 1'), slurm.SlurmGarbled),
        (_text(200, "[]"), slurm.SlurmGarbled),
        (_text(200, "{}"), slurm.SlurmGarbled),
        (_text(200, '{"jobs": [1]}'), slurm.SlurmGarbled),
        (_text(401, "Authentication failure", "text/plain"), slurm.SlurmRefused),
        (_text(500, '{"errors": [{"error": "Unable to contact slurm controller (connect failure)"}]}'),
         slurm.SlurmUnavailable),
        (_text(500, '{"errors": [{"description": "x", "error": "Access denied"}]}'), slurm.SlurmRefused),
        (_text(404, "Unable to find requested URL", "text/plain"), slurm.SlurmRefused),
    ],
)  # fmt: skip
def test_bad_answers_are_errors_and_never_an_empty_list(
    handler: Handler, error: type[slurm.SlurmError]
) -> None:
    with pytest.raises(error):
        _client(handler).jobs()


def test_l7_no_accounting_is_said_so() -> None:
    handler = _text(404, "Unable to find requested URL endpoint.", "text/plain")
    with pytest.raises(slurm.AccountingOff):
        _client(handler).accounting(ids.SlurmJobId("1"))


def test_l10_foreign_bytes_hide_no_job() -> None:
    raw = json.dumps({"jobs": [{"job_id": 3, "name": "cafX"}, _lease()]}).encode()
    content = raw.replace(b"X", b"\xe9")
    jobs = _client(lambda request: httpx.Response(200, content=content)).jobs()
    assert [job.name for job in jobs] == ["caf\\xe9", ""]
    assert jobs[1].stamp == STAMP


def test_a_job_id_can_not_leave_its_path() -> None:
    sent: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        sent.append(str(request.url))
        return httpx.Response(200, json={})

    with pytest.raises(slurm.SlurmRefused):
        _client(answer).cancel(ids.SlurmJobId("1/../2?x"))
    with pytest.raises(slurm.SlurmRefused):
        _client(answer).cancel(ids.SlurmJobId("1"), signal="TERM&x=1")
    assert sent == []
    _client(answer).cancel(ids.SlurmJobId("1"), signal="SIGTERM")
    assert sent == ["http://slurm.invalid/slurm/v0.0.45/job/1?signal=TERM"]


def test_e6_no_proxy_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    port = rest.RestClient("http://127.0.0.1:1", user="u", token=lambda: "t", version="0.0.45")
    with pytest.raises(slurm.SlurmUnavailable, match=r"127\.0\.0\.1:1"):
        port.jobs()
    port.close()


async def test_tokens_are_signed_and_renewed(tmp_path: Path, fake_clock: clock.FakeClock) -> None:
    key = tmp_path / "jwt.key"
    key.write_bytes(b"secret")
    token = tokens.from_key(key, "broker", fake_clock)
    first = token()
    head, claims, digest = first.split(".")
    signed = hmac.new(b"secret", f"{head}.{claims}".encode(), hashlib.sha256).digest()
    assert base64.urlsafe_b64decode(digest + "=") == signed
    read = json.loads(base64.urlsafe_b64decode(claims + "=" * (-len(claims) % 4)))
    assert read == {"sun": "broker", "iat": 1_700_000_000, "exp": 1_700_000_600}
    assert token() == first
    await fake_clock.advance(541)
    assert token() != first
    key.unlink()
    await fake_clock.advance(600)
    with pytest.raises(slurm.SlurmRefused, match="jwt_key_file"):
        token()


def test_a_token_file_is_read_anew(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("one\n")
    token = tokens.from_file(file)
    assert token() == "one"
    file.write_text("two\n")
    assert token() == "two"
