"""Cuts an answer's frames anywhere and asks for the rest, as a gateway does when a replica dies."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gateway import emitted
from scheduler.contracts import frames, resume
from tests.contract import engine_vllm

TIE = 1e-3  # in fp32, engines that batch otherwise differ by less than 1e-5
_DATA = frames.Kind.DATA


def cuts(found: Sequence[frames.Frame]) -> list[int]:
    """Return after how many frames a stream may be cut: behind the first, before the one with its end."""
    last = next(n for n, frame in enumerate(found) if b'"finish_reason":"' in compact(frame))
    first = next(n for n, frame in enumerate(found) if frame.kind is _DATA)
    return list(range(first + 1, last + 1))


def compact(frame: frames.Frame) -> bytes:
    """Return a DATA frame's payload without the blanks that JSON may have."""
    return frame.payload.replace(b": ", b":") if frame.kind is _DATA else b""


def beginning(found: Sequence[frames.Frame]) -> resume.Resume:
    """Return what a gateway that got these frames sends along."""
    sent = emitted.Emitted()
    for frame in found:
        if frame.kind is frames.Kind.PROMPT:
            sent.begin(frame)
        elif frame.kind is _DATA:
            sent.add(frame)
    assert sent.why_not == ""
    return sent.resume(begun=True)


def chunks(found: Sequence[frames.Frame]) -> list[dict[str, Any]]:
    """Return the chunks of a stream, which must have gone out in DATA frames."""
    return list(engine_vllm.events(b"".join(f.payload for f in found if f.kind is _DATA)))


def text(found: Sequence[frames.Frame]) -> str:
    """Return the text of a stream's one choice."""
    return "".join(
        (choice["delta"].get("content") if "delta" in choice else choice["text"]) or ""
        for chunk in chunks(found)
        for choice in chunk["choices"]
    )


def ids(found: Sequence[frames.Frame]) -> list[int]:
    """Return the token ids that went out with their text."""
    return [n for frame in found if frame.kind is _DATA for n in frame.token_ids]


def usages(found: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return what the chunks tell of usage, but for what vLLM 0.32 tells of its own cache's writes."""
    told = [dict(chunk["usage"]) for chunk in found if chunk.get("usage")]
    for each in told:
        details = each.get("prompt_tokens_details") or {}
        each["prompt_tokens_details"] = {"cached_tokens": details.get("cached_tokens")}
    return told


def gap(
    ask: Callable[[str, Mapping[str, Any]], list[frames.Frame]], prompt: Sequence[int]
) -> float:
    """Return how far apart the log probabilities of the two best next tokens are; infinite if not told."""
    body = {"prompt": list(prompt), "max_tokens": 1, "temperature": 0, "logprobs": 2}
    found = ask("/v1/completions", body)
    payload = b"".join(f.payload for f in found if f.kind is _DATA)
    tops = engine_vllm.strict(payload)["choices"][0]["logprobs"]["top_logprobs"][0].values()
    first, second, *_ = sorted(tops, reverse=True)
    return float(first - second)


def check(
    whole: Sequence[frames.Frame],
    cut: int,
    rest: Sequence[frames.Frame],
    gap_after: Callable[[Sequence[int]], float],
) -> bool:
    """Check that an answer cut behind so many frames and its rest are the whole one; see `check_parts`."""
    return check_parts(whole, [*whole[:cut], *rest], gap_after)


def check_parts(
    whole: Sequence[frames.Frame],
    both: Sequence[frames.Frame],
    gap_after: Callable[[Sequence[int]], float],
) -> bool:
    """Check that what several replicas said is the whole answer: text, ids, chunks, usage and end.

    Returns:
        Whether they are; False: the two best tokens at the first difference are closer than `TIE`, as
        ``gap_after`` the ids before it says, and the size of a batch decides between them.
    """
    cut = [frame.kind.name for frame in both]
    pairs = zip(ids(both), ids(whole), strict=False)
    differs = next((n for n, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
    if differs is not None:
        width = gap_after([*whole[0].token_ids, *ids(whole)[:differs]])
        assert width < TIE, (cut, differs, width)
        return False
    assert text(both) == text(whole), cut
    assert ids(both) == ids(whole), cut
    assert both[-1].kind is frames.Kind.END, both[-1]
    end, want = frames.End.parse(both[-1].payload), frames.End.parse(whole[-1].payload)
    assert end == want, cut
    ours, theirs = chunks(both), chunks(whole)
    assert len({chunk["created"] for chunk in ours}) == 1, cut
    roles = [c for chunk in ours for c in chunk["choices"] if "role" in c.get("delta", {})]
    assert len(roles) == sum("role" in c.get("delta", {}) for t in theirs for c in t["choices"])
    assert usages(ours) == usages(theirs), cut
    reasons = [c["finish_reason"] for chunk in ours for c in chunk["choices"] if c["finish_reason"]]
    assert reasons == [end.finish_reasons[0]], cut
    return True
