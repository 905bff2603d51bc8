"""What a request is reckoned to take: its needs of a replica, its place in the queue, its claim on quotas.

Estimates are learned from the answers that come back, by model and team; no tokenizer is asked.
"""

from gateway import asks, settings, standing
from scheduler.contracts import clock, quota
from scheduler.core import admission, fairness, outputs

LEAST_CHARS = 4  # a token: English prose with the vocabularies in use
TEMPLATE_TOKENS = 64  # what a chat template may add; a quota has to hold more than the prompt takes


class Reckoning:
    """Reckons for the owner of the queues.

    Args:
        options: the [gateway] table.
        time: the owner's clock.
    """

    def __init__(self, options: settings.GatewaySettings, time: clock.Clock) -> None:
        self._options = options
        self._clock = time
        self._learned = outputs.Outputs(options.output_rules())

    def needs(self, asking: asks.Asking, known: standing.Standing, draw: float) -> asks.Needs:
        """Return what a request needs; raises as `asks.needs` does."""
        return asks.needs(asking, known, draw, self._learned, self._options.long_prompt_tokens)

    def running(self, asking: asks.Asking, version: str) -> asks.Needs:
        """Return what a request takes that runs: also where nothing routes there any more."""
        prompt = asking.prompt_tokens or self._learned.prompt_tokens(asking.model, asking.chars)
        whole = asks.together(asking, prompt, self._learned)
        long = 0 < self._options.long_prompt_tokens <= prompt
        output = most = 0
        room = prompt
        if asking.endpoint not in asks.POOLED:
            output = self._learned.output_tokens(asking.model, asking.team, asking.max_tokens)
            most = asking.max_tokens or output
            room = whole + asking.seats * output
        suspected = min(asking.suspected, 2)
        return asks.Needs(
            version, asking.adapter, asking.seats, 0, whole, output, long, most, room, suspected
        )

    def ticket(self, asking: asks.Asking, needs: asks.Needs, now: float) -> admission.Ticket:
        """Return its place in the queue, as of monotonic second ``now``."""
        waited_us = max(0, self._clock.wall_us() - asking.arrived_us)
        if asking.deadline_us is None:
            limit_us = round(self._options.deadline_s(asking.tier) * 1_000_000)
        else:
            limit_us = asking.deadline_us - asking.arrived_us
        return admission.Ticket(
            asking.request_id,
            asking.tier,
            asking.team,
            now - waited_us / 1_000_000,
            now + (limit_us - waited_us) / 1_000_000,
            needs.shape(asking.team),
            asking.size,
            fairness.weighted(needs.prompt_tokens, 0, needs.seats * needs.output_tokens),
        )

    def claim(self, asking: asks.Asking, needs: asks.Needs) -> quota.Claim:
        """Return what it reserves of its quotas: rather too much than too little."""
        prompt, chars = (
            max(asking.all_tokens, asking.prompt_tokens),
            max(asking.all_chars, asking.chars),
        )
        if chars or not prompt:
            text = self._learned.prompt_tokens(asking.model, chars)
            # What short or odd texts have taught must not make the next one nearly free.
            text = max(text, chars // LEAST_CHARS)
            prompt += text * 5 // 4 + TEMPLATE_TOKENS
        return quota.Claim(
            asking.request_id,
            asking.team,
            asking.user,
            asking.key_id,
            asking.model,
            asking.tier._value_,
            prompt,
            needs.seats * needs.most_output_tokens,
            asking.arrived_us,  # as in the usage record: both count in the same day
        )

    def learn(self, asking: asks.Asking, spent: quota.Spent) -> None:
        """Learn from what an answer took."""
        each = spent.output_tokens // max(1, asking.seats)
        if each:
            self._learned.learn(asking.model, asking.team, each)
        # Of a prompt that is mostly something else (tool calls, documents, pictures) the ratio says nothing.
        one = asking.seats == asking.prompts == 1 and not asking.prompt_tokens
        if one and 2 * asking.chars >= asking.size:
            prompt = spent.uncached_prompt_tokens + spent.cached_prompt_tokens
            self._learned.learn_prompt(asking.model, asking.chars, prompt)
