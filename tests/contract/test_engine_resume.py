"""An answer goes on at another replica from token ids, at every point at which it can be cut.

On the simulated engine and on each vLLM version that has an environment here.
"""

import asyncio
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from scheduler.contracts import frames, resume
from tests.contract import engine_simulated, engine_subject, engine_vllm, seams

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ASK = [{"role": "user", "content": "naïve 漢字 🦀: tell me of a river."}]
Ask = Callable[[str, Mapping[str, Any]], list[frames.Frame]]

vllm = pytest.mark.vllm
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(
    scope="module",
    params=[
        "simulated",
        pytest.param(engine_vllm.NEWEST, marks=vllm),
        pytest.param(engine_vllm.BEFORE, marks=vllm),
    ],
)
def ask(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ask]:
    """Return what asks a replica of the engine and returns the frames of its answer."""
    if request.param == "simulated":
        yield _simulated
        return
    server = engine_vllm.shared(request, request.param, tmp_path_factory)
    begun = engine_vllm.begin(server, engine_vllm.spec(server.folder))
    replica = engine_vllm.listening(server, begun)
    yield lambda path, body: engine_vllm.ask(replica, path, {"model": "chat", **body})[0]
    engine_vllm.stop(server, begun)


def _simulated(path: str, body: Mapping[str, Any]) -> list[frames.Frame]:
    async def run() -> list[frames.Frame]:
        engine = engine_simulated.engine()
        async with engine.running(), engine_subject.listening(engine) as subject:
            return (await subject.ask(body, path=path)).all

    return asyncio.run(run())


def asked(path: str, **more: Any) -> dict[str, Any]:
    what = {"messages": ASK} if path == CHAT else {"prompt": "The naïve keeper 水"}
    return {
        "max_tokens": 24,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        **what,
        **more,
    }


def go_on(ask: Ask, path: str, body: Mapping[str, Any], begun: resume.Resume) -> list[frames.Frame]:
    return ask(path, {**body, resume.FIELD: begun.to_json()})


TIES: list[str] = []


def check(
    ask: Ask, path: str, body: Mapping[str, Any], whole: list[frames.Frame], cut: int
) -> None:
    """Cut an answer, ask for the rest, compare; a tie between two tokens is counted and let pass."""
    rest = go_on(ask, path, body, seams.beginning(whole[:cut]))
    if not seams.check(whole, cut, rest, lambda ids: seams.gap(ask, ids)):
        tie(f"{path} cut {cut}")


def tie(where: str) -> None:
    """Count a tie."""
    TIES.append(where)
    assert len(TIES) <= 12, f"too many to be chance: {TIES}"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_every_cut_of_a_plain_answer(ask: Ask, path: str) -> None:
    body = asked(path)
    whole = ask(path, body)
    assert len(seams.ids(whole)) == 24
    for cut in seams.cuts(whole):
        check(ask, path, body, whole, cut)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_every_cut_of_an_answer_that_a_stop_string_ends(ask: Ask, path: str) -> None:
    """G4: the stop string is found across the seam too, and nothing of it goes out."""
    plain = seams.text(ask(path, asked(path)))
    middle = len(plain) // 2
    body = asked(path, stop=[plain[middle : middle + 6], "never said"])
    whole = ask(path, body)
    assert seams.text(whole) == plain[: plain.index(body["stop"][0])]
    for cut in seams.cuts(whole):
        check(ask, path, body, whole, cut)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_every_cut_of_an_answer_that_only_looks_like_stopping(ask: Ask, path: str) -> None:
    """G4: text that was held back for a stop string that did not come goes out after the seam."""
    plain = seams.text(ask(path, asked(path)))
    middle = len(plain) // 2
    body = asked(path, stop=[plain[middle : middle + 5] + "\u2603", "x" * 30])
    whole = ask(path, body)
    assert seams.text(whole) == plain
    for cut in seams.cuts(whole):
        check(ask, path, body, whole, cut)


def test_a_second_seam_is_like_the_first(ask: Ask) -> None:
    body = asked(CHAT)
    whole = ask(CHAT, body)
    cut = seams.cuts(whole)[4]
    rest = go_on(ask, CHAT, body, seams.beginning(whole[:cut]))
    both = [*whole[:cut], *rest]
    later = cut + 1 + 5
    check(ask, CHAT, body, both, later)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_several_seams_anywhere(ask: Ask, path: str) -> None:
    """Before the first token too, with a stop string that may lie across each of them."""
    chance = random.Random(path)
    plain = seams.text(ask(path, asked(path)))
    middle = 2 * len(plain) // 3
    body = asked(path, stop=[plain[middle : middle + 5], plain[2:5] + "\u2603"])
    whole = ask(path, body)
    for _ in range(2):
        said: list[frames.Frame] = []
        rest = whole
        for _ in range(3):
            ends = [
                n for n, frame in enumerate(rest) if b'"finish_reason":"' in seams.compact(frame)
            ]
            said += rest[: chance.randint(1, max(1, ends[0]))]
            rest = go_on(ask, path, body, seams.beginning(said))
        if not seams.check_parts(whole, [*said, *rest], lambda ids: seams.gap(ask, ids)):
            tie(f"{path} at several seams")


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_whole_answer_goes_on_too(ask: Ask, path: str) -> None:
    """What a batch line needs: nothing has gone out, and the whole text comes at the end."""
    body = {**asked(path), "stream": False}
    del body["stream_options"]
    whole = ask(path, body)
    prompt = next(frame for frame in whole if frame.kind is frames.Kind.PROMPT)
    begun = resume.Resume(prompt.token_ids, tuple(seams.ids(whole)[:9]))
    rest = go_on(ask, path, body, begun)
    want, got = (engine_vllm.strict(_json(found)) for found in (whole, rest))
    assert got["choices"] == want["choices"]
    assert got["usage"]["completion_tokens"] == want["usage"]["completion_tokens"]
    assert got["usage"]["prompt_tokens"] == want["usage"]["prompt_tokens"]


def _json(found: list[frames.Frame]) -> bytes:
    return b"".join(frame.payload for frame in found if frame.kind is frames.Kind.DATA)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"n": 2, "temperature": 0.9}, "n is above 1"),
        ({"seed": 3, "temperature": 0.7}, "seeded"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"logprobs": True}, "logprobs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
    ],
)
def test_what_cannot_go_on_says_so_at_once(ask: Ask, change: dict[str, Any], why: str) -> None:
    found = ask(CHAT, asked(CHAT, **change))
    told = [frame.payload for frame in found if frame.kind is frames.Kind.PROMPT]
    assert [why in payload.decode() for payload in told] == [True]
