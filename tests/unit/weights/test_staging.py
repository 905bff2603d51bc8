"""Staging: whole or not at all, resumed, checked, one at a time, within the disk's budget."""

import json
import os
import random
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from engines.weights import examine, process, sources, staging, store, task
from scheduler.contracts import weights
from tests.unit.weights import places

CHUNK = 256


def staged(
    place: Path, root: Path, source: sources.Source | None = None, **order: object
) -> staging.Done:
    made = task.Order(f"file://{place}", chunk=CHUNK, parallel=2, **order)  # type: ignore[arg-type]
    return staging.Staging(made, source or sources.Folder(place), store.Store(root)).run()


def same(place: Path, folder: Path) -> bool:
    names = [path.name for path in place.iterdir() if path.name != weights.MANIFEST]
    return all((folder / name).read_bytes() == (place / name).read_bytes() for name in names)


def test_what_is_staged_is_what_lies_at_the_place_and_is_used_without_it(tmp_path: Path) -> None:
    place, root = places.model(tmp_path / "m"), tmp_path / "disk"
    source = places.Flaky(place)
    done = staged(place, root, source)
    where = store.Store(root)
    assert same(place, where.models(done.key))
    assert done.fetched == done.size == sum(path.stat().st_size for path in place.iterdir())
    kept = weights.Manifest.read((where.models(done.key) / weights.MANIFEST).read_bytes(), "kept")
    assert kept.digest == done.digest
    source.down = True
    again = staged(place, root, source)
    assert (again.key, again.digest, again.fetched, again.size) == (
        done.key,
        done.digest,
        0,
        done.size,
    )


def test_a_killed_staging_publishes_nothing_torn_and_goes_on(tmp_path: Path) -> None:
    """Twenty points, seeded: every step between a read and the last rename may be the one."""
    place = places.model(tmp_path / "m")
    random.seed(7)
    steps = 0

    def count(name: str) -> None:
        nonlocal steps
        steps += 1

    order = task.Order(f"file://{place}", chunk=CHUNK, parallel=1)
    staging.Staging(order, sources.Folder(place), store.Store(tmp_path / "count"), step=count).run()
    points = sorted(random.sample(range(1, steps + 1), min(20, steps)))
    assert len(points) == 20
    arguments = [str(place), str(tmp_path), *map(str, points)]
    told = subprocess.run(
        [sys.executable, "-P", "-c", _VICTIMS, *arguments],
        check=True,
        capture_output=True,
        text=True,
    )
    assert told.stdout.split() == ["9"] * len(points)
    for point in points:
        where = store.Store(tmp_path / f"d{point}")
        if where.published(order.key):
            assert same(place, where.models(order.key)), f"torn at step {point}"
        source = places.Flaky(place)
        done = staging.Staging(order, source, where).run()
        assert same(place, where.models(order.key)), point
        assert not list((where.root / "staging").iterdir())
        assert done.fetched <= done.size - CHUNK * max(0, point // 4 - 4), "it begins anew"


_VICTIMS = """
import os, signal, sys
from pathlib import Path
from engines.weights import sources, staging, store, task
place, folder = Path(sys.argv[1]), Path(sys.argv[2])
order = task.Order(f"file://{place}", chunk=256, parallel=1)
def victim(point):
    left = [point]
    def step(name):
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
    where = store.Store(folder / f"d{point}")
    staging.Staging(order, sources.Folder(place), where, step=step).run()
for point in map(int, sys.argv[3:]):
    pid = os.fork()
    if pid == 0:
        victim(point)
        os._exit(0)
    print(os.waitpid(pid, 0)[1])
"""


def test_only_one_stages_and_all_have_it(tmp_path: Path) -> None:
    place, root = places.model(tmp_path / "m"), tmp_path / "disk"
    source = places.Flaky(place)
    found: list[staging.Done] = []
    every = [
        threading.Thread(target=lambda: found.append(staged(place, root, source))) for _ in range(4)
    ]
    for one in every:
        one.start()
    for one in every:
        one.join()
    assert sorted(done.fetched > 0 for done in found) == [False, False, False, True]


def test_a_range_that_rots_on_the_disk_is_fetched_again(tmp_path: Path) -> None:
    place, root = places.model(tmp_path / "m"), tmp_path / "disk"
    where = store.Store(root)
    order = task.Order(f"file://{place}", chunk=CHUNK, parallel=1)

    class Stop(Exception):
        pass

    def stop(name: str) -> None:
        if name == "hashed":
            raise Stop

    with pytest.raises(Stop):
        staging.Staging(order, sources.Folder(place), where, step=stop).run()
    victim = next(where.staging(order.key).glob("*.safetensors"))
    whole = bytearray(victim.read_bytes())
    whole[-1] ^= 1
    victim.write_bytes(bytes(whole))
    done = staging.Staging(order, sources.Folder(place), where).run()
    assert 0 < done.fetched <= CHUNK
    assert same(place, where.models(done.key))


def test_a_place_that_has_changed_is_not_mixed_with_what_came_before(tmp_path: Path) -> None:
    place, root = places.model(tmp_path / "m"), tmp_path / "disk"
    where = store.Store(root)
    order = task.Order(f"file://{place}", chunk=CHUNK, parallel=1)

    def stop(name: str) -> None:
        if name == "synced":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        staging.Staging(order, sources.Folder(place), where, step=stop).run()
    shard = place / "model-00002-of-00003.safetensors"
    shard.write_bytes(places.shard(dict(list(places.tensors().items())[1::3]), 99))
    staging.Staging(order, sources.Folder(place), where).run()
    assert same(place, where.models(order.key))


def test_a_place_that_changes_while_it_is_read_is_not_published_mixed(tmp_path: Path) -> None:
    """Without a manifest nothing else tells: half of each of two versions has a good checksum of its own."""
    place, root = places.model(tmp_path / "m"), tmp_path / "disk"
    where = store.Store(root)
    order = task.Order(f"file://{place}", chunk=CHUNK, parallel=1)
    shard = place / "model-00001-of-00003.safetensors"
    size = shard.stat().st_size
    changed: list[str] = []

    def change(name: str) -> None:
        if name == "hashed" and not changed:
            changed.append(name)
            shard.write_bytes(places.shard(dict(list(places.tensors().items())[0::3]), 99))

    with pytest.raises(sources.SourceDown, match=r"model-00001.* changed while it was read"):
        staging.Staging(order, sources.Folder(place), where, step=change).run()
    assert shard.stat().st_size == size
    assert not where.published(order.key)
    done = staging.Staging(order, sources.Folder(place), where, step=change).run()
    assert 0 < done.fetched <= size + CHUNK
    assert same(place, where.models(order.key))


def test_two_stagings_at_once_do_not_both_count_on_the_same_room(tmp_path: Path) -> None:
    """Each saw the other's first bytes alone, and both ended on a full disk."""
    root = tmp_path / "disk"
    first, second = (places.model(tmp_path / name) for name in ("a", "b"))
    for place in (first, second):
        (place / "more.safetensors").write_bytes(places.shard({"more": (1 << 18,)}))
    whole = sum(path.stat().st_size for path in first.iterdir())
    budgeted = {"parallel": 1, "budget": whole + whole // 2}
    one, two = (task.Order(f"file://{place}", **budgeted) for place in (first, second))  # type: ignore[arg-type]
    other: list[str] = []

    def begins(name: str) -> None:
        if name == "begin":
            with pytest.raises(staging.NoRoom, match="in use") as told:
                staging.Staging(two, sources.Folder(second), store.Store(root)).run()
            other.append(str(told.value))

    done = staging.Staging(one, sources.Folder(first), store.Store(root), step=begins).run()
    assert done.fetched == whole
    assert len(other) == 1


def test_a_pipe_among_the_weights_is_refused_and_never_waited_for(tmp_path: Path) -> None:
    place, root = places.model(tmp_path / "m"), tmp_path / "disk"
    (place / "config.json").unlink()
    os.mkfifo(place / "config.json")
    with pytest.raises(weights.WeightsError, match=r"config\.json: is no file"):
        staged(place, root)
    with pytest.raises(sources.SourceDown, match="Illegal seek"):
        sources.Folder(place).read("config.json", 0, 1)


def _manifest(place: Path) -> weights.Manifest:
    made = examine.manifest(sources.Folder(place), str(place))
    (place / weights.MANIFEST).write_text(made.text())
    return made


def test_a_transfer_that_goes_wrong_once_is_mended_by_the_manifest(tmp_path: Path) -> None:
    place, root = places.model(tmp_path / "m"), tmp_path / "disk"
    said = _manifest(place)
    source = places.Flaky(place)
    source.damage["model-00001-of-00003.safetensors"] = 3
    done = staged(place, root, source)
    assert done.digest == said.digest
    assert same(place, store.Store(root).models(done.key))


def test_a_place_that_stays_wrong_is_refused_with_the_file(tmp_path: Path) -> None:
    place, root = places.model(tmp_path / "m"), tmp_path / "disk"
    _manifest(place)
    source = places.Flaky(place)
    source.damage["model-00001-of-00003.safetensors"] = 1000
    with pytest.raises(
        weights.WeightsError,
        match=r"model-00001-of-00003.safetensors: its SHA-256 is .*upload it again",
    ):
        staged(place, root, source)
    assert not list((root / "models").iterdir())


def test_other_weights_than_the_version_was_registered_with_are_refused(tmp_path: Path) -> None:
    place, root = places.model(tmp_path / "m"), tmp_path / "disk"
    right = _manifest(place).digest
    assert staged(place, root, digest=right).digest == right
    with pytest.raises(weights.WeightsError, match="somebody has changed the files"):
        staged(place, root, digest="0" * 64)
    (place / weights.MANIFEST).unlink()  # known only once everything is fetched
    with pytest.raises(weights.WeightsError, match="somebody has changed the files"):
        staged(place, root, digest="1" * 64)
    assert len(list((root / "models").iterdir())) == 1
    assert not list((root / "staging").iterdir())


def test_a_manifest_that_names_what_is_not_there_is_refused_before_a_transfer(
    tmp_path: Path,
) -> None:
    place, root = places.model(tmp_path / "m"), tmp_path / "disk"
    _manifest(place)
    (place / "model-00003-of-00003.safetensors").unlink()
    source = places.Flaky(place)
    with pytest.raises(weights.WeightsError, match=r"model-00003-of-00003.safetensors is missing"):
        staged(place, root, source)
    assert {name for name, _, _ in source.reads} == {weights.MANIFEST}


def test_a_manifest_does_not_let_code_in(tmp_path: Path) -> None:
    place, root = places.model(tmp_path / "m"), tmp_path / "disk"
    (place / "modeling.py").write_text("import os")
    said = _manifest(place)
    assert "modeling.py" not in {file.name for file in said.files}
    bad = weights.Manifest((*said.files, weights.File("modeling.py", 9, "0" * 64)))
    (place / weights.MANIFEST).write_text(bad.text())
    with pytest.raises(weights.WeightsError, match=r"modeling.py is never staged"):
        staged(place, root)
    tampered = json.loads(said.text())
    tampered["files"][0]["name"] = "../escape"
    (place / weights.MANIFEST).write_text(json.dumps(tampered))
    with pytest.raises(weights.WeightsError, match="no name of a file"):
        staged(place, root)


def test_the_longest_unused_leaves_and_what_is_in_use_stays(tmp_path: Path) -> None:
    root = tmp_path / "disk"
    where = store.Store(root)
    first, second, third = (places.model(tmp_path / name) for name in ("a", "b", "c"))
    one, two = staged(first, root), staged(second, root)
    size = max(entry.size for entry in where.entries())
    use = where.use(one.key)
    assert use is not None
    three = staged(third, root, budget=2 * size + 1000)
    assert [where.published(done.key) for done in (one, two, three)] == [True, False, True]
    held = {item.uri: item for item in where.held()}
    assert held[f"file://{first}"].users == 1
    assert held[f"file://{third}"].users == 0
    keep = where.use(three.key)
    assert keep is not None
    with pytest.raises(staging.NoRoom, match="in use"):
        staged(second, root, budget=2 * size + 1000)
    use.close()
    assert staged(second, root, budget=2 * size + 1000).fetched
    assert not where.published(one.key)
    with pytest.raises(weights.WeightsError, match=r"do not fit into .* at all: raise"):
        staged(first, root, budget=100)


def test_evicting_takes_the_caches_along_and_a_killed_eviction_is_swept(tmp_path: Path) -> None:
    place, root = places.model(tmp_path / "m"), tmp_path / "disk"
    done = staged(place, root)
    where = store.Store(root)
    use = where.use(done.key)
    assert use is not None
    (use.caches / "kernel").write_text("compiled")
    assert not where.evict(done.key)
    use.close()
    (where.root / "trash" / "left").mkdir()
    assert where.evict(done.key)
    assert where.use(done.key) is None
    assert not [path for name in ("trash", "models") for path in (where.root / name).iterdir()]


def test_a_store_that_is_down_is_waited_for_and_said(tmp_path: Path) -> None:
    order = task.Order(f"file://{tmp_path}/nowhere/m")
    told = task.Task(str(tmp_path / "disk"), order, patience=2)
    assert task.Task.from_json(told.to_json()) == told
    news: list[dict[str, object]] = []
    pauses: list[float] = []
    code = process.run(told, lambda said: news.append(dict(said)), pauses.append)
    assert code == 1
    assert pauses == [1.0, 2.0]
    assert "is its file system mounted" in str(news[0]["waiting"])
    assert "failed" in news[-1]


def test_a_foreign_folder_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(PermissionError, match="weights_dir"):
        store.Store(tmp_path / "link")


def test_who_waits_for_another_staging_says_so(tmp_path: Path) -> None:
    place, where = places.model(tmp_path / "m"), store.Store(tmp_path / "disk")
    order = task.Order(f"file://{place}")
    waits = threading.Event()
    told: list[tuple[int, int]] = []

    def tell(got: int, of: int) -> None:
        told.append((got, of))
        waits.set()

    second = staging.Staging(order, sources.Folder(place), where, tell)
    with where.alone(order.key, wait=True):
        thread = threading.Thread(target=second.run)
        thread.start()
        assert waits.wait(60)
        assert told == [(0, 0)]
    thread.join()
    assert where.published(order.key)
