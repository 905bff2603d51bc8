"""Copies a result file to where the user asked, as that user.

Runs as a short process of its own (``python -P -m batch_jobs.publish``), since umask and user are the
whole process's. The source comes as an open descriptor: after dropping its rights this process could not
open it. What the kernel then refuses, the user may not do. Links are not followed at the file itself.
"""

import asyncio
import json
import os
import pwd
import secrets
import shutil
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

_CHUNK = 1 << 20
_MOST_PARTS = 4_096  # of a path with the links in it; the kernel allows less
_ENVIRONMENT = (
    "PATH",
    "PYTHONPATH",
    "PYTHONDONTWRITEBYTECODE",
)  # the runner's secrets stay with it


class PublishError(Exception):
    """The file could not be put there; one line, for the job's reason."""


async def publish(source: Path, target: str, *, uid: int, gid: int, umask: int) -> None:
    """Put a copy of ``source`` at ``target`` by atomic rename, owned by ``uid``.

    Raises:
        PublishError: the folder is missing or not writable for the user, the target is a link or a
            folder, the disk is full, or this process may not become the user.
    """
    fd = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
    order = {"fd": fd, "target": target, "uid": uid, "gid": gid, "umask": umask}
    try:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            "-m",
            "batch_jobs.publish",
            json.dumps(order),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            pass_fds=(fd,),
            env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
        )
        _, words = await process.communicate()
    finally:
        os.close(fd)
    if process.returncode != 0:
        last = (words.decode(errors="replace").strip().splitlines() or ["no reason given"])[-1]
        raise PublishError(last)


def main(argv: list[str]) -> int:
    """Carry out one order; print the reason on stderr and return 1 if it can't be."""
    order = json.loads(argv[0])
    try:
        become(order["uid"], order["gid"])
        os.umask(order["umask"])
        place(order["fd"], order["target"])
    except (OSError, PublishError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        print(f"{order['target']}: {reason}", file=sys.stderr)
        return 1
    return 0


def become(uid: int, gid: int) -> None:
    """Give up every right that user ``uid`` does not have.

    Raises:
        PublishError: this process is neither root nor that user.
    """
    if os.geteuid() != 0:
        if os.geteuid() != uid:
            raise PublishError("only a batch runner that is started as root writes files of others")
        return
    try:
        os.initgroups(pwd.getpwuid(uid).pw_name, gid)
    except KeyError:
        os.setgroups([gid])
    os.setgid(gid)
    os.setuid(uid)


def place(fd: int, target: str) -> None:
    """Copy what ``fd`` holds to ``target``: temporary file beside it, fsync, rename, fsync.

    Raises:
        PublishError: the target is a link or anything but a file, or a link leads into another user's folder.
        OSError: what the file system refuses.
    """
    folder, name = os.path.split(target)
    folder_fd = os.open(folder or "/", os.O_RDONLY | os.O_DIRECTORY)
    try:
        _refuse_theirs(folder, folder_fd)
        _refuse_other(name, folder_fd)
        part = f".{name[:200]}.{secrets.token_hex(6)}.part"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        part_fd = os.open(part, flags, 0o666, dir_fd=folder_fd)
        try:
            with os.fdopen(fd, "rb") as source, os.fdopen(part_fd, "wb") as copy:
                source.seek(0)
                shutil.copyfileobj(source, copy, _CHUNK)
                copy.flush()
                os.fsync(copy.fileno())
            os.rename(part, name, src_dir_fd=folder_fd, dst_dir_fd=folder_fd)
        except BaseException:
            os.unlink(part, dir_fd=folder_fd)
            raise
        os.fsync(folder_fd)
    finally:
        os.close(folder_fd)


def _refuse_theirs(folder: str, folder_fd: int) -> None:
    """Refuse a path that a user's link leads into another user's folder, even one that all may write.

    Links of the site's own (``/scratch`` to a file system) and of the folder's owner are no such.
    """
    owner = os.fstat(folder_fd).st_uid
    if owner in {0, os.geteuid()}:
        return
    if any(each not in {0, owner} for each in _link_owners(folder)):
        raise PublishError("a link leads into another user's folder: name that folder itself")


def _link_owners(folder: str) -> Iterator[int]:
    """Yield who owns each link on the way to a folder, links in links' targets included."""
    at, ahead = "/", folder.split("/")
    for _ in range(_MOST_PARTS):
        if not ahead:
            return
        path = os.path.normpath(os.path.join(at, ahead.pop(0)))  # noqa: PTH118 - pathlib keeps no ..
        found = os.lstat(path)
        if stat.S_ISLNK(found.st_mode):
            yield found.st_uid
            target = str(Path(path).readlink())
            at = "/" if target.startswith("/") else at
            ahead = [*target.split("/"), *ahead]
        else:
            at = path


def _refuse_other(name: str, folder_fd: int) -> None:
    try:
        mode = os.stat(name, dir_fd=folder_fd, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return
    if stat.S_ISLNK(mode):
        raise PublishError("is a symbolic link, which results never go through: remove it")
    if not stat.S_ISREG(mode):
        raise PublishError("is there and no regular file")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
