"""How many replicas a stream of requests needs: KV cache, step time and stream speed, in closed form.

A step of the engine takes ``t = a + b*prefill + c*decode + d*KV`` milliseconds. In steady state a replica
with λ requests/s of P prompt tokens (a share h of them cached) and O output tokens spends ``λ*P*(1-h)*b`` of
each second in prefill; what is left goes to decode steps of ``s(n) = a + n*(c + d*L)`` for n sequences of L
tokens each, and each step gives every stream one token. Streams of v tokens/s hold ``n = λ*O/v``, so

    v * s(n) = 1 - λ*P*(1-h)*b   ⇒   λ = (1 - v*a) / (P*(1-h)*b + O*(c + d*L))

The planner uses the same function to turn a rate into replicas, `forebay plan` prints it.
"""

import dataclasses
import math

GB = 1_000_000_000


@dataclasses.dataclass(frozen=True, slots=True)
class StepTime:
    """Coefficients of a step's duration in milliseconds; see the module.

    Attributes:
        base: a, per step (weights read once, launch and all-reduce).
        prefill: b, per prompt token computed.
        decode: c, per decoding sequence.
        kv: d, per token of KV cache read.
    """

    base: float
    prefill: float
    decode: float
    kv: float

    def ms(self, prefill: float, decoding: float, kv_tokens: float) -> float:
        """Return a step's milliseconds."""
        return self.base + self.prefill * prefill + self.decode * decoding + self.kv * kv_tokens


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """A model as memory sees it.

    Attributes:
        layers, kv_heads, head_dim, value_bytes: of the KV cache (value_bytes: 2 for fp16, 1 for fp8).
        weights_gb: of one replica, over all of its GPUs, in 10^9 bytes.
        gpus: GPUs of a replica.
        gpu_gb: memory of a GPU in 10^9 bytes.
        overhead_gb: activations, graphs and the runtime, for each GPU, in 10^9 bytes.
    """

    layers: int
    kv_heads: int
    head_dim: int
    value_bytes: int
    weights_gb: float
    gpus: int = 1
    gpu_gb: float = 80.0
    overhead_gb: float = 6.0

    @property
    def kv_bytes(self) -> int:
        """Return bytes of KV cache that one token takes: keys and values of every layer."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.value_bytes

    @property
    def kv_tokens(self) -> int:
        """Return how many tokens of KV cache a replica holds, 0 if the weights do not even fit."""
        free = self.gpus * (self.gpu_gb - self.overhead_gb) - self.weights_gb
        return max(0, math.floor(free * GB / self.kv_bytes))


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
    """What one request brings, on average.

    Attributes:
        prompt, output: tokens.
        cached: share of the prompt that is in a prefix cache, in [0, 1).
    """

    prompt: float
    output: float
    cached: float = 0.0

    @property
    def computed(self) -> float:
        """Return prompt tokens that have to be computed."""
        return self.prompt * (1 - self.cached)

    @property
    def length(self) -> float:
        """Return a sequence's mean length while it decodes."""
        return self.prompt + self.output / 2


@dataclasses.dataclass(frozen=True, slots=True)
class Capacity:
    """What one replica does within the stream speed.

    Attributes:
        requests_per_s: λ.
        sequences: n, that decode at once.
        step_ms: s(n).
        bound: what limits it: `speed` (tokens/s a stream) or `kv` (sequences that fit).
    """

    requests_per_s: float
    sequences: float
    step_ms: float
    bound: str


def capacity(
    step: StepTime, load: Load, *, kv_tokens: int, seats: int, tokens_per_s: float
) -> Capacity:
    """Return what a replica can take while each stream gets ``tokens_per_s``.

    The number of sequences is bounded by seats and by the KV cache (worst case: prompt plus all output).
    """
    left = 1 - tokens_per_s * step.base / 1000
    each_ms = load.computed * step.prefill + load.output * (step.decode + step.kv * load.length)
    rate = max(0.0, left) / (each_ms / 1000) if each_ms > 0 else math.inf
    sequences = rate * load.output / tokens_per_s
    most = min(seats, kv_tokens / max(1.0, load.prompt + load.output))
    if sequences <= most:
        return Capacity(rate, sequences, step.ms(0, sequences, sequences * load.length), "speed")
    # n is bounded: λ*O = n*v with v = (1 - λ*P*b) / s(n), solved for λ.
    step_ms = step.ms(0, most, most * load.length)
    rate = most / ((load.output * step_ms + most * load.computed * step.prefill) / 1000)
    return Capacity(rate, most, step_ms, "kv" if most < seats else "seats")


def decode_rate(step: StepTime, sequences: float, length: float) -> float:
    """Return tokens/s of a replica that only decodes ``sequences`` of ``length`` tokens."""
    return sequences / step.ms(0, sequences, sequences * length) * 1000
