"""What a simulation measures, and what is made of it in the end."""

import dataclasses
from typing import Any

import numpy as np

from scheduler.core import sizing
from scheduler.sim import engine, gaps, scenario

WASTE = ("cold_start", "idle", "drain", "recompute", "not_held")


@dataclasses.dataclass(frozen=True, slots=True)
class _Cost:
    """GPU-seconds that a request needs on a replica which is filled as far as the stream speed allows.

    At that fill requests of the scenario's mean cost exactly what the replica has: `sizing.capacity`.
    """

    gpus: int
    prefill_s: float
    token_s: float
    kv_s: float

    @classmethod
    def of(cls, model: scenario.Model, site: scenario.Scenario) -> "_Cost":
        full = sizing.capacity(
            model.step,
            site.traffic.load,
            kv_tokens=model.shape.kv_tokens,
            seats=model.seats,
            tokens_per_s=site.slo.tokens_per_s,
        )
        step = model.step
        each = step.base / max(1.0, full.sequences) + step.decode
        return cls(model.shape.gpus, step.prefill / 1000, each / 1000, step.kv / 1000)

    def gpu_s(self, call: engine.Call) -> float:
        length = call.prompt + call.output / 2
        tokens = call.output * (self.token_s + self.kv_s * length)
        return self.gpus * (call.computed * self.prefill_s + tokens)


@dataclasses.dataclass(slots=True)
class ModelTally:
    """One model's figures; times in seconds."""

    ttft: list[float] = dataclasses.field(default_factory=list)
    ttft_long: list[float] = dataclasses.field(default_factory=list)
    tpot: list[float] = dataclasses.field(default_factory=list)
    answered: int = 0
    refused: int = 0
    resumed: int = 0
    interactive_tokens: int = 0
    batch_tokens: float = 0.0
    gpu_s: float = 0.0
    busy_s: float = 0.0
    useful_s: float = 0.0


class Tally:
    """Counts from `begin_s` on; what came before is warm-up."""

    def __init__(self, site: scenario.Scenario, begin_s: float) -> None:
        self.site = site
        self.begin_s = begin_s
        self.costs = [_Cost.of(model, site) for model in site.models]
        self.models = [ModelTally() for _ in site.models]
        self.waste = dict.fromkeys(WASTE, 0.0)
        self.reclaim: dict[int, list[float]] = {0: [], 1: [], 2: [], 3: []}
        self.gaps = gaps.Gaps()
        self.overlap_s = 0.0
        self.counting = (
            False  # from the first tick after `begin_s`: GPU time is booked tick by tick
        )
        self.counted_s = 0.0
        self.jobs_met = self.jobs_missed = 0
        self.line: list[tuple[float, float, float, float, float, float]] = []
        self.moves: dict[str, int] = {}

    def first(self, call: engine.Call) -> None:
        """Note a first token."""
        if call.arrival >= self.begin_s:
            mine = self.models[call.model]
            wait = call.first - call.arrival
            (mine.ttft if call.prompt <= self.site.slo.ttft_prompt else mine.ttft_long).append(wait)

    def last(self, call: engine.Call, now: float) -> None:
        """Note the end of an answer."""
        if call.arrival >= self.begin_s:
            mine = self.models[call.model]
            mine.answered += 1
            mine.interactive_tokens += call.output
            mine.useful_s += self.costs[call.model].gpu_s(call)
            if call.output > 1:
                mine.tpot.append((now - call.first) / (call.output - 1))

    def result(self) -> dict[str, Any]:
        """Return one policy's figures in the report's shape."""
        ttft = np.array([wait for mine in self.models for wait in mine.ttft])
        tpot = np.array([each for mine in self.models for each in mine.tpot])
        gpus = self.site.fleet.gpus * self.counted_s
        useful = sum(mine.useful_s for mine in self.models)
        served = [
            (model, mine)
            for model, mine in zip(self.site.models, self.models, strict=True)
            if mine.answered + mine.refused
        ]
        jobs = self.jobs_met + self.jobs_missed
        batch = sum(mine.batch_tokens for mine in self.models)
        return {
            "utilisation": _share(useful, gpus),
            "busy": _share(sum(mine.busy_s for mine in self.models), gpus),
            "ttft_ms": _quantiles(ttft),
            "tpot_ms_p99": round(_at(tpot, 99) * 1000, 2),
            "tokens_per_s_p5": round(1 / _at(tpot, 95), 2) if tpot.size else 0.0,
            "availability_min": min(
                (_share(mine.answered, mine.answered + mine.refused) for _, mine in served),
                default=1.0,
            ),
            "batch_deadlines_met": _share(self.jobs_met, jobs) if jobs else 1.0,
            "batch_tokens": round(batch),
            "tokens_per_gpu_hour": {
                model.name: {
                    "interactive": _hourly(mine.interactive_tokens, mine.gpu_s),
                    "batch": _hourly(mine.batch_tokens, mine.gpu_s),
                }
                for model, mine in zip(self.site.models, self.models, strict=True)
            },
            "waste_gpu_s": {cause: round(each) for cause, each in self.waste.items()},
            "waste_share": {cause: _share(each, gpus) for cause, each in self.waste.items()},
            "gaps": self.gaps.result(),
            "overlap_gpu_h": round(self.overlap_s / 3600, 2),
            "reclaim_s": {
                f"rung{rung}": {"n": len(times), **_spread(times)}
                for rung, times in self.reclaim.items()
            },
            "models": {model.name: self._model(mine) for model, mine in served},
            "requests": sum(mine.answered + mine.refused for mine in self.models),
            "resumed": sum(mine.resumed for mine in self.models),
            "moves": dict(sorted(self.moves.items())),
        }

    def _model(self, mine: ModelTally) -> dict[str, Any]:
        tpot = np.array(mine.tpot)
        return {
            "ttft_ms": _quantiles(np.array(mine.ttft)),
            "ttft_long_ms": _quantiles(np.array(mine.ttft_long)),
            "tpot_ms_p99": round(_at(tpot, 99) * 1000, 2),
            "tokens_per_s_p5": round(1 / _at(tpot, 95), 2) if tpot.size else 0.0,
            "tokens_per_s_p50": round(1 / _at(tpot, 50), 2) if tpot.size else 0.0,
            "availability": _share(mine.answered, mine.answered + mine.refused),
            "answered": mine.answered,
            "refused": mine.refused,
        }


def _at(values: "np.typing.NDArray[np.float64]", percent: float) -> float:
    return float(np.percentile(values, percent)) if values.size else 0.0


def _quantiles(values: "np.typing.NDArray[np.float64]") -> dict[str, float]:
    return {f"p{percent}": round(_at(values, percent) * 1000, 1) for percent in (50, 95, 99)}


def _spread(times: list[float]) -> dict[str, float]:
    values = np.array(times)
    return {"p50": round(_at(values, 50), 3), "p99": round(_at(values, 99), 3)}


def _share(part: float, whole: float) -> float:
    return round(part / whole, 6) if whole else 0.0


def _hourly(tokens: float, gpu_s: float) -> int:
    return round(tokens / gpu_s * 3600) if gpu_s else 0
