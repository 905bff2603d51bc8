"""Which fields a body may have: OpenAI's, the engines' own sampling options, and Forebay's wishes. Pure.

As the OpenAI API does, a field that nobody knows is refused and not ignored: a typing error in
``max_tokens`` would otherwise cost a whole answer of the model's full length. Fields of OpenAI's that no
engine here acts on (``metadata``, ``service_tier``, …) are accepted and have no effect.
"""

import difflib
from collections.abc import Collection, Mapping
from typing import Any

from scheduler.contracts import errors, requests

_LONGEST = 64
_WISHES = frozenset(
    {
        "forebay_priority", "forebay_deadline_ms", "forebay_cache_hint", "forebay_version",
        "forebay_adapter", "forebay_resume",
    }
)  # fmt: skip
_ANY = frozenset({"model", "user", "metadata", "safety_identifier", "service_tier", "cache_salt"})
_SAMPLING = frozenset(
    {
        "frequency_penalty", "logit_bias", "max_tokens", "n", "presence_penalty", "seed", "stop",
        "stream", "stream_options", "temperature", "top_p",
        # Not OpenAI's; vLLM's and most other engines' own.
        "allowed_token_ids", "bad_words", "ignore_eos", "include_stop_str_in_output",
        "length_penalty", "min_p", "min_tokens", "prompt_logprobs", "repetition_penalty",
        "skip_special_tokens", "spaces_between_special_tokens", "stop_token_ids",
        "structured_outputs", "top_k", "truncate_prompt_tokens", "truncation_side", "vllm_xargs",
        "add_special_tokens", "return_token_ids", "return_tokens_as_token_ids",
        "response_format", "echo", "logprobs", "thinking_token_budget", "prompt_cache_key",
        "prompt_cache_retention", "prompt_cache_options",
    }
)  # fmt: skip
# OpenAI's own, and no engine here has the like: an answer without what was asked for would mislead.
_NOT_HERE = frozenset({"access_programs", "background_options", "image", "moderation"})
KNOWN: Mapping[requests.Endpoint, frozenset[str]] = {
    requests.Endpoint.CHAT: _ANY | _WISHES | _SAMPLING | {
        "audio", "function_call", "functions", "max_completion_tokens", "messages", "modalities",
        "moderation",
        "parallel_tool_calls", "prediction", "reasoning_effort", "store", "tool_choice", "tools",
        "top_logprobs", "verbosity", "web_search_options",
        "add_generation_prompt", "chat_template_kwargs", "continue_final_message", "documents",
        "include_reasoning", "media_io_kwargs", "mm_processor_kwargs",
    },
    requests.Endpoint.COMPLETIONS: _ANY | _WISHES | _SAMPLING | {"best_of", "prompt", "suffix"},
    requests.Endpoint.EMBEDDINGS: _ANY | _WISHES | {
        "dimensions", "encoding_format", "input",
        "add_special_tokens", "normalize", "truncate_prompt_tokens", "truncation_side",
    },
    requests.Endpoint.RERANK: _ANY | _WISHES | {
        "documents", "query", "return_documents", "top_n",
        "add_special_tokens", "instruction", "truncate_prompt_tokens", "truncation_side",
        "use_activation",
    },
    requests.Endpoint.CLASSIFY: _ANY | _WISHES | {
        "input", "add_special_tokens", "truncate_prompt_tokens", "truncation_side",
        "use_activation",
    },
    # Nothing is stored here. `store` has no effect all the same: it is true for whoever says nothing.
    requests.Endpoint.RESPONSES: _ANY | _WISHES | {
        "access_programs", "background", "background_options", "context_management", "conversation",
        "image", "include", "input",
        "instructions", "moderation", "prompt_cache_options", "verbosity",
        "max_output_tokens", "max_tool_calls", "parallel_tool_calls", "previous_response_id", "prompt",
        "prompt_cache_key", "prompt_cache_retention", "reasoning", "store", "stream", "stream_options",
        "temperature", "text", "tool_choice", "tools", "top_logprobs", "top_p", "truncation",
        "chat_template_kwargs", "enable_response_messages", "frequency_penalty", "ignore_eos",
        "include_reasoning", "include_stop_str_in_output", "logit_bias", "media_io_kwargs", "min_p",
        "mm_processor_kwargs", "presence_penalty", "repetition_penalty", "seed", "skip_special_tokens",
        "stop", "stop_token_ids", "structured_outputs", "top_k", "vllm_xargs",
    },
}  # fmt: skip
# Engines understand these too, and they would reach around Forebay: into another request, another
# replica's memory, the order of the queue, or the server's own template code.
_OURS = frozenset(
    {
        "chat_template", "ec_transfer_params", "kv_transfer_params", "mm_payload", "priority",
        "prompt_embeds", "request_id", "routed_experts_prompt_start", "session_id",
        "stream_interval", "use_beam_search",
    }
)  # fmt: skip


def check(endpoint: requests.Endpoint, body: Mapping[str, Any], more: Collection[str] = ()) -> None:
    """Refuse the first field that ``endpoint`` does not have.

    Args:
        endpoint: the route.
        body: the parsed body.
        more: fields that the site allows beside these (`[gateway] extra_fields`).

    Raises:
        errors.BadRequest: it names the field, and one that may have been meant.
    """
    if KNOWN[endpoint].issuperset(body) and _NOT_HERE.isdisjoint(body):
        return
    unknown = body.keys() - KNOWN[endpoint]
    for name in _NOT_HERE & body.keys():
        if body[name] is not None:
            raise errors.BadRequest(
                f"{name}: is not offered here, as no engine has it: leave it out", param=name
            )
    if unknown:
        unknown.difference_update(more)
    if not unknown:
        return
    name = min(unknown)
    shown = repr(name if len(name) <= _LONGEST else name[:61] + "...")
    if name in _OURS:
        raise errors.BadRequest(
            f"{shown} can't be set through this service: leave it out", param=name
        )
    # The search's time and memory grow with the name, which is the caller's.
    near = difflib.get_close_matches(name, KNOWN[endpoint], 1) if len(name) <= _LONGEST else []
    hint = f"did you mean {near[0]!r}?" if near else "leave it out, or ask the site to allow it"
    raise errors.BadRequest(f"{shown} is no field of {endpoint.value}: {hint}", param=name[:64])
