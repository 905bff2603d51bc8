"""Bad input and bad credentials: the documented error over both doors, before anything is computed."""

from typing import Any

import grpc
import pytest

from scheduler.contracts.v1 import forebay_pb2
from tests.integration.whole import clients, running, waiting

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]
TOO_LONG = " ba" * (running.CONTEXT + 1)
LARGE = 50 * 1024 * 1024

HTTP: dict[str, tuple[Any, int, str]] = {
    "unknown model": (clients.chat(4, model="absent"), 404, "model_not_found"),
    "unknown adapter": (clients.chat(4, model="chat:absent"), 404, "model_not_found"),
    "unknown tier": (clients.chat(4, forebay_priority="golden"), 400, "bad_request"),
    "prompt too long": (
        clients.chat(4, messages=[{"role": "user", "content": TOO_LONG}]),
        *(400, "context_length_exceeded"),
    ),
    "prompt too long, streamed": (
        clients.chat(4, messages=[{"role": "user", "content": TOO_LONG}], stream=True),
        *(400, "context_length_exceeded"),
    ),
    "no tokens": (clients.chat(0), 400, "bad_request"),
    "less than no tokens": (clients.chat(-5), 400, "bad_request"),
    "bad UTF-8": (b'{"model": "chat", "messages": "\xff"}', 400, "bad_request"),
    "bad JSON": (b'{"model": "chat", "messages": [', 400, "bad_request"),
    "50 MB": (b" " * LARGE, 413, "body_too_large"),
}

GRPC: dict[str, tuple[dict[str, Any], str, str]] = {
    "unknown model": ({"model": "absent"}, "NOT_FOUND", "model_not_found"),
    "unknown adapter": ({"adapter": "absent"}, "NOT_FOUND", "model_not_found"),
    "unknown tier": ({"priority": "golden"}, "INVALID_ARGUMENT", "bad_request"),
    "prompt too long": ({"prompt": TOO_LONG}, "INVALID_ARGUMENT", "context_length_exceeded"),
    "no tokens": ({"max_tokens": 0}, "INVALID_ARGUMENT", "bad_request"),
    "less than no tokens": ({"max_tokens": -5}, "INVALID_ARGUMENT", "bad_request"),
    "50 MB": ({"prompt": "a" * LARGE}, "RESOURCE_EXHAUSTED", ""),  # refused by gRPC itself
}


def ask_grpc(house: running.Running, key: str, request_id: str, **fields: Any) -> tuple[str, str]:
    """Return the status and our code with which a call ends."""
    asked = forebay_pb2.GenerateRequest(
        **{"model": running.MODEL, "prompt": "The river", "max_tokens": 4, **fields}
    )
    metadata = (("authorization", f"Bearer {key}"), ("x-request-id", request_id))
    with clients.grpc_door(house) as door:
        try:
            list(door.Generate(asked, metadata=metadata, timeout=60))
        except grpc.RpcError as error:
            codes = [
                item.value for item in error.trailing_metadata() if item.key == "x-forebay-code"
            ]
            return error.code().name, str(codes[0] if codes else "")
    return "OK", ""


def test_bad_input(house: running.Running, key: str) -> None:
    asked: list[str] = []
    for name, (body, status, code) in HTTP.items():
        asked.append(clients.new_id())
        answer = clients.post(house, key, body, request_id=asked[-1])
        error = answer.json()["error"]
        assert (name, answer.status_code, error["code"]) == (name, status, code), error
        assert set(error) == {"message", "type", "param", "code"}
        assert len(answer.content) < 8192
        assert "\n" not in error["message"]
    for name, (fields, grpc_status, code) in GRPC.items():
        asked.append(clients.new_id())
        assert (name, *ask_grpc(house, key, asked[-1], **fields)) == (name, grpc_status, code)
    rows = [row for row in house.attempts() if row["caller_request_id"] in asked]
    assert [row["outcome"] for row in rows] == ["refused"] * len(rows)
    assert len({row["caller_request_id"] for row in rows}) == len(rows)
    assert sum(row["output_tokens"] + row["uncached_prompt_tokens"] for row in rows) == 0


def test_bad_keys(house: running.Running, key: str) -> None:
    expired = house.call(
        *("POST", "/admin/keys"), {"team": "physics", "user": "ada", "expires_us": 1}
    )["token"]
    revoked = house.new_key()
    assert clients.post(house, revoked, clients.chat(1)).status_code == 200
    gone = house.command("fctl", "key", "revoke", revoked.split("_")[1], key=house.admin_key)
    assert gone.code == 0, gone.err
    # A key is believed for a short while after it was last looked up ([gateway] key_cache_s).
    waiting.eventually(
        lambda: clients.post(house, revoked, clients.chat(1)).status_code == 401,
        "the revoked key to be refused",
        30,
    )
    before = len(house.attempts())
    for token, code in (
        (key[:-1] + ("0" if key[-1] != "0" else "1"), "invalid_api_key"),
        ("nonsense", "invalid_api_key"),
        (expired, "api_key_expired"),
        (revoked, "api_key_expired"),
    ):
        answer = clients.post(house, token, clients.chat(1))
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, code)
        assert ask_grpc(house, token, "") == ("UNAUTHENTICATED", code)
    limited = house.new_key("standard")
    answer = clients.post(house, limited, clients.chat(1, forebay_priority="interactive"))
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "forbidden")
    assert ask_grpc(house, limited, "", priority="interactive")[0] == "PERMISSION_DENIED"
    assert clients.post(house, key, clients.chat(1), path="/admin/keys").status_code == 403
    assert len(house.attempts()) == before
