"""gVisor: the command line and the bundle; a program stands in for runsc."""

import json
import os
from pathlib import Path

import pytest
from sandbox_stage import a_stage

from slackwater.model.errors import RefusedError
from slackwater.sandbox.backends.gvisor import GvisorBackend
from slackwater.sandbox.backends.port import Order
from slackwater.sandbox.environment import Environment
from slackwater.sandbox.limits import Limits

# Shows how it was called and what the bundle says, and confines nothing.
STAND_IN = """#!/bin/sh
[ "$1" = --version ] && exit 0
env | sort
pwd
echo "$@"
while [ "$1" != --bundle ]; do shift; done
cat "$2/config.json"
"""


def test_without_runsc_it_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    refused = pytest.raises(RefusedError, match=r"'gvisor' cannot be used: runsc is not installed")
    with refused, a_stage("gvisor"):
        pass


def test_an_action_is_a_bundle_that_its_launcher_is_told_of(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "runsc"
    program.write_text(STAND_IN)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with a_stage("gvisor") as stage:
        stage.supervisor.open("e")
        ran = stage.run("echo", "hello", variables={"LD_PRELOAD": "./e.so"})
        assert ran.over.status == 0, ran
        known, _, config = ran.stdout.partition("{")
        assert "LD_PRELOAD" not in known
        assert "\n/\n--root" in known
        assert "--network=none" in known
        assert ("--rootless" in known) == (os.getuid() != 0)
        told = json.loads("{" + config)
        assert told["process"]["args"] == ["echo", "hello"]
        assert "LD_PRELOAD=./e.so" in told["process"]["env"]
        assert "limits.network" in stage.run("true", network=True).over.reason


def test_the_bundle_gives_no_rights_and_only_the_environments_folders_to_write(
    tmp_path: Path,
) -> None:
    backend = GvisorBackend("/usr/bin/runsc", tmp_path)
    environment = Environment("e", str(tmp_path / "e"), 1234)
    order = Order(
        action="1", environment="e", command=["true"], cores=frozenset({0}), limits=Limits()
    )
    config = backend.config(environment, order, {})
    writable = {each["source"] for each in config["mounts"] if "rw" in each.get("options", ())}
    assert writable == {environment.view, environment.tmp}
    process = config["process"]
    assert process["user"] == {"uid": 1234, "gid": 1234}
    assert process["noNewPrivileges"]
    assert not any(process["capabilities"].values())
    assert {"type": "network"} in config["linux"]["namespaces"]
    assert config["root"]["readonly"]
    for mount in config["mounts"]:
        assert os.path.lexists(Path(config["root"]["path"], mount["destination"][1:]))
    backend.close()
