"""What front ends leave on the disk: little, and nothing after the next start."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from slackwater.serve.front.__main__ import log_to
from slackwater.serve.front.processes import remove_socket_folder, socket_folder

MOST_BYTES = 4096


@pytest.fixture
def own_handlers() -> Iterator[None]:
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    root.handlers = []
    yield
    for handler in root.handlers:
        handler.close()
    root.handlers = before
    root.setLevel(level)


@pytest.mark.usefixtures("own_handlers")
def test_a_front_ends_log_stays_small(tmp_path: Path) -> None:
    log_to(tmp_path / "front-0.log", MOST_BYTES)
    for number in range(1000):
        logging.getLogger("front").warning("line %d", number)
    files = list(tmp_path.iterdir())
    assert sum(file.stat().st_size for file in files) <= 2 * MOST_BYTES
    assert "line 999" in (tmp_path / "front-0.log").read_text()


def test_the_sockets_of_a_control_plane_that_was_killed_go_with_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = tmp_path / "tmp"
    places.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(places))
    link = tmp_path / "sockets"
    killed = socket_folder(link)
    (killed / "channel").touch()
    folder = socket_folder(link)
    assert list(places.iterdir()) == [folder]
    assert folder.stat().st_mode & 0o077 == 0
    remove_socket_folder(link)
    assert not list(places.iterdir())
    assert not link.is_symlink()
