"""Actions over HTTP: their outcomes, their environments, and what becomes of them when parts of the
service die.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from harness.ports import free_port
from harness.sleep_markers import sleep_marker
from slackwater.rl.actions import ActionClient, ActionOutcome

from .action_service import ActionServiceProcess
from .service_process import wait_for

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def service(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[ActionServiceProcess]:
    state = tmp_path_factory.mktemp("actions") / "state"
    service = ActionServiceProcess(state, free_port(), "process", "--max-waiting-actions", "4")
    service.start()
    yield service
    service.remove()


def test_an_action_answers_with_output_status_and_usage(service: ActionServiceProcess) -> None:
    ended = service.run("sh", "-c", "cat; echo oops >&2; exit 3", stdin="hello", wait_s=10)
    assert (ended["outcome"], ended["status"]) == ("done", 3)
    assert (ended["stdout"], ended["stderr"]) == ("hello", "oops\n")
    assert ended["usage"]["cores"] == 1
    assert ended["usage"]["ran_s"] > 0


def test_an_environment_keeps_files_between_actions_and_begins_others(
    service: ActionServiceProcess,
) -> None:
    first = service.open(files={"main.py": "print(6 * 7)"})
    assert service.run("python3", "main.py", environment=first)["stdout"] == "42\n"
    service.run("sh", "-c", "echo kept > note", environment=first)
    answer = service.post(f"/slackwater/environments/{first}/snapshot", {"snapshot": "ready"})
    assert answer.status_code == 201
    second = service.open(snapshot="ready")
    assert service.run("cat", "note", environment=second)["stdout"] == "kept\n"
    for name in (first, second):
        gone = httpx.delete(
            f"{service.url}/slackwater/environments/{name}", headers={"x-api-key": service.key}
        )
        assert gone.status_code == 200
    answer = service.post("/slackwater/actions", {"command": ["ls"], "environment": first})
    assert answer.status_code == 404
    assert "is not one of yours, or has ended" in answer.json()["error"]


@pytest.mark.parametrize("kind", ["application/json", "application/json; charset=utf-8"])
def test_environments_are_answered_alike_on_the_short_way_and_on_the_usual_one(
    service: ActionServiceProcess, kind: str
) -> None:
    """Only a plain JSON body takes the short way."""
    name, headers = f"alike-{len(kind)}", {"x-api-key": service.key, "content-type": kind}
    path = f"{service.url}/slackwater/environments"

    def opened(**given: object) -> httpx.Response:
        return httpx.post(path, headers=headers, content=json.dumps(given), timeout=240)

    first, again = (opened(environment=name, memory_mib=8) for _ in range(2))
    whole = first.json()["environment"]
    assert whole == f"{name}@default"
    for answer in (first, again):
        assert (answer.status_code, answer.json()) == (201, {"environment": whole, "open": True})
    other = opened(environment=name, memory_mib=9)
    assert (other.status_code, "was another one" in other.json()["error"]) == (400, True)
    wrong = opened(environment=name, memory_mib=-1)
    assert (wrong.status_code, "memory_mib" in wrong.json()["error"]) == (422, True)
    gone, missing = (httpx.delete(f"{path}/{whole}", headers=headers) for _ in range(2))
    assert (gone.status_code, gone.json()) == (200, {"environment": whole})
    assert (missing.status_code, "has ended" in missing.json()["error"]) == (404, True)
    ended = opened(environment=name, memory_mib=8)
    assert (ended.status_code, "has ended" in ended.json()["error"]) == (400, True)


def test_an_elastic_command_is_told_its_cores(service: ActionServiceProcess) -> None:
    every = len(os.sched_getaffinity(0))
    ended = service.run("echo", "{cores}", cores=list(range(1, every + 1)), single_core_s=5.0)
    assert 1 <= int(ended["stdout"]) <= every
    assert ended["usage"]["cores"] == int(ended["stdout"])


def test_a_deadline_a_limit_and_a_cancellation_end_an_action(service: ActionServiceProcess) -> None:
    late = service.submit("sleep", "1000", deadline_s=0.5)
    long = service.submit("sleep", "1000", limit_s=0.5)
    assert service.ended(late)["outcome"] == "timed_out"
    assert service.ended(long)["outcome"] == "timed_out"
    unwanted = service.submit("sleep", "1000")
    service.post(f"/slackwater/actions/{unwanted}/cancel", {})
    assert service.ended(unwanted)["outcome"] == "cancelled"


def test_a_full_queue_says_so_and_loses_nothing(service: ActionServiceProcess) -> None:
    running = [service.submit("sleep", "1000") for _ in os.sched_getaffinity(0)]
    many = len(running)
    wait_for("them to run", lambda: service.status()["gauges"]["actions_running"] >= many)
    waiting = [service.submit("true") for _ in range(4)]
    answer = service.post("/slackwater/actions", {"command": ["true"]})
    assert answer.status_code == 429
    assert "the queue is full: 4 actions are waiting" in answer.json()["error"]
    for action in running:
        service.post(f"/slackwater/actions/{action}/cancel", {})
    assert {service.ended(action)["outcome"] for action in waiting} == {"done"}


def test_output_is_streamed_while_the_action_runs(service: ActionServiceProcess) -> None:
    environment = service.open()
    action = service.submit(
        "sh", "-c", "echo first; while ! test -e go; do sleep 0.05; done; echo second",
        environment=environment, stream=True,
    )  # fmt: skip
    heard: list[dict[str, str]] = []
    first = threading.Event()

    def listen() -> None:
        url = f"{service.url}/slackwater/actions/{action}/output"
        with httpx.stream("GET", url, headers={"x-api-key": service.key}, timeout=240) as answer:
            for line in answer.iter_lines():
                heard.append(json.loads(line))
                first.set()

    listener = threading.Thread(target=listen)
    listener.start()
    assert first.wait(240)
    assert heard[0] == {"stream": "stdout", "data": "first\n"}
    view = service.sandboxes / "sandbox-0" / "environments" / environment / "view"
    (view / "go").touch()
    listener.join(240)
    assert heard[1] == {"stream": "stdout", "data": "second\n"}
    assert heard[-1]["outcome"] == "done"


def test_the_client_waits_out_a_full_queue(service: ActionServiceProcess) -> None:
    async def all_of_them() -> list[ActionOutcome]:
        async with ActionClient(service.url, service.key, job="crowd") as client:
            async with client.environment(files={"n": "7"}) as place:
                kept = await place.run("cat", "n")
            runs = [client.run("echo", str(number)) for number in range(16)]
            return [kept, *await asyncio.gather(*runs)]

    kept, *others = asyncio.run(all_of_them())
    assert kept.stdout == "7"
    assert [result.stdout for result in others] == [f"{number}\n" for number in range(16)]


def test_the_command_line_prints_what_the_action_prints_and_exits_as_it_does(
    service: ActionServiceProcess,
) -> None:
    command = [sys.executable, "-m", "slackwater", "action"]
    state = ["--state", str(service.state)]
    script = "echo out; echo err >&2; exit 3"
    ran = subprocess.run(
        [*command, "run", *state, "--", "sh", "-c", script],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (ran.returncode, ran.stdout, ran.stderr) == (3, "out\n", "err\n")
    top = subprocess.run(
        [*command, "top", "--json", *state],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert json.loads(top.stdout)["ended"][-1]["command"].startswith("sh -c echo out")


def test_a_permit_waits_for_its_turn(service: ActionServiceProcess) -> None:
    headers = {"x-api-key": service.key}
    url = f"{service.url}/slackwater/limits/search"
    assert httpx.put(url, json={"concurrency": 1}, headers=headers).status_code == 200
    first = service.submit(uses={"search": 1})
    second = service.submit(uses={"search": 1})
    assert service.post(f"/slackwater/actions/{first}/held", {}).json()["held"]
    held = service.post(f"/slackwater/actions/{second}/held?wait_s=0.2", {})
    assert (held.status_code, held.json()["held"]) == (202, False)
    assert service.post(f"/slackwater/actions/{first}/done", {}).status_code == 200
    assert service.post(f"/slackwater/actions/{second}/held", {}).json()["held"]
    assert service.post(f"/slackwater/actions/{second}/done", {}).status_code == 200
    assert service.ended(second)["outcome"] == "done"


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"command": []}, "command: [] must not be empty"),
        ({"command": ["x"], "cores": 0}, "cores"),
        ({"command": ["x"], "priority": 5000}, "priority"),
        ({"command": ["x"], "nonsense": 1}, "nonsense"),
        ({"command": ["x"], "environment": "none", "retries": 1}, "retries: 1"),
    ],
)
def test_a_wrong_field_is_named(
    service: ActionServiceProcess, body: dict[str, object], says: str
) -> None:
    answer = service.post("/slackwater/actions", body)
    assert answer.status_code == 422
    assert says in answer.json()["error"]


def test_the_same_action_again_is_the_same_and_another_by_its_name_is_refused(
    service: ActionServiceProcess,
) -> None:
    environment = service.open()
    for _ in range(3):
        service.run("sh", "-c", "echo x >> count", environment=environment, action="once")
    assert service.run("cat", "count", environment=environment)["stdout"] == "x\n"
    answer = service.post("/slackwater/actions", {"command": ["ls"], "action": "once"})
    assert (answer.status_code, "was another one" in answer.json()["error"]) == (400, True)


def test_a_killed_sandbox_ends_what_ran_there_and_the_next_one_runs(
    service: ActionServiceProcess,
) -> None:
    environment = service.open()
    bound = service.submit("sleep", "1000", environment=environment)
    again = service.submit("sh", "-c", "sleep 0.2; echo done", retries=3)
    wait_for("it to run", lambda: service.status()["gauges"]["actions_running"] >= 1)
    service.kill_worker("sandbox")
    ended = service.ended(bound)
    assert (ended["outcome"], "was lost" in ended["reason"]) == ("lost", True)
    assert service.ended(again)["stdout"] == "done\n"
    assert service.run("echo", "fine")["stdout"] == "fine\n"


def test_over_a_kill_of_the_service_every_action_has_one_outcome_and_environments_stay(
    service: ActionServiceProcess,
) -> None:
    environment = service.open()
    service.run("sh", "-c", "echo kept > note", environment=environment)
    running = service.submit("sh", "-c", "echo x >> ran; sleep 1000", environment=environment)
    ran = service.sandboxes / "sandbox-0" / "environments" / environment / "view" / "ran"
    wait_for("it to run", lambda: ran.exists() and ran.read_text() == "x\n")
    waiting = service.submit("sh", "-c", "cat note ran", environment=environment)
    service.kill()
    service.start()
    assert service.ended(running)["outcome"] == "lost"
    ended = service.ended(waiting)
    assert (ended["outcome"], ended["stdout"]) == ("done", "kept\nx\n")
    again = service.run("cat", "note", environment=environment)
    assert again["stdout"] == "kept\n"


def test_a_stopped_service_leaves_no_process(service: ActionServiceProcess) -> None:
    seconds = str(sleep_marker())
    service.submit("sleep", seconds)
    wait_for("it to run", lambda: service.status()["gauges"]["actions_running"] == 1)
    pids = service.status()["pids"]
    assert service.stop() in (0, -signal.SIGTERM)

    def left() -> list[Path]:
        running = Path("/proc").glob("[0-9]*/cmdline")
        found = [entry for entry in running if f"sleep\0{seconds}".encode() in _read(entry)]
        return found + [Path(f"/proc/{pid}") for pid in pids.values() if _lives(pid)]

    wait_for("all to be gone", lambda: left() == [])
    service.start()
    assert service.run("echo", "back")["stdout"] == "back\n"


def _lives(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
