"""forebay.toml: types, lines at fault, the environment, and the documented example."""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from scheduler.contracts import fleet, requests, settings
from scheduler.runtime import config, config_text
from scheduler.runtime import settings as scheduler_settings


@dataclasses.dataclass(frozen=True)
class Web:
    host: str = settings.setting("127.0.0.1", "Where to listen.")
    port: int = settings.setting(8000, "Port.", least=1, most=65535)
    wait_s: float = settings.setting(1.5, "Pause.", unit="s", least=0)
    tiers: tuple[requests.Tier, ...] = settings.setting((), "Tiers.")
    folder: Path | None = settings.setting(None, "A folder.")
    extra: Mapping[str, Any] = settings.setting({}, "Anything.")
    quiet: bool = settings.setting(False, "No noise.")

    def __post_init__(self) -> None:
        if self.host == "0.0.0.0":
            raise ValueError("host 0.0.0.0 needs a key")


TABLES: dict[str, type] = {"web": Web, "scheduler": scheduler_settings.Settings}


def load(tmp_path: Path, text: str, env: Mapping[str, str] | None = None) -> config.Config:
    path = tmp_path / "forebay.toml"
    path.write_text(text)
    return config.load(path, TABLES, env or {})


def faults(tmp_path: Path, text: str, env: Mapping[str, str] | None = None) -> tuple[str, ...]:
    with pytest.raises(config.ConfigError) as caught:
        load(tmp_path, text, env)
    return tuple(fault.replace(str(tmp_path) + "/", "") for fault in caught.value.faults)


def test_without_a_file_the_defaults_hold() -> None:
    loaded = config.load(None, TABLES, {})
    assert loaded.table(Web) == Web()
    assert loaded.table(scheduler_settings.Settings).tick_s == 0.2
    assert loaded.models == ()


def test_values_become_the_declared_types(tmp_path: Path) -> None:
    loaded = load(
        tmp_path,
        '[web]\nport = 9\nwait_s = 2\ntiers = ["batch"]\nfolder = "/srv"\nextra = {a = [1, true]}\n',
    )
    assert loaded.table(Web) == Web(
        port=9,
        wait_s=2.0,
        tiers=(requests.Tier.BATCH,),
        folder=Path("/srv"),
        extra={"a": [1, True]},
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[web]\n\nprot = 1\n", "forebay.toml:3: [web] prot: unknown key; did you mean port?"),
        ("[wbe]\nport = 1\n", "forebay.toml:1: [wbe]: unknown table; did you mean web?"),
        (
            '# x\n[web]\nport = "80"\n',
            "forebay.toml:3: [web] port: Input should be a valid integer",
        ),
        ("[web]\nport = 0\n", "forebay.toml:2: [web] port: must be at least 1 (got 0)"),
        ("[web]\nwait_s = -1.0\n", "forebay.toml:2: [web] wait_s: must be at least 0 s (got -1.0)"),
        ('[web]\ntiers = ["x"]\n', "forebay.toml:2: [web] tiers: 0: Input should be 'interactive'"),
        ("[web]\nfolder = 2026-01-01\n", "forebay.toml:2: [web] folder: dates and times"),
        ('[web]\nhost = "0.0.0.0"\n', "forebay.toml:1: [web]: host 0.0.0.0 needs a key"),
        ("[web]\nport = \n", "forebay.toml:2: not valid TOML"),
        ("web = 3\n", "forebay.toml:1: web: must be a table: write [web]"),
        ("[models]\nname = 'x'\n", "forebay.toml:1: models: is a list: write [[models]]"),
        ("[[models]]\nseats = 1\n", "forebay.toml:1: [[models]] #1: name is missing"),
        (
            '[[models]]\nname="a"\nengine="simulated"\n[[models]]\nname="b"\nseat=3\n',
            "forebay.toml:6: [[models]] #2 seat: unknown key; did you mean seats?",
        ),
        (
            '[[models]]\nname="a"\nengine="simulated"\n[[models]]\nname="a"\nengine="simulated"\n',
            "forebay.toml:5: [[models]] #2 name: a v1 stands there twice",
        ),
        (
            '[[models]]\nname="a"\nengine="simulated"\nseats=2\nreserved_seats=3\n',
            "forebay.toml:1: [[models]] #1: reserved_seats 3 exceed seats 2",
        ),
    ],
)
def test_a_fault_names_its_line(tmp_path: Path, text: str, expected: str) -> None:
    assert faults(tmp_path, text)[0].startswith(expected)


def test_every_fault_is_told_at_once(tmp_path: Path) -> None:
    found = faults(tmp_path, "[web]\nport = 0\nquiet = 1\n[scheduler]\ntick = 1\n")
    assert [re.sub(r".*toml:(\d+).*", r"\1", fault) for fault in found] == ["2", "3", "5"]


def test_a_missing_file_and_bad_bytes_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(config.ConfigError, match="can't be read: No such file"):
        config.load(tmp_path / "none.toml", TABLES, {})
    (tmp_path / "bad.toml").write_bytes(b"[web]\nhost = '\xff'\n")
    with pytest.raises(config.ConfigError, match=r"bad\.toml:2: not UTF-8"):
        config.load(tmp_path / "bad.toml", TABLES, {})


def test_the_environment_overrides_the_file(tmp_path: Path) -> None:
    loaded = load(
        tmp_path,
        "[web]\nport = 1\n",
        {
            "FOREBAY_WEB_PORT": "77",
            "FOREBAY_WEB_HOST": "1234",
            "FOREBAY_WEB_QUIET": "true",
            "FOREBAY_WEB_TIERS": '["batch"]',
            "FOREBAY_LEASE_STARTED_US": "1",
        },
    )
    web = loaded.table(Web)
    assert (web.port, web.host, web.quiet) == (77, "1234", True)
    assert web.tiers == (requests.Tier.BATCH,)


def test_a_bad_variable_is_named(tmp_path: Path) -> None:
    found = faults(tmp_path, "", {"FOREBAY_WEB_PORT": "many", "FOREBAY_WEB_HOSTT": "x"})
    assert any(fault.startswith("environment: FOREBAY_WEB_PORT: ") for fault in found)
    assert "environment: FOREBAY_WEB_HOSTT: unknown; did you mean FOREBAY_WEB_HOST?" in found


@pytest.mark.parametrize(
    ("variable", "text", "why"),
    [
        ("PORT", "65536", "must be at most 65535 (got 65536)"),
        ("WAIT_S", "nan", "must be finite (got nan)"),
        ("WAIT_S", "inf", "must be finite (got inf)"),
        ("FOLDER", "", "must name a path (got nothing)"),
    ],
)
def test_values_that_mean_nothing(tmp_path: Path, variable: str, text: str, why: str) -> None:
    found = faults(tmp_path, "", {f"FOREBAY_WEB_{variable}": text})
    assert found == (f"environment: FOREBAY_WEB_{variable}: {why}",)


def test_a_model_becomes_a_spec(tmp_path: Path) -> None:
    loaded = load(
        tmp_path,
        '[[models]]\nname = "chat"\nweights = "/w"\ngpus = 4\nreplicas = 2\n'
        "[models.engine_args]\nmax-num-seqs = 4\nenforce-eager = true\n",
    )
    (model,) = loaded.models
    assert model.replicas == 2
    assert model.spec() == fleet.ReplicaSpec(
        model="chat",
        version="v1",
        engine=fleet.EngineKind.VLLM,
        weights="/w",
        engine_args={"max-num-seqs": 4, "enforce-eager": True},
        gpus=4,
    )


def test_the_example_states_every_default(tmp_path: Path) -> None:
    text = config_text.document(TABLES)
    assert load(tmp_path, text).tables == config.load(None, TABLES, {}).tables
    spoken = re.sub(r"^# ([a-z_]+ = )", r"\1", text, flags=re.MULTILINE)
    spoken = spoken.replace("# [[models]]", "[[models]]").replace('weights = ""', 'weights = "/w"')
    loaded = load(tmp_path, spoken)
    assert loaded.tables == config.load(None, TABLES, {}).tables
    assert loaded.models[0] == config.ModelSettings(name="...", weights="/w")
    for field in dataclasses.fields(scheduler_settings.Settings):
        assert f"# {field.name} = " in text
        assert field.metadata["doc"] in text
