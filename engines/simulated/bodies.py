"""OpenAI bodies as the simulated engine understands them: checked, or refused in one line."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from engines.simulated import tokens

DEFAULT_MAX_TOKENS = 16  # of /v1/completions, as OpenAI has it; chat goes on to the context's end


class BodyError(ValueError):
    """The body can't be served; ``param`` is the field at fault, ``status`` the HTTP status."""

    def __init__(self, message: str, param: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param = param
        self.status = status


@dataclasses.dataclass(frozen=True, slots=True)
class Generation:
    """What a chat or completions body asks for.

    Attributes:
        prompts: one tuple of ids for each prompt.
        max_tokens: to sample for each sequence at most.
        n: choices for each prompt.
        logprobs: None, or how many alternatives to name for each token.
    """

    chat: bool
    model: str
    prompts: tuple[tuple[int, ...], ...]
    max_tokens: int
    n: int
    stream: bool
    include_usage: bool
    stops: tuple[str, ...]
    logprobs: int | None
    seed: int | None
    echo: bool
    ignore_eos: bool
    min_tokens: int


def generation(body: Any, *, chat: bool, models: Sequence[str], max_context: int) -> Generation:
    """Check a body of ``/v1/chat/completions`` or ``/v1/completions``.

    Raises:
        BodyError: the first fault found.
    """
    if not isinstance(body, dict):
        raise BodyError("the body must be a JSON object")
    model = _model(body, models)
    prompts = (_chat_prompt(body),) if chat else _prompts(body.get("prompt"))
    asked = _integer(body, "max_completion_tokens", None, least=1) if chat else None
    if asked is None:
        asked = _integer(body, "max_tokens", None, least=1)
    longest = max(map(len, prompts))
    options = body.get("stream_options") or {}
    if not isinstance(options, dict):
        raise BodyError("stream_options must be an object", "stream_options")
    return Generation(
        chat=chat,
        model=model,
        prompts=prompts,
        max_tokens=_room(asked, longest, max_context, chat=chat),
        n=_integer(body, "n", 1, least=1) or 1,
        stream=body.get("stream") is True,
        include_usage=options.get("include_usage") is True,
        stops=_stops(body.get("stop")),
        logprobs=_logprobs(body, chat=chat),
        seed=_integer(body, "seed", None),
        echo=not chat and body.get("echo") is True,
        ignore_eos=body.get("ignore_eos") is True,
        min_tokens=_integer(body, "min_tokens", 0, least=0) or 0,
    )


def embedding_inputs(body: Any, models: Sequence[str], max_context: int) -> list[tuple[int, ...]]:
    """Check a body of ``/v1/embeddings`` and return its inputs as ids.

    Raises:
        BodyError: the first fault found.
    """
    if not isinstance(body, dict):
        raise BodyError("the body must be a JSON object")
    _model(body, models)
    if body.get("encoding_format", "float") not in {"float", "base64"}:
        raise BodyError("encoding_format must be float or base64", "encoding_format")
    inputs = list(_prompts(body.get("input"), "input"))
    for ids in inputs:
        _room(None, len(ids) - 1, max_context, chat=True)
    return inputs


def ranked_inputs(body: Any, models: Sequence[str], max_context: int) -> list[tuple[int, ...]]:
    """Check a body of ``/v1/rerank`` and return its documents as ids, the query behind each.

    Raises:
        BodyError: the first fault found.
    """
    if not isinstance(body, dict):
        raise BodyError("the body must be a JSON object")
    _model(body, models)
    (query,) = _prompts([body.get("query")], "query")
    inputs = [tuple(query) + tuple(text) for text in _prompts(body.get("documents"), "documents")]
    for each in inputs:
        _room(None, len(each) - 1, max_context, chat=True)
    return inputs


def _model(body: Mapping[str, Any], models: Sequence[str]) -> str:
    model = body.get("model")
    if model is None:
        return models[0]
    if model not in models:
        raise BodyError(f"The model `{model}` does not exist.", "model", 404)
    return str(model)


def _room(asked: int | None, prompt: int, max_context: int, *, chat: bool) -> int:
    """Return the tokens to sample, in vLLM's words if they do not fit the context."""
    start = f"This model's maximum context length is {max_context} tokens. However, "
    if prompt >= max_context:
        raise BodyError(
            f"{start}your prompt contains {prompt} input tokens, which exceeds this limit even "
            "without any output tokens. Please reduce the length of the input prompt.",
            "input_tokens",
        )
    if asked is None:
        return max_context - prompt if chat else min(DEFAULT_MAX_TOKENS, max_context - prompt)
    if prompt + asked > max_context:
        raise BodyError(
            f"{start}you requested {asked} output tokens and your prompt contains {prompt} input "
            f"tokens, for a total of {prompt + asked} tokens. Please reduce the length of the "
            "input prompt or the number of requested output tokens.",
            "input_tokens",
        )
    return asked


def _chat_prompt(body: Mapping[str, Any]) -> tuple[int, ...]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BodyError("messages must be a list with at least one message", "messages")
    parts: list[str] = []
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise BodyError(f"messages[{index}] must be an object with a role", "messages")
        content = _content(message.get("content"), index)
        parts.append(f"<|{message['role']}|>\n{content}\n")
    return tuple(tokens.encode("".join(parts) + "<|assistant|>\n"))


def _content(content: Any, index: int) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, dict)]
        if len(texts) == len(content) and all(isinstance(text, str) for text in texts):
            return "".join(map(str, texts))
    raise BodyError(f"messages[{index}].content must be text or a list of text parts", "messages")


def _prompts(value: Any, name: str = "prompt") -> tuple[tuple[int, ...], ...]:
    items = value if isinstance(value, list) and not _is_ids(value) else [value]
    if not items:
        raise BodyError(f"{name} must not be empty", name)
    found: list[tuple[int, ...]] = []
    for item in items:
        if isinstance(item, str):
            ids = tuple(tokens.encode(item))
        elif _is_ids(item):
            ids = tuple(item)
        else:
            raise BodyError(f"{name} must be text, token ids, or a list of these", name)
        if not ids:
            raise BodyError(f"{name} must not be empty", name)
        if max(ids) >= tokens.SIZE or min(ids) < 0:
            raise BodyError(f"{name}: token ids go from 0 to {tokens.SIZE - 1}", name)
        found.append(ids)
    return tuple(found)


def _is_ids(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(item, int) and not isinstance(item, bool) for item in value)
    )


def _stops(value: Any) -> tuple[str, ...]:
    items = [value] if isinstance(value, str) else value or []
    if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
        raise BodyError("stop must be a string or a list of strings", "stop")
    return tuple(items)


def _logprobs(body: Mapping[str, Any], *, chat: bool) -> int | None:
    if not chat:
        return _integer(body, "logprobs", None, least=0)
    if body.get("logprobs") is not True:
        return None
    return _integer(body, "top_logprobs", 0, least=0)


def _integer(
    body: Mapping[str, Any], name: str, default: int | None, *, least: int | None = None
) -> int | None:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool):
        raise BodyError(f"{name} must be an integer", name)
    if least is not None and value < least:
        raise BodyError(f"{name} must be at least {least}, got {value}", name)
    return value
