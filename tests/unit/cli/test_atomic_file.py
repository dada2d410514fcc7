"""A file appears whole under its name or not at all."""

from pathlib import Path

import pytest

from slackwater.cli.atomic_file import atomic_file, write_atomically
from slackwater.model.errors import ConfigError


def test_a_finished_file_replaces_the_old_one_and_leaves_no_other(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    path.write_bytes(b"old")
    write_atomically(path, b"new", "--trace")
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_an_interrupted_file_leaves_the_old_one_and_no_part(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    path.write_bytes(b"old")
    with pytest.raises(KeyboardInterrupt), atomic_file(path, "--trace") as file:
        file.write(b"half")
        raise KeyboardInterrupt
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_is_not_there_is_named_with_its_flag(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--plot"):
        write_atomically(tmp_path / "none" / "a.png", b"", "--plot")
