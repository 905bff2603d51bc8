"""What a site declares of its models: profiles, models, versions, routes and adapters, typed.

A document is the whole of it, as `fctl apply` reads it and `fctl show` prints it. The registry keeps it in
entries, one for each thing that can change by itself; `entries` and `whole` turn the one into the other.
Nothing here looks beyond a single field's kind and range: what the parts say of each other is `checks`.
"""

from collections.abc import Mapping
from typing import Annotated, Any

import pydantic

from scheduler.contracts import fleet, requests
from scheduler.contracts import tuning as tunings

MOST = 10_000  # of anything: a slip must not flood the registry


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("must not contain control characters or line breaks")
    return text


Runner = requests.Runner
Text = Annotated[str, pydantic.Field(max_length=1024), pydantic.AfterValidator(_printable)]
Name = Annotated[
    str,
    pydantic.Field(min_length=1, max_length=256, pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/@+-]*$"),
]


class Frozen(pydantic.BaseModel):
    """Strict: a key that is not known is a slip, and "5" is no number."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)


class Profile(Frozen):
    """Hardware that replicas run on, as the site's Slurm names it.

    Attributes:
        gres_type: GPU type (`H100`); empty: any.
        gpus: of one replica; 0: it runs on CPUs, one to a lease.
        gres: instead of `gpus` a part of one GPU that others share: `shard:2`, `mps:50`.
        parts: of a GPU, as the site's gres.conf has it (shards of a GPU; 100 of mps); only with such a gres.
        memory_gb: host memory of one replica, in 10^9 bytes; 0: as the site has set.
        cpus: of one replica; 0: as the site has set.
        constraint: node features, as sbatch takes them.
        container: image that the engine runs in; empty: the site's own environment.
    """

    gres_type: Text = ""
    gpus: int = pydantic.Field(1, ge=0, le=1024)
    gres: Text = ""
    parts: int = pydantic.Field(0, ge=0, le=100_000)
    memory_gb: float = pydantic.Field(0.0, ge=0, le=1e6)
    cpus: int = pydantic.Field(0, ge=0, le=100_000)
    constraint: Text = ""
    container: Text = ""

    @pydantic.model_validator(mode="after")
    def _of_one_kind(self) -> "Profile":
        kind, _, count = self.gres.partition(":")
        if not self.gres:
            if self.parts:
                raise ValueError("parts: only with gres shard:N or mps:N; leave it out")
            return self
        if (
            kind not in {"shard", "mps"}
            or not count.isascii()
            or not count.isdigit()
            or not int(count)
        ):
            raise ValueError(f"gres {self.gres}: write shard:N or mps:N; whole GPUs are `gpus`")
        if kind == "shard" and self.parts < 2:
            raise ValueError("parts: missing: write how many shards a GPU has in gres.conf")
        if int(count) > (self.parts or 100):
            raise ValueError(
                f"gres {self.gres}: a GPU has {self.parts or 100} of them, and a job gets parts of one GPU; "
                "lower it, or take whole GPUs"
            )
        return self


class Version(Frozen):
    """One version of a model: how a replica of it is started.

    Attributes:
        runner: what it does: generate, embed, or classify.
        weights: folder (vllm), base URL (http), or a source that is staged.
        weights_digest: of the weights' manifest, which nodes insist on; empty: what the source has.
        tuning: engine settings that Forebay knows by type.
        dtype, quantization: as the engine names them; empty: as the weights say.
        quantization_approval: who allowed that quantization for this version, and where it is written down.
        tensor_parallel, pipeline_parallel: GPUs of a replica are their product, unless the profile says more.
        engine_args: the engine's long options without dashes.
        replicas, scaling, role, dedicated, itl_slo_ms, ttft_slo_ms: where they differ from the model's.
        adapter_slots: LoRA adapters that a replica may run in one batch; None: as many as the model has when
            it starts, at most `compiled.SLOTS`; 0: none.
        adapter_host: LoRA adapters that a replica holds ready in host memory; 0: as many as slots.
    """

    engine: fleet.EngineKind = fleet.EngineKind.VLLM
    runner: Runner = Runner.GENERATE
    weights: Text = ""
    weights_digest: Text = ""
    tuning: tunings.Tuning = tunings.Tuning()
    dtype: Text = ""
    quantization: Text = ""
    quantization_approval: Text = ""
    tensor_parallel: int = pydantic.Field(1, ge=1, le=1024)
    pipeline_parallel: int = pydantic.Field(1, ge=1, le=1024)
    max_context: int = pydantic.Field(2048, ge=1, le=100_000_000)
    engine_args: dict[str, Any] = {}
    seats: int = pydantic.Field(8, ge=1, le=100_000)
    reserved_seats: int = pydantic.Field(1, ge=0, le=100_000)
    gpus: int | None = pydantic.Field(None, ge=0, le=1024)
    replicas: int | None = pydantic.Field(None, ge=0, le=MOST)
    scaling: dict[str, int | float] | None = None
    role: fleet.Role | None = None
    dedicated: Text | None = None
    itl_slo_ms: float | None = pydantic.Field(None, ge=0.1)
    ttft_slo_ms: float | None = pydantic.Field(None, ge=0)
    adapter_slots: int | None = pydantic.Field(None, ge=0, le=1024)
    adapter_host: int = pydantic.Field(0, ge=0, le=100_000)


class Shadow(Frozen):
    """A version that gets copies of requests whose answers nobody sees."""

    version: Name
    percent: int = pydantic.Field(ge=1, le=100)


class Pool(Frozen):
    """Prompts from so many tokens on go to a version of their own: on more GPUs, with a longer context."""

    from_tokens: int = pydantic.Field(ge=1, le=100_000_000)
    version: Name


class Route(Frozen):
    """Which versions answer, by percent; what is as long as a pool asks for goes to the pool's version."""

    versions: dict[Name, Annotated[int, pydantic.Field(ge=0, le=100)]] = {}
    shadow: Shadow | None = None
    pools: list[Pool] = pydantic.Field([], max_length=16)


class Adapter(Frozen):
    """A LoRA adapter on a model.

    Attributes:
        path: its folder, within one of the site's adapter folders.
        rank: of its matrices; 0: as the files say.
        team: who alone may use it; empty: whoever may use the model.
        preload: loaded before anybody asks.
        versions: of the model that it fits; none: all.
    """

    path: Text
    rank: int = pydantic.Field(0, ge=0, le=4096)
    team: Text = ""
    preload: bool = False
    versions: list[Name] = []


class Model(Frozen):
    """A served name: its endpoint, its versions, its route and its adapters.

    Attributes:
        profile: hardware of its replicas; empty: `gpus` of each version.
        tiers: offered.
        callers: teams that may use it; empty: all.
        replicas, scaling: how many replicas of a version that takes traffic, see `autoscale.Scaling`.
        role: what a replica takes in calm.
        dedicated: team that pays for idle replicas; empty: everybody.
        itl_slo_ms: inter-token latency promised, ms.
        ttft_slo_ms: time to first token promised, ms; 0: the site's ([scheduler] ttft_slo_ms).
    """

    profile: Text = ""
    tiers: list[requests.Tier] = list(requests.Tier)
    callers: list[Name] = []
    replicas: int = pydantic.Field(1, ge=0, le=MOST)
    scaling: dict[str, int | float] = {}
    role: fleet.Role = fleet.Role.SHARED
    dedicated: Text = ""
    itl_slo_ms: float = pydantic.Field(25.0, ge=0.1)
    ttft_slo_ms: float = pydantic.Field(0.0, ge=0)
    versions: dict[Name, Version] = {}
    route: Route = Route()
    adapters: dict[Name, Adapter] = {}


class Document(Frozen):
    """All that is declared."""

    models: dict[Name, Model] = {}
    profiles: dict[Name, Profile] = {}


Key = tuple[str, str, str]  # kind, model ("" for a profile), name ("" for a model or its route)
Entries = Mapping[Key, Mapping[str, Any]]
KINDS: Mapping[str, type[Frozen]] = {
    "profile": Profile,
    "model": Model,
    "version": Version,
    "route": Route,
    "adapter": Adapter,
}
_PARTS = frozenset({"versions", "route", "adapters"})


def entries(document: Document) -> dict[Key, dict[str, Any]]:
    """Return a document's entries; what is as by default is left out of each."""
    found: dict[Key, dict[str, Any]] = {}
    for name, profile in document.profiles.items():
        found["profile", "", name] = _json(profile)
    for name, model in document.models.items():
        found["model", name, ""] = {
            key: value for key, value in _json(model).items() if key not in _PARTS
        }
        found["route", name, ""] = _json(model.route)
        for version, each in model.versions.items():
            found["version", name, version] = _json(each)
        for adapter, one in model.adapters.items():
            found["adapter", name, adapter] = _json(one)
    return found


def whole(found: Entries) -> Document:
    """Return the document that entries make up, without what only a newer release can read (`unread`)."""
    try:
        return _whole(found)
    except pydantic.ValidationError:
        unknown = unread(found)
        return _whole({key: body for key, body in found.items() if owner(key) not in unknown})


def unread(found: Entries) -> dict[tuple[str, str], str]:
    """Return the models and profiles that only a newer release can read, and why, as one line.

    A model is read whole or not at all, and with its profile: part of it would be another model.
    """
    faults: dict[tuple[str, str], str] = {}
    for key, body in sorted(found.items()):
        if key[0] not in KINDS:
            continue
        kind = KINDS[key[0]]
        try:
            kind.model_validate(_known(kind, body))
        except pydantic.ValidationError as error:
            faults.setdefault(owner(key), fault(error, key_text(key)))
    for key, body in found.items():
        profile = ("profile", str(body.get("profile")))
        if key[0] == "model" and profile in faults:
            faults.setdefault(owner(key), faults[profile])
    return faults


def owner(key: Key) -> tuple[str, str]:
    """Return the model or the profile that an entry is part of: its kind and name."""
    kind, model, name = key
    return ("profile", name) if kind == "profile" else ("model", model)


def _whole(found: Entries) -> Document:
    models: dict[str, dict[str, Any]] = {
        model: {**_known(Model, body), "versions": {}, "adapters": {}, "route": {}}
        for (kind, model, _), body in found.items()
        if kind == "model"
    }
    profiles: dict[str, Any] = {}
    for (kind, model, name), body in sorted(found.items()):
        if kind == "profile":
            profiles[name] = _known(Profile, body)
        elif kind == "version":
            models[model]["versions"][name] = _known(Version, body)
        elif kind == "adapter":
            models[model]["adapters"][name] = _known(Adapter, body)
        elif kind == "route":
            models[model]["route"] = _known(Route, body)
    return Document.model_validate({"models": models, "profiles": profiles})


def key_text(key: Key) -> str:
    """Return how people name an entry: `version chat v2`."""
    return " ".join(part for part in key if part)


def fault(error: pydantic.ValidationError, where: str = "") -> str:
    """Return a validation's first fault as one line: where, what, and what came."""
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"] if part != "[key]")
    label = ".".join(part for part in (where, place) if part) or "document"
    got = repr(first.get("input"))
    message = str(first["msg"]).removeprefix("Value error, ")
    return f"{label}: {message} (got {got if len(got) <= 60 else got[:57] + '...'})"


def _json(model: Frozen) -> dict[str, Any]:
    found: dict[str, Any] = model.model_dump(mode="json", exclude_defaults=True)
    return found


def _known(kind: type[Frozen], body: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in body.items() if key in kind.model_fields}
