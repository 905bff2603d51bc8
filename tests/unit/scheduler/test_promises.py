"""What a model promises of its answers goes before what the site aims at."""

import dataclasses
from typing import Any

import pytest

from scheduler.contracts import fleet, observed, wire
from scheduler.core import autoscale, ladder, members, roles
from scheduler.runtime import config, settings
from scheduler.runtime.models import compiled, document, imported
from tests.unit.scheduler import plans


@dataclasses.dataclass(frozen=True)
class Settings:
    ttft_slo_ms: float = 500.0
    itl_slo_ms: float = 25.0
    scale_fill: float = 0.6
    scale_down_s: float = 300.0
    pressure_ticks: int = 1
    calm_s: float = 30.0


def need(**changes: Any) -> int:
    """Return the replicas that two serving ones need under pressure that lasts."""
    signal = autoscale.Signal(serving=2, in_flight=1, seats=8)
    memory = None
    for now in (0.0, 2 * autoscale.LASTING_S):
        found = autoscale.need(
            autoscale.Scaling(maximum=10),
            dataclasses.replace(signal, **changes),
            memory,
            now,
            Settings(),
        )
        memory = found.memory
    return found.replicas


def test_the_autoscaler_goes_by_the_models_own() -> None:
    assert need(ttft_ms=400.0) == 3
    assert need(ttft_ms=400.0, ttft_slo_ms=2000.0) == 2
    assert need(ttft_ms=100.0) == 2
    assert need(ttft_ms=100.0, ttft_slo_ms=150.0) == 3
    assert need(itl_ms=100.0) == 3
    assert need(itl_ms=100.0, itl_slo_ms=1000.0) == 2


def test_so_does_the_ladder() -> None:
    for slo_ms, turned in ((0.0, 1), (2000.0, 0), (150.0, 1)):
        signal = ladder.Signal(0.4, 0, 2, slo_ms)
        assert ladder.step(None, signal, 0.0, Settings()).interactive == turned
    assert ladder.step(None, ladder.Signal(0.1, 0, 2, 150.0), 0.0, Settings()).interactive == 1


@pytest.mark.parametrize(
    ("promised", "turned"),
    [((0.0, 0.0), 1), ((0.0, 5000.0), 1), ((5000.0, 5000.0), 0), ((5000.0, 150.0), 1)],
)
def test_the_ladder_goes_by_the_strictest_of_a_models_versions(
    promised: tuple[float, float], turned: int
) -> None:
    """A lenient version took the site's promise away from those that say nothing of their own."""
    stats = fleet.ReplicaStats(at_us=1, interactive=1, seats=8)
    specs = [
        dataclasses.replace(plans.spec(), version=name, ttft_slo_ms=slo_ms)
        for name, slo_ms in zip(("v1", "v2"), promised, strict=True)
    ]
    serving = []
    for number, spec in enumerate(specs, start=1):
        known = plans.known(number, plans.slot(number))
        replica = dataclasses.replace(known.replica, spec=spec, stats=stats)
        serving.append(dataclasses.replace(known, replica=replica, stats_age_s=0.0))
    snap = plans.picture(
        leases=tuple(plans.held(number) for number in (1, 2)),
        replicas=tuple(serving),
        deployments=tuple(dataclasses.replace(plans.deployment(), spec=spec) for spec in specs),
        demand={"chat": observed.Demand("chat", {}, {"interactive": 2}, 0.0, (400.0,))},
    )
    options = settings.Settings(pressure_ticks=1, ttft_slo_ms=500.0)
    _, memory = roles.roles(snap, options, members.counted(snap), {}, [])
    assert memory["chat"].interactive == turned


def test_it_is_declared_with_the_model_or_one_version() -> None:
    versions = {"v1": document.Version(), "v2": document.Version(ttft_slo_ms=90.0)}
    model = document.Model(ttft_slo_ms=200.0, versions=versions)
    found = [compiled.spec("m", name, model, None) for name in versions]
    assert [spec.ttft_slo_ms for spec in found] == [200.0, 90.0]
    assert [wire.spec_from_pb(wire.spec_to_pb(spec)) for spec in found] == found
    line = config.ModelSettings(name="m", engine=fleet.EngineKind.SIMULATED, ttft_slo_ms=300.0)
    whole = document.whole(imported.of_file([line]))
    assert compiled.spec("m", "v1", whole.models["m"], None).ttft_slo_ms == 300.0
