"""A version's typed engine settings (`scheduler.contracts.tuning`) as vLLM's options. Pure."""

from collections.abc import Mapping
from typing import Any

from scheduler.contracts import fleet, tuning

_GIB = 2**30
_FP8 = ("quantization", "kv-cache-dtype", "calculate-kv-scales")
# What a typed setting says, by the option that would say it again.
TYPED = {
    "max-num-batched-tokens": "tuning.chunk_tokens",
    "enable-chunked-prefill": "tuning.chunk_tokens",
    "kv-offloading-size": "tuning.kv_offload_gb",
    "speculative-config": "tuning.speculative",
    "spec-method": "tuning.speculative",
    "spec-model": "tuning.speculative",
    "spec-tokens": "tuning.speculative",
    "enable-sleep-mode": "tuning.parking",
}


def options(spec: fleet.ReplicaSpec, said: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that a spec's tuning stands for.

    Args:
        spec: the replica's.
        said: its own engine arguments by plain option name; they may only say what tuning leaves open.

    Raises:
        ValueError: the tuning is wrong, or the arguments go around it; one line.
    """
    tuned = tuning.read(spec.tuning)
    _approved(tuned, said)
    _can_be_reloaded(tuned, spec)
    for name, field in TYPED.items():
        if name in said and field.partition(".")[2] in spec.tuning:
            raise ValueError(f"engine_args {name} and {field} say the same: keep {field}")
    for name in ("speculative-config", "spec-method", "spec-model", "spec-tokens"):
        if name in said or any(key.startswith(f"{name}.") for key in said):
            raise ValueError(
                f"engine_args {name} is refused: it would guess at any batch size; set "
                "tuning.speculative"
            )
    if said.get("runner") == "pooling" or "convert" in said:
        return {}  # one step computes the whole input, and no token follows
    found: dict[str, Any] = {}
    if "max-num-batched-tokens" not in said:
        found["max-num-batched-tokens"] = max(tuned.chunk_tokens, spec.seats)
    if "enable-chunked-prefill" not in said:
        found["enable-chunked-prefill"] = True
    if "enable-prefix-caching" not in said and "no-enable-prefix-caching" not in said:
        found["enable-prefix-caching"] = tuned.prefix_caching
    if tuned.kv_offload_gb:
        found["kv-offloading-size"] = round(tuned.kv_offload_gb * 1e9 / _GIB, 3)
    if tuned.speculative is not None:
        found["speculative-config"] = _speculative(tuned.speculative, spec.seats)
    return found


def _speculative(given: tuning.Speculative, seats: int) -> dict[str, Any]:
    most = min(given.most_batch, seats)
    schedule = [[1, most, given.tokens]]
    if seats > most:
        schedule.append([most + 1, seats, 0])
    found: dict[str, Any] = {
        "num_speculative_tokens": given.tokens,
        "num_speculative_tokens_per_batch_size": schedule,
    }
    if given.method == "ngram":
        return {"method": "ngram", "prompt_lookup_max": given.lookup, **found}
    return {"method": "draft_model", "model": given.model, **found}


def _can_be_reloaded(tuned: tuning.Tuning, spec: fleet.ReplicaSpec) -> None:
    if tuned.parking != "level-2":
        return
    if spec.adapters or spec.adapter_slots:
        raise ValueError("tuning.parking level-2 crashes with LoRA adapters: set level-1")
    if tuned.speculative is not None and tuned.speculative.method == "draft":
        raise ValueError(
            "tuning.parking level-2 reloads the model's weights and not its draft's: set level-1"
        )


def _approved(tuned: tuning.Tuning, said: Mapping[str, Any]) -> None:
    for name in _FP8:
        if "fp8" in str(said.get(name, "")).lower() and not tuned.quantization_approval:
            raise ValueError(
                f"{name} {said[name]} needs tuning.quantization_approval: name who has allowed "
                "it for this version, and "
                "where its quality was measured"
            )
