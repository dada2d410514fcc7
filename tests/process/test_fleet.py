"""Two nodes with files of their own: a client does not notice when one of them is lost."""

import base64
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from harness.ports import free_port

from .service_process import ServiceProcess, wait_for
from .test_rollout_service import completions
from .test_serve_faults import STEPS, train

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]

FLEET = """
launcher = "local"
[[pools]]
name = "mixed"
engines = 1
trainers = 1
[[pools]]
name = "guests"
engines = 0
[[pools]]
name = "spot"
engines = 1
"""


def nodes(service: ServiceProcess) -> dict[str, dict[str, Any]]:
    """Nodes that are here with both workers joined."""
    workers: dict[str, list[str]] = service.get("/slackwater/status").json()["workers"]
    joined = {worker for names in workers.values() for worker in names}
    rows = service.get("/slackwater/nodes").json()["nodes"]
    return {row["node"]: row for row in rows if len(joined & set(row["workers"])) == 2}


def kill_node(service: ServiceProcess, node: str) -> None:
    """SIGKILL of the agent; its workers are killed with it."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(nodes(service)[node]["agent_pid"], signal.SIGKILL)


@pytest.fixture(scope="module")
def fleet(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    folder = tmp_path_factory.mktemp("fleet")
    listed = [
        f'[[nodes]]\nname = "{name}"\npool = "mixed"\ndirectory = "{folder / name}"\n'
        for name in ("a", "b")
    ]
    file = folder / "fleet.toml"
    file.write_text(FLEET + "".join(listed))
    service = ServiceProcess(folder / "state", tiny_model, free_port(), "--fleet", str(file))
    service.start()
    wait_for("both nodes", lambda: len(nodes(service)) == 2, 240)
    yield service
    assert service.stop() == 0
    assert (folder / "a" / "files" / "models").is_dir()  # fetched: no disk is shared


def test_turns_go_on_elsewhere_when_a_node_is_killed(fleet: ServiceProcess) -> None:
    wanted = completions(fleet, 300)
    with ThreadPoolExecutor(1) as pool:
        again = pool.submit(completions, fleet, 300)
        kill_node(fleet, "a")
        assert again.result(timeout=240) == wanted
    wait_for("the node to come back", lambda: len(nodes(fleet)) == 2, 240)


def slackwater(*arguments: str) -> str:
    """What a command prints."""
    command = [sys.executable, "-m", "slackwater", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=240).stdout


def test_a_machine_joins_with_a_token_of_its_own_until_that_is_revoked(
    fleet: ServiceProcess, tmp_path: Path
) -> None:
    state = ("--state", str(fleet.state))
    token = tmp_path / "token"
    token.write_text(slackwater("node", "token", "guest", "--pool", "guests", *state))
    secret = (fleet.state / "fleet.secret").read_text()
    assert secret not in base64.urlsafe_b64decode(token.read_text()).decode()

    def is_here() -> bool:
        rows = fleet.get("/slackwater/nodes").json()["nodes"]
        return any(row["node"] == "guest" for row in rows)

    command = [sys.executable, "-m", "slackwater", "agent", "--join-file", str(token)]
    with (tmp_path / "agent.log").open("wb") as log:
        agent = subprocess.Popen([*command, "--directory", str(tmp_path / "n")], stderr=log)
    try:
        wait_for("the guest", is_here, 240)
        slackwater("node", "revoke", "guest", *state)
        assert agent.wait(240) == 1
    finally:
        agent.kill()
        agent.wait()
    assert "the key of 'agent:guest' is wrong" in (tmp_path / "agent.log").read_text()
    wait_for("the guest to be gone", lambda: not is_here(), 240)


def test_an_evicted_machine_leaves_as_soon_as_its_turns_have_moved(
    fleet: ServiceProcess, tmp_path: Path
) -> None:
    wanted = completions(fleet, 300)
    token = tmp_path / "token"
    state = ("--state", str(fleet.state))
    token.write_text(slackwater("node", "token", "evicted", "--pool", "spot", *state))
    command = [sys.executable, "-m", "slackwater", "agent", "--join-file", str(token)]
    command += ["--directory", str(tmp_path / "n"), "--notice-s", "3000"]

    def running() -> list[int]:
        rows = fleet.get("/slackwater/instances").json()["instances"]
        return [row["running"] for row in rows if "evicted" in row["instance"] and "running" in row]

    with (tmp_path / "agent.log").open("wb") as log:
        agent = subprocess.Popen(command, stderr=log)
    try:
        wait_for("its engine", lambda: bool(running()), 240)
        with ThreadPoolExecutor(1) as pool:
            again = pool.submit(completions, fleet, 300)
            wait_for("work on it", lambda: sum(running()) > 0 or again.done(), 240)
            agent.send_signal(signal.SIGTERM)
            assert again.result(timeout=240) == wanted
        assert agent.wait(240) == os.EX_TEMPFAIL
    finally:
        agent.kill()
        agent.wait()
    service_log = (fleet.state / "logs" / "service.log").read_text()
    assert "node leaves node=evicted in_s=3000" in service_log
    assert "notice of removal" in service_log


def test_training_goes_on_elsewhere_from_the_last_state_and_the_log(fleet: ServiceProcess) -> None:
    undisturbed = train(fleet, lambda step: None)

    def disturb(step: int) -> None:
        if step in (2, STEPS - 2):
            wait_for("both nodes", lambda: len(nodes(fleet)) == 2, 240)
            kill_node(fleet, "a" if step == 2 else "b")

    disturbed = train(fleet, disturb)
    assert disturbed.losses == undisturbed.losses
    assert disturbed.tokens == undisturbed.tokens
