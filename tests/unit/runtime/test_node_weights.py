"""Weights on nodes: what is staged ahead of need, what admins ask for, and what they are shown."""

import io
import json

import pytest

from engines import settings
from engines.agent import shelf
from engines.weights import stager
from scheduler.contracts import fleet, ids, requests, weights
from scheduler.contracts.v1 import control_pb2 as pb
from scheduler.core import autoscale, prestage, snapshot
from scheduler.runtime import commands, config, entries, live, node_weights
from scheduler.runtime.registry import weight_acts
from tests.unit.runtime import adminsite

site = adminsite.site  # the fixture
VLLM = fleet.EngineKind.VLLM


def spec(model: str, version: str = "v1", *, place: str = "", gpus: int = 1) -> fleet.ReplicaSpec:
    return fleet.ReplicaSpec(
        model, version, VLLM, place or f"s3://models/{model}/{version}", gpus=gpus
    )


def test_what_may_start_there_is_staged_the_likeliest_first() -> None:
    scaled = autoscale.Scaling()
    deployments = [
        snapshot.Deployment(spec("chat"), 8),
        snapshot.Deployment(
            spec("chat", "v2"), 9
        ),  # a rollout's next version: no part of the route yet
        snapshot.Deployment(spec("code"), 2),
        snapshot.Deployment(spec("idle"), 0),
        snapshot.Deployment(spec("to-zero"), 0, scaling=scaled),
        snapshot.Deployment(spec("large", gpus=4), 9),
        snapshot.Deployment(spec("shared", place="/shared/m"), 9),
        snapshot.Deployment(spec("twin", place="s3://models/code/v1"), 1),
    ]
    routes = {"chat": fleet.Route("chat", {"v1": 100, "v2": 0})}
    found = prestage.wanted(deployments, routes, 2, 9)
    assert [(one.model, one.version) for one in found] == [
        ("chat", "v1"), ("code", "v1"), ("to-zero", "v1"), ("chat", "v2"),
    ]  # fmt: skip
    assert prestage.wanted(deployments, routes, 2, 1) == found[:1]
    assert prestage.wanted(deployments, routes, 4, 1)[0].model == "large"


def lease(name: str, started_us: int = 10) -> fleet.Lease:
    return fleet.Lease(
        ids.LeaseId(name),
        "c",
        fleet.LeaseKind.SERVE,
        "t",
        fleet.LeaseState.RUNNING,
        2,
        started_us=started_us,
    )


def report(name: str, node: str, **done: str) -> pb.LeaseReport:
    held = pb.HeldWeights(uri="s3://models/chat/v1", state="staged", size=7, users=1)
    return pb.LeaseReport(lease_id=name, node=node, weights=[held], weights_done=done)


def test_an_act_is_done_once_on_a_node_and_not_by_leases_that_came_after() -> None:
    known = node_weights.NodeWeights(most=4)
    for name, node in (("l-1", "n1"), ("l-2", "n1"), ("l-3", "n2")):
        known.absorb(report(name, node))
    known.acts = (node_weights.Act("w-1", "rm", "s3://models/chat/v1", "", "", 20),)

    def acts(name: str, started_us: int = 10) -> list[str]:
        desired = pb.LeaseDesired()
        known.fill(desired, lease(name, started_us), [snapshot.Deployment(spec("chat"), 1)], {})
        assert [one.uri for one in desired.stage] == ["s3://models/chat/v1"]
        return [act.act_id for act in desired.weights_acts]

    assert [acts(name) for name in ("l-1", "l-2", "l-3")] == [["w-1"], [], ["w-1"]]
    assert acts("l-3", started_us=30) == []
    known.absorb(report("l-1", "n1", **{"w-1": "removed"}))
    assert acts("l-1") == []
    assert known.fact()["done"] == {"w-1": {"n1": "removed"}}
    assert known.fact()["nodes"]["n1"][0]["users"] == 1
    known.acts = (node_weights.Act("w-2", "verify", "s3://models/chat/v1", "", "n2", 20),)
    assert [acts(name) for name in ("l-1", "l-3")] == [[], ["w-2"]]
    known.keep([ids.LeaseId("l-3")])
    assert list(known.fact()["nodes"]) == ["n2"]
    assert known.over(20 + node_weights.ACT_KEPT_US + 1) == ["w-2"]


def fctl(site: adminsite.Site, *words: str) -> tuple[int, str]:
    out, err = io.StringIO(), io.StringIO()
    code = commands.fctl(["weights", *words], api=adminsite.SiteApi(site), out=out, err=err)
    return code, out.getvalue() + err.getvalue()


def test_an_admin_asks_and_sees_what_came_of_it(site: adminsite.Site) -> None:
    model = config.ModelSettings(name="big", weights="s3://models/big")
    site.registry.catalog.declare([adminsite.CHAT, adminsite.CODE, model], 2)
    assert fctl(site, "list") == (0, "no weights on any node's disk\n")
    code, told = fctl(site, "stage", "big", "--node", "n1")
    assert (code, told) == (
        1,
        "fctl: error: n1: Forebay holds no lease there; it holds some on: none\n",
    )
    code, told = fctl(site, "stage", "big")
    assert code == 0
    assert told.startswith("stage s3://models/big on every node with a lease: asked (w")
    acts = weight_acts.WeightActs(site.registry.database).all()
    assert [(act.act, act.uri) for act in acts] == [("stage", "s3://models/big")]
    shown = json.loads(fctl(site, "list", "--json")[1])
    assert shown["asked"][0]["act_id"] == acts[0].act_id
    assert "stage s3://models/big on every node: asked" in fctl(site, "list")[1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("stage", "nothing"), "nothing: not deployed here"),
        (("stage", "http://host/m"), "write file:///folder, s3://bucket/prefix"),
        (("rm", "s3://key:secret@bucket/m"), "a credential in a name would be in every log"),
        (("verify", "chat"), "never staged: name them as file://, s3:// or hf://"),
        (("list", "n9"), "n9: no lease there"),
    ],
)
def test_what_is_refused(site: adminsite.Site, words: tuple[str, ...], said: str) -> None:
    code, told = fctl(site, *words)
    assert code == 1
    assert said in told
    assert told.count("\n") == 1


def test_only_admins_ask(site: adminsite.Site) -> None:
    site.caller = requests.Caller("t", "u", "k", (requests.Tier.BATCH,))
    assert "is no admin" in fctl(site, "rm", "s3://models/big")[1]
    assert fctl(site, "list")[0] == 0


async def test_the_agent_stages_in_the_brokers_order_and_acts_first() -> None:
    kept = shelf.Shelf(settings.EnginesSettings(), lambda: None)
    one, two = pb.Weights(uri="s3://m/a"), pb.Weights(uri="s3://m/b", digest="d")
    kept.take(pb.LeaseDesired(stage=[one, two]))
    assert kept._next() == (None, one)
    act = pb.WeightsAct(act_id="w-1", act="rm", weights=two)
    kept.take(pb.LeaseDesired(stage=[one, two], weights_acts=[act]))
    assert kept._next() == (act, two)
    kept.take(pb.LeaseDesired(stage=[one, two]))  # the leader has forgotten it
    kept.held = (
        weights.Held("s3://m/a", "x", "staged", 1),
        weights.Held("s3://m/b", "y", "staged", 1),
    )
    assert kept._next() == (None, two), "other weights than the version wants"
    kept._given_up["s3://m/b"] = "the store does not answer"
    assert kept._next() is None
    assert [(item.state, item.reason) for item in kept.report()][:2] == [
        ("staged", ""),
        ("staged", ""),
    ]


async def test_a_staging_that_failed_says_why_and_no_longer_how_far_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = shelf.Shelf(settings.EnginesSettings(), lambda: None)
    item = pb.Weights(uri="s3://m/a")

    async def fetch(uri: str, digest: str, told: stager.Told, **more: bool) -> dict[str, float]:
        told("staging s3://m/a: 1.00 of 2.00 GB")
        raise stager.Refused("access denied")

    async def look() -> None:
        return None

    monkeypatch.setattr(kept._stager, "fetch", fetch)
    monkeypatch.setattr(kept, "_look", look)
    await kept._do(None, item)
    assert [(one.state, one.reason) for one in kept.report()] == [("waiting", "access denied")]


def test_an_act_is_not_done_again_because_its_agent_tells_newer_ones_only() -> None:
    known = node_weights.NodeWeights()
    known.acts = (node_weights.Act("w-1", "rm", "s3://models/chat/v1", "", "", 20),)
    known.absorb(report("l-1", "n1", **{"w-1": "removed"}))
    known.absorb(report("l-1", "n1", **{"w-2": "removed"}))
    desired = pb.LeaseDesired()
    known.fill(desired, lease("l-1"), [], {})
    assert not desired.weights_acts
    assert known.fact()["done"]["w-1"] == {"n1": "removed"}
    known.acts = ()
    known.absorb(report("l-1", "n1"))
    assert known.fact()["done"] == {}  # over, so forgotten


def test_a_lease_hears_what_to_stage_and_what_it_reports_is_known() -> None:
    picture = live.Live(7, "c", entries.Pauses(1, 60), 0.0)
    picture.weights.most = 2
    held = lease("l-1")
    picture.leases[held.lease_id] = entries.LeaseEntry(held, since=0.0)
    picture.deployments = (snapshot.Deployment(spec("chat"), 1),)
    desired = picture.desired(held.lease_id)
    assert desired is not None
    assert [(one.uri, one.model) for one in desired.stage] == [("s3://models/chat/v1", "chat")]
    assert picture.absorb_report(report("l-1", "n1"), 1.0)
    assert picture.weights.fact()["nodes"]["n1"][0]["state"] == "staged"
