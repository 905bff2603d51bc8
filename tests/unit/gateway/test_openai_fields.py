"""The table of known fields beside the installed client's own types: a newer client shows here first."""

import typing

import pytest
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params

from gateway import checks, fields
from scheduler.contracts import errors, requests

SENT: dict[requests.Endpoint, type] = {
    requests.Endpoint.CHAT: chat_params.CompletionCreateParamsStreaming,
    requests.Endpoint.COMPLETIONS: completion_create_params.CompletionCreateParamsStreaming,
    requests.Endpoint.EMBEDDINGS: embedding_create_params.EmbeddingCreateParams,
    requests.Endpoint.RESPONSES: response_create_params.ResponseCreateParamsStreaming,
}


@pytest.mark.parametrize("endpoint", SENT)
def test_every_field_of_the_installed_client_is_known(endpoint: requests.Endpoint) -> None:
    names = typing.get_type_hints(SENT[endpoint]).keys()
    assert len(names) > 3
    assert not names - fields.KNOWN[endpoint]


@pytest.mark.parametrize(
    ("endpoint", "name"),
    [
        (requests.Endpoint.CHAT, "moderation"),
        (requests.Endpoint.RESPONSES, "moderation"),
        (requests.Endpoint.RESPONSES, "access_programs"),
        (requests.Endpoint.RESPONSES, "background_options"),
        (requests.Endpoint.RESPONSES, "image"),
    ],
)
def test_what_no_engine_here_can_do_is_refused_by_name(
    endpoint: requests.Endpoint, name: str
) -> None:
    body = {"model": "chat", "messages": [{"role": "user", "content": "hi"}]}
    if endpoint is requests.Endpoint.RESPONSES:
        body = {"model": "chat", "input": "hi"}
    checks.check(endpoint, {**body, name: None})
    with pytest.raises(errors.BadRequest, match=f"^{name}: is not offered here") as raised:
        checks.check(endpoint, {**body, name: {"model": "omni"}})
    assert raised.value.param == name


def test_how_a_prompt_is_cached_is_a_wish_without_effect() -> None:
    body = {"model": "chat", "messages": [{"role": "user", "content": "hi"}]}
    checks.check(requests.Endpoint.CHAT, {**body, "prompt_cache_options": {"mode": "explicit"}})
    checks.check(
        requests.Endpoint.RESPONSES,
        {
            "model": "chat",
            "input": "hi",
            "verbosity": "low",
            "prompt_cache_options": {"ttl": "30m"},
        },
    )


@pytest.mark.parametrize("depth", [*range(90, 110), *range(900, 1010, 5), 100_000])
@pytest.mark.parametrize(("begin", "end"), [(b"[", b"]"), (b'{"a":', b"}")])
def test_deep_bodies_are_refused_long_before_anything_recurses(
    depth: int, begin: bytes, end: bytes
) -> None:
    inner = b"1" if end == b"}" else b""
    raw = b'{"tools":' + begin * depth + inner + end * depth + b"}"
    if depth < checks.MAX_DEPTH:
        assert checks.parse(raw)
        return
    with pytest.raises(errors.BadRequest, match="nested too deeply: 100 levels"):
        checks.parse(raw)
    broad = b"[" + b",".join([b"[]"] * 5000) + b"]"
    assert checks.parse(b'{"tools":' + broad + b"}")
