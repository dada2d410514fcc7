"""Several tenants need sandboxes that isolate them: without, nothing starts, no action is
placed.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slackwater.cli.preflight import check_isolation
from slackwater.control.actions.broker import ActionBroker
from slackwater.control.actions.broker_state import BrokerSettings
from slackwater.model.errors import ConfigError, RefusedError
from slackwater.model.ids import WorkerId
from slackwater.runtime.executors.actions import ActionExecutor
from slackwater.runtime.live_driver import live_driver
from slackwater.runtime.settings import ServiceSettings
from slackwater.wire.sandbox import SandboxFacts


def settings(
    tmp_path: Path, *tenants: str, backend: str = "auto", trust: bool = False
) -> ServiceSettings:
    return ServiceSettings(
        state=tmp_path,
        models={},
        engines=0,
        trainers=0,
        sandboxes=1,
        sandbox_backend=backend,
        tenants=tenants,
        trust_tenants=trust,
    )


@pytest.fixture
def no_bubblewrap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.setenv("PATH", str(empty))


@pytest.mark.usefixtures("no_bubblewrap")
def test_two_tenants_without_an_isolating_backend_are_refused_with_the_fix(tmp_path: Path) -> None:
    with pytest.raises(
        RefusedError, match=r"2 tenants .*not installed.*apt-get install bubblewrap"
    ):
        check_isolation(settings(tmp_path, "a", "b"), 2)


@pytest.mark.usefixtures("no_bubblewrap")
def test_a_tenant_of_an_earlier_start_counts(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="2 tenants"):
        check_isolation(settings(tmp_path, "a"), 2)


@pytest.mark.usefixtures("no_bubblewrap")
def test_a_single_tenant_is_warned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check_isolation(settings(tmp_path, "a"), 1)
    assert "WARNING: actions are not isolated" in capsys.readouterr().err


@pytest.mark.usefixtures("no_bubblewrap")
def test_an_operator_may_state_that_tenants_are_trusted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check_isolation(settings(tmp_path, "a", "b", trust=True), 2)
    assert "WARNING" in capsys.readouterr().err


def test_plain_processes_for_several_tenants_are_refused_unless_they_are_trusted(
    tmp_path: Path,
) -> None:
    with pytest.raises(ConfigError, match=r"'process' does not isolate 2 tenants.*--trust-tenants"):
        settings(tmp_path, "a", "b", backend="process")
    settings(tmp_path, "a", backend="process")
    settings(tmp_path, "a", "b", backend="process", trust=True)


@pytest.mark.parametrize("needed", [True, False])
def test_a_worker_that_does_not_isolate_gets_no_action_where_tenants_need_it(needed: bool) -> None:
    broker = ActionBroker(BrokerSettings())
    driver = live_driver(broker)
    hub: Any = None
    body = ActionExecutor(hub, hub, driver, hub, needs_isolation=needed)
    body.worker_joined(WorkerId("w"), SandboxFacts("n", [[0, 1]], 1024, "process"))
    assert bool(body.facts) is not needed
    assert bool(broker.state.nodes) is not needed
    body.worker_joined(
        WorkerId("v"), SandboxFacts("m", [[0, 1]], 1024, "bubblewrap", isolates=True)
    )
    assert "m" in broker.state.nodes
    body.close()


def test_up_does_not_start_for_two_tenants_without_isolation(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "slackwater", "up", "--state", str(tmp_path / "state")]
    command += ["--engines", "0", "--trainers", "0", "--sandboxes", "1", "--port", "0"]
    ended = subprocess.run(
        [*command, "--tenant", "a", "--tenant", "b"],
        env={**os.environ, "PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode != 0
    assert "apt-get install bubblewrap" in ended.stderr
    assert "Traceback" not in ended.stderr
