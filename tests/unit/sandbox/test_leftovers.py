"""What an action leaves running ends with it, and with its supervisor."""

import os
import select
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from sandbox_stage import (
    SPARE_USER,
    Stage,
    a_stage,
    as_non_root,
    bubblewrap_missing,
    processes_with,
    wait_until_gone,
)

from harness.sleep_markers import sleep_marker
from slackwater.sandbox.choice import BackendName
from slackwater.sandbox.reports import End
from slackwater.sandbox.supervisor import SandboxSupervisor
from slackwater.sandbox.users import open_user_pool


def disguised(number: int) -> str:
    """A daemon in a session of its own that says it belongs to somebody else."""
    hidden = "env -i SLACKWATER_ENVIRONMENT=x SLACKWATER_CORES=9 setsid sleep"
    return f"({hidden} {number} > /dev/null 2>&1 < /dev/null &)"


def until_there(stage: Stage, marker: str) -> list[int]:
    deadline_s = time.monotonic() + 60.0
    while not (found := processes_with(marker)) and time.monotonic() < deadline_s:
        stage.supervisor.step(0.02)
    return found


def leave_one(backend: BackendName) -> str:
    number = sleep_marker()
    with a_stage(backend) as stage:
        stage.supervisor.open("e")
        ran = stage.sh(f"{disguised(number)}; sleep 0.2")
        assert ran.over.end is End.EXITED, ran
        return str(wait_until_gone(f"sleep {number}"))


def test_a_process_that_says_it_is_anothers_goes_too(stage: Stage) -> None:
    number = sleep_marker()
    ran = stage.sh(f"{disguised(number)}; sleep 0.2")
    assert ran.over.end is End.EXITED
    assert wait_until_gone(f"sleep {number}") == []


@pytest.mark.parametrize("backend", ["process", "bubblewrap"])
def test_without_root_it_goes_too(backend: BackendName) -> None:
    if backend == "bubblewrap" and (why := bubblewrap_missing()) is not None:
        pytest.skip(f"this machine has no working bubblewrap: {why}")
    assert as_non_root(lambda: leave_one(backend)) == "[]"


def leave_one_beside_a_neighbour() -> str:
    number, others = sleep_marker(), sleep_marker()
    with a_stage("process", pinned=True) as stage:
        stage.supervisor.open("e")
        neighbour = stage.start("sleep", str(others))
        stage.sh(f"{disguised(number)}; sleep 0.2")
        left = wait_until_gone(f"sleep {number}")
        is_there = bool(until_there(stage, f"sleep {others}"))
        stage.supervisor.stop(neighbour, "seen")
        stage.until_over(neighbour)
        return f"{left} {is_there} {wait_until_gone(f'sleep {others}')}"


def test_a_neighbour_that_runs_on_is_left_alone() -> None:
    assert as_non_root(leave_one_beside_a_neighbour) == "[] True []"


def test_of_two_that_end_together_both_leave_nothing(stage: Stage) -> None:
    stage.supervisor.open("both")
    number = sleep_marker()
    script = f"{disguised(number)}; cat go"
    made = stage.root / "environments" / "both" / "view" / "go"
    os.mkfifo(made)
    made.chmod(0o666)
    actions = {stage.start("/bin/sh", "-c", script, environment="both") for _ in range(2)}
    assert until_there(stage, f"sleep {number}")
    made_open = os.open(made, os.O_RDWR)
    for _ in range(50):
        stage.supervisor.step(0.02)  # both read
    os.close(made_open)
    deadline_s = time.monotonic() + 60.0
    while actions & set(stage.supervisor.running()) and time.monotonic() < deadline_s:
        stage.supervisor.step(0.1)
    assert wait_until_gone(f"sleep {number}") == []
    stage.supervisor.close_environment("both")


def kill_a_supervisor(backend: BackendName, *, pinned: bool) -> str:
    """What is left of an action's daemon when the supervisor is killed."""
    number = sleep_marker()
    heard, said = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            with a_stage(backend, pinned) as stage:
                stage.supervisor.open("e")
                stage.sh("true")
                stage.start("/bin/sh", "-c", f"{disguised(number)}; sleep {number}")
                until_there(stage, f"sleep {number}")
                os.write(said, str(stage.root).encode())
                signal.pause()
        finally:
            os._exit(1)
    os.close(said)
    assert select.select([heard], [], [], 60.0)[0]
    root = os.read(heard, 4096).decode()
    os.close(heard)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert root, "it failed before it had a folder; an empty path is the current one"
    try:
        if pinned and os.getuid() == 0 and (users := open_user_pool()) is not None:
            users.close()  # who has the users next ends what is left of them
        return str(wait_until_gone(f"sleep {number}") + wait_until_gone(root))
    finally:
        shutil.rmtree(Path(root), ignore_errors=True)


@pytest.mark.skipif(os.getuid() != 0, reason="only root's environments have holders")
def test_a_holder_that_was_left_is_ended_by_the_next_supervisor(stage: Stage) -> None:
    root = stage.root / "elsewhere"
    held = subprocess.Popen(["sleep", "7043"], env={"SLACKWATER_HOLDER": str(root)})
    other = subprocess.Popen(
        ["sleep", "7044"], env={"SLACKWATER_HOLDER": str(root)}, user=SPARE_USER
    )
    SandboxSupervisor(root, stage.platform)
    assert held.wait(60) == -signal.SIGKILL
    assert other.poll() is None
    other.kill()
    other.wait(60)


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("backend", ["process", "bubblewrap"])
def test_a_killed_supervisor_leaves_nothing(backend: BackendName, pinned: bool) -> None:
    if backend == "bubblewrap" and (why := bubblewrap_missing()) is not None:
        pytest.skip(f"this machine has no working bubblewrap: {why}")
    assert kill_a_supervisor(backend, pinned=pinned) == "[]"
    assert as_non_root(lambda: kill_a_supervisor(backend, pinned=pinned)) == "[]"


def test_system_files_can_be_read_by_an_environments_user(stage: Stage) -> None:
    script = "getent passwd root; ls /etc/passwd; echo 1 2 | awk '{ print $2 }'; ls -d /etc/ssl"
    ran = stage.sh(script)
    found = Path("/etc/ssl").is_dir()
    shown = [line for line in ran.stdout.splitlines() if not line.startswith("root:")]
    assert shown == ["/etc/passwd", "2", *(["/etc/ssl"] if found else [])], ran
    assert ran.stdout.startswith("root:")
