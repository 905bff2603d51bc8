"""A real agent keeps its node's weights as the broker and admins want them, with no replica there."""

from pathlib import Path

from scheduler.contracts import weights
from scheduler.contracts.v1 import control_pb2 as pb
from tests.integration import lease_site
from tests.unit.weights import places


async def test_it_stages_ahead_of_need_verifies_and_removes(tmp_path: Path) -> None:
    place = f"file://{places.model(tmp_path / 'm')}"
    other = f"file://{tmp_path}/unmounted/m"
    disk = tmp_path / "disk"
    options = {"weights_dir": str(disk), "weights_reserve_gb": 0.0}
    async with lease_site.opened(tmp_path, **options) as site:  # type: ignore[arg-type]
        wanted = [pb.Weights(uri=other), pb.Weights(uri=place)]

        def want(*acts: tuple[str, str]) -> None:
            site.revision += 1
            site.broker.want(
                pb.LeaseDesired(
                    epoch=1,
                    revision=site.revision,
                    lease_id=site.lease_id,
                    stage=wanted,
                    weights_acts=[
                        pb.WeightsAct(act_id=act_id, act=act, weights=pb.Weights(uri=place))
                        for act_id, act in acts
                    ],
                )
            )

        want()
        report = await site.broker.until(lambda r: _state(r, place) == "staged")
        assert _state(report, other) == "waiting"
        assert (
            "is its file system mounted" in next(w for w in report.weights if w.uri == other).reason
        )
        want(("w-1", "verify"))
        report = await site.broker.until(lambda r: "w-1" in r.weights_done)
        assert report.weights_done["w-1"].startswith("whole, ")

        shard = next((disk / "models" / weights.key(place)).glob("*.safetensors"))
        shard.write_bytes(shard.read_bytes()[:-1] + b"?")
        want(("w-2", "verify"))
        report = await site.broker.until(lambda r: "w-2" in r.weights_done)
        assert f"{shard.name} is damaged on this disk: removed" in report.weights_done["w-2"]
        assert _state(report, place) != "staged"
        await site.broker.until(lambda r: _state(r, place) == "staged")  # anew, since it is wanted

        wanted.clear()
        want(("w-3", "rm"))
        report = await site.broker.until(lambda r: r.weights_done.get("w-3") == "removed")
        await site.broker.until(lambda r: not _state(r, place))
        assert not list((disk / "models").iterdir())
        want(("w-4", "rm"))
        report = await site.broker.until(lambda r: "w-4" in r.weights_done)
        assert report.weights_done["w-4"].endswith("not on this node's disk")


def _state(report: pb.LeaseReport, uri: str) -> str:
    return next((item.state for item in report.weights if item.uri == uri), "")
