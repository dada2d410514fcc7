"""Submitted jobs with real drivers: killed, stopped, resumed, adopted, and never two of one job."""

import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from harness.ports import free_port

from .service_process import ServiceProcess, gone, wait_for

pytestmark = pytest.mark.process

# A driver that counts in its run's folder, goes on from what it finds there, and notices a second
# one of itself.
DRIVER = """
import fcntl, json, os, pathlib, sys, time
run = pathlib.Path(os.environ["SLACKWATER_RUN"])
alone = open(run / "alone", "w")
fcntl.flock(alone, fcntl.LOCK_EX | fcntl.LOCK_NB)
curves = run / "metrics.jsonl"
done = len(curves.read_text().splitlines()) if curves.exists() else 0
print("from", done, "with", len(os.environ["TINKER_API_KEY"]), flush=True)
# The last word before it works: it may be killed as soon as this is seen.
with open(run / "starts", "a") as starts:
    print(os.getpid(), os.environ["SLACKWATER_JOB"], file=starts)
for step in range(done, int(os.environ["SLACKWATER_ITERATIONS"])):
    with open(curves, "a") as file:
        print(json.dumps({"step": step, "reward": step / 10}), file=file)
    while "HOLD" in os.environ and not (run / "go").exists():
        time.sleep(0.05)
"""

RECIPE = """
name = "digits"
model = "tiny"
recipe = "copy-digits"
iterations = 12
slo = 1.5
[options.warm_up]
steps = 1
[options.grpo]
groups = 2
max_groups = 2
group_size = 2
"""


@pytest.fixture(scope="module")
def plane(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    state = tmp_path_factory.mktemp("jobs") / "state"
    service = ServiceProcess(state, tiny_model, free_port(), "--tenant", "me", "--tenant", "other")
    service.start()
    yield service
    if service.process is not None:
        service.stop()


def slackwater(plane: ServiceProcess, *words: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "slackwater", *words, "--state", str(plane.state)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


def shown(plane: ServiceProcess, name: str) -> dict[str, Any]:
    found: dict[str, Any] = plane.get(f"/slackwater/jobs/{name}").json()
    return found


def run_of(plane: ServiceProcess, name: str) -> Path:
    return plane.state / "jobs" / "me" / name / "run"


def submit(plane: ServiceProcess, name: str, *, hold: bool = False, **more: Any) -> dict[str, Any]:
    body = {"name": name, "model": "tiny", "iterations": 5, **more}
    if "recipe" not in more and "command" not in more:
        body["command"] = [sys.executable, "-c", DRIVER]
    if hold:
        body["env"] = {"HOLD": "1"}
    answer = plane.post("/slackwater/jobs", body)
    assert answer.status_code == 201, answer.text
    found: dict[str, Any] = answer.json()
    return found


def wait_stage(
    plane: ServiceProcess, name: str, stage: str, limit_s: float = 240
) -> dict[str, Any]:
    wait_for(f"{name} to be {stage}", lambda: shown(plane, name)["stage"] == stage, limit_s)
    return shown(plane, name)


def starts(plane: ServiceProcess, name: str) -> list[int]:
    path = run_of(plane, name) / "starts"
    lines = path.read_text().splitlines() if path.exists() else []
    assert all(line.split()[1] == name for line in lines)
    return [int(line.split()[0]) for line in lines]


def held_at_work(plane: ServiceProcess, name: str, count: int = 1) -> int:
    """The pid of the driver, which waits in the middle."""
    curves = run_of(plane, name) / "metrics.jsonl"
    wait_for(f"start {count} of {name}", lambda: len(starts(plane, name)) >= count)
    wait_for(f"{name} at work", lambda: curves.exists() and bool(curves.read_text()))
    return starts(plane, name)[-1]


def go_on(plane: ServiceProcess, name: str) -> None:
    (run_of(plane, name) / "go").touch()


def steps(plane: ServiceProcess, name: str) -> list[int]:
    lines = (run_of(plane, name) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["step"] for line in lines]


def said(plane: ServiceProcess, name: str) -> str:
    """What its drivers printed, as far as their keepers have written it down."""
    return str(plane.get(f"/slackwater/jobs/{name}/logs").json()["text"])


def test_a_file_that_cannot_be_is_refused_and_leaves_nothing(
    plane: ServiceProcess, tmp_path: Path
) -> None:
    file = tmp_path / "job.toml"
    file.write_text('name = "x"\nmodel = "large"\ncommand = ["true"]\niterations = 1\n')
    done = slackwater(plane, "job", "submit", str(file))
    assert done.returncode == 2
    assert done.stderr.endswith("model: 'large' is not served here; there are: tiny\n")
    for name in ("show", "stop", "resume"):
        path = "/slackwater/jobs/nobody" + ("" if name == "show" else f"/{name}")
        answer = plane.get(path) if name == "show" else plane.post(path, {})
        assert answer.status_code == 404 and "not a job of yours" in answer.text
    assert plane.get("/slackwater/jobs").json()["jobs"] == []


def test_only_the_operators_own_key_submits(plane: ServiceProcess) -> None:
    body = {"name": "x", "model": "tiny", "iterations": 1, "command": ["true"]}
    assert plane.post("/slackwater/jobs", body, plane.key_of("other")).status_code == 400
    assert plane.post("/slackwater/jobs", body, "tml-job:me:x:0000").status_code == 401


def test_a_recipe_runs_as_its_job_and_a_killed_driver_goes_on(
    plane: ServiceProcess, tmp_path: Path
) -> None:
    file = tmp_path / "job.toml"
    file.write_text(RECIPE)
    done = slackwater(plane, "job", "submit", str(file), "--json")
    assert done.returncode == 0, done.stderr
    wait_for("its driver", lambda: shown(plane, "digits")["driver"]["pid"] is not None)
    pid = shown(plane, "digits")["driver"]["pid"]
    command = Path(f"/proc/{pid}/cmdline").read_text()
    assert "tml-" not in command and "train" in command
    wait_for("a step", lambda: (run_of(plane, "digits") / "checkpoint.json").exists())
    os.kill(pid, signal.SIGKILL)
    found = wait_stage(plane, "digits", "finished")
    assert steps(plane, "digits") == list(range(12))
    assert found["driver"]["attempt"] == 2 and found["crashes"] == 1
    again = slackwater(plane, "job", "resume", "digits")
    assert again.returncode == 1 and "has finished, so there is nothing to resume" in again.stderr
    assert shown(plane, "digits")["stage"] == "finished"
    assert found["iteration"] == 12 and found["tokens"] > 0 and found["operations"] > 0
    jobs = plane.get("/slackwater/jobs").json()["jobs"]
    assert [row["job"] for row in jobs] == ["me/digits"], "its sessions were jobs of their own"
    listed = slackwater(plane, "job", "list")
    assert "digits" in listed.stdout and "12/12" in listed.stdout


def test_two_jobs_and_the_death_of_one_driver_leaves_the_other_alone(plane: ServiceProcess) -> None:
    for name in ("one", "two"):
        submit(plane, name, hold=True)
    killed, other = held_at_work(plane, "one"), held_at_work(plane, "two")
    os.kill(killed, signal.SIGKILL)
    assert held_at_work(plane, "one", 2) != killed
    wait_for("its words", lambda: said(plane, "one").count("from") == 2)
    keeper = shown(plane, "one")["driver"]["keeper_pid"]
    os.kill(keeper, signal.SIGKILL)  # the keeper itself: its driver goes with it
    held_at_work(plane, "one", 3)
    for name in ("one", "two"):
        go_on(plane, name)
        assert wait_stage(plane, name, "finished")["driver"]["pid"] is None
        assert steps(plane, name) == [0, 1, 2, 3, 4]
    assert len(starts(plane, "one")) == 3 and starts(plane, "two") == [other]
    log = slackwater(plane, "job", "logs", "one", "-f").stdout
    assert log.startswith("from 0 with ") and log.count("from") == 3


def test_a_job_is_stopped_and_resumed(plane: ServiceProcess) -> None:
    submit(plane, "paused", hold=True)
    pid = held_at_work(plane, "paused")
    done = slackwater(plane, "job", "stop", "paused", "--json")
    assert json.loads(done.stdout)["stage"] == "stopped", done.stderr
    assert gone(pid)
    refused = plane.post(
        "/slackwater/jobs",
        {"name": "paused", "model": "tiny", "iterations": 1, "command": ["true"]},
    )
    assert refused.status_code == 400 and "--replace" in refused.text
    go_on(plane, "paused")
    assert slackwater(plane, "job", "resume", "paused", "--wait").returncode == 0
    assert steps(plane, "paused") == [0, 1, 2, 3, 4]
    assert plane.post("/slackwater/jobs/paused/stop", {}).json()["stage"] == "finished"


def test_a_driver_that_keeps_failing_ends_with_its_last_words(plane: ServiceProcess) -> None:
    submit(plane, "broken", command=["sh", "-c", "echo started; echo no such luck >&2; exit 3"])
    submit(plane, "absent", command=["no-such-command"])
    found = wait_stage(plane, "broken", "failed")
    assert found["reason"].endswith(
        "5 times in a row: status 3: " + " | ".join(["no such luck", "started", "no such luck"])
    )
    # Not "No such file" where a folder on the path may not be read.
    assert "status 127: no-such-command: " in wait_stage(plane, "absent", "failed")["reason"]


def test_drivers_outlive_a_killed_plane_and_are_adopted_once(plane: ServiceProcess) -> None:
    for name in ("lives", "ends", "dies", "leaves"):
        submit(plane, name, hold=True)
    pids = {name: held_at_work(plane, name) for name in ("lives", "ends", "dies", "leaves")}
    keepers = {name: shown(plane, name)["driver"]["keeper_pid"] for name in pids}
    plane.kill()
    go_on(plane, "ends")
    wait_for("its end", lambda: gone(keepers["ends"]))
    os.kill(pids["dies"], signal.SIGKILL)
    os.kill(keepers["leaves"], signal.SIGKILL)
    wait_for("their ends", lambda: gone(keepers["dies"]) and gone(pids["leaves"]))
    plane.start()
    assert wait_stage(plane, "ends", "finished")["driver"]["attempt"] == 1
    assert wait_stage(plane, "digits", "finished")["tokens"] > 0  # from long before
    assert shown(plane, "lives")["driver"]["pid"] == pids["lives"]
    held_at_work(plane, "dies", 2)
    held_at_work(plane, "leaves", 2)
    assert shown(plane, "dies")["crashes"] == 1
    for name in ("lives", "dies", "leaves"):
        go_on(plane, name)
        wait_stage(plane, name, "finished")
        assert steps(plane, name) == [0, 1, 2, 3, 4]
    assert [len(starts(plane, name)) for name in pids] == [1, 1, 2, 2]


def test_a_service_that_stops_takes_its_drivers_along_and_the_next_goes_on(
    plane: ServiceProcess,
) -> None:
    submit(plane, "rests", hold=True)
    first = held_at_work(plane, "rests")
    assert plane.stop() == 0
    assert gone(first)
    plane.start()
    assert held_at_work(plane, "rests", 2) != first
    go_on(plane, "rests")
    assert wait_stage(plane, "rests", "finished")["crashes"] == 0
    assert steps(plane, "rests") == [0, 1, 2, 3, 4]


def test_nobody_else_can_read_what_jobs_leave(plane: ServiceProcess) -> None:
    for path in (plane.state / "jobs").rglob("*"):
        if path.parent.name != "run" and path.name != "run":
            assert not path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO), path
    with pytest.raises(httpx.HTTPStatusError):
        plane.get("/slackwater/jobs/nobody/logs").raise_for_status()
