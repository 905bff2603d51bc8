"""Makes vLLM go on with an answer that another replica began.

The engine runs on the prompt's ids and the ids so far. vLLM's own detokenizer is fed the ids so far as if it
had sampled them, so that characters and stop strings across the seam come out as they would have, and its
own formatter sees one answer: the prompt once, and the tokens so far with the first new one. Beside
`adapter` the one module that touches vLLM's names.
"""

import copy
from collections.abc import Mapping
from typing import Any

from vllm.v1.engine import detokenizer

from engines.vllm import calls
from scheduler.contracts import resume


def why_not(engine_id: str, params: Any, *, parsed: bool) -> str:
    """Say why an answer could not go on elsewhere, judged by what vLLM samples with; "" if it can.

    The body tells most of it (`resume.why_not`); a model's own generation defaults are only seen here.

    Args:
        engine_id: vLLM's request id.
        params: its `SamplingParams`.
        parsed: whether the model's chat answers pass a reasoning or tool parser, which keeps state.
    """
    if parsed and engine_id.startswith("chatcmpl-"):
        return "a parser of the model's works on its answers"
    if params.seed is not None and params.temperature > 0:
        return "its sampling is seeded"
    if params.presence_penalty or params.frequency_penalty:
        return "it has penalties"
    if (params.n or 1) > 1:
        return "n is above 1"
    for name in ("logprobs", "prompt_logprobs", "structured_outputs", "bad_words", "extra_args"):
        if getattr(params, name, None) not in (None, [], {}):
            return f"it asks for {name}"
    return ""


def engine_input(prompt: Mapping[str, Any], params: Any, begun: resume.Resume) -> tuple[Any, Any]:
    """Return the prompt and the sampling parameters with which the engine goes on.

    At least one token is left to sample: of an answer that had its last one, that one is drawn again.
    """
    most = params.max_tokens
    given = begun.token_ids if most is None else begun.token_ids[: max(0, most - 1)]
    rest = params.clone()
    if most is not None:
        rest.max_tokens = most - len(given)
    rest.min_tokens = max(0, params.min_tokens - len(given))
    ids = [*begun.prompt_token_ids, *given]
    return {**prompt, "prompt_token_ids": ids}, rest


def as_one(output: Any, begun: resume.Resume, *, first: bool) -> None:
    """Make an output look as if the answer had begun here; the first one brings the tokens so far."""
    output.prompt_token_ids = list(begun.prompt_token_ids)
    output.num_cached_tokens = begun.cached_tokens
    # What is put into the cache here is the recomputation's, and the first replica's count is not known.
    output.num_cache_creation_tokens = None
    if first:
        for part in output.outputs:
            part.token_ids = [*begun.token_ids, *part.token_ids]


def prime_detokenizers(processor: Any, running: calls.Calls) -> None:
    """Have vLLM's output processor begin the text of resumed answers where they stopped.

    Args:
        processor: an `OutputProcessor`; it makes the detokenizer of a request when that is added, in the
            same turn of the loop and so before any output of it.
        running: the calls, by which a resumed request is known.
    """
    add = processor.add_request

    def add_request(
        request: Any,
        prompt: str | None,
        parent_req: Any = None,
        request_index: int = 0,
        queue: Any = None,
    ) -> None:
        add(request, prompt, parent_req, request_index, queue)
        call = running.find(request.external_req_id)
        if call is not None and call.begun is not None:
            state = processor.request_states[request.request_id]
            state.detokenizer = _primed(processor.tokenizer, request, call)
            if state.stream_interval > 1:
                state.sent_tokens_offset = state.detokenizer.num_output_tokens()

    processor.add_request = add_request


def _primed(tokenizer: Any, request: Any, call: calls.Call) -> Any:
    begun = call.begun
    assert begun is not None  # noqa: S101 - the caller looked
    as_begun = copy.copy(request)
    as_begun.prompt_token_ids = list(begun.prompt_token_ids)
    params = as_begun.sampling_params = request.sampling_params.clone()
    params.min_tokens = call.min_tokens
    made = detokenizer.IncrementalDetokenizer.from_new_request(
        tokenizer if params.detokenize else None, as_begun
    )
    given = request.prompt_token_ids[len(begun.prompt_token_ids) :]
    for token_id in given:
        made.update([token_id], False)
    if hasattr(made, "_last_output_text_offset"):
        made._last_output_text_offset = begun.chars
    return made
