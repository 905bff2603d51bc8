"""An answer that goes on at another replica: what is known of its beginning, and what can't be resumed.

The gateway (or the batch runner, from its journal) sends it as the field `FIELD` of the request's body on
the hop; the replica takes it out, runs the engine on the prompt's ids plus the ids so far, and sends only
what the client has not got. Nothing is ever tokenized again.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

FIELD = "forebay_resume"


class ResumeError(ValueError):
    """What was given is no beginning of an answer; the message names the part."""


@dataclasses.dataclass(frozen=True, slots=True)
class Resume:
    """The beginning of an answer with one choice.

    Attributes:
        prompt_token_ids: the prompt, as the first replica tokenized it.
        token_ids: every token sampled so far that is known, in order.
        shown: of these, how many had gone out beside their text; the rest was held back by the engine
            (it may begin a stop string, or end inside a character) and goes out now.
        chars: code points of text that the client has; the text of ``token_ids`` is never shorter.
        created: the answer's ``created`` if the client has its first chunk, 0 if it has nothing.
        cached_tokens: what the first attempt had of the prompt from the prefix cache, for ``usage``.
    """

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...] = ()
    shown: int = 0
    chars: int = 0
    created: int = 0
    cached_tokens: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: Any) -> "Resume":
        """Read what `to_json` wrote.

        Raises:
            ResumeError: it is something else.
        """
        names = {field.name for field in dataclasses.fields(cls)}
        if not isinstance(value, dict) or not names >= set(value):
            raise ResumeError(f"{FIELD}: must be an object with {', '.join(sorted(names))}")
        found = cls(
            _ids("prompt_token_ids", value.get("prompt_token_ids")),
            _ids("token_ids", value.get("token_ids", [])),
            *(
                _count(name, value.get(name, 0))
                for name in ("shown", "chars", "created", "cached_tokens")
            ),
        )
        if not found.prompt_token_ids:
            raise ResumeError(f"{FIELD}.prompt_token_ids: must not be empty")
        if found.shown > len(found.token_ids):
            raise ResumeError(f"{FIELD}.shown: there are only {len(found.token_ids)} token_ids")
        return found


def _ids(name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(
        type(item) is int and 0 <= item < 2**32 for item in value
    ):
        raise ResumeError(f"{FIELD}.{name}: must be a list of token ids")
    return tuple(value)


def _count(name: str, value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ResumeError(f"{FIELD}.{name}: must be a whole number from 0")
    return value


# Fields that do not touch what is sampled after a given beginning, nor how it is written. Whatever is not
# named here or in `why_not` may hold state that the ids don't tell.
_HARMLESS = frozenset(
    {
        "model", "messages", "prompt", "max_tokens", "max_completion_tokens", "min_tokens",
        "temperature", "top_p", "top_k", "min_p", "logit_bias", "stop", "stop_token_ids",
        "ignore_eos", "include_stop_str_in_output", "skip_special_tokens",
        "spaces_between_special_tokens", "stream", "stream_options", "user", "metadata", "store",
        "service_tier", "safety_identifier", "prompt_cache_key", "cache_salt", "priority",
        "add_generation_prompt", "continue_final_message", "add_special_tokens",
        "chat_template_kwargs", "truncate_prompt_tokens", "detokenize", "seed", "tool_choice",
        "parallel_tool_calls", "best_of", "n",
    }
)  # fmt: skip
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "prompt_logprobs": (),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "functions": ([],),
    "echo": (False,),
    "suffix": ("",),
    "return_token_ids": (False,),
    "use_beam_search": (False,),
    "bad_words": ([],),
}  # values besides null that mean "not asked for"


def why_not(body: Mapping[str, Any]) -> str:
    """Say why a request's answer can't be resumed, judged by its body alone; "" if it can.

    Seeded sampling does not continue the same random stream. Unseeded sampling above temperature 0 may be
    resumed: what follows is drawn from the same distribution as it would have been.
    """
    for name in ("n", "best_of"):
        if body.get(name) not in (None, 1):
            return f"{name} is above 1"
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) > 1 and type(prompt[0]) is not int:
        return "it has several prompts"
    if "input" in body:  # its events number and repeat what came before
        return "it is no chat and no completion"
    if body.get("seed") is not None and body.get("temperature") != 0:
        return "its sampling is seeded"
    for name, value in body.items():
        if name in _HARMLESS or name.startswith("forebay_") or value is None:
            continue
        # The number 0 of logprobs asks for those of the tokens themselves, and equals False.
        if value not in _NEUTRAL.get(name, ()) or (name == "logprobs" and value is not False):
            return f"it asks for {name if len(name) <= 40 else name[:37] + '...'}"
    return _parts(body.get("messages"))


def _parts(messages: Any) -> str:
    """Pictures and sound are no token ids."""
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else ():
            if isinstance(part, dict) and part.get("type") not in ("text", "input_text"):
                return "its prompt holds more than text"
    return ""
