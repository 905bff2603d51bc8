"""From a body's bytes to a checked request: what the gateway can judge before any token is spent. Pure.

Only the first fault is named, and no message repeats what the caller sent: an error stays small
whatever the input was. What an engine alone can judge passes through.
"""

import gc
import json
import re
from collections.abc import Callable, Collection, Mapping
from typing import Annotated, Any

import msgspec

from gateway import fields
from scheduler.contracts import errors, requests

MAX_CHOICES = 128
MAX_PARTS = (
    2**16
)  # messages and their parts: each takes some tokens, and time that all streams wait
MAX_DEPTH = (
    100  # of objects and lists; schemas of tools have a dozen, recursion ends a few hundred later
)
# As OpenAI's bound on a schema. vLLM 0.32 compiles 28 KB of choices in 0.3 s on one core, 280 KB in 10 s;
# with an enum of 1 MB it is not done after minutes, and no other grammar of that replica is begun meanwhile.
MAX_GRAMMAR = 128 * 1024
_COMPILED = ("structured_outputs", "response_format", "text", "tools")
_UNFORCED = (None, "none", "auto")
_encode = msgspec.json.Encoder().encode
_decode = (
    msgspec.json.Decoder().decode
)  # strict, and takes nothing that `json` would read otherwise
_WHOLE: dict[str, tuple[int | None, int | None]] = {  # the least and the most of whole numbers
    "max_tokens": (1, None),
    "max_completion_tokens": (1, None),
    "max_output_tokens": (1, None),
    "n": (1, MAX_CHOICES),
    "seed": (None, None),
}
_Id = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]
_TEXTS: Any = list[str]
_IDS: Any = list[_Id]
_LISTS_OF_IDS: Any = list[Annotated[list[_Id], msgspec.Meta(min_length=1)]]
_PLACE = re.compile(r"\$\[(\d+)\]")  # where msgspec has found a fault
_NESTED = frozenset({dict, list})
_FEW = 16  # items that are sooner looked at than asked for their types
_MANY = 64 * 1024  # bytes: a smaller body makes no collection
_EXPLAINED = 1024 * 1024  # bytes of a body that is read again to say what is wrong, line and column
_HALF_ESCAPED = re.compile(rb"\\u[dD][89a-fA-F]")
_STORED = {
    "background": "leave it out, or submit a batch",
    "previous_response_id": "send the items so far as input",
    "conversation": "send the items so far as input",
    "prompt": "send the prompt's text as instructions or input",
}
_KINDS = {
    str: "string",
    bool: "boolean",
    int: "number",
    float: "number",
    list: "list",
    dict: "object",
}


def parse(raw: bytes) -> dict[str, Any]:
    """Return the JSON object in ``raw``.

    Raises:
        errors.BadRequest: it is not UTF-8, not JSON, or no object.
    """
    try:
        value = _decode(raw) if len(raw) < _MANY else _uncollected(_decode, raw)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as fault:
        if len(raw) > _EXPLAINED:
            if isinstance(fault, RecursionError):
                raise _too_deep() from None
            raise errors.BadRequest(f"body: not JSON: {fault}") from None
        value = _slowly(raw)
    if not isinstance(value, dict):
        raise errors.BadRequest(f"body: must be a JSON object, not a {kind(value)}")
    if raw.count(b"[") + raw.count(b"{") > MAX_DEPTH and _deep(value):
        raise _too_deep()
    return value


def _deep(value: Any) -> bool:
    """Return whether ``value`` is nested deeper than `MAX_DEPTH`, without recursion."""
    level = [value]
    for _ in range(MAX_DEPTH - 1):
        level = [
            inner
            for outer in level
            if len(outer) < _FEW or not _NESTED.isdisjoint(map(type, _held(outer)))
            for inner in _held(outer)
            if inner and type(inner) in _NESTED
        ]
        if not level:
            return False
    return any(not _NESTED.isdisjoint(map(type, _held(outer))) for outer in level)


def _uncollected(work: Callable[..., Any], *given: Any) -> Any:
    """Return what ``work`` does, without the garbage collector.

    It would look through all that is there after each few hundred of millions of new lists: 1.2 s of 20 MB.
    """
    if not gc.isenabled():
        return work(*given)
    gc.disable()
    try:
        return work(*given)
    finally:
        gc.enable()


def _held(outer: Any) -> Collection[Any]:
    return outer.values() if type(outer) is dict else outer


def _too_deep() -> errors.BadRequest:
    return errors.BadRequest(f"body: JSON is nested too deeply: {MAX_DEPTH} levels are taken")


def _slowly(raw: bytes) -> Any:
    """Judge a body that the fast parser does not take: by far the most are faulty, and why is said here."""
    try:
        value = json.loads(raw.decode("utf-8"), parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise errors.BadRequest(
            f"body: byte {error.start} is not UTF-8; encode the JSON as UTF-8"
        ) from None
    except json.JSONDecodeError as error:
        raise errors.BadRequest(
            f"body: not JSON: {error.msg} at line {error.lineno} column {error.colno}"
        ) from None
    except RecursionError:
        raise _too_deep() from None
    except ValueError:
        raise errors.BadRequest("body: not JSON: a number is out of range or not finite") from None
    if _HALF_ESCAPED.search(raw) and not _is_text(value):
        raise errors.BadRequest("body: a text holds half a surrogate pair (\\ud800 to \\udfff)")
    return value


def _is_text(value: Any) -> bool:
    """Return whether every text in ``value`` has an encoding; no tokenizer takes one that has none."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def check(endpoint: requests.Endpoint, body: Mapping[str, Any], more: Collection[str] = ()) -> None:
    """Judge a body's fields for ``endpoint``; ``more`` are fields that the site allows beside ours.

    Raises:
        errors.BadRequest: the first fault, with the field in `param`.
    """
    if not isinstance(body.get("model"), str) or not body["model"]:
        raise _fault("model", "must name a model: see /v1/models")
    _asked(endpoint, body)
    for name, (least, most) in _WHOLE.items():
        if name in body:
            _whole(name, body[name], least=least, most=most)
    for name, highest in (("temperature", 2.0), ("top_p", 1.0)):
        if name in body:
            _number(name, body[name], highest)
    for name in ("stream", "echo"):
        if name in body and not isinstance(body[name], bool | None):
            raise _fault(name, f"must be true or false, not a {kind(body[name])}")
    if "stop" in body:
        _stop(body["stop"])
    for name in ("stream_options", "structured_outputs", "response_format"):
        if not isinstance(body.get(name), dict | None):
            raise _fault(name, f"must be an object, not a {kind(body[name])}")
    _grammars(body)
    options = body.get("stream_options")
    if options is not None and not body.get("stream"):
        raise _fault("stream_options", "is only allowed with stream: true")
    fields.check(endpoint, body, more)


def _grammars(body: Mapping[str, Any]) -> None:
    """Judge the size of what an engine compiles before it answers, while others' grammars wait behind it."""
    for name in _COMPILED:
        value = body.get(name)
        if not value or (name == "tools" and body.get("tool_choice") in _UNFORCED):
            continue
        if len(_encode(value)) > MAX_GRAMMAR:
            raise _fault(
                name, f"must be of at most {MAX_GRAMMAR} bytes: an engine compiles it first"
            )


def kind(value: Any) -> str:
    """Return JSON's word for a value's type."""
    return "null" if value is None else _KINDS.get(type(value), type(value).__name__)


def _asked(endpoint: requests.Endpoint, body: Mapping[str, Any]) -> None:
    """Judge what an endpoint reads."""
    match endpoint:
        case requests.Endpoint.CHAT:
            _messages(body.get("messages"))
        case requests.Endpoint.COMPLETIONS:
            _texts("prompt", body.get("prompt"))
        case requests.Endpoint.EMBEDDINGS:
            _texts("input", body.get("input"))
            if body.get("encoding_format") not in (None, "float", "base64"):
                raise _fault("encoding_format", "must be float or base64")
            _whole("dimensions", body.get("dimensions"), least=1)
        case requests.Endpoint.RERANK:
            _rerank(body)
        case requests.Endpoint.CLASSIFY:
            _texts("input", body.get("input"))
        case requests.Endpoint.RESPONSES:
            _responses(body)


def _messages(messages: Any, item: str = "") -> None:
    if not isinstance(messages, list) or not messages:
        raise _fault("messages", "must be a list with at least one message")
    parts = len(messages)
    _few("messages", parts)
    for index, message in enumerate(messages):
        if (
            type(message) is dict
            and type(message.get("content")) is str
            and type(message.get("role")) is str
            and message["role"]
        ):
            continue  # text under a role, as by far the most are
        where = item or f"messages[{index}]"
        if not isinstance(message, dict):
            raise _fault(where, f"must be an object with role and content, not a {kind(message)}")
        if not isinstance(message.get("role"), str) or not message["role"]:
            raise _fault(f"{where}.role", "must be a string such as user")
        content = message.get("content")
        if not isinstance(content, str | list | None):
            raise _fault(
                f"{where}.content",
                f"must be a string, a list of parts or null, not a {kind(content)}",
            )
        if content is None or isinstance(content, str):
            continue
        parts += len(content)
        _few(f"{where}.content", parts)
        for part_index, part in enumerate(content):
            if not isinstance(part, dict) or not isinstance(part.get("type"), str):
                raise _fault(f"{where}.content[{part_index}]", "must be an object with a type")


def _few(name: str, count: int) -> None:
    if count > MAX_PARTS:
        raise _fault(name, f"at most {MAX_PARTS} items are taken, parts of messages included")


def _rerank(body: Mapping[str, Any]) -> None:
    """Judge a query, and the documents that it is held against."""
    if not isinstance(body.get("query"), str) or not body["query"]:
        raise _fault("query", "must be text, and not empty")
    documents = body.get("documents")
    if not isinstance(documents, list) or not documents:
        raise _fault("documents", "must be a list of texts, and not empty")
    _all("documents", documents, _TEXTS, "must be text, not a {kind}")
    _whole("top_n", body.get("top_n"), least=1)
    if not isinstance(body.get("return_documents"), bool | None):
        raise _fault("return_documents", "must be true or false")


def _responses(body: Mapping[str, Any]) -> None:
    """Judge what `/v1/responses` has alone: nothing is kept here between two requests."""
    for name, instead in _STORED.items():
        if body.get(name) not in (None, False):
            raise _fault(name, f"is not offered, as no answer is stored here: {instead}")
    if not isinstance(body.get("instructions"), str | None):
        raise _fault("instructions", f"must be a string, not a {kind(body['instructions'])}")
    given = body.get("input")
    if isinstance(given, str) and given:
        return
    if not isinstance(given, list) or not given:
        raise _fault("input", "must be text or a list of items, and not empty")
    _few("input", len(given))
    for index, item in enumerate(given):
        where = f"input[{index}]"
        if not isinstance(item, dict):
            raise _fault(where, f"must be an object, not a {kind(item)}")
        what = item.get("type")
        if what == "item_reference":
            raise _fault(where, "no item is stored here: send the item itself")
        if what in (None, "message"):
            _messages([item], where)


def _texts(name: str, value: Any) -> None:
    """A string, strings, token ids, or lists of token ids; never a mixture, never empty."""
    if isinstance(value, str) and value:
        return
    if not isinstance(value, list) or not value:
        raise _fault(name, "must be text, token ids, or a list of either, and not empty")
    first = value[0]
    if name == "prompt" and isinstance(first, str | list):
        _few(name, len(value))  # each wants a seat of its own, of one replica
    wanted = (
        _TEXTS if isinstance(first, str) else _LISTS_OF_IDS if isinstance(first, list) else _IDS
    )
    _all(
        name,
        value,
        wanted,
        "must be of one kind in the whole list: texts, token ids from 0, or lists of them",
    )


def _all(name: str, value: list[Any], wanted: Any, what: str) -> None:
    """Judge each item of a list that may have millions, while every stream of the process waits."""
    try:
        _uncollected(msgspec.convert, value, wanted)
    except msgspec.ValidationError as error:
        place = _PLACE.search(str(error))
        at = int(place[1]) if place else 0
        raise _fault(f"{name}[{at}]", what.format(kind=kind(value[at]))) from None


def _whole(name: str, value: Any, *, least: int | None = None, most: int | None = None) -> None:
    if value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool):
        raise _fault(name, f"must be a whole number, not a {kind(value)}")
    if least is not None and value < least:
        raise _fault(name, f"must be at least {least}")
    if most is not None and value > most:
        raise _fault(name, f"must be at most {most}")
    if abs(value) >= 2**63:
        raise _fault(name, "is too large")


def _number(name: str, value: Any, most: float) -> None:
    if value is None:
        return
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise _fault(name, f"must be a number, not a {kind(value)}")
    if not 0 <= value <= most:
        raise _fault(name, f"must lie between 0 and {most:g}")


def _stop(stop: Any) -> None:
    if isinstance(stop, str | None):
        return
    if not isinstance(stop, list) or not {str}.issuperset(map(type, stop)):
        raise _fault("stop", "must be a string or a list of strings")


def _fault(name: str, what: str) -> errors.BadRequest:
    return errors.BadRequest(f"{name}: {what}", param=name)


def _no_constant(name: str) -> Any:
    raise ValueError(name)
