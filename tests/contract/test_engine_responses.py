"""`/v1/responses` of a real vLLM replica: as OpenAI's client reads it, as frames, and in the books.

Runs on each vLLM version that has an environment here. Beside it: every endpoint's ``usage`` tells the
cached tokens, also when there are none.
"""

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from scheduler.contracts import frames
from tests.contract import engine_vllm
from tests.unit.gateway import fleets, harness

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

PATH = "/v1/responses"
ASK: dict[str, Any] = {"model": "chat", "input": "Tell me of a river.", "temperature": 0}


@pytest.fixture(scope="module", params=[engine_vllm.NEWEST, engine_vllm.BEFORE])
def replica(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[engine_vllm.Replica]:
    server = engine_vllm.shared(request, request.param, tmp_path_factory)
    begun = engine_vllm.begin(server, engine_vllm.spec(server.folder))
    yield engine_vllm.listening(server, begun)
    engine_vllm.stop(server, begun)


@contextlib.contextmanager
def client(replica: engine_vllm.Replica) -> Iterator[openai.OpenAI]:
    with (
        openai.DefaultHttpxClient(trust_env=False, verify=False, timeout=60) as http,
        openai.OpenAI(
            base_url=f"{replica.url}/v1",
            api_key=engine_vllm.SECRET,
            http_client=http,
            max_retries=0,
        ) as found,
    ):
        yield found


def data(found: list[frames.Frame]) -> list[frames.Frame]:
    return [frame for frame in found if frame.kind is frames.Kind.DATA]


def end(found: list[frames.Frame]) -> frames.End:
    assert found[-1].kind is frames.Kind.END, found[-1]
    return frames.End.parse(found[-1].payload)


def test_openais_client_reads_it_whole_and_streamed(replica: engine_vllm.Replica) -> None:
    with client(replica) as api:
        whole = api.responses.create(max_output_tokens=12, **ASK)
        parts: list[Any] = list(api.responses.create(max_output_tokens=12, stream=True, **ASK))

    assert whole.id.startswith("resp_")
    assert whole.usage is not None
    assert whole.usage.output_tokens == 12
    assert parts[0].type == "response.created"
    assert parts[-1].type == "response.completed"
    assert parts[0].response.id == parts[-1].response.id != whole.id
    said = "".join(part.delta for part in parts if part.type == "response.output_text.delta")
    assert said == whole.output_text == parts[-1].response.output_text != ""


async def test_through_a_gateway(
    replica: engine_vllm.Replica, tmp_path_factory: pytest.TempPathFactory
) -> None:
    secret = tmp_path_factory.mktemp("gateway") / "secret"
    secret.write_text(engine_vllm.SECRET)
    behind = fleets.make_replica("r1", address=replica.address, secret_file=str(secret))
    async with (
        harness.gateway(fleets.make_view([behind])) as served,
        openai.DefaultAsyncHttpxClient(trust_env=False, verify=False, timeout=60) as http,
        openai.AsyncOpenAI(
            base_url=f"{served.http}/v1", api_key="ann", http_client=http, max_retries=0
        ) as api,
    ):
        whole = await api.responses.create(max_output_tokens=12, store=True, **ASK)
        stream: Any = await api.responses.create(max_output_tokens=12, stream=True, **ASK)
        parts = [part async for part in stream]
        first, second = served.closed()

    said = "".join(part.delta for part in parts if part.type == "response.output_text.delta")
    assert said == whole.output_text != ""
    last = parts[-1].response
    assert last.usage is not None
    assert (whole.id, last.id) == tuple(f"resp_{r.identity.request_id}" for r in (first, second))
    assert (second.outcome, second.output_tokens) == ("ok", last.usage.output_tokens)
    assert second.cached_prompt_tokens == last.usage.input_tokens_details.cached_tokens
    prompt = second.uncached_prompt_tokens + second.cached_prompt_tokens
    assert prompt == last.usage.input_tokens


@pytest.mark.parametrize("stream", [True, False])
def test_frames_hold_every_token_and_the_end_apart(
    replica: engine_vllm.Replica, stream: bool
) -> None:
    body = {**ASK, "max_output_tokens": 16, "stream": stream}
    found, who = engine_vllm.ask(replica, PATH, body)

    assert found[0].kind is frames.Kind.PROMPT
    assert found[0].payload, "it can't be resumed, and says so"
    assert sum(len(frame.token_ids) for frame in found[1:]) == 16
    first, last = data(found)[0], data(found)[-1]
    assert first.token_ids, "the events before the text go out with the first token"
    if stream:
        assert last.payload.startswith(b"event: response.completed\n")
        assert last.payload.count(b"event:") == 1
        answer = json.loads(last.payload.partition(b"data: ")[2])["response"]
    else:
        answer = json.loads(last.payload)
    assert answer["id"] == f"resp_{who.request_id}"
    assert answer["status"] == "incomplete"
    prompt = len(found[0].token_ids)
    assert end(found) == frames.End(("length",), prompt, end(found).cached_tokens, 16)
    assert (answer["usage"]["input_tokens"], answer["usage"]["output_tokens"]) == (prompt, 16)
    row = replica.row(who.request_id)
    assert (row["outcome"], row["output_tokens"]) == ("ok", 16)
    assert row["uncached_prompt_tokens"] + row["cached_prompt_tokens"] == prompt


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_the_seat(replica: engine_vllm.Replica, stream: bool) -> None:
    who = engine_vllm.identity(replica, PATH)
    body = {**ASK, "max_output_tokens": 1900, "ignore_eos": True, "stream": stream}
    with replica.client() as http:
        call = http.stream("POST", PATH, json=body, headers=engine_vllm.headers(who))
        with contextlib.suppress(httpx.ReadTimeout), call as answer:
            next(answer.iter_raw())
    replica.until(lambda state: state["running"] == 0)
    row = replica.row(who.request_id)
    assert row["outcome"] == "client_gone"
    assert 0 < row["output_tokens"] < 1900


def test_what_vllm_refuses_costs_nothing(replica: engine_vllm.Replica) -> None:
    who = engine_vllm.identity(replica, PATH)
    body = {**ASK, "temperature": -3}
    with replica.client() as http:
        answer = http.post(PATH, json=body, headers=engine_vllm.headers(who))
    assert answer.status_code == 400
    assert replica.row(who.request_id)["outcome"] == "refused"


def test_what_vllm_refuses_in_a_begun_stream_is_no_loss_of_the_replica(
    replica: engine_vllm.Replica,
) -> None:
    """It has sent a status by then, and its web framework raises."""
    found, who = engine_vllm.ask(replica, PATH, {**ASK, "background": None, "stream": True})
    error = frames.Error.parse(found[-1].payload)
    assert (error.code, error.status, data(found)) == ("bad_request", 400, [])
    assert "background" in error.message
    row = replica.row(who.request_id)
    assert (row["outcome"], row["output_tokens"]) == ("error", 0)


def test_what_fails_in_the_engine_before_a_token_has_said_nothing(
    replica: engine_vllm.Replica,
) -> None:
    """A grammar without an end is found out when the sequence is scheduled."""
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#"}}}
    body = {"model": "chat", "messages": [{"role": "user", "content": "x"}], "stream": True}
    found, _ = engine_vllm.ask(replica, "/v1/chat/completions", {**body, "response_format": schema})
    assert (found[-1].kind, data(found)) == (frames.Kind.ERROR, [])


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", PATH])
def test_cached_tokens_are_told_from_the_first_request_on(
    replica: engine_vllm.Replica, path: str, stream: bool
) -> None:
    text = f"{path} {stream} " + "a keeper of the light by the sea " * 20
    what: dict[str, Any] = {"input": text} if path == PATH else {"prompt": text}
    if path == "/v1/chat/completions":
        what = {"messages": [{"role": "user", "content": text}]}
    what["max_output_tokens" if path == PATH else "max_tokens"] = 3
    if stream:
        what["stream"] = True
        if path != PATH:
            what["stream_options"] = {"include_usage": True}
    told = []
    for _ in range(2):
        found, _ = engine_vllm.ask(replica, path, {"model": "chat", "temperature": 0, **what})
        payload = b"".join(frame.payload for frame in data(found))
        lines = [line for line in payload.splitlines() if line.startswith(b"data: {")]
        answer = json.loads(lines[-1].removeprefix(b"data: ") if stream else payload)
        used = answer.get("response", answer)["usage"]
        details = used.get("prompt_tokens_details") or used.get("input_tokens_details")
        assert details["cached_tokens"] == end(found).cached_tokens
        told.append(details["cached_tokens"])
    assert told[0] == 0
    assert told[1] > 0
