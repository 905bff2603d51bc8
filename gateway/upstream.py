"""The body that a replica gets: the engine's own name of the model, none of our fields, and a beginning."""

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from gateway import resolve
from scheduler.contracts import errors, requests, resume


class _Named(msgspec.Struct):
    """The one field of a body that is looked at again."""

    model: str


_RESPONSES = requests.Endpoint.RESPONSES
_named = msgspec.json.Decoder(_Named).decode


def body(request: requests.InferenceRequest, begun: resume.Resume | None = None) -> bytes:
    """Return the body as the engine shall see it: its own name of the model, none of our fields.

    Args:
        request: the checked request.
        begun: the beginning of the answer, if the replica shall go on from one.
    """
    name = request.adapter or request.model
    own = begun is None and bool(request.raw) and not _has_nulls(request)
    if own and not _may_have_ours(request.raw, request.body):
        ready = _renamed(request.raw, request.body["model"], name)
        if ready is not None:
            return ready
    fields = {key: value for key, value in request.body.items() if not key.startswith("forebay_")}
    if request.endpoint is _RESPONSES:
        fields = {key: value for key, value in fields.items() if value is not None}
    fields["model"] = name
    if begun is not None:
        fields[resume.FIELD] = begun.to_json()
    return msgspec.json.encode(fields)


def _has_nulls(request: requests.InferenceRequest) -> bool:
    """Return whether a body says null of what vLLM's answer would then have to say null of, and can't.

    OpenAI's interface means the same by null as by nothing, and some clients send all that they could.
    """
    return request.endpoint is _RESPONSES and None in request.body.values()


def _may_have_ours(raw: bytes, body: Mapping[str, Any]) -> bool:
    """Return `resolve.has_ours`, by a look at the bytes alone where no name can hide in escapes."""
    return (b"forebay_" in raw or b"\\u" in raw) and resolve.has_ours(body)


def _renamed(raw: bytes, said: str, name: str) -> bytes | None:
    """Return the client's own bytes with another model's name in them; None: not without doubt."""
    if said == name:
        return raw
    quoted = msgspec.json.encode(said)
    if raw.count(quoted) != 1:
        return None  # a text says the same, or the name is written with escapes
    changed, times = re.subn(
        rb'("model"\s*:\s*)' + re.escape(quoted), lambda m: m[1] + msgspec.json.encode(name), raw
    )
    if times != 1:
        return None
    # The one that was found may stand deeper, where the model's own is written with escapes.
    plain = b"\\" not in raw and raw.count(b'"model"') == 1
    return changed if plain or _says(changed, name) else None


def _says(raw: bytes, name: str) -> bool:
    """Return whether a body asks for the model ``name``."""
    try:
        return _named(raw).model == name
    except msgspec.MsgspecError:  # named twice, and once by no text
        return False


def given(request: requests.InferenceRequest) -> resume.Resume | None:
    """Return the beginning of an answer that Forebay's batch runner sent along; nobody else's is heard.

    Raises:
        errors.BadRequest: it is none.
    """
    value = request.body.get(resume.FIELD)
    if value is None or not request.caller.service:
        return None
    try:
        return resume.Resume.from_json(value)
    except resume.ResumeError as error:
        raise errors.BadRequest(str(error), param=resume.FIELD) from None
