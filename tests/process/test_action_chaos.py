"""Chaos, live: hostile actions and random kills. Nothing leaks, every action has one outcome, the
next one runs.
"""

import os
import random
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import httpx
import pytest

from harness.ports import free_port
from harness.sleep_markers import sleep_marker

from .action_service import ActionServiceProcess
from .service_process import wait_for

pytestmark = pytest.mark.process

# Bounds that keep a shared machine well even if everything else failed.
SMALL = {"processes": 24, "memory_mib": 256, "disk_mib": 16, "output_bytes": 100_000}
BOMB = "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass\n"

HOG = "x = [bytearray(1 << 20) for _ in range(4000)]"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ActionServiceProcess]:
    state = tmp_path_factory.mktemp("chaos") / "state"
    service = ActionServiceProcess(state, free_port(), "auto")
    service.start()
    yield service
    service.remove()


def command_lines() -> list[bytes]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(path.read_bytes())
        except OSError:
            continue
    return found


def left(marker: str) -> int:
    """Processes of anybody whose command has the marker, after they had time to go."""
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s:
        count = sum(marker.encode() in line for line in command_lines())
        if count == 0:
            return 0
        time.sleep(0.05)
    return count


@pytest.mark.parametrize(
    ("script", "limit_s", "outcomes"),
    [
        (f"exec python3 -c '{BOMB}' MARK", 2.0, {"timed_out", "failed"}),
        ("yes MARK", 60.0, {"failed"}),
        ("while :; do head -c 400000 /dev/zero > MARK-$RANDOM-$(date +%N); done", 60.0, {"failed"}),
        ("setsid sleep MARK & setsid sh -c 'sleep MARK; :' & sleep MARK", 1.0, {"timed_out"}),
        ("trap '' TERM INT HUP; while :; do sleep MARK; done", 1.0, {"timed_out"}),
        (f"exec python3 -c '{HOG}' MARK", 60.0, {"failed", "done"}),
    ],
    ids=["fork bomb", "flood", "disk filler", "sleepers", "deaf to signals", "memory hog"],
)  # fmt: skip
def test_a_hostile_action_ends_and_leaves_nothing(
    service: ActionServiceProcess, script: str, limit_s: float, outcomes: set[str]
) -> None:
    marker = str(sleep_marker())
    ended = service.run("sh", "-c", script.replace("MARK", marker), limit_s=limit_s, limits=SMALL)
    assert ended["outcome"] in outcomes, ended
    if ended["outcome"] == "done":
        assert ended["status"] != 0
    assert left(marker) == 0
    assert service.run("echo", "fine")["stdout"] == "fine\n"


def test_escapes_by_path_network_and_signal_fail(service: ActionServiceProcess) -> None:
    if os.getuid() != 0 and "bubblewrap" not in str(service.get("/slackwater/actions").json()):
        pytest.skip("without root and without bubblewrap a plain process has its user's rights")
    pid = service.status()["pids"]["sandbox-0.1"]
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        dial = f"import socket; socket.create_connection(('127.0.0.1', {port}), 3)"
        for command in (
            ["sh", "-c", "echo x > /etc/slackwater-chaos"],
            ["sh", "-c", f"echo x > {service.state}/slackwater-chaos"],
            ["cat", f"{service.state}/keys.json"],
            ["python3", "-c", dial],
            ["sh", "-c", f"kill -9 {pid}"],
        ):
            ended = service.run(*command)
            assert (ended["outcome"], ended["status"] != 0) == ("done", True), ended
    assert not Path("/etc/slackwater-chaos").exists()
    assert not (service.state / "slackwater-chaos").exists()
    assert service.status()["pids"].get("sandbox-0.1") == pid


def test_random_kills_leave_every_action_with_exactly_one_outcome(
    service: ActionServiceProcess,
) -> None:
    """Actions are cancelled, sandboxes and the service are killed, all at random, from a seed."""
    drawn, marker = random.Random(7), sleep_marker()
    asked: dict[str, float] = {}
    stop = threading.Event()

    def action(name: str) -> dict[str, object]:
        return {
            "command": ["sh", "-c", f"sleep {drawn.choice((0, 0, 0.05, 0.3))}; echo {marker}"],
            "action": name,
            "retries": drawn.choice((0, 0, 2)),
            "limits": SMALL,
        }

    def submit() -> None:
        body = action("chaos-0")
        with httpx.Client(headers={"x-api-key": service.key}, timeout=30) as client:
            while not stop.is_set():
                name = str(body["action"])
                try:
                    answer = client.post(f"{service.url}/slackwater/actions", json=body)
                    answered = answer.status_code != 503  # a front end whose control plane has gone
                except httpx.TransportError:
                    answered = False
                if not answered:
                    time.sleep(0.05)
                    continue  # the same one again, under its name: it may have been heard
                assert answer.status_code in (200, 202), answer.text
                asked[name] = time.monotonic()
                body = action(f"chaos-{len(asked)}")
                if drawn.random() < 0.15:
                    with_cancel = f"{service.url}/slackwater/actions/{name}/cancel"
                    try:
                        client.post(with_cancel)
                    except httpx.TransportError:
                        continue
                time.sleep(0.02)

    def asked_for(most: int) -> bool:
        return len(asked) >= most

    submitting = threading.Thread(target=submit)
    submitting.start()
    try:
        for number, blow in enumerate(("sandbox", "service", "sandbox"), start=1):
            wait_for("some actions", partial(asked_for, 15 * number))
            if blow == "service":
                service.kill()
                service.start()
            else:
                service.kill_worker("sandbox")
        wait_for("some more", lambda: len(asked) >= 60)
    finally:
        stop.set()
        submitting.join(240)
    ends = Counter(str(service.ended(name)["outcome"]) for name in asked)
    assert sum(ends.values()) == len(asked)
    assert set(ends) <= {"done", "cancelled", "lost"}
    assert ends["done"] > 0
    again = {name: service.ended(name)["outcome"] for name in list(asked)[:10]}
    assert again == {name: service.ended(name)["outcome"] for name in again}
    assert left(f"echo {marker}") == 0
    wait_for("nothing to run", lambda: service.status()["gauges"]["actions_running"] == 0)
    assert service.run("echo", "fine")["stdout"] == "fine\n"


def test_after_all_that_nothing_is_left_on_the_machine(service: ActionServiceProcess) -> None:
    pids = list(service.status()["pids"].values())
    assert service.stop() in (0, -signal.SIGTERM)
    wait_for("all to be gone", lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
    mark = service.sandboxes.name
    assert mark not in Path("/proc/self/mounts").read_text()
    kept = list((service.sandboxes / "sandbox-0" / "environments").iterdir())
    assert [each for each in kept if each.name != ".quarantine"] == []
    service.start()
