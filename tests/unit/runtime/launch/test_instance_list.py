"""The file of instances that `slackwater up --instances` reads."""

from pathlib import Path

import pytest

from slackwater.model.errors import ConfigError
from slackwater.model.instance import InstanceKind
from slackwater.runtime.launch.instance_list import (
    ListedInstance,
    read_instance_list,
)
from slackwater.runtime.settings import ServiceSettings


def written(folder: Path, text: str) -> Path:
    file = folder / "instances.toml"
    file.write_text(text)
    return file


def test_a_list_names_engines_of_this_machine_and_servers_elsewhere(tmp_path: Path) -> None:
    file = written(
        tmp_path,
        """
        [[instances]]
        name = "gpu-a"
        vllm_url = "http://10.0.0.7:8000"
        [[instances]]
        name = "spare"
        kind = "spot"
        """,
    )
    server, engine = read_instance_list(file).instances
    found = server.request(["tiny"])
    assert (found.model, found.engine, found.kind) == ("tiny", "vllm", InstanceKind.DEDICATED)
    assert found.url == "http://10.0.0.7:8000"
    assert engine.request(["tiny"]).engine == "embedded"
    assert engine.request(["tiny"]).kind is InstanceKind.SPOT


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[[instances]]\nnam = 'a'", "unknown key"),
        ("[[instances]]\nname = 'a/b'", "instances: name: 'a/b'"),
        ("[[instances]]\nname = 'a'\nkind = 'local'", "training nodes"),
        ("[[instances]]\nname = 'a'\nengine = 'vllm'\nurl = 'ftp://x'", "http://"),
        ("[[instances]]\nname = 'a'\n[[instances]]\nname = 'a'", "once each"),
        ("instances = [", "is not TOML"),
    ],
)
def test_what_is_wrong_with_a_list_is_named(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        read_instance_list(written(tmp_path, text))


def test_a_missing_list_and_a_missing_model_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--instances"):
        read_instance_list(tmp_path / "nowhere.toml")
    with pytest.raises(ConfigError, match="one of: a, b"):
        ListedInstance("x").request(["a", "b"])


def test_a_service_needs_engines_of_its_own_unless_instances_are_listed(tmp_path: Path) -> None:
    listed = (ListedInstance("x"),)
    assert ServiceSettings(state=tmp_path, models={}, engines=0, instances=listed).engines == 0
    with pytest.raises(ConfigError, match="--engines"):
        ServiceSettings(state=tmp_path, models={}, engines=0)
