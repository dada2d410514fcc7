"""Docker by its API: what is asked of an engine, and, where there is one, actions in its
containers.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from sandbox_stage import Stage, a_stage

from slackwater.model.errors import RefusedError
from slackwater.sandbox.backends.docker import (
    DEFAULT_IMAGE,
    DockerBackend,
    container_body,
    find_docker,
)
from slackwater.sandbox.choice import choose
from slackwater.sandbox.environment import Environment
from slackwater.sandbox.networks import Networks

IMAGE = os.environ.get("SLACKWATER_TEST_IMAGE", DEFAULT_IMAGE)
ENGINE, WHY = find_docker(IMAGE)
needs_engine = pytest.mark.skipif(
    ENGINE is None or os.getuid() != 0, reason=f"no engine to test with, or not root: {WHY}"
)


def test_a_container_is_asked_for_with_the_environments_folders_and_no_rights() -> None:
    root = Path("/somewhere/e")
    body = container_body("tiny:1", Environment("e", str(root), 4711), "/somewhere")
    assert body["Image"] == "tiny:1"
    assert body["User"] == "4711:4711"
    assert body["Labels"] == {"slackwater.folder": "/somewhere"}
    limits = body["HostConfig"]
    assert limits["Binds"] == ["/somewhere/e/view:/sandbox", "/somewhere/e/tmp:/tmp"]
    assert limits["NetworkMode"] == "none"
    assert limits["ReadonlyRootfs"]
    assert limits["CapDrop"] == ["ALL"]
    assert limits["SecurityOpt"] == ["no-new-privileges"]


def test_without_an_engine_docker_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    with pytest.raises(
        RefusedError, match=r"--sandbox-backend: 'docker' cannot be used: .+"
    ) as why:
        choose("no-engine", tmp_path, "docker")
    assert "\n" not in str(why.value)


@pytest.fixture
def stage() -> Iterator[Stage]:
    with a_stage("docker", image=IMAGE) as stage:
        stage.supervisor.open("e")
        yield stage


@needs_engine
def test_actions_share_their_environment_and_cannot_write_elsewhere(stage: Stage) -> None:
    assert stage.sh("echo kept > note; echo t > /tmp/t").over.status == 0
    found = stage.sh("cat note /tmp/t; pwd")
    assert found.stdout == "kept\nt\n/sandbox\n"
    assert stage.sh("echo x > /elsewhere").over.status != 0
    assert stage.sh("exit 3").over.status == 3


@needs_engine
def test_an_action_sees_neither_the_machines_processes_nor_its_network(stage: Stage) -> None:
    assert stage.sh(f"test -e /proc/1/cmdline && ! test -e /proc/{os.getpid()}").over.status == 0
    devices = stage.sh("cat /proc/net/dev").stdout
    assert [line.split(":")[0].strip() for line in devices.splitlines()[2:]] == ["lo"]


@needs_engine
def test_a_container_goes_with_its_environment_and_one_that_was_left_with_the_next_start(
    stage: Stage,
) -> None:
    assert ENGINE is not None
    owner = str(stage.root)
    assert len(ENGINE.find_leftovers(owner)) == 1
    stage.supervisor.close_environment("e")
    assert ENGINE.find_leftovers(owner) == []
    stage.supervisor.open("left")
    assert len(ENGINE.find_leftovers(owner)) == 1
    DockerBackend(ENGINE, IMAGE, stage.root, Networks())
    assert ENGINE.find_leftovers(owner) == []
    stage.supervisor.open("e")
    assert stage.sh("true").over.status == 0
