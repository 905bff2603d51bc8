"""A scenario: the site, its models, its callers and its Slurm, read from one TOML file.

Unknown keys, wrong types and impossible values are named with their table; nothing is guessed.
"""

import dataclasses
import math
import tomllib
import typing
from pathlib import Path
from typing import Any, TypeVar

from scheduler.core import sizing

T = TypeVar("T")
SHIPPED = Path(__file__).parent / "data"
DAY_S = 86_400


class ScenarioError(Exception):
    """The scenario can't be used; the message is one line with the place."""


@dataclasses.dataclass(frozen=True, slots=True)
class Fleet:
    """The site's GPUs, and how Slurm treats them.

    Attributes:
        gpus: most that Forebay holds at once, not counting a successor that starts beside its predecessor.
        gpus_per_node: GPUs of a node.
        other_gpus: GPUs of the same cluster that other users' jobs live on and leases may overflow to.
        other_load: share of those that other users' jobs take on average.
        schedule_s: between two passes of Slurm's scheduler.
        grace_s: Slurm's GraceTime before it kills what it preempts.
        kill_pass_s: pass in which Slurm carries out a preemption with a grace time.
        mtbf_node_h: hours between two failures of one node.
        repair_s: seconds until it is back.
        lease_walltime_s: walltime of a lease.
        host_gb: host memory of a node that parked models may use, in 10^9 bytes.
        host_gb_per_s: host-to-GPU bandwidth of one GPU in 10^9 bytes a second.
        start_s: least and most seconds of a cold start.
    """

    gpus: int
    gpus_per_node: int = 8
    other_gpus: int = 0
    other_load: float = 0.6
    schedule_s: float = 2.0
    grace_s: float = 0.0
    kill_pass_s: float = 30.0
    mtbf_node_h: float = 4000.0
    repair_s: float = 3600.0
    lease_walltime_s: int = DAY_S
    host_gb: float = 1000.0
    host_gb_per_s: float = 25.0
    start_s: tuple[float, float] = (120.0, 300.0)


@dataclasses.dataclass(frozen=True, slots=True)
class Slo:
    """What callers are promised.

    Attributes:
        ttft_ms: interactive time to first token; `ttft_prompt`: for prompts up to so many tokens.
        tokens_per_s: speed of a stream.
        patience_s: seconds that a request may wait in the queue before it is refused.
    """

    ttft_ms: float = 500.0
    ttft_prompt: int = 4096
    tokens_per_s: float = 40.0
    patience_s: float = 30.0


@dataclasses.dataclass(frozen=True, slots=True)
class Traffic:
    """Requests over a day, over all models.

    Attributes:
        peak_rps: at the top of the curve.
        day_requests: in 24 hours; with the peak it gives the night's rate.
        peak_hour: hour of the day of the peak.
        sharpness: power of the raised cosine; larger is a narrower day.
        burst: standard deviation of the rate around the curve, correlated over a minute.
        spikes: sudden rises in a day; each lasts `spike_s` and multiplies one model's rate by `spike_factor`.
        prompt, output: mean tokens; `spread`: sigma of their log-normal; `prompt_most`, `output_most`: cut.
        cached: share of prompt tokens that prefix caches hold.
        trace: replay this file (CSV of Azure, JSONL of Mooncake) instead of the curve; `peak_rps`, `prompt`,
            `output` and `cached` are then what the site was sized for.
        speed: how many times faster a trace is replayed.
    """

    peak_rps: float = 0.0
    day_requests: float = 0.0
    peak_hour: float = 14.0
    sharpness: float = 4.0
    burst: float = 0.03
    spikes: int = 4
    spike_s: float = 60.0
    spike_factor: float = 1.3
    prompt: float = 2000.0
    output: float = 300.0
    spread: float = 0.8
    prompt_most: int = 32_768
    output_most: int = 4096
    cached: float = 0.0
    trace: str = ""
    speed: float = 1.0

    def curve(self, at_s: float) -> float:
        """Return requests/s at second ``at_s`` of the day."""
        phase = math.cos(2 * math.pi * (at_s / 3600 - self.peak_hour) / 24)
        shape: float = ((1 + phase) / 2) ** self.sharpness
        night = self.night()
        return self.peak_rps * (night + (1 - night) * shape)

    def night(self) -> float:
        """Return the least rate as a share of the peak, such that the day adds up."""
        mean = math.gamma(self.sharpness + 0.5) / (
            math.sqrt(math.pi) * math.gamma(self.sharpness + 1)
        )
        wanted = self.day_requests / DAY_S / self.peak_rps
        return (wanted - mean) / (1 - mean)

    @property
    def load(self) -> sizing.Load:
        """Return what one request brings."""
        return sizing.Load(self.prompt, self.output, self.cached)


@dataclasses.dataclass(frozen=True, slots=True)
class Batch:
    """A model's batch work.

    Attributes:
        share: batch work that comes in a day, as a share of the GPU-seconds that the whole fleet has.
        prompt, output: mean tokens of a line.
        deadline_h: hours from submission to its deadline.
        submit_hours: hours of the day at which jobs come; empty: spread evenly over the day.
    """

    share: float = 0.0
    prompt: float = 1000.0
    output: float = 300.0
    deadline_h: float = 24.0
    submit_hours: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Model:
    """A model and its engine.

    Attributes:
        share: of all requests; 0 for a model that only batch jobs use.
        seats: sequences that run at once.
        chunk: tokens computed in a step at most.
        floor: replicas kept warm whatever the demand.
        minimum, maximum: bounds of the autoscaler; maximum 0: as many as fit.
        shape, step: memory and step time.
        reference_decode, reference_prefill: tokens/s of a replica that a simple count would take; 0: none.
    """

    name: str
    shape: sizing.Shape
    step: sizing.StepTime
    share: float = 0.0
    seats: int = 256
    chunk: int = 2048
    floor: int = 1
    minimum: int = 0
    maximum: int = 0
    reference_decode: float = 0.0
    reference_prefill: float = 0.0
    batch: Batch = Batch()


@dataclasses.dataclass(frozen=True, slots=True)
class Scenario:
    """Everything about one simulated site; `hours` is how long it runs, `warmup_s` is not counted."""

    name: str
    fleet: Fleet
    traffic: Traffic
    models: tuple[Model, ...]
    slo: Slo = Slo()
    hours: float = 24.0
    start_hour: float = 0.0
    seed: int = 1

    def scaled(self, factor: float) -> "Scenario":
        """Return the same site with fleet and traffic times ``factor``."""
        node = self.fleet.gpus_per_node
        gpus = max(1, round(self.fleet.gpus * factor / node)) * node
        exact = gpus / self.fleet.gpus
        fleet = dataclasses.replace(
            self.fleet,
            gpus=gpus,
            # One node at least: a successor lease must find a place beside its predecessor.
            other_gpus=math.ceil(self.fleet.other_gpus * exact / node) * node,
        )
        traffic = dataclasses.replace(
            self.traffic,
            peak_rps=self.traffic.peak_rps * exact,
            day_requests=self.traffic.day_requests * exact,
        )
        models = tuple(
            dataclasses.replace(
                model,
                floor=math.ceil(model.floor * exact) if model.floor else 0,
                maximum=math.ceil(model.maximum * exact) if model.maximum else 0,
            )
            for model in self.models
        )
        return dataclasses.replace(self, fleet=fleet, traffic=traffic, models=models)


def load(path: Path) -> Scenario:
    """Read a scenario.

    Raises:
        ScenarioError: it can't be used, with the place.
    """
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ScenarioError(f"{path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ScenarioError(f"{path}: {error}") from error
    models = document.pop("models", [])
    if not isinstance(models, list) or not models:
        raise ScenarioError(f"{path}: [[models]]: at least one is needed")
    built = [_model(entry, f"{path}: [[models]] {n}") for n, entry in enumerate(models, 1)]
    parts = {
        "fleet": _table(Fleet, document.pop("fleet", {}), f"{path}: [fleet]"),
        "traffic": _table(Traffic, document.pop("traffic", {}), f"{path}: [traffic]"),
        "slo": _table(Slo, document.pop("slo", {}), f"{path}: [slo]"),
    }
    found = _table(Scenario, {**document, **parts, "models": tuple(built)}, str(path))
    _check(found, path)
    return found


def find(name: str) -> Path:
    """Return the file of a scenario: a path, or the name of one that ships with Forebay."""
    path = Path(name)
    if path.suffix == ".toml":
        return path
    shipped = SHIPPED / f"{name}.toml"
    if not shipped.is_file():
        known = ", ".join(sorted(found.stem for found in SHIPPED.glob("*.toml")))
        raise ScenarioError(f"{name}: no such scenario; give a .toml file or one of {known}")
    return shipped


def _model(entry: Any, where: str) -> Model:
    if not isinstance(entry, dict):
        raise ScenarioError(f"{where}: a table is wanted")
    parts = {
        "shape": _table(sizing.Shape, entry.pop("shape", {}), f"{where} shape"),
        "step": _table(sizing.StepTime, entry.pop("step", {}), f"{where} step"),
        "batch": _table(Batch, entry.pop("batch", {}), f"{where} batch"),
    }
    return _table(Model, {**entry, **parts}, where)


def _table(kind: type[T], values: Any, where: str) -> T:
    """Build a dataclass from a TOML table, checking names and types."""
    if not isinstance(values, dict):
        raise ScenarioError(f"{where}: a table is wanted")
    hints = typing.get_type_hints(kind)
    known = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type] # all are dataclasses
    given: dict[str, Any] = {}
    for key, value in values.items():
        if key not in known:
            raise ScenarioError(f"{where}: {key}: no such key; known are {', '.join(known)}")
        given[key] = _value(value, hints[key], f"{where}: {key}")
    missing = [
        name
        for name, field in known.items()
        if name not in given
        and field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ScenarioError(f"{where}: {missing[0]} is missing")
    return kind(**given)


def _value(value: Any, hint: Any, where: str) -> Any:
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if hint in {int, float, str}:
        if type(value) is not hint:
            raise ScenarioError(f"{where}: {value!r}: {hint.__name__} is wanted")
        if hint is not str and (not math.isfinite(value) or value < 0):
            raise ScenarioError(f"{where}: {value!r}: a finite number from 0 is wanted")
    elif isinstance(value, list):
        try:
            return tuple(float(item) for item in value)
        except (TypeError, ValueError) as error:
            raise ScenarioError(f"{where}: numbers are wanted") from error
    return value


def _check(found: Scenario, path: Path) -> None:
    total = sum(model.share for model in found.models)
    if abs(total - 1) > 1e-6:
        raise ScenarioError(f"{path}: [[models]] share: they add up to {total:g}, not 1")
    if len({model.name for model in found.models}) != len(found.models):
        raise ScenarioError(f"{path}: [[models]] name: two models bear one name")
    if len(found.fleet.start_s) != 2 or found.fleet.start_s[0] > found.fleet.start_s[1]:
        raise ScenarioError(f"{path}: [fleet] start_s: [least, most] seconds is wanted")
    for model in found.models:
        if model.shape.kv_tokens <= 0:
            raise ScenarioError(f"{path}: {model.name}: its weights do not fit into its GPUs")
        if model.shape.gpus > found.fleet.gpus_per_node:
            raise ScenarioError(f"{path}: {model.name}: a replica is larger than a node")
        if model.seats < 1 or model.chunk < 1:
            raise ScenarioError(f"{path}: {model.name}: seats and chunk: at least 1")
    traffic = found.traffic
    if not traffic.trace:
        if traffic.peak_rps <= 0:
            raise ScenarioError(f"{path}: [traffic] peak_rps: more than 0 is wanted")
        if not 0 <= traffic.night() <= 1:
            raise ScenarioError(
                f"{path}: [traffic] day_requests: a day with this peak and sharpness can't have so many"
            )
    if not 0 <= traffic.cached < 1:
        raise ScenarioError(f"{path}: [traffic] cached: a share below 1 is wanted")
