"""Bad bodies, names, tiers and credentials: the documented error, small, and nothing computed (case G7)."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import fastapi
import httpx
import pytest

from gateway import checks, settings
from scheduler.contracts import errors, ports, requests
from tests.unit.gateway import fleets, harness

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


async def post(
    served: harness.Served, path: str = CHAT, *, key: str = "ann", **request: Any
) -> httpx.Response:
    async with httpx.AsyncClient(
        base_url=served.http, trust_env=False, verify=False, timeout=20
    ) as session:
        headers = {"Authorization": f"Bearer {key}", **request.pop("headers", {})}
        return await session.post(path, headers=headers, **request)


FAULTS: list[tuple[str, dict[str, Any], int, str, str | None]] = [
    (CHAT, {"model": "nope"}, 404, "model_not_found", "model"),
    (CHAT, {"model": "chat:nobody"}, 404, "model_not_found", "model"),
    (CHAT, {"model": 5}, 400, "bad_request", "model"),
    (CHAT, {"messages": []}, 400, "bad_request", "messages"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": 5}]},
        400,
        "bad_request",
        "messages[0].content",
    ),
    (CHAT, {"max_tokens": 0}, 400, "bad_request", "max_tokens"),
    (CHAT, {"max_tokens": -5}, 400, "bad_request", "max_tokens"),
    (CHAT, {"max_tokens": True}, 400, "bad_request", "max_tokens"),
    (CHAT, {"max_completion_tokens": 0}, 400, "bad_request", "max_completion_tokens"),
    (CHAT, {"n": 0}, 400, "bad_request", "n"),
    (CHAT, {"n": 9}, 400, "bad_request", None),
    (CHAT, {"temperature": 3}, 400, "bad_request", "temperature"),
    (CHAT, {"stream": "yes"}, 400, "bad_request", "stream"),
    (CHAT, {"stop": [1]}, 400, "bad_request", "stop"),
    (CHAT, {"stream_options": {}}, 400, "bad_request", "stream_options"),
    (CHAT, {"structured_outputs": 7}, 400, "bad_request", "structured_outputs"),
    (CHAT, {"structured_outputs": [{}]}, 400, "bad_request", "structured_outputs"),
    (CHAT, {"response_format": "json"}, 400, "bad_request", "response_format"),
    (CHAT, {"forebay_priority": "urgent"}, 400, "bad_request", "forebay_priority"),
    (CHAT, {"forebay_version": "7"}, 404, "model_not_found", "forebay_version"),
    (CHAT, {"forebay_deadline_ms": 0}, 400, "bad_request", "forebay_deadline_ms"),
    (CHAT, {"forebay_cache_hint": "x" * 999}, 400, "bad_request", "forebay_cache_hint"),
    (CHAT, {"max_token": 5}, 400, "bad_request", "max_token"),
    (CHAT, {"x" * 100_000: 5}, 400, "bad_request", "x" * 64),
    (CHAT, {"priority": -100}, 400, "bad_request", "priority"),
    (CHAT, {"kv_transfer_params": {}}, 400, "bad_request", "kv_transfer_params"),
    (COMPLETIONS, {"prompt": "a", "messages": []}, 400, "bad_request", "messages"),
    (COMPLETIONS, {"prompt": []}, 400, "bad_request", "prompt"),
    (COMPLETIONS, {"prompt": ["a", 1]}, 400, "bad_request", "prompt[1]"),
    (COMPLETIONS, {"prompt": [1, True]}, 400, "bad_request", "prompt[1]"),
    (COMPLETIONS, {"prompt": [1, 2.0]}, 400, "bad_request", "prompt[1]"),
    (COMPLETIONS, {"prompt": [[1], [2, -1]]}, 400, "bad_request", "prompt[1]"),
    (COMPLETIONS, {"prompt": [[1], []]}, 400, "bad_request", "prompt[1]"),
    (COMPLETIONS, {"prompt": [2**32]}, 400, "bad_request", "prompt[0]"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": ""}] * 70_000},
        400,
        "bad_request",
        "messages",
    ),
    (
        COMPLETIONS,
        {"prompt": [1] * 2000, "max_tokens": 49},
        400,
        "context_length_exceeded",
        None,
    ),
]


async def test_faults_are_named() -> None:
    async with harness.one_replica(harness.hello) as (served, fake):
        for path, body, status, code, param in FAULTS:
            base = harness.chat_body() if path == CHAT else {"model": "chat", "max_tokens": 8}
            response = await post(served, path, json={**base, **body})
            error = response.json()["error"]
            got = (response.status_code, error["code"], error["param"])
            assert got == (status, code, param), body
            assert error["type"] == "invalid_request_error"
        assert not fake.received


LONG = "x" * checks.MAX_GRAMMAR
TOOL = {"type": "function", "function": {"name": "f", "description": LONG}}
FITS = {"choice": ["x" * (checks.MAX_GRAMMAR - len('{"choice":[""]}'))]}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"structured_outputs": FITS}, ""),
        ({"structured_outputs": {"regex": LONG}}, "structured_outputs"),
        ({"response_format": {"type": "json_schema", "json_schema": LONG}}, "response_format"),
        ({"tools": [TOOL], "tool_choice": "required"}, "tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tools"),
        ({"tools": [TOOL], "tool_choice": "auto"}, ""),
        ({"tools": [TOOL]}, ""),
    ],
)
async def test_what_an_engine_would_compile_for_long_is_refused(
    body: dict[str, Any], param: str
) -> None:
    """One such request kept vLLM from every other grammar of its replica, for good."""
    async with harness.one_replica(harness.hello) as (served, fake):
        response = await post(served, json=harness.chat_body(**body))
    if param:
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)
        assert len(response.content) < 1024
    else:
        assert response.status_code == 200
    assert bool(fake.received) is not bool(param)


NOT_JSON = [
    (b'{"model": "chat", "x": "\xff"}', "byte 24 is not UTF-8"),
    (b'{"model": ', "not JSON"),
    (b"[1]", "must be a JSON object, not a list"),
    (b"", "not JSON"),
    (b"[" * 200_000, "nested too deeply"),
    (b'{"a": NaN}', "not finite"),
    (b'{"a": ' + b"1" * 5000 + b"}", "out of range"),
    ("{}".encode("utf-16"), "not UTF-8"),
    (b'{"model": "chat", "x": ["\\ud800"]}', "half a surrogate pair"),
    (b'{"model": "chat", "\\uDC00\\ud83d": 1}', "half a surrogate pair"),
]


async def test_bodies_that_are_not_json() -> None:
    async with harness.one_replica(harness.hello) as (served, fake):
        for raw, says in NOT_JSON:
            response = await post(served, content=raw, headers={"Content-Type": "application/json"})
            assert response.status_code == 400
            assert says in response.json()["error"]["message"]
        assert not fake.received


async def test_surrogate_pairs_are_text() -> None:
    async with harness.one_replica(harness.hello) as (served, fake):
        messages = [{"role": "user", "content": "\N{WATER WAVE} \\ud800"}]
        raw = json.dumps(harness.chat_body(messages=messages)).encode()
        assert b"\\ud83c\\udf0a" in raw
        assert (await post(served, content=raw)).status_code == 200
        assert fake.received[0].body["messages"] == messages


FORMS = [
    ("body.stop", "'Input should be a valid string'"),
    ("body.stop.list[str]", "\"Lists should have at most '4'\""),
]
PARAMS = [("body.messages.0.ChatSystemParam.content", "'Field required'"), ("body.top_k", "'No'")]


@pytest.mark.parametrize(
    ("faults", "param", "words"),
    [
        (FORMS, "stop", "Input should be a valid string; or Lists should have at most '4'"),
        (PARAMS, "messages.0.content", "Field required"),
    ],
)
async def test_of_an_engines_list_of_faults_the_first_is_named(
    faults: list[tuple[str, str]], param: str, words: str
) -> None:
    """vLLM tells each fault for each form that the field may have, and what was sent."""
    each = [
        f"{{'type': 'a', 'loc': '{loc}', 'msg': {msg}, 'input': 'secret'}}" for loc, msg in faults
    ]

    async def refuses(received: harness.Received, out: harness.Out) -> None:
        message = f"2 validation errors: {' '.join(each)}"
        await out.json(400, {"error": {"message": message, "param": faults[0][0], "code": 400}})

    async with harness.one_replica(refuses) as (served, _):
        response = await post(served, json=harness.chat_body())
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert error["message"] == f"{param}: {words}"


async def test_an_engines_reason_is_told_though_it_repeats_what_was_sent() -> None:
    """A body of an error is kept up to a bound: what was cut off is no JSON any more."""

    async def refuses(received: harness.Received, out: harness.Out) -> None:
        message = 'bad_words has an "empty"\n string: ' + "w, " * 100_000
        await out.json(400, {"error": {"message": message, "code": 400}})

    async with harness.one_replica(refuses) as (served, _):
        response = await post(served, json=harness.chat_body())
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith('bad_words has an "empty" string: w, w')
    assert len(response.content) < 4096


async def test_a_surprise_has_openais_shape() -> None:
    router = fastapi.APIRouter()

    @router.get("/broken")
    async def broken() -> None:
        raise OverflowError("Python int too large")

    async with harness.gateway(fleets.make_view([]), routers=[router]) as served:
        async with httpx.AsyncClient(
            base_url=served.http, trust_env=False, verify=False
        ) as session:
            answer = await session.get("/broken", headers=harness.ANN_AUTH)
        assert answer.status_code == 500
        assert answer.json()["error"]["code"] == "internal"
        assert "too large" not in answer.text


async def test_body_limit_g7() -> None:
    """Case G7: exactly the limit passes; one more, much more, and chunked without length are 413."""
    async with harness.one_replica(harness.hello, body_limit=4096) as (served, fake):

        def sized(size: int) -> bytes:
            empty = len(json.dumps(harness.chat_body(user="")))
            return json.dumps(harness.chat_body(user="x" * (size - empty))).encode()

        async def chunks(body: bytes) -> AsyncIterator[bytes]:
            for at in range(0, len(body), 1000):
                yield body[at : at + 1000]

        assert len(sized(4096)) == 4096
        assert (await post(served, content=sized(4096))).status_code == 200
        assert (await post(served, content=chunks(sized(4096)))).status_code == 200
        for bad in (sized(4097), chunks(sized(4097)), chunks(sized(40_000))):
            response = await post(served, content=bad)
            assert response.status_code == 413
            assert response.json()["error"]["code"] == "body_too_large"
        assert len(fake.received) == 2


async def test_declared_50_mb_is_refused_before_it_is_read_g7() -> None:
    async with harness.one_replica(harness.hello) as (served, _):
        host, port = served.http.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer ann\r\n"
        writer.write(f"{head}content-length: 50000000\r\n\r\n".encode())
        answer = await asyncio.wait_for(reader.readuntil(b"\r\n"), 10)  # not a byte of it was sent
        assert b"413" in answer
        writer.close()
        await writer.wait_closed()
        response = await post(served, content=b" " * 50_000_000)
        assert response.status_code == 413


async def test_error_names_the_first_of_5000_faults_and_stays_small_g7() -> None:
    async with harness.one_replica(harness.hello) as (served, _):
        messages: list[Any] = [{"role": "user", "content": "fine"}, *[["secret text"]] * 5000]
        response = await post(served, json=harness.chat_body(messages=messages))
        assert response.status_code == 400
        assert len(response.content) < 8192
        assert "messages[1]" in response.json()["error"]["message"]
        assert "secret" not in response.text
        name = await post(served, json=harness.chat_body(model="m" * 100_000))
        assert name.status_code == 404
        assert len(name.content) < 8192


async def test_tiers_and_models_are_the_credentials() -> None:
    async with harness.one_replica(harness.hello) as (served, _):
        refused = await post(served, key="bob", json=harness.chat_body(forebay_priority="batch"))
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "forbidden")
        assert (await post(served, key="bob", json=harness.chat_body())).status_code == 200
        assert served.closed()[-1].identity.tier == "standard"  # the key's first tier


async def test_wrong_or_missing_key_is_401_everywhere_but_health() -> None:
    router = fastapi.APIRouter()

    @router.get("/forebay/v1/who")
    async def who(request: fastapi.Request) -> dict[str, str]:
        caller: requests.Caller = request.state.caller
        return {"team": caller.team}

    async with harness.one_replica(harness.hello, routers=[router]) as (served, fake):
        async with httpx.AsyncClient(
            base_url=served.http, trust_env=False, verify=False
        ) as session:
            assert (await session.get("/health")).status_code == 200
            assert (await session.get("/openapi.json")).status_code == 200
            for path in ("/v1/models", "/metrics", "/forebay/v1/who", "/nowhere"):
                response = await session.get(path)
                assert response.status_code == 401
                assert response.headers["www-authenticate"] == "Bearer"
            bad = await session.post(CHAT, json=harness.chat_body(), headers={"Authorization": "x"})
            assert bad.json()["error"]["code"] == "invalid_api_key"
            session.headers.update(harness.ANN_AUTH)
            assert (await session.get("/forebay/v1/who")).json() == {"team": "physics"}
            assert (await session.get("/nowhere")).json()["error"]["code"] == "not_found"
            assert (await session.get(CHAT)).status_code == 405
            assert (await session.get("/v1/models/none")).status_code == 404
        assert not fake.received


class _Expired(ports.StaticKeys):
    """Knows one key, which has expired."""

    async def find(self, token: str) -> requests.Caller:
        raise errors.KeyExpired("API key expired on 2026-11-01: ask for a new one")


async def test_expired_key_is_told_apart_from_a_wrong_one() -> None:
    view = fleets.make_view([])
    async with harness.gateway(view, authenticator=_Expired({})) as served:
        response = await post(served, json=harness.chat_body())
        assert response.status_code == 401
        assert response.json()["error"]["code"] == "api_key_expired"
        assert not served.sink.rows


async def test_uploads_are_streamed_past_the_json_limit() -> None:
    router = fastapi.APIRouter()

    @router.post("/forebay/v1/jobs")
    async def upload(request: fastapi.Request) -> dict[str, int]:
        return {"size": sum([len(part) async for part in request.stream()])}

    async with harness.one_replica(
        harness.hello, routers=[router], body_limit=1024, upload_limit=8192
    ) as (served, _):
        jsonl = {"Content-Type": "application/jsonl"}
        good = await post(served, "/forebay/v1/jobs", content=b"x" * 8192, headers=jsonl)
        assert good.json() == {"size": 8192}
        bad = await post(served, "/forebay/v1/jobs", content=b"x" * 8193, headers=jsonl)
        assert bad.status_code == 413

        async def chunks() -> AsyncIterator[bytes]:
            for _ in range(10):
                yield b"x" * 1000

        bad = await post(served, "/forebay/v1/jobs", content=chunks(), headers=jsonl)
        assert bad.status_code == 413
        # Whatever it calls itself, what is read into memory is bounded as JSON is.
        bad = await post(served, "/v1/batches", content=chunks(), headers=jsonl)
        assert bad.status_code == 413


async def test_metrics() -> None:
    async with harness.one_replica(harness.hello) as (served, _):
        await post(served, json=harness.chat_body(stream=True))
        await post(served, json=harness.chat_body(forebay_deadline_ms=1))
        async with httpx.AsyncClient(
            trust_env=False, verify=False, headers=harness.ANN_AUTH
        ) as session:
            text = (await session.get(f"{served.http}/metrics")).text
        labels = 'model="chat",result="ok",tier="interactive"'
        assert f"forebay_requests_total{{{labels}}}" in text
        assert 'forebay_time_to_first_token_seconds_count{model="chat",tier="interactive"}' in text
        assert "forebay_requests_open 0.0" in text


def test_checks_accept_what_the_engine_judges() -> None:
    parts = [{"type": "text", "text": "a"}]
    message = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None, "tool_calls": []},
    ]
    checks.check(
        requests.Endpoint.CHAT,
        {
            "model": "m",
            "messages": message,
            "stream": True,
            "stream_options": {},
            "stop": "x",
            "n": 2,
            "seed": -1,
            "temperature": 0,
            "top_p": 1,
            "max_tokens": 1,
            "tools": [{"type": "anything"}],
            "response_format": {"type": "anything"},
            "user": "somebody",
            "metadata": {},
            "of_the_site": 1,
        },
        ("of_the_site",),
    )
    with pytest.raises(errors.BadRequest, match="did you mean 'max_tokens'"):
        checks.check(requests.Endpoint.CHAT, {"model": "m", "messages": message, "max_token": 1})
    for prompt in ("a", ["a", "b"], [1, 2], [[1], [2, 3]]):
        checks.check(requests.Endpoint.COMPLETIONS, {"model": "m", "prompt": prompt})
    with pytest.raises(errors.BadRequest, match="of one kind"):
        checks.check(requests.Endpoint.COMPLETIONS, {"model": "m", "prompt": [[1], []]})


def test_settings_have_a_deadline_and_a_bound_for_every_tier() -> None:
    table = settings.GatewaySettings()
    assert set(table.queue_bounds()) == set(requests.Tier)
    assert [table.deadline_s(tier) for tier in requests.Tier] == [60, 300, 3600]
