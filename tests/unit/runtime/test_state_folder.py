"""The control token and broker.json."""

import threading
from pathlib import Path

from scheduler.runtime import address, guard


def test_the_token_is_made_once_and_private(tmp_path: Path) -> None:
    found: list[str] = []
    makers = [
        threading.Thread(target=lambda: found.append(guard.token(tmp_path))) for _ in range(8)
    ]
    for maker in makers:
        maker.start()
    for maker in makers:
        maker.join()
    assert len(set(found)) == 1
    assert len(found) == 8
    assert len(found[0]) == 64
    path = tmp_path / guard.FILE
    assert path.stat().st_mode & 0o777 == 0o600
    assert [item.name for item in path.parent.iterdir()] == [path.name]


def test_broker_json_is_whole_or_absent(tmp_path: Path) -> None:
    assert address.read(tmp_path) is None
    address.publish(tmp_path, address.Address("h:1", 3))
    assert address.read(tmp_path) == address.Address("h:1", 3)
    assert [item.name for item in tmp_path.iterdir()] == [address.FILE]
    for text in ("", "{", "[]", '{"address": "x"}'):
        (tmp_path / address.FILE).write_text(text)
        assert address.read(tmp_path) is None


def test_a_state_folder_that_can_not_be_read_now_names_nobody(tmp_path: Path) -> None:
    """A gateway's way to the broker ended for good with the file system's first hiccup."""
    (tmp_path / address.FILE).mkdir()
    assert address.read(tmp_path) is None
