"""A token is only made for a node that the fleet can have."""

from pathlib import Path

import pytest

from slackwater.cli.node import node_token
from slackwater.model.errors import ConfigError
from slackwater.runtime.store.state_directory import StateDirectory

FLEET = """
[fleet]
launcher = "join"
[[fleet.pools]]
name = "train"
trainers = 1
"""


def test_a_pool_that_the_fleet_does_not_have_is_refused_at_once(tmp_path: Path) -> None:
    folder = StateDirectory(tmp_path)
    folder.lock()
    folder.write_server({"join": {"hub": "127.0.0.1:1", "depot": "", "pin": None}})
    (tmp_path / "config.toml").write_text(FLEET)
    try:
        assert node_token(tmp_path, "a", "train")
        with pytest.raises(ConfigError, match=r"'trian' is not a pool of the fleet.*: train"):
            node_token(tmp_path, "a", "trian")
        with pytest.raises(ConfigError, match=r"not listed in the fleet file.*--pool"):
            node_token(tmp_path, "a", None)
    finally:
        folder.unlock()
