"""A fleet file is read, or refused in one line that names the field, the value and the fix."""

from pathlib import Path

import pytest

from slackwater.model.errors import ConfigError
from slackwater.runtime.launch.fleet_file import (
    FleetFile,
    FleetNode,
    FleetPool,
    read_fleet_file,
)

POOL = '[[pools]]\nname = "mixed"\nengines = 2\ntrainers = 1\n'
NODE = '[[nodes]]\nname = "a"\npool = "mixed"\n'


def read(tmp_path: Path, text: str) -> FleetFile:
    file = tmp_path / "fleet.toml"
    file.write_text(text)
    return read_fleet_file(file)


def test_a_file_names_pools_and_nodes(tmp_path: Path) -> None:
    fleet = read(tmp_path, f'listen = "127.0.0.1:0"\n{POOL}{NODE}directory = "/scratch/a"\n')
    assert fleet.pool_of("a", None).engines == 2
    assert fleet.nodes[0].directory == "/scratch/a"
    assert not fleet.encrypted


def test_an_address_that_others_reach_is_encrypted(tmp_path: Path) -> None:
    assert read(tmp_path, f'listen = "0.0.0.0:20100"\n{POOL}{NODE}').encrypted


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (POOL + NODE + NODE, "nodes: names: ['a'] must be named once each"),
        (POOL + POOL + NODE, "pools: names: ['mixed'] must be named once each"),
        (POOL + NODE.replace("mixed", "other"), "nodes: a: pool: 'other' is not a pool"),
        (POOL + NODE + "engine = 3\n", "nodes[0].engine: unknown key"),
        (POOL.replace("2", "-1") + NODE, "engines: -1 must be from 0 to 4096"),
        ('listen = "nowhere"\n' + POOL + NODE, "listen: 'nowhere' must be HOST:PORT"),
        ('launcher = "slurm"\n' + POOL + NODE, "launcher"),
        (POOL, "nodes: 'none' must list at least one"),
        ('launcher = "ray"\n' + POOL + POOL.replace("mixed", "b"), "must be one with launcher"),
        ("= broken", "is not TOML"),
        (POOL + NODE + NODE[10:], "is not TOML: a key is given twice (at line 8"),
        (POOL + NODE + '[[slurm]]\npool = "mixed"\n', 'must be "join" with [[slurm]]'),
        ('launcher = "join"\n[[slurm]]\npool = "gpu"\n' + POOL, "slurm: pool: 'gpu' is not a pool"),
    ],
)
def test_a_wrong_file_is_refused_in_one_line(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        read(tmp_path, text)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_a_node_of_no_pool_is_refused_by_name() -> None:
    fleet = FleetFile((FleetPool("local"),), (FleetNode("local", "local"),))
    with pytest.raises(ConfigError, match="node: 'stray' is not listed"):
        fleet.pool_of("stray", None)
    with pytest.raises(ConfigError, match="node stray: pool: 'gpu' is not a pool of the fleet"):
        fleet.pool_of("stray", "gpu")
