"""What a file's lines will take, before anything has tokenized them: bounds and guesses."""

import dataclasses

from batch_jobs import lines

BYTES_A_TOKEN = 4  # of English text in the usual tokenizers; other text has fewer
DEFAULT_OUTPUT = 256  # of a line that names no bound
_BOUNDS = ("max_completion_tokens", "max_tokens", "max_output_tokens")


@dataclasses.dataclass(slots=True)
class Tokens:
    """Sums over lines.

    Attributes:
        prompt: estimated from the lines' length.
        output: at most, where lines name a bound.
        models: tokens of both kinds by model.
    """

    prompt: int = 0
    output: int = 0
    models: dict[str, list[int]] = dataclasses.field(default_factory=dict)

    @property
    def all(self) -> int:
        """Both together."""
        return self.prompt + self.output

    def add(self, line: lines.Line, size: int) -> None:
        """Count a good line of ``size`` bytes."""
        prompt = max(1, size // BYTES_A_TOKEN)
        output = 0 if line.endpoint == "/v1/embeddings" else bound(line.body)
        self.prompt += prompt
        self.output += output
        if len(self.models) < 64 or line.model in self.models:
            both = self.models.setdefault(line.model, [0, 0])
            both[0] += prompt
            both[1] += output


def bound(body: dict[str, object]) -> int:
    """Return how many tokens a line may get, all choices together."""
    most = DEFAULT_OUTPUT
    for name in _BOUNDS:
        value = body.get(name)
        if type(value) is int and value > 0:
            most = value
            break
    choices = body.get("n")
    return most * (choices if type(choices) is int and choices > 0 else 1)
