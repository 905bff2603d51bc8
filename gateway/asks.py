"""What a request asks of admission, without its body, and what that needs of a replica. Pure.

The worker that has read a body makes the `Asking`; the process that owns the model's queue makes the
`Needs`, with what it knows of the fleet.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from gateway import fingerprints, standing, threads
from scheduler.contracts import errors, fleet, requests
from scheduler.core import outputs, prefixes, versions

_CALLS = ("tool_calls", "function_call")
_SHOWN = ("functions", "documents")
POOLED = frozenset(each.value for each in requests.Endpoint if each.pooled)
_LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens")


class Asking(msgspec.Struct, frozen=True, array_like=True):
    """A request as admission sees it; it crosses to the admission process as it is.

    Attributes:
        arrived_us: UTC µs when the gateway had read the request.
        deadline_us: UTC µs after which waiting is of no use, None: the tier's default.
        version: exact version wanted, None: the route's choice.
        seats: sequences at once.
        prompt_tokens: of the longest prompt where they came as ids, else 0.
        max_tokens: the most that each sequence may sample, 0 if not said.
        chars: characters of the prompt's text, for an estimate of its tokens.
        size: bytes that wait with it, roughly.
        prefix: the prompt's fingerprints.
        endpoint: the route's path.
        all_tokens: of every prompt and input that came as ids: what quotas reserve.
        all_chars: of everything that may become prompt text: every prompt, calls of tools among messages.
        avoid: replicas whose engines have failed on it.
        thread: key of its conversation, 0 if none is known: equal ones get the same version.
        spare: it may have a seat that nobody waits for, and else is refused at once; it counts on no quota.
        prompts: texts that are read each for itself: prompts, inputs, or the documents of a ranking.
        suspected: replicas that were lost with it, and perhaps by it; see `scheduler.core.suspects`.
    """

    request_id: str
    model: str
    tier: requests.Tier
    team: str
    user: str
    key_id: str
    arrived_us: int
    deadline_us: int | None = None
    version: str | None = None
    adapter: str | None = None
    seats: int = 1
    prompt_tokens: int = 0
    max_tokens: int = 0
    chars: int = 0
    size: int = 0
    cache_hint: str | None = None
    prefix: prefixes.Prefix = prefixes.NONE
    endpoint: str = ""
    all_tokens: int = 0
    all_chars: int = 0
    avoid: tuple[str, ...] = ()
    thread: int = 0
    spare: bool = False
    prompts: int = 1
    suspected: int = 0

    def again(self, version: str | None, avoid: str | None) -> "Asking":
        """Return it as it waits again: for the ``version`` of its answer, elsewhere than at ``avoid``."""
        if version is None and avoid is None:
            return self
        avoided = self.avoid if avoid is None else (*self.avoid, avoid)
        return msgspec.structs.replace(self, version=version or self.version, avoid=avoided)

    def suspect(self, lost: int) -> "Asking":
        """Return it as a suspect of the loss of so many replicas; see `scheduler.core.suspects`."""
        return msgspec.structs.replace(self, suspected=lost)


class Needs(msgspec.Struct, frozen=True):
    """What a request needs of a replica.

    Attributes:
        context_tokens: prompt plus max_tokens where the prompt's length is known exactly, else 0.
        prompt_tokens: of all prompts together, estimated where it is not known: what is to be computed.
        output_tokens: of one sequence, estimated.
        long: whether it belongs in the long-context pool.
        most_output_tokens: that one sequence may have, for quotas: rather too many than too few.
        room_tokens: KV room: each prompt's blocks once, and each sequence's output. Where nothing is sampled
            a prompt lets go of its blocks when it is computed: the longest alone counts.
        suspected: 0: no replica was lost with it; 1: one was; 2: several.
    """

    version: str
    adapter: str | None
    seats: int
    context_tokens: int
    prompt_tokens: int = 0
    output_tokens: int = 0
    long: bool = False
    most_output_tokens: int = 0
    room_tokens: int = 0
    suspected: int = 0

    def shape(self, team: str) -> tuple[object, ...]:
        """Return what decides with whom it may change places in the queue.

        Long prompts are limited by team, so each team has a lane for them. Suspects wait for other
        replicas than those that are none.
        """
        return (
            self.version,
            self.adapter,
            self.seats,
            outputs.room_class(self.room_tokens),
            team if self.long else None,
            self.suspected,
        )


def of(
    request: requests.InferenceRequest,
    chunk_bytes: int = prefixes.CHUNK_BYTES,
    *,
    several: bool = False,
) -> Asking:
    """Return what ``request`` asks of admission.

    Args:
        request: the checked request.
        chunk_bytes: of its prompt's fingerprints.
        several: whether more than one version answers its model's requests.
    """
    body, caller = request.body, request.caller
    texts = 1
    if request.endpoint is requests.Endpoint.RERANK:
        (chars, size), all_ = _of_ranking(body["query"], body["documents"])
        texts = len(body["documents"])
    else:
        chars, size = _measured(body)
        all_ = everything(body, chars)
        given = body.get("prompt") or body.get("input")
        if type(given) is list and isinstance(given[0], str | list):  # a flat list of ids is one
            texts = len(given)
    size = max(size, len(request.raw))
    seats = int(body.get("n") or 1)  # sequences at once: choices times prompts
    if "prompt" in body:
        seats *= texts
    return Asking(
        request.request_id,
        request.model,
        request.tier,
        caller.team,
        caller.user,
        caller.key_id,
        request.arrived_us,
        request.deadline_us,
        request.version,
        request.adapter,
        seats,
        prompt_ids(body),
        most_tokens(body),
        chars,
        size,
        request.cache_hint,
        fingerprints.of(request, chunk_bytes),
        request.endpoint._value_,
        *all_,
        thread=threads.key(request) if several else 0,
        prompts=texts,
        suspected=0 if request.batch is None else request.batch.lost,
    )


def most_tokens(body: Mapping[str, Any]) -> int:
    """Return the most that each sequence may sample as the body says, 0 if it does not."""
    limit = 0
    for name in _LIMITS:
        limit = limit or body.get(name) or 0
    return limit if isinstance(limit, int) else 0


def needs(
    asking: Asking, known: standing.Standing, draw: float, learned: outputs.Outputs, long_at: int
) -> Needs:
    """Return what ``asking`` needs, its version drawn by the route's weights.

    Args:
        asking: the request.
        known: the fleet.
        draw: random number in [0, 1), for a request of no conversation.
        learned: estimates of tokens.
        long_at: prompt tokens from which a request is long, 0: never.

    Raises:
        errors.ModelNotFound: the route names no version.
        errors.ContextTooLong: prompt ids plus max_tokens exceed the context.
        errors.BadRequest: more sequences at once than any replica has seats.
    """
    route = known.view.routes.get(asking.model)
    prompt = asking.prompt_tokens or learned.prompt_tokens(asking.model, asking.chars)
    version, pool = asking.version, None
    if version is None and route is not None:
        version, pool = _drawn(asking, known, route, prompt, draw)
    if route is None or version is None:
        raise errors.ModelNotFound(
            f"model {asking.model}: it has no version in service; see /v1/models", param="model"
        )
    tokens = asking.prompt_tokens + asking.max_tokens if asking.prompt_tokens else 0
    if tokens > route.max_context:
        raise errors.ContextTooLong(
            f"the prompt and max_tokens need {tokens} tokens, the context of {asking.model} is "
            f"{route.max_context}: shorten one of them"
        )
    limit = known.most_seats(asking.model, asking.tier)
    if limit is not None and asking.seats > limit:
        raise errors.BadRequest(
            f"the request asks for {asking.seats} sequences at once, a replica of {asking.model} "
            f"runs {limit}: lower n or send fewer prompts"
        )
    # An estimate must not keep out what the engine would take: it knows the real length.
    prompt = min(prompt, route.max_context)
    whole = prompt
    if asking.prompts > 1:
        most = asking.prompts * route.max_context
        whole = max(prompt, min(together(asking, prompt, learned), most))
    # A pool's replicas are all for long prompts: none of them need be set apart.
    long = 0 < long_at <= prompt and (pool is None or version != pool.version)
    output = most = 0
    room = prompt
    if asking.endpoint not in POOLED:
        output = learned.output_tokens(asking.model, asking.team, asking.max_tokens)
        output = min(output, max(0, route.max_context - prompt))
        most = learned.most_tokens(asking.model, asking.team, asking.max_tokens)
        most = min(most, route.max_context)
        room = whole + asking.seats * output
    return Needs(
        version, asking.adapter, asking.seats, tokens, whole, output, long, most, room,
        min(asking.suspected, 2),
    )  # fmt: skip


def _drawn(
    asking: Asking, known: standing.Standing, route: fleet.Route, prompt: int, draw: float
) -> tuple[str | None, fleet.Pool | None]:
    """Return the version that answers, None where the route names none, and the pool of its length."""
    if len(route.weights) == 1 and not route.pools:  # most: nothing is to be chosen
        return versions.pick(route, 0), None
    failed = known.versions(asking.model, asking.avoid) if asking.avoid else frozenset[str]()

    def takes(version: str) -> bool:
        # One that failed on it is drawn again only where no other is: it may be a bad version.
        return version not in failed and known.takes(
            asking.model, version, asking.adapter, asking.tier
        )

    pool = versions.pooled(route, prompt, prompt + asking.max_tokens) if route.pools else None
    if pool is not None and (takes(pool.version) or _only_there(asking, prompt, route)):
        return pool.version, pool
    key = asking.thread or int(draw * 2.0**64)
    return versions.pick(route, key, takes, lambda one: known.hopes(asking.model, one)), pool


def together(asking: Asking, longest: int, learned: outputs.Outputs) -> int:
    """Return about how many tokens all prompts have, of which one has ``longest``."""
    if asking.prompts == 1:
        return longest
    texts = learned.prompt_tokens(asking.model, asking.all_chars) if asking.all_chars else 0
    return max(longest, asking.all_tokens + texts)


def _only_there(asking: Asking, prompt: int, route: fleet.Route) -> bool:
    """Return whether a request fits its pool alone; any other goes elsewhere while the pool is away."""
    return prompt + asking.max_tokens > (route.base_context or route.max_context)


def prompt_ids(body: Mapping[str, Any]) -> int:
    """Return the length of the longest prompt that came as token ids, else 0."""
    prompt = body.get("prompt") or body.get("input")
    if not isinstance(prompt, list) or not prompt:
        return 0
    if isinstance(prompt[0], int):
        return len(prompt)
    if isinstance(prompt[0], list):
        return max(map(len, prompt))
    return 0


def everything(body: Mapping[str, Any], chars: int) -> tuple[int, int]:
    """Return token ids and characters of all prompts together, and of what else the template may show.

    Args:
        body: the request's.
        chars: of its messages and its longest prompt.
    """
    tokens = 0
    for name in ("prompt", "input"):
        given = body.get(name)
        if not isinstance(given, list) or not given:
            continue
        if isinstance(given[0], str):
            chars += sum(map(len, given)) - max(map(len, given))
        elif isinstance(given[0], list):
            tokens += sum(map(len, given))
        elif isinstance(given[0], int):
            tokens += len(given)
    for message in body.get("messages") or ():
        for name in _CALLS:
            if called := message.get(name):
                chars += len(repr(called))
    for name in _SHOWN:
        if shown := body.get(name):
            chars += len(repr(shown))
    return tokens, chars


def _of_ranking(query: str, texts: Sequence[str]) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return what `_measured` and `everything` do, for documents that are each read beside the query."""
    chars = len(query) + max(map(len, texts))
    total = sum(map(len, texts)) + len(texts) * len(query)
    return (chars, chars + total), (0, total)


def _items(body: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Return the items of `/v1/responses` where the input is a list of them."""
    given = body.get("input")
    if isinstance(given, list) and given and isinstance(given[0], dict):
        return given
    return ()


def _measured(body: Mapping[str, Any]) -> tuple[int, int]:
    """Return characters of text (of the longest prompt), and bytes that the body holds, roughly."""
    chars, size = _of_messages(body)
    tools = body.get("tools")
    if tools:
        chars += len(repr(tools))
    for name in ("prompt", "input", "instructions"):
        prompt = body.get(name)
        if isinstance(prompt, str):
            chars += len(prompt)
        elif isinstance(prompt, list) and prompt:
            if isinstance(prompt[0], str):
                size += sum(map(len, prompt))
                chars += max(map(len, prompt))
            elif isinstance(prompt[0], dict):
                chars += sum(len(repr(item)) for item in prompt if "content" not in item)
            else:
                size += 4 * (sum(map(len, prompt)) if isinstance(prompt[0], list) else len(prompt))
    return chars, chars + size


def _of_messages(body: Mapping[str, Any]) -> tuple[int, int]:
    """Return characters of messages' text, and bytes of what else they hold."""
    chars = size = 0
    for message in body.get("messages") or _items(body):
        content = message.get("content")
        if isinstance(content, str):
            chars += len(content)
            continue
        for part in content if isinstance(content, list) else ():
            text = part.get("text") if isinstance(part, Mapping) else None
            if isinstance(text, str):
                chars += len(text)
            else:
                size += len(repr(part))  # a picture: many bytes, tokens that text does not foretell
    return chars, size
