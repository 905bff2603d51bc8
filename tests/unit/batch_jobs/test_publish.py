"""Publishing as the user: owner, umask, links, folders that are not theirs."""

import asyncio
import os
import stat
from pathlib import Path

import pytest

from batch_jobs import publish
from tests import services

ME = os.geteuid()
NOBODY = 65534


async def put(source: Path, target: Path, uid: int = ME, umask: int = 0o027) -> None:
    gid = os.getegid() if uid == ME else NOBODY
    await publish.publish(source, str(target), uid=uid, gid=gid, umask=umask)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    path.write_bytes(b"results\n")
    path.chmod(0o600)
    return path


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """A folder of another user, reachable for them."""
    services.require(ME == 0, "root, to become another user")
    folder = tmp_path / "theirs"
    folder.mkdir()
    os.chown(folder, NOBODY, NOBODY)
    for parent in [folder, *folder.parents]:
        if parent.stat().st_uid == ME and parent != Path("/"):
            parent.chmod(parent.stat().st_mode | 0o011)
    return folder


async def test_the_file_is_copied_with_the_umask(tmp_path: Path, source: Path) -> None:
    await put(source, tmp_path / "out.jsonl")
    assert (tmp_path / "out.jsonl").read_bytes() == b"results\n"
    assert stat.S_IMODE((tmp_path / "out.jsonl").stat().st_mode) == 0o640
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.jsonl", "source"]


async def test_an_older_file_is_replaced(tmp_path: Path, source: Path) -> None:
    (tmp_path / "out.jsonl").write_bytes(b"older and longer than the new one\n")
    await put(source, tmp_path / "out.jsonl")
    assert (tmp_path / "out.jsonl").read_bytes() == b"results\n"


async def test_a_link_is_refused(tmp_path: Path, source: Path) -> None:
    (tmp_path / "victim").write_bytes(b"untouched")
    (tmp_path / "out.jsonl").symlink_to("victim")
    with pytest.raises(publish.PublishError, match="symbolic link"):
        await put(source, tmp_path / "out.jsonl")
    assert (tmp_path / "victim").read_bytes() == b"untouched"
    assert (tmp_path / "out.jsonl").is_symlink()


async def test_a_folder_in_the_files_place_is_refused(tmp_path: Path, source: Path) -> None:
    (tmp_path / "out.jsonl").mkdir()
    with pytest.raises(publish.PublishError, match="no regular file"):
        await put(source, tmp_path / "out.jsonl")


async def test_a_missing_folder_is_said(tmp_path: Path, source: Path) -> None:
    with pytest.raises(
        publish.PublishError, match=r"missing/out\.jsonl: No such file or directory"
    ):
        await put(source, tmp_path / "missing" / "out.jsonl")


async def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, source: Path) -> None:
    with pytest.raises(publish.PublishError, match="/dev/full"):
        await put(source, Path("/dev/full"))
    folder = Path("/dev")
    assert not list(folder.glob(".full.*"))


async def test_the_file_belongs_to_the_user(source: Path, theirs: Path) -> None:
    await put(source, theirs / "out.jsonl", NOBODY)
    found = (theirs / "out.jsonl").stat()
    assert (found.st_uid, found.st_gid) == (NOBODY, NOBODY)


async def test_a_folder_that_the_user_cannot_write_is_refused(
    tmp_path: Path, source: Path, theirs: Path
) -> None:
    mine = theirs.parent / "mine"
    mine.mkdir(mode=0o755)
    with pytest.raises(publish.PublishError, match="Permission denied"):
        await put(source, mine / "out.jsonl", NOBODY)
    (theirs / "link").symlink_to(mine)
    with pytest.raises(publish.PublishError, match="Permission denied"):
        await put(source, theirs / "link" / "out.jsonl", NOBODY)
    assert not list(mine.iterdir())


async def test_a_users_link_into_anothers_open_folder_is_refused(
    source: Path, theirs: Path
) -> None:
    shared = theirs.parent / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    os.chown(shared, 1234, 1234)
    (theirs / "link").symlink_to("../shared")
    (theirs / "hop").symlink_to(theirs / "link")
    for name in ("link", "hop"):
        os.lchown(theirs / name, NOBODY, NOBODY)
        with pytest.raises(publish.PublishError, match="another user's folder"):
            await put(source, theirs / name / "out.jsonl", NOBODY)
    assert not list(shared.iterdir())
    os.lchown(theirs / "link", 0, 0)  # the site's own, as /scratch may be
    await put(source, theirs / "link" / "out.jsonl", NOBODY)
    await put(source, shared / "named.jsonl", NOBODY)
    assert {path.name for path in shared.iterdir()} == {"out.jsonl", "named.jsonl"}


async def test_rights_are_given_up_for_good(theirs: Path) -> None:
    code = (
        "import os\nfrom batch_jobs import publish\n"
        f"publish.become({NOBODY}, {NOBODY})\n"
        "assert os.getresuid() == (65534,) * 3 and os.getresgid() == (65534,) * 3\n"
        "assert 0 not in os.getgroups()\n"
        "try:\n    os.setuid(0)\nexcept PermissionError:\n    print('gone')\n"
    )
    import sys

    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-c", code, stdout=asyncio.subprocess.PIPE
    )
    assert (await process.communicate())[0] == b"gone\n"


def test_only_root_may_become_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    publish.become(1000, 1000)
    with pytest.raises(publish.PublishError, match="started as root"):
        publish.become(1001, 1001)
