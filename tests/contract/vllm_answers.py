"""What the tests of a real vLLM replica ask, and how they read its frames."""

from typing import Any

from scheduler.contracts import frames
from tests.contract import engine_vllm

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ASK = [{"role": "user", "content": "Tell me a short story about a river."}]
UNICODE = "naïve 漢字 🦀"


def data(found: list[frames.Frame]) -> list[frames.Frame]:
    return [frame for frame in found if frame.kind is frames.Kind.DATA]


def payload(found: list[frames.Frame]) -> bytes:
    return b"".join(frame.payload for frame in data(found))


def token_ids(found: list[frames.Frame], choice: int = 0) -> list[int]:
    return [n for frame in data(found) if frame.choice == choice for n in frame.token_ids]


def end(found: list[frames.Frame]) -> frames.End:
    assert found[-1].kind is frames.Kind.END, found[-1]
    return frames.End.parse(found[-1].payload)


def text(found: list[frames.Frame]) -> str:
    """Return a streamed completion's text."""
    return "".join(
        choice["text"]
        for event in engine_vllm.events(payload(found))
        for choice in event["choices"]
    )


def exactly(words: str, **more: Any) -> dict[str, Any]:
    """Return a completion request that must answer ``words``."""
    return {
        "model": "chat",
        "prompt": "Say:",
        "max_tokens": 100,
        "temperature": 0,
        "structured_outputs": {"choice": [words]},
        **more,
    }
